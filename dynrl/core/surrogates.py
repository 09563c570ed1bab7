"""The losses of single tokens: the clipped surrogates of the policy gradient, and the estimates of a KL divergence.

What they get is 0 where masked out, and differences of log-probs in it are clipped, so that nothing overflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dynrl.core.masking import masked_sum_count, safe_divide
from dynrl.types import Array

# Differences of log-probs are clipped to this before exp: exp(20) = 4.9e8 is far outside of any trust region, and
# an infinite ratio times a zero would be NaN. Beyond it a token has no gradient.
MAX_LOG_RATIO = 20.0
# CISPO multiplies by the log-prob itself; below this, which no working model reaches, the product could overflow.
_MIN_LOGP = -1e4

LOSSES = ("ppo", "gspo", "cispo")
KL_ESTIMATORS = ("k1", "k2", "k3")


class Tokens(NamedTuple):
    """A loss's inputs, 0 where masked out, so that nothing there reaches an exp or a product."""

    logp_NT: Array
    log_ratio_NT: Array  # logp - old_logp, clipped to +-MAX_LOG_RATIO
    drift_NT: Array  # old_logp - behavior_logp, likewise
    advantages_NT: Array
    mask_NT: Array


class Surrogate(NamedTuple):
    """The objective of each token, to be maximised, and what the clips did."""

    objective_NT: Array
    ratio_NT: Array  # what the clip bounds: exp(logp - old_logp), or the sequence's
    clipped_NT: Array  # bool: low or high
    low_NT: Array  # bool: clipped at 1 - clip_low
    high_NT: Array  # bool: clipped at 1 + clip_high
    dual_NT: Array | None = None  # bool: clipped at dual_clip * advantage


def clipped_surrogate(
    tokens: Tokens, log_ratio_NT: Array, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at least dual_clip * A where A < 0."""
    ratio_NT = jnp.exp(log_ratio_NT)
    unclipped_NT = ratio_NT * tokens.advantages_NT
    clipped_NT = jax.lax.stop_gradient(jnp.clip(ratio_NT, 1 - clip_low, 1 + clip_high) * tokens.advantages_NT)
    # Selecting instead of taking the minimum: at a tie, the minimum's gradient would be split between the branches.
    active_NT = clipped_NT < unclipped_NT
    objective_NT = jnp.where(active_NT, clipped_NT, unclipped_NT)
    low_NT, high_NT = active_NT & (tokens.advantages_NT < 0), active_NT & (tokens.advantages_NT > 0)
    if dual_clip is None:
        return Surrogate(objective_NT, ratio_NT, active_NT, low_NT, high_NT)
    floor_NT = dual_clip * tokens.advantages_NT
    dual_NT = (tokens.advantages_NT < 0) & (objective_NT < floor_NT)
    objective_NT = jnp.where(dual_NT, floor_NT, objective_NT)
    return Surrogate(objective_NT, ratio_NT, active_NT, low_NT, high_NT, dual_NT)


def sequence_log_ratio(tokens: Tokens) -> Array:
    """GSPO-token's log-ratio: each row's mean in value, the token's own in gradient; [N, T]."""
    mean_N = safe_divide(*masked_sum_count(tokens.log_ratio_NT, tokens.mask_NT, axis=1))
    own_NT = tokens.log_ratio_NT - jax.lax.stop_gradient(tokens.log_ratio_NT)
    return jax.lax.stop_gradient(mean_N)[:, None] + own_NT


def cispo_surrogate(tokens: Tokens, clip_low: float, clip_high: float) -> Surrogate:
    """stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A logp: a clipped token keeps its gradient."""
    ratio_NT = jax.lax.stop_gradient(jnp.exp(tokens.log_ratio_NT))
    weight_NT = jnp.clip(ratio_NT, 1 - clip_low, 1 + clip_high)
    objective_NT = weight_NT * tokens.advantages_NT * jnp.maximum(tokens.logp_NT, _MIN_LOGP)
    return Surrogate(objective_NT, ratio_NT, ratio_NT != weight_NT, ratio_NT < weight_NT, ratio_NT > weight_NT)


def k3(log_ratio: Array) -> Array:
    """exp(d) - 1 - d: unbiased for KL(q || p) with d = log p - log q under samples from q, and never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def kl_estimate(log_ratio: Array, kl: str) -> Array:
    """An estimate of KL(q || p) from d = log p - log q under samples from q; Schulman's k1, k2 or k3."""
    if kl == "k1":
        return -log_ratio
    return 0.5 * log_ratio * log_ratio if kl == "k2" else k3(log_ratio)
