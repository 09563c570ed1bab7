"""What a chunk did to each rollout, and what the device must be told in turn; in plain Python and NumPy."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dynrl.sampling.slots import OPEN, Extension, Rollout, SlotTable
from dynrl.sampling.stop_strings import first_stop
from dynrl.types import Array, Finish


class Turn(NamedTuple):
    """One rollout of a multi-turn request that ended a turn and waits for `extend` or `finish`."""

    ticket: int
    sample: int
    tokens: list[int]  # of this turn
    length: int  # of the whole completion
    room: int  # tokens that the completion may still take, given ones included
    finish: Finish


@dataclass
class _Chunk:
    """The report of a chunk."""

    ends: dict[int, deque[tuple[int, int]]]  # by slot, in order: step and Finish
    steps: int
    tokens: Array | np.ndarray  # [S, K]; fetched when they are asked for

    def drawn(self, slot: int, begin: int, num: int) -> list[int]:
        """Tokens of a slot from a step on."""
        self.tokens = np.asarray(self.tokens)
        return self.tokens[slot, begin : begin + num].tolist()


class FollowUp:
    """Books the reports in a table, and collects what follows from them.

    Args:
      table: the books.
      decode: token ids to text, for stop strings.
    """

    def __init__(self, table: SlotTable, decode: Callable[[Sequence[int]], str] | None) -> None:
        self._table, self._decode = table, decode
        self._stops: dict[int, tuple[int, int, int]] = {}  # slot -> length, last token, whether it is free then
        self._scrubs: dict[int, int] = {}  # slot -> first column to clean
        self._booking = False
        self._problem: Exception | None = None  # the first one of `decode`
        self.extensions: list[Extension] = []
        self.turns: list[Turn] = []
        self.counters = {"tokens": 0, "slot_steps": 0, "prefill_tokens": 0, "failed_rollouts": 0}

    # ---- Reports ----

    def check_whole(self) -> None:
        """Raises RuntimeError when a report was booked in part."""
        if self._booking:
            raise RuntimeError(
                "the engine was interrupted while it booked what finished: load a checkpoint of it, or make a new one"
            )

    def receive(self, report: np.ndarray, tokens: Array, chunk_steps: int) -> None:
        """Books which rollouts ended, and which began where and when: what `programs.chunk` returns.

        Raises:
          RuntimeError: once everything is booked, when `decode` failed.
        """
        self._booking = True
        table, s = self._table, len(self._table.slots)
        n, steps = s * chunk_steps, int(report[-1])
        finish_SK = report[:n].reshape(s, chunk_steps)
        ends: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        for slot, step in np.argwhere(finish_SK != OPEN).tolist():
            ends[slot].append((step, int(finish_SK[slot, step])))
        chunk = _Chunk(ends, steps, tokens)
        self.counters["slot_steps"] += steps * s
        for slot, rollout in enumerate(table.slots):
            if rollout is not None and rollout.ended == OPEN:
                self._advance(slot, rollout, 0, chunk)
        for shard, begun in enumerate(report[n:-1].reshape(len(table.planned), -1, 2).tolist()):
            for index, step in begun:
                if index < 0:
                    break
                slot = shard * table.slots_per_shard + index
                self._advance(slot, table.begin(slot), step, chunk)
        table.end_plan()
        self.settle_cancelled()
        self._booking = False
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise RuntimeError(f"stop strings: decoding tokens to text failed: {problem!r}") from problem

    def _advance(self, slot: int, rollout: Rollout, begin: int, chunk: _Chunk) -> None:
        """Books what a rollout did from step `begin` of a chunk on."""
        end, finish = chunk.ends[slot].popleft() if chunk.ends[slot] else (chunk.steps, OPEN)
        failed = finish == Finish.FAILED
        new = end - begin + (finish != OPEN and not failed)
        rollout.made += new
        self.counters["tokens"] += new
        if failed:
            self._scrubs[slot] = 0
        multi_turn = rollout.group.request.multi_turn
        kept = finish == OPEN or failed or multi_turn  # whether the device has kept the slot for the rollout
        if rollout.group.cancelled:
            if not kept:
                self._table.free_slot(slot)
            return
        if rollout.by_text:
            finish = self._read_text(slot, rollout, chunk.drawn(slot, begin, new), finish, kept)
            if failed and finish == Finish.STOP and multi_turn:
                # It may go on: what it made until its stop string is sound.
                self._scrubs[slot] = len(rollout.group.request.prompt) - 1 + rollout.made
        if finish != OPEN:
            self._end(slot, rollout, Finish(finish))

    def _read_text(self, slot: int, rollout: Rollout, new: list[int], finish: int, kept: bool) -> int:
        """Looks for stop strings in what was drawn; a rollout that holds one is cut there."""
        rollout.turn += new
        strings = rollout.group.request.params.stop_strings
        if strings and self._decode is not None:
            try:
                extra = first_stop(rollout.turn, len(new), strings, self._decode)
            except Exception as problem:  # the caller's function; raised when everything is booked
                extra, self._problem = None, self._problem or problem
            if extra is not None:
                if extra:
                    rollout.turn = rollout.turn[:-extra]
                rollout.made -= extra
                if kept:
                    self._stops[slot] = rollout.made, rollout.turn[-1], not rollout.group.request.multi_turn
                return int(Finish.STOP)
        return finish

    def _end(self, slot: int, rollout: Rollout, finish: Finish) -> None:
        if finish is Finish.FAILED:
            self.counters["failed_rollouts"] += 1
            self._release(slot)
        elif rollout.group.request.multi_turn:
            rollout.ended = int(finish)
            request, made = rollout.group.request, rollout.made
            room = request.params.max_tokens - made
            self.turns.append(Turn(request.ticket, rollout.sample, list(rollout.turn), made, room, finish))
            return
        self._table.finish(slot, int(finish))

    def _release(self, slot: int) -> None:
        """The device may give the slot, which it kept for its rollout, to the next in turn."""
        self._stops[slot] = 0, 0, True

    # ---- What callers decide ----

    def held(self, ticket: int, sample: int) -> tuple[int, Rollout]:
        """Slot and rollout that wait after a turn. Raises ValueError when there are none."""
        taken = {e.slot for e in self.extensions}
        for slot, r in enumerate(self._table.slots):
            if r is None or r.ended == OPEN or r.group.cancelled or slot in taken:
                continue
            if (r.group.request.ticket, r.sample) == (ticket, sample):
                return slot, r
        raise ValueError(f"ticket {ticket}, sample {sample} does not wait after a turn")

    def extend(self, ticket: int, sample: int, extension: Extension) -> None:
        """Notes given tokens for a rollout that waits."""
        self._drop_turn(ticket, sample)
        self.extensions.append(extension)

    def finish(self, ticket: int, sample: int, truncated: bool) -> None:
        """Ends a rollout that waits."""
        slot, rollout = self.held(ticket, sample)
        self._drop_turn(ticket, sample)
        self._table.finish(slot, int(Finish.LENGTH) if truncated else rollout.ended)
        self._release(slot)

    def take_turns(self) -> list[Turn]:
        """Turns that ended since the last call."""
        turns, self.turns = self.turns, []
        return turns

    def _drop_turn(self, ticket: int, sample: int) -> None:
        """The caller has dealt with it, whether it was taken or not."""
        self.turns = [t for t in self.turns if (t.ticket, t.sample) != (ticket, sample)]

    def drop_cancelled_turns(self) -> None:
        """Of groups that are gone."""
        self.turns = [t for t in self.turns if t.ticket in self._table.groups]

    def settle_cancelled(self) -> None:
        """Frees the slots of cancelled rollouts; while no chunk runs."""
        for slot in self._table.free_cancelled():
            self._release(slot)
        gone = {slot for slot, r in enumerate(self._table.slots) if r is None}
        self.extensions = [e for e in self.extensions if e.slot not in gone]

    # ---- What the device must be told ----

    def take_stops(self) -> np.ndarray | None:
        """For `programs.stop`, if there is anything."""
        if not self._stops:
            return None
        host = np.zeros((len(self._table.slots), 4), np.int32)
        for slot, values in self._stops.items():
            host[slot] = 1, *values
        self._stops.clear()
        return host

    def take_scrubs(self, columns: int) -> np.ndarray | None:
        """For `programs.scrub`, if there is anything; `columns` stands for none."""
        if not self._scrubs:
            return None
        host = np.full(len(self._table.slots), columns, np.int32)
        host[list(self._scrubs)] = list(self._scrubs.values())
        self._scrubs.clear()
        return host

    def extended(self, extensions: Sequence[Extension]) -> None:
        """The device was told: those rollouts go on."""
        for slot, tokens, _ in extensions:
            rollout = self._table.slots[slot]
            assert rollout is not None
            rollout.ended, rollout.made, rollout.turn = OPEN, rollout.made + len(tokens), []

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "stops": [[slot, *values] for slot, values in self._stops.items()],
            "scrubs": [list(x) for x in self._scrubs.items()],
            "extensions": [list(e) for e in self.extensions],
            "turns": [list(t) for t in self.turns],
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; mends an interrupted booking, too."""
        self._booking, self._problem = False, None
        self._stops = {slot: tuple(values) for slot, *values in state["stops"]}
        self._scrubs = dict(state["scrubs"])
        self.extensions = [Extension(*e) for e in state["extensions"]]
        self.turns = [Turn(*fields, finish=Finish(finish)) for *fields, finish in state["turns"]]
        self.counters = dict(state["counters"])
