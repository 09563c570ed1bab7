import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.base import task_hash
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.store import FrozenTasks, TaskStore, make_frozen
from dynrl.types import Task

SOURCE = DigitSorting()
PROMPTS = st.text(st.characters(exclude_categories=()), min_size=1, max_size=5)  # lone surrogates included
DEEP: dict[str, Any] = {}
for _ in range(10_000):
    DEEP = {"x": DEEP}


def new_task(prompt: Any = "new>", **fields: Any) -> Task:
    return Task(**{"task_id": -1, "source": "made", "prompt": prompt, "answer": "1", **fields})


def through_json(state):
    return json.loads(json.dumps(state))


def test_the_base_is_lazy_and_pure():
    store = TaskStore(SOURCE, 1, 10**6)
    assert len(store) == 10**6
    ids = [999_999, 0, 17, 17]
    tasks = store.get(ids)
    assert [task.task_id for task in tasks] == ids
    assert [task.prompt for task in tasks] == [SOURCE.task(1, i).prompt for i in ids]
    assert tasks == TaskStore(SOURCE, 1, 10**6).get(ids)


def test_training_and_evaluation_are_disjoint_over_the_full_store():
    evaluation = make_frozen(SOURCE, 1, 200)
    store = TaskStore(SOURCE, 1, 3_000, evaluation.hashes)  # the same seed: without the exclusion they would overlap
    assert not evaluation.hashes & {task_hash(task.prompt) for task in store.get(range(len(store)))}
    levels = [task.level for task in store.get(range(len(store)))]
    assert levels == [task.level for task in TaskStore(SOURCE, 1, 3_000).get(range(3_000))]
    with pytest.raises(ValueError, match=r"new\[1\].*among the 200 excluded"):
        store.append([new_task(), new_task(" " + evaluation.get([3])[0].prompt)])
    assert len(store) == 3_000


@pytest.mark.parametrize("task_id", [-1, 5, 10**12])
def test_a_bad_id_is_named(task_id):
    store = TaskStore(SOURCE, 0, 4)
    store.append([new_task()])
    for tasks in (store, FrozenTasks(store.get(range(5)))):
        with pytest.raises(IndexError, match=rf"task id {task_id} .*there are 5 tasks"):
            tasks.get([0, task_id])


def test_append_gives_fresh_ids_and_keeps_provenance():
    store = TaskStore(SOURCE, 0, 10)
    metadata = {"why": ["hard", 1]}
    assert store.append([new_task(parents=(3,), level=4, metadata=metadata), new_task()], step=5, version=4) == range(
        10, 12
    )
    assert store.append([]) == range(12, 12)
    assert store.append([new_task("c", parents=(11,))], step=6, version=5, generator="mutate") == range(12, 13)
    metadata["why"].append("changed outside")
    assert store.get([10])[0] == new_task(task_id=10, parents=(3,), level=4, metadata={"why": ["hard", 1]})
    assert store.provenance(9) is None
    assert store.provenance(11) == {"first_id": 10, "count": 2, "step": 5, "version": 4, "generator": None}
    assert store.provenance(12) == {"first_id": 12, "count": 1, "step": 6, "version": 5, "generator": "mutate"}


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (new_task(prompt=3), TypeError, r"new\[1\]: prompt must be a str, got int"),
        (new_task(answer=None), TypeError, r"new\[1\]: answer must be a str, got NoneType"),
        (new_task(prompt=""), ValueError, r"new\[1\]: prompt is empty"),
        (new_task(source=""), ValueError, r"new\[1\]: source is empty"),
        (new_task(level="hard"), TypeError, r"new\[1\]: level must be an int"),
        (new_task(parents=(2,)), ValueError, r"new\[1\] has parents \[2\].*store of 2 tasks"),
        (new_task(task_id=7), ValueError, r"new\[1\] has task_id 7"),
        (new_task(metadata={"x": {1, 2}}), TypeError, r"new\[1\]: metadata .*\{1, 2\} would not survive"),
        (new_task(metadata={1: 2}), TypeError, r"new\[1\]: metadata .*\{1: 2\} would not survive"),
        (new_task(metadata={"x": (1,)}), TypeError, r"new\[1\]: metadata .*\(1,\) would not survive"),
        (new_task(metadata={"x": float("nan")}), TypeError, r"new\[1\]: metadata .*nan would not survive"),
        (new_task(metadata=DEEP), TypeError, r"new\[1\]: metadata .*recursion"),
        ("text", TypeError, r"new\[1\] must be a Task, got str"),
    ],
)
def test_a_bad_task_is_named_and_nothing_is_appended(task, error, message):
    store = TaskStore(SOURCE, 0, 2)
    with pytest.raises(error, match=message):
        store.append([new_task(), task])
    assert len(store) == 2
    assert store.state_dict()["appends"] == []


