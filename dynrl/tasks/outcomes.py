"""What became of the groups of each task, and of each kind of task: what selectors and generators decide by.

Counts forget: at every visit what was known before is worth `decay` times as much, so that they follow a policy that
learns (MoPPS, arXiv:2507.04632). Every judged group counts, kept or dropped. This module knows neither JAX nor I/O.
"""

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from dynrl.types import Outcome

Kind = tuple[str, int]  # source and level: tasks that are alike in difficulty


class Counts:
    """Attempts and successes by integer key, with forgetting: the counts of a Beta posterior.

    Args:
      decay: what a key's older counts are worth at its next visit, in (0, 1]; 1 forgets nothing.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"decay must lie above 0 and be at most 1, got {decay}")
        self._decay = decay
        self._columns = {
            "attempts": np.zeros(0, np.float64),
            "successes": np.zeros(0, np.float64),
            "last_version": np.zeros(0, np.int64),
        }
        self._unseen = {"attempts": 0.0, "successes": 0.0, "last_version": -1}

    def update(self, key: int, successes: float, attempts: float, version: int) -> None:
        """Counts one visit of a key, by a policy of this version."""
        self._reach(key, key)
        c = self._columns
        c["attempts"][key] = self._decay * c["attempts"][key] + attempts
        c["successes"][key] = self._decay * c["successes"][key] + successes
        c["last_version"][key] = max(c["last_version"][key], version)

    def update_all(self, visits: Iterable[tuple[int, float, float, int]]) -> None:
        """Counts visits, each as (key, successes, attempts, version): bit for bit as `update`, one after the other."""
        visits = list(visits)
        if not visits:
            return
        keys = list(dict.fromkeys(visit[0] for visit in visits))
        self._reach(min(keys), max(keys))
        columns = [column[keys].tolist() for column in self._columns.values()]
        rows = {key: list(row) for key, *row in zip(keys, *columns, strict=True)}
        for key, successes, attempts, version in visits:
            row = rows[key]
            row[0] = self._decay * row[0] + attempts
            row[1] = self._decay * row[1] + successes
            row[2] = max(row[2], version)
        for column, values in zip(self._columns.values(), zip(*rows.values(), strict=True), strict=True):
            column[keys] = values

    def attempts(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rollouts by key, float64, discounted; 0 where never seen."""
        return self._of("attempts", keys)

    def successes(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """Rollouts that passed by key, float64, discounted."""
        return self._of("successes", keys)

    def last_version(self, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        """The newest policy version that a key was seen with, int64; -1 where never."""
        return self._of("last_version", keys)

    def mean(self, keys: Sequence[int] | np.ndarray, prior: tuple[Any, Any] = (1.0, 1.0)) -> np.ndarray:
        """The posterior mean of the pass rate, float64.

        Args:
          keys: which.
          prior: pseudo-counts of passes and failures; each a number, or an array [len(keys)].
        """
        passes, failures = prior
        return (self.successes(keys) + passes) / (self.attempts(keys) + passes + failures)

    def seen(self) -> np.ndarray:
        """The keys that were visited, int64, in ascending order."""
        return np.flatnonzero(self._columns["last_version"] != self._unseen["last_version"])

    def snapshot(self) -> Self:
        """A copy that further updates do not reach."""
        copy = type(self)(self._decay)
        copy._columns = {name: column.copy() for name, column in self._columns.items()}
        return copy

    def state_dict(self) -> dict[str, Any]:
        """The columns up to the last key that was visited, packed into text."""
        size = int(self.seen().max(initial=-1)) + 1
        return {"decay": self._decay, **{name: packed(column[:size]) for name, column in self._columns.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse. Raises ValueError for another decay."""
        if state["decay"] != self._decay:
            raise ValueError(f"the saved counts have decay {state['decay']}, these {self._decay}")
        self._columns = {name: unpacked(state[name], c.dtype) for name, c in self._columns.items()}

    def _of(self, name: str, keys: Sequence[int] | np.ndarray) -> np.ndarray:
        column, keys = self._columns[name], np.asarray(keys, np.int64)
        known = keys < len(column)
        if known.all():
            return column[keys]
        values = np.full(keys.shape, self._unseen[name], column.dtype)
        values[known] = column[keys[known]]
        return values

    def _reach(self, smallest: int, largest: int) -> None:
        if smallest < 0:
            raise ValueError(f"keys are at least 0, got {smallest}")
        size = len(self._columns["attempts"])
        if largest >= size:
            grown = max(2 * size, largest + 1)
            for name, column in self._columns.items():
                self._columns[name] = np.full(grown, self._unseen[name], column.dtype)
                self._columns[name][:size] = column


class TaskOutcomes:
    """The counts of each task, and of each kind: source and level.

    Args:
      decay: of the counts of tasks; see `Counts`.
      kind_decay: of the counts of kinds, which are visited far more often; None is the same.
    """

    def __init__(self, decay: float = 1.0, kind_decay: float | None = None) -> None:
        self.by_task = Counts(decay)
        self.by_kind = Counts(decay if kind_decay is None else kind_decay)
        self._kinds: dict[Kind, int] = {}

    @property
    def kinds(self) -> list[Kind]:
        """The kinds seen, in the order of their keys in `by_kind`."""
        return list(self._kinds)

    def key(self, kind: Kind) -> int:
        """A kind's key in `by_kind`; a new one gets the next."""
        return self._kinds.setdefault(kind, len(self._kinds))

    def observe(self, outcome: Outcome) -> None:
        """Counts a judged group. One without live rollouts says nothing of its task."""
        if outcome.num_live:
            counted = (outcome.num_positive, outcome.num_live, outcome.version)
            self.by_task.update(outcome.task_id, *counted)
            self.by_kind.update(self.key((outcome.source, outcome.level)), *counted)

    def observe_all(self, outcomes: Iterable[Outcome]) -> None:
        """Counts judged groups: bit for bit as `observe`, one after the other, in a fraction of the time."""
        live = [outcome for outcome in outcomes if outcome.num_live]
        self.by_task.update_all((o.task_id, o.num_positive, o.num_live, o.version) for o in live)
        self.by_kind.update_all((self.key((o.source, o.level)), o.num_positive, o.num_live, o.version) for o in live)

    def snapshot(self) -> "TaskOutcomes":
        """A copy that further outcomes do not reach."""
        copy = TaskOutcomes()
        copy.by_task, copy.by_kind = self.by_task.snapshot(), self.by_kind.snapshot()
        copy._kinds = dict(self._kinds)
        return copy

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        kinds = [list(kind) for kind in self._kinds]
        return {"by_task": self.by_task.state_dict(), "by_kind": self.by_kind.state_dict(), "kinds": kinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self.by_task.load_state_dict(state["by_task"])
        self.by_kind.load_state_dict(state["by_kind"])
        self._kinds = {(source, level): i for i, (source, level) in enumerate(state["kinds"])}


def packed(array: np.ndarray) -> str:
    """A one-dimensional array as text, for JSON: compressed, since most of it repeats."""
    little = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(zlib.compress(little.tobytes(), 1)).decode()


def unpacked(text: str, dtype: Any) -> np.ndarray:
    """The inverse of `packed`."""
    data = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
