"""The sampler's jitted programs: prefill and first token, then chunks of decode steps at one fixed shape."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dynrl.config import ModelConfig
from dynrl.models.decoder import Cache, Params
from dynrl.models.policy import decode_step, prefill
from dynrl.sampling.noise import Identity, rollout_keys, sample
from dynrl.types import Array, Finish, Payload


class Batch(NamedTuple):
    """What the host hands over to start P groups; arrays with a leading P axis."""

    prompt_PL: Array
    prompt_length_P: Array
    valid_P: Array
    identity: Identity
    temperature_P: Array
    max_tokens_P: Array


class DecodeState(NamedTuple):
    """The device's side of one lock-step batch: P prompts, N = P * G rollouts, T completion columns."""

    batch: Batch
    cache: Cache  # columns: prompt, then completion
    keys_N2: Array
    tokens_NT: Array
    logp_NT: Array
    length_N: Array
    finish_N: Array
    done_N: Array
    active_steps: Array  # scalar: row-steps that made a token
    slot_steps: Array  # scalar: row-steps computed


def start(params: Params, batch: Batch, seed: Array, config: ModelConfig, g: int, t: int, eos: int) -> DecodeState:
    """Prefills each prompt once and draws the first token of its G rollouts."""
    p = batch.prompt_PL.shape[0]
    n = p * g
    # The last completion token is never fed: T - 1 columns hold all the others.
    logits_PV, cache = prefill(params, batch.prompt_PL, batch.prompt_length_P, n, max(t - 1, 1), config)
    done_N = jnp.repeat(~batch.valid_P, g)
    state = DecodeState(
        batch=batch,
        cache=cache,
        keys_N2=rollout_keys(seed, batch.identity, g),
        tokens_NT=jnp.zeros((n, t), jnp.int32),
        logp_NT=jnp.zeros((n, t), jnp.float32),
        length_N=jnp.zeros(n, jnp.int32),
        finish_N=jnp.full(n, Finish.LENGTH, jnp.int32),
        done_N=done_N,
        active_steps=jnp.zeros((), jnp.int32),
        slot_steps=jnp.zeros((), jnp.int32),
    )
    return _append(state, jnp.repeat(logits_PV, g, axis=0), jnp.zeros((), jnp.int32), g, eos)


def _append(state: DecodeState, logits_NV: Array, position: Array, g: int, eos: int) -> DecodeState:
    """Draws the token at `position` for the rows that are not done, and closes those that end there."""
    temperature_N, max_tokens_N = (jnp.repeat(x, g) for x in (state.batch.temperature_P, state.batch.max_tokens_P))
    token_N, logp_N, finite_N = sample(logits_NV, state.keys_N2, position, temperature_N)
    active_N = ~state.done_N
    made_N = active_N & finite_N
    stop_N = made_N & (token_N == eos)
    full_N = made_N & (position + 1 >= max_tokens_N)
    finish_N = jnp.where(stop_N, Finish.STOP, jnp.where(active_N & ~finite_N, Finish.FAILED, state.finish_N))
    column = (0, position)
    return state._replace(
        tokens_NT=jax.lax.dynamic_update_slice(state.tokens_NT, jnp.where(made_N, token_N, 0)[:, None], column),
        logp_NT=jax.lax.dynamic_update_slice(state.logp_NT, jnp.where(made_N, logp_N, 0.0)[:, None], column),
        length_N=state.length_N + made_N,
        finish_N=finish_N,
        done_N=state.done_N | stop_N | full_N | ~finite_N,
        active_steps=state.active_steps + active_N.sum(dtype=jnp.int32),
        slot_steps=state.slot_steps + active_N.shape[0],
    )


def chunk(
    params: Params, state: DecodeState, stop_P: Array, max_steps: Array, config: ModelConfig, g: int, eos: int
) -> tuple[DecodeState, Array]:
    """Decodes until every row is done or `max_steps` steps were made.

    Args:
      params: weights in the decode layout.
      state: donated.
      stop_P: bool, groups cancelled since the last chunk.
      max_steps: int32 scalar, traced.
      config: the architecture.
      g: rollouts per group.
      eos: the stop token.

    Returns:
      The state, and bool [P]: groups all of whose rollouts are done.
    """
    state = state._replace(done_N=state.done_N | jnp.repeat(stop_P, g))
    first, prompt_columns = state.cache.index, state.batch.prompt_PL.shape[1]
    length_N = jnp.repeat(state.batch.prompt_length_P, g)
    columns = jnp.arange(state.cache.layers[0].k.shape[2])[None, :]
    prompt_NC = columns >= prompt_columns - length_N[:, None]  # left padding is not seen

    def more(s: DecodeState) -> Array:
        return (s.cache.index - first < max_steps) & ~jnp.all(s.done_N)

    def body(s: DecodeState) -> DecodeState:
        i = s.cache.index - prompt_columns
        token_N = jax.lax.dynamic_index_in_dim(s.tokens_NT, i, axis=1, keepdims=False)
        logits, cache = decode_step(
            params, token_N, length_N + i, prompt_NC & (columns <= s.cache.index), s.cache, config
        )
        return _append(s._replace(cache=cache), logits, i + 1, g, eos)

    state = jax.lax.while_loop(more, body, state)
    return state, jnp.all(state.done_N.reshape(-1, g), axis=1)


def payload(state: DecodeState, version: Array, g: int) -> Payload:
    """The batch's rollouts as training needs them. Copies: the state goes on being donated."""
    n, t = state.tokens_NT.shape
    made_NT = jnp.arange(t)[None, :] < state.length_N[:, None]
    shaped = (n // g, g, t)
    return Payload(
        prompt_PL=state.batch.prompt_PL,
        prompt_length_P=state.batch.prompt_length_P,
        tokens_PGT=state.tokens_NT.reshape(shaped),
        logp_PGT=state.logp_NT.reshape(shaped),
        mask_PGT=made_NT.reshape(shaped),
        version_PGT=jnp.where(made_NT, version, -1).reshape(shaped),
        length_PG=state.length_N.reshape(-1, g),
        finish_PG=state.finish_N.reshape(-1, g),
    )
