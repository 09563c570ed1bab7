"""Task generators that the end-to-end runs are configured with."""

import time
from typing import Any

from dynrl.tasks.generators.base import TaskGenerator
from dynrl.types import Task


def sorting(digits, parents=()):
    """A task of the source digit_sorting."""
    return Task(-1, "digit_sorting", f"{digits}>", "".join(sorted(digits)), len(digits), parents)


class Random(TaskGenerator):
    """Random tasks, which depend on everything a generator may depend on."""

    def __init__(self, num=3):
        self.num, self.calls = num, 0

    def propose(self, context):
        self.calls += 1
        seen = int(context.outcomes.by_task.attempts(range(len(context.store))).sum())
        made = context.rng.integers(0, 10, size=(self.num, 4))
        made[:, 0] = (self.calls + seen + context.version + len(context.store)) % 10
        parents = (int(context.rng.integers(len(context.store))),)
        return [sorting("".join(map(str, row)), parents) for row in made.tolist()]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Asking(TaskGenerator):
    """Asks the policy twice, and makes tasks of the digits that it wrote."""

    def propose(self, context):
        prompts = [task.prompt for task in context.store.get(range(4))]
        first = context.generate(prompts)
        second = context.generate([text + ">" for text in first if text.isdigit() and len(text) <= 4])
        digits = ["".join(c for c in text if c.isdigit())[:4] for text in [*first, *second]]
        return [sorting(text + str(context.step)) for text in digits if text]


class Wrong(TaskGenerator):
    """One of every kind of proposal that is refused, and one that is not."""

    def propose(self, context) -> Any:
        known = context.store.get([0])[0]
        good = sorting(f"{context.step:04d}")
        return [
            "no task",
            sorting("12"),
            Task(-1, "nobody's", "1>", "1"),
            Task(-1, "digit_sorting", "hello>", "1"),
            Task(-1, "digit_sorting", "1234567890>", "0123456789"),
            Task(-1, "digit_sorting", "4321>", "4321"),
            good,
            good,
            Task(-1, "digit_sorting", "1>", "1", parents=(10**9,)),
            known,
        ]


class Stumbling(TaskGenerator):
    """Raises in two calls of three."""

    def __init__(self):
        self.calls = 0

    def propose(self, context):
        self.calls += 1
        if self.calls % 3:
            raise RuntimeError("the well is\ndry")
        return [sorting(f"{self.calls:03d}{context.step % 10}")]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Broken(TaskGenerator):
    """Never answers with anything of use."""

    def propose(self, context) -> Any:
        return 7


class Hanging(TaskGenerator):
    """Hangs for longer than anybody waits, deaf to all."""

    def propose(self, context):
        time.sleep(3)
        return [sorting("11")]


class Paying(TaskGenerator):
    """Hears from outside, through `once`, what no other call will hear again."""

    def propose(self, context):
        number = context.once("number", time.time_ns)
        context.spent["tokens"] += 5
        return [sorting(f"{number % 10000:04d}")]
