"""What of a proposal may be trained on, as far as reading it shows."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.base import task_hash
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.proposals import Proposals, Refused, rows_of
from dynrl.tasks.store import TaskStore
from dynrl.types import Task

SOURCE = DigitSorting(2, 4)


def sorting(digits, **fields):
    return Task(-1, "digit_sorting", f"{digits}>", "".join(sorted(digits)), len(digits), **fields)


def num_tokens(prompt):
    if any(c not in "0123456789>" for c in prompt):
        raise ValueError(f"cannot encode {prompt!r}")
    return len(prompt)


def reader(store=None, deduplicate: Any = "appended", evaluation=()):
    return Proposals(store or TaskStore(SOURCE, 0, 50), {"digit_sorting"}, num_tokens, 8, deduplicate, evaluation)


def read(proposals, *tasks, room=99):
    return proposals.read(rows_of(tasks), room)


def test_what_is_fit_is_read_as_it_was():
    task = sorting("31", parents=(3,), metadata={"why": ["hard"]})
    assert read(reader(), task) == [task]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("31>", Refused.SCHEMA),
        (None, Refused.SCHEMA),
        (Task(5, "digit_sorting", "31>", "13"), Refused.SCHEMA),
        (Task(-1, "digit_sorting", "", "13"), Refused.SCHEMA),
        (Task(-1, "digit_sorting", "31>", 13), Refused.SCHEMA),  # pyright: ignore[reportArgumentType]
        (Task(-1, "digit_sorting", "31>", "13", metadata={"x": {1}}), Refused.SCHEMA),
        (Task(-1, "digit_sorting", "31>", "13", metadata={"x": float("nan")}), Refused.SCHEMA),
        (sorting("31", parents=(50,)), Refused.SCHEMA),
        (sorting("31", parents=(-1,)), Refused.SCHEMA),
        (Task(-1, "countdown", "31>", "13"), Refused.SOURCE),
        (Task(-1, "digit_sorting", "x>", "13"), Refused.UNENCODABLE),
        (sorting("12345678"), Refused.TOO_LONG),
    ],
)
def test_every_refusal_has_its_reason_and_takes_no_other_along(task, reason):
    good = sorting("4321")
    assert read(reader(), task, good) == [reason, good]


def test_evaluation_tasks_are_always_refused_however_they_are_written():
    frozen = {task_hash("31>")}
    spaced = Task(-1, "digit_sorting", " 31> ", "13")
    for deduplicate in ("appended", "all", "none"):
        proposals = Proposals(TaskStore(SOURCE, 0, 9), {"digit_sorting"}, len, 8, deduplicate, frozen)
        assert read(proposals, sorting("31"), spaced) == [Refused.EVALUATION] * 2


def test_duplicates_by_choice():
    base, new = TaskStore(SOURCE, 0, 50).get([7])[0], sorting("9876")
    copy = Task(-1, base.source, base.prompt, base.answer, base.level)
    for deduplicate, results in (
        ("appended", [copy, new, Refused.DUPLICATE]),
        ("all", [Refused.DUPLICATE, new, Refused.DUPLICATE]),
        ("none", [copy, new, new]),
    ):
        store = TaskStore(SOURCE, 0, 50)
        proposals = reader(store, deduplicate)
        assert read(proposals, copy, new, new) == results
        store.append([x for x in results if isinstance(x, Task)])
        again = [Refused.DUPLICATE] * 2 if deduplicate != "none" else [copy, new]
        assert read(proposals, copy, new) == again


def test_what_was_refused_for_another_reason_is_no_duplicate_later():
    proposals = reader()
    assert read(proposals, sorting("31"), room=0) == [Refused.BUDGET]
    assert read(proposals, sorting("31")) == [sorting("31")]


def test_room_is_for_what_is_fit():
    assert read(reader(), "no task", sorting("31"), sorting("32"), sorting("33"), room=2) == [
        Refused.SCHEMA, sorting("31"), sorting("32"), Refused.BUDGET,
    ]  # fmt: skip


@pytest.mark.parametrize("proposed", [None, 7, "tasks", b"tasks", {"a": 1}, iter([])])
def test_what_is_no_sequence_is_no_answer(proposed):
    with pytest.raises(TypeError, match="propose must return a sequence of tasks, got "):
        rows_of(proposed)


def test_nothing_of_the_proposers_objects_is_kept():
    class Sly(str):
        def __eq__(self, other):
            raise RuntimeError("who asks?")

        __hash__ = str.__hash__

    metadata = {"list": [1, 2]}
    (row,) = rows_of([Task(-1, Sly("digit_sorting"), Sly("31>"), "13", metadata=metadata)])
    metadata["list"].append(3)
    assert row is not None
    assert type(row["prompt"]) is str
    assert row["metadata"] == {"list": [1, 2]}
    json.dumps(row)


TEXT = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(
    ["31>", "", "\0", "\ud800", "9" * 999]
)
JSONISH = st.recursive(
    st.none() | st.integers() | st.floats() | TEXT | st.binary(max_size=5) | st.sets(st.integers(), max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(JSONISH, JSONISH, JSONISH, JSONISH, JSONISH) | JSONISH, max_size=6), st.integers(0, 5))
def test_hostile_proposals_are_refused_or_read_and_never_raise(fields, room):
    proposals = reader()
    made: Any = Task
    tasks = [made(-1, "digit_sorting", *x[:3], (), x[3]) if isinstance(x, tuple) else x for x in fields]
    results = proposals.read(rows_of(tasks), room)
    assert len(results) == len(tasks)
    assert sum(isinstance(result, Task) for result in results) <= room
    store = TaskStore(SOURCE, 0, 50)
    store.append([result for result in results if isinstance(result, Task)])  # all of it is fit for the store


def test_ten_thousand_random_texts_in_bounded_time():
    r, proposals = random.Random(3), reader()
    texts = ["".join(chr(r.randrange(1, 0x2FFF)) for _ in range(r.randrange(1, 40))) for _ in range(10_000)]
    results = read(proposals, *[Task(-1, "digit_sorting", text, text) for text in texts], room=10_000)
    assert len(results) == 10_000
    assert {r for r in results if isinstance(r, Refused)} <= {Refused.UNENCODABLE, Refused.TOO_LONG, Refused.DUPLICATE}
