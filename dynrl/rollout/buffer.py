"""The group buffer: kept groups on the devices, from their verdict to the step that trains them.

Fixed capacity, split over the row shards of the mesh. The host keeps which ticket lies in which slot, the same on
every process; a group normally stays in the shard that generated it. Only `put` spills to another shard when its
own is full, and only `take` moves rows, to balance the batch: by a reduce-scatter of the moved rows, so the whole
buffer never crosses a link. Integer and float rows alike move as bits: what was judged is what is trained.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dynrl.core import scatter_rows
from dynrl.models import sharding
from dynrl.types import Array, Groups, Payload, TrainBatch

RECORD = np.dtype(
    [
        ("score", float),  # sum over live rollouts, as are metric and length
        ("metric", float),
        ("length", int),
        ("live", int),  # rollouts
        ("tokens", int),  # of all rollouts
        ("step", int),  # being filled at dispatch
        ("version", int),  # at dispatch
        ("role", int),  # see TrainBatch
    ]
)  # what the host keeps of a group, for the metrics of the batch that will hold it


class Stored(NamedTuple):
    """What the buffer holds per group; leading axis C (or P, or B)."""

    payload: Payload
    rewards: Array  # float32 [C, G], the configured metric; [C, G, K] where an estimator takes several rewards
    live: Array  # bool [C, G]


def _exchange(local: Stored, source: Array) -> Stored:
    """Rows by global index, within shard_map: row i of the result is row source[i] of the split input, or zeros.

    Every shard lays out the rows it holds and the sum over shards hands each its part; since only one shard
    contributes to a row, the sum of bits is exact.
    """
    shard = jax.lax.axis_index(sharding.ROWS)

    def move(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x.astype(jnp.int32)
        index = source - shard * bits.shape[0]
        mine = (index >= 0) & (index < bits.shape[0])
        rows = jnp.take(bits, jnp.where(mine, index, 0), axis=0)
        rows = jnp.where(mine.reshape(-1, *[1] * (bits.ndim - 1)), rows, 0)
        rows = jax.lax.psum_scatter(rows, sharding.ROWS, scatter_dimension=0, tiled=True)
        return jax.lax.bitcast_convert_type(rows, x.dtype) if x.dtype == jnp.float32 else rows.astype(x.dtype)

    return jax.tree.map(move, local)


def _store(buffer: Stored, rows: Stored, slot: Array) -> Stored:
    """Writes rows into the slots of their own shard; slot >= C drops the row."""
    capacity = buffer.rewards.shape[0]
    local = slot - jax.lax.axis_index(sharding.ROWS) * capacity
    return scatter_rows(buffer, jnp.where((local >= 0) & (local < capacity), local, capacity), rows)


def _pack(rewards_PG: np.ndarray, live_PG: np.ndarray, slot_P: np.ndarray) -> np.ndarray:
    """What the host adds to a payload, as one int32 array [P, ...]: each array that is passed costs its time."""
    bits = np.ascontiguousarray(rewards_PG, np.float32).view(np.int32).reshape(len(slot_P), -1)
    return np.concatenate([live_PG.astype(np.int32), bits, slot_P[:, None]], axis=1)


def _unpack(payload: Payload, host: Array, rewards: Array) -> tuple[Stored, Array]:
    """Rows to store, and their slots; `rewards` is the buffer's, for its shape."""
    g = rewards.shape[1]
    values = jax.lax.bitcast_convert_type(host[:, g:-1], jnp.float32).reshape(-1, *rewards.shape[1:])
    return Stored(payload, values, host[:, :g] > 0), host[:, -1]


