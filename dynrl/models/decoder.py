"""The decoder-only transformer that every policy is.

Flax Linen, not NNX: a Linen module holds no arrays, so `apply(params, ...)` takes the plain nested dict that the
jitted programs donate, the optimizer maps over, sharding rules match by path, and checkpoints store. With NNX each
program would split and merge a graph to get the same dict.

Prompts are shared. The G rollouts of a group start from one prompt, so it is run once per group. In the train step
its keys and values stay where they are (`prefix`) and all G rows attend to [prefix | own tokens]; in the sampler
they are fanned out to the slots' caches, which decoding appends to: there, the token at position p lies in column p.
RoPE is applied before keys are stored.
"""

import typing
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dynrl.config import ModelConfig
from dynrl.models.kv import KV
from dynrl.models.layers import INIT, Dense, RMSNorm, embed, rope
from dynrl.types import Array

Params = Any  # the nested dict of arrays that Linen makes
_MASKED = -1e30  # finite, so that a query that may see nothing (padding) averages instead of giving NaN


class Prefix(NamedTuple):
    """The prompt that the G rows of a group share: KV per layer, and which columns hold a token [P, L]."""

    layers: Any  # tuple[KV, ...], or one stacked KV under scan_layers
    valid_PL: Array


class Cache(NamedTuple):
    """The rows' own keys and values while decoding: a KV per layer, and each row's column to write next."""

    layers: Any  # tuple[KV, ...]
    start_R: Array


def attend(q: Array, own: KV, own_mask: Array, prefix: KV | None, prefix_valid: Array) -> Array:
    """Grouped-query attention over [prefix | own], softmax in float32.

    Args:
      q: [R, Tq, H, head_dim]; R = P * G rows where there is a prefix of P prompts.
      own: [R, Hkv, Tk, head_dim].
      own_mask: bool, broadcastable to [R, Tq, Tk].
      prefix: [P, Hkv, L, head_dim] or None.
      prefix_valid: bool [P, L]; None without a prefix.

    Returns:
      [R, Tq, H * head_dim].
    """
    r, tq, h, e = q.shape
    hkv = own.k.shape[1]
    rep = h // hkv
    q = (q * e**-0.5).reshape(r, tq, hkv, rep, e).transpose(0, 2, 3, 1, 4)  # [R, Hkv, rep, Tq, E]
    f32 = jnp.float32
    scores = own.scores(q.reshape(r, hkv, rep * tq, e))
    scores = jnp.where(own_mask[:, None, None], scores.reshape(r, hkv, rep, tq, -1), _MASKED)
    if prefix is None:
        out = own.average(jax.nn.softmax(scores, axis=-1).reshape(r, hkv, rep * tq, -1), q.dtype)
    else:
        p, _, length, _ = prefix.k.shape
        g = r // p
        q_shared = q.reshape(p, g, hkv, rep * tq, e).transpose(0, 2, 1, 3, 4).reshape(p, hkv, g * rep * tq, e)
        shared = jnp.einsum("phqe,phke->phqk", q_shared, prefix.k, preferred_element_type=f32)
        shared = jnp.where(prefix_valid[:, None, None], shared, _MASKED)
        shared = shared.reshape(p, hkv, g, rep * tq, length).transpose(0, 2, 1, 3, 4)
        both = jnp.concatenate([shared.reshape(r, hkv, rep * tq, length), scores.reshape(r, hkv, rep * tq, -1)], -1)
        probs = jax.nn.softmax(both, axis=-1).astype(own.v.dtype)
        on_prefix = probs[..., :length].reshape(p, g, hkv, rep * tq, length).transpose(0, 2, 1, 3, 4)
        out = jnp.einsum("phqk,phke->phqe", on_prefix.reshape(p, hkv, g * rep * tq, length), prefix.v)
        out = out.reshape(p, hkv, g, rep * tq, e).transpose(0, 2, 1, 3, 4).reshape(r, hkv, rep * tq, e)
        out = out + jnp.einsum("rhqk,rhke->rhqe", probs[..., length:], own.v)
    out = out.reshape(r, hkv, rep, tq, e).transpose(0, 3, 1, 2, 4)
    return out.reshape(r, tq, h * e)


class Attention(nn.Module):
    """Self-attention with the prefix and cache described above."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Array, positions: Array, mask: Array, prefix: KV | None, prefix_valid: Array, cache: KV | None,
        start_R: Array,
    ) -> tuple[Array, KV]:  # fmt: skip
        """Returns the output [R, T, D] and the layer's own KV (the updated cache while decoding)."""
        c = self.config

        def heads(name: str, num: int) -> Array:
            y = Dense(num * c.head_dim, c.dtype, c.qkv_bias, name=name)(x)
            return y.reshape(*x.shape[:-1], num, c.head_dim)

        q, k, v = heads("q", c.num_heads), heads("k", c.num_kv_heads), heads("v", c.num_kv_heads)
        if c.qk_norm:
            q, k = RMSNorm(c.norm_eps, name="q_norm")(q), RMSNorm(c.norm_eps, name="k_norm")(k)
        q, k = rope(q, positions, c.rope_base), rope(k, positions, c.rope_base)
        own = KV(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))
        if cache is not None:
            own = cache.write(own, start_R)
        out = attend(q, own, mask, prefix, prefix_valid)
        return Dense(c.width, c.dtype, name="o")(out), own


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


