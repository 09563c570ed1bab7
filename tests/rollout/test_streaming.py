"""The producer without rounds: when groups are judged, what is tried again, and what is given up."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from etils import epath
from test_rounds import TOKENIZER, G, L, P, ScriptedSampler, ScriptedVerifiers, Store, T, config, player, tickets

from dynrl.journal import Journal
from dynrl.rollout.buffer import GroupBuffer
from dynrl.rollout.events import AttemptsFailed, GroupsGenerated, GroupsJudged
from dynrl.rollout.judge import Judge
from dynrl.rollout.producer import Producer
from dynrl.types import Reward, Scores, Status, Verdict

TEXTS = {n: (f"{n}", "0") for n in range(20)}


class Sampler(ScriptedSampler):
    """Knows what is in flight, and notes what is cancelled."""

    def __init__(self, mesh, polls, texts=None):
        super().__init__(mesh, polls, texts or TEXTS)
        self.open, self.cancelled = set(), []

    @property
    def num_in_flight(self):
        return len(self.open)

    def submit(self, requests):
        super().submit(requests)
        self.open |= {r.ticket for r in requests}

    def filler(self, num_samples):
        return SimpleNamespace(owned_P=np.ones(P, bool))

    def cancel(self, tickets):
        self.cancelled += tickets
        self.open -= set(tickets)

    def poll(self, min_groups=1):
        groups = super().poll(min_groups)
        if groups is not None:
            self.open -= set(groups.tickets_P.tolist())
        return groups


class SlowVerifiers(ScriptedVerifiers):
    """Gives nothing back before `release` says so."""

    def __init__(self, **options):
        super().__init__(**options)
        self.ready = False
        self.waits = 0

    def poll(self):
        done, self._done = (self._done, []) if self.ready else ([], self._done)
        return done

    def wait(self, timeout_secs):
        self.waits += 1
        self.ready = True
        return self.poll()


@pytest.fixture(scope="module")
def parts(mesh1):
    run = config()
    buffer = GroupBuffer(mesh1, capacity=16, batch_size=4, num_samples=G, max_prompt_tokens=L, max_completion_tokens=T)
    return Judge(run.dynamic_sampling, run.loss, G), buffer


def streaming(parts, sampler, verifiers, clock="logical", **failure):
    parts[1].free(parts[1].tickets)
    schedule = {"name": "ready_first", "clock": clock, "mode": "async" if clock == "wall" else "streaming"}
    run = config(schedule=schedule, rollout_failure=failure)
    fakes: Any = (player(sampler), verifiers, *parts, TOKENIZER, Store())
    return Producer(run, *fakes, in_rounds=False)


def kinds(events):
    """What happened to whom."""
    names = {GroupsGenerated: "generated", GroupsJudged: "judged", AttemptsFailed: "failed"}
    numbers = [[j.ticket for j in e.judgements] if isinstance(e, GroupsJudged) else e.tickets for e in events]
    return [(names[type(e)], *n) for e, n in zip(events, numbers, strict=True)]


def test_groups_are_judged_one_poll_after_they_came(mesh1, parts):
    verifiers = SlowVerifiers()
    producer = streaming(parts, Sampler(mesh1, [(2, 1), None, (3,), (4,)]), verifiers)
    producer.dispatch(tickets(1, 2, 3, 4))
    assert kinds(producer.poll()) == [("generated", 2, 1)]
    assert kinds(producer.poll()) == [("judged", 1, 2)]  # in ticket order, and waited for
    assert verifiers.waits == 1
    assert kinds(producer.poll()) == [("generated", 3)]
    # Nothing is left to decode: what comes last need not wait for a next poll.
    assert kinds(producer.poll()) == [("generated", 4), ("judged", 3, 4)]
    assert producer.idle
    assert sorted(parts[1].tickets) == [1, 2, 3, 4]


def test_on_a_wall_clock_verdicts_come_with_the_scores(mesh1, parts):
    verifiers = SlowVerifiers()
    producer = streaming(parts, Sampler(mesh1, [(1,), (2,), None, None, (3,)]), verifiers, clock="wall")
    producer.dispatch(tickets(1, 2, 3))
    assert kinds(producer.poll()) == [("generated", 1)]
    assert kinds(producer.poll()) == [("generated", 2)]
    assert kinds(producer.poll()) == []
    verifiers.ready = True
    assert kinds(producer.poll()) == [("judged", 1, 2)]
    assert verifiers.waits == 0


def test_a_retry_waits_its_time_and_late_scores_of_the_attempt_before_are_ignored(mesh1, parts):
    verifiers = SlowVerifiers()
    sampler = Sampler(mesh1, [(1,), None, None, (1,), None])
    producer = streaming(parts, sampler, verifiers)
    ticket, other = tickets(1, 9)  # the other one is never done
    producer.dispatch([ticket, other])
    assert kinds(producer.poll()) == [("generated", 1)]
    producer.retry(ticket._replace(attempts=2), 5.0)
    assert sampler.cancelled == [1]
    verifiers.ready = True  # the scores of the first attempt come now
    assert producer.poll() == []
    producer.deadlines.spent(4.0)
    assert producer.poll() == []
    assert len(sampler.requests) == 2
    producer.deadlines.spent(1.5)
    assert kinds(producer.poll()) == [("generated", 1)]
    assert [(r.ticket, r.visit) for r in sampler.requests] == [(1, 3), (9, 3), (1, 3)]  # the same noise
    assert kinds(producer.poll()) == [("judged", 1)]
    assert [number % 2**40 for number, _ in verifiers.seen] == [1, 1]
    assert verifiers.seen[0][0] != verifiers.seen[1][0]


def test_groups_past_their_deadline_are_given_up(mesh1, parts):
    sampler = Sampler(mesh1, [(1,), None, None, None])
    producer = streaming(parts, sampler, SlowVerifiers(), group_deadline_secs=10.0)
    producer.dispatch(tickets(1, 2))
    producer.poll()
    assert kinds(producer.poll()) == [("judged", 1)]
    producer.deadlines.spent(11.0)
    (event,) = producer.poll()
    assert isinstance(event, AttemptsFailed)
    assert event.tickets == (2,)
    assert "rollout_failure.group_deadline_secs = 10, the first one of task 2" in event.why
    assert producer.idle
    assert sampler.cancelled == [2]


def test_a_deadline_passes_in_the_same_poll_after_a_restart(mesh1, parts, tmp_path):
    for late in (11.0, 0.0):  # the second life is faster
        producer = streaming(parts, Sampler(mesh1, [None] * 5 + [(2,)]), SlowVerifiers(), group_deadline_secs=10.0)
        producer.deadlines.journal = Journal(epath.Path(tmp_path))
        producer.dispatch(tickets(2))
        assert producer.poll() == producer.poll() == []
        producer.deadlines.spent(late)
        assert kinds(producer.poll()) == [("failed", 2)]


def test_a_verifier_that_missed_its_deadline_once_misses_it_after_a_restart(mesh1, parts, tmp_path):
    class Verifiers(ScriptedVerifiers):
        def __init__(self, slow):
            super().__init__()
            self.slow = slow

        def wait(self, timeout_secs):
            scores = self._done.pop()
            if not self.slow:
                return [scores]
            zero = Reward(0.0)
            return [Scores(scores.ticket, (scores.rewards[0], zero), (Status.OK, Status.TIMEOUT))]

    verdicts = []
    for slow in (True, False):
        producer = streaming(parts, Sampler(mesh1, [(1,)], {1: ("1", "1")}), Verifiers(slow))
        producer.deadlines.journal = Journal(epath.Path(tmp_path))
        producer.dispatch(tickets(1))
        producer.poll()
        (judged,) = producer.take_judged()
        verdicts.append((judged.judged.verdict_P[0], judged.records.score.tolist(), judged.records.status.tolist()))
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][:2] == (Verdict.KEPT, [[1.0, 0.0]])


def test_what_is_with_the_verifiers_goes_there_again_after_a_restart(mesh1, parts):
    producer = streaming(parts, Sampler(mesh1, [(3, 1), None]), SlowVerifiers())
    producer.dispatch(tickets(1, 2, 3))
    producer.poll()
    state, arrays = json.loads(json.dumps(producer.state_dict())), producer.arrays
    assert len(arrays) == 1
    again = streaming(parts, sampler := Sampler(mesh1, [None, (2,)]), verifiers := SlowVerifiers())
    sampler.open = {2}  # restored apart
    sampler.requests = ["2"]
    again.num_polls = 1  # as the checkpoint's document has it
    again.load_state_dict(state, arrays)
    assert sorted(n for n, _ in verifiers.seen) == [1, 3]
    assert kinds(again.poll()) == [("judged", 1, 3)]
    assert kinds(again.poll()) == [("generated", 2), ("judged", 2)]


def test_cancelled_groups_leave_no_trace(mesh1, parts):
    producer = streaming(parts, Sampler(mesh1, [(1, 2), None]), SlowVerifiers())
    producer.dispatch(tickets(1, 2, 3))
    producer.poll()
    producer.cancel([1, 3])
    assert kinds(producer.poll()) == [("judged", 2)]
    assert producer.idle
    assert parts[1].tickets == [2]


def test_a_deadline_ends_with_the_last_token(mesh1, parts):
    """What is generated waits for its verifiers as long as they need; one straggler takes no other group along."""
    sampler, verifiers = Sampler(mesh1, [(1,), None, None, None]), SlowVerifiers()
    producer = streaming(parts, sampler, verifiers, clock="wall", group_deadline_secs=10.0)
    producer.dispatch(tickets(1, 2))
    producer.poll()
    producer.deadlines.spent(11.0)
    (event,) = producer.poll()
    assert isinstance(event, AttemptsFailed)
    assert event.tickets == (2,)
    verifiers.ready = True
    assert kinds(producer.poll()) == [("judged", 1)]


def test_on_a_wall_clock_no_set_waits_for_the_one_before(mesh1, parts):
    verifiers = SlowVerifiers()
    producer = streaming(parts, Sampler(mesh1, [(1,), (2,), None, None, (3,)]), verifiers, clock="wall")
    producer.dispatch(tickets(1, 2, 3))
    producer.poll()
    producer.poll()
    first, verifiers._done = verifiers._done[:1], verifiers._done[1:]
    verifiers.ready = True
    assert kinds(producer.poll()) == [("judged", 2)]
    verifiers._done = first
    assert kinds(producer.poll())[-1] == ("judged", 1)
