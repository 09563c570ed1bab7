"""The decoder's small parts: matrix product, dense layer, norm, rotary embedding, token lookup."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dynrl.types import Array

INIT = nn.initializers.normal(0.02)


@jax.custom_vjp
def matmul(x: Array, w: Array) -> Array:
    """X [.., K] @ w [K, M].

    The same product as `@`, with the weight's gradient written so that the narrower operand is the one that a
    backend may have to transpose: on CPU the step of a small policy takes half the time.
    """
    return x @ w


def _matmul_fwd(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ w, (x, w)


def _matmul_bwd(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w = residuals
    dx = jax.lax.dot_general(dy, w, (((dy.ndim - 1,), (1,)), ((), ())))
    x_NK, dy_NM = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    over_rows = (((0,), (0,)), ((), ()))
    if x_NK.shape[1] <= dy_NM.shape[1]:
        return dx, jax.lax.dot_general(x_NK, dy_NM, over_rows)
    return dx, jax.lax.dot_general(dy_NM, x_NK, over_rows).T


matmul.defvjp(_matmul_fwd, _matmul_bwd)


class Dense(nn.Module):
    """Linear layer with a float32 kernel [K, features], computed in `dtype`."""

    features: int
    dtype: str
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[.., K] -> [.., features]."""
        kernel = self.param("kernel", INIT, (x.shape[-1], self.features))
        y = matmul(x.astype(self.dtype), kernel.astype(self.dtype))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros_init(), (self.features,)).astype(self.dtype)
            y = y + jnp.expand_dims(bias, range(y.ndim - 1))
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * scale (arXiv:1910.07467), computed in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises the last axis; same shape and dtype."""
        scale = self.param("scale", nn.initializers.ones_init(), (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * jnp.expand_dims(scale, range(x.ndim - 1))).astype(x.dtype)


def rope(x: Array, positions: Array, base: float) -> Array:
    """Rotary embedding (arXiv:2104.09864), half-split as Llama and Qwen checkpoints have it.

    Args:
      x: [rows, T, heads, head_dim].
      positions: int [rows, T], counted without padding.
      base: the wavelength base.
    """
    half = x.shape[-1] // 2
    freq = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * freq[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


_ONE_HOT_VOCAB = 512


def embed(embedding_VD: Array, tokens: Array) -> Array:
    """Looks tokens up. For a small vocabulary by a one-hot matmul, whose gradient is a matmul, not a scatter-add."""
    vocab = embedding_VD.shape[0]
    if vocab <= _ONE_HOT_VOCAB:
        return matmul(jax.nn.one_hot(tokens, vocab, dtype=embedding_VD.dtype), embedding_VD)
    return jnp.take(embedding_VD, tokens, axis=0)
