"""The selector `weighted`."""

from collections import Counter

import numpy as np
import pytest

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import WeightedSelector
from dynrl.tasks.store import TaskStore
from dynrl.types import Task

LEVELS = [{"level": level, "weight": float(level)} for level in range(2, 12)]


def made(i, weight=None, source="made", level=0):
    metadata = {} if weight is None else {"weight": weight}
    return Task(-1, source, f"{i}", "1", level, metadata=metadata)


def shares(selector, store, num_draws, n=50):
    kinds = [kind for _ in range(num_draws) for kind in store.kinds(selector.draw(n, store))]
    return {kind: count / len(kinds) for kind, count in Counter(kinds).items()}


@pytest.mark.parametrize("num_tasks", [100_000, 1_500])  # by tries, and all weighed
def test_draws_are_in_proportion_to_the_weights(num_tasks):
    store = TaskStore(DigitSorting(), 0, num_tasks)
    levels = Counter(level for _, level in store.kinds(range(num_tasks)))
    drawn = shares(WeightedSelector(0, weights=LEVELS), store, 200)
    total = sum(level * count for level, count in levels.items())
    for level, count in levels.items():
        assert abs(drawn["digit_sorting", level] - level * count / total) < 0.012  # standard deviation 0.004 at most


def test_the_first_entry_that_fits_decides():
    weights = [
        {"source": "a", "level": 1, "weight": 4.0},
        {"source": "a", "weight": 0.0},
        {"level": 2, "weight": 1.0},
    ]
    kinds = [("a", 1), ("a", 2), ("b", 2), ("b", 3)]
    tasks = [made(i, source=source, level=level) for i, (source, level) in enumerate(kinds * 500)]
    drawn = shares(WeightedSelector(0, weights=weights, default=3.0), TaskStore.from_tasks(tasks), 100)
    assert drawn.keys() == {("a", 1), ("b", 2), ("b", 3)}
    for kind, share in {("a", 1): 4 / 8, ("b", 2): 1 / 8, ("b", 3): 3 / 8}.items():
        assert abs(drawn[kind] - share) < 0.03


def test_weights_in_the_metadata():
    tasks = [made(i, weight=(0, 1, 2.5, None)[i % 4]) for i in range(4_000)]
    store = TaskStore.from_tasks(tasks)
    selector = WeightedSelector(0, metadata="weight", default=1.5)
    counts = Counter(task_id % 4 for _ in range(100) for task_id in selector.draw(50, store))
    for residue, share in {1: 1 / 5, 2: 2.5 / 5, 3: 1.5 / 5}.items():
        assert abs(counts[residue] / 5_000 - share) < 0.03
    store.append([made("heavy", weight=10**9)])
    assert 4_000 in selector.draw(1, store)


def test_rare_tasks_are_found_where_tries_do_not_find_them():
    store = TaskStore(DigitSorting(), 0, 20_000)
    store.append([made(i) for i in range(20)])
    selector = WeightedSelector(0, weights=[{"source": "made", "weight": 1.0}], default=0.0)
    ids = selector.draw(30, store)
    assert sorted(ids[:20]) == list(range(20_000, 20_020))
    assert len(set(ids[20:])) == 10
    assert set(ids[20:]) <= set(range(20_000, 20_020))
    assert selector.draw(30, store)[:20] != ids[:20]


def test_without_any_weight_there_is_nothing_to_draw():
    store = TaskStore(DigitSorting(), 0, 5_000)
    for selector in (
        WeightedSelector(0, weights=[{"level": 99, "weight": 1.0}], default=0.0),
        WeightedSelector(0, weights=[{"level": 3, "weight": 0.0}], default=0.0),
        WeightedSelector(0, metadata="weight", default=0.0),
    ):
        with pytest.raises(ValueError, match="none of the 5000 tasks of the store has a weight above 0"):
            selector.draw(1, store)


