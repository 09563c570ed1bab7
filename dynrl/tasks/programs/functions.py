"""The functions that a program may call by name. Arguments and errors are those of Python's functions of that name."""

import ast
from collections.abc import Callable
from typing import Any

from dynrl.tasks.programs.budgets import Meter, Stopped
from dynrl.tasks.programs.operations import binary, update
from dynrl.tasks.programs.values import INTEGERS, Iteration, items, iterable, listed, survey

_ABSENT = object()


def _all(meter: Meter, values: Any, /) -> bool:
    return all(items(meter, values))


def _any(meter: Meter, values: Any, /) -> bool:
    return any(items(meter, values))


def _bool(meter: Meter, value: Any = False, /) -> bool:
    return bool(value)


def _chr(meter: Meter, number: Any, /) -> str:
    character = chr(number)
    if not character.isascii():
        raise Stopped("not_allowed", "a string beyond ASCII")
    return character


def _dict(meter: Meter, source: Any = (), /) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    update(meter, made, source)
    return made


def _divmod(meter: Meter, left: Any, right: Any, /) -> tuple[Any, Any]:
    if type(left) not in INTEGERS or type(right) not in INTEGERS:
        raise TypeError("divmod of other than integers")
    return divmod(left, right)


def _enumerate(meter: Meter, values: Any, /, start: Any = 0) -> Iteration:
    return Iteration(enumerate(iterable(values), start), _stages(values))


def _int(meter: Meter, value: Any = 0, /, base: Any = _ABSENT) -> int:
    if type(value) is str:
        meter.bits(len(value))  # at least a bit for every digit, and Python's own limit stays out of reach
    return meter.integer(int(value) if base is _ABSENT else int(value, base))


def _len(meter: Meter, value: Any, /) -> int:
    return len(value)


def _list(meter: Meter, values: Any = (), /) -> list[Any]:
    return listed(meter, values)


def _max(meter: Meter, *values: Any, default: Any = _ABSENT) -> Any:
    return _extreme(meter, max, values, default)


def _min(meter: Meter, *values: Any, default: Any = _ABSENT) -> Any:
    return _extreme(meter, min, values, default)


def _pow(meter: Meter, base: Any, exponent: Any, modulus: Any = None, /) -> Any:
    if modulus is None:
        return binary(meter, ast.Pow, base, exponent)
    if not {type(base), type(exponent), type(modulus)} <= INTEGERS:
        raise TypeError("pow of other than integers")
    meter.spend(exponent.bit_length())
    return pow(base, exponent, modulus)


def _reversed(meter: Meter, values: Any, /) -> Iteration:
    return Iteration(reversed(values))


def _repr(meter: Meter, value: Any, /) -> str:
    survey(meter, value)
    text = repr(value)
    meter.made(len(text))
    return text


def _sorted(meter: Meter, values: Any, /, *, reverse: Any = False) -> list[Any]:
    found = listed(meter, values)
    sort(meter, found, reverse=reverse)
    return found


def _str(meter: Meter, value: Any = "", /) -> str:
    return value if type(value) is str else _repr(meter, value)


def _sum(meter: Meter, values: Any, /, start: Any = 0) -> Any:
    if type(start) is str:
        raise TypeError("sum of strings")
    total = start
    for item in items(meter, values):
        total = binary(meter, ast.Add, total, item)
    return total


def _tuple(meter: Meter, values: Any = (), /) -> tuple[Any, ...]:
    return tuple(listed(meter, values))


def _zip(meter: Meter, *values: Any) -> Iteration:
    return Iteration(zip(*map(iterable, values), strict=False), max(map(_stages, values), default=1))


def sort(meter: Meter, values: list[Any], *, reverse: Any = False) -> None:
    """Sorts in place. Raises Python's TypeError where items have no order."""
    meter.spend(survey(meter, values) * len(values).bit_length())
    values.sort(reverse=reverse)


def _extreme(meter: Meter, choose: Callable[..., Any], values: tuple[Any, ...], default: Any) -> Any:
    if len(values) == 1:
        values = (listed(meter, values[0]),)
    survey(meter, list(values))
    return choose(*values) if default is _ABSENT else choose(*values, default=default)


def _stages(values: Any) -> int:
    return 1 + values.num_stages if type(values) is Iteration else 1


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": lambda meter, value, /: abs(value),
    "all": _all,
    "any": _any,
    "bool": _bool,
    "chr": _chr,
    "dict": _dict,
    "divmod": _divmod,
    "enumerate": _enumerate,
    "int": _int,
    "len": _len,
    "list": _list,
    "max": _max,
    "min": _min,
    "ord": lambda meter, character, /: ord(character),
    "pow": _pow,
    "range": lambda meter, *bounds: range(*bounds),
    "repr": _repr,
    "reversed": _reversed,
    "sorted": _sorted,
    "str": _str,
    "sum": _sum,
    "tuple": _tuple,
    "zip": _zip,
}
# Those that go through a generator before they return.
CONSUMERS = frozenset({"all", "any", "dict", "list", "max", "min", "sorted", "sum", "tuple"})
