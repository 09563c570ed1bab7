"""How many groups to dispatch so that enough are kept: a posterior of the keep rate. Plain Python.

A group that is kept is one success; what is dispatched together is a cohort. Only cohorts of which every group has
ended count: the share of kept among those that happen to be judged is biased, since a step ends when it is full, with
a kept group (with independent draws, (k - 1) / (n - 1) at the k-th kept of n is unbiased there, and k / n is not).

Each source has a Beta posterior that forgets, and whose weight is bounded: a selector moves the rate as the policy
learns, so that rates of later cohorts differ more than counts from one rate would (over-dispersion).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from dynrl.rollout.ledger import Ticket
from dynrl.types import Verdict

PRIOR = (4.0, 4.0)  # kept, not kept
MAX_WEIGHT = 400.0  # groups that a posterior is worth at most
FORGETTING = 0.8  # of a posterior's weight, per batch of judged groups
EXACT = 48  # kept groups up to which the tail of the beta-binomial distribution is summed, not approximated


@dataclass
class _Cohort:
    """Groups that were dispatched together."""

    open: int
    judged: Counter[str] = field(default_factory=Counter)  # by source
    kept: Counter[str] = field(default_factory=Counter)


class KeepRate:
    """Posterior of the share of dispatched groups that are kept.

    Args:
      batch_size: B, the unit of forgetting.
      fill_probability: with which `groups_for` is to be enough.
    """

    def __init__(self, batch_size: int, fill_probability: float) -> None:
        self._batch_size, self._probability = batch_size, fill_probability
        self._z = NormalDist().inv_cdf(fill_probability)
        self._cohorts: dict[int, _Cohort] = {}
        self._next_cohort = 0
        self._posterior: dict[str, list[float]] = {}  # by source: kept, not kept
        self._drawn: dict[str, float] = {}  # recent draws by source
        self.kept, self.judged = 0, 0  # over closed cohorts, run totals
        self._known: dict[tuple[int, int], int] = {}  # answers of `groups_for` since the posterior last changed

    # ---- What happens ----

    def dispatched(self, sources: Sequence[str]) -> int:
        """A cohort of groups of these sources is dispatched. Returns its number."""
        number = self._next_cohort
        self._next_cohort += 1
        self._cohorts[number] = _Cohort(len(sources))
        counts = Counter(sources)
        decay = FORGETTING ** (len(sources) / self._batch_size)
        self._drawn = {s: n * decay for s, n in self._drawn.items()}
        for source, num in counts.items():
            self._drawn[source] = self._drawn.get(source, 0.0) + num
            self._posterior.setdefault(source, list(PRIOR))
        if len(self._drawn) > 1:
            self._known.clear()
        return number

    def ended(self, tickets: Sequence[Ticket], verdict: Verdict) -> None:
        """Groups were judged for the first time. Stale and failed ones say nothing of the rate."""
        for (number, source), num in Counter([(t.cohort, t.source) for t in tickets]).items():
            cohort = self._cohorts[number]
            if verdict is Verdict.KEPT or verdict is Verdict.FILTERED:
                cohort.judged[source] += num
                cohort.kept[source] += num * (verdict is Verdict.KEPT)
            cohort.open -= num
            if not cohort.open:
                self._close(self._cohorts.pop(number))

    def _close(self, cohort: _Cohort) -> None:
        for source, judged in cohort.judged.items():
            kept, posterior = cohort.kept[source], self._posterior[source]
            self.kept += kept
            self.judged += judged
            decay = FORGETTING ** (judged / self._batch_size)
            a, b = posterior[0] * decay + kept, posterior[1] * decay + judged - kept
            # Never less than the prior's weight, which forgetting would use up; never more than the bound.
            weight = min(max(a + b, sum(PRIOR)), MAX_WEIGHT) / (a + b)
            self._posterior[source] = [max(a * weight, 1e-3), max(b * weight, 1e-3)]
        self._known.clear()

    # ---- What follows ----

    @property
    def expected(self) -> float:
        """The posterior's mean, over the sources as they were drawn recently."""
        a, b = self._mixture()
        return a / (a + b)

    @property
    def by_source(self) -> dict[str, float]:
        """The posterior's mean, by source."""
        return {source: a / (a + b) for source, (a, b) in self._posterior.items()}

    @property
    def mean(self) -> float | None:
        """Kept share of what was judged, over closed cohorts of the whole run."""
        return self.kept / self.judged if self.judged else None

    def groups_for(self, num_kept: int, limit: int) -> int:
        """The smallest number of groups of which at least `num_kept` are kept with the wanted probability.

        At most `limit`, at least `num_kept`.
        """
        if num_kept <= 0:
            return 0
        if limit <= num_kept:
            return num_kept
        key = num_kept, limit
        if key not in self._known:
            a, b = self._mixture()
            low, high = num_kept - 1, limit  # `low` is not enough; `high` is, or has to be
            while high - low > 1:
                middle = (low + high) // 2
                enough = self._fills(middle, num_kept, a, b)
                low, high = (low, middle) if enough else (middle, high)
            self._known[key] = high
        return self._known[key]

    def _mixture(self) -> tuple[float, float]:
        """One Beta of the mean and variance that the rate of a mixture of sources has, as they were drawn recently."""
        total = sum(self._drawn.values())
        if not total:
            return PRIOR
        mean, variance = 0.0, 0.0
        for source, num in self._drawn.items():
            a, b = self._posterior[source]
            share, p = num / total, a / (a + b)
            mean += share * p
            variance += share**2 * p * (1 - p) / (a + b + 1)
        weight = mean * (1 - mean) / variance - 1
        return mean * weight, (1 - mean) * weight

    def _fills(self, n: int, k: int, a: float, b: float) -> bool:
        """Whether P(at least k of n kept) reaches the wanted probability."""
        if k <= EXACT:
            return 1 - _beta_binomial_below(k, n, a, b) >= self._probability
        p, weight = a / (a + b), a + b
        deviation = math.sqrt(n * p * (1 - p) * (weight + n) / (weight + 1))
        return n * p - self._z * deviation >= k - 0.5

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; bounded by the open groups and the sources."""
        cohorts = [[n, c.open, dict(c.judged), dict(c.kept)] for n, c in self._cohorts.items()]
        return {
            "cohorts": cohorts,
            "next_cohort": self._next_cohort,
            "posterior": {source: list(ab) for source, ab in self._posterior.items()},
            "drawn": dict(self._drawn),
            "totals": [self.kept, self.judged],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._cohorts = {n: _Cohort(left, Counter(judged), Counter(kept)) for n, left, judged, kept in state["cohorts"]}
        self._next_cohort = state["next_cohort"]
        self._posterior = {source: list(ab) for source, ab in state["posterior"].items()}
        self._drawn = dict(state["drawn"])
        self.kept, self.judged = state["totals"]
        self._known.clear()


def _beta_binomial_below(k: int, n: int, a: float, b: float) -> float:
    """P(K < k) for K successes in n trials whose common rate is Beta(a, b)."""
    log_p = math.lgamma(b + n) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + n)
    total = 0.0
    for j in range(min(k, n + 1)):
        total += math.exp(log_p)
        if j < n:
            log_p += math.log((n - j) / (j + 1) * (a + j) / (b + n - j - 1))
    return total