@settings(deadline=None, max_examples=30)
@given(appends=st.lists(st.lists(PROMPTS, max_size=3), max_size=4), num_tasks=st.integers(0, 5))
def test_state_round_trip_and_ids_never_reused(appends, num_tasks):
    store = TaskStore(SOURCE, 0, num_tasks)
    given_ids = []
    for step, prompts in enumerate(appends):
        given_ids.extend(store.append([new_task(prompt, metadata={"step": step}) for prompt in prompts], step=step))
        restored = TaskStore(SOURCE, 0, num_tasks)
        restored.load_state_dict(through_json(store.state_dict()))
        assert restored.get(range(len(restored))) == store.get(range(len(store)))
        assert restored.state_dict() == store.state_dict()
        assert [restored.provenance(i) for i in given_ids] == [store.provenance(i) for i in given_ids]
    assert given_ids == list(range(num_tasks, num_tasks + sum(map(len, appends))))


@pytest.mark.parametrize(
    ("other", "differences"),
    [
        (TaskStore(SOURCE, 1, 10), "fingerprint was .*; seed was 0 and is 1"),
        (TaskStore(SOURCE, 0, 11), "fingerprint.*num_tasks was 10 and is 11"),
        (TaskStore(DigitSorting(max_length=12), 0, 10), "kwargs was .*'max_length': 11.* and is .*'max_length': 12"),
        (TaskStore(SOURCE, 0, 10, frozenset({"h"})), "exclude was"),
        (TaskStore.from_tasks([new_task()]), "source was 'digit_sorting' and is 'given_tasks'"),
    ],
)
def test_another_base_is_refused_with_the_difference(other, differences):
    with pytest.raises(ValueError, match=f"another base: .*{differences}"):
        other.load_state_dict(through_json(TaskStore(SOURCE, 0, 10).state_dict()))


def test_inconsistent_records_are_refused():
    store = TaskStore(SOURCE, 0, 10)
    store.append([new_task(), new_task()])
    state = through_json(store.state_dict())
    with pytest.raises(ValueError, match="appends end at id 12, the tasks at 11"):
        store.load_state_dict({**state, "appended": state["appended"][:1]})
    with pytest.raises(ValueError, match="starts at id 11, where 10 is next"):
        store.load_state_dict({**state, "appends": [{**state["appends"][0], "first_id": 11}]})
    assert len(store) == 12


def test_a_store_over_given_tasks():
    mine = [new_task("a", source="mine", level=2), new_task("b", source="other")]
    store = TaskStore.from_tasks(mine)
    assert store.append([new_task("c")]) == range(2, 3)
    assert [(task.task_id, task.prompt, task.source) for task in store.get([2, 1, 0])] == [
        (2, "c", "made"),
        (1, "b", "other"),
        (0, "a", "mine"),
    ]
    same = TaskStore.from_tasks(mine)
    same.load_state_dict(through_json(store.state_dict()))
    assert same.get(range(3)) == store.get(range(3))
    with pytest.raises(ValueError, match=r"another base: .*kwargs was .*contents"):
        TaskStore.from_tasks([*mine[:1], new_task("B")]).load_state_dict(store.state_dict())
    with pytest.raises(ValueError, match=r"tasks\[1\].*'b' is among the 1 excluded"):
        TaskStore.from_tasks(mine, frozenset({task_hash("b")}))
    with pytest.raises(TypeError, match=r"tasks\[1\]: prompt must be a str"):
        TaskStore.from_tasks([mine[0], new_task(prompt=b"b")])
    with pytest.raises(ValueError, match=r"tasks\[0\] has task_id 4"):
        TaskStore.from_tasks([new_task(task_id=4)])


