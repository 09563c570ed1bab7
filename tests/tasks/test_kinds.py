"""Kinds of tasks: the sources' word for them is the tasks' own, and a store finds them cheaply."""

import json
from typing import Any

import numpy as np
import pytest

from dynrl.tasks.base import task_hash
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore, make_frozen
from dynrl.types import Task

SORTING = {"name": "digit_sorting", "weight": 2}
SUMS = {"name": "arithmetic", "weight": 1, "kwargs": {"max_digits": 3}}


def new_task(prompt="new>", **fields):
    return Task(**{"task_id": -1, "source": "made", "prompt": prompt, "answer": "1", **fields})


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    fields = [{"prompt": f"{i}?", "answer": str(i), "level": (7, -2, 2**70)[i % 3]} for i in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in fields))
    return {"name": "jsonl", "kwargs": {"path": str(path), "level": "level", "source": "quiz"}}


def made(entry) -> Any:
    return make_source(entry["name"], **entry.get("kwargs", {}))


def kinds_of_tasks(store):
    return [(task.source, task.level) for task in store.get(range(len(store)))]


@pytest.mark.parametrize("name", ["digit_sorting", "arithmetic", "countdown", "calculator"])
def test_levels_are_known_without_writing_the_problem(name, monkeypatch):
    source = make_source(name)
    store = TaskStore(source, 3, 200, make_frozen(source, 3, 100).hashes)  # half of the first are drawn again
    expected = kinds_of_tasks(store)
    monkeypatch.setattr(type(source), "problem", None)
    assert store.kinds(range(200)) == expected
    assert len(set(expected)) == len(source.levels)


def test_rows_know_their_levels_without_being_read(rows, monkeypatch):
    source = made(rows)
    excluded = frozenset(task_hash(f"{i}?") for i in (0, 4))
    store = TaskStore(source, 0, None, excluded)
    expected = kinds_of_tasks(store)
    monkeypatch.setattr(type(source), "_read", None)
    assert store.kinds(range(28)) == expected
    assert set(expected) == {("quiz", 7), ("quiz", -2), ("quiz", 2**70)}
    with pytest.raises(IndexError, match="there is no task 30; there are 30"):
        source.kind(0, 30)


def test_a_mixture_asks_its_parts(rows):
    endless = make_source("mixture", sources=[SORTING, SUMS, {**rows, "weight": 1}])
    excluded = make_frozen(endless, 1, 12).hashes
    store = TaskStore(endless, 5, 120, excluded)  # rows come round again
    assert store.kinds(range(120)) == kinds_of_tasks(store)
    finite = made({"name": "mixture", "kwargs": {"sources": [rows]}})
    store = TaskStore(finite, 2, None, frozenset({task_hash("3?")}))
    assert store.kinds(range(29)) == kinds_of_tasks(store)
    with pytest.raises(IndexError, match="mixture: there is no task 30; there are 30"):
        finite.kind(0, 30)


class Silent(DigitSorting):
    """Its kinds are known by its tasks only."""

    kind = "silent"  # pyright: ignore[reportAssignmentType]


def test_what_a_source_cannot_say_is_read_from_the_task():
    store = TaskStore(Silent(), 0, 20)
    assert store.kinds(range(20)) == kinds_of_tasks(store)
    mixture = made({"name": "mixture", "kwargs": {"sources": [SORTING, {"name": "test_kinds:Silent", "weight": 1}]}})
    assert mixture.kind(0, 0) == ("digit_sorting", mixture.task(0, 0).level)
    assert [mixture.kind(0, i) for i in range(30)].count(None) == 10
    store = TaskStore(mixture, 0, 30)
    assert store.kinds(range(30)) == kinds_of_tasks(store)
    given = TaskStore.from_tasks([new_task("a", source="x", level=3), new_task("b")])
    assert given.kinds([1, 0, 1]) == [("made", 0), ("x", 3), ("made", 0)]


def test_appended_tasks_have_kinds_too_also_after_a_restart():
    store = TaskStore(DigitSorting(), 0, 10)
    store.kinds(range(10))
    store.append([new_task(level=5), new_task(source="other")])
    assert store.kinds([11, 10, 0]) == [("other", 0), ("made", 5), *store.kinds([0])]
    for i in range(20):
        store.append([new_task(level=i)])
        assert store.kinds(range(len(store))) == kinds_of_tasks(store)
    saved = store.state_dict()
    store.load_state_dict(
        {**saved, "appended": saved["appended"][:1], "appends": [{**saved["appends"][0], "count": 1}]}
    )
    store.append([new_task(source="third")])
    assert store.kinds(range(12)) == kinds_of_tasks(store)
    assert store.num_base == 10


def test_codes_are_positions_in_a_table_that_grows():
    store = TaskStore(DigitSorting(), 0, 1_000)
    codes, kinds = store.kind_codes([900, 3])
    assert [kinds[code] for code in codes] == store.kinds([900, 3])
    before = list(kinds)
    codes, kinds = store.kind_codes(np.arange(1_000))
    assert [kinds[code] for code in codes] == kinds_of_tasks(store)
    assert list(kinds[: len(before)]) == before
    assert len(kinds) == 10
    assert store.kinds([]) == []


def test_each_kind_is_asked_for_once(monkeypatch):
    asked = []
    kind = DigitSorting.kind
    monkeypatch.setattr(DigitSorting, "kind", lambda self, seed, index: asked.append(index) or kind(self, seed, index))
    store = TaskStore(DigitSorting(), 0, 1_000)
    asked.clear()  # the store looks whether the source agrees with itself
    store.kinds([500, 700])
    store.kinds([700, 500, 900])
    assert asked == [500, 700, 900]


@pytest.mark.parametrize("task_id", [-1, 5, 10**12])
def test_a_bad_id_is_named(task_id):
    store = TaskStore(DigitSorting(), 0, 4)
    store.append([new_task()])
    with pytest.raises(IndexError, match=rf"task id {task_id} .*there are 5 tasks"):
        store.kinds([0, task_id])


class Liar(DigitSorting):
    """Changes the level in `task` alone."""

    def task(self, seed, index, exclude=frozenset()):
        return Task(-1, self.name, f"{index}>", "1", 3)


def test_a_source_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match=r"digit_sorting: task 0 is .*\) by `kind`, but .*3\) by `task`"):
        TaskStore(Liar(max_length=2), 0, 10)
