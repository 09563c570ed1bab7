"""Finite sources that lie in files, and JSON Lines. Parquet is in `parquet.py`.

Every row is read and checked once at the start, when an error can still name file and line, and then again whenever
its task is asked for: in memory lie 20 bytes for a row, its position, its level and half of its prompt's hash.
"""

import copy
import glob
import hashlib
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence, Set
from typing import Any, BinaryIO, Self

import numpy as np

from dynrl.tasks.base import near, task_hash
from dynrl.tasks.fields import Fields
from dynrl.types import Task

MAX_LINE_BYTES = 1 << 24
_GZIP = b"\x1f\x8b"


class FileSource(ABC):
    r"""Tasks of one or several files, in their order; task `index` is row `index`, whatever the seed.

    Rows whose prompts repeat are kept, and counted in `num_duplicates`. An alphabet and the longest prompt and answer
    are those of the rows. The checkpoint holds the contents' hash: a changed file is an error at the restart.

    Args:
      path: a file, a pattern such as `data/part-*.jsonl` (in sorted order), or a sequence of these.
      prompt: a field's name, or a template such as `"Question: {question}\nAnswer:"`; `{{` is a brace.
      answer: a field's name, or a template: the reference answer, for the verifier.
      level: the field that holds the difficulty, a whole number; None where all have level 0.
      metadata: fields that go into the tasks' metadata under their own names.
      source: the tasks' source, which names their verifier in a mixture; by default, the kind of file.
      verifier: their default verifier.
      sha256: refuses other contents than these (of one file, the hash that `sha256sum` prints).

    Raises:
      ValueError: a file cannot be used, or a row: the message starts with file and line.
      TypeError: an argument is of another type.
    """

    name: str

    def __init__(
        self,
        path: str | Sequence[str],
        prompt: str = "prompt",
        answer: str = "answer",
        level: str | None = None,
        metadata: Sequence[str] = (),
        source: str = "",
        verifier: str = "exact_match",
        sha256: str = "",
    ):
        self._fields = Fields(prompt, answer, level, metadata, source or self.name)
        self._paths = _matches(path)
        self._stamps = [_checked_file(path) for path in self._paths]
        self._verifiers = {source or self.name: verifier}
        digest = _digest(self._paths)
        if sha256 and sha256 != digest:
            raise ValueError(f"{self._paths[0]}: the contents have changed: their SHA-256 is {digest}, not {sha256}")
        paths = path if isinstance(path, str) else list(path)
        fields = {"prompt": prompt, "answer": answer, "level": level, "metadata": list(metadata)}
        self._kwargs = {"path": paths, **fields, "source": source, "verifier": verifier, "sha256": digest}
        self._read_all()

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source, the contents' hash among them."""
        return dict(self._kwargs)

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that occur, in ascending order."""
        return self._levels

    @property
    def alphabet(self) -> frozenset[str]:
        """The characters that occur in prompts and answers."""
        return self._alphabet

    @property
    def max_prompt_chars(self) -> int:
        """Of the longest prompt."""
        return self._max_prompt_chars

    @property
    def max_answer_chars(self) -> int:
        """Of the longest answer."""
        return self._max_answer_chars

    @property
    def num_tasks(self) -> int:
        """How many rows there are, excluded ones not counted."""
        return len(self._rows)

    @property
    def num_duplicates(self) -> int:
        """How many rows repeat the prompt of an earlier one, up to white space and Unicode form."""
        return len(self._rows) - len(np.unique(self._hashes[self._rows]))

    @property
    def verifiers(self) -> dict[str, str]:
        """The default verifier of its tasks."""
        return dict(self._verifiers)

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task of row `index`, with task_id -1.

        Raises:
          IndexError: if there is no such row.
          ValueError: if its prompt is in `exclude` (`without` leaves such rows out), or the file has changed.
        """
        del seed
        row = self._row(index)
        task = self._task(row)
        if exclude and task_hash(task.prompt) in exclude:
            path = self._paths[self._file_of(row)]
            raise ValueError(f"{path}: the prompt of task {index} is among the {len(exclude)} excluded ones")
        return task

    def kind(self, seed: int, index: int) -> tuple[str, int]:
        """Returns source and level of the task of row `index`; the file is not read."""
        del seed
        return next(iter(self._verifiers)), self._levels[self._row_levels[self._row(index)]]

    def without(self, exclude: Set[str]) -> Self:
        """Returns the source without the rows whose prompts are excluded."""
        prefixes = np.array([_prefix(name) for name in exclude], dtype=np.uint64)
        suspects = self._rows[np.isin(self._hashes[self._rows], prefixes)]
        dropped = [row for row in suspects.tolist() if task_hash(self._task(row).prompt) in exclude]
        cleared = copy.copy(self)
        cleared._rows = np.setdiff1d(self._rows, np.array(dropped, dtype=np.int64), assume_unique=True)
        return cleared

    @abstractmethod
    def _scan(self, path: str) -> Iterator[tuple[int, Task]]:
        """Yields each row's position and task; raises ValueError, naming file and row."""

    @abstractmethod
    def _read(self, path: str, position: int) -> Task:
        """Returns the task at a position of an unchanged file."""

    def _read_all(self) -> None:
        positions, hashes, ends = array("q"), array("Q"), []
        codes, code_of, alphabet = array("I"), {}, set()
        self._max_prompt_chars = self._max_answer_chars = 0
        for path in self._paths:
            for position, task in self._scan(path):
                positions.append(position)
                hashes.append(_prefix(task_hash(task.prompt)))
                codes.append(code_of.setdefault(task.level, len(code_of)))
                alphabet.update(task.prompt, task.answer)
                self._max_prompt_chars = max(self._max_prompt_chars, len(task.prompt))
                self._max_answer_chars = max(self._max_answer_chars, len(task.answer))
            if len(positions) == (ends[-1] if ends else 0):
                raise ValueError(f"{path}: there are no rows")
            ends.append(len(positions))
        self._positions, self._ends = np.array(positions, np.int64), np.array(ends, np.int64)
        self._hashes, self._rows = np.array(hashes, np.uint64), np.arange(len(positions))
        self._levels, self._alphabet = tuple(sorted(code_of)), frozenset(alphabet)
        rank_of = {level: rank for rank, level in enumerate(self._levels)}
        self._row_levels = np.array([rank_of[level] for level in code_of], np.uint32)[np.array(codes)]

    def _row(self, index: int) -> int:
        if not 0 <= index < len(self._rows):
            raise IndexError(f"{self.name}: there is no task {index}; there are {len(self._rows)}")
        return int(self._rows[index])

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))

    def _task(self, row: int) -> Task:
        file = self._file_of(row)
        path = self._paths[file]
        if _checked_file(path) != self._stamps[file]:
            raise ValueError(f"{path}: the file has changed since the start of the run")
        return self._read(path, int(self._positions[row]))


