"""Selectors: which tasks to spend rollouts on next, and how often each was drawn before.

A selector reads the store's length at every draw, so appended tasks are in reach at once. Its choices are pure
functions of its seed and a few counters, which are its whole state. This module knows neither JAX nor the controller.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dynrl.tasks.sources import build_named
from dynrl.types import Outcome

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

_WORDS_PER_COUNTER = 4  # Philox4x64 yields four words for one value of its counter


class Selector(Protocol):
    """Chooses tasks. `draw` and `observe` are called in one order on every process."""

    def draw(self, n: int, store: "TaskStore") -> list[int]:
        """Returns the ids of n tasks of the store; fewer mean that the data ended."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns from one judged group, kept or not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON-able state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the saved selector stood. Raises ValueError for another selector's state."""
        ...


def make_selector(name_or_path: str, **kwargs: Any) -> Selector:
    """Returns a selector.

    Args:
      name_or_path: `epoch`, `uniform`, or `package.module:Class`.
      **kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches.
      TypeError: at an argument that the class does not take, or a class that is no `Selector`.
    """
    members = ("draw", "observe", "state_dict", "load_state_dict")
    return build_named("selector", name_or_path, BUILT_IN_SELECTORS, members, kwargs)


class EpochSelector:
    """Every task once per epoch, in an order shuffled by (seed, epoch).

    An epoch starts with the tasks then in the store, n of them. Tasks appended while it runs join the rest of it, at
    random places among what is left, in the order in which they were appended. At most n join, so an epoch has at most
    2n draws and constant appending cannot keep it open; the others wait for the next epoch, which starts with all.

    Args:
      seed: of the order, 0 <= seed < 2**64.
      num_epochs: the data end after this many; 0 is endless. Once ended they stay so, whatever is appended.
    """

    def __init__(self, seed: int, num_epochs: int = 0):
        self._seed = _checked_seed(seed)
        if num_epochs < 0:
            raise ValueError(f"num_epochs must be at least 0 (endless), got {num_epochs}")
        self._num_epochs = num_epochs
        self._epoch = 0
        self._start_length = 0  # tasks in the store at the epoch's start; 0 before it started
        self._num_base = 0  # of those, how many were drawn
        self._num_joined = 0  # of the tasks that joined, how many were drawn
        self._order: tuple[tuple[int, int], np.ndarray] | None = None  # cache: (epoch, start length) -> permutation

    def draw(self, n: int, store: Sized) -> list[int]:
        """Returns the next n ids; fewer when the last epoch ended or the store is empty."""
        ids: list[int] = []
        length = len(store)
        if length < self._start_length:
            raise ValueError(f"the store has {length} tasks, fewer than the {self._start_length} at the epoch's start")
        while len(ids) < n and length and not (self._num_epochs and self._epoch >= self._num_epochs):
            self._start_length = self._start_length or length
            taken = self._take(n - len(ids), length)
            ids.extend(taken)
            if not taken:
                self._epoch += 1
                self._start_length = self._num_base = self._num_joined = 0
        return ids

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome: the order does not depend on it."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the place in the epoch."""
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "start_length": self._start_length,
            "num_base": self._num_base,
            "num_joined": self._num_joined,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed."""
        _refuse_other_seed(state, self._seed)
        self._epoch = state["epoch"]
        self._start_length = state["start_length"]
        self._num_base = state["num_base"]
        self._num_joined = state["num_joined"]

    def _take(self, n: int, length: int) -> list[int]:
        """Returns up to n ids of the running epoch; none when it is over."""
        base_left = self._start_length - self._num_base
        joined_left = min(length, 2 * self._start_length) - self._start_length - self._num_joined
        n = min(n, base_left + joined_left)
        from_base = np.ones(n, dtype=bool)
        if joined_left:
            from_base[:] = self._interleaving(n, base_left, joined_left)
        num_base = int(from_base.sum())
        ids_n = np.empty(n, dtype=np.int64)
        ids_n[from_base] = self._permutation()[self._num_base : self._num_base + num_base]
        first_joined = self._start_length + self._num_joined
        ids_n[~from_base] = np.arange(first_joined, first_joined + n - num_base)
        self._num_base += num_base
        self._num_joined += n - num_base
        return ids_n.tolist()

    def _interleaving(self, n: int, base_left: int, joined_left: int) -> list[bool]:
        """Returns for n draws whether each takes a base task, so that every interleaving of the rest is as likely."""
        position = self._num_base + self._num_joined
        words = counter_words(self._seed, "epoch/interleaving", n, index=self._epoch, start=position)
        from_base = []
        for word in words.tolist():
            from_base.append((word * (base_left + joined_left)) >> 64 < base_left)
            base_left -= from_base[-1]
            joined_left -= not from_base[-1]
        return from_base

    def _permutation(self) -> np.ndarray:
        key = (self._epoch, self._start_length)
        if self._order is None or self._order[0] != key:
            words = counter_words(self._seed, "epoch/order", self._start_length, index=self._epoch)
            # Sorting (random high bits, position) as one integer is several times faster than an argsort.
            position_mask = np.uint64(2 ** self._start_length.bit_length() - 1)
            keys = (words & ~position_mask) | np.arange(self._start_length, dtype=np.uint64)
            self._order = key, (np.sort(keys) & position_mask).astype(np.int64)
        return self._order[1]


class UniformSelector:
    """Tasks drawn with replacement, each as likely, as a pure function of (seed, number of the draw, store length).

    Args:
      seed: 0 <= seed < 2**64.
      max_draws: the data end after this many; 0 is endless.
    """

    def __init__(self, seed: int, max_draws: int = 0):
        self._seed = _checked_seed(seed)
        if max_draws < 0:
            raise ValueError(f"max_draws must be at least 0 (endless), got {max_draws}")
        self._max_draws = max_draws
        self._num_draws = 0

    def draw(self, n: int, store: Sized) -> list[int]:
        """Returns n ids; fewer when max_draws is reached or the store is empty."""
        if self._max_draws:
            n = min(n, self._max_draws - self._num_draws)
        if n <= 0 or not len(store):
            return []
        words = counter_words(self._seed, "uniform", n, start=self._num_draws)
        self._num_draws += n
        unit = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # [0, 1): times a length never rounds up to it
        return (unit * len(store)).astype(np.int64).tolist()

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome: every task stays as likely."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the number of draws."""
        return {"seed": self._seed, "num_draws": self._num_draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed."""
        _refuse_other_seed(state, self._seed)
        self._num_draws = state["num_draws"]


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


BUILT_IN_SELECTORS: Mapping[str, str] = {
    "epoch": "dynrl.tasks.selectors:EpochSelector",
    "uniform": "dynrl.tasks.selectors:UniformSelector",
}


@functools.cache
def _stream_key(stream: str) -> int:
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def counter_words(seed: int, stream: str, count: int, *, index: int = 0, start: int = 0) -> np.ndarray:
    """Returns random words as a pure function of where they stand.

    Philox is keyed by the seed and the stream; only its raw words are used, which no version of NumPy changes.

    Args:
      seed: 0 <= seed < 2**64.
      stream: names the use, so that two uses of one seed share nothing.
      count: words to return.
      index: which of the stream's sequences.
      start: position of the first word in its sequence; any position costs the same.

    Returns:
      uint64 [count], uniform.
    """
    key = np.array([seed, _stream_key(stream)], dtype=np.uint64)
    block, offset = divmod(start, _WORDS_PER_COUNTER)
    counter = np.array([block, index, 0, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(offset + count)[offset:]


def _checked_seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    return int(seed)


def _refuse_other_seed(state: Mapping[str, Any], seed: int) -> None:
    if state["seed"] != seed:
        raise ValueError(f"the saved selector has seed {state['seed']}, this one {seed}")
