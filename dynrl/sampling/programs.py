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
from dynrl.sampling.distribution import Draw, Settings, sample
from dynrl.sampling.noise import rollout_keys
from dynrl.sampling.slots import OPEN
from dynrl.sampling.state import MAX_STOP_TOKENS, EngineState, Local, Outputs, Slots
from dynrl.types import Array, Finish, Payload

ENVIRONMENT = -1  # in the place of a token's version: given, not sampled


# ---- What the host hands over: one int32 array a program, since each array that is passed costs its time ----


class Admission(NamedTuple):
    """A rollout that is next in turn for a slot; all int32, floats as their bits."""

    valid: Any
    hold: Any
    prefix_row: Any
    row: Any
    token: Any
    position: Any
    limit: Any
    identity: Any  # 5 numbers, the sample last
    top_k: Any
    floats: Any  # temperature, top_p, min_p
    stop: Any  # MAX_STOP_TOKENS numbers


_ADMISSION_WIDTHS = (1, 1, 1, 1, 1, 1, 1, 5, 1, 3, MAX_STOP_TOKENS)
ADMISSION_WIDTH = sum(_ADMISSION_WIDTHS)


class Plan(NamedTuple):
    """Who is next in turn for the slots of a row shard, in order; leading axis M."""

    valid_M: Array  # bool, the first ones
    prefix_row_M: Array  # int32
    slots: Slots  # as they begin


def _plan(seed: Array, host_MF: Array) -> Plan:
    ends = np.cumsum(_ADMISSION_WIDTHS)
    parts = jnp.split(host_MF, ends[:-1], axis=1)
    new = Admission(*(x[:, 0] if x.shape[1] == 1 else x for x in parts))
    floats = jax.lax.bitcast_convert_type(new.floats, jnp.float32)
    slots = Slots(
        token_S=new.token,
        position_S=new.position,
        made_S=jnp.zeros_like(new.token),
        limit_S=new.limit,
        row_S=new.row,
        active_S=jnp.ones_like(new.valid, bool),
        free_S=jnp.zeros_like(new.valid, bool),
        hold_S=new.hold > 0,
        keys_S2=rollout_keys(seed, jax.lax.bitcast_convert_type(new.identity, jnp.uint32)),
        settings=Settings(floats[:, 0], new.top_k, floats[:, 1], floats[:, 2]),
        stop_SK=new.stop,
    )
    return Plan(new.valid > 0, new.prefix_row, slots)


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


def fill(
    layers: tuple[KV, ...], prefix: tuple[KV, ...], slots: Slots, plan: Plan, taken_1: Array, begun_M2: Array,
    step: Array,
) -> tuple[tuple[KV, ...], Slots, Array, Array]:  # fmt: skip
    """Gives a row shard's free slots to the next in turn: copies the prompt's keys and values, sets everything else.

    Args:
      layers: changed in place.
      prefix: rows of prompts.
      slots: of the shard.
      plan: of the shard.
      taken_1: int32, how many of the plan have begun.
      begun_M2: int32, slot and step of those; -1 elsewhere.
      step: int32 scalar, decode steps made in this chunk.

    Returns:
      Layers, slots, taken_1 and begun_M2.
    """
    s, m, taken = slots.free_S.shape[0], plan.valid_M.shape[0], taken_1[0]
    num = jnp.minimum(jnp.sum(slots.free_S, dtype=jnp.int32), jnp.sum(plan.valid_M, dtype=jnp.int32) - taken)
    numbers = jnp.arange(s, dtype=jnp.int32)

    def begin() -> tuple[Slots, Array, Array]:
        rank_S = jnp.cumsum(slots.free_S, dtype=jnp.int32) - 1
        new_S = slots.free_S & (rank_S < num)
        from_S = jnp.clip(taken + rank_S, 0, m - 1)
        begun = jax.tree.map(lambda new, old: _where_rows(new_S, new[from_S], old), plan.slots, slots)
        where_M2 = begun_M2.at[jnp.where(new_S, from_S, m)].set(
            jnp.stack([numbers, jnp.full_like(numbers, step)], axis=1), mode="drop"
        )
        order_S = jnp.zeros_like(numbers).at[jnp.where(new_S, rank_S, s)].set(numbers, mode="drop")
        return begun, where_M2, order_S

    slots, begun_M2, order_S = jax.lax.cond(num > 0, begin, lambda: (slots, begun_M2, slots.row_S))  # no order

    # A loop over the slots that begin, not a scatter over all: few begin at once.
    def copy(i: Array, layers: tuple[KV, ...]) -> tuple[KV, ...]:
        def fan_out(to: Array, source: Array) -> Array:
            values = jax.lax.dynamic_slice_in_dim(source, plan.prefix_row_M[taken + i], 1)
            width = min(to.shape[2], source.shape[2])
            return jax.lax.dynamic_update_slice(to, values[:, :, :width], (order_S[i],) + (0,) * (to.ndim - 1))

        return jax.tree.map(fan_out, layers, prefix)

    return jax.lax.fori_loop(0, num, copy, layers), slots, (taken + num)[None], begun_M2


