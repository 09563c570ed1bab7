"""Log-probs of given tokens from hidden states, without ever holding all logits.

The logits [N, T, V] are the largest array of a training step. Here they exist for one chunk of tokens at a time,
forward and backward, and the backward pass computes them again. Its gradient with respect to the logits is softmax
minus one-hot, both dense: the gradient of a gather would be a scatter-add, which is slow.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from dynrl.types import Array


class _Options(NamedTuple):
    """What is fixed when the program is traced."""

    num_chunks: int
    logits_dtype: Any
    entropy_gradient: bool


def token_logprobs(
    hidden_NTD: Array,
    unembed_DV: Array,
    targets_NT: Array,
    *,
    temperature: float | Array = 1.0,
    chunk_size: int | None = None,
    logits_dtype: Any = jnp.float32,
    entropy_gradient: bool = False,
) -> tuple[Array, Array]:
    """Computes log softmax(hidden @ unembed / temperature) at the targets, and the distribution's entropy.

    Args:
      hidden_NTD: the model's last hidden states; finite everywhere, in the padding too.
      unembed_DV: the output projection.
      targets_NT: int. A target outside of the vocabulary gets the log-prob minus log-normaliser of a logit of 0.
      temperature: above 0; may be traced, and is differentiated.
      chunk_size: tokens (of N * T) whose logits exist at once. None, or at least N * T, means all, without a loop.
      logits_dtype: what the logits are rounded to. The product accumulates in at least float32 whatever the
        inputs are, and so does the softmax.
      entropy_gradient: whether the entropy has a gradient, for an entropy bonus. Without, it is a metric, and its
        gradient of 0 costs nothing.

    Returns:
      (logp_NT, entropy_NT): natural log-probs and entropies in nats, float32 or wider.

    Raises:
      ValueError: at trace time, when the shapes do not fit or `chunk_size` is below 1.
    """
    if hidden_NTD.ndim != 3 or unembed_DV.ndim != 2 or hidden_NTD.shape[2] != unembed_DV.shape[0]:
        raise ValueError(f"hidden [N, T, D] and unembed [D, V] do not fit: {hidden_NTD.shape}, {unembed_DV.shape}")
    if targets_NT.shape != hidden_NTD.shape[:2]:
        raise ValueError(f"targets have shape {targets_NT.shape}, hidden states {hidden_NTD.shape}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
    N, T, D = hidden_NTD.shape
    num_chunks = 1 if chunk_size is None else max(1, -(-N * T // chunk_size))
    accum_dtype = jnp.promote_types(logits_dtype, jnp.float32)
    arrays = _vary_alike(
        hidden_NTD.reshape(N * T, D),
        unembed_DV,
        targets_NT.reshape(N * T),
        jnp.asarray(temperature, accum_dtype),
    )
    options = _Options(num_chunks, jnp.dtype(logits_dtype), entropy_gradient)
    logp, entropy = cast(tuple[Array, Array], _logprobs(options, *arrays))
    entropy = entropy.reshape(N, T)
    return logp.reshape(N, T), entropy if entropy_gradient else jax.lax.stop_gradient(entropy)


def _vary_alike(*arrays: Array) -> list[Array]:
    """Inside shard_map, makes all arrays vary over the axes that any of them varies over; elsewhere a no-op.

    A custom_vjp's cotangents must vary as its arguments do, and a scan's carry as its results. The gradient of the
    cast is the psum that a replicated argument's gradient needs.
    """
    varying: list[frozenset[str]] = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [tuple(sorted(frozenset().union(*varying) - axes)) for axes in varying]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(
    options: _Options, hidden_ND: Array, unembed_DV: Array, targets_N: Array, temperature: Array
) -> tuple[Array, Array]:
    """Returns (logp_N, entropy_N) of flattened tokens."""
    return _forward(options, hidden_ND, unembed_DV, targets_N, temperature)[0]


def _logits(hidden_ND: Array, unembed_DV: Array, logits_dtype: Any, dtype: Any) -> Array:
    """The logits before the temperature: dividing by it comes after the maximum's subtraction, which is exact."""
    return jnp.dot(hidden_ND, unembed_DV, preferred_element_type=dtype).astype(logits_dtype).astype(dtype)


def _is_target(targets_N: Array, vocab_size: int) -> Array:
    """The one-hot rows, as bool [N, V]."""
    return targets_N[:, None] == jnp.arange(vocab_size, dtype=targets_N.dtype)[None, :]


