"""One call of a generator in its thread: what it gives, wants, spends and does wrong."""

import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from dynrl.tasks.generators.base import Cancelled, GeneratorContext, TaskGenerator
from dynrl.tasks.generators.call import Call, Done, Wanted
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.store import TaskStore
from dynrl.types import Task

SOURCE = DigitSorting(2, 4)
TASK = Task(-1, "digit_sorting", "31>", "13")


def call(propose, state: Any = None, timeout_secs=20.0):
    """A call of a generator that is this function."""

    class Generator(TaskGenerator):
        def propose(self, context):
            return propose(context)

        def state_dict(self) -> Any:
            return state() if callable(state) else {"n": 1} if state is None else state

    make_context = partial(
        GeneratorContext, 3, 3, np.random.default_rng(0), TaskOutcomes(), TaskStore(SOURCE, 0, 9).view(9), SOURCE, 8,
        once=lambda key, work: work(),
    )  # fmt: skip

    def encode(prompt):
        if len(prompt) > 5:
            raise ValueError(f"prompt {prompt!r} is too long")
        return [ord(c) for c in prompt]

    return Call(Generator(), make_context, encode, timeout_secs)


def done(made):
    """What became of it."""
    out = made.next()
    assert isinstance(out, Done)
    return out


def test_proposals_come_as_plain_rows_with_what_was_spent_and_the_state():
    def propose(context):
        context.spent["tokens"] += 7
        context.spent["unasked"] = 2
        return [TASK, "no task"]

    out = done(call(propose))
    assert (out.rows[0] or {})["prompt"] == "31>"
    assert out[1:] == ({"tokens": 7, "unasked": 2}, {"n": 1}, "")
    assert out.rows[1] is None


def test_generate_waits_for_whoever_drives_the_devices():
    seen = []

    def propose(context):
        seen.append(context.generate(["12>", "3>"]))
        return [TASK] if context.generate(["4>"]) == ["4"] else []

    made = call(propose)
    assert made.next() == Wanted([[49, 50, 62], [51, 62]])
    made.reply(["12", "3"])
    assert made.next() == Wanted([[52, 62]])
    made.reply(["4"])
    assert len(done(made).rows) == 1
    assert seen == [["12", "3"]]


def test_a_prompt_that_cannot_be_given_is_the_generators_own_error():
    out = done(call(lambda context: context.generate(["123456>"])))
    assert out.error.startswith("ValueError: prompt '123456>' is too long (")
    assert out.state == {"n": 1}


@pytest.mark.parametrize("error", [RuntimeError("the well\nis dry"), SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_whatever_is_raised_becomes_a_line(error):
    def propose(context):
        raise error

    out = done(call(propose))
    assert out.rows == []
    assert out.error.startswith(type(error).__name__)
    assert "\n" not in out.error
    assert "test_call.py:" in out.error


def test_a_state_that_cannot_be_saved_is_an_error():
    def fails():
        raise KeyError("gone")

    for state in (fails, {"x": {1, 2}}, {"x": float("nan")}):
        out = done(call(lambda context: [TASK], state))
        assert out.rows == []
        assert out.error.startswith("state_dict: ")
        assert out.state is None


def test_a_call_that_hangs_is_given_up_and_told():
    told = threading.Event()

    def propose(context):
        while True:
            try:
                context.check()
            except Cancelled:
                told.set()
                context.spent["tokens"] = 5
                raise
            time.sleep(0.01)

    made = call(propose, timeout_secs=0.1)
    out = done(made)
    assert told.is_set()
    assert out == Done([], {"tokens": 5}, {"n": 1}, "gave nothing within generation.deadline_secs = 0.1")


def test_a_call_that_is_deaf_leaves_no_state():
    release = threading.Event()

    def propose(context):
        release.wait(30)
        return [TASK]

    made = call(propose, timeout_secs=0.05)
    begin = time.monotonic()
    out = done(made)
    assert time.monotonic() - begin < 5
    assert (out.rows, out.state, made.running) == ([], None, True)
    release.set()


def test_whoever_waits_for_completions_hears_of_the_end():
    made = call(lambda context: context.generate(["1>"]))
    assert isinstance(made.next(), Wanted)
    made.cancel()
    assert done(made).error.startswith("Cancelled: ")
