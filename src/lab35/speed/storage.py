"""Where compiled steps are kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

ONE_AT_A_TIME = threading.Lock()
"""Held while something is compiled: neither torch nor numba's settings stand two threads there."""


def cache_folder() -> Path:
    """Say where compiled steps are kept: `$XDG_CACHE_HOME/lab35`, or `~/.cache/lab35`.

    Returns:
        The folder, which need not exist. Deleting it costs one compilation.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # By the XDG specification a relative path is to be ignored.
    return (root if root.is_absolute() else Path.home() / ".cache") / "lab35"
