"""The log of a task store: what is restored is what was saved, wherever the run was killed."""

import json

import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks import store_log
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.store import TaskStore
from dynrl.types import Task

NUM_BASE = 3
PROMPTS = st.text(st.characters(exclude_categories=()), min_size=1, max_size=4)  # lone surrogates, line ends and all
APPEND = st.tuples(st.just("append"), st.lists(PROMPTS, max_size=3))
KILL = st.tuples(st.just("kill"), st.tuples(st.floats(0, 1), st.binary(max_size=5)))


def store_at(path=None, writes=True):
    store = TaskStore(DigitSorting(), 0, NUM_BASE)
    if path is not None:
        store.open_log(path, writes)
    return store


def append(store, prompts, step=0):
    tasks = [Task(-1, "made", each, "1", step, (i % NUM_BASE,), {"x": [each]}) for i, each in enumerate(prompts)]
    return store.append(tasks, step=step, version=step, generator="test")


def through_json(state):
    return json.loads(json.dumps(state))


def contents(store):
    ids = range(len(store))
    return store.get(ids), [store.provenance(i) for i in ids]


@pytest.mark.parametrize("is_local", [True, False])
@settings(deadline=None, max_examples=60)
@given(events=st.lists(APPEND | st.just(("save", None)) | KILL, max_size=12))
def test_any_run_of_appends_checkpoints_and_kills_equals_a_store_in_memory(tmp_path_factory, is_local, events):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_log, "_is_local", lambda path: is_local)
        path = tmp_path_factory.mktemp("log") / "tasks.jsonl"
        stores = [store_at(path), store_at(path, writes=False), store_at()]
        saved = []
        for step, (kind, what) in enumerate(events):
            if kind == "append":
                assert len({append(store, what, step) for store in stores}) == 1
            elif kind == "save":
                saved = [through_json(store.state_dict()) for store in stores]
                assert saved[0] == saved[1]
            else:
                where, garbage = what
                if path.exists():
                    offset = saved[0]["log"]["offset"] if saved else 0
                    whole = path.read_bytes()
                    path.write_bytes(whole[: offset + round(where * (len(whole) - offset))] + garbage)
                stores = [store_at(path), store_at(path, writes=False), store_at()]
                for store, state in list(zip(stores, saved, strict=False))[:: 1 if where < 0.5 else -1]:
                    store.load_state_dict(state)
                    assert store.state_dict() == state
            assert contents(stores[0]) == contents(stores[1]) == contents(stores[2])
        assert stores[0].state_dict()["log"] == stores[1].state_dict()["log"]
        if path.exists():
            rows = [json.loads(line) for line in path.read_bytes().splitlines()]
            assert [row["prompt"] for row in rows if "prompt" in row] == [
                task.prompt for task in stores[2].get(range(NUM_BASE, len(stores[2])))
            ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tasks.jsonl"


@pytest.fixture
def saved(path):
    """The state of a store with two appends, of one and of two tasks: five lines."""
    store = store_at(path)
    append(store, ["a"])
    append(store, ["b", "c"], step=7)
    return through_json(store.state_dict())


def test_the_log_is_readable_rows_with_provenance(path, saved):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert saved["log"] == {"offset": path.stat().st_size, "digest": rows[-1]["digest"], "num_tasks": 3}
    for row in rows:
        row.pop("digest")
    made = {"version": 7, "generator": "test"}
    assert rows[2] == {"first_id": 4, "count": 2, "step": 7, **made}
    assert rows[4] == {
        "source": "made", "prompt": "c", "answer": "1", "level": 7, "parents": [1], "metadata": {"x": ["c"]}
    }  # fmt: skip


def test_a_state_does_not_grow_with_the_tasks(path):
    store = store_at(path)
    sizes = []
    for _ in range(3):
        append(store, ["x"] * 1_000)
        sizes.append(len(json.dumps(store.state_dict())))
    assert max(sizes) - min(sizes) < 10  # digits of the offset
    assert path.stat().st_size == store.state_dict()["log"]["offset"]


@pytest.mark.parametrize("line", range(5))
def test_the_first_line_that_changed_is_named(path, saved, line):
    lines = path.read_bytes().splitlines(keepends=True)
    for changed in (lines[line].replace(b"1", b"2", 1), lines[line][:-1], lines[line][:20] + b"\n", b"\n"):
        path.write_bytes(b"".join([*lines[:line], changed, *lines[line + 1 :]]))
        with pytest.raises(ValueError, match=rf"tasks\.jsonl, line {line + 1}: it is not as it was"):
            store_at(path).load_state_dict(saved)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"line {line + 1}"):
        store_at(path).load_state_dict(saved)
    assert path.read_bytes() == before  # nothing is cut


def test_a_log_that_ends_early_or_is_of_another_run_is_refused(path, saved):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    with pytest.raises(ValueError, match=rf"line 4: the file ends before it, after {len(b''.join(lines[:3]))} bytes"):
        store_at(path).load_state_dict(saved)
    path.unlink()
    with pytest.raises(ValueError, match=r"tasks\.jsonl, line 1: the file ends before it, after 0 bytes of the \d+"):
        store_at(path).load_state_dict(saved)
    other = store_at(path)
    append(other, ["A"])
    append(other, ["b", "c"], step=7)
    other.state_dict()
    with pytest.raises(ValueError, match=r"tasks\.jsonl, line 5: the checkpoint is of other rows"):
        store_at(path).load_state_dict(saved)


def test_a_log_and_a_state_that_do_not_belong_together_are_refused(path, saved):
    with pytest.raises(ValueError, match="tasks lie in a log, and this store has none open: see `open_log`"):
        store_at().load_state_dict(saved)
    with pytest.raises(ValueError, match="tasks lie in the checkpoint, and this store has a log"):
        store_at(path).load_state_dict(store_at().state_dict())
    for store in (store_at(), store_at(path)):
        append(store, ["a"])
        with pytest.raises(ValueError, match=r"tasks\.jsonl: open the log once, before the first append"):
            store.open_log(path)


def test_a_new_run_begins_the_file_anew(path, saved):
    store = store_at(path)
    assert path.stat().st_size == saved["log"]["offset"]  # until something is written
    append(store, ["new"])
    assert [json.loads(line).get("prompt") for line in path.read_text().splitlines()] == [None, "new"]


def test_a_write_that_fails_changes_nothing(path, saved, monkeypatch):
    store = store_at(path)
    store.load_state_dict(saved)
    cls = type(epath.Path(path))
    real_open = cls.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:30])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(cls, "open", lambda self, mode="r": Full(real_open(self, mode)))
    with pytest.raises(OSError, match="No space left"):
        append(store, ["d", "e"])
    assert len(store) == NUM_BASE + 3
    monkeypatch.undo()
    assert path.stat().st_size == saved["log"]["offset"] + 30
    append(store, ["f"])
    again = store_at(path)
    again.load_state_dict(through_json(store.state_dict()))
    assert contents(again) == contents(store)
