"""From rewards to verdicts: the configured filter, run once per handed-over set of groups.

Vectorised filters are traced into one jitted program, which every process runs on the same gathered rewards. A
filter on the host sees only the groups that its process owns; its mask is gathered like a reward (law 4).
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.config import DynamicSamplingConfig, LossConfig
from dynrl.core import ESTIMATORS, GroupStats, group_advantages, group_stats, has_signal, make_filter
from dynrl.types import Array, Verdict

_PATTERNS = np.array(["mixed", "all_pass", "all_fail", "uniform"], object)
_VERDICTS = np.array([Verdict.FILTERED, Verdict.KEPT, Verdict.FAILED], object)


class Judged(NamedTuple):
    """Verdicts and statistics of P groups, NumPy [P] each; rows that are not valid hold anything."""

    verdict_P: np.ndarray  # of Verdict
    pattern_P: np.ndarray  # of str: mixed, all_pass, all_fail or uniform
    refused_P: np.ndarray  # bool: filtered, though there is signal and a rollout that it would train
    stats: GroupStats

    def rows(self, rows_P: np.ndarray) -> "Judged":
        """The groups of a mask."""
        stats = GroupStats(*(x[rows_P] for x in self.stats))
        return Judged(self.verdict_P[rows_P], self.pattern_P[rows_P], self.refused_P[rows_P], stats)


class Judge:
    """Decides which groups are kept.

    Where an estimator normalises several rewards one by one, a group passes the filter with any of them.

    Args:
      config: the dynamic-sampling part; with enable = False every group is kept that did not fail.
      loss: the estimator of the advantages; a kept group has a rollout to train on whose advantage is not 0 (law 2).
      min_live: fewer live rollouts fail the group.

    Raises:
      ValueError or TypeError: for a filter that does not exist or does not fit.
    """

    def __init__(self, config: DynamicSamplingConfig, loss: LossConfig, min_live: int) -> None:
        name = config.filter if config.enable else "keep_all"
        kwargs = config.filter_kwargs if config.enable else {}
        self.filter = make_filter(name, **kwargs)
        self._min_live = min_live
        self._per_component = ESTIMATORS[loss.estimator].per_component

        def teaches(rewards: Array, live_PG: Array, trainable_PG: Array) -> Array:
            if ESTIMATORS[loss.estimator].uses_uniform_groups:  # any group moves the policy
                return (live_PG & trainable_PG).any(1)
            advantages_PG = group_advantages(rewards, live_PG, estimator=loss.estimator, **loss.estimator_kwargs)
            return ((advantages_PG != 0) & live_PG & trainable_PG).any(1)

        def program(planes: Array) -> Array:  # one array: each one that is passed costs its time
            metric_PG, live_PG, trainable_PG = planes[0], planes[1] > 0, planes[2] > 0
            rewards = jnp.moveaxis(planes[3:], 0, -1) if self._per_component else planes[3]
            stats = group_stats(metric_PG, live_PG)
            filter_P = stats.count >= 0
            if not self.filter.on_host:
                filter_P = self._filter_mask(metric_PG, rewards, live_PG)
            teaches_P = teaches(rewards, live_PG, trainable_PG) | (not config.enable)
            # One array, one transfer; a count below 2**24 is exact in float32.
            columns = (filter_P, teaches_P, has_signal(stats), *stats)
            return jnp.stack([column.astype(jnp.float32) for column in columns])

        self._jitted = jax.jit(program)

    def _filter_mask(self, metric_PG: Array, rewards: Array, live_PG: Array) -> Array:
        parts = [rewards[..., k] for k in range(rewards.shape[-1])] if self._per_component else [metric_PG]
        masks = [self.filter(group_stats(part, live_PG), part, live_PG) for part in parts]
        return functools.reduce(operator.or_, masks)

    def keeps_singletons(self) -> bool:
        """Whether the filter can keep a group of one rollout; a user's filter on the host is not asked."""
        values_PG = np.array([[-1.0], [0.0], [0.5], [1.0]], np.float32)
        rewards = values_PG[..., None] if self._per_component else values_PG
        return self.filter.on_host or bool(np.any(self._filter_mask(values_PG, rewards, np.ones((4, 1), bool))))

    def host_mask(
        self, metric_PG: np.ndarray, rewards: np.ndarray, live_PG: np.ndarray, rows_P: np.ndarray
    ) -> np.ndarray:
        """The host filter's mask for the groups in `rows_P`, False elsewhere; all True without a host filter."""
        if not self.filter.on_host:
            return rows_P.copy()
        keep_P = np.zeros(len(rows_P), bool)
        index = np.flatnonzero(rows_P)
        if len(index):
            keep_P[index] = self._filter_mask(metric_PG[index], rewards[index], live_PG[index])
        return keep_P

    def __call__(
        self, metric_PG: np.ndarray, rewards: np.ndarray, live_PG: np.ndarray, trainable_PG: np.ndarray,
        host_keep_P: np.ndarray,
    ) -> Judged:  # fmt: skip
        """Verdicts.

        Args:
          metric_PG: float32, the configured raw metric; anything where dead.
          rewards: float32, the estimator's own input, which may be shaped: [P, G], or [P, G, K] where it takes several.
          live_PG: bool.
          trainable_PG: bool, rollouts whose tokens the loss does not mask.
          host_keep_P: the gathered mask of a host filter, or all True.
        """
        parts = np.moveaxis(rewards, -1, 0) if self._per_component else rewards[None]
        planes = np.stack([metric_PG, live_PG, trainable_PG, *parts], dtype=np.float32, casting="unsafe")
        columns = np.asarray(self._jitted(planes))
        (filter_P, teaches_P, signal_P), stats = columns[:3] > 0, GroupStats(*columns[3:])
        stats = stats._replace(count=stats.count.astype(np.int32), positives=stats.positives.astype(np.int32))
        keep_P = filter_P & host_keep_P & teaches_P
        failed_P = stats.count < self._min_live
        verdict_P = _VERDICTS[np.where(failed_P, 2, keep_P)]
        uniform_P = np.where(stats.min > 0, 1, np.where(stats.max <= 0, 2, 3))
        refused_P = signal_P & teaches_P & ~keep_P & ~failed_P
        return Judged(verdict_P, _PATTERNS[np.where(signal_P, 0, uniform_P)], refused_P, stats)

    def warm_up(self, num_groups: int, num_samples: int, num_rewards: int = 0) -> None:
        """Compiles."""
        metric_PG = np.zeros((num_groups, num_samples), np.float32)
        rewards = np.zeros((*metric_PG.shape, num_rewards), np.float32) if num_rewards else metric_PG
        live_PG = metric_PG > 0
        self(metric_PG, rewards, live_PG, live_PG, live_PG[:, 0])
