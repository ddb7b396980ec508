"""Where compiled steps are kept, and when what lies there is trusted.

Machine code runs with the rights of whoever loads it. So it is kept in a folder that nobody else
can write to, beside the digests of its files; whatever is not as it was written is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

if os.name == "posix":
    import fcntl

Step = TypeVar("Step")


class Unavailable(RuntimeError):
    """An engine cannot be had on this machine; the message is the cause, in one line."""


ONE_AT_A_TIME = threading.RLock()
"""Held while something is compiled: neither torch nor numba's settings stand two threads there."""

DIGESTS = "SHA256SUMS"
"""The file with the digests of the others, in the format of `sha256sum`."""

_WORK = "work-"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """Say where compiled steps are kept: `$XDG_CACHE_HOME/lab35`, or `~/.cache/lab35`.

    Returns:
        The folder, which need not exist. Deleting it costs one compilation.

    Raises:
        RuntimeError: If there is neither that variable nor a home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # by the XDG specification such a path is to be ignored
        root = Path.home() / ".cache"
    if not root.is_absolute():
        raise RuntimeError(f"HOME must be an absolute path, got {str(Path.home())!r}")
    return root / "lab35"


def kept(
    name: str | None, make: Callable[[Path], None], load: Callable[[Path], Step], waiting: object
) -> Step:
    """Load what an earlier process made, or make it and keep it.

    Only what is whole is loaded, from a copy of its own. What is damaged or fails to load is made
    anew. Where nothing can be kept, because there is no home or no room, all happens in a temporary
    folder.

    Args:
        name: The folder that it is kept in, named after all that it depends on; None keeps nothing.
        make: Fills an empty folder.
        load: Loads what `make` has left, holds it against an answer, and raises if it is wrong.
        waiting: A context to be in while it is made.

    Returns:
        What `load` returns.

    Raises:
        Unavailable: If others can write to the folder.
        OSError: If there is no place to work in at all.
    """
    home = None if name is None else _home()
    entry = None if home is None else home / name
    with _workshop(home) as work:
        copy, fresh = work / "copy", work / "fresh"
        if entry is not None and os.path.lexists(entry):
            if _copied(entry, copy):
                # It fails where it depends on something that its name does not tell.
                with contextlib.suppress(Exception):
                    return load(copy)
            _delete(entry)
        fresh.mkdir()
        with waiting:
            make(fresh)
            step = load(fresh)
        if entry is not None:
            _publish(fresh, entry, home)
        return step


# --- the folder ----------------------------------------------------------------------------------


def _home() -> Path | None:
    """Make the private folder; None where that is impossible.

    Raises:
        Unavailable: If someone else owns it, or can write to it or replace it.
    """
    try:
        folder = cache_folder()
    except RuntimeError:  # no home
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        reason = _unsafe(folder) or _exposed(folder)
        if reason:
            raise Unavailable(f"no code is loaded from {folder}: {reason}")
        folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):  # is there leave to write, and room?
            pass
    except OSError:
        return None
    return folder


def _unsafe(folder: Path) -> str | None:
    """Say how somebody else could put a file into a folder."""
    if os.name != "posix":
        return "who may write there cannot be told on this system"
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        return "it is a link or no folder"
    if about.st_uid != os.geteuid():
        return f"it belongs to user {about.st_uid}"
    if about.st_mode & _OTHERS_WRITE:
        return f"others may write there; delete it, or what is in it and chmod go-w {folder}"
    return None


def _exposed(folder: Path) -> str | None:
    """Say how somebody else could put another folder in its place: through one above it."""
    reached = None
    for above in {*folder.absolute().parents} | {*folder.resolve().parents}:
        about = above.lstat()
        if about.st_uid not in (0, os.geteuid()):
            return f"{above} belongs to user {about.st_uid}"
        shared = not stat.S_ISLNK(about.st_mode) and not about.st_mode & stat.S_ISVTX
        if shared and about.st_mode & stat.S_IWOTH:
            return f"others may write to {above}; chmod go-w {above}"
        if shared and about.st_mode & stat.S_IWGRP:
            reached = above
    # A group may write where it cannot get to: below a home that is closed.
    closed = (above.lstat() for above in (reached.parents if reached else ()))
    if reached and not any(a.st_uid == os.geteuid() and not a.st_mode & 0o077 for a in closed):
        return f"a group may write to {reached}; chmod g-w {reached}"
    return None


# --- what is in it -------------------------------------------------------------------------------


def _copied(entry: Path, copy: Path) -> bool:
    """Copy what is kept, and say whether it is ours, and is as it was written."""
    try:
        for path in (entry, *entry.rglob("*")):
            about = path.lstat()
            plain = stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)
            if not plain or about.st_uid != os.geteuid() or about.st_mode & _OTHERS_WRITE:
                return False
        shutil.copytree(entry, copy)
        lines = (copy / DIGESTS).read_text(encoding="utf-8").splitlines()
        (copy / DIGESTS).unlink()
        return bool(lines) and lines == _digests(copy)
    except (OSError, ValueError, shutil.Error):
        return False


def _delete(entry: Path) -> None:
    """Delete a file, a link or a folder, as far as that can be done."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()


def _digests(folder: Path) -> list[str]:
    """List the digest and the name of every file below a folder."""
    return [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}"
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    ]


