"""Outcomes that cannot be computed again, written down before they are used: whose deadline passed, and when.

A run that is restarted from a checkpoint looks them up by the group's identity, and takes the same decision again
whatever the clock says this time (law 7). One file per process; it only grows, and a restore does not cut it. Facts
of another configuration, from before a run had a checkpoint, do not count.
"""

import json
import os
import threading
from collections.abc import Sequence
from typing import Any

from etils import epath

_RUN = ["run"]  # the key of a life's configuration


class Journal:
    """Facts by key.

    Args:
      workdir: holds journal_<process>.jsonl; None keeps the facts of this process's life only.
      process: of this process.
      run: names the configuration.
    """

    def __init__(self, workdir: epath.Path | None = None, process: int = 0, run: str = "") -> None:
        self._facts: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()  # generators write from threads of their own
        self._path = None if workdir is None else workdir / f"journal_{process}.jsonl"
        for path in sorted(workdir.glob("journal_*.jsonl")) if workdir else ():
            ours = not run
            for line in path.read_text().splitlines():
                try:
                    key, value = json.loads(line)
                except ValueError:
                    continue  # torn by a kill: nobody has used it
                if key == _RUN:
                    ours = value == run
                elif ours:
                    self._facts[tuple(key)] = value
        if run:
            self.write(_RUN, run)

    def get(self, *key: Any) -> Any:
        """What was written under this key, or None."""
        return self._facts.get(key)

    def write(self, key: Sequence[Any], value: Any) -> None:
        """Writes a fact down, on the disk when this returns."""
        self._facts[tuple(key)] = value
        if self._path is None:
            return
        with self._lock, self._path.open("a") as file:
            file.write(f"\n{json.dumps([list(key), value])}\n")  # not behind what a kill left of a line
            file.flush()
            if hasattr(file, "fileno"):
                os.fsync(file.fileno())
