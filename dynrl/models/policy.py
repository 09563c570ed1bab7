"""The two uses of the decoder: log-probs of completions (training), and prefill and decode (sampling)."""

import jax
import jax.numpy as jnp

from dynrl.config import ModelConfig
from dynrl.core import token_logprobs
from dynrl.models.decoder import Cache, Decoder, Params, Prefix, prompt_inputs, unembed_DV
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


def prefill(
    params: Params, prompt_PL: Array, length_P: Array, num_rows: int, columns: int, config: ModelConfig
) -> tuple[Array, Cache]:
    """Runs each prompt once and fans its keys and values out to the rows of its group.

    Args:
      params: in the unrolled layout.
      prompt_PL: left-padded prompts.
      length_P: their lengths.
      num_rows: N = P * G.
      columns: what the cache holds behind the prompt.
      config: the architecture.

    Returns:
      Float32 logits [P, V] after the last prompt token, and a cache of L + columns whose next column is L.
    """
    p, length = prompt_PL.shape
    decoder = Decoder(config, params["embedding"].shape[0])
    positions, mask, _ = prompt_inputs(length_P, length)
    hidden, layers = decoder.apply({"params": params}, prompt_PL, positions, mask)

    def fan_out(x: Array) -> Array:
        return jnp.pad(jnp.repeat(x, num_rows // p, axis=0), ((0, 0), (0, 0), (0, columns), (0, 0)))

    cache = Cache(jax.tree.map(fan_out, layers), jnp.int32(length))
    return logits_of(hidden[:, -1], params, config), cache


def decode_step(
    params: Params, token_N: Array, position_N: Array, valid_NC: Array, cache: Cache, config: ModelConfig
) -> tuple[Array, Cache]:
    """Feeds one token per row into column `cache.index`.

    Args:
      params: in the unrolled layout.
      token_N: the tokens.
      position_N: their positions, counted without padding.
      valid_NC: bool, the cache columns that a row may see, the written one included.
      cache: donated.
      config: the architecture.

    Returns:
      Float32 logits [N, V], and the cache, one column longer.
    """
    decoder = Decoder(config, params["embedding"].shape[0])
    hidden, layers = decoder.apply(
        {"params": params}, token_N[:, None], position_N[:, None], valid_NC[:, None], cache=cache
    )
    return logits_of(hidden[:, 0], params, config), Cache(layers, cache.index + 1)


def cast_floats(params: Params, dtype: str) -> Params:
    """Floating-point leaves in `dtype`; the sampler's copy of the weights."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
