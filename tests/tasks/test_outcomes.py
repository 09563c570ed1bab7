import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.outcomes import Counts, TaskOutcomes, packed, unpacked
from dynrl.types import Outcome, Verdict

VISITS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 8), st.just(8), st.integers(0, 30)), max_size=30
)  # (key, successes, attempts, version)


def outcome(task_id=0, positive=4, live=8, version=1, source="s", level=2, verdict=Verdict.KEPT):
    return Outcome(task_id, 0, verdict, live, positive, float("nan"), version, source, level)


def through_json(state):
    return json.loads(json.dumps(state))


def contents(counts, num_keys=12):
    keys = range(num_keys)
    return [counts.attempts(keys).tolist(), counts.successes(keys).tolist(), counts.last_version(keys).tolist()]


def test_counts_forget_by_visit():
    counts = Counts(decay=0.5)
    counts.update(3, 8, 8, version=1)
    counts.update(3, 0, 8, version=2)
    counts.update(3, 2, 4, version=1)  # judged late: the newest version stays
    # attempts: ((8 / 2 + 8) / 2 + 4) = 10; successes: ((8 / 2 + 0) / 2 + 2) = 4
    assert contents(counts, 4) == [[0, 0, 0, 10], [0, 0, 0, 4], [-1, -1, -1, 2]]
    assert counts.mean([3]).tolist() == [(4 + 1) / (10 + 2)]
    assert counts.mean([3, 0], (3.0, 1.0)).tolist() == [7 / 14, 3 / 4]
    assert counts.mean([3, 0], (np.array([0.0, 1.0]), np.array([0.0, 3.0]))).tolist() == [0.4, 0.25]
    assert counts.seen().tolist() == [3]


def test_keys_never_seen_are_empty():
    counts = Counts()
    assert contents(counts, 2) == [[0, 0], [0, 0], [-1, -1]]
    counts.update(1, 1, 2, 0)
    assert contents(counts, 3) == [[0, 2, 0], [0, 1, 0], [-1, 0, -1]]
    assert counts.attempts([10**9, 1]).tolist() == [0, 2]
    assert counts.attempts([]).tolist() == counts.seen()[:0].tolist() == []


