"""Admission of tasks: they are checked, copied and given their id. And tasks as rows of JSON, and hashes of those."""

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

from dynrl.tasks.base import task_hash
from dynrl.types import Task


def admitted(task: Task, task_id: int, where: str) -> Task:
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
        metadata = json_copy(task.metadata)
    except (TypeError, RecursionError) as error:
        raise TypeError(f"{where}: metadata must hold string keys, lists, numbers and strings: {error}") from error
    return Task(task_id, task.source, task.prompt, task.answer, level, parents, metadata)


def json_copy(value: Any) -> Any:
    """Returns a deep copy of what JSON gives back unchanged; raises TypeError at anything else."""
    if value is None or isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list):
        return [json_copy(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: json_copy(item) for key, item in value.items()}
    raise TypeError(f"{value!r} would not survive JSON")


def refuse_excluded(task: Task, exclude: Set[str], where: str) -> None:
    """Raises ValueError, which starts with `where`, for a task whose prompt is excluded."""
    if exclude and task_hash(task.prompt) in exclude:
        raise ValueError(f"{where}: the prompt {task.prompt[:80]!r} is among the {len(exclude)} excluded ones")


def checked_id(task_id: int, length: int) -> int:
    """Returns the id as an int; raises IndexError where it is not below the length."""
    position = operator.index(task_id)
    if not 0 <= position < length:
        raise IndexError(f"task id {task_id} is not in 0 to {length - 1}: there are {length} tasks")
    return position


def row_of(task: Task) -> dict[str, Any]:
    """Returns what JSON keeps of a task: everything but its id."""
    row = {"source": task.source, "prompt": task.prompt, "answer": task.answer, "level": task.level}
    return {**row, "parents": list(task.parents), "metadata": dict(task.metadata)}


def from_row(row: Mapping[str, Any], task_id: int) -> Task:
    """Returns the task of a row that `row_of` made."""
    return admitted(Task(-1, **{**row, "parents": tuple(row["parents"])}), task_id, f"saved task {task_id}")


def digest_of(rows: Iterable[Any]) -> str:
    """Returns 32 hexadecimal digits that identify JSON-able rows in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:32]
