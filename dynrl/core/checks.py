"""Checks of arguments that people write: near matches for names, and ranges of numbers.

Traced values pass unchecked: what they hold is not known when a program is traced.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'a' or 'b'?", or nothing when no known name is near."""
    near = difflib.get_close_matches(name, list(known))
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def check_choice(what: str, name: str, known: Iterable[str]) -> None:
    """Raises a ValueError that lists the known names, and those that are near, unless `name` is one of them."""
    known = list(known)
    if name not in known:
        raise ValueError(f"{what} {name!r} is unknown; there are {', '.join(known)}{did_you_mean(str(name), known)}")


def check_number(
    what: str, value: Any, *, at_least: float | None = None, above: float | None = None, integer: bool = False
) -> None:
    """Checks a number that a person wrote.

    Args:
      what: what messages call it.
      value: a Python or NumPy number; a JAX array, traced or not, passes unchecked.
      at_least: the smallest value allowed.
      above: the value must be larger than this.
      integer: whether it must be an integer.

    Raises:
      ValueError: when it is no finite number, no integer where one is asked for, or out of range.
    """
    if isinstance(value, jax.Array):
        return
    kinds, noun = (int | np.integer, "an integer") if integer else (int | float | np.number, "a finite number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not np.isfinite(value):
        raise ValueError(f"{what} must be {noun}, got {value!r}")
    if at_least is not None and value < at_least:
        raise ValueError(f"{what} must be at least {at_least}, got {value!r}")
    if above is not None and value <= above:
        raise ValueError(f"{what} must be above {above}, got {value!r}")