class GroupBuffer:
    """Kept groups by ticket.

    Args:
      mesh: the device mesh.
      capacity: groups that must fit whatever shard they come from; rounded up to a multiple of the shards.
      batch_size: B.
      num_samples: G.
      max_prompt_tokens: L.
      max_completion_tokens: T.
      num_rewards: K, for an estimator that takes several rewards; 0 = one, without an axis.

    Raises:
      ValueError: when B is no multiple of the row shards.
    """

    def __init__(
        self, mesh: Mesh, *, capacity: int, batch_size: int, num_samples: int, max_prompt_tokens: int,
        max_completion_tokens: int, num_rewards: int = 0,
    ) -> None:  # fmt: skip
        shards = sharding.num_row_shards(mesh)
        if batch_size % shards:
            raise ValueError(
                f"{batch_size} groups per step are no multiple of the mesh's {shards} row shards "
                f"(data x fsdp): use {-(-batch_size // shards) * shards}"
            )
        self._mesh, self._shards = mesh, shards
        self._per_shard = -(-capacity // shards)
        self.capacity = self._per_shard * shards
        self._batch_size = batch_size
        self._rows, self._whole = sharding.rows(mesh), sharding.replicated(mesh)
        self._slots: dict[int, int] = {}
        self._records = np.zeros(self.capacity, RECORD)
        c, g, length, t = self.capacity, num_samples, max_prompt_tokens, max_completion_tokens
        zeros = partial(np.zeros, dtype=np.int32)
        payload = Payload(
            prompt_PL=zeros((c, length)), prompt_length_P=zeros(c), tokens_PGT=zeros((c, g, t)),
            logp_PGT=np.zeros((c, g, t), np.float32), mask_PGT=np.zeros((c, g, t), bool),
            version_PGT=zeros((c, g, t)), length_PG=zeros((c, g)), finish_PG=zeros((c, g)),
        )  # fmt: skip
        rewards = np.zeros((c, g, num_rewards) if num_rewards else (c, g), np.float32)
        empty = Stored(payload, rewards, np.zeros((c, g), bool))
        self.arrays: Stored = jax.tree.map(lambda x: sharding.place(x, self._rows), empty)
        self._jit_programs()

    def _jit_programs(self) -> None:
        rows, whole = PartitionSpec(sharding.ROWS), PartitionSpec()
        smap = partial(jax.shard_map, mesh=self._mesh)

        def put_own(buffer: Stored, payload: Payload, host: Array) -> Stored:
            new, slot = _unpack(payload, host, buffer.rewards)
            return _store(buffer, new, slot)

        def put_spilled(buffer: Stored, payload: Payload, host: Array, source: Array) -> Stored:
            new, slot = _unpack(payload, host, buffer.rewards)
            return _store(buffer, _exchange(new, source), slot)

        # Host arrays go straight into the programs, replicated: placing each first would cost as much as the call.
        put = smap(put_own, in_specs=(rows, rows, rows), out_specs=rows)
        shardings = (self._rows, self._rows, self._whole)
        self._put_own = jax.jit(put, donate_argnums=0, in_shardings=shardings, out_shardings=self._rows)
        put = smap(put_spilled, in_specs=(rows, rows, rows, whole), out_specs=rows)
        shardings = (*shardings, self._whole)
        self._put_spilled = jax.jit(put, donate_argnums=0, in_shardings=shardings, out_shardings=self._rows)
        exchange = smap(_exchange, in_specs=(rows, whole), out_specs=rows)

        def take(buffer: Stored, source: Array, role: Array) -> TrainBatch:
            stored = exchange(buffer, source)
            return TrainBatch(stored.payload, stored.rewards, stored.live, source >= 0, role)

        self._take = jax.jit(take, in_shardings=(self._rows, self._whole, self._whole), out_shardings=self._rows)

    @property
    def tickets(self) -> list[int]:
        """Tickets stored, in no order that matters."""
        return list(self._slots)

    def records(self, tickets: Sequence[int]) -> np.ndarray:
        """The host records that were stored with these groups, of dtype RECORD."""
        return self._records[[self._slots[t] for t in tickets]]

    def put(
        self, groups: Groups, rewards_PG: np.ndarray, live_PG: np.ndarray, keep_P: np.ndarray, records_P: np.ndarray
    ) -> None:  # fmt: skip
        """Stores the kept groups. All arguments are the same on every process.

        Args:
          groups: from the sampler.
          rewards_PG: float32, the configured metric; [P, G, K] for several rewards.
          live_PG: bool.
          keep_P: which rows to store.
          records_P: of dtype RECORD.

        Raises:
          ValueError: when they do not fit, or a ticket is stored already; nothing is stored then.
        """
        if groups.payload.length_PG.sharding.device_set != self._rows.device_set:  # sampled on devices of its own
            groups = dataclasses.replace(groups, payload=jax.device_put(groups.payload, self._rows))
        kept = np.flatnonzero(keep_P)
        if len(kept) > self.capacity - len(self._slots):
            free = self.capacity - len(self._slots)
            raise ValueError(f"{len(kept)} groups do not fit into the {free} free of {self.capacity} slots")
        tickets = groups.tickets_P[kept].tolist()
        twice = [t for t, times in Counter(tickets).items() if times > 1 or t in self._slots]
        if twice:
            raise ValueError(f"ticket {twice[0]} is in the buffer already")
        left = kept.tolist()
        while left:
            left = self._put_pass(groups, rewards_PG, live_PG, left)
        self._records[[self._slots[t] for t in tickets]] = records_P[kept]

    def _put_pass(self, groups: Groups, rewards_PG: np.ndarray, live_PG: np.ndarray, rows: list[int]) -> list[int]:
        """Stores what one program can, in a row's own shard where that has room. Returns the rows that are left."""
        tickets_P = groups.tickets_P.tolist()  # plain lists: single entries of an array cost more than the rest
        p, width = len(tickets_P), len(tickets_P) // self._shards
        free = self._free_slots()
        slot_P, source_P = [self.capacity] * p, [-1] * p

        def place_row(i: int, at: int) -> None:
            slot_P[at], source_P[at] = free[at // width].pop(), i
            self._slots[tickets_P[i]] = slot_P[at]

        homeless, left = [], []
        for i in rows:
            if free[i // width]:
                place_row(i, i)
            else:
                homeless.append(i)
        for i in homeless:
            at = next((j for j in range(p) if source_P[j] < 0 and free[j // width]), None)
            if at is None:
                left.append(i)
            else:
                place_row(i, at)
        host = _pack(rewards_PG, live_PG, np.array(slot_P, np.int32))
        if homeless:
            self.arrays = self._put_spilled(self.arrays, groups.payload, host, np.array(source_P, np.int32))
        else:
            self.arrays = self._put_own(self.arrays, groups.payload, host)
        return left

    def _free_slots(self) -> list[list[int]]:
        free = np.ones(self.capacity, bool)
        free[list(self._slots.values())] = False
        first = range(0, self.capacity, self._per_shard)
        return [(np.flatnonzero(free[i : i + self._per_shard])[::-1] + i).tolist() for i in first]

    def take(self, tickets: Sequence[int]) -> TrainBatch:
        """The batch of these groups, in this order, balanced over the shards; fewer than B give filler rows.

        The groups stay until `free`. Raises KeyError for a ticket that is not stored, ValueError for more than B.
        """
        if len(tickets) > self._batch_size:
            raise ValueError(f"{len(tickets)} tickets for a batch of {self._batch_size} groups")
        source, role = np.full(self._batch_size, -1, np.int32), np.zeros(self._batch_size, np.int32)
        source[: len(tickets)] = [self._slots[t] for t in tickets]
        role[: len(tickets)] = self.records(tickets)["role"]
        return self._take(self.arrays, source, role)

    def free(self, tickets: Sequence[int]) -> None:
        """Gives the slots of these groups back. Raises KeyError for a ticket that is not stored."""
        for ticket in tickets:
            del self._slots[ticket]

    def warm_up(self, groups: Groups) -> TrainBatch:
        """Compiles everything: stores nothing of `groups`, and returns a batch of filler rows."""
        p, payload = len(groups.tickets_P), jax.device_put(groups.payload, self._rows)
        shape = (p, *self.arrays.rewards.shape[1:])
        nowhere = np.full(p, self.capacity, np.int32)
        host = _pack(np.zeros(shape, np.float32), np.zeros(shape[:2], bool), nowhere)
        self.arrays = self._put_own(self.arrays, payload, host)
        if self._shards > 1:  # a single shard never spills
            self.arrays = self._put_spilled(self.arrays, payload, host, np.full(p, -1, np.int32))
        return self.take([])

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the arrays are apart, in `arrays`."""
        groups = [[t, slot, self._records[slot].tolist()] for t, slot in self._slots.items()]
        return {"capacity": self.capacity, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any], arrays: Stored) -> None:
        """The inverse. Raises ValueError for another capacity."""
        if state["capacity"] != self.capacity:
            raise ValueError(f"the checkpoint's buffer holds {state['capacity']} groups, this run's {self.capacity}")
        self.arrays = arrays
        self._slots = {t: slot for t, slot, _ in state["groups"]}
        for _, slot, record in state["groups"]:
            self._records[slot] = tuple(record)