def test_every_task_is_weighed_once(monkeypatch):
    store = TaskStore.from_tasks([made(i, weight=1) for i in range(50)])
    asked = []
    get = TaskStore.get
    monkeypatch.setattr(TaskStore, "get", lambda self, ids: asked.extend(ids) or get(self, ids))
    selector = WeightedSelector(0, metadata="weight")
    for _ in range(3):
        selector.draw(10, store)
    store.append([made("new", weight=2)])
    selector.draw(10, store)
    assert asked == list(range(51))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({}, ValueError, "needs either weights or metadata"),
        ({"weights": LEVELS, "metadata": "w"}, ValueError, "needs either weights or metadata"),
        ({"weights": {"level": 3}}, TypeError, "weights must be a sequence of mappings"),
        ({"weights": "level"}, TypeError, "weights must be a sequence of mappings"),
        ({"weights": [3]}, TypeError, r"weights\[0\] must be a mapping with a 'weight', and"),
        ({"weights": [LEVELS[0], {"level": 3}]}, TypeError, r"weights\[1\] must be a mapping with a 'weight', and"),
        ({"weights": [{"weight": 1.0}]}, TypeError, r"weights\[0\] must be .* a 'source' or a 'level'"),
        ({"weights": [{"weight": 1.0, "sauce": "a"}]}, TypeError, r"weights\[0\] has unknown keys \['sauce'\]"),
        ({"weights": [{"weight": 1.0, "source": 3}]}, TypeError, r"weights\[0\]: the source must be a text"),
        ({"weights": [{"weight": 1.0, "level": "3"}]}, TypeError, r"weights\[0\]: .* the level a whole number"),
        ({"weights": [{"weight": 1.0, "level": True}]}, TypeError, r"weights\[0\]: .* the level a whole number"),
        ({"weights": [{"weight": -1, "level": 3}]}, ValueError, r"weights\[0\]: weight must be a finite number .* -1"),
        ({"weights": [{"weight": "1", "level": 3}]}, ValueError, r"weights\[0\]: weight must be .* got '1'"),
        ({"weights": [{"weight": float("inf"), "level": 3}]}, ValueError, r"weights\[0\]: weight must be .* got inf"),
        ({"weights": LEVELS, "default": float("nan")}, ValueError, "default must be a finite number"),
        (
            {"weights": [{"source": "a", "weight": 1.0}, {"source": "a", "level": 3, "weight": 2.0}]},
            ValueError,
            r"weights\[1\] never applies: all that fits it fits weights\[0\] first",
        ),
    ],
)
def test_wrong_arguments_are_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        WeightedSelector(0, **kwargs)


@pytest.mark.parametrize("weight", ["x", -1, True, [1]])
def test_a_task_with_a_wrong_number_is_named(weight):
    store = TaskStore.from_tasks([made(0, weight=1), made(1, weight=weight)])
    with pytest.raises(ValueError, match=r"task 1: 'weight' in its metadata must be a finite number of at least 0"):
        WeightedSelector(0, metadata="weight").draw(1, store)


def test_restored_weights_are_those_of_the_restored_store():
    store = TaskStore.from_tasks([made(0, weight=0)])
    empty = store.state_dict()
    store.append([made(1, weight=1), made(2, weight=0)])
    selector = WeightedSelector(0, metadata="weight")
    assert selector.draw(3, store) == [1, 1, 1]
    store.load_state_dict(empty)
    store.append([made(1, weight=0), made(2, weight=1)])
    selector.load_state_dict(selector.state_dict())
    assert selector.draw(3, store) == [2, 2, 2]


def test_integers_are_weights_too():
    store = TaskStore(DigitSorting(), 0, 100)
    as_integers = [{**entry, "weight": int(entry["weight"])} for entry in LEVELS]
    assert WeightedSelector(0, as_integers).draw(9, store) == WeightedSelector(0, LEVELS).draw(9, store)
    assert isinstance(WeightedSelector(0, tuple(LEVELS)).draw(1, store)[0], int)
    np.testing.assert_equal(WeightedSelector(0, LEVELS).state_dict(), {"seed": 0, "num_choices": 0})
