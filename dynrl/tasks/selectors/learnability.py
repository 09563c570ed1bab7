"""The selector `learnability`: tasks in proportion to p(1 - p)."""

from typing import TYPE_CHECKING

import numpy as np

from dynrl.tasks.selectors.posterior import PosteriorSelector
from dynrl.tasks.selectors.randomness import weighted_order

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore


class LearnabilitySelector(PosteriorSelector):
    """Candidates sampled without replacement, each in proportion to its learnability p(1 - p), and a little more.

    p is the posterior mean of the pass rate. The score is that of SFL ("No Regrets", arXiv:2408.15099),
    which takes the tasks with the highest score, of fresh rollouts; that sits on one level of difficulty and forgets
    the others, so here it is a weight. The further candidates_per_task is above 1, the closer the draws come to it.

    Args:
      seed, candidates_per_task, prior_strength, decay, kind_decay: see `PosteriorSelector`.
      min_weight: added to p(1 - p), which is at most 0.25, so that no task is out of reach; above 0.
    """

    name = "learnability"

    def __init__(
        self,
        seed: int,
        min_weight: float = 0.01,
        candidates_per_task: int = 4,
        prior_strength: float = 8.0,
        decay: float = 0.9,
        kind_decay: float = 0.98,
    ):
        super().__init__(seed, candidates_per_task, prior_strength, decay, kind_decay)
        if not min_weight > 0:
            raise ValueError(f"min_weight must be above 0, got {min_weight}")
        self._min_weight = min_weight

    def choose(self, n: int, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        """Returns n candidates, in the order in which they were sampled."""
        rates = self.pass_rates.mean(ids, store)
        weights = rates * (1 - rates) + self._min_weight
        return ids[weighted_order(weights, self.chance("order", len(ids)), n)]
