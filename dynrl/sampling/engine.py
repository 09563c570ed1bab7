"""The slot engine: S decode slots that are refilled while others go on, by programs that never recompile.

The host looks once per chunk of decode steps. It reads which slots came free, has the next prompts prefilled and
copied into them, starts the next chunk, and only then deals with what finished: callers verify and train while the
device decodes. What is in which slot is booked in `slots.py`; the device's side is `state.py` and `programs.py`.

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
from dynrl.sampling.host_arrays import chunk_array, extension_array, hand_over_array, prefill_array
from dynrl.sampling.memory import CacheShape
from dynrl.sampling.options import EngineOptions, buckets, cache_shape, num_prefix_rows
from dynrl.sampling.slots import OPEN, Admit, Extension, Group, Prefill, Rollout, SlotTable
from dynrl.sampling.state import EngineState
from dynrl.sampling.stop_strings import first_stop
from dynrl.types import Array, Finish, Groups, Request


class Turn(NamedTuple):
    """One rollout of a multi-turn request that ended a turn and waits for `extend` or `finish`."""

    ticket: int
    sample: int
    tokens: list[int]  # of this turn
    length: int  # of the whole completion
    room: int  # tokens that the completion may still take, given ones included
    finish: Finish


class EngineArrays(NamedTuple):
    """What a checkpoint of the engine holds: the state in mid-decode, and the weights that decode it."""

    state: EngineState
    params: Params
    pending: Params | None  # weights that wait until what is in flight is done


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
        self._eos_id, self._pad_id, self._decode = eos_id, pad_id, decode
        self._buckets = buckets(max(options.max_prompt_tokens - 1, 1))
        self._extend_buckets = buckets(options.max_extend_tokens) if options.max_extend_tokens else []
        self._local_slots = s // shards
        self._table = SlotTable(s, shards, self.shape.num_rows(s) // shards, num_prefix_rows(options))
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
        self._stops: dict[int, tuple[int, int, int]] = {}  # slot -> length, last token, Finish
        self._scrubs: dict[int, int] = {}  # slot -> first column to clean
        self._extensions: list[Extension] = []
        self._turns: list[Turn] = []
        self._params: Params | None = None
        self._pending: tuple[Params, int] | None = None
        self._version = 0
        self._counters = {"tokens": 0, "slot_steps": 0, "prefill_tokens": 0, "failed_rollouts": 0}
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
        return dict(self._counters)

    def update_weights(self, params: Params, version: int) -> None:
        """Uses `params` from the next chunk on: at once, or once what is in flight is done (`weight_update`).

        In flight, rollouts that have begun go on from keys and values of the weights before; those that have not
        begun see nothing of them.

        Raises:
          ValueError: for a negative version, which stands for given tokens.
        """
        if version < 0:
            raise ValueError(f"version {version} is negative")
        layout = self._device.decode_layout(params)
        self._table.requeue_unbegun()
        if self._options.weight_update == "drain" and self._table.begun:
            self._pending = layout, version
        else:
            (self._params, self._version), self._pending = (layout, version), None
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
        self._turns = [t for t in self._turns if t.ticket in self._table.groups]
        if self._running is None:
            self._settle_cancelled()

    def take_turns(self) -> list[Turn]:
        """Turns that ended since the last call, of multi-turn requests."""
        turns, self._turns = self._turns, []
        return turns

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
        slot, rollout = self._held(ticket, sample)
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
        self._drop_turn(ticket, sample)
        self._extensions.append(Extension(slot, [int(t) for t in tokens], limit))

    def finish(self, ticket: int, sample: int) -> None:
        """Ends a rollout that waits after a turn. Raises ValueError when it does not wait."""
        slot, rollout = self._held(ticket, sample)
        self._drop_turn(ticket, sample)
        self._table.finish(slot, rollout.ended)

    def _drop_turn(self, ticket: int, sample: int) -> None:
        """The caller has dealt with it, whether it was taken or not."""
        self._turns = [t for t in self._turns if (t.ticket, t.sample) != (ticket, sample)]

    def _held(self, ticket: int, sample: int) -> tuple[int, Rollout]:
        taken = {e.slot for e in self._extensions}
        for slot, r in enumerate(self._table.slots):
            if r is None or r.ended == OPEN or r.group.cancelled or slot in taken:
                continue
            if (r.group.request.ticket, r.sample) == (ticket, sample):
                return slot, r
        raise ValueError(f"ticket {ticket}, sample {sample} does not wait after a turn")

    def poll(self, min_groups: int = 1) -> Groups | None:
        """Waits for the chunk in progress, starts the next one, and returns groups of one size that are finished.

        As long as anything is left to decode, none come before `min_groups` are finished; then at most as many as one
        payload holds of a size, and of each row shard.
        """
        self._receive()
        if self._pending and not self._table.begun:
            (self._params, self._version), self._pending = self._pending, None
        self._apply_stops()
        self._run_extensions()
        admitted = self._fill()
        active = self._table.num_active > 0
        groups: list[Group] = []
        if len(self._table.complete) >= min_groups or not active:
            groups = self._table.take_complete(lambda g: self.groups_per_poll(g) // self._shards)
        # Dispatched before the chunk, so that it need not wait for it.
        fetch = self._start_hand_over(groups, groups[0].request.num_samples) if groups else None
        if active:
            self._running = self._start_chunk(admitted, self._options.chunk_steps)
        return fetch() if fetch else None

    # ---- Between two chunks ----

    def _receive(self) -> None:
        """Reads what the chunk in progress did: lengths, ends, stop strings."""
        if self._running is None:
            return
        (report, tokens), self._running = self._running, None
        report, s = np.asarray(report), self._options.num_slots
        made_S, finish_S, steps = report[:s].tolist(), report[s : 2 * s].tolist(), int(report[-1])
        self._counters["slot_steps"] += steps * s
        texts: np.ndarray | None = None
        for slot, rollout in enumerate(self._table.slots):
            if rollout is None or rollout.ended != OPEN:
                continue
            made, finish = made_S[slot], finish_S[slot]
            failed = finish == Finish.FAILED
            self._counters["tokens"] += made - rollout.made
            before, rollout.made = rollout.made, made
            if failed:
                self._scrubs[slot] = 0
            if rollout.group.cancelled:
                continue
            if rollout.by_text:
                texts = np.asarray(tokens) if texts is None else texts
                finish = self._read_text(slot, rollout, texts[slot, : made - before].tolist(), finish)
                if failed and finish == Finish.STOP and rollout.group.request.multi_turn:
                    # It may go on: what it made until its stop string is sound.
                    self._scrubs[slot] = len(rollout.group.request.prompt) - 1 + rollout.made
            if finish != OPEN:
                self._end(slot, rollout, Finish(finish))
        self._settle_cancelled()

    def _read_text(self, slot: int, rollout: Rollout, new: list[int], finish: int) -> int:
        """Looks for stop strings in what was drawn; a rollout that holds one is cut there."""
        rollout.turn += new
        strings = rollout.group.request.params.stop_strings
        if strings and self._decode is not None:
            extra = first_stop(rollout.turn, len(new), strings, self._decode)
            if extra is not None:
                if extra:
                    rollout.turn = rollout.turn[:-extra]
                rollout.made -= extra
                self._stops[slot] = rollout.made, rollout.turn[-1], int(Finish.STOP)
                return int(Finish.STOP)
        return finish

    def _end(self, slot: int, rollout: Rollout, finish: Finish) -> None:
        if finish is Finish.FAILED:
            self._counters["failed_rollouts"] += 1
        elif rollout.group.request.multi_turn:
            rollout.ended = int(finish)
            request, made = rollout.group.request, rollout.made
            room = request.params.max_tokens - made
            self._turns.append(Turn(request.ticket, rollout.sample, list(rollout.turn), made, room, finish))
            return
        self._table.finish(slot, int(finish))

    def _settle_cancelled(self) -> None:
        for slot in self._table.free_cancelled():
            self._stops[slot] = 0, 0, int(Finish.FAILED)
        gone = {slot for slot, r in enumerate(self._table.slots) if r is None}
        self._extensions = [e for e in self._extensions if e.slot not in gone]

    def _apply_stops(self) -> None:
        """Tells the device of ends that only the host knows, and cleans what non-finite numbers left."""
        if self._stops:
            host = np.zeros((self._options.num_slots, 4), np.int32)
            for slot, values in self._stops.items():
                host[slot] = 1, *values
            self._device.stop(host)
            self._stops.clear()
        if self._scrubs:
            host = np.full(self._options.num_slots, self.shape.columns, np.int32)
            host[list(self._scrubs)] = list(self._scrubs.values())
            self._device.scrub(host)
            self._scrubs.clear()

    def _fill(self) -> list[Admit]:
        """Gives free slots to the next in turn, whose prompts are prefilled. Returns whom the next chunk begins."""
        table = self._table
        admitted = table.plan_admission()
        while not self._pending:
            planned = table.plan_prefill(self._bucket, self._width)
            if planned:
                self._run_prefill(planned)
            elif admitted and table.prefix_is_full:  # a chunk of no steps, so that prompts make room for the next ones
                np.asarray(self._start_chunk(admitted, 0)[0])  # waits: programs must not pile up (law 4)
                admitted = []
            else:
                break
            admitted += table.plan_admission()
        return admitted

    def _run_prefill(self, planned: Sequence[Prefill]) -> None:
        if self._params is None:
            raise RuntimeError("the sampler has no weights: call update_weights first")
        bucket = self._bucket(planned[0].group.request)
        width, rows = self._width(bucket), self._table.num_prefix_rows
        host = prefill_array(planned, bucket, width, self._shards, rows)
        self._device.prefill(self._params, host)
        self._counters["prefill_tokens"] += host.shape[0] * bucket

    def _start_chunk(self, admitted: Sequence[Admit], max_steps: int) -> tuple[Array, Array]:
        """Begins rollouts and decodes. Returns the report and the tokens, which are not waited for."""
        s = self._options.num_slots
        refillable = self._table.has_work and not self._pending
        control = max_steps, self._refill_slots if refillable else s + 1, self._version
        self._table.release_prefixes()
        return self._device.chunk(self._params, chunk_array(control, admitted, s, self._shards, self._eos_id))

    def _run_extensions(self) -> None:
        """The first ones of each shard, those of one length bucket together, until none is left."""
        while self._extensions:
            bucket = self._extend_bucket(self._extensions[0])
            width, room = self._width(bucket), [self._width(bucket)] * self._shards
            now, later = [], []
            for extension in self._extensions:
                shard = extension.slot // self._local_slots
                # Of its own bucket only: a program of another length would give other last bits (law 6).
                fits = room[shard] > 0 and self._extend_bucket(extension) == bucket
                room[shard] -= fits
                (now if fits else later).append(extension)
            host = extension_array(now, bucket, width, self._shards, self._local_slots)
            self._device.extend(self._params, host)
            self._extensions = later
            for slot, tokens, _ in now:  # only now: a chunk that was under way had the slot at rest
                rollout = self._table.slots[slot]
                assert rollout is not None
                rollout.ended, rollout.made, rollout.turn = OPEN, rollout.made + len(tokens), []

    # ---- Handing over ----

    def _start_hand_over(self, groups: Sequence[Group], num_samples: int) -> Callable[[], Groups]:
        """Has the device gather finished groups; the function returned waits for it."""
        per_shard = self.groups_per_poll(num_samples) // self._shards
        host, tickets_P, valid_P = hand_over_array(
            groups, per_shard, self._shards, num_samples, self._options.max_prompt_tokens, self._pad_id
        )
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
            device.prefill(self._params, prefill_array([], bucket, self._width(bucket), n, table.num_prefix_rows))
        for bucket in self._extend_buckets:
            device.extend(self._params, extension_array([], bucket, self._width(bucket), n, self._local_slots))
        device.stop(np.zeros((s, 4), np.int32))
        device.scrub(np.full(s, self.shape.columns, np.int32))
        device.chunk(self._params, chunk_array((0, 0, 0), [], s, n, self._eos_id))
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
            "stops": [[slot, *values] for slot, values in self._stops.items()],
            "scrubs": [list(x) for x in self._scrubs.items()],
            "extensions": [list(e) for e in self._extensions],
            "turns": [list(t) for t in self._turns],
            "version": self._version,
            "pending_version": self._pending[1] if self._pending else None,
            "counters": self.counters,
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: EngineArrays) -> None:
        """The inverse, into an engine of the same options, seed, model and mesh shape. Takes the arrays over."""
        self._running = None
        self._table.load_state_dict(state["table"])
        self._stops = {slot: tuple(values) for slot, *values in state["stops"]}
        self._scrubs = dict(state["scrubs"])
        self._extensions = [Extension(*e) for e in state["extensions"]]
        self._turns = [Turn(*fields, finish=Finish(finish)) for *fields, finish in state["turns"]]
        self._version, self._counters = state["version"], dict(state["counters"])
        self._device.state, self._params = arrays.state, arrays.params
        self._pending = None if arrays.pending is None else (arrays.pending, state["pending_version"])
