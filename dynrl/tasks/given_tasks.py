"""Tasks of a user's own as a source, for `TaskStore.from_tasks`."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.admission import digest_of, row_of
from dynrl.types import Task


@dataclass(frozen=True)
class GivenTasks:
    """Task `index` is the one at that position, whatever the seed. None of them is excluded: the store refuses those.

    Attributes:
      tasks: the tasks, checked.
    """

    tasks: tuple[Task, ...]
    name = "given_tasks"
    alphabet = None
    max_prompt_chars = None
    max_answer_chars = None

    @property
    def num_tasks(self) -> int:
        """How many were given."""
        return len(self.tasks)

    @property
    def verifiers(self) -> dict[str, str]:
        """None: a configuration must name them."""
        return {}

    def without(self, exclude: Set[str]) -> "GivenTasks":
        """Returns itself."""
        del exclude
        return self

    @property
    def kwargs(self) -> dict[str, Any]:
        """A hash of the tasks, which a checkpoint is compared by."""
        return {"contents": digest_of(map(row_of, self.tasks))}

    @property
    def levels(self) -> tuple[int, ...]:
        """Those that occur, in ascending order."""
        return tuple(sorted({task.level for task in self.tasks}))

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at a position."""
        del seed, exclude
        return self.tasks[index]
