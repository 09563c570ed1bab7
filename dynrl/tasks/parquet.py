"""Parquet files as a source of tasks (extra `tasks`): row groups are read when they are asked for."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from dynrl.tasks.base import near
from dynrl.tasks.files import FileSource
from dynrl.types import Task

try:
    import pyarrow
    from pyarrow import parquet
except ImportError as error:
    raise ImportError("the source 'parquet' needs more packages: pip install 'dynrl[tasks]'") from error

_MAX_GROUPS = 4  # row groups in memory
_BATCH_ROWS = 1_024


class Parquet(FileSource):
    """Parquet: a task for each row, in the order of the row groups. Rows count from 0, as pyarrow's do.

    The last four row groups read stay in memory, of the columns that are used. Tasks are drawn in random order, so
    files of many large row groups are slow: write small ones, of some thousand rows.
    """

    name = "parquet"

    def _scan(self, path: str) -> Iterator[tuple[int, Task]]:
        self._groups: OrderedDict[tuple[str, int], Any] = OrderedDict()
        position = 0
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                for name in self._fields.names:
                    if name not in names:
                        raise ValueError(f"{path}: there is no column {name!r}{near(name, names)}; there are {names}")
                for batch in file.iter_batches(_BATCH_ROWS, columns=list(self._fields.names)):
                    for row in range(batch.num_rows):
                        yield position, self._at(batch, row, path, position)
                        position += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{path}: not a readable Parquet file, or one that is cut off: {error}") from None

    def _read(self, path: str, position: int) -> Task:
        with parquet.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            ends = np.cumsum(sizes)
            group = int(np.searchsorted(ends, position, side="right"))
            rows = self._groups.pop((path, group), None)  # in one go: another thread may read too
            if rows is None:
                rows = file.read_row_group(group, columns=list(self._fields.names))
        self._groups[path, group] = rows
        if len(self._groups) > _MAX_GROUPS:
            self._groups.popitem(last=False)
        return self._at(rows, position - int(ends[group] - sizes[group]), path, position)

    def _at(self, table: Any, row: int, path: str, position: int) -> Task:
        try:
            return self._fields.task({name: table.column(name)[row].as_py() for name in table.schema.names})
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, row {position}: invalid UTF-8: {error.reason}") from None
        except ValueError as error:
            raise ValueError(f"{path}, row {position}: {error}") from None
