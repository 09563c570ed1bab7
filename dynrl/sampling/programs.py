"""The slot engine's jitted programs, all of fixed shape; the host (`engine.py`) decides what they are fed.

What they work on is explained in `state.py`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.config import ModelConfig
from dynrl.models.decoder import Params
from dynrl.models.kv import KV
from dynrl.models.policy import append, decode_step, prompt_kv
from dynrl.sampling.distribution import Settings, sample
from dynrl.sampling.noise import rollout_keys
from dynrl.sampling.slots import OPEN
from dynrl.sampling.state import MAX_STOP_TOKENS, EngineState, Local, Outputs, Slots
from dynrl.types import Array, Finish, Payload

ENVIRONMENT = -1  # in the place of a token's version: given, not sampled


# ---- What the host hands over: one int32 array a program, since each array that is passed costs its time ----


class Admission(NamedTuple):
    """What the host writes into a slot that begins a rollout; all int32, floats as their bits."""

    valid: Any
    prefix_row: Any
    row: Any
    token: Any
    position: Any
    limit: Any
    identity: Any  # 5 numbers
    top_k: Any
    floats: Any  # temperature, top_p, min_p
    stop: Any  # MAX_STOP_TOKENS numbers


_ADMISSION_WIDTHS = (1, 1, 1, 1, 1, 1, 5, 1, 3, MAX_STOP_TOKENS)
ADMISSION_WIDTH = sum(_ADMISSION_WIDTHS)


def _unpack(host_SF: Array) -> Admission:
    ends = np.cumsum(_ADMISSION_WIDTHS)
    parts = jnp.split(host_SF[:, : ends[-1]], ends[:-1], axis=1)
    return Admission(*(x[:, 0] if x.shape[1] == 1 else x for x in parts))


# ---- Filling slots ----


def prefill(
    params: Params, prefix: tuple[KV, ...], host_PF: Array, config: ModelConfig, local: Local
) -> tuple[KV, ...]:
    """Runs prompts, without their last tokens, into rows of the prefix.

    Args:
      params: in the decode layout.
      prefix: donated.
      host_PF: int32 [P, bucket + 2]: right-padded tokens, their number, the row (beyond the last for filler).
      config: the architecture.
      local: runs functions by row shard.
    """
    new = prompt_kv(params, host_PF[:, :-2], host_PF[:, -2], config)

    def write(prefix: tuple[KV, ...], new: tuple[KV, ...], row_P: Array) -> tuple[KV, ...]:
        def one(old: KV, values: KV) -> KV:
            room = old.k.shape[2] - values.k.shape[2]
            stored = old.stored(values)
            whole = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, room)) + ((0, 0),) * (x.ndim - 3)), stored)
            return jax.tree.map(lambda o, x: o.at[row_P].set(x, mode="drop"), old, whole)

        return tuple(one(old, values) for old, values in zip(prefix, new, strict=True))

    return local(write, "kv kv rows -> kv")(prefix, new, host_PF[:, -1])


def admit(
    layers: tuple[KV, ...], prefix: tuple[KV, ...], slots: Slots, seed: Array, host_SF: Array, local: Local
) -> tuple[tuple[KV, ...], Slots]:
    """Begins rollouts in slots: copies the prompt's keys and values, and sets everything else.

    Args:
      layers: donated.
      prefix: rows of prompts.
      slots: donated.
      seed: uint32 scalar.
      host_SF: int32, an Admission for each slot; in the last column the slots to fill, first those, then others.
      local: runs functions by row shard.
    """
    new = _unpack(host_SF)
    valid_S = new.valid > 0
    floats = jax.lax.bitcast_convert_type(new.floats, jnp.float32)
    begun = Slots(
        token_S=new.token,
        position_S=new.position,
        made_S=jnp.zeros_like(new.token),
        limit_S=new.limit,
        row_S=new.row,
        active_S=valid_S,
        finish_S=jnp.full_like(new.token, OPEN),
        keys_S2=rollout_keys(seed, jax.lax.bitcast_convert_type(new.identity, jnp.uint32)),
        settings=Settings(floats[:, 0], new.top_k, floats[:, 1], floats[:, 2]),
        stop_SK=new.stop,
    )

    def copy(
        layers: tuple[KV, ...], prefix: tuple[KV, ...], valid_S: Array, order_S: Array, row_S: Array
    ) -> tuple[KV, ...]:  # fmt: skip
        # A loop over the slots that begin, not a scatter over all: few begin at once.
        def one(i: Array, layers: tuple[KV, ...]) -> tuple[KV, ...]:
            slot = order_S[i]

            def fan_out(to: Array, source: Array) -> Array:
                values = jax.lax.dynamic_slice_in_dim(source, row_S[slot], 1)
                width = min(to.shape[2], source.shape[2])
                return jax.lax.dynamic_update_slice(to, values[:, :, :width], (slot,) + (0,) * (to.ndim - 1))

            return jax.tree.map(fan_out, layers, prefix)

        return jax.lax.fori_loop(0, valid_S.sum(dtype=jnp.int32), one, layers)

    layers = local(copy, "kv kv rows rows rows -> kv")(layers, prefix, valid_S, host_SF[:, -1], new.prefix_row)
    return layers, jax.tree.map(partial(_where_rows, valid_S), begun, slots)


def _where_rows(mask: Array, a: Array, b: Array) -> Array:
    return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)


# ---- Decoding ----


class Recorded(NamedTuple):
    """What the steps of one chunk drew, [S, chunk steps]: written at one column a step, whatever the slots' lengths."""

    tokens_SK: Array
    logp_SK: Array
    full_logp_SK: Array | None


