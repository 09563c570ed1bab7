"""How often each task was drawn before: part of the identity of a rollout's noise."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class VisitCounter:
    """Counts the draws of each task: a `visit` is how many times the task had been drawn before (law 6)."""

    def __init__(self):
        self._visits = np.zeros(0, dtype=np.int64)

    def next_visits(self, ids: Sequence[int]) -> list[int]:
        """Returns the visit of each id, in order, and counts it; a repeated id gets consecutive visits."""
        if not len(ids):
            return []
        if min(ids) < 0:
            raise ValueError(f"task ids are at least 0, got {min(ids)}")
        if max(ids) >= len(self._visits):
            grown = np.zeros(max(2 * len(self._visits), max(ids) + 1), dtype=np.int64)
            grown[: len(self._visits)] = self._visits
            self._visits = grown
        visits = []
        for task_id in ids:
            visits.append(int(self._visits[task_id]))
            self._visits[task_id] += 1
        return visits

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts in order of id as runs of equal values, without the zeros at the end."""
        visits = np.trim_zeros(self._visits, "b")
        starts = np.flatnonzero(np.diff(visits, prepend=-1))
        return {"values": visits[starts].tolist(), "run_lengths": np.diff(starts, append=len(visits)).tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over saved counts."""
        self._visits = np.repeat(np.array(state["values"], dtype=np.int64), state["run_lengths"])
