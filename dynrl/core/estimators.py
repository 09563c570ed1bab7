"""The formulas of the advantage estimators, and what each one declares about itself.

An estimator is a function of `Inputs` whose keyword-only parameters are its options. It works on deviations that
were centred before they were summed, so that a large common offset costs no precision, and it gives exactly 0 to
dead rollouts and, unless it says otherwise, to groups without signal. With n live rollouts, `mean` and `std` are
over them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dynrl.core.group_stats import (
    AxisName,
    Centred,
    GroupStats,
    across,
    centred_stats,
    group_stats,
    has_signal,
    live_rewards,
    root_mean,
)
from dynrl.core.masking import safe_divide
from dynrl.types import Array


class Inputs(NamedTuple):
    """What an estimator gets."""

    rewards: Array  # [P, G], or [P, G, K] per component
    live_PG: Array | None
    axis_name: AxisName = None  # mesh axes that the batch's groups are spread over
    entropy_PGT: Array | None = None
    mask_PGT: Array | None = None


@dataclass(frozen=True)
class Estimator:
    """An estimator and what it declares, so that configurations can be checked without running it.

    Attributes:
      function: `(inputs, *, options) -> advantages`.
      uses_uniform_groups: whether groups without signal get an advantage other than 0.
      batch_normalised: whether a value depends on the whole batch, not on its group alone.
      needs_group: whether a group needs two live rollouts; the others give a singleton an advantage too.
      per_component: whether it takes rewards_PGK, one reward per named component.
      per_token: whether it takes entropy_PGT and mask_PGT, and gives [P, G, T].
    """

    function: Callable[..., Array]
    uses_uniform_groups: bool = False
    batch_normalised: bool = False
    needs_group: bool = True
    per_component: bool = False
    per_token: bool = False

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of its options."""
        parameters = inspect.signature(self.function).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def option(self, key: str, kwargs: Mapping[str, Any]) -> Any:
        """The value of an option among `kwargs`, or its default; None where there is no such option."""
        if key not in self.keywords:
            return None
        return kwargs.get(key, inspect.signature(self.function).parameters[key].default)


def _where_signal(advantages_PG: Array, stats: GroupStats, atol: float, rtol: float) -> Array:
    """Zeroes groups without signal. Dead rollouts have deviation 0 already; dividing and scaling keep it."""
    signal_P = has_signal(stats, atol=atol, rtol=rtol)
    return jnp.where(signal_P[:, None], advantages_PG, jnp.zeros_like(advantages_PG))


def _standardised(centred: Centred, count_P: Array, ddof: int, eps: float) -> Array:
    """(r - mean) / (std + eps); the numerator and the std share the scale, so eps is put in it too.

    0 where the count leaves no degree of freedom: the std is unknown there, and eps alone is no divisor.
    """
    divisor_P = jnp.where(count_P > ddof, centred.std_P + eps * centred.scale_P, 0)
    return safe_divide(centred.deviation_PG, divisor_P[:, None])


def _over_batch_std(
    values_PG: Array, scale_P: Array, count_P: Array, ddof: int, eps: float, axis_name: AxisName
) -> Array:
    """Divides by the batch's std + eps; values are 0 where dead, in units of 1 / scale_P, with mean 0 in each group."""
    # One scale for all: groups of huge rewards decide the std, and the others are far below its rounding.
    scale = across(jax.lax.pmin, scale_P.min(initial=1), axis_name)
    values_PG = values_PG * (scale / scale_P)[:, None]
    squares = across(jax.lax.psum, (values_PG * values_PG).sum(axis=1).sum(), axis_name)
    count = across(jax.lax.psum, count_P.sum(), axis_name)
    return safe_divide(values_PG, jnp.where(count > ddof, root_mean(squares, count, ddof) + eps * scale, 0))


