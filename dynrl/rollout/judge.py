"""From rewards to verdicts: the configured filter, run once per handed-over set of groups.

Vectorised filters are traced into one jitted program, which every process runs on the same gathered rewards. A
filter on the host sees only the groups that its process owns; its mask is gathered like a reward (law 4).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.config import DynamicSamplingConfig
from dynrl.core import GroupStats, group_advantages, group_stats, has_signal, make_filter
from dynrl.types import Array, Verdict

_PATTERNS = np.array(["mixed", "all_pass", "all_fail", "uniform"], object)
_VERDICTS = np.array([Verdict.FILTERED, Verdict.KEPT, Verdict.FAILED], object)


class Judged(NamedTuple):
    """Verdicts and statistics of P groups, NumPy [P] each; rows that are not valid hold anything."""

    verdict_P: np.ndarray  # of Verdict
    pattern_P: np.ndarray  # of str: mixed, all_pass, all_fail or uniform
    stats: GroupStats

    def rows(self, rows_P: np.ndarray) -> "Judged":
        """The groups of a mask."""
        return Judged(self.verdict_P[rows_P], self.pattern_P[rows_P], GroupStats(*(x[rows_P] for x in self.stats)))


class Judge:
    """Decides which groups are kept.

    Args:
      config: the dynamic-sampling part; with enable = False every group is kept that did not fail.
      estimator: of the advantages; a kept group has a rollout to train on whose advantage is not zero (law 2).
      min_live: fewer live rollouts fail the group.

    Raises:
      ValueError or TypeError: for a filter that does not exist or does not fit.
    """

    def __init__(self, config: DynamicSamplingConfig, estimator: str, min_live: int) -> None:
        name = config.filter if config.enable else "keep_all"
        kwargs = config.filter_kwargs if config.enable else {}
        self.filter = make_filter(name, **kwargs)
        self._min_live = min_live

        def program(rewards_PG: Array, live_PG: Array, trainable_PG: Array) -> Array:
            stats = group_stats(rewards_PG, live_PG)
            filter_P = stats.count >= 0 if self.filter.on_host else self.filter(stats, rewards_PG, live_PG)
            advantages_PG = group_advantages(rewards_PG, live_PG, estimator=estimator)
            teaches_P = ((advantages_PG != 0) & live_PG & trainable_PG).any(1)
            # One array, one transfer; a count below 2**24 is exact in float32.
            columns = (filter_P, teaches_P | (not config.enable), has_signal(stats), *stats)
            return jnp.stack([column.astype(jnp.float32) for column in columns])

        self._jitted = jax.jit(program)

    def _program(
        self, rewards_PG: np.ndarray, live_PG: np.ndarray, trainable_PG: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, GroupStats]:
        """Whether the filter keeps, whether there is something to train, whether there is signal; statistics."""
        columns = np.asarray(self._jitted(rewards_PG, live_PG, trainable_PG))
        flags, stats = columns[:3] > 0, GroupStats(*columns[3:])
        counts = {name: getattr(stats, name).astype(np.int32) for name in ("count", "positives")}
        return flags[0], flags[1], flags[2], stats._replace(**counts)

    def host_mask(self, rewards_PG: np.ndarray, live_PG: np.ndarray, rows_P: np.ndarray) -> np.ndarray:
        """The host filter's mask for the groups in `rows_P`, False elsewhere; all True without a host filter."""
        if not self.filter.on_host:
            return rows_P.copy()
        keep_P = np.zeros(len(rows_P), bool)
        index = np.flatnonzero(rows_P)
        if len(index):
            rewards, live = rewards_PG[index], live_PG[index]
            stats = GroupStats(*(x[index] for x in self._program(rewards_PG, live_PG, live_PG)[3]))
            keep_P[index] = self.filter(stats, rewards, live)
        return keep_P

    def __call__(
        self, rewards_PG: np.ndarray, live_PG: np.ndarray, trainable_PG: np.ndarray, host_keep_P: np.ndarray
    ) -> Judged:
        """Verdicts.

        Args:
          rewards_PG: float32, the configured raw metric; anything where dead.
          live_PG: bool.
          trainable_PG: bool, rollouts whose tokens the loss does not mask.
          host_keep_P: the gathered mask of a host filter, or all True.
        """
        filter_P, teaches_P, signal_P, stats = self._program(rewards_PG, live_PG, trainable_PG)
        keep_P = filter_P & host_keep_P & teaches_P
        failed_P = stats.count < self._min_live
        verdict_P = _VERDICTS[np.where(failed_P, 2, keep_P)]
        uniform_P = np.where(stats.min > 0, 1, np.where(stats.max <= 0, 2, 3))
        return Judged(verdict_P, _PATTERNS[np.where(signal_P, 0, uniform_P)], stats)

    def warm_up(self, num_groups: int, num_samples: int) -> None:
        """Compiles."""
        shape = (num_groups, num_samples)
        self._program(np.zeros(shape, np.float32), *(np.zeros(shape, bool),) * 2)
