"""Sums over the positions that count, and divisions that survive an empty mask.

A masked-out position may hold anything, NaN and infinity included: it reaches neither the value nor the gradient.
Reductions return sums with their counts, so that microbatches and devices add up before anything is divided.
"""

import jax.numpy as jnp

from dynrl.types import Array


def masked_sum_count(x: Array, mask: Array, axis: int | None = None) -> tuple[Array, Array]:
    """Sums `x` where `mask` is True, and counts those positions.

    The mean over devices or microbatches is the sum of sums over the sum of counts, never a mean of means.

    Args:
      x: numbers of any shape; anything where the mask is False.
      mask: bool, the shape of `x`.
      axis: the axis to reduce; None reduces all.

    Returns:
      (sum, count), both in float32 (float64 for float64 `x`). The count is exact up to 2**24 and rounded above.

    Raises:
      ValueError: at trace time, when the shapes differ.
    """
    x, mask = jnp.asarray(x), jnp.asarray(mask, bool)
    if x.shape != mask.shape:
        raise ValueError(f"x has shape {x.shape}, mask has {mask.shape}; they must be the same")
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    # Selecting comes before summing: a product with the mask would turn a masked-out NaN into the sum.
    total = jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)), axis=axis, dtype=dtype)
    return total, jnp.sum(mask, axis=axis, dtype=jnp.int32).astype(dtype)


def safe_divide(numerator: Array, denominator: Array) -> Array:
    """Divides, and gives 0 with a gradient of 0 where the denominator is 0.

    The denominator is replaced before the division (the "double where"): one `where` after it would leave the
    gradient 0 * inf = NaN.

    Args:
      numerator: numbers.
      denominator: numbers, of the same shape.

    Returns:
      numerator / denominator, or 0.
    """
    denominator = jnp.asarray(denominator)
    nonzero = denominator != 0
    quotient = numerator / jnp.where(nonzero, denominator, jnp.ones_like(denominator))
    return jnp.where(nonzero, quotient, jnp.zeros_like(quotient))


def completion_mask(length: Array, max_len: int) -> Array:
    """Marks the first `length` of `max_len` right-padded positions.

    Args:
      length: int, any shape; tokens in each completion. Below 0 counts as 0, above `max_len` as `max_len`.
      max_len: the padded length T, in tokens.

    Returns:
      bool, the shape of `length` with a trailing axis of `max_len`.
    """
    length = jnp.asarray(length)
    position = jnp.arange(max_len, dtype=jnp.int32).reshape((1,) * length.ndim + (max_len,))
    return position < length[..., None]
