"""What a task generator is: it proposes new training tasks from what succeeded and what failed.

    class Harder(TaskGenerator):
        def propose(self, context):
            seen = context.outcomes.kinds
            rates = context.outcomes.by_kind.mean(range(len(seen)))
            source, level = max((kind for kind, rate in zip(seen, rates) if rate > 0.8), default=seen[-1])
            return [Task(-1, source, *my_problem(level + 1, context.rng))]

It is named in a configuration by `package.module:Class`, and its arguments are `generation.generator_kwargs`. One
process runs it, in a thread beside training; what it proposes is admitted some steps later (`proposals.py`), by all
processes alike. A generator that raises, hangs or returns rubbish costs its proposals, never the run.

So that a restarted run proposes the same again, `propose` may depend on its arguments, on the context and on what
`state_dict` holds, and on nothing else: what it hears from outside goes through `context.once`.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dynrl.tasks.base import TaskSource
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.types import Task


class ReadOnlyTasks(Protocol):
    """The training tasks as they were when the generator was asked."""

    def __len__(self) -> int: ...

    def get(self, ids: Sequence[int]) -> list[Task]:
        """The tasks with these ids; IndexError names a bad one."""
        ...


class Generate(Protocol):
    """Completions of prompts by the current policy."""

    def __call__(self, prompts: Sequence[str]) -> list[str]:
        """One completion of each prompt, sampled as in training, without its stop token.

        Waits for the step at which the proposals are admitted, and samples with the weights of then. Raises
        ValueError, naming the prompt, for one that is too long or cannot be encoded.
        """
        ...


class Cancelled(Exception):
    """Nobody waits for these proposals any more: the deadline has passed, or the run is over."""


@dataclass(frozen=True)
class GeneratorContext:
    """What a generator may know, as of the step at which it was asked.

    Attributes:
      step: the optimizer step.
      version: the policy's version.
      rng: random numbers of this call alone, seeded by the run's seed and the step.
      outcomes: attempts and successes by task id and by kind (source, level). A copy.
      store: the training tasks, without a way to append.
      source: where the base tasks come from.
      max_tasks: more proposals than these cannot be admitted now.
      generate: completions of the current policy.
      once: `once(key, call)` is what `call()` returned the first time, which must be JSON-able: it is written down
        before it is used, and a restarted run reads it instead of calling again. The key is a string that is unique
        within this call of `propose`.
      deadline: of `time.monotonic`, after which nobody waits; infinity where there is none.
      cancelled: set when nobody waits any more.
      spent: for the metrics: `context.spent["tokens"] += n`.
    """

    step: int
    version: int
    rng: np.random.Generator
    outcomes: TaskOutcomes
    store: ReadOnlyTasks
    source: TaskSource
    max_tasks: int
    generate: Generate
    once: Callable[[str, Callable[[], Any]], Any]
    deadline: float = float("inf")
    cancelled: threading.Event = field(default_factory=threading.Event)
    spent: dict[str, int] = field(default_factory=lambda: {"tokens": 0})

    def check(self) -> None:
        """Raises Cancelled when nobody waits any more. Long work calls it now and then."""
        if self.cancelled.is_set() or time.monotonic() > self.deadline:
            raise Cancelled("nobody waits for these proposals any more")


class TaskGenerator(ABC):
    """Proposes tasks. A subclass with state of its own overrides `state_dict` and `load_state_dict` too."""

    @abstractmethod
    def propose(self, context: GeneratorContext) -> Sequence[Task]:
        """New tasks, with task_id -1; `parents` are ids of the store. May be none. Whatever it raises is reported."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, taken when `propose` has returned."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where the saved generator stood."""
        del state
