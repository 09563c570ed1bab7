"""Operators, comparisons and subscripts: Python's own, once their operands and the size of the result are known."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from dynrl.tasks.programs.budgets import Meter, Stopped
from dynrl.tasks.programs.values import INTEGERS, SCALARS, SEQUENCES, VIEWS, check_key, items, kind, listed, survey

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CONCATENATED = frozenset({str, list, tuple})


def binary(meter: Meter, op: type[ast.operator], left: Any, right: Any) -> Any:
    """Returns `left op right`. Raises what Python raises, or Stopped."""
    if type(left) in INTEGERS and type(right) in INTEGERS:
        return _of_integers(meter, op, left, right)
    if op is ast.Add and type(left) is type(right) and type(left) in _CONCATENATED:
        meter.made(len(left) + len(right))
        return left + right
    if op is ast.Mult and (_repeats(left, right) or _repeats(right, left)):
        sequence, count = (left, right) if type(right) in INTEGERS else (right, left)
        meter.made(len(sequence) * max(count, 0))
        return sequence * count
    if op is ast.BitOr and type(left) is type(right) is dict:
        meter.made(len(left) + len(right))
        return left | right
    if op is ast.Mod and type(left) is str:
        raise Stopped("not_allowed", "formatting a string with %")
    for value in (left, right):
        if type(value) in VIEWS:  # some are sets to Python
            raise Stopped("not_allowed", f"{op.__name__} of {kind(value)}")
    raise TypeError(f"{op.__name__} of {kind(left)} and {kind(right)}")


def augmented(meter: Meter, op: type[ast.operator], left: Any, right: Any) -> Any:
    """Returns what an augmented assignment assigns: a list or dict itself, changed in place."""
    if type(left) is list and op is ast.Add:
        added = listed(meter, right)
        meter.fits(len(left) + len(added))
        left += added
        return left
    if type(left) is list and op is ast.Mult and type(right) in INTEGERS:
        meter.made(len(left) * max(right, 0))
        left *= right
        return left
    if type(left) is dict and op is ast.BitOr:
        update(meter, left, right)
        return left
    return binary(meter, op, left, right)


def unary(meter: Meter, op: type[ast.unaryop], value: Any) -> Any:
    """Returns `op value`. Raises what Python raises, or Stopped."""
    if op is ast.Not:
        return not value
    if type(value) not in INTEGERS:
        raise TypeError(f"{op.__name__} of {kind(value)}")
    number = int(value)  # the sign of a bool is an integer, and inverting one is deprecated
    return meter.integer(-number if op is ast.USub else ~number if op is ast.Invert else number)


def compare(meter: Meter, op: type[ast.cmpop], left: Any, right: Any) -> bool:
    """Returns `left op right`, a bool. Raises what Python raises, or Stopped."""
    if op is ast.Is or op is ast.IsNot:  # of None, True or False: the reader allows no others
        return (left is right) == (op is ast.Is)
    if op is ast.In or op is ast.NotIn:
        return _contains(meter, right, left) == (op is ast.In)
    for value in (left, right):
        if type(value) not in SCALARS:
            survey(meter, value)
    return _COMPARISONS[op](left, right)


def item_of(meter: Meter, container: Any, key: Any) -> Any:
    """Returns `container[key]`; a slice is Python's own. Raises what Python raises, or Stopped."""
    if type(container) is dict and type(key) is not slice:
        check_key(meter, key)
        return container[key]
    if type(container) not in SEQUENCES:
        raise TypeError(f"{kind(container)} has no items at {kind(key)}")
    found = container[key]
    if type(key) is slice and type(found) is not range:
        meter.spend(len(found))
    return found


def set_item(meter: Meter, container: Any, key: Any, value: Any) -> None:
    """Does `container[key] = value`. Raises what Python raises, or Stopped."""
    if type(container) is dict and type(key) is not slice:
        check_key(meter, key)
        container[key] = value
        meter.fits(len(container))
    elif type(container) is not list:
        raise TypeError(f"items of {kind(container)} cannot be set")
    elif type(key) is slice:
        values = listed(meter, value)
        meter.made(len(container) + len(values))
        container[key] = values
    else:
        container[key] = value


def update(meter: Meter, target: dict[Any, Any], source: Any) -> None:
    """Does `target.update(source)`, of a dict or of pairs. Raises what Python raises, or Stopped."""
    if type(source) is dict:
        meter.spend(len(source))
        target.update(source)
        meter.fits(len(target))
        return
    for pair in items(meter, source):
        both = listed(meter, pair)
        if len(both) != 2:
            raise ValueError(f"a pair of {len(both)}")
        set_item(meter, target, both[0], both[1])


def _repeats(sequence: Any, count: Any) -> bool:
    return type(sequence) in _CONCATENATED and type(count) in INTEGERS


def _of_integers(meter: Meter, op: type[ast.operator], left: int, right: int) -> int:
    if op is ast.Pow:
        if right < 0 and left:
            raise Stopped("not_allowed", "a negative power")
        meter.bits((left.bit_length() - 1) * right)  # no more than the result has
    elif op is ast.LShift and left:
        meter.bits(left.bit_length() + right)
    return meter.integer(_BINARY[op](left, right))


def _contains(meter: Meter, container: Any, item: Any) -> bool:
    if type(container) is range:  # Python would search it for what is no integer
        return type(item) in INTEGERS and item in container
    if type(container) is str:
        meter.spend(len(container))
        return item in container
    if type(container) is dict:
        check_key(meter, item)
        return item in container
    if type(container) in (list, tuple) or type(container) in VIEWS:
        # Comparing costs no more than the smaller of two values.
        size = 1 if type(item) in SCALARS else survey(meter, item)
        meter.spend(size * len(container))
        return item in container
    raise TypeError(f"{kind(container)} does not contain")