def chunk(
    params: Params, state: EngineState, seed: Array, host: Array, config: ModelConfig, chunk_steps: int, local: Local
) -> tuple[EngineState, Array, Array]:
    """Begins rollouts, then decodes until the step limit, until enough slots came free, or until none is active.

    Args:
      params: in the decode layout.
      state: donated.
      seed: uint32 scalar.
      host: int32 [1 + S, ADMISSION_WIDTH + 1]; its first row holds the steps at most (up to chunk_steps), the slots
        that must come free to end sooner, and the weights' version; the others an Admission for each slot.
      config: the architecture.
      chunk_steps: K.
      local: runs functions by row shard.

    Returns:
      The state; int32 [2 * S + 1]: completion lengths, then Finish or OPEN, then the steps made; the drawn tokens
      [S, K], of which a slot's first (its length now less its length before) count.
    """
    control = host[0]
    started, first = admit(state.layers, state.prefix, state.slots, seed, host[1:], local)
    free = jnp.sum(~first.active_S)
    columns = state.layers[0].k.shape[2]
    shape = (first.token_S.shape[0], chunk_steps)
    zeros = jnp.zeros(shape, jnp.float32)
    recorded = Recorded(jnp.zeros(shape, jnp.int32), zeros, None if state.outputs.full_logp_RT is None else zeros)

    def more(carry: tuple[Array, Any, Slots, Recorded]) -> Array:
        i, _, slots, _ = carry
        active = jnp.sum(slots.active_S)
        return (i < control[0]) & (active > 0) & (shape[0] - active - free < control[1])

    def body(carry: tuple[Array, Any, Slots, Recorded]) -> tuple[Array, Any, Slots, Recorded]:
        i, layers, s, recorded = carry
        position_S = jnp.where(s.active_S, s.position_S, columns)  # beyond the last column: others write nothing
        logits_SV, layers = decode_step(params, s.token_S, position_S, layers, config)
        draw = sample(logits_SV, s.keys_S2, s.made_S, s.settings)
        values = Recorded(draw.token_N, draw.logp_N, None if recorded.full_logp_SK is None else draw.full_logp_N)
        recorded = jax.tree.map(lambda r, x: jax.lax.dynamic_update_slice(r, x[:, None], (0, i)), recorded, values)
        made_S = s.active_S & draw.finite_N
        length_S = s.made_S + made_S
        stop_S = made_S & jnp.any(draw.token_N[:, None] == s.stop_SK, axis=1)
        full_S = made_S & (length_S >= s.limit_S)
        finish_S = jnp.where(stop_S, Finish.STOP, jnp.where(full_S, Finish.LENGTH, s.finish_S))
        return i + 1, layers, s._replace(
            token_S=jnp.where(made_S, draw.token_N, s.token_S),
            position_S=s.position_S + made_S,
            made_S=length_S,
            active_S=made_S & ~stop_S & ~full_S,
            finish_S=jnp.where(s.active_S & ~draw.finite_N, Finish.FAILED, finish_S),
        ), recorded  # fmt: skip

    steps, layers, slots, recorded = jax.lax.while_loop(more, body, (jnp.int32(0), started, first, recorded))
    version_SK = jnp.full(shape, control[2], jnp.int32)
    drawn = Outputs(recorded.tokens_SK, recorded.logp_SK, version_SK, recorded.full_logp_SK)
    outputs = local(write_windows, "rows rows rows rows rows -> rows")(
        state.outputs, drawn, first.row_S, first.made_S, first.active_S
    )
    report = jnp.concatenate([slots.made_S, jnp.where(slots.active_S, OPEN, slots.finish_S), steps[None]])
    return EngineState(layers, state.prefix, slots, outputs), report, recorded.tokens_SK


