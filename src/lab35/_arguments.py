"""What counts as an integer, a number and a generator, wherever the package takes one.

Settings come from command lines, arrays and configuration files. So numpy's numbers and tensors of
one element are as good as Python's own, and what is no number is refused at the call, by name.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def integer(
    name: str,
    value: object,
    least: int | None = None,
    most: int | None = None,
    *,
    allowed: str | None = None,
) -> int:
    """Take an integer of any type.

    Args:
        name: The argument, for the message.
        value: What was given. `True` is no count, and 3.0 is no integer.
        least: The smallest value allowed.
        most: The largest one; needs `least`.
        allowed: What to say is allowed, where that is not the range alone.

    Returns:
        A Python integer.

    Raises:
        ValueError: If it is none, or out of range.
    """
    kind, place = "an integer", ""
    if most is not None:
        kind, place = f"an integer in [{least}, {most}]", f"lie in [{least}, {most}]"
    elif least is not None:
        kind, place = f"an integer of at least {least}", f"be at least {least}"
    try:
        if type(value) is not int and _is_bool(value):
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be {allowed or kind}, got {value!r}") from None
    if least is not None and not (least <= found and (most is None or found <= most)):
        place = place if allowed is None else f"be {allowed}"
        raise ValueError(f"{name} must {place}, got {found}")
    return found


def number(name: str, value: object, allowed: str) -> float:
    """Take a real number of any type.

    Args:
        name: The argument, for the message.
        value: What was given. A string is no number, and neither is `True`.
        allowed: The range that the caller goes on to check, in words.

    Returns:
        A Python float, which may be infinite or NaN.

    Raises:
        ValueError: If it is no number.
    """
    if type(value) is float:
        return value
    try:
        if isinstance(value, str | bytes | bytearray | complex) or _is_bool(value):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond all floats
        return float("inf") if value > 0 else float("-inf")  # type: ignore[operator]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{name} must be a number, {allowed}, got {value!r}") from None


def check_generator(name: str, value: object, device: torch.device) -> None:
    """Refuse what cannot draw beside the logits.

    Args:
        name: The argument, for the message.
        value: A generator or None.
        device: Where it has to draw.

    Raises:
        ValueError: If it is neither, or draws elsewhere.
    """
    if value is None:
        return
    import torch  # here, since integers and numbers are checked where it is not loaded

    if not isinstance(value, torch.Generator):
        raise ValueError(f"{name} must be None or a torch.Generator, got {value!r}")
    if value.device.type != device.type:
        raise ValueError(f"{name} must draw on {device}, where the logits are, got {value.device}")


def _is_bool(value: object) -> bool:
    """Tell truth values: Python's, numpy's and torch's."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
