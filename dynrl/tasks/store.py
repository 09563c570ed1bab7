"""Where tasks live: a training store that only grows, and frozen sets for evaluation.

A store's base region is computed from its source when asked for, never held; what is appended is held with its
provenance, and written to a log where there is one. Ids are positions, so they are stable and never reused, and the
store's length is its version. Evaluation tasks are another type, without an append.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from etils import epath

from dynrl.tasks.admission import admitted, checked_id, digest_of, from_row, refuse_excluded, row_of
from dynrl.tasks.base import TaskSource, task_hash
from dynrl.tasks.kinds import KindTable
from dynrl.tasks.outcomes import Kind
from dynrl.tasks.store_base import GivenTasks, StoreBase
from dynrl.tasks.store_log import StoreLog
from dynrl.types import Task


class FrozenTasks:
    """A fixed set of tasks, for evaluation; ids are positions.

    Args:
      tasks: the tasks; their task_id is -1, or their position already.
    """

    __slots__ = ("_hashes", "_tasks")
    _hashes: frozenset[str]
    _tasks: tuple[Task, ...]

    def __init__(self, tasks: Iterable[Task]):
        checked = tuple(admitted(task, i, f"tasks[{i}]") for i, task in enumerate(tasks))
        object.__setattr__(self, "_tasks", checked)
        object.__setattr__(self, "_hashes", frozenset(task_hash(task.prompt) for task in checked))

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
        return [self._tasks[checked_id(task_id, len(self._tasks))] for task_id in ids]

    @property
    def hashes(self) -> frozenset[str]:
        """The prompts' `task_hash`es: what a training store excludes."""
        return self._hashes

    @property
    def fingerprint(self) -> str:
        """A hash of all contents in order, computed at every reading, so that it shows any change."""
        return digest_of(map(row_of, self._tasks))


def make_frozen(source: TaskSource, seed: int, num_tasks: int | None) -> FrozenTasks:
    """Returns tasks of a source that are distinct by `task_hash`: of a finite one the first, in its order.

    Args:
      source: where they come from.
      seed: which tasks of an endless source.
      num_tasks: how many; None takes every distinct task of a finite source.

    Raises:
      ValueError: the source cannot give that many.
    """
    if num_tasks is None and source.num_tasks is None:
        raise ValueError(f"{source.name} has no end: say how many evaluation tasks to take")
    tasks = _distinct(source, seed, num_tasks) if source.num_tasks is None else _first_distinct(source, seed, num_tasks)
    return FrozenTasks(tasks)


def _distinct(source: TaskSource, seed: int, num_tasks: int | None) -> list[Task]:
    tasks: list[Task] = []
    seen: set[str] = set()
    for index in range(num_tasks or 0):
        try:
            tasks.append(source.task(seed, index, seen))
            refuse_excluded(tasks[-1], seen, f"task {index}")
        except ValueError as error:
            raise ValueError(f"{source.name} gave {index} distinct tasks of {num_tasks}: {error}") from error
        seen.add(task_hash(tasks[-1].prompt))
    return tasks


def _first_distinct(source: TaskSource, seed: int, num_tasks: int | None) -> list[Task]:
    tasks: dict[str, Task] = {}
    for index in range(source.num_tasks or 0):
        if len(tasks) == num_tasks:
            break
        task = source.task(seed, index)
        tasks.setdefault(task_hash(task.prompt), task)
    if num_tasks is not None and len(tasks) < num_tasks:
        raise ValueError(f"{source.name} has {len(tasks)} distinct tasks, fewer than the {num_tasks} asked for")
    return list(tasks.values())