def _forward(
    options: _Options, hidden_ND: Array, unembed_DV: Array, targets_N: Array, temperature: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, list[Array]]]:
    def body(carry: tuple[()], chunk: list[Array]) -> tuple[tuple[()], list[Array]]:
        hidden_ND, targets_N = chunk
        logits_NV = _logits(hidden_ND, unembed_DV, options.logits_dtype, temperature.dtype)
        max_N = logits_NV.max(axis=1)
        below_max_NV = (logits_NV - max_N[:, None]) / temperature
        exp_NV = jnp.exp(below_max_NV)
        sum_N = exp_NV.sum(axis=1)
        log_sum_N = jnp.log(sum_N)
        is_target_NV = _is_target(targets_N, unembed_DV.shape[1])
        target_N = jnp.where(is_target_NV, logits_NV, jnp.zeros_like(logits_NV)).sum(axis=1)
        entropy_N = log_sum_N - (exp_NV * below_max_NV).sum(axis=1) / sum_N
        return carry, [(target_N - max_N) / temperature - log_sum_N, entropy_N, max_N, log_sum_N]

    _, (logp_N, entropy_N, max_N, log_sum_N) = _scan_chunks(body, (), [hidden_ND, targets_N], options.num_chunks)
    tokens = [hidden_ND, targets_N, max_N, log_sum_N] + [entropy_N] * options.entropy_gradient
    return (logp_N, entropy_N), (unembed_DV, temperature, tokens)


def _backward(
    options: _Options, residuals: tuple[Array, Array, list[Array]], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, Array]:
    unembed_DV, temperature, tokens = residuals
    dtype = temperature.dtype

    def body(carry: tuple[Array, Array], chunk: list[Array]) -> tuple[tuple[Array, Array], list[Array]]:
        d_unembed_DV, d_temperature = carry
        d_logp_N, d_entropy_N, hidden_ND, targets_N, max_N, log_sum_N, *entropy_N = chunk
        logits_NV = _logits(hidden_ND, unembed_DV, options.logits_dtype, dtype)
        logp_NV = (logits_NV - max_N[:, None]) / temperature - log_sum_N[:, None]
        prob_NV = jnp.exp(logp_NV)
        is_target_NV = _is_target(targets_N, unembed_DV.shape[1]).astype(dtype)
        d_scaled_NV = d_logp_N[:, None] * (is_target_NV - prob_NV)
        if options.entropy_gradient:  # dH / dz_j = -p_j (log p_j + H)
            d_scaled_NV -= d_entropy_N[:, None] * prob_NV * (logp_NV + entropy_N[0][:, None])
        d_logits_NV = d_scaled_NV / temperature
        d_temperature -= (d_logits_NV * logits_NV).sum() / temperature
        # The products run in the weights' dtype, as those of the forward pass do.
        d_product_NV = d_logits_NV.astype(unembed_DV.dtype)
        d_unembed_DV += jnp.dot(hidden_ND.T, d_product_NV, preferred_element_type=dtype)
        d_hidden_ND = jnp.dot(d_product_NV, unembed_DV.T, preferred_element_type=dtype).astype(hidden_ND.dtype)
        return (d_unembed_DV, d_temperature), [d_hidden_ND]

    # zeros_like keeps the axes that the arguments vary over (see _vary_alike); plain zeros would not.
    zeros = (jnp.zeros_like(unembed_DV, dtype), jnp.zeros_like(temperature))
    carry, (d_hidden_ND,) = _scan_chunks(body, zeros, [*cotangents, *tokens], options.num_chunks)
    d_unembed_DV, d_temperature = carry
    return d_hidden_ND, d_unembed_DV.astype(unembed_DV.dtype), None, d_temperature


_logprobs.defvjp(_forward, _backward)


def _scan_chunks(body: Callable[..., Any], carry: Any, tokens: list[Array], num_chunks: int) -> tuple[Any, list[Array]]:
    """Runs `body(carry, chunk) -> (carry, outputs)` over chunks of the leading (token) axis."""
    if num_chunks == 1:
        return body(carry, tokens)
    num_tokens = tokens[0].shape[0]
    size = -(-num_tokens // num_chunks)
    pad = size * num_chunks - num_tokens

    def split(x: Array) -> Array:
        # Chunk i takes the tokens i, i + num_chunks, ...: when the tokens are sharded over devices, every chunk then
        # has its share on every device, where contiguous chunks would have to be fetched from one.
        x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
        return x.reshape(size, num_chunks, *x.shape[1:])

    def step(carry: Any, index: Array) -> tuple[Any, list[Array]]:
        chunk = [jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False) for x in chunks]
        return body(carry, chunk)

    chunks = [split(x) for x in tokens]
    carry, outputs = jax.lax.scan(step, carry, jnp.arange(num_chunks))
    join = [jnp.moveaxis(y, 0, 1).reshape(size * num_chunks, *y.shape[2:])[:num_tokens] for y in outputs]
    return carry, join
