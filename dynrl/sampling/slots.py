"""Who is in which slot: the slot engine's books, in plain Python, without JAX.

Requests wait in a queue; those next in turn have their prompts prefilled and become groups that wait for slots. Which
of their rollouts are next is planned for each chunk of decode steps; the device gives them slots as those come free,
in that order, and says afterwards which. A group holds an output row per rollout from the plan until it is handed
over. Everything here is by row shard, since a group never leaves the one it was given to.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dynrl.types import Purpose, Request, SamplingParams

OPEN = -1  # in the place of a Finish: goes on


@dataclass
class Group:
    """A request whose prompt was prefilled. Rows and finishes are by sample."""

    request: Request
    shard: int
    prefix_row: int | None  # while samples wait for slots
    rows: list[int] = field(default_factory=list)  # from the first plan on
    num_begun: int = 0
    length: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    cancelled: bool = False


@dataclass
class Rollout:
    """What a slot holds."""

    group: Group
    sample: int
    made: int = 0  # completion tokens, as the host knows
    turn: list[int] = field(default_factory=list)  # the present turn's tokens, where the text matters
    ended: int = OPEN  # the Finish of a turn after which the slot waits for the caller

    @property
    def by_text(self) -> bool:
        """Whether the host must see the tokens."""
        return bool(self.group.request.params.stop_strings) or self.group.request.multi_turn


class Prefill(NamedTuple):
    """One prompt to run into a row of the prefix."""

    group: Group
    prefix_row: int


class Extension(NamedTuple):
    """Given tokens for a rollout that ended a turn."""

    slot: int
    tokens: list[int]
    limit: int  # completion tokens at most, from here


class SlotTable:
    """The books.

    Args:
      num_slots: S, over all shards.
      shards: row shards.
      num_rows: output rows per shard; at least the largest group.
      num_prefix_rows: prefix rows per shard.
    """

    def __init__(self, num_slots: int, shards: int, num_rows: int, num_prefix_rows: int) -> None:
        self.slots_per_shard = num_slots // shards
        self.max_planned = 2 * self.slots_per_shard  # of a shard, at most: each slot's next rollout, and another one
        self.num_prefix_rows = num_prefix_rows
        self.slots: list[Rollout | None] = [None] * num_slots
        self.queue: deque[Request] = deque()
        self.waiting: list[deque[Group]] = [deque() for _ in range(shards)]  # prefilled, not all begun
        self.planned: list[deque[Rollout]] = [deque() for _ in range(shards)]  # for the present chunk
        self.groups: dict[int, Group] = {}  # prefilled and not handed over, by ticket
        self.complete: deque[Group] = deque()
        self._cancelled: list[Group] = []  # that still hold rows
        self._short_of_rows = [False] * shards  # whether the plan ends for want of them
        self._num_free = [self.slots_per_shard] * shards
        self._free_rows = [list(range(num_rows))[::-1] for _ in range(shards)]
        self._free_prefix = [list(range(num_prefix_rows))[::-1] for _ in range(shards)]

    @property
    def num_open(self) -> int:
        """Groups submitted and not handed over or cancelled."""
        return len(self.queue) + len(self.groups)

    @property
    def num_active(self) -> int:
        """Slots that decode."""
        return sum(r is not None and r.ended == OPEN for r in self.slots)

    @property
    def begun(self) -> bool:
        """Whether any rollout has begun and is not over, or its group has samples that have not begun."""
        return any(r is not None for r in self.slots) or bool(self.partly_begun())

    @property
    def has_work(self) -> bool:
        """Whether there would be more for a slot that comes free when all that is planned has begun.

        Perhaps not before groups are handed over and free their rows, but then the host has to look for that.
        """
        return bool(self.queue) or any(self._num_waiting(i) > len(planned) for i, planned in enumerate(self.planned))

    @property
    def may_decode(self) -> bool:
        """Whether any slot decodes, or would with the plan."""
        return self.num_active > 0 or any(p and free for p, free in zip(self.planned, self._num_free, strict=True))

    def tickets(self) -> set[int]:
        """Of everything that is open."""
        return {r.ticket for r in self.queue} | set(self.groups)

    @property
    def prefix_is_full(self) -> bool:
        """Whether a shard has more free slots than planned rollouts, for want of a prefix row for the next prompt."""
        return bool(self.queue) and any(
            not free and not short and self._num_free[shard] > len(self.planned[shard])
            for shard, (free, short) in enumerate(zip(self._free_prefix, self._short_of_rows, strict=True))
        )

    def _num_waiting(self, shard: int) -> int:
        """Rollouts whose prompts are prefilled."""
        return sum(g.request.num_samples - g.num_begun for g in self.waiting[shard])

    # ---- Filling ----

    def plan_prefill(self, bucket_of: Callable[[Request], int], width_of: Callable[[int], int]) -> list[Prefill]:
        """Takes prompts of one length bucket from the queue, the first one's, as many as one program runs.

        So that every slot has a rollout, and another one to follow it. What is prefilled ahead waits until it fills
        the program's rows, and then goes to all shards that have room.
        """
        if not self.queue:
            return []
        bucket = bucket_of(self.queue[0])
        width = width_of(bucket)
        if not any(self._needs_prefill(shard, width) for shard in range(len(self.waiting))):
            return []
        room = [min(width, len(free)) for free in self._free_prefix]
        planned: list[Prefill] = []
        passed: list[Request] = []
        look_ahead = 4 * width * len(room)  # how far a prompt of the same bucket may overtake others
        while self.queue and any(room) and len(passed) < look_ahead:
            request = self.queue.popleft()
            if bucket_of(request) != bucket:
                passed.append(request)
                continue
            shard = min((i for i, n in enumerate(room) if n), key=self._load)
            room[shard] -= 1
            group = Group(request, shard, self._free_prefix[shard].pop())
            assert group.prefix_row is not None
            self.waiting[shard].append(group)
            self.groups[request.ticket] = group
            planned.append(Prefill(group, group.prefix_row))
        self.queue.extendleft(reversed(passed))
        return planned

    def _needs_prefill(self, shard: int, width: int) -> bool:
        waiting, free = self._num_waiting(shard), self._num_free[shard]
        room = len(self._free_prefix[shard])
        return room > 0 and (waiting < free or (room >= width and waiting < free + self.slots_per_shard))

    def _load(self, shard: int) -> tuple[int, int]:
        return self._num_waiting(shard) - self._num_free[shard], shard

    def plan(self) -> None:
        """Plans which waiting rollouts are next, in order."""
        for shard, waiting in enumerate(self.waiting):
            planned: deque[Rollout] = deque()
            self.planned[shard], self._short_of_rows[shard] = planned, False
            for group in waiting:
                g = group.request.num_samples
                if not group.rows:
                    if len(self._free_rows[shard]) < g:
                        self._short_of_rows[shard] = True
                        break
                    group.rows = [self._free_rows[shard].pop() for _ in range(g)]
                    group.length, group.finish = [0] * g, [OPEN] * g
                first = group.num_begun
                planned += [Rollout(group, i) for i in range(first, min(g, first + self.max_planned - len(planned)))]
                if len(planned) == self.max_planned:
                    break

    def begin(self, slot: int) -> Rollout:
        """The next of the plan has begun in a slot that is free."""
        assert self.slots[slot] is None
        rollout = self.planned[slot // self.slots_per_shard].popleft()
        group = rollout.group
        self.slots[slot] = rollout
        self._num_free[group.shard] -= 1
        group.num_begun += 1
        if group.num_begun == group.request.num_samples and not group.cancelled:
            self.waiting[group.shard].popleft()
            self._release_prefix(group)
        return rollout

    def end_plan(self) -> None:
        """What has not begun waits for the next plan."""
        for planned in self.planned:
            planned.clear()
        self._free_rows_of_cancelled()

    def _release_prefix(self, group: Group) -> None:
        if group.prefix_row is not None:
            self._free_prefix[group.shard].append(group.prefix_row)
            group.prefix_row = None

    def partly_begun(self) -> list[Group]:
        """Groups some of whose rollouts have begun and others wait; one per shard at most."""
        return [g for queue in self.waiting for g in queue if g.num_begun]

    def requeue_unbegun(self) -> None:
        """Puts prefilled groups of which none has begun back to the head of the queue: the weights changed."""
        back: list[Group] = []
        for shard, waiting in enumerate(self.waiting):
            back += [g for g in waiting if not g.num_begun]
            self.waiting[shard] = deque(g for g in waiting if g.num_begun)
        order = {ticket: i for i, ticket in enumerate(self.groups)}
        for group in sorted(back, key=lambda g: order[g.request.ticket], reverse=True):
            self._release_prefix(group)
            self._free_group_rows(group)
            del self.groups[group.request.ticket]
            self.queue.appendleft(group.request)

    # ---- Ending ----

    def free_slot(self, slot: int) -> None:
        """The slot's rollout is over, or was cancelled."""
        self.slots[slot] = None
        self._num_free[slot // self.slots_per_shard] += 1

    def finish(self, slot: int, finish: int) -> None:
        """The slot's rollout is over for good, with the length that is known; the slot comes free."""
        rollout = self.slots[slot]
        assert rollout is not None
        group = rollout.group
        assert not group.cancelled
        group.length[rollout.sample], group.finish[rollout.sample] = rollout.made, finish
        self.free_slot(slot)
        if OPEN not in group.finish:
            self.complete.append(group)

    def cancel(self, tickets: Iterable[int]) -> None:
        """Drops groups; their slots come free by `free_cancelled`."""
        gone = set(tickets)
        self.queue = deque(r for r in self.queue if r.ticket not in gone)
        for ticket in [t for t in self.groups if t in gone]:
            group = self.groups.pop(ticket)
            group.cancelled = True
            self._release_prefix(group)
            self._cancelled.append(group)
        self.waiting = [deque(g for g in queue if not g.cancelled) for queue in self.waiting]
        self.complete = deque(g for g in self.complete if not g.cancelled)
        self._free_rows_of_cancelled()

    def free_cancelled(self) -> list[int]:
        """Frees the slots of cancelled rollouts, and returns them."""
        slots = [i for i, r in enumerate(self.slots) if r is not None and r.group.cancelled]
        for slot in slots:
            self.free_slot(slot)
        self._free_rows_of_cancelled()
        return slots

    def _free_rows_of_cancelled(self) -> None:
        """Once no slot holds a rollout of theirs, and none may begin."""
        used = {id(r.group) for r in self.slots if r is not None} | {id(r.group) for p in self.planned for r in p}
        for group in self._cancelled:
            if id(group) not in used:
                self._free_group_rows(group)
        self._cancelled = [g for g in self._cancelled if id(g) in used]

    def _free_group_rows(self, group: Group) -> None:
        self._free_rows[group.shard] += group.rows[::-1]
        group.rows = []

    def take_complete(self, per_shard: Callable[[int], int]) -> list[Group]:
        """Complete groups of the first one's size, at most `per_shard(size)` of each shard; their rows come free."""
        taken: list[Group] = []
        if self.complete:
            size = self.complete[0].request.num_samples
            room = [per_shard(size)] * len(self.waiting)
            left: deque[Group] = deque()
            for group in self.complete:
                if group.request.num_samples == size and room[group.shard]:
                    room[group.shard] -= 1
                    taken.append(group)
                else:
                    left.append(group)
            self.complete = left
        for group in taken:
            del self.groups[group.request.ticket]
            self._free_rows[group.shard] += group.rows[::-1]
        return taken

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; between chunks, when nothing is planned."""
        assert not any(self.planned)
        groups = [*self.groups.values(), *self._cancelled]
        number = {id(g): i for i, g in enumerate(groups)}
        state = {
            "queue": [_request_state(r) for r in self.queue],
            "groups": [[_request_state(g.request), *_group_fields(g)] for g in groups],
            "slots": [r and [number[id(r.group)], r.sample, r.made, r.turn, r.ended] for r in self.slots],
            "waiting": [[number[id(g)] for g in queue] for queue in self.waiting],
            "complete": [number[id(g)] for g in self.complete],
            "free": [self._free_rows, self._free_prefix],
        }
        return copy.deepcopy(state)  # not the live lists

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, for a table of the same sizes."""
        state = copy.deepcopy(state)
        groups = [Group(_request(request), *fields) for request, *fields in state["groups"]]
        self.queue = deque(_request(r) for r in state["queue"])
        self.end_plan()
        self.groups = {g.request.ticket: g for g in groups if not g.cancelled}
        self._cancelled = [g for g in groups if g.cancelled]
        self.slots = [r and Rollout(groups[r[0]], *r[1:]) for r in state["slots"]]
        per_shard = [self.slots[i : i + self.slots_per_shard] for i in range(0, len(self.slots), self.slots_per_shard)]
        self._num_free = [sum(r is None for r in slots) for slots in per_shard]
        self.waiting = [deque(groups[i] for i in queue) for queue in state["waiting"]]
        self.complete = deque(groups[i] for i in state["complete"])
        self._free_rows, self._free_prefix = ([list(x) for x in part] for part in state["free"])


def _group_fields(g: Group) -> list[Any]:
    return [g.shard, g.prefix_row, g.rows, g.num_begun, g.length, g.finish, g.cancelled]


def _request_state(r: Request) -> list[Any]:
    params = [*vars(r.params).values()]
    return [
        r.ticket,
        r.task_id,
        r.visit,
        int(r.purpose),
        [int(i) for i in r.prompt],
        r.num_samples,
        params,
        r.multi_turn,
    ]


def _request(state: Sequence[Any]) -> Request:
    ticket, task_id, visit, purpose, prompt, num_samples, params, multi_turn = state
    fields: list[Any] = [tuple(x) if isinstance(x, list) else x for x in params]
    return Request(ticket, task_id, visit, Purpose(purpose), prompt, num_samples, SamplingParams(*fields), multi_turn)
