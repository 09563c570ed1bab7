"""The slot engine: S decode slots that are refilled while others go on, by programs that never recompile.

The host looks once per chunk of decode steps. It reads which rollouts ended and which began, has the next prompts
prefilled, and starts the next chunk with a plan of who is next: the device itself gives them the slots that come free,
between any two steps. Only then does the host deal with what finished: callers verify and train while the device
decodes. What is in which slot is booked in `slots.py`; the device's side is `state.py` and `programs.py`.

Of several processes, every one gets the same calls and keeps the same books; each feeds the slots of its own devices.

A rollout's tokens depend on its identity and on the sizes that the programs were compiled for (slots, prefill, mesh),
never on its neighbours, the chunks or the order of requests.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from dynrl.config import ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import Params
from dynrl.sampling.checks import RequestLimits, checked_request
from dynrl.sampling.device import Device
from dynrl.sampling.follow_up import FollowUp, Turn
from dynrl.sampling.host_arrays import extension_array, hand_over_array, plan_array, prefill_array
from dynrl.sampling.memory import CacheShape
from dynrl.sampling.options import EngineOptions, buckets, cache_shape, num_prefix_rows
from dynrl.sampling.slots import Extension, Group, Prefill, SlotTable
from dynrl.sampling.state import EngineState
from dynrl.types import Array, Groups, Request


class EngineArrays(NamedTuple):
    """What a checkpoint of the engine holds: the state in mid-decode, and the weights that decode it."""

    state: EngineState
    params: Params
    pending: Params | None  # weights that wait for their time, as `state_dict()["pending_version"]` tells


class SlotEngine:
    """A `dynrl.types.Sampler`.

    Args:
      config: the architecture.
      mesh: slots are split over its data and fsdp axes, heads over tensor.
      options: sizes and behaviour.
      eos_id: the tokenizer's stop token.
      pad_id: fills prompts on the left in what is handed over.
      vocab_size: prompts must hold ids below it.
      seed: the run's seed, the root of all noise.
      decode: token ids to text, for stop strings.

    Raises:
      ValueError: when a size does not fit the mesh.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: EngineOptions, *, eos_id: int, pad_id: int, vocab_size: int,
        seed: int, decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:  # fmt: skip
        shards = sharding.num_row_shards(mesh)
        s = options.num_slots
        if s < 1 or s % shards:
            raise ValueError(
                f"{s} slots are not a positive multiple of the mesh's {shards} row shards (data x fsdp): use "
                f"{max(1, -(-s // shards)) * shards}"
            )
        self._config, self._options, self._shards = config, options, shards
        self._own_shards = sharding.own_shards(mesh)
        self._eos_id, self._pad_id = eos_id, pad_id
        self._buckets = buckets(max(options.max_prompt_tokens - 1, 1))
        self._extend_buckets = buckets(options.max_extend_tokens) if options.max_extend_tokens else []
        self._local_slots = s // shards
        self._table = SlotTable(s, shards, self.shape.num_rows(s) // shards, num_prefix_rows(options))
        self._follow_up = FollowUp(self._table, decode)
        self._limits = RequestLimits(
            max_prompt_tokens=options.max_prompt_tokens,
            max_completion_tokens=options.max_completion_tokens,
            vocab_size=vocab_size,
            group_sizes=tuple(sorted(set(options.group_sizes))),
            has_text=decode is not None,
            multi_turn=options.max_extend_tokens > 0,
        )
        self._refill_slots = options.refill_slots or max(1, s // 16)
        self._running: tuple[Array, Array] | None = None  # the chunk's report and tokens
        self._params: Params | None = None
        self._pending: tuple[Params, int] | None = None
        self._version = 0
        self._owned = {g: sharding.owned_rows(mesh, self.groups_per_poll(g)) for g in self._limits.group_sizes}
        self._device = Device(config, mesh, options, self.shape, vocab_size=vocab_size, pad_id=pad_id, seed=seed)

    # ---- Sizes ----

    def _width(self, bucket: int) -> int:
        """Prompts per shard that one prefill of this bucket runs."""
        return max(1, self._options.prefill_tokens // bucket)

    def _bucket(self, request: Request) -> int:
        return next(b for b in self._buckets if len(request.prompt) - 1 <= b)

    def _extend_bucket(self, extension: Extension) -> int:
        return next(b for b in self._extend_buckets if len(extension.tokens) <= b)

    def groups_per_poll(self, num_samples: int) -> int:
        """P of the groups that a poll returns, for requests of so many samples."""
        return max(1, self._local_slots // num_samples) * self._shards

    @property
    def shape(self) -> CacheShape:
        """What the memory goes to."""
        return cache_shape(self._config, self._options, self._shards)

    def describe(self) -> str:
        """What the engine takes, in one line."""
        return self.shape.describe(self._options.num_slots)

    # ---- What callers do ----

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not yet returned or cancelled."""
        return self._table.num_open

    @property
    def counters(self) -> dict[str, int]:
        """Run totals.

        Tokens drawn and slot-steps computed (their ratio is the utilisation), prompt tokens prefilled with their
        padding, and rollouts that met non-finite logits.
        """
        return dict(self._follow_up.counters)

    def update_weights(self, params: Params, version: int) -> None:
        """Uses `params` from the next chunk on: at once, or once what is in flight is done (`weight_update`).

        In flight, rollouts that have begun go on from keys and values of the weights before; those that have not
        begun see nothing of them.

        Raises:
          ValueError: for a negative version, which stands for given tokens.
        """
        if version < 0:
            raise ValueError(f"version {version} is negative")
        self._pending = self._device.decode_layout(params), version
        if self._running is None:  # else once it is known what the chunk in progress begins
            self._take_weights()

    def _take_weights(self) -> None:
        """Changes to the weights that wait, if it is their time."""
        if self._pending is None:
            return
        self._table.requeue_unbegun()
        if self._options.weight_update == "in_flight" or not self._table.begun:
            (self._params, self._version), self._pending = self._pending, None
            self._refresh_prefixes()

    def _refresh_prefixes(self) -> None:
        """Runs the prompts again of groups some of whose rollouts have not begun; one per shard at most."""
        planned = [Prefill(g, g.prefix_row) for g in self._table.partly_begun() if g.prefix_row is not None]
        for bucket in self._buckets:
            now = [p for p in planned if self._bucket(p.group.request) == bucket]
            if now:
                self._run_prefill(now)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises:
          ValueError: naming each request that cannot be served, and why; the others are queued.
        """
        taken, problems = self._table.tickets(), []
        for request in requests:
            try:
                checked = checked_request(request, self._limits)
                if checked.ticket in taken:
                    raise ValueError("it is in flight already")
                taken.add(checked.ticket)
                self._table.queue.append(checked)
            except ValueError as problem:
                problems.append(f"request of ticket {request.ticket} (task {request.task_id}): {problem}")
        if problems:
            raise ValueError("; ".join(problems))

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drops the named groups, queued or in flight; unknown tickets are ignored."""
        self._table.cancel(tickets)
        self._follow_up.drop_cancelled_turns()
        if self._running is None:
            self._follow_up.settle_cancelled()

    def take_turns(self) -> list[Turn]:
        """Turns that ended since the last call, of multi-turn requests."""
        return self._follow_up.take_turns()

    def extend(self, ticket: int, sample: int, tokens: Sequence[int], max_tokens: int | None = None) -> None:
        """Goes on from a rollout that ended a turn with given tokens, a tool's or an environment's answer.

        They become part of the completion, masked from training. What is cached is not run again.

        Args:
          ticket: the group.
          sample: the rollout in it.
          tokens: what is given, at least one.
          max_tokens: for the next turn; the rest of the request's if None.

        Raises:
          ValueError: when the rollout does not wait, or the tokens do not fit.
        """
        slot, rollout = self._follow_up.held(ticket, sample)
        end = rollout.made + len(tokens)
        whole = rollout.group.request.params.max_tokens
        limit = whole if max_tokens is None else min(whole, end + max_tokens)
        problem = self._limits.given_tokens_problem(tokens, self._options.max_extend_tokens)
        if problem is None and max_tokens is not None and max_tokens < 1:
            problem = f"max_tokens {max_tokens} leaves none to sample"
        if problem is None and end >= limit:
            problem = f"{rollout.made} tokens and {len(tokens)} given ones leave none of the {whole} to sample"
        if problem:
            raise ValueError(f"extend of ticket {ticket}, sample {sample}: {problem}")
        self._follow_up.extend(ticket, sample, Extension(slot, [int(t) for t in tokens], limit))

    def finish(self, ticket: int, sample: int, truncated: bool = False) -> None:
        """Ends a rollout that waits after a turn, if `truncated` for want of room. ValueError when it does not wait."""
        self._follow_up.finish(ticket, sample, truncated)

    def poll(self, min_groups: int = 1) -> Groups | None:
        """Waits for the chunk in progress, starts the next one, and returns groups of one size that are finished.

        As long as anything is left to decode, none come before `min_groups` are finished; then at most as many as one
        payload holds of a size, and of each row shard.
        """
        self._receive()
        self._take_weights()
        self._tell_device()
        self._fill()
        active = self._table.may_decode
        groups: list[Group] = []
        if len(self._table.complete) >= min_groups or not active:
            groups = self._table.take_complete(lambda g: self.groups_per_poll(g) // self._shards)
        # Dispatched before the chunk, so that it need not wait for it.
        fetch = self._start_hand_over(groups, groups[0].request.num_samples) if groups else None
        if active:
            self._start_chunk(self._options.chunk_steps)
        return fetch() if fetch else None

    # ---- Between two chunks ----

    def _receive(self) -> None:
        """Waits for the chunk in progress, and books what it did."""
        self._follow_up.check_whole()
        if self._running is not None:
            report, tokens = np.asarray(self._running[0]), self._running[1]  # where a Ctrl-C comes, most likely
            self._running = None
            self._follow_up.receive(report, tokens, self._options.chunk_steps)

    def _tell_device(self) -> None:
        """What only the host knows: ends, what non-finite numbers left behind, given tokens."""
        if (host := self._follow_up.take_stops()) is not None:
            self._device.stop(host)
        if (host := self._follow_up.take_scrubs(self.shape.columns)) is not None:
            self._device.scrub(host)
        self._run_extensions()

    def _fill(self) -> None:
        """Has the next prompts prefilled, and plans who is next."""
        table = self._table
        table.plan()
        while not self._pending:
            prompts = table.plan_prefill(self._bucket, self._width)
            if prompts:
                self._run_prefill(prompts)
            elif table.prefix_is_full:  # a chunk of no steps, so that prompts make room for the next ones
                self._start_chunk(0)
                self._receive()  # waits: programs must not pile up (law 4)
            else:
                break
            table.plan()

    def _run_prefill(self, planned: Sequence[Prefill]) -> None:
        if self._params is None:
            raise RuntimeError("the sampler has no weights: call update_weights first")
        bucket = self._bucket(planned[0].group.request)
        width, rows = self._width(bucket), self._table.num_prefix_rows
        host = prefill_array(planned, self._own_shards, bucket, width, self._shards, rows)
        self._device.prefill(self._params, host)
        self._follow_up.counters["prefill_tokens"] += host.shape[0] * bucket

    def _start_chunk(self, max_steps: int) -> None:
        """Decodes, and begins what is planned; `_receive` waits for it."""
        table = self._table
        enough = self._refill_slots if table.has_work and not self._pending else self._options.num_slots + 1
        host = plan_array(table.planned, self._own_shards, table.max_planned, self._eos_id)
        self._running = self._device.chunk(self._params, (max_steps, enough, self._version), host)

    def _run_extensions(self) -> None:
        """The first ones of each shard, those of one length bucket together, until none is left."""
        while extensions := self._follow_up.extensions:
            bucket = self._extend_bucket(extensions[0])
            width, room = self._width(bucket), [self._width(bucket)] * self._shards
            now, later = [], []
            for extension in extensions:
                shard = extension.slot // self._local_slots
                # Of its own bucket only: a program of another length would give other last bits (law 6).
                fits = room[shard] > 0 and self._extend_bucket(extension) == bucket
                room[shard] -= fits
                (now if fits else later).append(extension)
            host = extension_array(now, self._own_shards, bucket, width, self._shards, self._local_slots)
            self._device.extend(self._params, host)
            self._follow_up.extensions = later
            self._follow_up.extended(now)  # only now: a chunk that was under way had the slots at rest

    # ---- Handing over ----

    def _start_hand_over(self, groups: Sequence[Group], num_samples: int) -> Callable[[], Groups]:
        """Has the device gather finished groups; the function returned waits for it."""
        per_shard = self.groups_per_poll(num_samples) // self._shards
        host, tickets_P, valid_P = hand_over_array(
            groups, self._own_shards, per_shard, self._shards, num_samples, self._options.max_prompt_tokens,
            self._pad_id,
        )  # fmt: skip
        payload, full_logp = self._device.hand_over(num_samples, host)
        length_PG, finish_PG = host[:, -2 * num_samples : -num_samples], host[:, -num_samples:]
        owned_P = self._owned[num_samples]

        def fetch() -> Groups:
            return Groups(
                payload=payload,
                tickets_P=tickets_P,
                valid_P=valid_P,
                owned_P=owned_P,
                host_tokens_PGT=sharding.local_rows(payload.tokens_PGT),
                host_length_PG=np.where(owned_P[:, None], length_PG, 0),
                host_finish_PG=np.where(owned_P[:, None], finish_PG, 0),
                full_logp_PGT=full_logp,
            )

        return fetch

    def warm_up(self) -> None:
        """Compiles every program by running it on nothing. Raises RuntimeError while anything is in flight."""
        if self.num_in_flight or self._running is not None:
            raise RuntimeError("warm_up runs every program on nothing: call it while nothing is in flight")
        s, n, table, device = self._options.num_slots, self._shards, self._table, self._device
        for bucket in self._buckets:
            device.prefill(self._params, prefill_array([], (), bucket, self._width(bucket), n, table.num_prefix_rows))
        for bucket in self._extend_buckets:
            device.extend(self._params, extension_array([], (), bucket, self._width(bucket), n, self._local_slots))
        device.stop(np.zeros((s, 4), np.int32))
        device.scrub(np.full(s, self.shape.columns, np.int32))
        device.chunk(self._params, (0, 0, 0), plan_array(table.planned, (), table.max_planned, self._eos_id))
        for size in self._limits.group_sizes:
            self.filler(size)

    def filler(self, num_samples: int) -> Groups:
        """What a poll returns, without a group in it."""
        return self._start_hand_over([], num_samples)()

    # ---- Checkpoints ----

    @property
    def arrays(self) -> EngineArrays:
        """What lies on the devices. Together with `state_dict` it is the whole engine, in mid-decode too.

        The next poll donates them: whoever writes them in the background copies them first.
        """
        self._receive()
        return EngineArrays(self._device.state, self._params, self._pending[0] if self._pending else None)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; waits for the chunk in progress, and changes nothing."""
        self._receive()
        return {
            "table": self._table.state_dict(),
            "follow_up": self._follow_up.state_dict(),
            "version": self._version,
            "pending_version": self._pending[1] if self._pending else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: EngineArrays) -> None:
        """The inverse, into an engine of the same options, seed, model and mesh shape. Takes the arrays over."""
        self._running = None
        self._table.load_state_dict(state["table"])
        self._follow_up.load_state_dict(state["follow_up"])
        self._version = state["version"]
        self._device.state, self._params = arrays.state, arrays.params
        self._pending = None if arrays.pending is None else (arrays.pending, state["pending_version"])
