"""Statistics of a group's live rewards, and the one definition of "no signal".

Everything is centred on the group's smallest live reward before it is summed, so rewards with a large common
offset lose nothing: equal rewards have a deviation of exactly 0, where a naive float32 mean of eight 0.1 has not.

`group_stats` and `has_signal` follow their inputs: NumPy arrays give NumPy arrays, so that code on the host does
not compile; with anything else among the inputs they are JAX functions. The two agree but for the last bits.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.types import Array

# Above this magnitude a sum of squares could overflow float32, with up to 2**26 of them; such groups are computed in
# units of 2**80, which is exact.
_LARGE = 2.0**50
_SHRINK = 2.0**-80


class GroupStats(NamedTuple):
    """What a group's live rewards look like; every field has shape [P].

    A group without live rollouts has 0 everywhere.
    """

    count: Array  # int32: live rollouts
    positives: Array  # int32: live rollouts with a reward above 0
    mean: Array  # float32
    std: Array  # float32, with the ddof asked for; 0 where count <= ddof
    min: Array  # float32
    max: Array  # float32
    spread: Array  # float32: max - min


AxisName = str | tuple[str, ...] | None


class Centred(NamedTuple):
    """Rewards about their group's mean, in units of 1 / scale_P."""

    deviation_PG: Array  # float32: (reward - mean) * scale; 0 where dead
    std_P: Array  # float32: std * scale
    scale_P: Array  # float32: 1, or a small power of two in groups of huge rewards


def array_namespace(*arrays: Array | None) -> ModuleType:
    """Returns numpy when every array is NumPy's, else jax.numpy. None counts for neither."""
    return np if all(isinstance(a, np.ndarray) for a in arrays if a is not None) else jnp


def live_rewards(rewards_PG: Array, live_PG: Array | None) -> tuple[Array, Array]:
    """Applies the rule for dead rollouts: not live, or a reward that is not finite in float32.

    Args:
      rewards_PG: numbers; anything where a rollout is dead.
      live_PG: bool, or None for all live.

    Returns:
      (rewards_PG, live_PG): float32 with 0 where dead, and bool.

    Raises:
      ValueError: at trace time, when the shapes are not the same [P, G].
    """
    xp = array_namespace(rewards_PG, live_PG)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, so dead
        rewards_PG = xp.asarray(rewards_PG).astype(xp.float32)
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG must have the axes [P, G], got shape {rewards_PG.shape}")
    counted_PG = xp.isfinite(rewards_PG)
    if live_PG is not None:
        if live_PG.shape != rewards_PG.shape:
            raise ValueError(f"live_PG has shape {live_PG.shape}, rewards_PG has {rewards_PG.shape}")
        counted_PG = counted_PG & live_PG.astype(bool)
    return xp.where(counted_PG, rewards_PG, xp.zeros_like(rewards_PG)), counted_PG


def across(reduce: Callable[..., Array], x: Array, axis_name: AxisName) -> Array:
    """Applies a collective (psum, pmin, pmax) over mesh axes, if any are named; pmin and pmax have no gradient."""
    if axis_name is None:
        return x
    return reduce(x if reduce is jax.lax.psum else jax.lax.stop_gradient(x), axis_name)


