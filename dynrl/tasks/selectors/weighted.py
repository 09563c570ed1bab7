"""The selector `weighted`: tasks in proportion to a weight by source, by level, by both, or in their metadata."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynrl.tasks.outcomes import Kind
from dynrl.tasks.selectors.randomness import checked_seed, refuse_other_seed, uniforms, weighted_order
from dynrl.types import Outcome, Task

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

_KEYS = ("source", "level", "weight")
_TRIES_PER_TASK, _MIN_TRIES = 2, 64  # at once
_MAX_TIMES = 64


class WeightedSelector:
    """Tasks in proportion to fixed weights, distinct within a draw.

        weights=[{"source": "arithmetic", "level": 22, "weight": 3.0}, {"source": "arithmetic", "weight": 0.5}]

    A task has the weight of the first entry that it fits; an entry without a source or a level fits them all. Where
    fewer than n tasks have a weight above 0, each comes once before any comes again. The data never end.

    The selector looks at random tasks until enough of them have passed a test that each passes in proportion to its
    weight. Where that takes too many, where the store is small, and always with `metadata`, it weighs every task of
    the store, once: minutes for millions of tasks that are slow to make.

    Args:
      seed: 0 <= seed < 2**64.
      weights: mappings with a `weight` of at least 0, and a `source`, a `level` or both.
      metadata: the number of this name in a task's metadata is its weight, at least 0; in place of `weights`.
      default: the weight of tasks that fit no entry, or whose metadata have no such number.

    Raises:
      ValueError, TypeError: naming the position in `weights`.
    """

    def __init__(self, seed: int, weights: Sequence[Mapping[str, Any]] = (), metadata: str = "", default: float = 1.0):
        self._seed = checked_seed(seed)
        if bool(weights) == bool(metadata):
            raise ValueError("weighted needs either weights or metadata: what a task's weight depends on")
        if isinstance(weights, (str, Mapping)):
            raise TypeError(f"weights must be a sequence of mappings, got {weights!r:.100}")
        self._default = _checked_weight(default, "default")
        self._entries = [_checked_entry(entry, f"weights[{i}]") for i, entry in enumerate(weights)]
        _refuse_shadowed([kind for kind, _ in self._entries])
        self._metadata = metadata
        self._largest = max([self._default, *(weight for _, weight in self._entries)])
        self._num_choices = 0
        self._weights = np.zeros(0)  # of the first tasks of the store: a cache

    def draw(self, n: int, store: "TaskStore") -> list[int]:
        """Returns n ids; none where the store is empty. Raises ValueError where no task has a weight above 0."""
        drawn: list[int] = []
        while len(drawn) < n and len(store):
            drawn += self._choose(n - len(drawn), store)
            self._num_choices += 1
        return drawn

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome: the weights do not depend on it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the number of choices made."""
        return {"seed": self._seed, "num_choices": self._num_choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed."""
        refuse_other_seed(state, self._seed)
        self._num_choices = state["num_choices"]
        self._weights = np.zeros(0)

    def _choose(self, n: int, store: "TaskStore") -> list[int]:
        """Returns up to n distinct ids, and at least one."""
        num_tries = max(_TRIES_PER_TASK * n, _MIN_TRIES)
        if not self._metadata and self._largest > 0 and num_tries * _MAX_TIMES < len(store):
            ids = self._by_tries(n, num_tries, store)
            if len(ids) == n:
                return ids
        weights = self._all_weights(store)
        unit = uniforms(self._seed, "weighted/all", len(store), index=self._num_choices)
        ids = weighted_order(weights, unit, n).tolist()
        if not ids:
            raise ValueError(f"weighted: none of the {len(store)} tasks of the store has a weight above 0")
        return ids

    def _by_tries(self, n: int, num_tries: int, store: "TaskStore") -> list[int]:
        """Returns the first n distinct tasks that pass; fewer where too few do."""
        passed: dict[int, None] = {}  # in order
        for time in range(_MAX_TIMES):
            where = {"count": num_tries, "index": self._num_choices, "start": time * num_tries}
            ids = (uniforms(self._seed, "weighted/ids", **where) * len(store)).astype(np.int64)
            tries = uniforms(self._seed, "weighted/tries", **where) * self._largest
            passed |= dict.fromkeys(ids[tries < self._weights_of(ids, store)].tolist())
            if len(passed) >= n:
                break
        return list(passed)[:n]

    def _all_weights(self, store: "TaskStore") -> np.ndarray:
        known = len(self._weights)
        if len(store) > known:
            self._weights = np.concatenate([self._weights, self._weights_of(np.arange(known, len(store)), store)])
        return self._weights

    def _weights_of(self, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        if self._metadata:
            return np.array([self._weight_in_metadata(task) for task in store.get(ids.tolist())], dtype=np.float64)
        codes, kinds = store.kind_codes(ids)
        return np.array([self._weight_of_kind(kind) for kind in kinds])[codes]

    def _weight_of_kind(self, kind: Kind) -> float:
        return next((weight for which, weight in self._entries if _fits(which, kind)), self._default)

    def _weight_in_metadata(self, task: Task) -> float:
        value = task.metadata.get(self._metadata, self._default)
        return _checked_weight(value, f"task {task.task_id}: {self._metadata!r} in its metadata")


def _fits(which: tuple[str | None, int | None], kind: tuple[str | None, int | None]) -> bool:
    return all(wanted is None or wanted == given for wanted, given in zip(which, kind, strict=True))


def _checked_weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{where} must be a finite number of at least 0, got {value!r:.60}")
    return float(value)


def _checked_entry(entry: Any, where: str) -> tuple[tuple[str | None, int | None], float]:
    if not isinstance(entry, Mapping) or "weight" not in entry or len(entry) < 2:
        raise TypeError(f"{where} must be a mapping with a 'weight', and a 'source' or a 'level', got {entry!r:.100}")
    if unknown := [key for key in entry if key not in _KEYS]:
        raise TypeError(f"{where} has unknown keys {unknown}; there are {', '.join(_KEYS)}")
    source, level = entry.get("source"), entry.get("level")
    if not isinstance(source, str | None) or not isinstance(level, int | None) or isinstance(level, bool):
        raise TypeError(f"{where}: the source must be a text and the level a whole number, got {entry!r:.100}")
    return (source, level), _checked_weight(entry["weight"], f"{where}: weight")


def _refuse_shadowed(entries: Sequence[tuple[str | None, int | None]]) -> None:
    for i, which in enumerate(entries):
        for j, earlier in enumerate(entries[:i]):
            if _fits(earlier, which):
                raise ValueError(f"weights[{i}] never applies: all that fits it fits weights[{j}] first")
