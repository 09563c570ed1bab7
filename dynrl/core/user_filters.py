"""Filters that users write: finding the function, checking its signature, its results and its errors.

A function is named by "package.module:function" and comes in two kinds, told apart by its first parameter:

    fn(stats, rewards_PG, live_PG, **kwargs) -> bool [P]     vectorised, traced into the jitted program
    fn(metric_vals: list[float], **kwargs) -> bool           per group, on the host
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from dynrl.core.checks import did_you_mean
from dynrl.core.group_stats import GroupStats
from dynrl.types import Array

MaskFn = Callable[[GroupStats, Array, Array], Array]  # (stats, rewards_PG, live_PG) -> bool [P]

SIGNATURES = (
    "    def my_filter(stats, rewards_PG, live_PG, **kwargs): ...     # vectorised: returns bool [P]\n"
    "    def my_filter(metric_vals: list[float], **kwargs): ...       # one group's live values: returns a bool"
)


def check_arguments(name: str, function: Callable[..., Any], positional: tuple[str, ...], kwargs: dict) -> None:
    """Raises a TypeError, naming the filter, unless `function(*positional, **kwargs)` fits its signature."""
    signature = inspect.signature(function)
    try:
        signature.bind(*positional, **kwargs)
    except TypeError as error:
        hints = [did_you_mean(key, signature.parameters) for key in kwargs if key not in signature.parameters]
        raise TypeError(f"filter {name!r} takes {signature}: {error}{''.join(hints)}") from None


def load_function(path: str) -> Callable[..., Any]:
    """Imports the function that "package.module:function" names.

    Args:
      path: the module's dotted name, a colon, and the name of something callable in it.

    Returns:
      The callable.

    Raises:
      ValueError: when there is no such module or no such name in it, or the path is malformed.
      TypeError: when the name is not callable.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"filter {path!r} is not of the form 'package.module:function'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise ValueError(f"filter {path!r}: there is no module {error.name!r}") from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module))
        raise ValueError(f"filter {path!r}: module {module_name!r} has no {attribute!r}{hint}")
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"filter {path!r} is a {type(function).__name__}, not a function. Write one of\n{SIGNATURES}")
    return function


def user_mask_fn(path: str, kwargs: dict[str, Any]) -> tuple[MaskFn, bool]:
    """Makes the mask function of a user's filter.

    Args:
      path: "package.module:function".
      kwargs: passed on to every call.

    Returns:
      (mask function, whether it runs on the host).

    Raises:
      ValueError: when the path names nothing.
      TypeError: when the signature is neither of the two, or does not take `kwargs`.
    """
    function = load_function(path)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins have no signature
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = parameters[0].name if parameters and parameters[0].kind in by_position else None
    if first == "stats" and sum(p.kind in by_position for p in parameters) >= 3:
        check_arguments(path, function, ("stats", "rewards_PG", "live_PG"), kwargs)
        return functools.partial(_vectorised, path, function, kwargs), False
    if first == "metric_vals":
        check_arguments(path, function, ("metric_vals",), kwargs)
        return functools.partial(_per_group, path, function, kwargs), True
    found = f"({', '.join(p.name for p in parameters)})"
    raise TypeError(f"filter {path!r} has the parameters {found}, which is neither kind. Write one of\n{SIGNATURES}")


def refuse_tracers(name: str, *trees: Any) -> None:
    """Raises a TypeError if a host filter is being traced."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees)):
        raise TypeError(
            f"filter {name!r} runs on the host and cannot be traced (jit, vmap, ...): call it outside with concrete "
            "arrays and pass its mask into the jitted function, or write it vectorised:\n"
            "    def my_filter(stats, rewards_PG, live_PG, **kwargs): ...     # returns bool [P]"
        )


def _vectorised(
    path: str, function: Callable[..., Any], kwargs: dict, stats: GroupStats, rewards_PG: Array, live_PG: Array
) -> Array:
    try:
        keep_P = function(stats, rewards_PG, live_PG, **kwargs)
    except Exception as error:
        raise RuntimeError(f"filter {path!r} raised {type(error).__name__}: {error}") from error
    shape = rewards_PG.shape[:1]
    if not isinstance(keep_P, np.ndarray | jax.Array) or keep_P.dtype != jnp.bool_ or keep_P.shape != shape:
        if isinstance(keep_P, np.ndarray | jax.Array):
            found = f"{keep_P.dtype}{list(keep_P.shape)}"
        else:
            found = f"a {type(keep_P).__name__}"
        raise TypeError(f"filter {path!r} must return a bool array of shape {list(shape)}, got {found}")
    return keep_P


def _per_group(
    path: str,
    function: Callable[..., Any],
    kwargs: dict,
    stats: GroupStats,
    rewards_PG: np.ndarray,
    live_PG: np.ndarray,
) -> np.ndarray:
    del stats
    keep_P = np.zeros(rewards_PG.shape[0], bool)
    for group, (rewards_G, live_G) in enumerate(zip(rewards_PG, live_PG, strict=True)):
        metric_vals = rewards_G[live_G].tolist()
        if not metric_vals:
            continue  # nothing to judge and nothing to train on
        try:
            keep = function(metric_vals, **kwargs)
        except Exception as error:
            raise RuntimeError(f"filter {path!r} raised {type(error).__name__} in group {group}: {error}") from error
        if not isinstance(keep, bool | np.bool_):
            raise TypeError(f"filter {path!r} must return a bool, got {type(keep).__name__} {keep!r} in group {group}")
        keep_P[group] = keep
    return keep_P
