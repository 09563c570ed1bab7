"""The lock-step sampler: batches of P groups decoded together, each to its end, by programs of one shape.

The host looks once per chunk: it hands over the groups that finished in it, and has the device decode the next
chunk (or start the next batch) while the caller verifies them.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dynrl.config import ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import Params, init_params, unstack_layers
from dynrl.models.policy import cast_floats
from dynrl.sampling import programs
from dynrl.sampling.noise import identities
from dynrl.types import Array, Groups, Request


class LockstepSampler:
    """A `dynrl.types.Sampler`.

    Args:
      config: the architecture.
      mesh: rows are split over its data and fsdp axes.
      num_groups: P, prompts decoded together.
      num_samples: G, rollouts per prompt; every request must ask for as many.
      max_prompt_tokens: L.
      max_completion_tokens: T, the most that a request may ask for.
      eos_id: the stop token.
      pad_id: fills prompts on the left.
      vocab_size: prompts must hold ids below it.
      chunk_steps: decode steps between two looks of the host.
      seed: the run's seed, the root of all noise.

    Raises:
      ValueError: when P is no multiple of the mesh's row shards.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, *, num_groups: int, num_samples: int, max_prompt_tokens: int,
        max_completion_tokens: int, eos_id: int, pad_id: int, vocab_size: int, chunk_steps: int, seed: int,
    ) -> None:  # fmt: skip
        shards = sharding.num_row_shards(mesh)
        if num_groups % shards:
            raise ValueError(
                f"the sampler decodes {num_groups} groups at once, no multiple of the mesh's {shards} row shards "
                f"(data x fsdp): use sampler.num_slots = {-(-num_groups // shards) * shards * num_samples}"
            )
        self._config, self._mesh = config, mesh
        self._p, self._g, self._l, self._t = num_groups, num_samples, max_prompt_tokens, max_completion_tokens
        self._pad_id, self._vocab_size = pad_id, vocab_size
        self._queue: list[Request] = []
        self._batch: list[Request] = []
        self._running: tuple[programs.DecodeState, Array] | None = None
        self._valid = np.zeros(num_groups, bool)
        self._cancelled: set[int] = set()
        self._params: Params | None = None
        self._counters = {"tokens": 0, "slot_steps": 0}
        self._owned = sharding.owned_rows(mesh, num_groups)

        rows, whole = sharding.rows(mesh), sharding.replicated(mesh)
        self._rows, self._whole = rows, whole
        self._seed = sharding.place(np.uint32(seed), whole)
        self._chunk_steps = sharding.place(np.int32(chunk_steps), whole)
        self._no_stop = sharding.place(np.zeros(num_groups, bool), rows)
        self._jit_programs(eos_id)

    def _jit_programs(self, eos_id: int) -> None:
        config, g, t = dataclasses.replace(self._config, scan_layers=False), self._g, self._t  # decoding is unrolled
        start = partial(programs.start, config=config, g=g, t=t, eos=eos_id)
        kv = sharding.kv_heads(self._mesh, config.num_kv_heads)

        def out_sharding(leaf: jax.ShapeDtypeStruct) -> Any:
            return self._whole if leaf.ndim == 0 else kv if leaf.ndim == 4 else self._rows

        params = jax.eval_shape(partial(self._decode_layout), _abstract_params(self._config, self._vocab_size))
        batch = jax.eval_shape(lambda: self._host_batch([]))
        shapes = jax.eval_shape(start, params, batch, jax.ShapeDtypeStruct((), jnp.uint32))
        state = jax.tree.map(out_sharding, shapes)
        self._start = jax.jit(start, out_shardings=state)
        chunk = partial(programs.chunk, config=config, g=g, eos=eos_id)
        self._chunk = jax.jit(chunk, donate_argnames="state", out_shardings=(state, self._whole))
        self._payload = jax.jit(partial(programs.payload, g=g), out_shardings=self._rows)
        self._to_decode_layout = jax.jit(
            self._decode_layout, out_shardings=sharding.param_shardings(params, self._mesh)
        )

    def _decode_layout(self, params: Params) -> Params:
        return cast_floats(unstack_layers(params, self._config.num_layers), self._config.dtype)

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not yet returned or cancelled."""
        return len(self._queue) + int(self._valid.sum())

    @property
    def counters(self) -> dict[str, int]:
        """Run totals of finished batches: tokens made, and row-steps computed (their ratio is the utilisation)."""
        return dict(self._counters)

    def update_weights(self, params: Params, version: int) -> None:
        """Uses `params` for every group that starts after the call. Raises RuntimeError while a batch runs."""
        if self._running is not None:
            raise RuntimeError("the lock-step sampler takes new weights between batches: poll until it is idle")
        self._params = self._to_decode_layout(params)
        self._version = sharding.place(np.int32(version), self._whole)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; all are checked before one is taken."""
        taken = {r.ticket for r in self._queue} | {
            r.ticket for r, v in zip(self._batch, self._valid, strict=False) if v
        }
        for request in requests:
            self._check(request)
            if request.ticket in taken:
                raise ValueError(
                    f"request of ticket {request.ticket} (task {request.task_id}): it is in flight already"
                )
            taken.add(request.ticket)
        self._queue.extend(requests)

    def _check(self, request: Request) -> None:
        def require(ok: bool, why: str) -> None:
            if not ok:
                raise ValueError(f"request of ticket {request.ticket} (task {request.task_id}): {why}")

        prompt, params = request.prompt, request.params
        require(len(prompt) > 0, "the prompt is empty")
        require(len(prompt) <= self._l, f"the prompt has {len(prompt)} tokens, more than max_prompt_tokens = {self._l}")
        require(all(0 <= i < self._vocab_size for i in prompt), f"a token id is not in [0, {self._vocab_size})")
        require(request.num_samples == self._g, f"asks for {request.num_samples} samples; this sampler makes {self._g}")
        require(1 <= params.max_tokens <= self._t, f"max_tokens {params.max_tokens} is not in [1, {self._t}]")
        require(params.temperature >= 0 and np.isfinite(params.temperature), f"temperature {params.temperature}")

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drops the named groups; those in flight stop at the next chunk."""
        gone = set(tickets)
        self._queue = [r for r in self._queue if r.ticket not in gone]
        for i, request in enumerate(self._batch):
            if request.ticket in gone and self._valid[i]:
                self._valid[i] = False
                self._cancelled.add(i)

    def poll(self) -> Groups | None:
        """Waits for the chunk in progress, has the next one start, and returns the groups that finished."""
        if self._running is None and not self._start_batch():
            return None
        assert self._running is not None
        state, done = self._running
        done_P = np.asarray(done)
        finished_P = done_P & self._valid
        groups = self._hand_over(state, finished_P) if finished_P.any() else None
        self._valid &= ~finished_P
        if self._valid.any():
            self._running = self._chunk(self._params, state, self._stop_flags(), self._chunk_steps)
        else:
            self._counters["tokens"] += int(state.active_steps)
            self._counters["slot_steps"] += int(state.slot_steps)
            self._running = None
            self._start_batch()
        return groups

    def _stop_flags(self) -> Array:
        if not self._cancelled:
            return self._no_stop
        stop = np.zeros(self._p, bool)
        stop[list(self._cancelled)] = True
        self._cancelled.clear()
        return sharding.place(stop, self._rows)

    def _start_batch(self) -> bool:
        if not self._queue:
            return False
        if self._params is None:
            raise RuntimeError("the sampler has no weights: call update_weights first")
        self._batch, self._queue = self._queue[: self._p], self._queue[self._p :]
        self._cancelled.clear()
        host = self._host_batch(self._batch)
        self._valid = np.array(host.valid_P)
        batch = jax.tree.map(lambda x: sharding.place(x, self._rows), host)
        state = self._start(self._params, batch, self._seed)
        self._running = self._chunk(self._params, state, self._no_stop, self._chunk_steps)
        return True

    def _host_batch(self, requests: Sequence[Request]) -> programs.Batch:
        prompt_PL = np.full((self._p, self._l), self._pad_id, np.int32)
        length_P = np.ones(self._p, np.int32)  # filler prompts hold one pad token
        valid_P = np.zeros(self._p, bool)
        temperature_P, max_tokens_P = np.ones(self._p, np.float32), np.ones(self._p, np.int32)
        for i, r in enumerate(requests):
            prompt_PL[i, self._l - len(r.prompt) :] = r.prompt
            length_P[i], valid_P[i] = len(r.prompt), True
            temperature_P[i], max_tokens_P[i] = r.params.temperature, r.params.max_tokens
        identity = identities(list(requests), self._p)
        return programs.Batch(prompt_PL, length_P, valid_P, identity, temperature_P, max_tokens_P)

    def _hand_over(self, state: programs.DecodeState, finished_P: np.ndarray) -> Groups:
        payload = self._payload(state, self._version)
        tickets = np.full(self._p, -1, np.int64)
        for i in np.flatnonzero(finished_P):
            tickets[i] = self._batch[i].ticket
        return Groups(
            payload=payload,
            tickets_P=tickets,
            valid_P=finished_P,
            owned_P=self._owned,
            host_tokens_PGT=sharding.local_rows(payload.tokens_PGT),
            host_length_PG=sharding.local_rows(payload.length_PG),
            host_finish_PG=sharding.local_rows(payload.finish_PG),
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on all devices while a batch is decoded."""
        c = self._config
        columns = self._p * self._g * (self._l + max(self._t - 1, 1))
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * columns * jnp.dtype(c.dtype).itemsize

    def warm_up(self) -> Groups:
        """Compiles everything by running a batch of no valid rows, and returns what it hands over."""
        batch = jax.tree.map(lambda x: sharding.place(x, self._rows), self._host_batch([]))
        state = self._start(self._params, batch, self._seed)
        state, done = self._chunk(self._params, state, self._no_stop, self._chunk_steps)
        jax.block_until_ready((done, state.active_steps))
        return self._hand_over(state, np.zeros(self._p, bool))


def _abstract_params(config: ModelConfig, vocab_size: int) -> Params:
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(partial(init_params, config, vocab_size), key)