class MLP(nn.Module):
    """Feed-forward block, gated (arXiv:2002.05202) or plain."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[.., D] -> [.., D]."""
        c = self.config

        act = _ACTIVATIONS[c.activation]
        up = Dense(c.mlp_width, c.dtype, name="up")(x)
        hidden = act(Dense(c.mlp_width, c.dtype, name="gate")(x)) * up if c.gated_mlp else act(up)
        return Dense(c.width, c.dtype, name="down")(hidden)


class Block(nn.Module):
    """Pre-norm transformer block."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x: Array, positions: Array, mask: Array, prefix_valid: Array, start_R: Array,
        prefix: KV | None, cache: KV | None,
    ) -> tuple[Array, KV]:  # fmt: skip
        """Returns the new residual stream and this layer's own KV."""
        c = self.config
        normed = RMSNorm(c.norm_eps, name="attn_norm")(x)
        y, own = Attention(c, name="attn")(normed, positions, mask, prefix, prefix_valid, cache, start_R)
        x = x + y
        return x + MLP(c, name="mlp")(RMSNorm(c.norm_eps, name="mlp_norm")(x)), own


def _block_class(config: ModelConfig) -> Any:
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if config.remat == "none":
        return Block
    return nn.remat(Block, policy=policies[config.remat], prevent_cse=not config.scan_layers)


class Decoder(nn.Module):
    """Tokens to final hidden states; `unembed_DV` gives the matrix that turns those into logits.

    Hidden states, not logits, are the output: log-probs are computed in chunks so that [N, T, V] never exists.
    """

    config: ModelConfig
    vocab_size: int

    @nn.compact
    def __call__(
        self, tokens: Array, positions: Array, mask: Array, prefix: Prefix | None = None, cache: Cache | None = None
    ) -> tuple[Array, Any]:
        """Runs the blocks.

        Args:
          tokens: int32 [R, T].
          positions: int32 [R, T], counted from 0 at the prompt's first real token.
          mask: bool, broadcastable to [R, T, own columns]: what each query may see of its own keys.
          prefix: shared prompts; rows are then grouped by prompt.
          cache: decoding only, without a prefix; never with scan_layers (see `unstack_layers`).

        Returns:
          Hidden states [R, T, D] after the final norm, and KV per layer (a stacked KV under scan_layers).
        """
        c = self.config
        embedding = self.param("embedding", INIT, (self.vocab_size, c.width))
        if not c.tie_embeddings:
            self.param("unembedding", INIT, (c.width, self.vocab_size))
        x = embed(embedding, tokens).astype(jnp.dtype(c.dtype))
        prefix_valid = None if prefix is None else prefix.valid_PL
        start_R = None if cache is None else cache.start_R
        block = _block_class(c)
        if c.scan_layers:
            layers = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=typing.cast(Any, (nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast, 0, nn.broadcast)),
                length=c.num_layers,
            )(c, name="layers")
            x, own = layers(x, positions, mask, prefix_valid, start_R, None if prefix is None else prefix.layers, None)
        else:
            own = []
            for i in range(c.num_layers):
                layer_prefix = None if prefix is None else prefix.layers[i]
                layer_cache = None if cache is None else cache.layers[i]
                layer = block(c, name=f"layers_{i}")
                x, kv = layer(x, positions, mask, prefix_valid, start_R, layer_prefix, layer_cache)
                own.append(kv)
            own = tuple(own)
        return RMSNorm(c.norm_eps, name="final_norm")(x), own


def unembed_DV(params: Params, config: ModelConfig) -> Array:
    """The output matrix [D, V]: the transposed embedding where tied."""
    return params["embedding"].T if config.tie_embeddings else params["unembedding"]


def unstack_layers(params: Params, num_layers: int) -> Params:
    """Parameters of a scanned decoder in the unrolled layout (which decoding uses); unrolled ones as they are."""
    if "layers" not in params:
        return params
    rest = {k: v for k, v in params.items() if k != "layers"}
    layers = {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)}
    return {**rest, **layers}


def stack_layers(params: Params, num_layers: int) -> Params:
    """The inverse of `unstack_layers`."""
    if "layers" in params:
        return params
    names = [f"layers_{i}" for i in range(num_layers)]
    rest = {k: v for k, v in params.items() if k not in names}
    return {**rest, "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *(params[n] for n in names))}


def prompt_inputs(length_P: Array, max_length: int) -> tuple[Array, Array, Array]:
    """Positions [P, L], mask [P, L, L] and valid columns [P, L] of left-padded prompts."""
    columns = jnp.arange(max_length)[None, :]
    start_P1 = (max_length - length_P)[:, None]
    valid_PL = columns >= start_P1
    positions_PL = jnp.maximum(columns - start_P1, 0)
    causal = columns[:, :, None] >= columns[:, None, :]
    return positions_PL, causal & valid_PL[:, None, :], valid_PL


def init_params(config: ModelConfig, vocab_size: int, key: Array) -> Params:
    """Random parameters, float32, as a plain nested dict."""
    tokens = jnp.zeros((1, 2), jnp.int32)
    positions, mask, _ = prompt_inputs(jnp.array([2]), 2)
    return Decoder(config, vocab_size).init(key, tokens, positions, mask)["params"]
