"""The package as it is installed elsewhere: what the wheel holds, and what works with it alone."""

from __future__ import annotations

import copy
import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import nbformat
import pytest
from built_site import DOCS, ROOT
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from lab35_course.fences import examples
from lab35_course.notebooks import chapters, notebook

pytestmark = pytest.mark.slow


def pip(python: Path | str, *words: str) -> str:
    """Run pip quietly, and return what it says where it fails; nothing is the empty string."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout + done.stderr or "pip failed") if done.returncode else ""


def install(python: Path, what: str) -> None:
    """Install with this project's pins; without a network the tests are skipped, but not in CI."""
    told = pip(python, "install", "--constraint", f"{ROOT}/constraints.txt", what)
    if told:
        told = f"{what} cannot be installed here:\n{told}"
        (pytest.fail if os.environ.get("LAB35_REQUIRE_ALL") == "1" else pytest.skip)(told)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: a build leaves folders beside them."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    assert pip(sys.executable, "wheel", *options, str(source)) == ""
    (built,) = folder.glob("*.whl")
    return built


def metadata(wheel: Path) -> Message:
    """Read what a registry would show of the package."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Guards its list of files: modules, weights and the licence; no course, tests or results."""
    package = ROOT / "src" / "lab35"
    expected = {
        path.relative_to(package.parent).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "README.md"
    }
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        weights = archive.read("lab35/assets/model.safetensors")
    folder = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"

    assert expected | {f"{folder}/{name}" for name in about} == names
    assert {"lab35/py.typed", "lab35/assets/SHA256SUMS", "lab35/cli/__init__.py"} < expected
    assert (package / "assets" / "model.safetensors").read_bytes() == weights


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """Guards what a registry shows: a text of its own, whose links need no clone, and its needs."""
    told = metadata(wheel)
    text = told.get_payload()

    assert "text/markdown" == told["Description-Content-Type"]
    assert (ROOT / "src/lab35/README.md").read_text("utf-8").strip() == text.strip()
    assert [] == re.findall(r"\]\((?!https://)[^)]*\)|<img", text)
    assert "MIT" == told["License-Expression"]
    assert "Typing :: Typed" in told.get_all("Classifier")
    needs = [need for need in told.get_all("Requires-Dist") if "extra" not in need]
    names = {re.match(r"[\w-]+", need)[0] for need in needs}
    assert {"torch", "numpy", "tokenizers", "safetensors", "typer", "rich"} == names


