"""The slot engine's books: by hand, and in random runs beside books kept in another way."""

import json
from collections import Counter, deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from dynrl.sampling.slots import OPEN, SlotTable
from dynrl.types import Finish, Purpose, Request, SamplingParams


def request(ticket, num_samples=2, length=1, uid=None, multi_turn=False):
    prompt, params = [3] * length, SamplingParams(max_tokens=5)
    task_id = ticket if uid is None else uid
    return Request(ticket, task_id, 0, Purpose.TRAIN, prompt, num_samples, params, multi_turn)


def bucket_of(request):
    return next(b for b in (2, 4, 8) if len(request.prompt) <= b)


def width_of(bucket):
    return 8 // bucket


def prefill(table, width=None):
    """Tickets, by shard, of what is planned."""
    planned = table.plan_prefill(bucket_of, width_of if width is None else lambda _: width)
    shards = {}
    for group, _ in planned:
        shards.setdefault(group.shard, []).append(group.request.ticket)
    return shards


def admit(table):
    """(slot, ticket, sample) of what is planned and finds a slot, as the device gives them."""
    table.plan()
    begun = []
    for slot, held in enumerate([*table.slots]):
        if held is None and table.planned[slot // table.slots_per_shard]:
            r = table.begin(slot)
            begun.append((slot, r.group.request.ticket, r.sample))
    table.end_plan()
    return begun


def end(table, slot, made=1):
    table.slots[slot].made = made
    table.finish(slot, Finish.STOP)


def take(table, per_shard=100):
    return [g.request.ticket for g in table.take_complete(lambda _: per_shard)]


def reloaded(table, sizes):
    other = SlotTable(*sizes)
    other.load_state_dict(json.loads(json.dumps(table.state_dict())))
    return other


# ---- By hand ----


def test_a_group_s_life():
    table = SlotTable(3, 1, 4, 2)
    table.queue += [request(7), request(8, 1), request(9)]
    assert (table.num_open, table.num_active, table.has_work, table.begun) == (3, 0, True, False)
    assert prefill(table, width=2) == {0: [7, 8]}  # two prefix rows
    assert prefill(table, width=2) == {}  # none is left
    assert admit(table) == [(0, 7, 0), (1, 7, 1), (2, 8, 0)]
    assert (table.num_open, table.num_active, table.has_work, table.begun) == (3, 3, True, True)
    assert prefill(table, width=3) == {}  # no slot is free, and what is run ahead is to fill a program
    assert prefill(table, width=2) == {0: [9]}
    end(table, 1, made=4)
    assert take(table) == []  # sample 0 goes on
    assert admit(table) == []  # a slot is free, but one output row only: 7 holds two and 8 one of four
    assert table.has_work  # the host has to look when there are more
    end(table, 2)
    assert take(table) == [8]
    assert admit(table) == [(1, 9, 0), (2, 9, 1)]
    assert not table.has_work
    end(table, 0, made=2)
    (group,) = table.take_complete(lambda _: 1)
    assert (group.request.ticket, group.length, group.finish) == (7, [2, 4], [Finish.STOP] * 2)
    assert table.tickets() == {9}
    assert (table.num_open, table.num_active) == (1, 2)


def test_a_group_larger_than_all_slots_begins_bit_by_bit():
    table = SlotTable(2, 1, 5, 1)
    table.queue += [request(0, 5), request(1, 1)]
    prefill(table)
    assert admit(table) == [(0, 0, 0), (1, 0, 1)]
    end(table, 1)
    assert prefill(table) == {}  # the rest of the group waits; its prompt stays
    assert admit(table) == [(1, 0, 2)]
    end(table, 0)
    end(table, 1)
    assert table.begun  # nobody is in a slot, but the group is not over
    assert admit(table) == [(0, 0, 3), (1, 0, 4)]
    end(table, 0)
    assert prefill(table) == {0: [1]}
    assert admit(table) == []  # all five rows are taken until the group is handed over
    end(table, 1)
    assert take(table) == [0]
    assert admit(table) == [(0, 1, 0)]


def test_a_slot_takes_one_after_the_other_of_the_plan():
    table = SlotTable(2, 1, 8, 8)
    table.queue += [request(0, 1), *(request(i) for i in range(1, 9))]
    assert prefill(table, width=8) == {0: [*range(8)]}
    table.plan()
    assert [(r.group.request.ticket, r.sample) for r in table.planned[0]] == [(0, 0), (1, 0), (1, 1), (2, 0)]  # 2 S
    assert table.has_work  # for a third slot's worth
    table.begin(0)
    end(table, 0)
    table.begin(0)
    end(table, 0)
    assert table.begin(1).group.request.ticket == 1
    assert [g.request.ticket for g in table.waiting[0]] == [2, 3, 4, 5, 6, 7]
    table.end_plan()
    assert [g.request.ticket for g in table.partly_begun()] == []
    table.plan()  # 2, which has its rows, 3 and no more: eight rows, of which 0 and 1 hold three until handed over
    assert [(r.group.request.ticket, r.sample) for r in table.planned[0]] == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_nobody_decodes_while_all_slots_wait_for_the_caller():
    table = SlotTable(1, 1, 4, 4)
    table.queue += [request(0, 1, multi_turn=True), request(1, 1)]
    assert not table.may_decode
    prefill(table)
    table.plan()
    assert table.may_decode  # the slot is free
    rollout = table.begin(0)
    table.end_plan()
    assert table.may_decode
    rollout.ended = int(Finish.STOP)
    table.plan()
    assert table.planned[0]
    assert not table.may_decode
    table.finish(0, Finish.STOP)
    assert table.may_decode


def test_a_loaded_table_has_no_plan():
    table = SlotTable(1, 1, 4, 4)
    table.queue += [request(0, 1), request(1, 1)]
    state = table.state_dict()
    prefill(table)
    table.plan()
    table.load_state_dict(state)
    assert json.dumps(table.state_dict()) == json.dumps(state)
    assert not table.may_decode


def test_a_cancelled_group_holds_its_rows_while_it_may_begin():
    table = SlotTable(2, 1, 2, 4)
    table.queue += [request(0), request(1)]
    prefill(table)
    table.plan()
    table.cancel([0])  # while the chunk runs that may begin it
    table.begin(1)
    assert table.free_cancelled() == [1]
    assert table._free_rows == [[]]
    table.end_plan()
    assert admit(table) == [(0, 1, 0), (1, 1, 1)]


def test_groups_go_where_slots_are_free():
    table = SlotTable(8, 2, 16, 4)
    table.queue += [request(i) for i in range(3)]
    # Four free slots each: the first goes to shard 0, the second to 1, the third finds two free in both.
    assert prefill(table, width=4) == {0: [0, 2], 1: [1]}
    assert admit(table) == [(0, 0, 0), (1, 0, 1), (2, 2, 0), (3, 2, 1), (4, 1, 0), (5, 1, 1)]
    table.queue += [request(3), request(4)]
    assert prefill(table, width=1) == {1: [3], 0: [4]}  # one a shard in one program, the needy one first
    assert admit(table) == [(6, 3, 0), (7, 3, 1)]


def test_one_program_runs_prompts_of_one_length_and_the_others_keep_their_turn():
    table = SlotTable(8, 1, 16, 8)
    short, long = 1, 7
    table.queue += [request(i, 1, length) for i, length in enumerate([long, short, short, long, short])]
    assert prefill(table, width=8) == {0: [0, 3]}
    assert [r.ticket for r in table.queue] == [1, 2, 4]
    assert admit(table) == [(0, 0, 0), (1, 3, 0)]
    assert prefill(table, width=8) == {0: [1, 2, 4]}


@pytest.mark.parametrize(("between", "found"), [(7, [0, 9]), (8, [0])])
def test_how_far_a_prompt_may_overtake_others(between, found):
    # Past four programs' worth: 4 times one prompt in each of 2 shards.
    table = SlotTable(8, 2, 16, 8)
    table.queue += [request(0, 1, 7), *(request(10 + i, 1, 1) for i in range(between)), request(9, 1, 7)]
    planned = table.plan_prefill(bucket_of, lambda _: 1)
    assert [g.request.ticket for g, _ in planned] == found
    assert [r.ticket for r in table.queue][:between] == [10 + i for i in range(between)]


def test_while_weights_wait_only_begun_groups_go_on():
    table = SlotTable(3, 1, 8, 4)
    table.queue += [request(i) for i in range(4)]
    prefill(table, width=3)
    assert admit(table) == [(0, 0, 0), (1, 0, 1), (2, 1, 0)]
    table.requeue_unbegun()  # 2 was prefilled with the old weights
    assert [r.ticket for r in table.queue] == [2, 3]
    end(table, 0)
    end(table, 1)
    assert [g.request.ticket for g in table.partly_begun()] == [1]
    assert admit(table) == [(0, 1, 1)]
    assert table.partly_begun() == []
    assert table.begun
    end(table, 0)
    end(table, 2)
    assert not table.begun  # groups that are complete have no part in it
    assert table.num_open == 4
    assert prefill(table, width=3) == {0: [2, 3]}
    assert admit(table) == [(0, 2, 0), (1, 2, 1), (2, 3, 0)]


def test_requeued_groups_come_first_and_in_order():
    table = SlotTable(2, 2, 4, 8)
    table.queue += [request(i, 1) for i in range(8)]
    assert prefill(table, width=3) == {0: [0, 2, 4], 1: [1, 3, 5]}
    assert admit(table) == [(0, 0, 0), (1, 1, 0)]
    table.requeue_unbegun()
    assert [r.ticket for r in table.queue] == [2, 3, 4, 5, 6, 7]
    assert table.tickets() == set(range(8))
    end(table, 0)
    # Every prefix row is free again. Shard 0 has a free slot and gets the first one; then they take turns.
    assert prefill(table, width=8) == {0: [2, 3, 5, 7], 1: [4, 6]}


def test_a_cancelled_group_holds_its_rows_while_its_slots_run():
    table = SlotTable(2, 1, 2, 4)
    table.queue += [request(0), request(1), request(2)]
    prefill(table)
    assert admit(table) == [(0, 0, 0), (1, 0, 1)]
    end(table, 0)
    table.cancel([0, 2, 5])  # running, waiting, unknown
    assert table.tickets() == {1}
    assert admit(table) == []  # the device may still write to the rows
    assert (table.num_active, table.begun) == (1, True)
    assert table.free_cancelled() == [1]
    assert table.free_cancelled() == []
    assert admit(table) == [(0, 1, 0), (1, 1, 1)]
    table.cancel([1, 1])
    table.cancel([1])
    assert table.free_cancelled() == [0, 1]
    assert table.num_open == 0


def test_a_complete_group_can_be_cancelled():
    table = SlotTable(2, 1, 2, 4)
    table.queue += [request(0), request(1)]
    prefill(table)
    admit(table)
    end(table, 0)
    end(table, 1)
    table.cancel([0])
    assert take(table) == []
    assert len(admit(table)) == 2


def test_a_cancelled_ticket_may_come_again_at_once():
    table = SlotTable(2, 1, 4, 4)
    table.queue.append(request(0, uid=50))
    prefill(table)
    admit(table)
    end(table, 0)
    table.cancel([0])
    table.queue.append(request(0, uid=51))
    table = reloaded(table, (2, 1, 4, 4))
    assert prefill(table) == {0: [0]}
    assert admit(table) == [(0, 0, 0)]
    assert table.free_cancelled() == [1]
    assert admit(table) == [(1, 0, 1)]
    end(table, 0)
    end(table, 1)
    assert [g.request.task_id for g in table.take_complete(lambda _: 1)] == [51]


def test_groups_of_one_size_are_handed_over_together():
    table = SlotTable(12, 2, 12, 8)
    table.queue += [request(i, size) for i, size in enumerate([2, 2, 1, 1, 2, 1])]
    assert prefill(table) == {0: [0, 2, 4], 1: [1, 3, 5]}
    admit(table)
    for ticket in (3, 4, 0, 1, 2, 5):
        for slot, r in enumerate(table.slots):
            if r is not None and r.group.request.ticket == ticket:
                end(table, slot)
    assert take(table, 1) == [3, 2]  # the size of the first; one of each shard
    assert take(table, 1) == [4, 1]
    assert take(table, 1) == [0]
    assert take(table, 1) == [5]
    assert take(table, 1) == []


def test_everything_of_a_request_is_saved():
    params = SamplingParams(0.7, 9, 5, 0.9, 0.05, (4, 5), ("\n\n", "STOP"), True)
    whole = Request(2**40, -1, 3, Purpose.PROBE, [1, 2, 3], 4, params, True)
    table = SlotTable(2, 1, 4, 2)
    array: Any = np.array([4, 5])
    table.queue += [whole, Request(1, 2, 3, Purpose.EVAL, array, 1, SamplingParams())]
    table = reloaded(table, (2, 1, 4, 2))
    assert table.queue[0] == whole
    assert table.queue[1].prompt == [4, 5]
    assert type(table.queue[0].purpose) is Purpose
    assert type(table.queue[0].params.stop_strings) is tuple
    prefill(table)
    admit(table)
    slots: list[Any] = table.slots
    slots[1].turn += [8, 9]
    slots[1].made, slots[1].ended = 6, int(Finish.STOP)
    table = reloaded(table, (2, 1, 4, 2))
    slots = table.slots
    first, r = slots
    assert (r.sample, r.made, r.turn, r.ended, r.by_text, r.group.request) == (1, 6, [8, 9], Finish.STOP, True, whole)
    assert r.group is first.group is table.groups[2**40] is table.waiting[0][0]
    assert table.num_active == 1


# ---- Random runs ----


class Simulation:
    """Drives a table as the engine does, beside books of its own; a twin is loaded from JSON now and then.

    A rollout's task_id tells it from all others, since tickets may come again. A step is a poll.
    """

    MAX_GROUP, HAND_OVER_EVERY = 5, 4
    MAX_STEPS = 5 + 3 + 1 + 3  # of a rollout in its slot: a turn, the caller's time, one more step, and again

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.shards = int(rng.integers(1, 5))
        self.per_shard = int(rng.integers(1, 7))
        num_rows = self.MAX_GROUP if rng.random() < 0.4 else int(rng.integers(self.MAX_GROUP, 4 * self.per_shard + 5))
        self.sizes = (self.shards * self.per_shard, self.shards, num_rows, int(rng.choice([1, 2, 3, 8])))
        self.tables = [SlotTable(*self.sizes), SlotTable(*self.sizes)]
        self.now, self.draining = 0, False
        self.requests, self.fate = {}, {}  # by uid; handed over or cancelled
        self.tickets = {}  # uid by open ticket
        self.queued = []  # uids in the order of their turn
        self.turns_left = {}  # of those: programs that may run before their own
        self.waiting = [deque() for _ in range(self.shards)]  # uids
        self.since = {}  # of those: (the step, how many were prefilled before)
        self.shard, self.begun, self.ended = {}, {}, {}  # by uid
        self.planned = [deque() for _ in range(self.shards)]  # (uid, sample)
        self.new_weights = False
        self.complete = []
        self.slot, self.row, self.prefix = {}, {}, {}  # owners: (uid, sample), uid, uid
        self.left = {}  # by slot: steps that the rollout still takes
        self.held = {}  # by slot: steps that the caller takes after a turn
        self.extended = set()  # slots: once each
        self.seen = Counter()

    # -- Both tables do the same --

    def both(self, operation):
        got, twin = (operation(table) for table in self.tables)
        assert got == twin
        return got

    def check(self):
        """The tables' books are these books: nothing is lost, nothing is used twice."""
        plans = [table.planned for table in self.tables]
        for table in self.tables:  # a plan is not saved: between chunks there is none
            table.planned = [deque() for _ in plans[0]]
        state, twin = (json.dumps(table.state_dict()) for table in self.tables)
        for table, plan in zip(self.tables, plans, strict=True):
            table.planned = plan
        assert state == twin
        for lists, owners, count in zip(
            json.loads(state)["free"], (self.row, self.prefix), self.sizes[2:], strict=True
        ):
            for shard, free in enumerate(lists):
                used = [index for s, index in owners if s == shard]
                assert sorted(free + used) == list(range(count))
        table = self.tables[0]
        taken = {divmod(slot, self.per_shard) for slot, r in enumerate(table.slots) if r is not None}
        assert taken == set(self.slot)
        assert table.num_open == len(self.tickets)
        assert table.tickets() == set(self.tickets)
        assert table.num_active == len(self.slot) - len(self.held)
        for uids in (self.queued, *self.waiting):  # who has a prompt of the same bucket keeps his place
            for bucket in (2, 4, 8):
                same = [uid for uid in uids if bucket_of(self.requests[uid]) == bucket]
                begun = [uid for uid in same if self.begun.get(uid)]  # perhaps before an older one of another shard
                assert same[len(begun) :] == sorted(same[len(begun) :])
        assert table.begun == bool(self.slot or any(self.begun[uid] for queue in self.waiting for uid in queue))

    # -- What callers do --

    def submit(self):
        rng = self.rng
        free = [t for t in range(len(self.requests) + 1) if t not in self.tickets]
        ticket, uid = int(rng.choice(free)), len(self.requests)
        made = request(ticket, int(rng.integers(1, 6)), int(rng.integers(1, 9)), uid, bool(rng.random() < 0.2))
        self.both(lambda table: table.queue.append(made))
        self.requests[uid], self.tickets[ticket] = made, uid
        self.queued.append(uid)
        self.turns_left[uid] = len(self.queued)

    def cancel(self):
        tickets = [t for t in self.tickets if self.rng.random() < 0.2]
        self.both(lambda table: table.cancel([*tickets, 10**6]))
        for ticket in tickets:
            uid = self.tickets.pop(ticket)
            assert uid not in self.fate
            self.fate[uid] = "cancelled"
            running = any(owner == uid for owner, _ in self.slot.values())
            self.seen["cancelled while it ran" if running else "cancelled"] += 1
            for queue in (self.queued, self.complete, *self.waiting):
                if uid in queue:
                    queue.remove(uid)
            self.prefix = {row: owner for row, owner in self.prefix.items() if owner != uid}
        self.free_rows_of_cancelled()

    def free_rows_of_cancelled(self):
        used = {uid for uid, _ in self.slot.values()} | {uid for planned in self.planned for uid, _ in planned}
        self.row = {row: uid for row, uid in self.row.items() if self.fate.get(uid) != "cancelled" or uid in used}

    def free_cancelled(self):
        gone = sorted(slot for slot, (uid, _) in self.slot.items() if self.fate.get(uid) == "cancelled")
        slots = self.both(lambda table: table.free_cancelled())
        assert [divmod(slot, self.per_shard) for slot in slots] == gone
        for slot in gone:
            self.release(slot)
        self.free_rows_of_cancelled()

    def release(self, slot):
        del self.slot[slot], self.left[slot]
        self.held.pop(slot, None)
        self.extended.discard(slot)

    def update_weights(self):
        self.both(lambda table: table.requeue_unbegun())
        back = {uid for queue in self.waiting for uid in queue if not self.begun[uid]}
        self.waiting = [deque(uid for uid in queue if self.begun[uid]) for queue in self.waiting]
        self.prefix = {row: uid for row, uid in self.prefix.items() if uid not in back}
        self.row = {row: uid for row, uid in self.row.items() if uid not in back}
        self.queued = sorted(back, key=lambda uid: self.since[uid][1]) + self.queued
        assert [r.task_id for r in self.tables[0].queue] == self.queued
        for uid in self.queued:
            self.turns_left[uid] = self.turns_left.get(uid, 0) + len(back)
        self.draining = bool(self.rng.random() < 0.7) and self.tables[0].begun
        self.seen["requeued"] += len(back)
        self.seen["drained"] += self.draining

    # -- A poll --

    def step(self):
        self.now += 1
        self.receive()
        if self.new_weights:
            self.update_weights()
            self.new_weights = False
        if self.draining and not self.tables[0].begun:
            self.draining = False
        self.refill()
        self.check()
        idle = len(self.slot) == len(self.held) and not any(self.planned)
        if self.rng.random() < 0.5 or self.now % self.HAND_OVER_EVERY == 0 or idle:
            self.hand_over()
        while self.complete and self.now % self.HAND_OVER_EVERY == 0:
            self.hand_over()

    def receive(self, decodes=True):
        """What the chunk in progress did, if there is one."""
        if decodes:
            for slot in self.rng.permutation(sorted(self.slot)).tolist():
                self.decode(tuple(slot))
        for shard in range(self.shards):
            slots = [(shard, i) for i in range(self.per_shard)]
            while self.planned[shard] and (free := [slot for slot in slots if slot not in self.slot]):
                slot = free[self.rng.integers(len(free))]
                self.begin(slot)
                if decodes and self.rng.random() < 0.5:  # others follow in the same chunk, if it ends
                    self.decode(slot)
        for planned in self.planned:
            self.seen["planned and not begun"] += len(planned)
            planned.clear()
        self.both(lambda table: table.end_plan())
        self.free_rows_of_cancelled()
        self.free_cancelled()

    def begin(self, slot):
        shard, number = slot[0], slot[0] * self.per_shard + slot[1]
        uid, sample = self.both(lambda table: (lambda r: (r.group.request.task_id, r.sample))(table.begin(number)))
        assert (uid, sample) == self.planned[shard].popleft()  # first come, first served
        assert sample == self.begun[uid]
        self.slot[slot], self.left[slot] = (uid, sample), int(self.rng.integers(1, 6))
        self.begun[uid] += 1
        if self.begun[uid] == self.requests[uid].num_samples and self.fate.get(uid) != "cancelled":
            assert self.waiting[shard].popleft() == uid
            self.prefix = {row: owner for row, owner in self.prefix.items() if owner != uid}

    def decode(self, slot):
        """One step of a slot."""
        uid, sample = self.slot[slot]
        number = slot[0] * self.per_shard + slot[1]
        rollouts = [table.slots[number] for table in self.tables]
        assert {(r.group.request.task_id, r.sample) for r in rollouts} == {(uid, sample)}
        if self.fate.get(uid) == "cancelled":
            if slot not in self.held and not self.requests[uid].multi_turn and self.rng.random() < 0.6:
                self.both(lambda table: table.free_slot(number))  # it ended; the device gives the slot to the next
                self.release(slot)
                self.seen["ended when cancelled"] += 1
            return
        if slot in self.held:
            self.held[slot] -= 1
            if self.held[slot] > 0:
                return
            del self.held[slot]
            if slot not in self.extended and self.rng.random() < 0.5:
                self.extended.add(slot)
                self.seen["extended"] += 1
                for r in rollouts:
                    r.ended, r.made, r.turn = OPEN, r.made + 2, []
                self.left[slot] = 1
                return
            self.finish(slot, number, int(Finish.STOP))
            return
        self.left[slot] -= 1
        for r in rollouts:
            r.made += 1
            r.turn += [r.made] * r.by_text
        if self.left[slot] == 0:
            if self.requests[uid].multi_turn:
                for r in rollouts:
                    r.ended = int(Finish.STOP)
                self.held[slot] = int(self.rng.integers(1, 4))
            else:
                self.finish(slot, number, int(self.rng.choice([Finish.STOP, Finish.LENGTH, Finish.FAILED])))

    def finish(self, slot, number, finish):
        uid, sample = self.slot[slot]
        made = self.tables[0].slots[number].made
        self.both(lambda table: table.finish(number, finish))
        self.ended[uid][sample] = (made, finish)
        self.release(slot)
        if len(self.ended[uid]) == self.requests[uid].num_samples:
            self.complete.append(uid)

    def refill(self):
        programs, table = 0, self.tables[0]
        self.plan()
        while not self.draining:
            if self.prefill():
                programs += 1
                assert programs <= self.sizes[0] + self.shards * self.sizes[3]  # each fills a prefix row or a slot
            elif self.both(lambda table: table.prefix_is_full):
                waiting = sum(map(len, self.waiting))
                self.receive(decodes=False)
                assert sum(map(len, self.waiting)) < waiting
                self.seen["begun to make room"] += 1
            else:
                break
            self.plan()
        more = []
        for shard in range(self.shards):
            free = self.per_shard - sum(s == shard for s, _ in self.slot)
            left = self.num_waiting(shard) - len(self.planned[shard])
            more.append(bool(self.queued or left))
            # A slot stays free for want of work or of output rows only.
            if free > len(self.planned[shard]) and not self.draining:
                assert not table.queue or self.short(shard)
                self.seen["short of rows"] += self.short(shard)
        assert self.both(lambda table: table.has_work) == any(more)
        # No starvation: before its turn come the prompts ahead, at worst in one slot each, and their hand-over.
        longest = self.sizes[3] * (self.MAX_GROUP * self.MAX_STEPS + self.HAND_OVER_EVERY)
        assert all(self.now - self.since[uid][0] <= longest for queue in self.waiting for uid in queue)

    def num_waiting(self, shard):
        return sum(self.requests[uid].num_samples - self.begun[uid] for uid in self.waiting[shard])

    def short(self, shard):
        """Whether the next group in turn that holds no rows finds too few."""
        rest = [uid for uid in self.waiting[shard] if uid not in self.row.values()]
        full = len(self.planned[shard]) == 2 * self.per_shard
        room = self.sizes[2] - sum(s == shard for s, _ in self.row)
        return not full and bool(rest) and room < self.requests[rest[0]].num_samples

    def prefill(self):
        width = width_of(bucket_of(self.requests[self.queued[0]])) if self.queued else 0

        def hungry(shard):
            """Lacks a rollout for a free slot; or one to follow in each slot, and can fill a program."""
            free = self.per_shard - sum(s == shard for s, _ in self.slot)
            room, waiting = self.sizes[3] - sum(s == shard for s, _ in self.prefix), self.num_waiting(shard)
            return room and (waiting < free or (room >= width and waiting < free + self.per_shard))

        planned = self.both(
            lambda table: [
                (p.group.request.task_id, p.group.shard, p.prefix_row) for p in table.plan_prefill(bucket_of, width_of)
            ]
        )
        assert bool(planned) == bool(self.queued and any(map(hungry, range(self.shards))))
        if not planned:
            return planned
        # One bucket, the next in turn's; in the order of the queue, and nobody of the bucket left out before others.
        uids = [uid for uid, _, _ in planned]
        bucket = bucket_of(self.requests[self.queued[0]])
        assert uids == [uid for uid in self.queued if bucket_of(self.requests[uid]) == bucket][: len(uids)]
        for shard in range(self.shards):
            assert sum(s == shard for _, s, _ in planned) <= width_of(bucket)
        for uid, shard, row in planned:
            assert (shard, row) not in self.prefix
            self.prefix[shard, row] = uid
            self.waiting[shard].append(uid)
            self.shard[uid], self.begun[uid], self.ended[uid], self.since[uid] = (
                shard,
                0,
                {},
                (self.now, self.seen["prefilled"]),
            )
            self.seen["prefilled"] += 1
            self.queued.remove(uid)
            assert self.turns_left.pop(uid) > 0
        for uid in self.queued:  # no starvation: who is k-th in the queue is prefilled by the k-th program
            self.turns_left[uid] -= 1
            assert self.turns_left[uid] > 0
        return planned

    def plan(self):
        self.both(lambda table: table.plan())
        plan = self.both(
            lambda table: [
                [(r.group.request.task_id, r.sample, r.group.prefix_row, tuple(r.group.rows)) for r in planned]
                for planned in table.planned
            ]
        )
        for shard, planned in enumerate(plan):
            assert len(planned) <= 2 * self.per_shard
            for uid, _, prefix_row, rows in planned:
                assert self.prefix[shard, prefix_row] == uid
                if uid not in self.row.values():
                    assert not self.draining
                    assert not [row for row in rows if (shard, row) in self.row]
                    self.row |= {(shard, row): uid for row in rows}
                assert len(set(rows)) == self.requests[uid].num_samples
                assert {row for (s, row), owner in self.row.items() if (s, owner) == (shard, uid)} == set(rows)
            # In turn, and nobody left out: to the end, or until rows or the plan are used up.
            turns = [(uid, i) for uid in self.waiting[shard] for i in range(self.requests[uid].num_samples)]
            turns = [(uid, i) for uid, i in turns if i >= self.begun[uid]]
            self.planned[shard] = deque((uid, sample) for uid, sample, *_ in planned)
            assert [*self.planned[shard]] == turns[: len(planned)]
            assert len(planned) in (len(turns), 2 * self.per_shard) or self.short(shard)

    def hand_over(self):
        limit = int(self.rng.integers(1, 4))
        taken = self.both(
            lambda table: [
                (g.request.task_id, g.shard, tuple(g.length), tuple(g.finish))
                for g in table.take_complete(lambda _: limit)
            ]
        )
        # Of the size of the one that was complete first, in that order, while there is room in the shard.
        room, want = [limit] * self.shards, []
        for uid in self.complete:
            if self.requests[uid].num_samples == self.requests[self.complete[0]].num_samples and room[self.shard[uid]]:
                room[self.shard[uid]] -= 1
                want.append(uid)
        assert [uid for uid, *_ in taken] == want
        for uid, shard, length, finish in taken:
            assert shard == self.shard[uid]
            assert uid not in self.fate
            assert [*zip(length, finish, strict=True)] == [self.ended[uid][i] for i in range(len(length))]
            self.fate[uid] = "handed over"
            self.seen["handed over"] += 1
            del self.tickets[self.requests[uid].ticket]
            self.complete.remove(uid)
            self.row = {row: owner for row, owner in self.row.items() if owner != uid}

    # -- A run --

    def event(self):
        u = self.rng.random()
        if u < 0.08:
            self.cancel()
        elif u < 0.16:
            self.new_weights = True
        elif u < 0.4:
            self.receive()
            self.tables[1] = reloaded(self.tables[0], self.sizes)
            self.seen["reloaded"] += 1
        else:
            for _ in range(int(self.rng.integers(0, self.shards + 1))):
                self.submit()
        self.check()

    def run(self, steps):
        for _ in range(steps):
            for _ in range(int(self.rng.integers(1, 4))):
                self.event()
            self.step()
        # What is left ends within a bounded time: group after group at worst, in one slot each.
        budget = len(self.tickets) * (self.MAX_GROUP * self.MAX_STEPS + self.HAND_OVER_EVERY) + self.MAX_STEPS
        while self.tickets or self.slot:
            self.step()
            budget -= 1
            assert budget > 0, "no end"
        assert set(self.fate) == set(self.requests)
        for owners in (self.slot, self.row, self.prefix, self.queued, self.complete, *self.waiting):
            assert not owners
        self.check()


@pytest.mark.parametrize("seeds", [*pairwise(range(0, 81, 20))])
def test_random_runs(seeds):
    seen = Counter()
    for seed in range(*seeds):
        simulation = Simulation(seed)
        simulation.run(40)
        seen += simulation.seen
    # The runs were not idle: all of this came about.
    events = [
        "handed over", "cancelled", "cancelled while it ran", "requeued", "drained", "extended", "short of rows",
        "reloaded", "planned and not begun", "begun to make room", "ended when cancelled",
    ]  # fmt: skip
    assert min(seen[event] for event in events) >= 20, seen


def test_state_dict_is_a_snapshot_and_loading_shares_nothing():
    table = SlotTable(2, 1, 4, 2)
    table.queue.append(request(0))
    prefill(table)
    admit(table)
    state = table.state_dict()
    before = json.dumps(state)
    one, other = SlotTable(2, 1, 4, 2), SlotTable(2, 1, 4, 2)
    one.load_state_dict(state)
    other.load_state_dict(state)
    for going_on in (table, one):
        end(going_on, 0)
        rollout = going_on.slots[1]
        assert rollout is not None
        rollout.turn.append(3)
    assert json.dumps(state) == before
    assert other.groups[0].finish == [-1, -1]
