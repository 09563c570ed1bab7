"""Advantages of the rollouts in a group, relative to the group.

Every estimator works on deviations from the group's mean that were centred before they were summed, so that a
large common offset costs no precision. The masking of single rollouts (truncated ones, say) comes after this:
the baseline always sees them.
"""

from collections.abc import Callable

import jax.numpy as jnp

from dynrl.core.group_stats import Centred, centred_stats, has_signal
from dynrl.core.masking import safe_divide
from dynrl.types import Array


def _grpo(centred: Centred, count_P: Array, eps: float) -> Array:
    """GRPO: (r - mean) / (std + eps); the numerator and the std share the scale, so eps is put in it too."""
    del count_P
    return safe_divide(centred.deviation_PG, (centred.std_P + eps * centred.scale_P)[:, None])


def _dr_grpo(centred: Centred, count_P: Array, eps: float) -> Array:
    """Dr. GRPO: r - mean."""
    del count_P, eps
    return centred.deviation_PG / centred.scale_P[:, None]


def _rloo(centred: Centred, count_P: Array, eps: float) -> Array:
    """RLOO: r_i - mean of the other rewards, which is n / (n - 1) * (r_i - mean)."""
    del eps
    count_P = count_P.astype(jnp.float32)
    return centred.deviation_PG / centred.scale_P[:, None] * safe_divide(count_P, count_P - 1)[:, None]


_ESTIMATORS: dict[str, Callable[[Centred, Array, float], Array]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}
ESTIMATORS = tuple(_ESTIMATORS)


def group_advantages(
    rewards_PG: Array,
    live_PG: Array | None = None,
    *,
    estimator: str = "grpo",
    ddof: int = 1,
    eps: float = 1e-6,
    atol: float = 1e-6,
    rtol: float = 1e-6,
) -> Array:
    """Computes the advantage of each rollout over its group's baseline.

    With n live rollouts, `mean` and `std` over them:

    - `grpo` (arXiv:2402.03300, section 4.1.2): A_i = (r_i - mean) / (std + eps). The paper names no ddof and no
      eps; the defaults 1 and 1e-6 are verl's.
    - `dr_grpo` (arXiv:2503.20783, section 3.2): A_i = r_i - mean.
    - `rloo` (arXiv:2402.14740): A_i = r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) * (r_i - mean).

    Args:
      rewards_PG: numbers, the estimator's own input; anything where a rollout is dead. A reward that is NaN or
        infinite in float32 makes its rollout dead.
      live_PG: bool, or None for all live.
      estimator: `grpo`, `dr_grpo` or `rloo`.
      ddof: subtracted from the count in `grpo`'s standard deviation.
      eps: added to `grpo`'s standard deviation.
      atol: absolute tolerance of `has_signal`.
      rtol: relative tolerance of `has_signal`.

    Returns:
      float32 [P, G]; exactly 0 for dead rollouts and in groups without signal.

    Raises:
      ValueError: at trace time, for an unknown estimator, or shapes that are not the same [P, G].
    """
    if estimator not in _ESTIMATORS:
        raise ValueError(f"estimator {estimator!r} is unknown; there are {', '.join(ESTIMATORS)}")
    live_PG = None if live_PG is None else jnp.asarray(live_PG)
    stats, centred = centred_stats(jnp.asarray(rewards_PG), live_PG, ddof)
    advantages_PG = _ESTIMATORS[estimator](centred, stats.count, eps)
    # Dead rollouts have deviation 0 already; dividing and scaling keep it.
    signal_P = has_signal(stats, atol=atol, rtol=rtol)
    return jnp.where(signal_P[:, None], advantages_PG, jnp.zeros_like(advantages_PG))
