"""Sources that lie in files: what they give, and that they hold next to nothing of it in memory."""

import hashlib
import json
import os
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynrl.tasks.base import task_hash
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore, make_frozen

ROWS = [
    {"question": "2 + 2?", "solution": 4, "difficulty": 1, "tags": ["sum"], "note": None},
    {"question": "Capital of Perú?", "solution": "Lima", "difficulty": 3, "tags": [], "note": "x"},
    {"question": "2  +  2?", "solution": 4.5, "difficulty": 1, "tags": ["again"], "note": "y"},
    {"question": "{braces}", "solution": "-1", "difficulty": 2, "tags": ["odd"], "note": ""},
]
KWARGS = {
    "prompt": "Q: {question} {{in brief}}\nA:",
    "answer": "solution",
    "level": "difficulty",
    "metadata": ("tags", "note"),
    "source": "quiz",
    "verifier": "gsm8k",
}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows, **kwargs):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **kwargs)
    return str(path)


WRITERS = {"jsonl": write_jsonl, "parquet": lambda path, rows: write_parquet(path, rows, row_group_size=2)}
# Columns of Parquet have one type.
TYPED = [{**row, "solution": str(row["solution"])} for row in ROWS]


@pytest.fixture(params=list(WRITERS))
def kind(request):
    return request.param


def make(kind, folder, rows=TYPED, **kwargs) -> Any:
    path = WRITERS[kind](folder / f"rows.{kind}", rows)
    return make_source(kind, path=path, **{**KWARGS, **kwargs})


def test_rows_become_tasks(kind, tmp_path):
    source = make(kind, tmp_path)
    tasks = [source.task(seed, index) for seed, index in ((0, 0), (5, 1), (6, 2), (7, 3))]
    assert [task.prompt for task in tasks] == [f"Q: {row['question']} {{in brief}}\nA:" for row in ROWS]
    assert [task.answer for task in tasks] == ["4", "Lima", "4.5", "-1"]
    assert [task.level for task in tasks] == [1, 3, 1, 2]
    assert tasks[0].metadata == {"tags": ["sum"], "note": None}
    assert {task.source for task in tasks} == {"quiz"}
    assert {task.task_id for task in tasks} == {-1}
    assert (source.num_tasks, source.num_duplicates) == (4, 1)  # white space does not tell prompts apart
    assert source.levels == (1, 2, 3)
    assert source.alphabet == {character for task in tasks for character in task.prompt + task.answer}
    assert source.max_prompt_chars == max(len(task.prompt) for task in tasks)
    assert source.max_answer_chars == 4
    assert source.verifiers == {"quiz": "gsm8k"}
    with pytest.raises(IndexError, match=f"{kind}: there is no task 4; there are 4"):
        source.task(0, 4)


def test_numbers_of_json_become_text(tmp_path):
    source = make("jsonl", tmp_path, ROWS)
    assert [source.task(0, index).answer for index in range(4)] == ["4", "Lima", "4.5", "-1"]


def test_plain_field_names_and_defaults(kind, tmp_path):
    path = WRITERS[kind](tmp_path / "plain", [{"prompt": "1+1=", "answer": "2"}])
    source = make_source(kind, path=path)
    assert (source.task(0, 0).prompt, source.task(0, 0).answer, source.task(0, 0).level) == ("1+1=", "2", 0)
    assert source.verifiers == {kind: "exact_match"}


def test_several_files_and_patterns_are_read_in_order(kind, tmp_path):
    for i, rows in enumerate((TYPED[:1], TYPED[1:3], TYPED[3:])):
        WRITERS[kind](tmp_path / f"part-{i}", rows)
    whole = [make(kind, tmp_path).task(0, index) for index in range(4)]
    pattern = make_source(kind, path=str(tmp_path / "part-*"), **KWARGS)
    listed = make_source(kind, path=[str(tmp_path / "part-0"), str(tmp_path / "part-[12]")], **KWARGS)
    for source in (pattern, listed):
        assert [source.task(0, index) for index in range(4)] == whole


def test_blank_lines_and_a_missing_last_newline_do_not_matter(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "a", "answer": "1"}\r\n  \n\n{"prompt": "b", "answer": "2"}')
    source = make_source("jsonl", path=str(path))
    assert [source.task(0, index).prompt for index in range(2)] == ["a", "b"]
    assert source.num_tasks == 2


