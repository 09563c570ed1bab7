"""Where tasks live: a training store that only grows, and frozen sets for evaluation.

A store's base region is computed from its source when asked for, never held; what is appended is held with its
provenance. Ids are positions, so they are stable and never reused, and the store's length is its version. Evaluation
tasks are another type, without an append.
"""

import bisect
import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.procedural import ProceduralSource, task_hash
from dynrl.types import Task

_NUM_PROBES = 64  # base tasks that the fingerprint covers


class FrozenTasks:
    """A fixed set of tasks, for evaluation; ids are positions.

    Args:
      tasks: the tasks; their task_id is -1, or their position already.
    """

    __slots__ = ("_hashes", "_tasks")
    _hashes: frozenset[str]
    _tasks: tuple[Task, ...]

    def __init__(self, tasks: Iterable[Task]):
        admitted = tuple(_admitted(task, i, f"tasks[{i}]") for i, task in enumerate(tasks))
        object.__setattr__(self, "_tasks", admitted)
        object.__setattr__(self, "_hashes", frozenset(task_hash(task.prompt) for task in admitted))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"FrozenTasks is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"FrozenTasks is immutable: cannot delete {name!r}")

    def __reduce__(self):
        return FrozenTasks, (self._tasks,)

    def __len__(self) -> int:
        return len(self._tasks)

    def get(self, ids: Sequence[int]) -> list[Task]:
        """Returns the tasks with these ids; IndexError names a bad one."""
        return [self._tasks[_checked_id(task_id, len(self._tasks))] for task_id in ids]

    @property
    def hashes(self) -> frozenset[str]:
        """The prompts' `task_hash`es: what a training store excludes."""
        return self._hashes

    @property
    def fingerprint(self) -> str:
        """A hash of all contents in order, computed at every reading, so that it shows any change."""
        return _digest(map(_row, self._tasks))


def make_frozen(source: ProceduralSource, seed: int, num_tasks: int) -> FrozenTasks:
    """Returns tasks of a source that are distinct by `task_hash`; ValueError if it cannot give that many."""
    tasks: list[Task] = []
    seen: set[str] = set()
    for index in range(num_tasks):
        try:
            tasks.append(source.task(seed, index, seen))
            _refuse_excluded(tasks[-1], seen, f"task {index}")
        except ValueError as error:
            raise ValueError(f"{source.name} gave {index} distinct tasks of {num_tasks}: {error}") from error
        seen.add(task_hash(tasks[-1].prompt))
    return FrozenTasks(tasks)


