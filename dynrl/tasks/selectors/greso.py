"""The selector `greso`: epochs that skip tasks whose recent groups were all right or all wrong."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dynrl.tasks.outcomes import packed, unpacked
from dynrl.tasks.selectors.epoch import EpochSelector
from dynrl.tasks.selectors.randomness import checked_seed, refuse_other_seed, uniforms
from dynrl.types import Outcome

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

_MIN_KEPT = 0.01  # the probability with which any task is drawn when it comes up
_P_RANGE = (0.05, 0.95)  # of p_easy and p_hard, as in the authors' code
_P_STEP = 0.01


class GresoSelector:
    """GRESO (arXiv:2506.02177): a task that comes up in an epoch is skipped with probability 1 - max(p**z, 0.01).

    z is how many of its last groups in a row had zero variance: all rollouts passed (their metric was above 0), or none
    did. p is p_easy where all of the last one passed, and p_hard where none did. Both are adapted: where the share of
    zero-variance groups of their sort, among the tasks that came back, is at least its target, p is lowered by 0.01, so
    that more is skipped, else raised.

    Epochs are those of `EpochSelector`: appended tasks join the running one, and it is tasks that come back that are
    skipped: in the first epoch it draws as `epoch` does. Ids within a draw are distinct; where the store has fewer
    than n tasks, each comes once before any comes again. The data never end: after max_candidates_per_task * n tasks
    have come up in a draw, those skipped most narrowly are drawn.

    Deviations: p is adapted after every so many groups, not after every step; the refill is not the selector's part.

    Args:
      seed: 0 <= seed < 2**64.
      p_easy, p_hard: where they begin, in 0.05 to 0.95, which they never leave.
      target_easy, target_hard: the shares aimed at; by default a quarter in all, one third of it easy.
      groups_per_update: after how many groups of tasks that came back the two are adapted.
      max_candidates_per_task: bounds the search in one draw.
    """

    def __init__(
        self,
        seed: int,
        p_easy: float = 0.5,
        p_hard: float = 0.5,
        target_easy: float = 1 / 12,
        target_hard: float = 1 / 6,
        groups_per_update: int = 64,
        max_candidates_per_task: int = 16,
    ):
        for name, value, lowest, highest in (
            ("p_easy", p_easy, *_P_RANGE),
            ("p_hard", p_hard, *_P_RANGE),
            ("target_easy", target_easy, 0, 1),
            ("target_hard", target_hard, 0, 1),
            ("groups_per_update", groups_per_update, 1, math.inf),
            ("max_candidates_per_task", max_candidates_per_task, 1, math.inf),
        ):
            if not lowest <= value <= highest:
                raise ValueError(f"{name} must lie in {lowest} to {highest}, got {value}")
        self._seed = checked_seed(seed)
        self._epochs = EpochSelector(seed)
        self._p_easy, self._p_hard = p_easy, p_hard
        self._target_easy, self._target_hard = target_easy, target_hard
        self._groups_per_update = groups_per_update
        self._max_candidates_per_task = max_candidates_per_task
        self._num_considered = 0
        self._streaks = np.zeros(0, np.int32)  # by task: z, negative where none passed
        self._counted = [0, 0, 0]  # since the last update: groups, all passed, none passed

    @property
    def p_easy(self) -> float:
        """The base of the probability that a task is kept whose last group was all right."""
        return self._p_easy

    @property
    def p_hard(self) -> float:
        """The base of the probability that a task is kept whose last group was all wrong."""
        return self._p_hard

    def draw(self, n: int, store: "TaskStore") -> list[int]:
        """Returns n ids; none where the store is empty."""
        drawn: list[int] = []
        while len(drawn) < n and len(store):
            drawn += self._choose(min(n - len(drawn), len(store)), store)
        return drawn

    def observe(self, outcome: Outcome) -> None:
        """Learns from one judged group; one with fewer than two live rollouts says nothing of their variance."""
        if outcome.num_live < 2:
            return
        all_passed = not outcome.signal and outcome.num_positive > 0
        none_passed = not outcome.signal and outcome.num_positive == 0
        if outcome.task_id >= len(self._streaks):
            grown = np.zeros(max(2 * len(self._streaks), outcome.task_id + 1), np.int32)
            grown[: len(self._streaks)] = self._streaks
            self._streaks = grown
        length = abs(int(self._streaks[outcome.task_id])) + 1
        self._streaks[outcome.task_id] = length * (all_passed - none_passed)
        if outcome.visit:
            self._count(all_passed, none_passed)

    def num_selectable(self, store: "TaskStore") -> int:
        """Returns how many of the store's tasks would be drawn if all came up, on average."""
        streaks = self._streaks[: len(store)]
        shortest = int(streaks.min(initial=0))
        counts = np.bincount(streaks - shortest)
        skipped = 1 - self._kept(np.arange(len(counts)) + shortest)
        return len(store) - round(float(counts @ skipped))

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed, the place in the epoch, and what is known of each task."""
        return {
            "seed": self._seed,
            "epochs": self._epochs.state_dict(),
            "num_considered": self._num_considered,
            "p": [self._p_easy, self._p_hard],
            "counted": list(self._counted),
            "streaks": packed(np.trim_zeros(self._streaks, "b")),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another seed."""
        refuse_other_seed(state, self._seed)
        self._epochs.load_state_dict(state["epochs"])
        self._num_considered = state["num_considered"]
        self._p_easy, self._p_hard = state["p"]
        self._counted = list(state["counted"])
        self._streaks = unpacked(state["streaks"], np.int32)

    def _choose(self, n: int, store: "TaskStore") -> list[int]:
        """Returns n distinct ids of a store of at least n tasks."""
        chosen: dict[int, None] = {}  # in order
        skipped: dict[int, float] = {}
        num_left = n * self._max_candidates_per_task
        while len(chosen) < n and num_left:
            count = min(n - len(chosen), num_left)
            ids = self._epochs.draw(count, store)
            unit = uniforms(self._seed, "greso", count, start=self._num_considered)
            margins = unit / self._kept(self._streaks_of(np.array(ids)))  # below 1 where the task is drawn
            self._num_considered += count
            num_left -= count
            for task_id, margin in zip(ids, margins.tolist(), strict=True):
                if margin < 1:
                    chosen[task_id] = None
                else:
                    skipped[task_id] = min(margin, skipped.get(task_id, margin))
        narrowly = sorted(skipped.keys() - chosen.keys(), key=lambda task_id: (skipped[task_id], task_id))
        chosen.update(dict.fromkeys(narrowly[: n - len(chosen)]))
        while len(chosen) < n:  # an epoch ended, and few distinct ones came up
            chosen.update(dict.fromkeys(self._epochs.draw(1, store)))
        return list(chosen)

    def _streaks_of(self, ids: np.ndarray) -> np.ndarray:
        streaks = np.zeros(len(ids), np.int32)
        known = ids < len(self._streaks)
        streaks[known] = self._streaks[ids[known]]
        return streaks

    def _kept(self, streaks: np.ndarray) -> np.ndarray:
        """Returns the probability with which a task is drawn when it comes up; 1 without a streak."""
        p = np.where(streaks > 0, self._p_easy, self._p_hard)
        return np.maximum(p ** np.abs(streaks), _MIN_KEPT)

    def _count(self, all_passed: bool, none_passed: bool) -> None:
        self._counted = [a + b for a, b in zip(self._counted, (1, all_passed, none_passed), strict=True)]
        num_groups, num_easy, num_hard = self._counted
        if num_groups == self._groups_per_update:
            self._p_easy = _adapted(self._p_easy, num_easy / num_groups, self._target_easy)
            self._p_hard = _adapted(self._p_hard, num_hard / num_groups, self._target_hard)
            self._counted = [0, 0, 0]


def _adapted(p: float, share: float, target: float) -> float:
    lowest, highest = _P_RANGE
    return max(p - _P_STEP, lowest) if share >= target else min(p + _P_STEP, highest)
