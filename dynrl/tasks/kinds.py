"""The kinds of numbered tasks (source and level), found when they are asked for and kept in four bytes a task."""

from collections.abc import Callable, Sequence

import numpy as np

from dynrl.tasks.outcomes import Kind


class KindTable:
    """Remembers which kind each task has.

    Args:
      find: gives the kinds of tasks by their ids.
    """

    def __init__(self, find: Callable[[Sequence[int]], list[Kind]]):
        self._find = find
        self._codes = np.zeros(0, np.int32)  # -1 where nobody asked yet
        self._code_of: dict[Kind, int] = {}
        self.kinds: list[Kind] = []  # by code

    def codes(self, ids: np.ndarray, length: int) -> np.ndarray:
        """Returns for each id, below the length, where its kind stands in `kinds`."""
        if length > len(self._codes):
            room = max(length, len(self._codes) * 5 // 4)
            self._codes = np.concatenate([self._codes, np.full(room - len(self._codes), -1, np.int32)])
        codes = self._codes[ids]
        if (unknown := ids[codes < 0]).size:
            code_of = self._code_of
            self._codes[unknown] = [code_of.setdefault(kind, len(code_of)) for kind in self._find(unknown.tolist())]
            self.kinds += list(code_of)[len(self.kinds) :]
            codes = self._codes[ids]
        return codes

    def forget_from(self, first: int) -> None:
        """Forgets the kinds of the tasks with this id and above."""
        self._codes[first:] = -1
