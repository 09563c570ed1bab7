"""The selector `difficulty_pools`."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import DifficultyPoolsSelector
from dynrl.tasks.selectors.difficulty_pools import split
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict

RATES = {"hard": 0, "medium": 4, "easy": 7, "solved": 8}  # of 8, in the tasks of this source
SHARES = {"hard_share": 0.2, "medium_share": 0.5, "easy_share": 0.3}


def store_of(*sources):
    return TaskStore.from_tasks([Task(-1, source, f"{i}", "1") for i, source in enumerate(sources)])


def taught(store, ids=None, visits=4, **kwargs):
    """A selector that knows these tasks, each as its source says; prior_strength is low, so that kinds count little."""
    selector = DifficultyPoolsSelector(0, **{**SHARES, "prior_strength": 0.5, "decay": 1.0, **kwargs})
    tasks = store.get(range(len(store)) if ids is None else ids)
    for task in tasks * visits:
        selector.observe(Outcome(task.task_id, 0, Verdict.KEPT, 8, RATES[task.source], 0.5, 1, task.source, task.level))
    return selector


def drawn(selector, store, n, num_draws):
    counts = Counter()
    for _ in range(num_draws):
        counts.update(task.source for task in store.get(selector.draw(n, store)))
    return {source: count / (n * num_draws) for source, count in counts.items()}


@settings(deadline=None, max_examples=300)
@example(total=1, shares=[0.0, 0.0, 0.1], available=[0, 0, 2], offset=0.9999999999999999)
@given(
    total=st.integers(0, 50),
    shares=st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0]), min_size=3, max_size=3),
    available=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_a_split_is_by_shares_and_leaves_nothing_that_can_be_had(total, shares, available, offset):
    counts = split(total, np.array(shares), available, offset)
    assert all(0 <= count <= room for count, room in zip(counts, available, strict=True))
    possible = sum(room for share, room in zip(shares, available, strict=True) if share)
    assert counts.sum() == min(total, possible)
    assert all(not count for share, count in zip(shares, counts, strict=True) if not share)
    if all(room >= total for room in available) and sum(shares):
        exact = total * np.array(shares) / sum(shares)
        assert (np.abs(counts - exact) <= 1 + 1e-9).all()


def test_a_split_is_exact_on_average():
    offsets = (np.arange(1_000) + 0.5) / 1_000
    shares = np.array([0.2, 0.5, 0.3])
    counts = np.sum([split(1, shares, [9, 9, 9], offset) for offset in offsets], axis=0)
    assert counts.tolist() == [200, 500, 300]
    # Of 10, the middle one has only 1: the 9 others are split 2 to 3.
    counts = np.mean([split(10, shares, [99, 1, 99], offset) for offset in offsets], axis=0)
    np.testing.assert_allclose(counts, [3.6, 1, 5.4], atol=0.31)


@pytest.mark.parametrize("n", [1, 40])
def test_each_pool_has_its_share(n):
    store = store_of(*["hard", "medium", "easy"] * 100)
    shares = drawn(taught(store, check_rate=0.0), store, n, 1_000 // n)
    for source, share in SHARES.items():
        assert abs(shares[source.removesuffix("_share")] - share) < (0.045 if n == 1 else 0.005)


def test_an_empty_pool_leaves_its_share_to_the_others():
    store = store_of(*["hard", "easy"] * 100)
    shares = drawn(taught(store), store, 40, 50)
    assert abs(shares["hard"] - 0.4) < 0.01
    assert abs(shares["easy"] - 0.6) < 0.01
    store = store_of(*["hard"] * 50)
    assert drawn(taught(store, hard_share=0.0), store, 40, 3) == {"hard": 1.0}  # nothing else is there


def test_rare_pools_get_their_share_from_the_whole_store():
    store = store_of(*["hard"] * 4_000, *["medium"] * 30)
    selector = taught(store)
    share = drawn(selector, store, 20, 20)["medium"]
    assert abs(share - 0.5 / 0.7) < 0.02
    members = Counter(i for _ in range(60) for i in selector.draw(20, store) if i >= 4_000)
    assert len(members) == 30  # all of them, about alike: 60 * 20 * 0.714 / 30 = 29 expected
    assert max(members.values()) < 3 * min(members.values())


def test_single_draws_find_rare_pools_too():
    store = store_of(*["hard"] * 900, *["medium"] * 100)
    share = drawn(taught(store), store, 1, 500)["medium"]
    assert abs(share - 0.5 / 0.7) < 0.07  # standard deviation 0.02; one in ten tasks is medium


def test_solved_tasks_rest_and_are_checked_at_the_configured_rate():
    store = store_of(*["solved"] * 300, *["medium"] * 100)
    selector = taught(store, check_rate=0.1)
    shares = drawn(selector, store, 10, 500)
    assert abs(shares["solved"] - 0.1 * 0.75) < 0.016  # 75% of the store; standard deviation 0.004
    assert selector.num_selectable(store) == 100
    assert "solved" not in drawn(taught(store, check_rate=0.0), store, 10, 50)
    # A check that fails brings the task back.
    for _ in range(4):
        selector.observe(Outcome(7, 5, Verdict.KEPT, 8, 2, 0.25, 2, "solved", 0))
    assert selector.num_selectable(store) == 101


def test_where_all_is_solved_solved_tasks_are_drawn():
    store = store_of(*["solved"] * 30)
    selector = taught(store)
    assert sorted(selector.draw(30, store)) == list(range(30))
    assert selector.num_selectable(store) == 0


def test_unseen_tasks_are_in_the_pool_of_their_kind():
    store = store_of(*["hard", "medium", "easy", "solved"] * 200)
    selector = taught(store, ids=range(40), check_rate=0.0, prior_strength=50.0)
    shares = drawn(selector, store, 40, 20)
    assert abs(shares["medium"] - 0.5) < 0.01
    assert "solved" not in shares
    assert selector.num_selectable(store) == 600


def test_the_documented_example_of_solved():
    store = store_of("medium", "medium")
    selector = DifficultyPoolsSelector(0)
    for positive in (8, 0):  # the kind is at one half
        selector.observe(Outcome(10**6, 0, Verdict.FILTERED, 8, positive, 0.5, 1, "medium", 0))
    selector.pass_rates.outcomes.by_task.update(0, 8, 8, 1)  # of this task alone
    np.testing.assert_allclose(selector.pass_rates.mean(np.array([0]), store), [0.9], atol=0.01)


def test_the_selectable_are_estimated_in_a_large_store():
    store = TaskStore(DigitSorting(), 0, 200_000)
    selector = DifficultyPoolsSelector(0)
    assert selector.num_selectable(store) == 200_000
    for _ in range(30):
        for level in (2, 3, 4):
            selector.observe(Outcome(0, 0, Verdict.FILTERED, 8, 8, 1.0, 1, "digit_sorting", level))
    assert abs(selector.num_selectable(store) - 140_000) < 3_000  # standard deviation 700
    assert DifficultyPoolsSelector(0).num_selectable(TaskStore(DigitSorting(), 0, 0)) == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"medium_from": 0.8}, r"must ascend within 0 to 1, got 0\.8, 0\.7, 0\.9"),
        ({"solved_from": 1.1}, "must ascend within 0 to 1"),
        ({"easy_from": float("nan")}, "must ascend within 0 to 1"),
        ({"hard_share": -0.1}, r"must not be negative, nor all 0, got \(-0\.1, 0\.6, 0\.2\)"),
        ({"hard_share": 0, "medium_share": 0, "easy_share": 0}, "must not be negative, nor all 0"),
        ({"check_rate": 2.0}, r"check_rate must lie in 0 to 1, got 2\.0"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        DifficultyPoolsSelector(0, **kwargs)
