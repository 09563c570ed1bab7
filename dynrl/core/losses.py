"""The policy-gradient loss over tokens, as sums with counts.

Three log-probabilities of the same token meet here, and a fourth where a KL term is asked for:

- `logp`: under the weights being trained; the only one that carries a gradient,
- `old_logp`: under the weights at the start of the step; `logp - old_logp` is what the clip bounds,
- `behavior_logp`: as the sampler recorded it; `old_logp - behavior_logp` is the drift between sampler and trainer
  (other kernels, older weights), which a truncated importance weight corrects,
- `ref_logp`: under the weights that the policy should stay close to.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dynrl.core.checks import check_choice, check_number
from dynrl.core.group_stats import AxisName
from dynrl.core.masking import masked_sum_count, safe_divide
from dynrl.core.surrogates import (
    KL_ESTIMATORS,
    LOSSES,
    MAX_LOG_RATIO,
    Surrogate,
    Tokens,
    cispo_surrogate,
    clipped_surrogate,
    k3,
    kl_estimate,
    sequence_log_ratio,
)
from dynrl.types import Array

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")

Metrics = dict[str, tuple[Array, Array]]


def _difference(minuend_NT: Array, subtrahend_NT: Array) -> Array:
    """A log-ratio whose exp is finite."""
    return jnp.clip(minuend_NT - subtrahend_NT, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clean(x_NT: Array, mask_NT: Array, dtype: Any) -> Array:
    return jnp.where(mask_NT, jnp.asarray(x_NT, dtype), jnp.zeros((), dtype))


def _prepare(
    logp_NT: Array, old_logp_NT: Array, behavior_logp_NT: Array, advantages_N: Array, mask_NT: Array,
    **optional_NT: Array | None,
) -> Tokens:  # fmt: skip
    """Checks that the shapes fit, those of the optional arrays too, and cleans what is masked out."""
    logp_NT, mask_NT = jnp.asarray(logp_NT), jnp.asarray(mask_NT, bool)
    rows = {"old_logp_NT": old_logp_NT, "behavior_logp_NT": behavior_logp_NT, "mask_NT": mask_NT}
    rows |= {name: array for name, array in optional_NT.items() if array is not None}
    wrong = {name: jnp.shape(array) for name, array in rows.items() if jnp.shape(array) != logp_NT.shape}
    if logp_NT.ndim != 2 or wrong or jnp.shape(advantages_N) not in (logp_NT.shape[:1], logp_NT.shape):
        shapes = {"logp_NT": logp_NT.shape, "advantages_N": jnp.shape(advantages_N)} | wrong
        raise ValueError(f"policy_loss takes [N, T] arrays and advantages of [N] or [N, T]; got {shapes}")
    dtype = jnp.promote_types(logp_NT.dtype, jnp.float32)
    if jnp.ndim(advantages_N) == 1:
        advantages_N = jnp.broadcast_to(advantages_N[:, None], mask_NT.shape)
    logp_NT = _clean(logp_NT, mask_NT, dtype)
    old_NT, behavior_NT, advantages_NT = jax.lax.stop_gradient(
        tuple(_clean(x, mask_NT, dtype) for x in (old_logp_NT, behavior_logp_NT, advantages_N))
    )
    log_ratio_NT, drift_NT = _difference(logp_NT, old_NT), _difference(old_NT, behavior_NT)
    return Tokens(logp_NT, log_ratio_NT, drift_NT, advantages_NT, mask_NT)


def _surrogate(tokens: Tokens, loss: str, clip_low: float, clip_high: float, dual_clip: float | None) -> Surrogate:
    if loss == "cispo":
        return cispo_surrogate(tokens, clip_low, clip_high)
    log_ratio_NT = sequence_log_ratio(tokens) if loss == "gspo" else tokens.log_ratio_NT
    return clipped_surrogate(tokens, log_ratio_NT, clip_low, clip_high, dual_clip)


def _regularize(
    token_loss_NT: Array, tokens: Tokens, mask_NT: Array | None, kl: str, kl_coef: Array | float,
    ref_logp_NT: Array | None, entropy_coef: Array | float, entropy_NT: Array | None,
) -> tuple[Array, Metrics]:  # fmt: skip
    """Adds the KL term and the entropy bonus where they are on; their mask lies within the loss's."""
    mask_NT = tokens.mask_NT if mask_NT is None else tokens.mask_NT & jnp.asarray(mask_NT, bool)
    dtype, metrics = tokens.logp_NT.dtype, {}
    if ref_logp_NT is not None:
        ref_NT = jax.lax.stop_gradient(_clean(ref_logp_NT, mask_NT, dtype))
        kl_NT = kl_estimate(_difference(ref_NT, _clean(tokens.logp_NT, mask_NT, dtype)), kl)
        metrics["kl_ref"] = masked_sum_count(jax.lax.stop_gradient(kl_NT), mask_NT)
        if _is_on(kl_coef):
            token_loss_NT = token_loss_NT + kl_coef * kl_NT
    if entropy_NT is not None and _is_on(entropy_coef):
        token_loss_NT = token_loss_NT - entropy_coef * _clean(entropy_NT, mask_NT, dtype)
    return token_loss_NT, metrics


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