def write_windows(outputs: Outputs, new: Outputs, row_N: Array, column_N: Array, valid_N: Array) -> Outputs:
    """Writes row i of `new` [N, K] at (row_N[i], column_N[i]); what lies beyond a rollout's length is written over."""

    def one(i: Array, outputs: Outputs) -> Outputs:
        def write(out: Array, values: Array) -> Array:
            window = jax.lax.dynamic_slice_in_dim(values, i, 1)
            at = (row_N[i], column_N[i])
            old = jax.lax.dynamic_slice(out, at, window.shape)
            return jax.lax.dynamic_update_slice(out, jnp.where(valid_N[i], window, old), at)

        return jax.tree.map(write, outputs, new)

    return jax.lax.fori_loop(0, row_N.shape[0], one, outputs)


# ---- What happens to single slots between chunks ----


def stop(slots: Slots, host_S4: Array) -> Slots:
    """Ends rollouts: cancelled, or cut to fewer tokens because their text holds a stop string.

    Args:
      slots: donated.
      host_S4: int32: whether to end, completion length, last token, Finish.
    """
    end_S, made_S, token_S, finish_S = (host_S4[:, i] for i in range(4))
    ended = slots._replace(
        token_S=token_S,
        position_S=slots.position_S - (slots.made_S - made_S),
        made_S=made_S,
        active_S=jnp.zeros_like(slots.active_S),
        finish_S=finish_S,
    )
    return jax.tree.map(partial(_where_rows, end_S > 0), ended, slots)


def scrub(layers: tuple[KV, ...], column_S: Array) -> tuple[KV, ...]:
    """Zeros the caches from a column on, where slots met non-finite numbers: a weight of 0 would not hide those."""

    def one(x: Array) -> Array:
        gone_SC = jnp.arange(x.shape[2])[None] >= column_S[:, None]
        return jnp.where(gone_SC.reshape(x.shape[0], 1, -1, *[1] * (x.ndim - 3)), jnp.zeros((), x.dtype), x)

    return jax.tree.map(one, layers)


