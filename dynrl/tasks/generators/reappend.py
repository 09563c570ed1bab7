"""The generator `reappend`: appends a task that is there already, to try a pipeline."""

import dataclasses

from dynrl.tasks.generators.base import GeneratorContext, TaskGenerator
from dynrl.types import Task


class Reappend(TaskGenerator):
    """Proposes copies of the store's first task. They are admitted where training tasks may repeat.

    Args:
      num_copies: how many each time, at least 1.
    """

    def __init__(self, num_copies: int = 1) -> None:
        if num_copies < 1:
            raise ValueError(f"reappend: num_copies must be at least 1, got {num_copies}")
        self._num_copies = num_copies

    def propose(self, context: GeneratorContext) -> list[Task]:
        """The first task again, with itself as its parent; none of an empty store."""
        if not len(context.store):
            return []
        (first,) = context.store.get([0])
        copy = dataclasses.replace(first, task_id=-1, parents=(0,))
        return [copy] * min(self._num_copies, context.max_tasks)