def _is_on(coef: Array | float) -> bool:
    """Whether a coefficient is anything but a plain 0; a traced one always is."""
    return isinstance(coef, jax.Array) or coef != 0


def _check_aggregation(aggregation: str, constant_length: float | None) -> None:
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if (aggregation == "constant") != (constant_length is not None):
        raise ValueError(
            f"constant_length belongs to aggregation='constant'; got {constant_length} with {aggregation!r}"
        )
    if constant_length is not None:
        check_number("constant_length (tokens)", constant_length, above=0)


def _check_surrogate(
    loss: str, clip_low: float, clip_high: float, dual_clip: float | None, tis_cap: float | None
) -> None:
    check_choice("loss", loss, LOSSES)
    check_number("clip_low", clip_low, at_least=0)
    check_number("clip_high", clip_high, at_least=0)
    if dual_clip is not None:
        check_number("dual_clip", dual_clip, above=1)
        if loss == "cispo":
            raise ValueError("dual_clip bounds the surrogates of loss='ppo' and 'gspo'; 'cispo' has none")
    if tis_cap is not None:
        check_number("tis_cap", tis_cap, above=0)


def _check_regularizers(
    kl: str, kl_coef: Array | float, ref_logp_NT: Array | None, entropy_coef: Array | float,
    entropy_NT: Array | None, regularize_mask_NT: Array | None,
) -> None:  # fmt: skip
    check_choice("kl", kl, KL_ESTIMATORS)
    check_number("kl_coef", kl_coef, at_least=0)
    check_number("entropy_coef", entropy_coef)
    if ref_logp_NT is None and _is_on(kl_coef):
        raise ValueError(f"kl_coef={kl_coef} needs ref_logp_NT")
    if entropy_NT is None and _is_on(entropy_coef):
        raise ValueError(f"entropy_coef={entropy_coef} needs entropy_NT")
    if ref_logp_NT is None and entropy_NT is None and regularize_mask_NT is not None:
        raise ValueError(
            "regularize_mask_NT masks the KL and entropy terms; there is neither ref_logp_NT nor entropy_NT"
        )