def grpo(x: Inputs, *, ddof: int = 1, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """A_i = (r_i - mean) / (std + eps): arXiv:2402.03300, section 4.1.2.

    The paper names no ddof and no eps; the defaults are verl's.
    """
    stats, centred = centred_stats(x.rewards, x.live_PG, ddof)
    return _where_signal(_standardised(centred, stats.count, ddof, eps), stats, atol, rtol)


def dr_grpo(x: Inputs, *, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """A_i = r_i - mean: Dr. GRPO, arXiv:2503.20783, section 3.2."""
    stats, centred = centred_stats(x.rewards, x.live_PG, 1)
    return _where_signal(centred.deviation_PG / centred.scale_P[:, None], stats, atol, rtol)


def rloo(x: Inputs, *, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """A_i = r_i - mean of the other rewards = n / (n - 1) * (r_i - mean): arXiv:2402.14740."""
    stats, centred = centred_stats(x.rewards, x.live_PG, 1)
    count_P = stats.count.astype(jnp.float32)
    factor_P = safe_divide(count_P, count_P - 1)
    return _where_signal(centred.deviation_PG / centred.scale_P[:, None] * factor_P[:, None], stats, atol, rtol)


def reinforce_pp(x: Inputs, *, ddof: int = 1, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """A_i = (r_i - mean) / (std + eps), both over the batch's live rollouts: REINFORCE++, arXiv:2501.03262.

    So a group without signal has an advantage. Exactly 0 when the batch, as if it were one group, has no signal.
    Deviation: the KL penalty is a term of the loss here, not of the reward.
    """
    rewards_PG, live_PG = live_rewards(x.rewards, x.live_PG)
    stats, centred = centred_stats(rewards_PG.reshape(1, -1), live_PG.reshape(1, -1), ddof, x.axis_name)
    advantages = _standardised(centred, stats.count, ddof, eps)
    return _where_signal(advantages, stats, atol, rtol).reshape(rewards_PG.shape)


def reinforce_pp_baseline(
    x: Inputs, *, ddof: int = 1, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 1e-6
) -> Array:
    """A_i = (r_i - mean of its group) / (std + eps): REINFORCE++ with a baseline, arXiv:2501.03262.

    The std is over the batch's numerators, those of groups without signal (0) among them; their mean is 0.
    """
    stats, centred = centred_stats(x.rewards, x.live_PG, ddof)
    deviation_PG = _where_signal(centred.deviation_PG, stats, atol, rtol)
    return _over_batch_std(deviation_PG, centred.scale_P, stats.count, ddof, eps, x.axis_name)


def pass_at_k(x: Inputs, *, k: int = 4, atol: float = 1e-6, rtol: float = 1e-6) -> Array:
    """The advantage of being in a random draw of k that succeeds if one of it does: arXiv:2508.10751, analytical form.

    With c of n live rewards above 0 and m = n - c, a draw fails with probability F = C(m, k) / C(n, k), and

        sigma = sqrt(F (1 - F)),  A_positive = F / sigma,  A_negative = (F - C(m - 1, k - 1) / C(n - 1, k - 1)) / sigma

    where the last numerator is -F c / m. 0 where sigma is 0: no draw fails (m < k), or all do. With fewer live
    rollouts than k, or as many, the only draw is the whole group, so that sigma is 0 too: keep k below the live count.
    """
    rewards_PG, live_PG = live_rewards(x.rewards, x.live_PG)
    stats = group_stats(rewards_PG, live_PG)
    num_live_P, num_negative_P = stats.count, stats.count - stats.positives
    # C(m, k) / C(n, k) is the product of 1 - k / j over j = m + 1 ... n: no factorial, and 0 exactly from j = k down.
    j_G = jnp.arange(1, rewards_PG.shape[1] + 1)
    within_PG = (j_G[None, :] > num_negative_P[:, None]) & (j_G[None, :] <= num_live_P[:, None])
    factor_G = jnp.maximum(1 - jnp.asarray(k, jnp.float32) / j_G.astype(jnp.float32), 0)
    fail_P = jnp.where(within_PG, factor_G[None, :], jnp.float32(1)).prod(axis=1)
    open_P = (fail_P > 0) & (fail_P < 1)
    odds_P = jnp.where(open_P, fail_P, 0) / jnp.where(open_P, 1 - fail_P, 1)
    positive_P = jnp.sqrt(odds_P)  # F / sigma
    ratio_P = safe_divide(stats.positives.astype(jnp.float32), num_negative_P.astype(jnp.float32))
    advantages_PG = jnp.where(rewards_PG > 0, positive_P[:, None], -(positive_P * ratio_P)[:, None])
    return _where_signal(jnp.where(live_PG, advantages_PG, 0), stats, atol, rtol)


def _cancelled(parts_PKG: Array, total_PG: Array, rtol: float) -> Array:
    """Whether the sum of a group's components is only what rounding left of them; bool [P]."""
    size_P = jnp.abs(parts_PKG).sum(axis=1).max(axis=1, initial=0)
    return jnp.abs(total_PG).max(axis=1, initial=0) <= rtol * size_P


def gdpo(
    x: Inputs, *, weights: Sequence[float] | None = None, batch_norm: bool = True, ddof: int = 1, eps: float = 1e-6,
    atol: float = 1e-6, rtol: float = 1e-6,
) -> Array:  # fmt: skip
    """GRPO's advantage of each component, summed with weights, over the sum's std in the batch: arXiv:2601.05242.

    A component without signal in a group adds exactly 0 there. A rollout with one component that is not finite is
    dead. The batch's mean is 0 by construction, so only its std (+ eps) is divided by.
    """
    num_groups, group_size, num_components = x.rewards.shape
    if weights is not None and len(weights) != num_components:
        raise ValueError(f"estimator 'gdpo' got {len(weights)} weights for {num_components} components of the reward")
    rewards_PKG = jnp.moveaxis(x.rewards.astype(jnp.float32), 2, 1)
    live_PG = jnp.isfinite(rewards_PKG).all(axis=1)
    if x.live_PG is not None:
        live_PG = live_PG & x.live_PG.astype(bool)
    live_PKG = jnp.broadcast_to(live_PG[:, None, :], rewards_PKG.shape)
    rows = Inputs(rewards_PKG.reshape(-1, group_size), live_PKG.reshape(-1, group_size))
    parts_PKG = grpo(rows, ddof=ddof, eps=eps, atol=atol, rtol=rtol).reshape(rewards_PKG.shape)
    if weights is not None:
        parts_PKG = parts_PKG * jnp.asarray(weights, jnp.float32)[None, :, None]
    total_PG = parts_PKG.sum(axis=1)
    total_PG = jnp.where(_cancelled(parts_PKG, total_PG, rtol)[:, None], jnp.zeros_like(total_PG), total_PG)
    if not batch_norm:
        return total_PG
    count_P = live_PG.sum(axis=1, dtype=jnp.int32)
    return _over_batch_std(total_PG, jnp.ones((num_groups,), jnp.float32), count_P, ddof, eps, x.axis_name)


def rl_zvp(
    x: Inputs, *, alpha: float = 0.1, ddof: int = 1, eps: float = 1e-6, atol: float = 1e-6, rtol: float = 1e-6
) -> Array:
    """GRPO where there is signal, and entropy where there is none: RL-ZVP, arXiv:2509.21880.

    With H_t a token's entropy, a constant, a group without signal gets on its masked-in tokens

        alpha * H_t                            if all live rewards are above 0
        -alpha * (max_t' H_t' - H_t)           if none is; the maximum is over the row's masked-in tokens
        0                                      if only some are, by less than the tolerance

    and one live rollout is enough for it. Groups with signal get GRPO's advantage on every token.
    """
    stats, centred = centred_stats(x.rewards, x.live_PG, ddof)
    live_PG = live_rewards(x.rewards, x.live_PG)[1]
    mask_PGT = jnp.asarray(x.mask_PGT, bool) & live_PG[:, :, None]
    entropy_PGT = jax.lax.stop_gradient(jnp.asarray(x.entropy_PGT, jnp.float32))
    entropy_PGT = jnp.where(mask_PGT, entropy_PGT, 0)
    highest_PG = entropy_PGT.max(axis=2, initial=0)  # entropies are not negative
    below_PGT = jnp.where(mask_PGT, entropy_PGT - highest_PG[:, :, None], 0)
    right_P, wrong_P = stats.min > 0, stats.max <= 0  # a group without live rollouts is all 0, masked out
    shaped_PGT = jnp.where(right_P[:, None, None], alpha * entropy_PGT, 0)
    shaped_PGT = jnp.where(wrong_P[:, None, None], alpha * below_PGT, shaped_PGT)
    signal_P = has_signal(stats, atol=atol, rtol=rtol)
    grpo_PG = _standardised(centred, stats.count, ddof, eps)
    return jnp.where(signal_P[:, None, None], grpo_PG[:, :, None], shaped_PGT)


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": Estimator(grpo),
        "dr_grpo": Estimator(dr_grpo),
        "rloo": Estimator(rloo),
        "reinforce_pp": Estimator(reinforce_pp, uses_uniform_groups=True, batch_normalised=True, needs_group=False),
        "reinforce_pp_baseline": Estimator(reinforce_pp_baseline, batch_normalised=True),
        "pass_at_k": Estimator(pass_at_k),
        "gdpo": Estimator(gdpo, batch_normalised=True, per_component=True),
        "rl_zvp": Estimator(rl_zvp, uses_uniform_groups=True, needs_group=False, per_token=True),
    }
)
