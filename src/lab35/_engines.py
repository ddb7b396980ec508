"""The names of the engines, apart from the engines: the command line knows them without torch."""

from __future__ import annotations

from typing import Literal

EngineName = Literal["eager", "lean", "compiled", "numba"]
"""What `generate` can run its decode steps with; `"eager"` is the model itself."""

BATCH_ENGINES: tuple[EngineName, ...] = ("eager", "lean", "numba")
"""Those that write several texts at once, and know of padding."""