@settings(deadline=None, max_examples=100)
@given(visits=VISITS, decay=st.sampled_from([1.0, 0.9, 0.3]))
def test_visits_together_are_bit_for_bit_those_one_by_one(visits, decay):
    one_by_one, together = Counts(decay), Counts(decay)
    for visit in visits:
        one_by_one.update(*visit)
    together.update_all(visits[: len(visits) // 2])
    together.update_all(iter(visits[len(visits) // 2 :]))
    assert contents(together) == contents(one_by_one)
    assert together.state_dict() == one_by_one.state_dict()


@settings(deadline=None, max_examples=50)
@given(visits=VISITS)
def test_counts_are_bounded(visits):
    counts = Counts(0.9)
    counts.update_all(visits)
    attempts, successes = counts.attempts(range(10)), counts.successes(range(10))
    assert (successes <= attempts + 1e-9).all()
    assert (attempts <= 8 / (1 - 0.9)).all()
    assert counts.seen().tolist() == sorted({visit[0] for visit in visits})


@settings(deadline=None, max_examples=50)
@given(visits=VISITS, data=st.data())
def test_resume_at_every_visit_continues_the_same(visits, data):
    counts, states = Counts(0.7), []
    for visit in visits:
        states.append(through_json(counts.state_dict()))
        counts.update(*visit)
    for i, state in enumerate(states):
        resumed = Counts(0.7)
        resumed.update_all(data.draw(VISITS))  # is replaced
        resumed.load_state_dict(state)
        resumed.update_all(visits[i:])
        assert resumed.state_dict() == counts.state_dict()


def test_a_snapshot_is_apart():
    outcomes = TaskOutcomes(0.5, 0.25)
    outcomes.observe(outcome(2))
    snapshot = outcomes.snapshot()
    before = through_json(snapshot.state_dict())
    outcomes.observe_all([outcome(2, 8), outcome(9, source="t")])
    assert snapshot.state_dict() == before
    assert snapshot.kinds == [("s", 2)]
    snapshot.observe_all([outcome(2, 8), outcome(9, source="t")])
    assert snapshot.state_dict() == outcomes.state_dict()  # decays alike


def test_outcomes_count_by_task_and_by_kind():
    outcomes = TaskOutcomes(kind_decay=0.5)
    outcomes.observe_all(
        [
            outcome(4, 8, verdict=Verdict.FILTERED),
            outcome(5, 2, level=3),
            outcome(4, 0, live=4, version=7),
            outcome(6, 0, live=0, verdict=Verdict.FAILED, source="new"),  # says nothing
            outcome(5, 8, source="t"),
        ]
    )
    assert outcomes.kinds == [("s", 2), ("s", 3), ("t", 2)]
    assert [outcomes.key(kind) for kind in outcomes.kinds] == [0, 1, 2]
    assert outcomes.by_task.attempts([4, 5, 6]).tolist() == [12, 16, 0]
    assert outcomes.by_task.successes([4, 5, 6]).tolist() == [8, 10, 0]
    assert outcomes.by_kind.attempts(range(3)).tolist() == [8, 8, 8]  # 8 / 2 + 4, 8, 8
    assert outcomes.by_kind.successes(range(3)).tolist() == [4, 2, 8]
    assert outcomes.by_kind.last_version(range(3)).tolist() == [7, 1, 1]


@settings(deadline=None, max_examples=50)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 5))
def test_outcomes_do_not_depend_on_how_they_are_cut_nor_on_a_restart(cuts, seed):
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, [[9], [9], [2], [5]], (4, 40)).T.tolist()
    given_ones = [
        outcome(task, min(positive, 8 * live), 8 * live, version, f"s{task % 2}", task % 3)
        for task, positive, live, version in columns
    ]
    one_by_one, cut = TaskOutcomes(0.9, 0.8), TaskOutcomes(0.9, 0.8)
    for each in given_ones:
        one_by_one.observe(each)
    for start, end in pairwise([0, *sorted(cuts), 40]):
        cut.observe_all(given_ones[start:end])
        state = through_json(cut.state_dict())
        cut = TaskOutcomes(0.9, 0.8)
        cut.load_state_dict(state)
    assert cut.state_dict() == one_by_one.state_dict()
    assert cut.kinds == one_by_one.kinds


def test_wrong_values_are_named():
    for decay in (0, 1.1, -1, float("nan")):
        with pytest.raises(ValueError, match=f"decay must lie above 0 and be at most 1, got {decay}"):
            Counts(decay)
    with pytest.raises(ValueError, match="keys are at least 0, got -2"):
        Counts().update(-2, 1, 1, 0)
    with pytest.raises(ValueError, match="keys are at least 0, got -1"):
        Counts().update_all([(3, 1, 1, 0), (-1, 1, 1, 0)])
    with pytest.raises(ValueError, match=r"the saved counts have decay 0.5, these 0.9"):
        Counts(0.9).load_state_dict(Counts(0.5).state_dict())


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_packed_arrays_come_back_exactly_and_writable(dtype):
    for array in (np.zeros(0), np.array([0, -1, 2**31 - 1]), np.arange(10_000) / 7):
        array = array.astype(dtype)
        back = unpacked(packed(array), dtype)
        assert back.dtype == dtype
        assert back.tobytes() == array.tobytes()
        back += 1
    json.dumps(packed(np.ones(3)))


def test_what_was_never_visited_takes_no_room():
    counts = Counts()
    counts.update(70_000, 1, 8, 0)
    counts.update(3, 1, 8, 0)
    assert len(json.dumps(counts.state_dict())) < 10_000
    counts = Counts()
    for key in (0, 1, 2, 3):
        counts.update(key, 1, 8, 0)
    assert len(unpacked(counts.state_dict()["attempts"], np.float64)) == 4
