"""What selectors believe of pass rates, and the base of those that choose by it among a random part of the store."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dynrl.tasks.outcomes import Kind, TaskOutcomes
from dynrl.tasks.selectors.randomness import checked_seed, distinct_ids, refuse_other_seed, uniforms
from dynrl.types import Outcome

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

_FLAT = 1.0  # pseudo-count of passes, and of failures, where nothing is known: every pass rate is as likely
_SOURCE_STRENGTH = 2.0  # rollouts


class PassRates:
    """A Beta posterior of each task's pass rate, with forgetting (MoPPS, arXiv:2507.04632).

    A rollout passes where its metric is above 0. What is known of other tasks is the prior, where the paper has a flat
    one: a task borrows from its kind (source and level), and a kind a little from its source. So tasks of an endless
    source, which nobody has seen before, are judged by their kind. Levels differ on purpose: that all levels seen are
    solved must not keep anyone from trying another, so that what a source is worth to a kind is two rollouts.

    Args:
      prior_strength: what is borrowed counts as so many rollouts at most: how much tasks of a kind are alike.
      decay: what a task's older counts are worth at its next visit, in (0, 1].
      kind_decay: likewise of kinds, which are visited far more often.
    """

    def __init__(self, prior_strength: float, decay: float, kind_decay: float):
        if not prior_strength > 0:
            raise ValueError(f"prior_strength must be above 0, got {prior_strength}")
        for name, value in (("decay", decay), ("kind_decay", kind_decay)):
            if not 0 < value <= 1:
                raise ValueError(f"{name} must lie above 0 and be at most 1, got {value}")
        self._prior_strength = prior_strength
        self.outcomes = TaskOutcomes(decay, kind_decay)

    def observe(self, outcome: Outcome) -> None:
        """Counts a judged group."""
        self.outcomes.observe(outcome)

    def posterior(self, ids: np.ndarray, store: "TaskStore") -> tuple[np.ndarray, np.ndarray]:
        """Returns the two parameters of each task's Beta distribution, float64: passes and failures, prior included."""
        codes, kinds = store.kind_codes(ids)
        present = np.flatnonzero(np.bincount(codes, minlength=len(kinds)))
        prior = np.zeros((2, len(kinds)))
        prior[:, present] = self._priors([kinds[code] for code in present.tolist()])
        by_task = self.outcomes.by_task
        passes, attempts = by_task.successes(ids), by_task.attempts(ids)
        return prior[0, codes] + passes, prior[1, codes] + attempts - passes

    def mean(self, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        """Returns the posterior mean of each task's pass rate, float64."""
        passes, failures = self.posterior(ids, store)
        return passes / (passes + failures)

    def _priors(self, kinds: Sequence[Kind]) -> np.ndarray:
        """Returns what an unseen task of each kind starts with: passes and failures, float64 [2, len(kinds)]."""
        seen, by_kind = self.outcomes.kinds, self.outcomes.by_kind
        passes = by_kind.successes(range(len(seen)))
        of_kind = np.zeros((2, len(seen) + 1))  # the last column is for kinds that were never seen
        of_kind[:, :-1] = passes, by_kind.attempts(range(len(seen))) - passes
        column_of_source = {source: i for i, source in enumerate(dict.fromkeys(source for source, _ in seen))}
        columns = np.array([column_of_source[source] for source, _ in seen], dtype=np.int64)
        of_source = np.zeros((2, len(column_of_source) + 1))  # likewise
        of_source[:, :-1] = [np.bincount(columns, counts, len(column_of_source)) for counts in of_kind[:, :-1]]
        column_of_kind = {kind: i for i, kind in enumerate(seen)}
        prior = _FLAT + _at_most(_SOURCE_STRENGTH, of_source[:, [column_of_source.get(each, -1) for each, _ in kinds]])
        known = of_kind[:, [column_of_kind.get(kind, -1) for kind in kinds]]
        return _at_most(self._prior_strength, prior + known)


def _at_most(strength: float, counts: np.ndarray) -> np.ndarray:
    """Returns the counts [2, K], scaled down so that none has more than so many rollouts."""
    return counts * (strength / np.maximum(counts.sum(axis=0), strength))


class PosteriorSelector(ABC):
    """Base of selectors that look at some candidates for each draw, and choose by the posteriors of their pass rates.

    The candidates are a random part of the store, so that a draw costs the same however many tasks there are, and an
    appended task may be drawn at once. Ids within a draw are distinct; where the store has fewer than n tasks, each
    comes once before any comes again. The data never end.

    Args:
      seed: 0 <= seed < 2**64.
      candidates_per_task: how many tasks are looked at for one that is drawn.
      prior_strength, decay, kind_decay: see `PassRates`.
    """

    name: str  # of its streams of random numbers
    min_candidates = 1  # in a draw of few

    def __init__(
        self,
        seed: int,
        candidates_per_task: int,
        prior_strength: float,
        decay: float,
        kind_decay: float,
    ):
        if candidates_per_task < 1:
            raise ValueError(f"candidates_per_task must be at least 1, got {candidates_per_task}")
        self._seed = checked_seed(seed)
        self._candidates_per_task = candidates_per_task
        self._num_choices = 0  # which sequence of each stream is next
        self.pass_rates = PassRates(prior_strength, decay, kind_decay)

    @abstractmethod
    def choose(self, n: int, ids: np.ndarray, store: "TaskStore") -> np.ndarray:
        """Returns n distinct ids.

        Args:
          n: how many.
          ids: the candidates, int64, at least n, distinct and in random order.
          store: the tasks.
        """

    def draw(self, n: int, store: "TaskStore") -> list[int]:
        """Returns n ids; none where the store is empty."""
        drawn: list[int] = []
        while len(drawn) < n and len(store):
            count = min(n - len(drawn), len(store))
            wanted = max(count * self._candidates_per_task, self.min_candidates)
            stream, index = f"{self.name}/candidates", self._num_choices
            ids = distinct_ids(self._seed, stream, min(wanted, len(store)), len(store), index=index)
            drawn += self.choose(count, ids, store).tolist()
            self._num_choices += 1
        return drawn

    def observe(self, outcome: Outcome) -> None:
        """Learns from one judged group, kept or not."""
        self.pass_rates.observe(outcome)

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed, the number of choices made, and all counts."""
        outcomes = self.pass_rates.outcomes.state_dict()
        return {"seed": self._seed, "num_choices": self._num_choices, "outcomes": outcomes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed or another decay."""
        refuse_other_seed(state, self._seed)
        self._num_choices = state["num_choices"]
        self.pass_rates.outcomes.load_state_dict(state["outcomes"])

    def chance(self, stream: str, count: int) -> np.ndarray:
        """Returns the uniforms of this choice, float64 [count] in [0, 1); a stream per use."""
        return uniforms(self._seed, f"{self.name}/{stream}", count, index=self._num_choices)
