"""Text that a result brings, made safe for a Markdown page: the one place where it is escaped.

What a model wrote, what a machine calls itself and what a caller typed may hold any character. On a
page it must show as it is, and not as emphasis, as a formula or as an element of HTML. Whoever
builds Markdown on purpose says so, by the type `Markdown`.

```{.python title="Stars that stay stars"}
from lab35_course.plain import code, plain

assert plain("a*b* <img>") == "a&#42;b&#42; &lt;img&gt;"
assert code("a*b*") == "`a*b*`"
```
"""

from __future__ import annotations

import re

__all__ = ["Markdown", "code", "outcome", "plain"]

_ACTIVE = re.compile(r"[$&*<>\[\\\]^_`{|}~]")
"""Characters that Markdown, its extensions or HTML may read as something other than themselves."""

_CONTROL = re.compile(r"[\0-\x08\x0e-\x1f\x7f-\x9f]|[\ud800-\udfff]")


class Markdown(str):
    """Text that is Markdown on purpose; any other text is shown as it is."""

    __slots__ = ()


def plain(text: str) -> Markdown:
    """Write text so that a page shows exactly this text.

    An active character becomes its entity, which nothing reads again. White space becomes
    one space, as a browser shows it, and a control character U+FFFD.

    Args:
        text: Any text. What is `Markdown` already is returned as it is.

    Returns:
        Markdown of one line.
    """
    if isinstance(text, Markdown):
        return text
    return Markdown(_ACTIVE.sub(_entity, _one_line(text)))


def _entity(found: re.Match[str]) -> str:
    return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(found[0], f"&#{ord(found[0])};")


def code(text: str) -> Markdown:
    """Write text as a code span.

    Args:
        text: Any text, with at least one visible character.

    Returns:
        Markdown of one line.
    """
    text = _one_line(text).strip()
    # A highlighter reads a language from the beginning of a span, and a backtick may end it.
    if "`" in text or text.startswith(("#!", ":::")) or text.endswith("\\"):
        return plain(text)
    return Markdown(f"`{text}`")


def outcome(text: str) -> Markdown:
    """Write what came of a call: a count as it is, and the name of an exception as code.

    Args:
        text: Digits, or a name.

    Returns:
        Markdown of one line.
    """
    return plain(text) if text.isdigit() else code(text)


def _one_line(text: str) -> str:
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", re.sub(r"\s+", " ", text))