class TaskStore:
    """Training tasks: a base region computed on demand, and everything appended since.

    Ids 0 to num_tasks - 1 are the base, `source.task(seed, id, exclude)`; appended tasks follow. Nothing in the store
    has a hash in `exclude`. One store is shared by all that read tasks, so an appended task is seen at once.

    Args:
      source: where the base comes from.
      seed: of the base, at least 0.
      num_tasks: size of the base; 0 for a store that starts empty.
      exclude: hashes of the evaluation tasks (`FrozenTasks.hashes`).
    """

    def __init__(self, source: ProceduralSource, seed: int, num_tasks: int, exclude: Set[str] = frozenset()):
        self._source = source
        self._seed = operator.index(seed)
        self._num_base = operator.index(num_tasks)
        if self._seed < 0 or self._num_base < 0:
            raise ValueError(f"seed and num_tasks must be at least 0, got {seed} and {num_tasks}")
        self._exclude = frozenset(exclude)
        self._appended: list[Task] = []
        self._appends: list[dict[str, Any]] = []  # one per append that held tasks, in order of first_id
        self._identity = self._base_identity()

    @classmethod
    def from_tasks(cls, tasks: Iterable[Task], exclude: Set[str] = frozenset()) -> "TaskStore":
        """Returns a store whose base is the given tasks, in order; their task_id is -1 or their position.

        Raises ValueError, naming the position, for a task whose prompt is in `exclude`.
        """
        given = _GivenTasks(tuple(_admitted(task, i, f"tasks[{i}]") for i, task in enumerate(tasks)))
        for i, task in enumerate(given.tasks):
            _refuse_excluded(task, exclude, f"tasks[{i}]")
        return cls(given, 0, len(given.tasks), exclude)

    def __len__(self) -> int:
        return self._num_base + len(self._appended)

    def get(self, ids: Sequence[int]) -> list[Task]:
        """Returns the tasks with these ids; IndexError names a bad one."""
        return [self._task(_checked_id(task_id, len(self))) for task_id in ids]

    def append(
        self, new: Sequence[Task], *, step: int | None = None, version: int | None = None, generator: str | None = None
    ) -> range:
        """Adds tasks, all or none.

        Args:
          new: tasks with task_id -1, whose parents are already in the store.
          step: optimizer step at which they were made.
          version: policy version that they were made from.
          generator: name of what made them.

        Returns:
          Their ids, in order.

        Raises:
          TypeError, ValueError: at a wrong type, unknown parent, task_id or excluded prompt, naming the index in `new`.
        """
        first = len(self)
        admitted = []
        for i, task in enumerate(new):
            where = f"new[{i}]"
            if getattr(task, "task_id", -1) != -1:
                raise ValueError(f"{where} has task_id {task.task_id}; new tasks carry -1, and the store gives the id")
            admitted.append(_admitted(task, first + i, where))
            unknown = [parent for parent in admitted[-1].parents if not 0 <= parent < first]
            if unknown:
                raise ValueError(f"{where} has parents {unknown}, which are not in the store of {first} tasks")
            _refuse_excluded(task, self._exclude, where)
        if admitted:
            made = {"step": step, "version": version, "generator": generator}
            self._appends.append({"first_id": first, "count": len(admitted), **made})
        self._appended.extend(admitted)
        return range(first, first + len(admitted))

    def provenance(self, task_id: int) -> dict[str, Any] | None:
        """Returns what `append` recorded with a task, and the append's first_id and count; None for a base task."""
        if _checked_id(task_id, len(self)) < self._num_base:
            return None
        position = bisect.bisect_right(self._appends, task_id, key=lambda record: record["first_id"])
        return dict(self._appends[position - 1])

    def state_dict(self) -> dict[str, Any]:
        """Returns what identifies the base, the appended tasks, and the record of each append."""
        return {
            "base": dict(self._identity),
            "appended": [_row(task) for task in self._appended],
            "appends": [dict(record) for record in self._appends],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the appended tasks of a store with the same base, in place of this store's.

        Raises:
          ValueError: if the base differs, naming each difference; or if the records do not fit the tasks.
        """
        theirs, ours = state["base"], self._identity
        changed = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
        if changed:
            differences = [f"{key} was {theirs.get(key)!r} and is {ours.get(key)!r}" for key in changed]
            raise ValueError(f"the saved task store has another base: {'; '.join(differences)}")
        tasks = [_from_row(row, self._num_base + i) for i, row in enumerate(state["appended"])]
        next_id = self._num_base
        for record in state["appends"]:
            if record["first_id"] != next_id:
                raise ValueError(f"a saved append starts at id {record['first_id']}, where {next_id} is next")
            next_id += record["count"]
        if next_id != self._num_base + len(tasks):
            raise ValueError(f"the saved appends end at id {next_id}, the tasks at {self._num_base + len(tasks)}")
        self._appended = tasks
        self._appends = [dict(record) for record in state["appends"]]

    def _task(self, task_id: int) -> Task:
        if task_id >= self._num_base:
            return self._appended[task_id - self._num_base]
        task = self._source.task(self._seed, task_id, self._exclude)
        return _admitted(task, task_id, f"{self._source.name}: task {task_id}")

    def _base_identity(self) -> dict[str, Any]:
        probes = [self._task(i) for i in range(min(_NUM_PROBES, self._num_base))]
        for i, task in enumerate(probes):
            _refuse_excluded(task, self._exclude, f"{self._source.name}: task {i}")
        identity = {
            "source": self._source.name,
            "kwargs": dict(self._source.kwargs),
            "seed": self._seed,
            "num_tasks": self._num_base,
            "exclude": _digest(sorted(self._exclude)),
            "fingerprint": _digest(map(_row, probes)),
        }
        return json.loads(json.dumps(identity))


@dataclass(frozen=True)
class _GivenTasks:
    """Tasks of a user's own as a source: task `index` is the one at that position, whatever the seed."""

    tasks: tuple[Task, ...]
    name = "given_tasks"
    alphabet = None
    max_prompt_chars = None
    max_answer_chars = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return {"contents": _digest(map(_row, self.tasks))}

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(sorted({task.level for task in self.tasks}))

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        del seed, exclude  # a store checks the exclusion once, at its start
        return self.tasks[index]


def _admitted(task: Task, task_id: int, where: str) -> Task:
    """Returns a checked copy with its id; shares nothing mutable with the caller's task."""
    if not isinstance(task, Task):
        raise TypeError(f"{where} must be a Task, got {type(task).__name__}")
    if task.task_id not in (-1, task_id):
        raise ValueError(f"{where} has task_id {task.task_id}, expected -1 or {task_id}")
    for label, value in (("source", task.source), ("prompt", task.prompt), ("answer", task.answer)):
        if not isinstance(value, str):
            raise TypeError(f"{where}: {label} must be a str, got {type(value).__name__}")
    if not task.prompt or not task.source:
        raise ValueError(f"{where}: {'source' if task.prompt else 'prompt'} is empty")
    try:
        level = operator.index(task.level)
        parents = tuple(operator.index(parent) for parent in task.parents)
    except TypeError as error:
        raise TypeError(
            f"{where}: level must be an int and parents ints, got {task.level!r}, {task.parents!r}"
        ) from error
    try:
        metadata = _json_copy(task.metadata)
    except (TypeError, RecursionError) as error:
        raise TypeError(f"{where}: metadata must hold string keys, lists, numbers and strings: {error}") from error
    return Task(task_id, task.source, task.prompt, task.answer, level, parents, metadata)


def _json_copy(value: Any) -> Any:
    """Returns a deep copy of what JSON gives back unchanged; raises TypeError at anything else."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _json_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_copy(item) for item in value]
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"{value!r} would not survive JSON")


def _refuse_excluded(task: Task, exclude: Set[str], where: str) -> None:
    if exclude and task_hash(task.prompt) in exclude:
        raise ValueError(f"{where}: the prompt {task.prompt!r} is among the {len(exclude)} excluded ones")


def _checked_id(task_id: int, length: int) -> int:
    position = operator.index(task_id)
    if not 0 <= position < length:
        raise IndexError(f"task id {task_id} is not in 0 to {length - 1}: there are {length} tasks")
    return position


def _row(task: Task) -> dict[str, Any]:
    row = {"source": task.source, "prompt": task.prompt, "answer": task.answer, "level": task.level}
    return {**row, "parents": list(task.parents), "metadata": dict(task.metadata)}


def _from_row(row: Mapping[str, Any], task_id: int) -> Task:
    return _admitted(Task(-1, **{**row, "parents": tuple(row["parents"])}), task_id, f"saved task {task_id}")


def _digest(rows: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:32]