def centred_stats(
    rewards_PG: Array, live_PG: Array | None, ddof: int, axis_name: AxisName = None
) -> tuple[GroupStats, Centred]:
    """Computes the statistics together with the deviations they came from.

    The deviations keep what `rewards_PG - mean` loses: at an offset of 1e6 the float32 mean is 0.03 off.

    Args:
      rewards_PG: numbers; anything where a rollout is dead.
      live_PG: bool, or None for all live.
      ddof: subtracted from the count in the variance's denominator.
      axis_name: mesh axes that the rollouts of every group are spread over, under pmap or shard_map.

    Returns:
      (stats, centred).

    Raises:
      ValueError: at trace time, when the shapes are not the same [P, G].
    """
    rewards_PG, counted_PG = live_rewards(rewards_PG, live_PG)
    xp = array_namespace(rewards_PG, counted_PG)
    psum, pmin, pmax = jax.lax.psum, jax.lax.pmin, jax.lax.pmax
    count_P = across(psum, counted_PG.sum(axis=1, dtype=np.int32), axis_name)
    zero_P = xp.zeros(count_P.shape, xp.float32)
    low_P = xp.where(counted_PG, rewards_PG, np.float32(np.inf)).min(axis=1, initial=np.inf)
    high_P = xp.where(counted_PG, rewards_PG, np.float32(-np.inf)).max(axis=1, initial=-np.inf)
    low_P, high_P = across(pmin, low_P, axis_name), across(pmax, high_P, axis_name)
    low_P, high_P = xp.where(count_P > 0, low_P, zero_P), xp.where(count_P > 0, high_P, zero_P)
    large_P = xp.maximum(xp.abs(low_P), xp.abs(high_P)) > _LARGE
    scale_P = xp.where(large_P, np.float32(_SHRINK), np.float32(1))

    above_low_PG = xp.where(counted_PG, rewards_PG * scale_P[:, None] - (low_P * scale_P)[:, None], zero_P[:, None])
    centre_P = across(psum, above_low_PG.sum(axis=1), axis_name) / xp.maximum(count_P, 1).astype(xp.float32)
    deviation_PG = xp.where(counted_PG, above_low_PG - centre_P[:, None], zero_P[:, None])
    std_P = root_mean(across(psum, (deviation_PG * deviation_PG).sum(axis=1), axis_name), count_P, ddof)
    with np.errstate(over="ignore"):  # beyond float32 a spread or std is infinite, which is signal
        stats = GroupStats(
            count=count_P,
            positives=across(psum, (counted_PG & (rewards_PG > 0)).sum(axis=1, dtype=np.int32), axis_name),
            mean=(low_P * scale_P + centre_P) / scale_P,
            std=std_P / scale_P,
            min=low_P,
            max=high_P,
            spread=high_P - low_P,
        )
    return stats, Centred(deviation_PG, std_P, scale_P)


def root_mean(squares: Array, count: Array, ddof: int) -> Array:
    """Returns sqrt(squares / (count - ddof)), and 0 with a gradient of 0 where the count is too low or squares 0."""
    xp = array_namespace(squares, count)
    zero = xp.zeros(count.shape, xp.float32)
    variance = xp.where(count > ddof, squares / xp.maximum(count - ddof, 1).astype(xp.float32), zero)
    varied = variance > 0  # the square root's gradient is infinite at 0
    return xp.where(varied, xp.sqrt(xp.where(varied, variance, np.float32(1))), zero)


def group_stats(rewards_PG: Array, live_PG: Array | None = None, *, ddof: int = 1) -> GroupStats:
    """Computes the statistics of each group's live rewards.

    Args:
      rewards_PG: numbers, one reward per rollout; anything where a rollout is dead. A reward that is NaN or
        infinite in float32 makes its rollout dead, whatever `live_PG` says.
      live_PG: bool, False where infrastructure lost the rollout; None means all live.
      ddof: subtracted from the count in the standard deviation's denominator. The default 1 is verl's.

    Returns:
      GroupStats, each field [P].

    Raises:
      ValueError: at trace time, when the shapes are not the same [P, G].
    """
    return centred_stats(rewards_PG, live_PG, ddof)[0]


def has_signal(stats: GroupStats, *, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """Tells which groups can teach: those whose live rewards differ by more than rounding does.

    A group has signal when `spread > atol + rtol * max(|max|, |min|)` and two rollouts are live. The test is on
    the spread, never on the standard deviation: equal rewards can have one above 0 in float32, and constant
    partial credit passes a test on the mean.

    Args:
      stats: the groups' statistics.
      atol: absolute tolerance, in units of the reward.
      rtol: relative tolerance. At a common offset of 1e6 the default already means 1: centre such rewards first.

    Returns:
      bool [P].
    """
    xp = array_namespace(*stats)
    magnitude_P = xp.maximum(xp.abs(stats.max), xp.abs(stats.min))
    return (stats.spread > atol + rtol * magnitude_P) & (stats.count >= 2)