@dataclass(frozen=True)
class Elsewhere:
    """An environment that has the wheel alone, and a folder outside the clone."""

    bin: Path
    folder: Path

    def run(self, program: str, *words: str) -> str:
        """Run a program of the environment, and return what it prints."""
        done = subprocess.run(
            [self.bin / program, *words],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Name nothing of this environment or of the user's home."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        home = str(self.folder)
        return kept | {"HOME": home, "XDG_CACHE_HOME": home, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """An empty environment into which the wheel and what it needs were installed."""
    home = tmp_path_factory.mktemp("elsewhere")
    venv.create(home / "venv", with_pip=True)
    (home / "folder").mkdir()
    install(home / "venv" / "bin" / "python", str(wheel))
    yield Elsewhere(home / "venv" / "bin", home / "folder")
    shutil.rmtree(home)  # more than a gigabyte


def test_the_installed_command_writes_a_text(elsewhere: Elsewhere) -> None:
    """Guards `lab35` outside the clone: the same text, and what it says about itself."""
    words = ("generate", "--prompt", "Sherlock Holmes", "--seed", "1337", "--max-new-tokens", "20")
    here = subprocess.run(
        [sys.executable, "-m", "lab35", *words], capture_output=True, text=True, check=True
    )
    assert len(here.stdout) > 20
    assert here.stdout == elsewhere.run("lab35", *words)
    assert "875,264" in elsewhere.run("lab35", "info")
    where = elsewhere.run("python", "-c", "import lab35; print(lab35.__file__)")
    assert Path(where.strip()).is_relative_to(elsewhere.bin.parent)


def test_the_course_is_not_installed(elsewhere: Elsewhere) -> None:
    """Guards the checks here: what works there works without the course's machinery."""
    found = "import importlib.util as u; print(u.find_spec('lab35_course'), u.find_spec('pytest'))"
    assert "None None\n" == elsewhere.run("python", "-c", found)


@pytest.mark.parametrize("source", ["README.md", "src/lab35/README.md", "src/lab35/__init__.py"])
def test_the_first_fence_runs_there(source: str, elsewhere: Elsewhere) -> None:
    """Guards what a reader tries first: the code of both READMEs and of the reference."""
    first = examples(ROOT / source)[0]
    assert "load_pretrained" in first.fence.code
    assert first.expected == elsewhere.run("python", "-c", first.fence.code)


# --- The notebooks, with the wheel alone ---------------------------------------------------------


@pytest.fixture(scope="module")
def jupyter(elsewhere: Elsewhere) -> Iterator[Elsewhere]:
    """The same environment, with the kernel that Jupyter runs notebooks in."""
    install(elsewhere.bin / "python", "ipykernel")
    kernel = elsewhere.folder / "kernels" / "elsewhere"
    kernel.mkdir(parents=True)
    words = [str(elsewhere.bin / "python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": words, "display_name": "The wheel alone", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(elsewhere.folder))  # where kernels are looked for
        patch.setenv("JUPYTER_RUNTIME_DIR", str(elsewhere.folder / "runtime"))
        yield elsewhere


def run(book: nbformat.NotebookNode, jupyter: Elsewhere) -> list[str]:
    """Run a notebook as it is, and say what differs from the outputs that are stored in it.

    Args:
        book: The notebook; it is left as it is.
        jupyter: Where.

    Returns:
        A line for each cell that prints something else, shows a value, or ends the run.
    """
    folder = jupyter.folder / "run"
    folder.mkdir()
    ran = copy.deepcopy(book)
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(ran, kernel_name="elsewhere", timeout=600, resources=where)
    try:
        client.execute(env=jupyter.environment() | {"IPYTHONDIR": str(jupyter.folder)})
    except CellExecutionError as error:
        return [re.sub(r"\x1b\[[\d;]*m", "", str(error))]  # without its colours
    finally:
        shutil.rmtree(folder)
    different = []
    for stored, made in zip(book.cells, ran.cells, strict=True):
        if stored.cell_type == "code":
            printed = "".join(o.text for o in made.outputs if o.get("name") == "stdout")
            expected = "".join(o.text for o in stored.outputs)
            shown = [o for o in made.outputs if o.output_type != "stream"]
            if shown or printed != expected:
                different.append(f"{stored.id}: {expected!r} on the page, {printed!r}, {shown}")
    return different


@pytest.mark.parametrize("page", chapters(DOCS), ids=lambda page: page.stem)
def test_a_notebook_runs_with_the_wheel_alone(page: Path, jupyter: Elsewhere) -> None:
    """Guards the download: every cell runs in order, and prints what the page says."""
    assert [] == run(notebook(page), jupyter)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print(2)", "b: '1\\n' on the page, '2\\n'"),
        ("print(1)\n1 + 1", "'text/plain': '2'"),
        ("raise KeyError('broken')", "KeyError: 'broken'"),
        ("import lab35_course", "No module named 'lab35_course'"),
    ],
)
def test_a_broken_notebook_is_found(code: str, told: str, jupyter: Elsewhere) -> None:
    """Guards the run above: another output, a value, an error, a module that is not there."""
    stored = [nbformat.v4.new_output("stream", name="stdout", text="1\n")]
    cells = [
        nbformat.v4.new_code_cell(c, id=i, outputs=stored)
        for i, c in zip("ab", ("print(1)", code), strict=True)
    ]
    (found,) = run(nbformat.v4.new_notebook(cells=cells, nbformat_minor=5), jupyter)

    assert told in found
