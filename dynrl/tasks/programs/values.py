"""What values there are, and the walks over them that are counted.

Values are Python's own, of exactly these types, so that operations on them are Python's own too. What Python would
recurse over (comparing, showing, hashing) is surveyed first: a value may hold itself, or the same list a thousand
times.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from dynrl.tasks.programs.budgets import MAX_NESTING, Meter, Stopped

INTEGERS = frozenset({int, bool})
SCALARS = frozenset({int, bool, str, type(None)})
SEQUENCES = frozenset({str, list, tuple, range})
VIEWS = frozenset({type({}.keys()), type({}.values()), type({}.items())})
_MAX_KEY_BITS = 60
_MAX_STAGES = 4  # of iterations over iterations, which Python follows by recursion


class Iteration:
    """What `enumerate`, `zip`, `reversed` and a generator give: can only be gone through, once.

    Args:
      source: Python's own iterator.
      num_stages: how many iterations it goes through, itself included.
    """

    __slots__ = ("num_stages", "source")

    def __init__(self, source: Iterator[Any], num_stages: int = 1):
        if num_stages > _MAX_STAGES:
            raise Stopped("nested_too_deep", f"more than {_MAX_STAGES} iterations through one another")
        self.source = source
        self.num_stages = num_stages


def kind(value: Any) -> str:
    """Returns the name of a value's type, for messages."""
    return "iterator" if type(value) is Iteration else type(value).__name__


def iterable(value: Any) -> Iterable[Any]:
    """Returns what Python goes through. Raises TypeError where it cannot be gone through."""
    if type(value) is Iteration:
        return value.source
    if type(value) in SEQUENCES or type(value) is dict or type(value) in VIEWS:
        return value
    raise TypeError(f"{kind(value)} is not iterable")


def items(meter: Meter, value: Any) -> Iterator[Any]:
    """Yields the items of a value, each a step. Raises TypeError at the first one where there can be none."""
    for item in iterable(value):
        meter.spend()
        yield item


def listed(meter: Meter, value: Any) -> list[Any]:
    """Returns the items of a value."""
    found = list(items(meter, value))
    meter.fits(len(found))
    return found


def survey(meter: Meter, value: Any) -> int:
    """Walks a value as far as Python would, and counts each item and character as a step.

    Returns:
      How many there are.

    Raises:
      Stopped: the value is too deep, or holds what has no contents of its own (an iterator, a view of a dict).
    """
    first = meter.steps
    for _ in _walk(meter, value):
        pass
    return meter.steps - first


def check_key(meter: Meter, key: Any) -> None:
    """Surveys what is about to be hashed: a key of a dict.

    Python's hash of an integer is its remainder by 2**61 - 1, so that larger ones, and ranges of them, could be chosen
    to collide, which makes a dict as slow as a list.
    """
    for part in (key,) if type(key) in SCALARS else _walk(meter, key):
        if type(part) is range:
            raise Stopped("not_allowed", "a range as a key")
        if type(part) is int and part.bit_length() > _MAX_KEY_BITS:
            raise Stopped("too_large", f"an integer of more than {_MAX_KEY_BITS} bits as a key")


def _walk(meter: Meter, value: Any) -> Iterator[Any]:
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        meter.spend(1 + len(value) if type(value) is str else 1)
        yield value
        if type(value) in (list, tuple, dict):
            if depth >= MAX_NESTING:
                raise Stopped("nested_too_deep", f"a value of more than {MAX_NESTING} levels")
            stack.extend((item, depth + 1) for item in value)
            if type(value) is dict:
                stack.extend((item, depth + 1) for item in value.values())
        elif type(value) not in SCALARS and type(value) is not range:
            raise Stopped("not_allowed", f"the contents of {kind(value)}")
