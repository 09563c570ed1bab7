"""The selector `difficulty_pools`: configured shares of hard, medium and easy tasks, and few solved ones."""

from typing import TYPE_CHECKING

import numpy as np

from dynrl.tasks.selectors.posterior import PosteriorSelector
from dynrl.tasks.selectors.randomness import distinct_ids

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

HARD, MEDIUM, EASY, SOLVED = range(4)
_MAX_ESTIMATED = 16_384  # tasks that an estimate over the whole store looks at


class DifficultyPoolsSelector(PosteriorSelector):
    """Tasks in pools by the posterior mean of their pass rate; a share of the draws is from each pool.

    A task is hard below `medium_from`, medium below `easy_from`, easy below `solved_from`, and solved from there on.
    Within a pool all tasks are as likely. A pool that has too few tasks leaves its share to the others. Solved tasks
    rest: one is drawn `check_rate` times as often as it would be from the whole store, so that the policy's lapses are
    found; more often only where there is nothing else.

    Pools are those of the candidates, at least 64 of them. Where a pool has fewer than its share of whole draws, tasks
    that were drawn before and belong to it are looked for in the whole store: rare pools get their share all the same.

    Args:
      seed, candidates_per_task, prior_strength, decay, kind_decay: see `PosteriorSelector`. With a strength of 2, one
        group of 8 that all pass makes a task solved (9/10) whose kind is at one half.
      medium_from, easy_from, solved_from: pass rates, ascending, in 0 to 1.
      hard_share, medium_share, easy_share: of the draws that are no checks; in proportion to each other.
      check_rate: in 0 to 1.
    """

    name = "difficulty_pools"
    min_candidates = 64  # so that draws of one task, too, find most pools

    def __init__(
        self,
        seed: int,
        medium_from: float = 0.2,
        easy_from: float = 0.7,
        solved_from: float = 0.9,
        hard_share: float = 0.2,
        medium_share: float = 0.6,
        easy_share: float = 0.2,
        check_rate: float = 0.05,
        candidates_per_task: int = 4,
        prior_strength: float = 2.0,
        decay: float = 0.9,
        kind_decay: float = 0.98,
    ):
        super().__init__(seed, candidates_per_task, prior_strength, decay, kind_decay)
        if not 0 <= medium_from <= easy_from <= solved_from <= 1:
            raise ValueError(
                "medium_from, easy_from and solved_from must ascend within 0 to 1, got "
                f"{medium_from}, {easy_from}, {solved_from}"
            )
        shares = (hard_share, medium_share, easy_share)
        if min(shares) < 0 or not sum(shares) > 0:
            raise ValueError(f"hard_share, medium_share and easy_share must not be negative, nor all 0, got {shares}")
        if not 0 <= check_rate <= 1:
            raise ValueError(f"check_rate must lie in 0 to 1, got {check_rate}")
        self._thresholds = np.array([medium_from, easy_from, solved_from])
        self._shares = np.array(shares) / sum(shares)
        self._check_rate = check_rate

    def choose(self, n: int, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        """Returns n ids in random order."""
        pools = self._pools(ids, store)
        # A candidate stands for len(store) / len(ids) tasks.
        checked = (pools == SOLVED) & (self.chance("checks", len(ids)) < self._check_rate * n / len(ids))
        checks = ids[checked][:n]
        num_left = n - len(checks)
        members = [ids[pools == pool] for pool in (HARD, MEDIUM, EASY)]
        whole_draws = np.floor(self._shares * num_left)
        if any(len(pool) < wanted for pool, wanted in zip(members, whole_draws, strict=True)):
            members = self._with_seen(num_left, members, store)
        offset = float(self.chance("split", 1)[0])
        counts = split(num_left, self._shares, [len(pool) for pool in members], offset)
        chosen = np.concatenate([checks, *(pool[:count] for pool, count in zip(members, counts, strict=True))])
        if len(chosen) < n:  # pools without a share, and then solved tasks
            others = np.concatenate([ids[pools != SOLVED], ids[pools == SOLVED]])
            chosen = np.concatenate([chosen, others[~np.isin(others, chosen)][: n - len(chosen)]])
        return chosen[np.argsort(self.chance("order", n), kind="stable")]

    def num_selectable(self, store: "TaskStore") -> int:
        """Returns how many tasks do not rest; an estimate where the store has more than 16,384."""
        if not len(store):
            return 0
        count = min(len(store), _MAX_ESTIMATED)
        ids = distinct_ids(self._seed, f"{self.name}/estimate", count, len(store), index=0)
        return round(float((self._pools(ids, store) != SOLVED).mean()) * len(store))

    def _pools(self, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        return np.searchsorted(self._thresholds, self.pass_rates.mean(ids, store), side="right")

    def _with_seen(self, n: int, members: list[np.ndarray], store: "TaskStore") -> list[np.ndarray]:
        """Returns each pool's candidates, then at random up to n others of the pool that were drawn before."""
        seen = self.pass_rates.outcomes.by_task.seen()
        pools = self._pools(seen, store)
        is_candidate = np.zeros(len(store), dtype=bool)
        for ids in members:
            is_candidate[ids] = True
        with_seen = []
        for pool, ids in enumerate(members):
            others = seen[(pools == pool) & ~is_candidate[seen]]
            stream, count = f"{self.name}/seen/{pool}", min(n, len(others))
            chosen = distinct_ids(self._seed, stream, count, len(others), index=self._num_choices)
            with_seen.append(np.concatenate([ids, others[chosen]]))
        return with_seen


def split(total: int, shares: np.ndarray, available: list[int], offset: float) -> np.ndarray:
    """Splits a number by shares; what is not available goes to those that have more.

    Args:
      total: to split.
      shares: float64, at least 0, in proportion to each other.
      available: at most so many for each.
      offset: uniform in [0, 1): over such offsets, each gets its share exactly on average.

    Returns:
      int64, as long as `shares`; the sum is less than the total only where too few are available with a share.
    """
    counts = np.zeros(len(shares), dtype=np.int64)
    room = np.array(available, dtype=np.int64)
    while total and (is_open := (shares > 0) & (room > 0)).any():
        ends = np.cumsum(np.where(is_open, shares, 0.0))
        # An offset just under 1 can round up to the next integer in float64.
        bounds = np.minimum(np.floor(ends / ends[-1] * total + offset).astype(np.int64), total)
        taken = np.minimum(np.diff(bounds, prepend=0), room)
        counts, room, total = counts + taken, room - taken, total - int(taken.sum())
    return counts