class Jsonl(FileSource):
    """JSON Lines: one object on each line, in UTF-8; blank lines are skipped."""

    name = "jsonl"

    def _scan(self, path: str) -> Iterator[tuple[int, Task]]:
        with open(path, "rb") as file:
            position = 0
            for number, line in enumerate(_lines(file, path), 1):
                if line.strip():
                    try:
                        yield position, self._fields.task(_record(line))
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}{_hint(str(error), number, line)}") from None
                position += len(line)

    def _read(self, path: str, position: int) -> Task:
        with open(path, "rb") as file:
            file.seek(position)
            return self._fields.task(_record(file.readline()))


def _lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"{path}, line {number}: more than {MAX_LINE_BYTES >> 20} MiB in one line")
        yield line


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start + 1} of the line: {error.reason}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON at character {error.pos + 1}: {error.msg}") from None
    except RecursionError:
        raise ValueError("invalid JSON: it is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__} {record!r:.60}")
    return record


def _hint(error: str, number: int, line: bytes) -> str:
    if not error.startswith("invalid JSON"):
        return ""
    if number == 1 and line.strip()[:1] in (b"[", b"{") and b"}" not in line:
        return "; JSON Lines has one object on each line"
    return "" if line.endswith(b"\n") else "; the file may be cut off"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"invalid JSON: {name} is no number")


def _matches(path: str | Sequence[str]) -> list[str]:
    """Returns the files, in order; ValueError where a name or pattern stands for none."""
    given = list(path) if isinstance(path, (list, tuple)) else [path]
    if not given or not all(isinstance(each, str) and each for each in given):
        raise TypeError(f"path must be a file, a pattern, or a sequence of these, got {path!r}")
    found = []
    for each in (os.path.expanduser(str(each)) for each in given):
        is_pattern = glob.has_magic(each) and not os.path.exists(each)
        matches = sorted(glob.glob(each, recursive=True)) if is_pattern else [each]
        if not matches:
            raise ValueError(f"{each}: no file matches the pattern")
        found += matches
    if len(set(found)) < len(found):
        raise ValueError(f"{next(each for each in found if found.count(each) > 1)}: the file is named twice")
    return found


def _checked_file(path: str) -> tuple[int, int]:
    """Returns the size and the time of the last change, which tell whether a file is still the same."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        folder, base = os.path.split(path)
        siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise ValueError(f"{path}: there is no such file{near(base, siblings)}") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if os.path.isdir(path):
        raise ValueError(f"{path}: this is a directory; a pattern such as {os.path.join(path, '*')} names its files")
    if not status.st_size:
        raise ValueError(f"{path}: the file is empty")
    return status.st_size, status.st_mtime_ns


def _digest(paths: Sequence[str]) -> str:
    """Returns the SHA-256 of one file's contents; of several, that of their digests. Refuses compressed ones."""
    digests = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                if file.read(len(_GZIP)) == _GZIP:
                    raise ValueError(f"{path}: the file is compressed (gzip): unpack it")
                file.seek(0)
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _prefix(name: str) -> int:
    """Half of a `task_hash`: enough to tell prompts apart, nearly always."""
    return int(name[:16], 16)
