"""The selector `uniform`: tasks drawn with replacement, each as likely."""

from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from dynrl.tasks.selectors.randomness import checked_seed, refuse_other_seed, uniforms
from dynrl.types import Outcome


class UniformSelector:
    """Tasks drawn with replacement, each as likely, as a pure function of (seed, number of the draw, store length).

    Args:
      seed: 0 <= seed < 2**64.
      max_draws: the data end after this many; 0 is endless.
    """

    is_base_distribution = True

    def __init__(self, seed: int, max_draws: int = 0):
        self._seed = checked_seed(seed)
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
        unit = uniforms(self._seed, "uniform", n, start=self._num_draws)
        self._num_draws += n
        return (unit * len(store)).astype(np.int64).tolist()

    def observe(self, outcome: Outcome) -> None:
        """Ignores the outcome: every task stays as likely."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed and the number of draws."""
        return {"seed": self._seed, "num_draws": self._num_draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed."""
        refuse_other_seed(state, self._seed)
        self._num_draws = state["num_draws"]