class TaskStore:
    """Training tasks: a base region computed on demand, and everything appended since.

    Ids 0 to num_tasks - 1 are the base, `source.task(seed, id, exclude)`; appended tasks follow. Nothing in the store
    has a hash in `exclude`: endless sources draw again, finite ones leave those tasks out (`num_excluded` of them).
    One store is shared by all that read tasks, so an appended task is seen at once.

    Args:
      source: where the base comes from.
      seed: of the base, at least 0.
      num_tasks: size of the base, 0 for a store that starts empty; None takes all that a finite source has left.
      exclude: hashes of the evaluation tasks (`FrozenTasks.hashes`).

    Raises:
      ValueError: an argument is out of range, or the source cannot give the tasks.
    """

    def __init__(self, source: TaskSource, seed: int, num_tasks: int | None, exclude: Set[str] = frozenset()):
        self._exclude = frozenset(exclude)
        self._base = StoreBase(source, seed, num_tasks, self._exclude)
        self.num_excluded = self._base.num_excluded
        self._appended: list[Task] = []
        self._appends: list[dict[str, Any]] = []  # one per append that held tasks, in order of first_id
        self._log: StoreLog | None = None
        self._kinds = KindTable(self._find_kinds)

    @classmethod
    def from_tasks(cls, tasks: Iterable[Task], exclude: Set[str] = frozenset()) -> "TaskStore":
        """Returns a store whose base is the given tasks, in order; their task_id is -1 or their position.

        Raises ValueError, naming the position, for a task whose prompt is in `exclude`.
        """
        given = GivenTasks(tuple(admitted(task, i, f"tasks[{i}]") for i, task in enumerate(tasks)))
        for i, task in enumerate(given.tasks):
            refuse_excluded(task, exclude, f"tasks[{i}]")
        return cls(given, 0, None, exclude)

    def __len__(self) -> int:
        return len(self._base) + len(self._appended)

    @property
    def num_base(self) -> int:
        """How many tasks the base has: the first so many ids."""
        return len(self._base)

    def get(self, ids: Sequence[int]) -> list[Task]:
        """Returns the tasks with these ids; IndexError names a bad one."""
        num_base = len(self._base)
        positions = [checked_id(task_id, len(self)) for task_id in ids]
        return [self._base.task(i) if i < num_base else self._appended[i - num_base] for i in positions]

    def view(self, length: int) -> "TasksView":
        """Returns the first `length` tasks, for reading from any thread while this store grows."""
        if not 0 <= length <= len(self):
            raise ValueError(f"a view of {length} tasks: the store has {len(self)}")
        return TasksView(self, length)

    def open_log(self, path: epath.PathLike, writes: bool = True) -> None:
        """Has every append from now on written to a file; `state_dict` then says how far it went.

        A new run begins the file anew, with its first append; a restored one goes on behind what its checkpoint knows.

        Args:
          path: local or gs://.
          writes: whether this process writes the file. Of several processes one does; all do the same appends.

        Raises:
          ValueError: the store has appended tasks already, or a log.
        """
        if self._appended or self._log:
            raise ValueError(f"{path}: open the log once, before the first append")
        self._log = StoreLog(path, writes)

    def kinds(self, ids: Sequence[int] | np.ndarray) -> list[Kind]:
        """Returns source and level of the tasks with these ids, by `TaskSource.kind`; IndexError names a bad one."""
        codes, kinds = self.kind_codes(ids)
        return [kinds[code] for code in codes.tolist()]

    def kind_codes(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, Sequence[Kind]]:
        """Returns `kinds` as int32 [len(ids)] and a table in which these numbers are positions.

        The table only grows. Its order follows from what was asked for, so that nothing may be decided by it.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            checked_id(int(ids[(ids < 0) | (ids >= len(self))][0]), len(self))
        return self._kinds.codes(ids, len(self)), self._kinds.kinds

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
          OSError: the log cannot be written.
        """
        first = len(self)
        checked = []
        for i, task in enumerate(new):
            where = f"new[{i}]"
            if getattr(task, "task_id", -1) != -1:
                raise ValueError(f"{where} has task_id {task.task_id}; new tasks carry -1, and the store gives the id")
            checked.append(admitted(task, first + i, where))
            unknown = [parent for parent in checked[-1].parents if not 0 <= parent < first]
            if unknown:
                raise ValueError(f"{where} has parents {unknown}, which are not in the store of {first} tasks")
            refuse_excluded(task, self._exclude, where)
        if checked:
            made = {"step": step, "version": version, "generator": generator}
            record = {"first_id": first, "count": len(checked), **made}
            if self._log:
                self._log.write(record, map(row_of, checked))
            self._appends.append(record)
        self._appended.extend(checked)
        return range(first, first + len(checked))

    def provenance(self, task_id: int) -> dict[str, Any] | None:
        """Returns what `append` recorded with a task, and the append's first_id and count; None for a base task."""
        if checked_id(task_id, len(self)) < len(self._base):
            return None
        position = bisect.bisect_right(self._appends, task_id, key=lambda record: record["first_id"])
        return dict(self._appends[position - 1])

    def state_dict(self) -> dict[str, Any]:
        """Returns what identifies the base, the appended tasks, and the record of each append.

        With a log, where it stands instead of its contents; what it holds is on the disk then.
        """
        base = dict(self._base.identity)
        if self._log:
            return {"base": base, "log": {**self._log.state_dict(), "num_tasks": len(self._appended)}}
        appends = [dict(record) for record in self._appends]
        return {"base": base, "appended": [row_of(task) for task in self._appended], "appends": appends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the appended tasks of a store with the same base, in place of this store's.

        Raises:
          ValueError: if the base differs, naming each difference; if the records do not fit the tasks; or if the log
            is not open or not as it was, naming its file and line.
        """
        self._base.refuse_other(state["base"])
        appends, rows = self._saved(state)
        first_id = next_id = len(self._base)
        tasks = [from_row(row, first_id + i) for i, row in enumerate(rows)]
        for record in appends:
            if record["first_id"] != next_id:
                raise ValueError(f"a saved append starts at id {record['first_id']}, where {next_id} is next")
            next_id += record["count"]
        if next_id != first_id + len(tasks):
            raise ValueError(f"the saved appends end at id {next_id}, the tasks at {first_id + len(tasks)}")
        self._appended = tasks
        self._appends = [dict(record) for record in appends]
        self._kinds.forget_from(len(self._base))

    def _saved(self, state: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the records of the appends and the rows of their tasks, from the log or the state itself."""
        if ("log" in state) != (self._log is not None):
            theirs, ours = ("a log", "has none open") if "log" in state else ("the checkpoint", "has a log")
            raise ValueError(f"the saved store's tasks lie in {theirs}, and this store {ours}: see `open_log`")
        return self._log.load_state_dict(state["log"]) if self._log else (state["appends"], state["appended"])

    def _find_kinds(self, ids: Sequence[int]) -> list[Kind]:
        num_base = len(self._base)
        appended = ((x.source, x.level) for x in (self._appended[i - num_base] for i in ids if i >= num_base))
        return [self._base.kind(i) if i < num_base else next(appended) for i in ids]


class TasksView:
    """The first tasks of a store, to read: later ones are not in it.

    Args:
      store: may grow meanwhile.
      length: how many tasks there are to see.
    """

    def __init__(self, store: TaskStore, length: int):
        self._store, self._length = store, length

    def __len__(self) -> int:
        return self._length

    def get(self, ids: Sequence[int]) -> list[Task]:
        """Returns the tasks with these ids; IndexError names a bad one."""
        return self._store.get([checked_id(task_id, self._length) for task_id in ids])
