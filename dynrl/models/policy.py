"""The two uses of the decoder: log-probs of completions (training), and prefill and decode (sampling)."""

import typing

import jax
import jax.numpy as jnp

from dynrl.config import ModelConfig
from dynrl.core import token_logprobs
from dynrl.models.decoder import Cache, Decoder, Params, Prefix, prompt_inputs, unembed_DV
from dynrl.models.kv import KV
from dynrl.types import Array, Payload


def completion_logprobs(
    params: Params, payload: Payload, config: ModelConfig, *, temperature: Array | float = 1.0,
    chunk_tokens: int = 0, entropy_gradient: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Log-probs of completion tokens, each prompt run once for its G rollouts.

    The prompt's last hidden state predicts the first completion token of all G rows; the completion's own states
    predict the rest, so the last completion token is never fed.

    Args:
      params: the decoder's parameters.
      payload: B groups; reads prompt_PL, prompt_length_P and tokens_PGT.
      config: the architecture.
      temperature: divides the logits, as in the sampler.
      chunk_tokens: tokens whose logits exist at once; 0 = all.
      entropy_gradient: whether the entropy is differentiated.

    Returns:
      (logp, entropy), float32 [B, G, T] each, meaningless in the padding.
    """
    p, g, t = payload.tokens_PGT.shape
    length = payload.prompt_PL.shape[1]
    vocab_size = params["embedding"].shape[0]
    decoder = Decoder(config, vocab_size)
    positions, mask, valid = prompt_inputs(payload.prompt_length_P, length)
    hidden_PLD, layers = decoder.apply({"params": params}, payload.prompt_PL, positions, mask)
    first = jnp.broadcast_to(hidden_PLD[:, None, -1:, :], (p, g, 1, hidden_PLD.shape[-1]))
    if t == 1:
        hidden = first
    else:
        rows = payload.tokens_PGT[:, :, :-1].reshape(p * g, t - 1)
        steps = jnp.arange(t - 1)
        positions = jnp.repeat(payload.prompt_length_P, g)[:, None] + steps[None, :]
        causal = (steps[:, None] >= steps[None, :])[None]
        rest, _ = decoder.apply({"params": params}, rows, positions, causal, Prefix(layers, valid))
        hidden = jnp.concatenate([first, rest.reshape(p, g, t - 1, -1)], axis=2)
    n = p * g
    logp, entropy = token_logprobs(
        hidden.reshape(n, t, -1),
        unembed_DV(params, config).astype(hidden.dtype),
        payload.tokens_PGT.reshape(n, t),
        temperature=temperature,
        chunk_size=chunk_tokens or None,
        entropy_gradient=entropy_gradient,
    )
    return logp.reshape(p, g, t), entropy.reshape(p, g, t)


def logits_of(hidden: Array, params: Params, config: ModelConfig) -> Array:
    """Float32 logits [.., V] of hidden states [.., D]."""
    return jnp.dot(hidden, unembed_DV(params, config).astype(hidden.dtype), preferred_element_type=jnp.float32)


def prompt_kv(params: Params, tokens_PL: Array, length_P: Array, config: ModelConfig) -> tuple[KV, ...]:
    """Runs right-padded tokens from position 0, for their keys and values only.

    Args:
      params: in the unrolled layout.
      tokens_PL: int32; what stands beyond a row's length is not read.
      length_P: tokens of each row, 0 included.
      config: the architecture.

    Returns:
      KV per layer, [P, kv_heads, L, head_dim]; zeros beyond the length.
    """
    length = tokens_PL.shape[1]
    columns = jnp.arange(length)
    decoder = Decoder(config, params["embedding"].shape[0])
    causal = (columns[:, None] >= columns[None, :])[None]
    _, layers = decoder.apply({"params": params}, tokens_PL, jnp.broadcast_to(columns, tokens_PL.shape), causal)
    valid = (columns[None] < length_P[:, None])[:, None, :, None]
    return jax.tree.map(lambda x: jnp.where(valid, x, jnp.zeros((), x.dtype)), layers)


def decode_step(
    params: Params, token_R: Array, position_R: Array, layers: tuple[KV, ...], config: ModelConfig
) -> tuple[Array, tuple[KV, ...]]:
    """Feeds one token per row at its position, and predicts the next.

    Args:
      params: in the unrolled layout.
      token_R: the tokens.
      position_R: their positions, which are the cache's columns; at least the cache's length for a row to leave alone.
      layers: the rows' caches, donated.
      config: the architecture.

    Returns:
      Float32 logits [R, V], and the caches with the tokens' keys and values.
    """
    hidden, layers = _extend(params, token_R[:, None], position_R, layers, config)
    return logits_of(hidden[:, 0], params, config), layers


def append(
    params: Params, tokens_RE: Array, position_R: Array, layers: tuple[KV, ...], config: ModelConfig
) -> tuple[KV, ...]:
    """Feeds E tokens per row from its position on, as E decode steps would, for their keys and values only."""
    return _extend(params, tokens_RE, position_R, layers, config)[1]


def _extend(
    params: Params, tokens_RE: Array, position_R: Array, layers: tuple[KV, ...], config: ModelConfig
) -> tuple[Array, tuple[KV, ...]]:
    positions = position_R[:, None] + jnp.arange(tokens_RE.shape[1])[None]
    mask = jnp.arange(layers[0].k.shape[2])[None, None] <= positions[:, :, None]
    decoder = Decoder(config, params["embedding"].shape[0])
    out = decoder.apply({"params": params}, tokens_RE, positions, mask, cache=Cache(layers, position_R))
    return typing.cast(tuple[Array, tuple[KV, ...]], out)


def cast_floats(params: Params, dtype: str) -> Params:
    """Floating-point leaves in `dtype`; the sampler's copy of the weights."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