def test_an_endless_source_needs_a_number():
    with pytest.raises(ValueError, match="digit_sorting has no end: say how many training tasks to take"):
        TaskStore(SOURCE, 0, None)
    with pytest.raises(ValueError, match="digit_sorting has no end: say how many evaluation tasks to take"):
        make_frozen(SOURCE, 0, None)
    with pytest.raises(ValueError, match="num_tasks must be at least 0, got -1"):
        TaskStore(SOURCE, 0, -1)
    assert TaskStore(SOURCE, 0, 10, make_frozen(SOURCE, 1, 5).hashes).num_excluded == 0


class Repeating(DigitSorting):
    name = "repeating"

    def task(self, seed, index, exclude=frozenset()):
        return Task(-1, self.name, "same>", "same")


def test_frozen_tasks_are_distinct_or_an_error():
    frozen = make_frozen(SOURCE, 3, 500)
    assert len(frozen) == len(frozen.hashes) == 500
    assert [task.task_id for task in frozen.get(range(500))] == list(range(500))
    assert frozen.fingerprint == make_frozen(SOURCE, 3, 500).fingerprint != make_frozen(SOURCE, 4, 500).fingerprint
    with pytest.raises(ValueError, match=r"digit_sorting gave 10 distinct tasks of 11: .*level 1"):
        make_frozen(DigitSorting(min_length=1, max_length=1), 0, 11)
    with pytest.raises(ValueError, match=r"repeating gave 1 distinct tasks of 2: .*'same>'"):
        make_frozen(Repeating(), 0, 2)
    with pytest.raises(ValueError, match=r"repeating: task 0: .*excluded"):
        TaskStore(Repeating(), 0, 2, frozenset({task_hash("same>")}))


def test_frozen_tasks_do_not_grow_or_change():
    frozen = make_frozen(SOURCE, 0, 5)
    before = frozen.fingerprint
    assert not hasattr(frozen, "append")
    assert {name for name in dir(FrozenTasks) if not name.startswith("_")} == {"get", "hashes", "fingerprint"}
    for change in (
        lambda: setattr(frozen, "_tasks", ()),
        lambda: setattr(frozen, "append", list.append),
        lambda: delattr(frozen, "_tasks"),
    ):
        with pytest.raises(AttributeError, match="immutable"):
            change()
    for copied in (pickle.loads(pickle.dumps(frozen)), copy.deepcopy(frozen)):
        assert copied.fingerprint == frozen.fingerprint == before


def test_the_fingerprint_shows_a_change_within_a_task():
    frozen = FrozenTasks([new_task(metadata={"tolerance": [1]})])
    before = frozen.fingerprint
    frozen.get([0])[0].metadata["tolerance"].append(2)
    assert frozen.fingerprint != before


def test_a_view_ends_where_the_store_ended():
    store = TaskStore(SOURCE, 0, 4)
    store.append([new_task("a")])
    view = store.view(len(store))
    store.append([new_task("b")])
    assert len(view) == 5
    assert view.get([4, 0]) == store.get([4, 0])
    assert not hasattr(view, "append")
    for task_id in (-1, 5):
        with pytest.raises(IndexError, match=f"task id {task_id} is not in 0 to 4: there are 5 tasks"):
            view.get([task_id])
    with pytest.raises(ValueError, match="a view of 7 tasks: the store has 6"):
        store.view(7)
    assert len(store.view(0)) == 0


def test_a_view_is_read_while_the_store_grows():
    store = TaskStore(SOURCE, 0, 50)
    store.append([new_task(str(i)) for i in range(50)])
    view = store.view(100)
    expected = store.get(range(100))

    def read() -> bool:
        return all(view.get(range(100)) == expected for _ in range(60))

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        while not all(reader.done() for reader in readers):
            store.append([new_task("more")])
        store.append([new_task("more")])  # at least one, however quick the readers were
        assert all(reader.result() for reader in readers)
    assert len(view) == 100 < len(store)
