"""The selector `thompson`: tasks whose pass rate may be near one half, by posterior sampling."""

from typing import TYPE_CHECKING

import numpy as np

from dynrl.tasks.selectors.posterior import PosteriorSelector
from dynrl.tasks.selectors.randomness import generator

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore


class ThompsonSelector(PosteriorSelector):
    """MoPPS (arXiv:2507.04632): of the candidates, those whose sampled pass rate is nearest the target.

    A pass rate is drawn for each candidate from its posterior. So a task of which little is known is tried now and
    then, and one that is known to be far from the target is left alone until its kind or its own counts say otherwise.
    With endless data almost every task is unseen, and the choice is one of kinds.

    Deviations: the prior is borrowed (`PassRates`), and the candidates are a part of the store, not all of it.

    Args:
      seed, candidates_per_task, prior_strength, decay, kind_decay: see `PosteriorSelector`.
      target: pass rate to aim at, between 0 and 1; groups of n rollouts are likeliest to be mixed at one half.
    """

    name = "thompson"

    def __init__(
        self,
        seed: int,
        target: float = 0.5,
        candidates_per_task: int = 8,
        prior_strength: float = 8.0,
        decay: float = 0.9,
        kind_decay: float = 0.98,
    ):
        super().__init__(seed, candidates_per_task, prior_strength, decay, kind_decay)
        if not 0 < target < 1:
            raise ValueError(f"target must lie between 0 and 1, got {target}")
        self._target = target

    def choose(self, n: int, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        """Returns the n candidates whose sampled pass rates are nearest the target, in the order of the candidates."""
        passes, failures = self.pass_rates.posterior(ids, store)
        rates = generator(self._seed, f"{self.name}/rates", self._num_choices).beta(passes, failures)
        nearest = np.argsort(np.abs(rates - self._target), kind="stable")[:n]
        return ids[np.sort(nearest)]
