"""Keys and values of one layer: as training makes them, and as the sampler caches them, in full or in 8 bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dynrl.types import Array


class KV(NamedTuple):
    """Keys and values, [rows, kv_heads, length, head_dim].

    A quantised cache holds int8, and a float32 scale [rows, kv_heads, length] per head and column, which costs
    4 / head_dim bytes more per value. Scales multiply scores and weights, so no wide copy of the cache is made.
    """

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None

    def scores(self, q: Array) -> Array:
        """Dot products of queries [R, Hkv, Q, head_dim] with all keys, float32 [R, Hkv, Q, length]."""
        scores = jnp.einsum("rhqe,rhke->rhqk", q, self.k.astype(q.dtype), preferred_element_type=jnp.float32)
        return scores if self.k_scale is None else scores * self.k_scale[:, :, None]

    def average(self, weights: Array, dtype: jnp.dtype) -> Array:
        """Values averaged with float32 weights [R, Hkv, Q, length], computed in `dtype`: [R, Hkv, Q, head_dim]."""
        weights = weights if self.v_scale is None else weights * self.v_scale[:, :, None]
        return jnp.einsum("rhqk,rhke->rhqe", weights.astype(dtype), self.v.astype(dtype))

    def write(self, new: "KV", start_R: Array) -> "KV":
        """The cache with `new` [R, Hkv, T, head_dim] in the columns start to start + T - 1 of each row.

        Columns beyond the cache's length are dropped.
        """
        columns = jnp.arange(new.k.shape[2])

        def row(old: Array, values: Array, start: Array) -> Array:  # [Hkv, length, ...] <- [Hkv, T, ...]
            return old.at[:, start + columns].set(values.astype(old.dtype), mode="drop")

        return jax.tree.map(lambda old, values: jax.vmap(row)(old, values, start_R), self, self.stored(new))

    def stored(self, new: "KV") -> "KV":
        """`new` as this cache holds it."""
        if self.k_scale is None:
            return KV(new.k.astype(self.k.dtype), new.v.astype(self.v.dtype))
        (k, k_scale), (v, v_scale) = quantise(new.k), quantise(new.v)
        return KV(k, v, k_scale, v_scale)


def quantise(x: Array) -> tuple[Array, Array]:
    """Int8 values and float32 scales of the last axis, so that values * scale is nearest to x; zeros stay zeros."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    values = jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None])
    return jnp.clip(values, -127, 127).astype(jnp.int8), scale