def _where_rows(mask: Array, a: Array, b: Array) -> Array:
    return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, b)


# ---- Decoding ----


def decode(
    params: Params, layers: tuple[KV, ...], slots: Slots, config: ModelConfig
) -> tuple[tuple[KV, ...], Slots, Draw, Array]:
    """One token more for every active slot.

    Returns:
      Layers, slots, what was drawn, and int32 [S]: the Finish of a rollout that ended, or OPEN.
    """
    s, columns = slots, layers[0].k.shape[2]
    position_S = jnp.where(s.active_S, s.position_S, columns)  # beyond the last column: others write nothing
    logits_SV, layers = decode_step(params, s.token_S, position_S, layers, config)
    draw = sample(logits_SV, s.keys_S2, s.made_S, s.settings)
    made_S = s.active_S & draw.finite_N
    length_S = s.made_S + made_S
    stop_S = made_S & jnp.any(draw.token_N[:, None] == s.stop_SK, axis=1)
    full_S = made_S & (length_S >= s.limit_S)
    finish_S = jnp.where(stop_S, Finish.STOP, jnp.where(full_S, Finish.LENGTH, OPEN))
    slots = s._replace(
        token_S=jnp.where(made_S, draw.token_N, s.token_S),
        position_S=s.position_S + made_S,
        made_S=length_S,
        active_S=made_S & ~stop_S & ~full_S,
        free_S=s.free_S | ((stop_S | full_S) & ~s.hold_S),  # one that failed is cleaned first
    )
    return layers, slots, draw, jnp.where(s.active_S & ~draw.finite_N, Finish.FAILED, finish_S)


class Chunk(NamedTuple):
    """What the steps of a chunk hand to each other."""

    layers: tuple[KV, ...]
    slots: Slots
    outputs: Outputs
    taken_D: Array  # see `fill`; by row shard
    begun_M2: Array
    tokens_SK: Array  # int32: what each step drew
    finish_SK: Array  # int32: the Finish of a rollout that ended with that step, or OPEN


def chunk(
    params: Params, state: EngineState, seed: Array, control_3: Array, host_MF: Array, config: ModelConfig,
    chunk_steps: int, local: Local,
) -> tuple[EngineState, Array, Array]:  # fmt: skip
    """Decodes; gives slots that are or come free to the next in turn, between any two steps.

    Ends at the step limit, when enough slots came free that the plan has nobody for, or when nothing is left to do.

    Args:
      params: in the decode layout.
      state: donated.
      seed: uint32 scalar.
      control_3: int32: steps at most (up to chunk_steps), slots that must come free to end sooner, version of weights.
      host_MF: int32 [M, ADMISSION_WIDTH], an Admission a row, those of a shard together.
      config: the architecture.
      chunk_steps: K.
      local: runs functions by row shard.

    Returns:
      The state; int32 [S * K + 2 * M + 1]: Finish or OPEN by slot and step, slot (within its shard) and step at which
      each of the plan began or -1, and the steps made; the drawn tokens [S, K].
    """
    prefix, num_slots = state.prefix, state.slots.token_S.shape[0]
    plan = _plan(seed, host_MF)
    refill = local(fill, "kv kv rows rows rows rows all -> kv rows rows rows")
    write = local(write_outputs, "rows rows rows rows -> rows")

    planned_D = jnp.sum(plan.valid_M.reshape(local.shards, -1), axis=1)

    def free_and_left(slots: Slots, taken_D: Array) -> tuple[Array, Array]:
        return jnp.sum(slots.free_S.reshape(local.shards, -1), axis=1), planned_D - taken_D

    def nobody_for(slots: Slots, taken_D: Array) -> Array:
        """Free slots that the plan has nobody for."""
        free_D, left_D = free_and_left(slots, taken_D)
        return jnp.sum(jnp.maximum(free_D - left_D, 0))

    def more(carry: tuple[Array, Chunk]) -> Array:
        i, c = carry
        free_D, left_D = free_and_left(c.slots, c.taken_D)
        work = jnp.any(c.slots.active_S) | jnp.any(jnp.minimum(free_D, left_D) > 0)
        return (i < control_3[0]) & work & (nobody_for(c.slots, c.taken_D) - idle < control_3[1])

    def body(carry: tuple[Array, Chunk]) -> tuple[Array, Chunk]:
        i, c = carry
        # Before the step, so that whoever begins makes a token: the weights may change after the last one.
        layers, begun, taken_D, begun_M2 = refill(c.layers, prefix, c.slots, plan, c.taken_D, c.begun_M2, i)
        layers, slots, draw, finish_S = decode(params, layers, begun, config)
        full_logp = None if c.outputs.full_logp_RT is None else draw.full_logp_N
        new = Outputs(draw.token_N, draw.logp_N, jnp.full_like(finish_S, control_3[2]), full_logp)
        outputs = write(c.outputs, new, jnp.where(begun.active_S & draw.finite_N, begun.row_S, -1), begun.made_S)
        record = partial(jax.lax.dynamic_update_slice, start_indices=(0, i))
        tokens_SK, finish_SK = record(c.tokens_SK, draw.token_N[:, None]), record(c.finish_SK, finish_S[:, None])
        return i + 1, Chunk(layers, slots, outputs, taken_D, begun_M2, tokens_SK, finish_SK)

    zero, none_SK = jnp.int32(0), jnp.full((num_slots, chunk_steps), OPEN)
    taken_D, begun_M2 = jnp.zeros(local.shards, jnp.int32), jnp.full((host_MF.shape[0], 2), -1)
    # Once outside of the loop, for a chunk of no steps.
    layers, slots, taken_D, begun_M2 = refill(state.layers, prefix, state.slots, plan, taken_D, begun_M2, zero)
    idle = nobody_for(slots, taken_D)
    first = Chunk(layers, slots, state.outputs, taken_D, begun_M2, jnp.zeros_like(none_SK), none_SK)
    steps, c = jax.lax.while_loop(more, body, (zero, first))
    report = jnp.concatenate([c.finish_SK.ravel(), c.begun_M2.ravel(), steps[None]])
    return EngineState(c.layers, prefix, c.slots, c.outputs), report, c.tokens_SK