def test_excluded_rows_are_left_out_and_counted(kind, tmp_path):
    source = make(kind, tmp_path)
    exclude = frozenset({task_hash(source.task(0, 0).prompt), task_hash("elsewhere")})
    with pytest.raises(ValueError, match="the prompt of task 2 is among the 2 excluded ones"):
        source.task(0, 2, exclude)
    store = TaskStore(source, 0, None, exclude)
    assert (len(store), store.num_excluded) == (2, 2)  # both rows with that prompt
    assert [task.answer for task in store.get([0, 1])] == ["Lima", "-1"]
    assert source.num_tasks == 4  # the source itself is as it was
    with pytest.raises(ValueError, match=f"{kind} has 2 training tasks, fewer than the 3 asked for"):
        TaskStore(source, 0, 3, exclude)
    assert len(TaskStore(source, 0, 1, exclude)) == 1


def test_evaluation_tasks_are_the_first_distinct_rows(kind, tmp_path):
    source = make(kind, tmp_path)
    assert [task.answer for task in make_frozen(source, 0, 2).get([0, 1])] == ["4", "Lima"]
    everything = make_frozen(source, 0, None)
    assert [task.answer for task in everything.get(range(3))] == ["4", "Lima", "-1"]
    with pytest.raises(ValueError, match=f"{kind} has 3 distinct tasks, fewer than the 4 asked for"):
        make_frozen(source, 0, 4)
    # One file for both: what evaluation takes is what training does not get.
    held_out = make_frozen(source, 0, 1)
    assert [task.answer for task in TaskStore(source, 0, None, held_out.hashes).get([0, 1])] == ["Lima", "-1"]


def test_kwargs_rebuild_the_source_and_refuse_other_contents(kind, tmp_path):
    source = make(kind, tmp_path)
    kwargs = json.loads(json.dumps(source.kwargs))
    again = make_source(kind, **kwargs)
    assert [again.task(0, i) for i in range(4)] == [source.task(0, i) for i in range(4)]
    state = json.loads(json.dumps(TaskStore(source, 0, None).state_dict()))
    TaskStore(again, 0, None).load_state_dict(state)
    # The change is behind the rows that the store's fingerprint covers, and leaves the size as it was.
    longer = [*TYPED, *({**TYPED[1], "question": f"number {i}?"} for i in range(60))]
    first = make(kind, tmp_path, longer)
    state = json.loads(json.dumps(TaskStore(first, 0, None).state_dict()))
    changed = make(kind, tmp_path, [*longer[:-1], {**longer[-1], "question": "number XX?"}])
    with pytest.raises(ValueError, match=r"another base: kwargs was .*sha256"):
        TaskStore(changed, 0, None).load_state_dict(state)
    with pytest.raises(ValueError, match=r"the contents have changed: their SHA-256 is"):
        make_source(kind, **kwargs)


def test_the_hash_of_one_file_is_that_of_its_bytes(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    assert make_source("jsonl", path=str(path)).kwargs["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_changes_during_the_run_is_an_error(kind, tmp_path):
    source = make(kind, tmp_path)
    path = tmp_path / f"rows.{kind}"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(ValueError, match=rf"rows.{kind}: the file has changed since the start of the run"):
        source.task(0, 0)
    path.unlink()
    with pytest.raises(ValueError, match=rf"rows.{kind}: there is no such file"):
        source.task(0, 0)


def test_memory_does_not_grow_with_the_text(tmp_path):
    path = tmp_path / "long.jsonl"
    num_rows, text = 300, "word " * 1_000
    with path.open("w") as file:
        for i in range(num_rows):
            file.write(json.dumps({"prompt": f"{i} {text}", "answer": "1"}) + "\n")
    make_source("jsonl", path=str(path))  # what is cached once
    tracemalloc.start()
    source = make_source("jsonl", path=str(path))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert source.task(0, num_rows - 1).prompt.startswith(f"{num_rows - 1} ")
    assert path.stat().st_size > 1_500_000
    assert held < 50_000
    assert peak < 500_000


def test_parquet_reads_row_groups_on_demand(tmp_path):
    path = write_parquet(tmp_path / "many", [{"prompt": f"p{i}", "answer": str(i), "unused": "x" * 100}
                                             for i in range(100)], row_group_size=10)  # fmt: skip
    source: Any = make_source("parquet", path=path)
    order = (0, 99, 55, 9, 10, 31, 0, 99)
    assert [source.task(0, i).answer for i in order] == [str(i) for i in order]
    assert len(source._groups) == 4
    assert all(table.column_names == ["prompt", "answer"] for table in source._groups.values())


def test_threads_read_row_groups_at_once(tmp_path):
    path = write_parquet(tmp_path / "rows", [{"prompt": f"p{i}", "answer": "1"} for i in range(60)], row_group_size=6)
    source = make_source("parquet", path=path)  # ten groups, of which four are kept

    def read(start):
        return all(source.task(0, i).prompt == f"p{i}" for i in [(start + 7 * k) % 60 for k in range(150)])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(4)))
    finally:
        sys.setswitchinterval(interval)