def _publish(fresh: Path, entry: Path, home: Path) -> None:
    """Move what was made to where it is kept, whole or not at all; failing costs nothing now."""
    lines = _digests(fresh)
    if not lines:
        return
    with contextlib.suppress(OSError, shutil.Error), _own_folder(home) as stage:
        shutil.copytree(fresh, stage / "new")  # from a temporary folder, elsewhere, a rename fails
        (stage / "new" / DIGESTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
        if os.path.lexists(entry):
            entry.rename(stage / "old")
        (stage / "new").rename(entry)


# --- the workshop --------------------------------------------------------------------------------


@contextlib.contextmanager
def _workshop(home: Path | None) -> Iterator[Path]:
    """Give a private folder to compile in, which is gone afterwards, however that ends.

    All that the compilers store goes there too: by itself torch would trust a folder with a name
    that is known, where everybody may write. These variables are the whole process's meanwhile.
    """
    with contextlib.suppress(OSError):
        tempfile.gettempdir()  # remembered from here on, so that it is never the workshop
    names = ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ[name] for name in names if name in os.environ}
    with _cleaning_up():
        try:
            with _own_folder(*_places(home)) as work:
                os.environ |= dict(zip(names, map(str, (work, work / "inductor")), strict=True))
                yield work
        finally:  # after the folder is gone: threads of torch may still ask where to store
            for name in names:
                os.environ.pop(name, None)
            os.environ |= before


def _places(home: Path | None) -> Iterator[Path]:
    """List folders to work in, best first; compilers cannot do with a blank in a path."""
    if home and shlex.quote(str(home)) == str(home):
        yield home
    for place in dict.fromkeys((tempfile.tempdir, "/tmp", "/var/tmp")):
        if place and shlex.quote(place) == place and not _exposed(Path(place) / _WORK):
            yield Path(place)


@contextlib.contextmanager
def _own_folder(*places: Path) -> Iterator[Path]:
    """Make a folder in the first place that allows it, and delete it in the end."""
    error: OSError = FileNotFoundError("there is no folder to work in")
    for place in places:
        try:
            folder, lock = _locked_folder(place)
            break
        except OSError as failed:
            error = failed
    else:
        raise error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked_folder(place: Path) -> tuple[Path, int]:
    """Make a folder that is locked as long as its process lives, and delete those that are not.

    A process that is killed leaves its folder behind, and its lock goes with it.
    """
    turn = _lock(place) if place.stat().st_mode & 0o777 == 0o700 else None  # ours alone
    try:  # nobody else is between the making and the locking meanwhile
        for left in place.glob(f"{_WORK}*") if turn is not None else ():
            with contextlib.suppress(OSError):
                lock = _lock(left, wait=False)
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        folder = Path(tempfile.mkdtemp(prefix=_WORK, dir=place))
        return folder, _lock(folder)
    finally:
        if turn is not None:
            os.close(turn)


def _lock(folder: Path, *, wait: bool = True) -> int:
    """Lock a folder, and return the descriptor that unlocks it when it is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Ended(BaseException):
    """A signal has asked the process to end; no `except Exception` may stop it."""


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let what is inside clean up before the process ends by SIGTERM or SIGHUP.

    By default these end a process at once. Who has a handler of their own keeps it.
    """
    ours: list[int] = []
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise _Ended

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        for number in received:
            signal.raise_signal(number)


# --- names ---------------------------------------------------------------------------------------

INSTRUCTIONS = ("flags", "Features", "features", "isa", "cpu")
"""What `/proc/cpuinfo` calls them: x86, ARM, s390x, RISC-V, and POWER by the name alone."""
IDENTITY = (
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
    *("uarch", "mvendorid", "marchid", "mimpid", "machine"),
)
"""What it tells about the processor; the rest differs from core to core and moment to moment."""


def name_of(kind: str, *told: object) -> str | None:
    """Name what is kept after all that it depends on.

    Args:
        kind: How the name begins.
        *told: What it depends on beside this processor and platform, as JSON can hold it.

    Returns:
        The name; None where nothing is known about the processor, so that nothing may be shared.
    """
    known = processor()
    if known is None:
        return None
    text = json.dumps([platform.platform(), known, *told], sort_keys=True, default=str)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Tell apart processors whose instructions differ: a compiler uses all that it finds.

    Args:
        cpuinfo: What Linux tells about them.

    Returns:
        Lines of text; None where the instructions are not known.
    """
    if platform.system() == "Darwin":
        words = ("sysctl", "-n", "machdep.cpu.brand_string")
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            brand = subprocess.run(words, capture_output=True, text=True, check=True, timeout=9)
            return brand.stdout.strip() or None
        return None
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    fields = [(name.strip(), value.strip()) for name, _, value in (x.partition(":") for x in lines)]
    if not any(name in INSTRUCTIONS and value for name, value in fields):
        return None
    told = {f"{name}: {value}" for name, value in fields if name in INSTRUCTIONS + IDENTITY}
    return "\n".join(sorted(told))


def code_of(*functions: Callable) -> list[object]:
    """Tell functions apart by what they do, also where their source is not at hand.

    Args:
        *functions: Functions of Python.

    Returns:
        Their instructions, names and constants, as JSON can hold them.
    """

    def plain(code: CodeType) -> list[object]:
        inner = [plain(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
        return [code.co_code.hex(), code.co_names, code.co_varnames, inner]

    return [plain(function.__code__) for function in functions]


def cause(error: BaseException) -> str:
    """Tell in one line why something failed.

    Args:
        error: What was raised. A compiler's output may follow in its message.

    Returns:
        Its type, and the line of its message that says most.
    """
    if isinstance(error, Unavailable):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    pattern = re.compile(r"\b(fatal )?error: |No space left|File size limit|File too large")
    told = next(filter(pattern.search, lines), lines[0] if lines else "")
    return f"{type(error).__name__}: {told[:300]}" if told else type(error).__name__
