"""The selector `epoch`: every task once per epoch, appended ones included."""

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from dynrl.tasks.selectors.randomness import checked_seed, counter_words, refuse_other_seed
from dynrl.types import Outcome


class EpochSelector:
    """Every task once per epoch, in an order shuffled by (seed, epoch).

    An epoch starts with the tasks then in the store, n of them. Tasks appended while it runs join the rest of it, at
    random places among what is left, in the order in which they were appended. At most n join, so an epoch has at most
    2n draws and constant appending cannot keep it open; the others wait for the next epoch, which starts with all.

    Args:
      seed: of the order, 0 <= seed < 2**64.
      num_epochs: the data end after this many; 0 is endless. Once ended they stay so, whatever is appended.
    """

    is_base_distribution = True

    def __init__(self, seed: int, num_epochs: int = 0):
        self._seed = checked_seed(seed)
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
        refuse_other_seed(state, self._seed)
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
