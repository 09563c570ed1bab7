"""The base region of a task store: computed from its source when asked for, never held."""

import functools
import json
import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.admission import admitted, digest_of, refuse_excluded, row_of
from dynrl.tasks.base import TaskSource, kind_method
from dynrl.tasks.outcomes import Kind
from dynrl.types import Task

_NUM_PROBES = 16  # tasks that the fingerprint covers; some generators take seconds for one
_NUM_CACHED = 8192  # those looked up last


class StoreBase:
    """The tasks `source.task(seed, id, exclude)` of the ids below its length. See `TaskStore` for the arguments."""

    def __init__(self, source: TaskSource, seed: int, num_tasks: int | None, exclude: Set[str]):
        self._exclude = exclude
        self._source = source.without(exclude)
        self._seed = operator.index(seed)
        self._size = _checked_size(self._source, num_tasks)
        if self._seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
        self.num_excluded = (source.num_tasks or 0) - (self._source.num_tasks or 0)
        # A task is looked up when it is drawn, dispatched and tried again, and some take long to make.
        self.task = functools.lru_cache(_NUM_CACHED)(self._make)
        self._kind = kind_method(self._source)
        self.identity = self._identity()

    def __len__(self) -> int:
        return self._size

    def kind(self, task_id: int) -> Kind:
        """Source and level of a task, without writing it where its source can say."""
        return self._kind(self._seed, task_id) or self._kind_of(task_id)

    def _kind_of(self, task_id: int) -> Kind:
        task = self.task(task_id)
        return task.source, task.level

    def refuse_other(self, identity: Mapping[str, Any]) -> None:
        """Raises ValueError, naming each difference, for the identity of another base."""
        changed = [key for key in sorted({*identity, *self.identity}) if identity.get(key) != self.identity.get(key)]
        if changed:
            differences = [f"{key} was {identity.get(key)!r} and is {self.identity.get(key)!r}" for key in changed]
            raise ValueError(f"the saved task store has another base: {'; '.join(differences)}")

    def _make(self, task_id: int) -> Task:
        task = self._source.task(self._seed, task_id, self._exclude)
        return admitted(task, task_id, f"{self._source.name}: task {task_id}")

    def _identity(self) -> dict[str, Any]:
        probes = [self.task(i) for i in range(min(_NUM_PROBES, self._size))]
        for i, task in enumerate(probes):
            refuse_excluded(task, self._exclude, f"{self._source.name}: task {i}")
            if (kind := self.kind(i)) != self._kind_of(i):
                raise ValueError(
                    f"{self._source.name}: task {i} is {kind} by `kind`, but {self._kind_of(i)} by `task`: mend one"
                )
        identity = {
            "source": self._source.name,
            "kwargs": dict(self._source.kwargs),
            "seed": self._seed,
            "num_tasks": self._size,
            "exclude": digest_of(sorted(self._exclude)),
            "fingerprint": digest_of(map(row_of, probes)),
        }
        return json.loads(json.dumps(identity))


@dataclass(frozen=True)
class GivenTasks:
    """Tasks that somebody has made, as a source: task `index` is the one at that position, whatever the seed.

    Attributes:
      tasks: checked, with their ids; none is to be excluded.
    """

    tasks: tuple[Task, ...]
    name = "given_tasks"
    alphabet = None
    max_prompt_chars = None
    max_answer_chars = None

    @property
    def num_tasks(self) -> int:
        """How many there are."""
        return len(self.tasks)

    @property
    def verifiers(self) -> dict[str, str]:
        """None: a configuration must name them."""
        return {}

    def without(self, exclude: Set[str]) -> "GivenTasks":
        """Returns itself: none is to be excluded."""
        del exclude
        return self

    @property
    def kwargs(self) -> dict[str, Any]:
        """A hash of the contents, which no argument rebuilds."""
        return {"contents": digest_of(map(row_of, self.tasks))}

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that occur, in ascending order."""
        return tuple(sorted({task.level for task in self.tasks}))

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at the index."""
        del seed, exclude
        return self.tasks[index]


def _checked_size(source: TaskSource, num_tasks: int | None) -> int:
    if num_tasks is None and source.num_tasks is None:
        raise ValueError(f"{source.name} has no end: say how many training tasks to take")
    size = operator.index(source.num_tasks or 0) if num_tasks is None else operator.index(num_tasks)
    if size < 0:
        raise ValueError(f"num_tasks must be at least 0, got {num_tasks}")
    if source.num_tasks is not None and size > source.num_tasks:
        raise ValueError(f"{source.name} has {source.num_tasks} training tasks, fewer than the {size} asked for")
    return size
