/* What the theme leaves out for readers who use a keyboard or a screen reader. */

/* A box that scrolls sideways must be reachable by keyboard, and a box that does not must not be a
   stop on the way: it is in the tab order only while it overflows. */
const BOXES =
  ".md-typeset__scrollwrap, .md-typeset div.arithmatex, .md-typeset .drawing, .md-typeset pre > code";

const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

/* The theme wraps tables once a page is there, and then emits on `document$`; where its script did
   not arrive, the page is there all the same. */
const page = window.document$ ?? { subscribe: (run) => run() };

page.subscribe(() => {
  document.querySelector(".md-search").ariaLabel = "Search";
  observer.disconnect();
  requestAnimationFrame(() =>
    document.querySelectorAll(BOXES).forEach((box) => observer.observe(box)),
  );
});

/* Code that continues other code is copied after it, so that what is pasted runs as it is. */
function program(block) {
  const needed = (block.dataset.continues ?? "").split(" ").filter(Boolean);
  const parts = [...needed.map((id) => document.getElementById(id)), block];
  return parts.map((part) => part.querySelector("code").textContent).join("\n").trimEnd();
}

/* Each copy button comes in a `nav` of its own, and no page has thirty navigations. */
new MutationObserver(() => {
  for (const wrapper of document.querySelectorAll("nav.md-code__nav:not([role])")) {
    wrapper.role = "none";
    const block = wrapper.closest("[data-continues]");
    const button = wrapper.querySelector("[data-clipboard-target]");
    if (block && button) {
      button.dataset.clipboardText = program(block);
      button.title = "Copy with the code that it continues";
    }
  }
}).observe(document.body, { childList: true, subtree: true });
