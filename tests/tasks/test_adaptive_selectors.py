"""What holds for every selector whose draws depend on tasks or outcomes: ids, purity, restarts, and small stores."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import BUILT_IN_SELECTORS, make_selector
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict

KWARGS = {
    "weighted": {"weights": [{"level": 2, "weight": 5.0}, {"source": "made", "weight": 0.5}]},
    "greso": {"groups_per_update": 3, "max_candidates_per_task": 2},
    "difficulty_pools": {"candidates_per_task": 2},
    "thompson": {"candidates_per_task": 2},
}
NAMES = sorted(set(BUILT_IN_SELECTORS) - {"epoch", "uniform"})
every = pytest.mark.parametrize("name", NAMES)
# Each entry: tasks drawn; how the rollouts of the groups drawn end, one after the other; tasks appended then.
SCRIPTS = st.lists(
    st.tuples(st.integers(0, 7), st.lists(st.integers(0, 4), max_size=4), st.integers(0, 3)), min_size=1, max_size=8
)


def make(name, seed: Any = 0, **kwargs: Any):
    return make_selector(name, **{**KWARGS.get(name, {}), "seed": seed, **kwargs})


def new_tasks(count, level=3):
    return [Task(-1, "made", f"{i}", "1", level) for i in range(count)]


def outcome_of(task, positive, live=4, visit=0, version=0):
    return Outcome(task.task_id, visit, Verdict.KEPT, live, positive, 0.5, version, task.source, task.level)


def run(selector, store, script):
    """Draws, appends and tells of outcomes; yields what was drawn, and after it the state."""
    drawn_before = []
    for n, positives, num_appended in script:
        ids = selector.draw(n, store)
        for task, positive in zip(store.get(ids), positives, strict=False):
            selector.observe(outcome_of(task, positive, visit=drawn_before.count(task.task_id)))
        drawn_before += ids
        store.append(new_tasks(num_appended))
        yield ids, json.loads(json.dumps(selector.state_dict()))


@every
@settings(deadline=None, max_examples=40)
@given(num_tasks=st.integers(0, 12), script=SCRIPTS)
def test_ids_are_of_the_store_and_each_comes_once_before_any_comes_again(name, num_tasks, script):
    store = TaskStore(DigitSorting(), 0, num_tasks)
    length = num_tasks
    for (ids, _), (n, _, num_appended) in zip(run(make(name), store, script), script, strict=True):
        assert len(ids) == (n if length else 0)
        assert all(type(task_id) is int and 0 <= task_id < length for task_id in ids)
        for start in range(0, len(ids), max(length, 1)):
            in_turn = ids[start : start + length]
            assert len(set(in_turn)) == len(in_turn)
        length += num_appended


@every
@settings(deadline=None, max_examples=20)
@given(num_tasks=st.integers(0, 12), script=SCRIPTS)
def test_resume_at_every_point_gives_the_same_draws(name, num_tasks, script):
    recorded = list(run(make(name), TaskStore(DigitSorting(), 0, num_tasks), script))
    for stop in range(len(script)):
        store = TaskStore(DigitSorting(), 0, num_tasks)
        before = list(run(make(name), store, script[: stop + 1]))
        resumed = make(name)
        resumed.load_state_dict(recorded[stop][1])
        drawn_before = [i for ids, _ in before for i in ids]
        for (ids, state), (n, positives, num_appended) in zip(recorded[stop + 1 :], script[stop + 1 :], strict=True):
            assert resumed.draw(n, store) == ids
            for task, positive in zip(store.get(ids), positives, strict=False):
                resumed.observe(outcome_of(task, positive, visit=drawn_before.count(task.task_id)))
            drawn_before += ids
            store.append(new_tasks(num_appended))
            assert json.loads(json.dumps(resumed.state_dict())) == state


@every
def test_draws_are_distinct_and_differ_by_seed_and_by_draw(name):
    store = TaskStore(DigitSorting(), 0, 3_000)
    selector = make(name)
    first, second = selector.draw(300, store), selector.draw(300, store)
    assert len(set(first)) == len(set(second)) == 300
    assert first != second
    assert make(name).draw(300, store) == first
    assert make(name, seed=1).draw(300, store) != first
    # Nothing depends on which kinds the store was asked for before, or in which order.
    asked = TaskStore(DigitSorting(), 0, 3_000)
    asked.kinds(range(2_999, -1, -1))
    assert make(name).draw(300, asked) == first


@every
def test_appended_tasks_are_in_reach_of_the_very_next_draw(name):
    store = TaskStore(DigitSorting(), 0, 8)
    selector = make(name)
    selector.draw(5, store)
    store.append(new_tasks(8))
    in_two = selector.draw(16, store) + selector.draw(16, store)
    assert set(range(8, 16)) <= set(in_two)
    large = TaskStore(DigitSorting(), 0, 1_000)
    selector = make(name)
    selector.draw(100, large)
    large.append(new_tasks(1_000))
    assert max(selector.draw(200, large)) >= 1_000


@every
def test_groups_without_live_rollouts_say_nothing(name):
    store = TaskStore(DigitSorting(), 0, 20)
    selector = make(name)
    for task in store.get(range(10)):
        selector.observe(outcome_of(task, 3))
    before = selector.state_dict()
    selector.observe(Outcome(3, 1, Verdict.FAILED, 0, 0, float("nan"), 1, "digit_sorting", 4))
    selector.observe(Outcome(99, 0, Verdict.FAILED, 0, 0, float("nan"), 1, "unheard_of", 4))
    assert selector.state_dict() == before


@every
def test_another_seeds_state_is_refused(name):
    with pytest.raises(ValueError, match="has seed 1, this one 2"):
        make(name, seed=2).load_state_dict(make(name, seed=1).state_dict())


@every
def test_unknown_arguments_and_bad_seeds_are_named(name):
    with pytest.raises(TypeError, match=f"selector '{name}' takes no argument 'treshold'"):
        make(name, treshold=1)
    with pytest.raises(ValueError, match="seed must lie in"):
        make(name, seed=-1)


@pytest.mark.parametrize("name", ["difficulty_pools", "learnability", "thompson"])
def test_bad_arguments_of_all_posterior_selectors_are_named(name):
    for kwargs, message in (
        ({"candidates_per_task": 0}, "candidates_per_task must be at least 1, got 0"),
        ({"prior_strength": 0.0}, "prior_strength must be above 0, got 0.0"),
        ({"decay": 0.0}, r"^decay must lie above 0 and be at most 1, got 0\.0"),
        ({"kind_decay": 2.0}, r"^kind_decay must lie above 0 and be at most 1, got 2\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            make(name, **kwargs)
