"""The selector `greso`."""

from collections import Counter

import numpy as np
import pytest

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import EpochSelector, GresoSelector
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict


def observe(selector, task_id, positive, visit=0, live=8, times=1):
    for i in range(times):
        selector.observe(
            Outcome(task_id, visit + i, Verdict.FILTERED, live, positive, 0.5, 1, "s", 0, 0 < positive < live)
        )


def num_drawn(selector, store, num_epochs):
    """Draws one by one for as many epochs; how often each task was drawn."""
    counts = Counter()
    while selector.state_dict()["epochs"]["epoch"] < num_epochs:
        counts.update(selector.draw(1, store))
    return counts


def test_nothing_is_skipped_until_something_is_known():
    store = TaskStore(DigitSorting(), 0, 50)
    assert GresoSelector(3).draw(120, store) == EpochSelector(3).draw(120, store)


def test_a_task_is_kept_with_probability_p_to_the_power_of_its_streak():
    store = TaskStore(DigitSorting(), 0, 6)
    selector = GresoSelector(0, p_easy=0.8, p_hard=0.4)
    observe(selector, 0, 8, times=1)  # kept with 0.8
    observe(selector, 1, 8, times=3)  # 0.8 ** 3 = 0.512
    observe(selector, 2, 0, times=2)  # 0.4 ** 2 = 0.16
    observe(selector, 3, 0, times=9)  # 0.01 at least
    observe(selector, 4, 0, times=5)
    observe(selector, 4, 3)  # mixed: the streak is over
    counts = num_drawn(selector, store, 1_000)
    for task_id, probability in enumerate((0.8, 0.512, 0.16, 0.01, 1, 1)):
        assert abs(counts[task_id] / 1_000 - probability) < 0.05  # standard deviation 0.016 at most
    assert selector.num_selectable(store) == round(0.8 + 0.512 + 0.16 + 0.01 + 2)


def test_the_last_group_says_which_p_a_streak_has():
    store = TaskStore(DigitSorting(), 0, 3)
    selector = GresoSelector(0, p_easy=0.95, p_hard=0.05)
    observe(selector, 0, 0, times=3)
    observe(selector, 0, 8)  # a streak of 4, and easy
    observe(selector, 1, 8, times=3)
    observe(selector, 1, 0)  # a streak of 4, and hard
    assert selector.num_selectable(store) == round(0.95**4 + 0.01 + 1)
    counts = num_drawn(selector, store, 300)
    assert counts[0] > 200  # 0.95 ** 4 = 0.81
    assert counts[1] < 15
    assert counts[2] >= 300


def test_p_is_adapted_towards_the_target_share():
    selector = GresoSelector(0, groups_per_update=4, target_easy=0.5, target_hard=0.5)
    observe(selector, 0, 8, visit=0, times=1)  # the first visit does not count: nothing could have been skipped
    for task_id, positive in ((1, 8), (2, 8), (3, 4)):
        observe(selector, task_id, positive, visit=1)
    assert (selector.p_easy, selector.p_hard) == (0.5, 0.5)
    observe(selector, 4, 0, visit=2)  # of 4 groups 2 were easy, which is the target, and 1 was hard
    assert (selector.p_easy, selector.p_hard) == (0.49, 0.51)
    for visit in range(1, 401):
        observe(selector, 0, 0, visit)
    assert selector.p_hard == 0.05
    assert selector.p_easy == 0.95


def test_groups_that_lost_all_but_one_rollout_say_nothing_of_variance():
    selector = GresoSelector(0)
    before = selector.state_dict()
    observe(selector, 0, 1, live=1, visit=3)
    observe(selector, 0, 0, live=0, visit=3)
    assert selector.state_dict() == before


def test_the_search_is_bounded_and_ends_with_the_tasks_skipped_most_narrowly(monkeypatch):
    num_tasks = 2_000
    store = TaskStore(DigitSorting(), 0, num_tasks)
    selector = GresoSelector(0, p_easy=0.5, p_hard=0.1, max_candidates_per_task=4, groups_per_update=10**6)
    for task_id in range(num_tasks):
        observe(selector, task_id, 8 if task_id % 2 else 0, times=2)
    considered = []
    draw = EpochSelector.draw
    monkeypatch.setattr(EpochSelector, "draw", lambda *args: considered.append(draw(*args)) or considered[-1])
    ids = selector.draw(100, store)
    seen = [task_id for part in considered for task_id in part]
    assert len(seen) == 400  # 4 for each
    assert len(set(ids)) == 100
    assert set(ids) <= set(seen)
    # Of 400, some 200 are easy and kept with 1/4, and some 200 hard and kept with 1/100: about 52 pass, and the rest
    # is filled by margins, in which easy ones come far before hard ones.
    assert sum(task_id % 2 for task_id in ids) > 90


@pytest.mark.parametrize("max_candidates_per_task", [1, 2, 16])
def test_a_small_store_gives_every_task_before_any_comes_again(max_candidates_per_task):
    store = TaskStore(DigitSorting(), 0, 7)
    selector = GresoSelector(0, p_hard=0.05, max_candidates_per_task=max_candidates_per_task)
    for task_id in range(7):
        observe(selector, task_id, 0, times=50)
    for _ in range(30):
        ids = selector.draw(17, store)
        assert sorted(ids[:7]) == sorted(ids[7:14]) == list(range(7))
        assert len(set(ids[14:])) == 3


def test_appended_tasks_join_the_running_epoch():
    store = TaskStore(DigitSorting(), 0, 30)
    selector = GresoSelector(0)
    first = selector.draw(10, store)
    new = store.append([Task(-1, "made", f"{i}", "1") for i in range(20)])
    assert sorted(first + selector.draw(40, store)) == list(range(50))
    assert new[0] == 30
    assert selector.num_selectable(store) == 50


def test_rollouts_go_where_there_is_signal():
    store = TaskStore(DigitSorting(), 0, 1_000)
    selector = GresoSelector(0)
    rng = np.random.default_rng(0)
    mixed_share = []
    visits = Counter()
    for _ in range(120):  # 100 tasks are mixed, 450 solved, 450 out of reach
        ids = selector.draw(50, store)
        mixed_share.append(np.mean([i < 100 for i in ids]))
        for i in ids:
            positive = int(rng.integers(1, 8)) if i < 100 else 8 if i < 550 else 0
            observe(selector, i, positive, visits[i])
            visits[i] += 1
    assert np.mean(mixed_share[:20]) < 0.15
    assert np.mean(mixed_share[-20:]) > 0.4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"p_easy": 1.0}, r"p_easy must lie in 0\.05 to 0\.95, got 1\.0"),
        ({"p_hard": -1}, r"p_hard must lie in 0\.05 to 0\.95, got -1"),
        ({"target_easy": 2}, "target_easy must lie in 0 to 1, got 2"),
        ({"target_hard": float("nan")}, "target_hard must lie in 0 to 1, got nan"),
        ({"groups_per_update": 0}, "groups_per_update must lie in 1 to inf, got 0"),
        ({"max_candidates_per_task": 0}, "max_candidates_per_task must lie in 1 to inf, got 0"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GresoSelector(0, **kwargs)
