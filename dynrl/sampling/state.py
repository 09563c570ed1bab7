"""What the slot engine keeps on the devices.

A slot holds one rollout. At every moment its cache holds the tokens at positions 0 to `position` - 1 in the columns
of the same numbers, and `token` is the one at `position`, known but not yet fed. A prompt is prefilled without its
last token into a row of `prefix`, copied from there to each slot of its group, and its last token is the first that
a slot feeds: so every completion token, the first one too, is drawn by the same step, and its logits depend on the
rollout alone. What is drawn goes to the rollout's row of `outputs`, which outlives the slot.

Slots, output rows and prefix rows are split over the row shards of the mesh; slots, rows and prefix rows are counted
within a shard, and a group never crosses shards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dynrl.models import sharding
from dynrl.models.kv import KV
from dynrl.sampling.distribution import Settings
from dynrl.sampling.memory import CacheShape
from dynrl.types import Array

MAX_STOP_TOKENS = 8  # of a request, the tokenizer's own included


class Slots(NamedTuple):
    """What every slot is doing; leading axis S."""

    token_S: Array  # int32
    position_S: Array  # int32
    made_S: Array  # int32: completion tokens so far
    limit_S: Array  # int32: completion tokens at most
    row_S: Array  # int32: the rollout's row of the outputs
    active_S: Array  # bool: decodes
    free_S: Array  # bool: may be given to the next in turn; neither, while the host has something to do first
    hold_S: Array  # bool: the host decides what follows the rollout's end
    keys_S2: Array  # uint32
    settings: Settings
    stop_SK: Array  # int32, padded with -1


class Outputs(NamedTuple):
    """Completions in the making and not yet handed over; leading axes R, T."""

    tokens_RT: Array  # int32
    logp_RT: Array  # float32
    version_RT: Array  # int32
    full_logp_RT: Array | None  # float32


class EngineState(NamedTuple):
    """Everything on the devices, donated from program to program."""

    layers: tuple[KV, ...]  # [S, kv_heads, columns, head_dim]
    prefix: tuple[KV, ...]  # [prefix rows, kv_heads, longest prompt, head_dim]
    slots: Slots
    outputs: Outputs


class Local:
    """Functions of one row shard's arrays, as functions of the whole arrays.

    Called with a function and what its arguments and results are: "kv" for trees of [rows, heads, ...], which are
    split over the row shards and heads, "rows" for what is split over row shards only, "all" for what every one has.
    """

    def __init__(self, mesh: Mesh, num_kv_heads: int) -> None:
        self._mesh = mesh
        heads = sharding.kv_heads(mesh, num_kv_heads).spec
        self._specs = {"kv": heads, "rows": PartitionSpec(sharding.ROWS), "all": PartitionSpec()}
        self.shards = sharding.num_row_shards(mesh)

    def __call__(self, function: Callable[..., Any], signature: str) -> Callable[..., Any]:
        """`signature` reads like "kv rows -> kv"."""
        ins, outs = ([self._specs[name] for name in side.split()] for side in signature.split(" -> "))
        out = outs[0] if len(outs) == 1 else tuple(outs)
        return jax.shard_map(function, mesh=self._mesh, in_specs=tuple(ins), out_specs=out)

    def state_shardings(self, state: "EngineState") -> Any:
        """How an engine state lies on the mesh."""

        def of(name: str) -> Callable[[Any], NamedSharding]:
            return lambda _: NamedSharding(self._mesh, self._specs[name])

        return EngineState(
            *(jax.tree.map(of("kv"), part) for part in (state.layers, state.prefix)),
            *(jax.tree.map(of("rows"), part) for part in (state.slots, state.outputs)),
        )


def empty_state(shape: CacheShape, num_slots: int) -> EngineState:
    """No rollouts anywhere, all zeros."""
    c = shape.model

    def cache(rows: int, columns: int) -> tuple[KV, ...]:
        size = (rows, c.num_kv_heads, columns)
        values = jnp.zeros((*size, c.head_dim), shape.kv_dtype)
        scale = jnp.zeros(size, jnp.float32) if shape.kv_dtype == "int8" else None
        return (KV(values, values, scale, scale),) * c.num_layers

    numbers, floats = jnp.zeros(num_slots, jnp.int32), jnp.zeros(num_slots, jnp.float32)
    slots = Slots(
        token_S=numbers, position_S=numbers, made_S=numbers, limit_S=numbers, row_S=numbers,
        active_S=jnp.zeros(num_slots, bool), free_S=jnp.ones(num_slots, bool), hold_S=jnp.zeros(num_slots, bool),
        keys_S2=jnp.zeros((num_slots, 2), jnp.uint32),
        settings=Settings(floats, numbers, floats, floats),
        stop_SK=jnp.zeros((num_slots, MAX_STOP_TOKENS), jnp.int32),
    )  # fmt: skip
    ids = jnp.zeros((shape.num_rows(num_slots), shape.max_completion_tokens), jnp.int32)
    logp = jnp.zeros(ids.shape, jnp.float32)
    outputs = Outputs(ids, logp, ids, logp if shape.full_logprobs else None)
    return EngineState(
        cache(num_slots, shape.columns), cache(shape.num_prefix_rows, shape.max_prompt_tokens), slots, outputs
    )
