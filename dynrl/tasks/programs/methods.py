"""The methods that a program may call, by type and name: Python's own, once the size of the result is known."""

from collections.abc import Callable
from typing import Any

from dynrl.tasks.programs.budgets import Meter
from dynrl.tasks.programs.functions import sort
from dynrl.tasks.programs.operations import set_item, update
from dynrl.tasks.programs.values import INTEGERS, SCALARS, check_key, listed, survey

Method = Callable[..., Any]


def _of_text(method: Callable[..., Any]) -> Method:
    """A method of strings whose result is no longer than the string."""

    def call(meter: Meter, text: str, /, *args: Any) -> Any:
        meter.spend(len(text))
        found = method(text, *args)
        if type(found) is str or type(found) is list:
            meter.made(len(found))
        return found

    return call


def _padded(method: Callable[..., str]) -> Method:
    def call(meter: Meter, text: str, width: Any, /, *fill: Any) -> str:
        if type(width) in INTEGERS:
            meter.made(max(width, len(text)))
        return method(text, width, *fill)

    return call


def _join(meter: Meter, text: str, parts: Any, /) -> str:
    found = listed(meter, parts)
    meter.made(sum(len(part) for part in found if type(part) is str) + len(text) * max(len(found) - 1, 0))
    return text.join(found)


def _replace(meter: Meter, text: str, old: Any, new: Any, /, *count: Any) -> str:
    meter.spend(len(text))
    if type(old) is type(new) is str:
        meter.made(len(text) + text.count(old) * max(len(new) - len(old), 0))
    return text.replace(old, new, *count)


def _append(meter: Meter, values: list[Any], item: Any, /) -> None:
    meter.fits(len(values) + 1)
    values.append(item)


def _extend(meter: Meter, values: list[Any], added: Any, /) -> None:
    found = listed(meter, added)
    meter.fits(len(values) + len(found))
    values.extend(found)


def _insert(meter: Meter, values: list[Any], at: Any, item: Any, /) -> None:
    meter.made(len(values) + 1)
    values.insert(at, item)


def _searching(method: Callable[..., Any]) -> Method:
    """A method that compares an item with those of a list or tuple: none costs more than the item itself."""

    def call(meter: Meter, values: Any, item: Any, /, *bounds: Any) -> Any:
        meter.spend(len(values) * (1 if type(item) in SCALARS else survey(meter, item)))
        return method(values, item, *bounds)

    return call


def _moving(method: Callable[..., Any]) -> Method:
    """A method that moves or copies what is in a container."""

    def call(meter: Meter, values: Any, /, *args: Any) -> Any:
        meter.spend(len(values))
        return method(values, *args)

    return call


def _keyed(method: Callable[..., Any]) -> Method:
    """A method of dicts whose first argument is a key."""

    def call(meter: Meter, values: dict[Any, Any], key: Any, /, *default: Any) -> Any:
        check_key(meter, key)
        return method(values, key, *default)

    return call


def _setdefault(meter: Meter, values: dict[Any, Any], key: Any, default: Any = None, /) -> Any:
    check_key(meter, key)
    if key not in values:
        set_item(meter, values, key, default)
    return values[key]


def _sort(meter: Meter, values: list[Any], /, *, reverse: Any = False) -> None:
    sort(meter, values, reverse=reverse)


def _update(meter: Meter, values: dict[Any, Any], source: Any = (), /) -> None:
    update(meter, values, source)


_TEXT = (
    str.capitalize, str.count, str.endswith, str.find, str.index, str.isalnum, str.isalpha, str.isdigit, str.islower,
    str.isspace, str.isupper, str.lower, str.lstrip, str.removeprefix, str.removesuffix, str.rfind, str.rindex,
    str.rsplit, str.rstrip, str.split, str.splitlines, str.startswith, str.strip, str.swapcase, str.title, str.upper,
)  # fmt: skip

METHODS: dict[type, dict[str, Method]] = {
    str: {
        **{method.__name__: _of_text(method) for method in _TEXT},
        **{method.__name__: _padded(method) for method in (str.center, str.ljust, str.rjust, str.zfill)},
        "join": _join,
        "replace": _replace,
    },
    list: {
        **{method.__name__: _searching(method) for method in (list.count, list.index, list.remove)},
        **{method.__name__: _moving(method) for method in (list.clear, list.copy, list.pop, list.reverse)},
        "append": _append,
        "extend": _extend,
        "insert": _insert,
        "sort": _sort,
    },
    tuple: {method.__name__: _searching(method) for method in (tuple.count, tuple.index)},
    dict: {
        **{method.__name__: _keyed(method) for method in (dict.get, dict.pop)},
        **{method.__name__: _moving(method) for method in (dict.clear, dict.copy, dict.popitem)},
        "items": lambda meter, values, /: values.items(),
        "keys": lambda meter, values, /: values.keys(),
        "setdefault": _setdefault,
        "update": _update,
        "values": lambda meter, values, /: values.values(),
    },
}
