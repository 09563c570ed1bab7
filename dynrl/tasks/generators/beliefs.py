"""Which levels of difficulty a policy passes about half of the time, by what it passed and failed at each.

Levels are positions on a ladder here, 0 the easiest. Axes: K levels with evidence, E levels that are asked about.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_OWN_ROLLOUTS = 32.0  # what a level's own evidence counts for at most, in rollouts
_CURVE_ROLLOUTS = 8.0  # and what the curve through all levels counts for, at each
_WIDTHS = (1.0, 0.5, 2.0, 4.0)  # of the curve, in levels; of equally likely ones the first
_STEP = 0.25  # between the half points that are tried, in levels
_LAPSE = 0.05  # a pass rate's distance from 0 and 1 that no difficulty explains
_TINY = 1e-6  # of a pass rate, so that its logarithm is finite
_SPREAD = 8.0  # levels: how far from the source's own ones the half point is expected, before any evidence


class Evidence(NamedTuple):
    """What was seen of some levels, float64 [K]."""

    at_K: np.ndarray  # int64: positions
    passes_K: np.ndarray  # rollouts
    failures_K: np.ndarray
    worth_K: np.ndarray  # what a rollout counts for, in [0, 1]: less, the older the evidence


def pass_rates(at_E: np.ndarray, evidence: Evidence, centre: float) -> np.ndarray:
    """Returns the posterior mean of the pass rate at each level.

    A logistic curve that falls with the level is fitted to all evidence, and is the Beta prior of each level, which
    its own evidence updates. So a level that was never tried borrows from its neighbours, and the ladder need not be
    in order everywhere.

    Args:
      at_E: positions.
      evidence: of any levels, also of none.
      centre: where the half point is expected without evidence.

    Returns:
      float64 [E], above 0 and below 1.
    """
    at_K, passes_K, failures_K, worth_K = evidence
    scale_K = worth_K * np.minimum(1, _OWN_ROLLOUTS / np.maximum(passes_K + failures_K, 1))
    passes_K, failures_K = scale_K * passes_K, scale_K * failures_K
    half, width = _fitted_curve(at_K, passes_K, failures_K, np.append(at_E, centre), centre)
    prior_E = _logistic((half - at_E) / width)
    is_at_EK = at_E[:, None] == at_K
    passes_E, failures_E = is_at_EK @ passes_K, is_at_EK @ failures_K
    rate_E = (_CURVE_ROLLOUTS * prior_E + passes_E) / (_CURVE_ROLLOUTS + passes_E + failures_E)
    return np.clip(rate_E, _TINY, 1 - _TINY)


def levels_in_play(
    own: Sequence[int], evidence: Evidence, num_levels: int, target: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the levels to write tasks at, and their pass rates.

    They are the source's own levels, those with evidence, and all between. Then there is one beyond at either end,
    where the ladder has it: harder if the hardest is passed now and then, and easier if the easiest is failed now and
    then.

    Args:
      own: positions of the source's levels.
      evidence: of levels on the ladder.
      num_levels: the ladder's length.
      target: the pass rate to aim at, in (0, 1).

    Returns:
      Positions, int64 [E] in ascending order, and `pass_rates`, float64 [E].
    """
    known = np.union1d(own, evidence.at_K)
    at_E = np.arange(known.min() - 1, known.max() + 2, dtype=np.int64)
    rate_E = pass_rates(at_E, evidence, float(np.mean(own)))
    in_play_E = (at_E >= 0) & (at_E < num_levels)
    in_play_E[0] &= rate_E[1] < 1 - (1 - target) / 5
    in_play_E[-1] &= rate_E[-2] > target / 5
    return at_E[in_play_E], rate_E[in_play_E]


def level_shares(rate_E: np.ndarray, target: float, floor: float) -> np.ndarray:
    """Returns how to share tasks out over levels of these pass rates: float64 [E], which sum to 1.

    A level weighs exp(-2 KL(target || rate)), which for a target of one half is the learnability 4 rate (1 - rate) of
    SFL. A share `floor` is spread evenly: on the levels of highest learnability alone a policy forgets the others.
    """
    divergence_E = target * np.log(target / rate_E) + (1 - target) * np.log((1 - target) / (1 - rate_E))
    weight_E = np.exp(-2 * divergence_E)
    return (1 - floor) * weight_E / weight_E.sum() + floor / max(len(rate_E), 1)


def _fitted_curve(
    at_K: np.ndarray, passes_K: np.ndarray, failures_K: np.ndarray, around_E: np.ndarray, centre: float
) -> tuple[float, float]:
    """Returns the half point and the width of the likeliest curve; the half point is looked for around some levels."""
    width_W = np.array(_WIDTHS)
    half_H = np.arange(around_E.min() - 1, around_E.max() + 1 + _STEP, _STEP)
    rate_WHK = _logistic((half_H[:, None] - at_K) / width_W[:, None, None])
    rate_WHK = _LAPSE + (1 - 2 * _LAPSE) * rate_WHK
    fit_WH = np.log(rate_WHK) @ passes_K + np.log1p(-rate_WHK) @ failures_K - ((half_H - centre) / _SPREAD) ** 2 / 2
    which, where = np.unravel_index(np.argmax(fit_WH), fit_WH.shape)
    return float(half_H[where]), float(width_W[which])


def _logistic(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2  # does not overflow
