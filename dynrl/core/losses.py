"""The clipped policy-gradient loss over tokens, as sums with counts.

Three log-probabilities of the same token meet here:

- `logp`: under the weights being trained; the only one that carries a gradient,
- `old_logp`: under the weights at the start of the step; `logp - old_logp` is what the clip bounds,
- `behavior_logp`: as the sampler recorded it; `old_logp - behavior_logp` is the drift between sampler and trainer
  (other kernels, older weights), which a truncated importance weight corrects.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dynrl.core.masking import masked_sum_count, safe_divide
from dynrl.types import Array

# Differences of log-probs are clipped to this before exp: exp(20) = 4.9e8 is far outside of any trust region, and
# an infinite ratio times a zero would be NaN. Beyond it a token has no gradient.
MAX_LOG_RATIO = 20.0

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

Metrics = dict[str, tuple[Array, Array]]


class _Tokens(NamedTuple):
    """The inputs, 0 where masked out, so that nothing there reaches an exp or a product."""

    log_ratio_NT: Array  # logp - old_logp, clipped to +-MAX_LOG_RATIO
    drift_NT: Array  # old_logp - behavior_logp, likewise
    advantages_NT: Array
    mask_NT: Array


def _prepare(
    logp_NT: Array, old_logp_NT: Array, behavior_logp_NT: Array, advantages_N: Array, mask_NT: Array
) -> _Tokens:
    logp_NT, mask_NT = jnp.asarray(logp_NT), jnp.asarray(mask_NT, bool)
    rows = {"old_logp_NT": old_logp_NT, "behavior_logp_NT": behavior_logp_NT, "mask_NT": mask_NT}
    wrong = {name: jnp.shape(array) for name, array in rows.items() if jnp.shape(array) != logp_NT.shape}
    if logp_NT.ndim != 2 or wrong or jnp.shape(advantages_N) != logp_NT.shape[:1]:
        shapes = {"logp_NT": logp_NT.shape, "advantages_N": jnp.shape(advantages_N)} | wrong
        raise ValueError(f"policy_loss takes [N, T] arrays and advantages of [N]; got {shapes}")
    dtype = jnp.promote_types(logp_NT.dtype, jnp.float32)

    def clean(x_NT: Array) -> Array:
        return jnp.where(mask_NT, jnp.asarray(x_NT, dtype), jnp.zeros((), dtype))

    old_NT, behavior_NT, advantages_NT = jax.lax.stop_gradient(
        (clean(old_logp_NT), clean(behavior_logp_NT), clean(jnp.broadcast_to(advantages_N[:, None], mask_NT.shape)))
    )
    bound = MAX_LOG_RATIO
    log_ratio_NT = jnp.clip(clean(logp_NT) - old_NT, -bound, bound)
    return _Tokens(log_ratio_NT, jnp.clip(old_NT - behavior_NT, -bound, bound), advantages_NT, mask_NT)


def _k3(log_ratio: Array) -> Array:
    """exp(d) - 1 - d: unbiased for KL(q || p) with d = log p - log q under samples from q, and never negative."""
    return jnp.expm1(log_ratio) - log_ratio


def _aggregate(
    token_loss_NT: Array, mask_NT: Array, aggregation: str, constant_length: float | None
) -> tuple[Array, Array]:
    """Reduces token losses to (sum, weight)."""
    row_sum_N, row_count_N = masked_sum_count(token_loss_NT, mask_NT, axis=1)
    if aggregation == "token_mean":
        return row_sum_N.sum(), row_count_N.sum()
    num_rows = (row_count_N > 0).astype(row_count_N.dtype).sum()
    if aggregation == "sequence_mean":
        return safe_divide(row_sum_N, row_count_N).sum(), num_rows
    return row_sum_N.sum() / constant_length, num_rows


def _check_aggregation(aggregation: str, constant_length: float | None) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation {aggregation!r} is unknown; there are {', '.join(AGGREGATIONS)}")
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            f"constant_length belongs to aggregation='constant'; got {constant_length} with {aggregation!r}"
        )
    if isinstance(constant_length, int | float) and constant_length <= 0:
        raise ValueError(f"constant_length must be above 0 tokens, got {constant_length}")


def policy_loss(
    logp_NT: Array,
    old_logp_NT: Array,
    behavior_logp_NT: Array,
    advantages_N: Array,
    mask_NT: Array,
    *,
    axis_name: str | tuple[str, ...] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: str = "token_mean",
    constant_length: float | None = None,
    tis_cap: float | None = 2.0,
) -> tuple[Array, Array, Metrics]:
    """Computes the clipped surrogate's loss, as a sum and the weight to divide the global sum by.

    With r = exp(logp - old_logp) and w = stop_gradient(min(exp(old_logp - behavior_logp), tis_cap)),

        loss of a token = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    which is PPO's clip (arXiv:1707.06347, equation 7) with DAPO's separate bounds (arXiv:2503.14476) and a truncated
    importance weight. Add up loss sums and weights over microbatches, then divide once. Deviation: differences of
    log-probs are clipped to +-20 before exp, and a token beyond that has no gradient.

    Args:
      logp_NT: natural log-probs of the tokens under the weights being trained; anything where masked out.
      old_logp_NT: under the weights at the start of the step; a constant. Anything where masked out.
      behavior_logp_NT: as recorded by the sampler; a constant. Anything where masked out.
      advantages_N: one per row; a constant. Anything where the row is masked out.
      mask_NT: bool, the tokens to train on.
      axis_name: mesh axis or axes to psum everything over, under pmap or shard_map. The gradient of a replicated
        parameter then comes out summed over devices from shard_map; from pmap, and shard_map with check_vma=False,
        `pmean` makes it so.
      clip_low: the ratio counts down to 1 - clip_low where A < 0.
      clip_high: the ratio counts up to 1 + clip_high where A > 0.
      aggregation: `token_mean` (token losses; weight = tokens), `sequence_mean` (each row's mean; weight = rows with
        a token), or `constant` (row sums / constant_length; weight = rows with a token; arXiv:2503.20783).
      constant_length: tokens; required by, and only for, `constant`.
      tis_cap: truncates the importance weight; None sets every weight to 1.

    Returns:
      (loss_sum, weight_sum, metrics): scalars, 0 when no token is masked in. Metrics map a name to (sum, count of
      tokens): clip_frac, clip_low_frac, clip_high_frac, ratio, tis_frac (share truncated), kl_sampler_trainer (k3
      estimate of KL(behavior || old)) and kl_old_new (of KL(old || current)).

    Raises:
      ValueError: at trace time, for shapes that do not fit, or a wrong aggregation or constant_length.
    """
    _check_aggregation(aggregation, constant_length)
    tokens = _prepare(logp_NT, old_logp_NT, behavior_logp_NT, advantages_N, mask_NT)
    ratio_NT = jnp.exp(tokens.log_ratio_NT)
    unclipped_NT = ratio_NT * tokens.advantages_NT
    clipped_NT = jax.lax.stop_gradient(jnp.clip(ratio_NT, 1 - clip_low, 1 + clip_high) * tokens.advantages_NT)
    # Selecting instead of taking the minimum: at a tie, the minimum's gradient would be split between the branches.
    active_NT = clipped_NT < unclipped_NT
    surrogate_NT = jnp.where(active_NT, clipped_NT, unclipped_NT)
    behavior_ratio_NT = jnp.exp(tokens.drift_NT)
    weight_NT = jnp.ones_like(ratio_NT) if tis_cap is None else jnp.minimum(behavior_ratio_NT, tis_cap)
    loss_sum, weight_sum = _aggregate(-weight_NT * surrogate_NT, tokens.mask_NT, aggregation, constant_length)

    per_token = {
        "clip_frac": active_NT,
        "clip_low_frac": active_NT & (tokens.advantages_NT < 0),
        "clip_high_frac": active_NT & (tokens.advantages_NT > 0),
        "ratio": ratio_NT,
        "tis_frac": behavior_ratio_NT > weight_NT if tis_cap is not None else jnp.zeros_like(active_NT),
        "kl_sampler_trainer": _k3(tokens.drift_NT),
        "kl_old_new": _k3(tokens.log_ratio_NT),
    }
    metrics = {k: masked_sum_count(jax.lax.stop_gradient(x), tokens.mask_NT) for k, x in per_token.items()}
    result = (loss_sum, weight_sum, metrics)
    return result if axis_name is None else jax.lax.psum(result, axis_name)
