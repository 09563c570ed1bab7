"""The log of what was appended to a task store: rows in a file that only grows.

A checkpoint then holds how far the log went instead of the tasks, so that it costs what was added since. Each line is
a row of JSON that ends with the digest of the digest before it and of its own text. So the last digest stands for
all rows, and a row that is not as it was is found.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from etils import epath

_START = "0" * 32  # the digest before the first row
_SUFFIX = ', "digest": "%s"}\n'
_SUFFIX_BYTES = len(_SUFFIX % _START)
_encoded = json.JSONEncoder(check_circular=False).encode  # admission has copied the rows: they are trees


class StoreLog:
    """Rows in a file, up to an offset; what a killed run left behind that is cut off before anything is added.

    Every process keeps count, one writes.

    Args:
      path: the file, local or gs://; made when the first row is written.
      writes: whether this process writes it. The others only read, at a restore.
    """

    def __init__(self, path: epath.PathLike, writes: bool):
        self._path, self._writes = epath.Path(path), writes
        self._offset, self._digest = 0, _START
        self._is_cut = False  # whether the file surely ends at the offset
        self._is_synced = True

    def write(self, record: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the record of an append, whose `count` says how many rows follow. OSError leaves the log as it was."""
        digest, lines = self._digest, []
        for row in (record, *rows):
            text = _encoded(row)[:-1]
            digest = _next_digest(digest, text.encode())
            lines.append(text + _SUFFIX % digest)
        data = "".join(lines).encode()
        if self._writes:
            self._cut()
            self._is_cut = False
            with self._path.open("ab") as file:
                file.write(data)
            self._is_cut = True
        self._offset, self._digest, self._is_synced = self._offset + len(data), digest, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the offset in bytes and the digest of the rows before it, which then are on the disk."""
        if self._writes:
            self._cut()
            if not self._is_synced and _is_local(self._path):
                with open(self._path, "ab") as file:
                    os.fsync(file.fileno())
        self._is_synced = True
        return {"offset": self._offset, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns the records up to a saved offset, and the rows of all of them; goes on behind them.

        Raises:
          ValueError: naming the file and the first line that is missing or not as it was.
        """
        digest, records, rows = _START, [], []
        left = 0  # rows of the last record that are still to come
        for number, line in enumerate(self._lines(state["offset"]), 1):
            text = line[:-_SUFFIX_BYTES]
            digest = _next_digest(digest, text)
            if line[-_SUFFIX_BYTES:] != (_SUFFIX % digest).encode():
                raise ValueError(f"{self._path}, line {number}: it is not as it was when the checkpoint was written")
            (rows if left else records).append(json.loads(text + b"}"))
            left = left - 1 if left else records[-1]["count"]
        if digest != state["digest"]:
            raise ValueError(f"{self._path}, line {len(rows) + len(records)}: the checkpoint is of other rows")
        self._offset, self._digest, self._is_cut, self._is_synced = state["offset"], digest, False, True
        if self._writes:
            self._cut()
        return records, rows

    def _lines(self, offset: int) -> Iterator[bytes]:
        """Yields the lines up to an offset; raises ValueError where the file ends before it."""
        number = position = 0
        if offset and self._path.exists():
            with self._path.open("rb") as file:
                for line in file:
                    if position >= offset:
                        return
                    number, position = number + 1, position + len(line)
                    yield line
        if position < offset:
            raise ValueError(
                f"{self._path}, line {number + 1}: the file ends before it, after {position} bytes of the {offset} "
                "that the checkpoint counts on"
            )

    def _cut(self) -> None:
        """Cuts off what a killed run or a failed write left behind the offset."""
        if not self._is_cut and self._path.exists() and self._path.stat().length > self._offset:
            if _is_local(self._path):
                os.truncate(self._path, self._offset)
            else:
                cut = self._path.with_name(self._path.name + ".cut")  # a kill in between leaves either file whole
                cut.write_bytes(self._path.read_bytes()[: self._offset])
                cut.replace(self._path)
        self._is_cut = True


def _next_digest(digest: str, text: bytes) -> str:
    return hashlib.blake2b(digest.encode() + text, digest_size=16).hexdigest()


def _is_local(path: epath.Path) -> bool:
    return "://" not in str(path)
