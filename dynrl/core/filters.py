"""Group filters: which groups are worth a place in the training batch.

A filter sees the raw configured metric, never a shaped reward, and says keep or drop for whole groups. Rollouts
that are dead, or whose reward is not finite, are invisible to it.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dynrl.core.checks import check_number, did_you_mean
from dynrl.core.group_stats import GroupStats, array_namespace, has_signal, live_rewards
from dynrl.core.user_filters import MaskFn, check_arguments, refuse_tracers, user_mask_fn
from dynrl.types import Array


@dataclass(frozen=True)
class GroupFilter:
    """Decides for each group whether it is kept.

    Attributes:
      name: what messages call it.
      mask_fn: (stats, rewards_PG, live_PG) -> bool [P]; it gets rewards that are 0 where dead, and a
        live_PG that is False where the reward was not finite.
      on_host: whether it runs in NumPy outside of jit. Its mask is then fed to the jitted program.
    """

    name: str
    mask_fn: MaskFn
    on_host: bool = False

    def __call__(self, stats: GroupStats, rewards_PG: Array, live_PG: Array | None = None) -> Array:
        """Applies the filter.

        Args:
          stats: `group_stats(rewards_PG, live_PG)`.
          rewards_PG: the raw metric; anything where a rollout is dead.
          live_PG: bool, or None for all live.

        Returns:
          bool [P], True to keep. A NumPy array if `on_host`, or if every input is one.

        Raises:
          ValueError: when the rewards' and live's shapes are not the same [P, G].
          TypeError: when a host filter is traced, or a user's filter returns something else than it should.
          RuntimeError: when a user's filter raises; the message names the filter, and the group where it can.
        """
        if self.on_host:
            refuse_tracers(self.name, stats, rewards_PG, live_PG)
            stats, rewards_PG, live_PG = jax.device_get((stats, np.asarray(rewards_PG), live_PG))
            live_PG = None if live_PG is None else np.asarray(live_PG)
        rewards_PG, live_PG = live_rewards(rewards_PG, live_PG)
        keep_P = self.mask_fn(stats, rewards_PG, live_PG)
        return np.asarray(keep_P) if self.on_host else keep_P


def _number(name: str, value: Any, at_least: float | None = None) -> float:
    """Returns a finite argument as a float; raises ValueError, naming it, for anything else."""
    check_number(f"filter argument {name}", value, at_least=at_least)
    return float(value)


def _signal_fn(atol: float, rtol: float) -> Callable[[GroupStats], Array]:
    return functools.partial(has_signal, atol=_number("atol", atol, 0), rtol=_number("rtol", rtol, 0))


def _has_signal(*, atol: float = 1e-6, rtol: float = 1e-6) -> GroupFilter:
    """Keeps groups whose live rewards differ by more than rounding."""
    signal = _signal_fn(atol, rtol)
    return GroupFilter("has_signal", lambda stats, rewards_PG, live_PG: signal(stats))


def _mixed_sign() -> GroupFilter:
    """Keeps groups unless all rewards are above 0 or none is. A singleton (G = 1) is kept, if it is live."""

    def mask_fn(stats: GroupStats, rewards_PG: Array, live_PG: Array) -> Array:
        if rewards_PG.shape[1] == 1:
            return stats.count > 0
        return (stats.positives > 0) & (stats.positives < stats.count)

    return GroupFilter("mixed_sign", mask_fn)


def _accuracy_band(low: float, high: float, *, atol: float = 1e-6, rtol: float = 1e-6) -> GroupFilter:
    """Keeps groups with low < mean < high and signal (constant partial credit lies in the band, and has none)."""
    low, high, signal = _number("low", low), _number("high", high), _signal_fn(atol, rtol)
    if low >= high:
        raise ValueError(f"filter accuracy_band needs low < high, got low={low}, high={high}")

    def mask_fn(stats: GroupStats, rewards_PG: Array, live_PG: Array) -> Array:
        return (stats.mean > np.float32(low)) & (stats.mean < np.float32(high)) & signal(stats)

    return GroupFilter("accuracy_band", mask_fn)


def _min_std(threshold: float, *, atol: float = 1e-6, rtol: float = 1e-6) -> GroupFilter:
    """Keeps groups with std >= threshold and signal."""
    threshold, signal = _number("threshold", threshold, 0), _signal_fn(atol, rtol)
    return GroupFilter(
        "min_std", lambda stats, rewards_PG, live_PG: (stats.std >= np.float32(threshold)) & signal(stats)
    )


def _keep_all() -> GroupFilter:
    """Keeps every group, those without signal or live rollouts too."""

    def mask_fn(stats: GroupStats, rewards_PG: Array, live_PG: Array) -> Array:
        return array_namespace(rewards_PG).ones(rewards_PG.shape[:1], bool)

    return GroupFilter("keep_all", mask_fn)


def _part(spec: str | Mapping[str, Any] | GroupFilter) -> GroupFilter:
    """Makes one filter of a composite."""
    if isinstance(spec, GroupFilter):
        return spec
    if isinstance(spec, str):
        return make_filter(spec)
    if isinstance(spec, Mapping) and isinstance(spec.get("name"), str):
        kwargs = {key: value for key, value in spec.items() if key not in ("name", "kwargs")}
        return make_filter(spec["name"], **kwargs, **spec.get("kwargs", {}))
    raise TypeError(
        "a filter in `filters` must be a name, a mapping such as {'name': 'min_std', 'threshold': 0.1} or "
        f"{{'name': 'min_std', 'kwargs': {{'threshold': 0.1}}}}, or a GroupFilter; got {spec!r}"
    )


def _combine(name: str, combine: Callable[[Array, Array], Array], filters: Sequence[Any]) -> GroupFilter:
    if not isinstance(filters, list | tuple) or not filters:
        raise TypeError(f"filter {name!r} takes `filters`, a non-empty list or tuple; got {filters!r}")
    parts = tuple(_part(spec) for spec in filters)

    def mask_fn(stats: GroupStats, rewards_PG: Array, live_PG: Array) -> Array:
        return functools.reduce(combine, [part(stats, rewards_PG, live_PG) for part in parts])

    full_name = f"{name}({', '.join(part.name for part in parts)})"
    return GroupFilter(full_name, mask_fn, on_host=any(part.on_host for part in parts))


def _all_of(filters: Sequence[Any]) -> GroupFilter:
    """Keeps the groups that every filter keeps."""
    return _combine("all_of", operator.and_, filters)


def _any_of(filters: Sequence[Any]) -> GroupFilter:
    """Keeps the groups that at least one filter keeps."""
    return _combine("any_of", operator.or_, filters)


_BUILT_INS: dict[str, Callable[..., GroupFilter]] = {
    "has_signal": _has_signal,
    "mixed_sign": _mixed_sign,
    "accuracy_band": _accuracy_band,
    "min_std": _min_std,
    "all_of": _all_of,
    "any_of": _any_of,
    "keep_all": _keep_all,
}


def make_filter(name_or_path: str, **kwargs: Any) -> GroupFilter:
    """Makes a filter by name.

    Built-in:

    - `has_signal(atol=1e-6, rtol=1e-6)`: the live rewards differ by more than rounding. DAPO's rule
      (arXiv:2503.14476: 0 < number correct < G), for any reward and with a tolerance.
    - `mixed_sign()`: not all rewards above 0, and not all at or below 0; a singleton (G = 1) is kept.
    - `accuracy_band(low, high)`: low < mean < high in float32, and has_signal.
    - `min_std(threshold)`: std >= threshold in float32, and has_signal.
    - `all_of(filters)`, `any_of(filters)`: `filters` lists names, GroupFilters, or mappings with a `name` and
      arguments, such as `{"name": "min_std", "threshold": 0.1}`. On the host if one of them is.
    - `keep_all()`: everything.

    Yours, as "package.module:function"; the name of the first parameter tells the kind:

    - `fn(stats, rewards_PG, live_PG, **kwargs) -> bool [P]` is traced into the jitted program. Rewards are
      float32 and 0 where `live_PG` is False.
    - `fn(metric_vals: list[float], **kwargs) -> bool` gets the live rollouts' float32 values of one group, on the host.
      A group without live rollouts is dropped without asking.

    Args:
      name_or_path: a built-in's name, or "package.module:function".
      **kwargs: the filter's arguments, checked here against its signature.

    Returns:
      A GroupFilter.

    Raises:
      ValueError: for an unknown name (with near matches) or an argument out of range.
      TypeError: for missing or unknown arguments, or a user's function of neither kind.
    """
    if ":" in name_or_path:
        mask_fn, on_host = user_mask_fn(name_or_path, kwargs)
        return GroupFilter(name_or_path, mask_fn, on_host)
    if name_or_path not in _BUILT_INS:
        raise ValueError(
            f"filter {name_or_path!r} is unknown{did_you_mean(name_or_path, _BUILT_INS)} (built in: "
            f"{', '.join(_BUILT_INS)}; a function of yours is named 'package.module:function')"
        )
    maker = _BUILT_INS[name_or_path]
    check_arguments(name_or_path, maker, (), kwargs)
    return maker(**kwargs)