def extend(params: Params, state: EngineState, host_PF: Array, config: ModelConfig, local: Local) -> EngineState:
    """Goes on from finished rollouts with given tokens.

    The last token drawn was not fed yet: it is fed first, then all the given ones but the last.

    Args:
      params: in the decode layout.
      state: donated.
      host_PF: int32 [P, bucket + 3]: right-padded given tokens, their number, the slot (-1 for filler), the limit.
      config: the architecture.
      local: runs functions by row shard.
    """
    given_PE, count_P, slot_P, limit_P = host_PF[:, :-3], host_PF[:, -3], host_PF[:, -2], host_PF[:, -1]

    def take(tree: Any, slot_P: Array) -> Any:
        return jax.tree.map(lambda x: x[jnp.maximum(slot_P, 0)], tree)

    layers, s = (
        local(take, "kv rows -> kv")(state.layers, slot_P),
        local(take, "rows rows -> rows")(state.slots, slot_P),
    )
    fed_PE = jnp.concatenate([s.token_S[:, None], given_PE[:, :-1]], axis=1)
    layers = append(params, fed_PE, s.position_S, layers, config)
    last_P = jnp.take_along_axis(given_PE, jnp.maximum(count_P - 1, 0)[:, None], axis=1)[:, 0]
    extended = s._replace(
        token_S=last_P,
        position_S=s.position_S + count_P,
        made_S=s.made_S + count_P,
        limit_S=limit_P,
        active_S=count_P > 0,
        finish_S=jnp.full_like(s.finish_S, OPEN),
    )

    def put(tree: Any, new: Any, slot_P: Array) -> Any:
        def one(x: Array, values: Array) -> Array:
            return x.at[jnp.where(slot_P >= 0, slot_P, x.shape[0])].set(values, mode="drop")

        return jax.tree.map(one, tree, new)

    zeros = jnp.zeros(given_PE.shape, jnp.float32)
    full = None if state.outputs.full_logp_RT is None else zeros
    given = Outputs(given_PE, zeros, jnp.full_like(given_PE, ENVIRONMENT), full)
    return EngineState(
        layers=local(put, "kv kv rows -> kv")(state.layers, layers, slot_P),
        prefix=state.prefix,
        slots=local(put, "rows rows rows -> rows")(state.slots, extended, slot_P),
        outputs=local(write_windows, "rows rows rows rows rows -> rows")(
            state.outputs, given, s.row_S, s.made_S, slot_P >= 0
        ),
    )


# ---- Handing over ----


def hand_over(
    outputs: Outputs, host_PF: Array, g: int, longest: int, pad_id: int, local: Local
) -> tuple[Payload, Array | None]:
    """Whole groups as training needs them, and the full-distribution log-probs where they are kept.

    Args:
      outputs: stays.
      host_PF: int32 [P, L + 1 + 3 * G]: prompt, its length, then each rollout's row, completion length and Finish.
      g: G.
      longest: T.
      pad_id: fills completions on the right.
      local: runs functions by row shard.
    """
    prompt_PL, rest = host_PF[:, : -3 * g - 1], host_PF[:, -3 * g :]
    row_PG, length_PG, finish_PG = rest[:, :g], rest[:, g : 2 * g], rest[:, 2 * g :]

    def gather(outputs: Outputs, row_PG: Array) -> Outputs:
        return jax.tree.map(lambda x: x[row_PG, :longest], outputs)

    found = local(gather, "rows rows -> rows")(outputs, row_PG)
    made_PGT = jnp.arange(longest)[None, None] < length_PG[:, :, None]
    version_PGT = jnp.where(made_PGT, found.version_RT, -1)
    sampled_PGT = version_PGT != ENVIRONMENT
    payload = Payload(
        prompt_PL=prompt_PL,
        prompt_length_P=host_PF[:, -3 * g - 1],
        tokens_PGT=jnp.where(made_PGT, found.tokens_RT, pad_id),
        logp_PGT=jnp.where(sampled_PGT, found.logp_RT, 0.0),
        mask_PGT=sampled_PGT,
        version_PGT=version_PGT,
        length_PG=length_PG,
        finish_PG=finish_PG,
    )
    full = found.full_logp_RT
    return payload, None if full is None else jnp.where(sampled_PGT, full, 0.0)