def write_outputs(outputs: Outputs, new: Outputs, row_N: Array, column_N: Array) -> Outputs:
    """Writes `new`, [N] or [N, E], to the rows from the columns on; nothing where a row is negative."""

    def write(out: Array, values: Array) -> Array:
        values = values.reshape(row_N.shape[0], -1)
        row_N1 = jnp.where(row_N < 0, out.shape[0], row_N)[:, None]
        column_NE = column_N[:, None] + jnp.arange(values.shape[1])[None]
        return out.at[row_N1, column_NE].set(values, mode="drop")

    return jax.tree.map(write, outputs, new)


# ---- What happens to single slots between chunks ----


def stop(slots: Slots, host_S4: Array) -> Slots:
    """Ends rollouts, or what a slot held after its rollout's end.

    Cancelled, cut to fewer tokens because their text holds a stop string, finished by the caller, or failed.

    Args:
      slots: donated.
      host_S4: int32: whether to end, completion length, last token, whether the slot is free from now on.
    """
    end_S, made_S, token_S, free_S = (host_S4[:, i] for i in range(4))
    ended = slots._replace(
        token_S=token_S,
        position_S=slots.position_S - (slots.made_S - made_S),
        made_S=made_S,
        active_S=jnp.zeros_like(slots.active_S),
        free_S=free_S > 0,
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
        outputs=local(write_outputs, "rows rows rows rows -> rows")(
            state.outputs, given, jnp.where(slot_P >= 0, s.row_S, -1), s.made_S
        ),
    )


# ---- Handing over ----


def hand_over(outputs: Outputs, host_PF: Array, g: int, pad_id: int, local: Local) -> tuple[Payload, Array | None]:
    """Whole groups as training needs them, and the full-distribution log-probs where they are kept.

    Args:
      outputs: stays.
      host_PF: int32 [P, L + 1 + 3 * G]: prompt, its length, then each rollout's row, completion length and Finish.
      g: G.
      pad_id: fills completions on the right.
      local: runs functions by row shard.
    """
    prompt_PL, rest = host_PF[:, : -3 * g - 1], host_PF[:, -3 * g :]
    row_PG, length_PG, finish_PG = rest[:, :g], rest[:, g : 2 * g], rest[:, 2 * g :]

    def gather(outputs: Outputs, row_PG: Array) -> Outputs:
        return jax.tree.map(lambda x: x[row_PG], outputs)

    found = local(gather, "rows rows -> rows")(outputs, row_PG)
    made_PGT = jnp.arange(outputs.tokens_RT.shape[1])[None, None] < length_PG[:, :, None]
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