def policy_loss(
    logp_NT: Array,
    old_logp_NT: Array,
    behavior_logp_NT: Array,
    advantages_N: Array,
    mask_NT: Array,
    *,
    axis_name: AxisName = None,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    constant_length: float | None = None,
    tis_cap: float | None = 2.0,
    kl: str = "k3",
    kl_coef: Array | float = 0.0,
    ref_logp_NT: Array | None = None,
    entropy_coef: Array | float = 0.0,
    entropy_NT: Array | None = None,
    regularize_mask_NT: Array | None = None,
) -> tuple[Array, Array, Metrics]:
    """Computes the surrogate's loss, as a sum and the weight to divide the global sum by.

    With r = exp(logp - old_logp) and w = stop_gradient(min(exp(old_logp - behavior_logp), tis_cap)),

        loss of a token = -w * objective + kl_coef * KL(current || ref) - entropy_coef * entropy

    - `ppo`: objective = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A): arXiv:1707.06347, equation 7, with
      DAPO's separate bounds (arXiv:2503.14476). With `dual_clip`, at least dual_clip * A where A < 0
      (arXiv:1912.09729).
    - `gspo`: the same with the sequence's ratio, s = exp(mean over the row's tokens of logp - old_logp), in its token
      form stop_gradient(s) * exp(logp - stop_gradient(logp)): arXiv:2507.18071, GSPO-token.
    - `cispo`: objective = stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) * A * logp, so that clipped tokens keep a
      gradient: arXiv:2506.13585. clip_low = 1 is no lower bound.

    Add up loss sums and weights over microbatches, then divide once. Deviation: differences of log-probs are clipped
    to +-20 before exp, and a token beyond that has no gradient.

    Args:
      logp_NT: natural log-probs of the tokens under the weights being trained; anything where masked out.
      old_logp_NT: under the weights at the start of the step; a constant. Anything where masked out.
      behavior_logp_NT: as recorded by the sampler; a constant. Anything where masked out.
      advantages_N: one per row, or [N, T] one per token; a constant. Anything where masked out.
      mask_NT: bool, the tokens to train on.
      axis_name: mesh axis or axes to psum everything over, under pmap or shard_map. The gradient of a replicated
        parameter then comes out summed over devices from shard_map; from pmap, and shard_map with check_vma=False,
        `pmean` makes it so.
      loss: `ppo`, `gspo` or `cispo`.
      clip_low: the ratio counts down to 1 - clip_low, in `ppo` and `gspo` where A < 0.
      clip_high: the ratio counts up to 1 + clip_high, in `ppo` and `gspo` where A > 0.
      dual_clip: above 1, for `ppo` and `gspo`; None for no such bound.
      aggregation: `token_mean` (token losses; weight = tokens), `sequence_mean` (each row's mean; weight = rows with
        a token), or `constant` (row sums / constant_length; weight = rows with a token; arXiv:2503.20783).
      constant_length: tokens; required by, and only for, `constant`.
      tis_cap: truncates the importance weight; None sets every weight to 1.
      kl: how the KL term is estimated from the tokens: `k1`, `k2` or `k3` of Schulman's "Approximating KL divergence"
        (2020). As a loss, k1 has an expected gradient of 0, and k2 that of the KL, on-policy.
      kl_coef: of the KL term; 0 leaves it out. May be traced.
      ref_logp_NT: under the reference weights; a constant. Anything where masked out.
      entropy_coef: of the entropy bonus; 0 leaves it out. May be traced.
      entropy_NT: nats, from `token_logprobs(..., entropy_gradient=True)`. Anything where masked out.
      regularize_mask_NT: bool, the tokens that the KL and entropy terms act on, within `mask_NT`; None for all of it.
        A row whose advantage is 0 is trained by them unless it is masked out here.

    Returns:
      (loss_sum, weight_sum, metrics): scalars, 0 when no token is masked in. Metrics map a name to (sum, count of
      tokens): clip_frac, clip_low_frac, clip_high_frac (of ratios that the clip replaced), ratio (the sequence's in
      `gspo`), tis_frac (share truncated), kl_sampler_trainer (k3 estimate of KL(behavior || old)), kl_old_new (of
      KL(old || current)), dual_clip_frac with `dual_clip`, and kl_ref with `ref_logp_NT`, over the regularized tokens.

    Raises:
      ValueError: at trace time, for shapes that do not fit, an unknown name, a number out of range, or options that
        lack what they need.
    """
    _check_surrogate(loss, clip_low, clip_high, dual_clip, tis_cap)
    _check_aggregation(aggregation, constant_length)
    _check_regularizers(kl, kl_coef, ref_logp_NT, entropy_coef, entropy_NT, regularize_mask_NT)
    optional = {"ref_logp_NT": ref_logp_NT, "entropy_NT": entropy_NT, "regularize_mask_NT": regularize_mask_NT}
    tokens = _prepare(logp_NT, old_logp_NT, behavior_logp_NT, advantages_N, mask_NT, **optional)
    surrogate = _surrogate(tokens, loss, clip_low, clip_high, dual_clip)
    behavior_ratio_NT = jnp.exp(tokens.drift_NT)
    weight_NT = jnp.ones_like(behavior_ratio_NT) if tis_cap is None else jnp.minimum(behavior_ratio_NT, tis_cap)
    token_loss_NT = -weight_NT * surrogate.objective_NT
    token_loss_NT, kl_metrics = _regularize(
        token_loss_NT, tokens, regularize_mask_NT, kl, kl_coef, ref_logp_NT, entropy_coef, entropy_NT
    )
    loss_sum, weight_sum = _aggregate(token_loss_NT, tokens.mask_NT, aggregation, constant_length)
    truncated_NT = jnp.zeros_like(tokens.mask_NT) if tis_cap is None else behavior_ratio_NT > weight_NT
    result = (loss_sum, weight_sum, _metrics(tokens, surrogate, truncated_NT) | kl_metrics)
    return result if axis_name is None else jax.lax.psum(result, axis_name)


def _metrics(tokens: Tokens, surrogate: Surrogate, truncated_NT: Array) -> Metrics:
    per_token = {
        "clip_frac": surrogate.clipped_NT,
        "clip_low_frac": surrogate.low_NT,
        "clip_high_frac": surrogate.high_NT,
        "ratio": surrogate.ratio_NT,
        "tis_frac": truncated_NT,
        "kl_sampler_trainer": k3(tokens.drift_NT),
        "kl_old_new": k3(tokens.log_ratio_NT),
    }
    if surrogate.dual_NT is not None:
        per_token["dual_clip_frac"] = surrogate.dual_NT
    return {name: masked_sum_count(jax.lax.stop_gradient(x), tokens.mask_NT) for name, x in per_token.items()}
