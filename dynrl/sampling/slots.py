"""Who is in which slot: the slot engine's books, in plain Python, without JAX.

Requests wait in a queue; those next in turn have their prompts prefilled and become groups that wait for slots; a
group takes slots as they come free, the first in the queue first, and holds an output row per rollout until it is
handed over. Everything here is by row shard, since a group never leaves the one it was given to.
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
    rows: list[int] = field(default_factory=list)  # given with the first slot
    num_admitted: int = 0
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


class Admit(NamedTuple):
    """One rollout that begins in a slot."""

    slot: int  # counted over all shards
    rollout: Rollout
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
        self.num_prefix_rows = num_prefix_rows
        self.slots: list[Rollout | None] = [None] * num_slots
        self.queue: deque[Request] = deque()
        self.waiting: list[deque[Group]] = [deque() for _ in range(shards)]  # prefilled, not all in slots
        self.groups: dict[int, Group] = {}  # prefilled and not handed over, by ticket
        self.complete: deque[Group] = deque()
        self._all_admitted: list[Group] = []  # by the present plan
        self._free_slots = [list(range(self.slots_per_shard))[::-1] for _ in range(shards)]
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
        return any(r is not None for r in self.slots) or any(g.rows for queue in self.waiting for g in queue)

    @property
    def has_work(self) -> bool:
        """Whether a slot that comes free would be filled; not while the next group in turn lacks output rows."""
        blocked = [
            w and not w[0].rows and len(f) < w[0].request.num_samples
            for w, f in zip(self.waiting, self._free_rows, strict=True)
        ]
        idle = self.queue and not all(self.waiting)
        return bool(idle) or any(w and not b for w, b in zip(self.waiting, blocked, strict=True))

    def tickets(self) -> set[int]:
        """Of everything that is open."""
        return {r.ticket for r in self.queue} | set(self.groups)

    @property
    def prefix_is_full(self) -> bool:
        """Whether a shard has free slots and nobody waiting, but no prefix row for the queue's next prompt."""
        rows = zip(self._free_slots, self.waiting, self._free_prefix, strict=True)
        return bool(self.queue) and any(slots and not waiting and not free for slots, waiting, free in rows)

    # ---- Filling ----

    def plan_prefill(self, bucket_of: Callable[[Request], int], width_of: Callable[[int], int]) -> list[Prefill]:
        """Takes prompts of one length bucket from the queue, the first one's, as many as one program runs.

        Only when a shard has free slots and nobody waiting, but then as many as there is room for, for all shards:
        what is prefilled ahead fills the program's rows, and the next free slots need not wait.
        """
        hungry = any(free and not self.waiting[i] for i, free in enumerate(self._free_slots))
        if not self.queue or not hungry:
            return []
        bucket = bucket_of(self.queue[0])
        width = width_of(bucket)
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

    def _load(self, shard: int) -> tuple[int, int]:
        waiting = sum(g.request.num_samples - g.num_admitted for g in self.waiting[shard])
        return waiting - len(self._free_slots[shard]), shard

    def plan_admission(self) -> list[Admit]:
        """Gives free slots to waiting rollouts, in order."""
        planned: list[Admit] = []
        for shard, waiting in enumerate(self.waiting):
            free = self._free_slots[shard]
            while waiting and free:
                group, g = waiting[0], waiting[0].request.num_samples
                if not group.rows:
                    if len(self._free_rows[shard]) < g:
                        break
                    group.rows = [self._free_rows[shard].pop() for _ in range(g)]
                    group.length, group.finish = [0] * g, [OPEN] * g
                slot = free.pop() + shard * self.slots_per_shard
                rollout = Rollout(group, group.num_admitted)
                self.slots[slot] = rollout
                assert group.prefix_row is not None
                planned.append(Admit(slot, rollout, group.prefix_row))
                group.num_admitted += 1
                if group.num_admitted == g:
                    self._all_admitted.append(group)
                    waiting.popleft()
        return planned

    def release_prefixes(self) -> None:
        """Frees the prefix rows of groups all of whose rollouts were admitted; once the device was told of it."""
        for group in self._all_admitted:
            self._release_prefix(group)
        self._all_admitted.clear()

    def _release_prefix(self, group: Group) -> None:
        if group.prefix_row is not None:
            self._free_prefix[group.shard].append(group.prefix_row)
            group.prefix_row = None

    def partly_begun(self) -> list[Group]:
        """Groups some of whose rollouts have begun and others wait; one per shard at most."""
        return [g for queue in self.waiting for g in queue if g.rows]

    def requeue_unbegun(self) -> None:
        """Puts prefilled groups of which none has begun back to the head of the queue: the weights changed."""
        back: list[Group] = []
        for shard, waiting in enumerate(self.waiting):
            back += [g for g in waiting if not g.rows]
            self.waiting[shard] = deque(g for g in waiting if g.rows)
        order = {ticket: i for i, ticket in enumerate(self.groups)}
        for group in sorted(back, key=lambda g: order[g.request.ticket], reverse=True):
            self._release_prefix(group)
            del self.groups[group.request.ticket]
            self.queue.appendleft(group.request)

    # ---- Ending ----

    def free_slot(self, slot: int) -> None:
        """The slot's rollout is over, or was cancelled."""
        self.slots[slot] = None
        shard, index = divmod(slot, self.slots_per_shard)
        self._free_slots[shard].append(index)

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
            if not any(r is not None and r.group is group for r in self.slots):
                self._free_group_rows(group)
        self.waiting = [deque(g for g in queue if not g.cancelled) for queue in self.waiting]
        self.complete = deque(g for g in self.complete if not g.cancelled)

    def free_cancelled(self) -> list[int]:
        """Frees the slots of cancelled rollouts, and returns them."""
        slots = [i for i, r in enumerate(self.slots) if r is not None and r.group.cancelled]
        groups = {id(r.group): r.group for i in slots if (r := self.slots[i]) is not None}
        for slot in slots:
            self.free_slot(slot)
        for group in groups.values():
            self._free_group_rows(group)
        return slots

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
        """JSON-able."""
        groups = list(self.groups.values())
        groups += list({id(r.group): r.group for r in self.slots if r is not None and r.group.cancelled}.values())
        number = {id(g): i for i, g in enumerate(groups)}
        state = {
            "queue": [_request_state(r) for r in self.queue],
            "groups": [[_request_state(g.request), *_group_fields(g)] for g in groups],
            "slots": [r and [number[id(r.group)], r.sample, r.made, r.turn, r.ended] for r in self.slots],
            "waiting": [[number[id(g)] for g in queue] for queue in self.waiting],
            "complete": [number[id(g)] for g in self.complete],
            "free": [self._free_slots, self._free_rows, self._free_prefix],
        }
        return copy.deepcopy(state)  # not the live lists

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, for a table of the same sizes."""
        state = copy.deepcopy(state)
        groups = [Group(_request(request), *fields) for request, *fields in state["groups"]]
        self.queue = deque(_request(r) for r in state["queue"])
        self.groups = {g.request.ticket: g for g in groups if not g.cancelled}
        self.slots = [r and Rollout(groups[r[0]], *r[1:]) for r in state["slots"]]
        self.waiting = [deque(groups[i] for i in queue) for queue in state["waiting"]]
        self.complete = deque(groups[i] for i in state["complete"])
        self._free_slots, self._free_rows, self._free_prefix = ([list(x) for x in part] for part in state["free"])


def _group_fields(g: Group) -> list[Any]:
    return [g.shard, g.prefix_row, g.rows, g.num_admitted, g.length, g.finish, g.cancelled]


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
