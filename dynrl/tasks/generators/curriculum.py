"""The generator `procedural_curriculum`: fresh tasks of the levels that the policy passes about half of the time."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from dynrl.tasks.base import GradedSource, TaskSource, task_hash
from dynrl.tasks.generators.base import GeneratorContext, TaskGenerator
from dynrl.tasks.generators.beliefs import Evidence, level_shares, levels_in_play
from dynrl.tasks.mixture import Mixture
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.types import Task

_FIRST_SEED = 2**40  # those of training and evaluation are far below
_MAX_TRIES = 10  # draws in a row that give no new task, before a level is left alone for this time


class ProceduralCurriculum(TaskGenerator):
    """Moves the difficulty of sources that can write at any level (`GradedSource`) along with the policy.

    Each call spreads its tasks over levels by how near the target their pass rates are believed to be, from the
    outcomes of each kind (`level_shares` says how). A mixture's sources move each on its own, and keep their shares.
    Levels beyond those of the source are reached one at a time: the next harder one is tried as long as the hardest
    one known is passed now and then, the next easier one as long as the easiest is failed now and then.

    Tasks are those of increasing indices under a seed that training and evaluation do not use, without repetition
    within a call. A level that is not seen any more is forgotten by `half_life_versions`, what was seen of one that
    is by the outcomes' own decay.

    Args:
      num_tasks: how many tasks to propose each time, at least 1; fewer where the levels in reach have no more.
      target: the pass rate to aim at, in (0, 1).
      floor: the share of tasks that is spread evenly over all levels known, in (0, 1]: none is dropped for good.
      half_life_versions: what was seen of a level counts half when another was last seen so many versions later.
      max_prompt_chars: levels and tasks with longer prompts are not proposed; None where nothing is too long. Without
        it a policy that passes everything is led to prompts that admission refuses, and stays there.
      seed: of the tasks, in [0, 2**32).

    Raises:
      ValueError: an argument is out of range.
    """

    def __init__(
        self,
        num_tasks: int = 32,
        target: float = 0.5,
        floor: float = 0.1,
        half_life_versions: float = 30.0,
        max_prompt_chars: int | None = None,
        seed: int = 0,
    ) -> None:
        for name, value, is_right, rule in (
            ("num_tasks", num_tasks, num_tasks >= 1, "be at least 1"),
            ("target", target, 0 < target < 1, "lie in (0, 1)"),
            ("floor", floor, 0 < floor <= 1, "lie in (0, 1]"),
            ("half_life_versions", half_life_versions, half_life_versions > 0, "be positive"),
            ("max_prompt_chars", max_prompt_chars, max_prompt_chars is None or max_prompt_chars > 0, "be positive"),
            ("seed", seed, 0 <= seed < 2**32, "lie in [0, 2**32)"),
        ):
            if not is_right:
                raise ValueError(f"procedural_curriculum: {name} must {rule}, got {value}")
        self._num_tasks, self._seed = num_tasks, _FIRST_SEED + seed
        self._target, self._floor, self._half_life_versions = target, floor, half_life_versions
        self._max_chars = float("inf") if max_prompt_chars is None else max_prompt_chars
        self._next_index = 0
        self._ladders: list[_Ladder] = []
        self._source: TaskSource | None = None  # that the ladders are of

    def propose(self, context: GeneratorContext) -> list[Task]:
        """New tasks, distinct by `task_hash`. Raises ValueError where no source can write at a level of choice."""
        if self._source is not context.source:
            self._ladders, self._source = _ladders(context.source), context.source
        sources, share_E = self._levels(context.outcomes)
        num_tasks = min(self._num_tasks, context.max_tasks)
        tasks: list[Task] = []
        index, seen = self._next_index, set[str]()
        while len(tasks) < num_tasks and share_E.any():
            for which in _spread(share_E, num_tasks - len(tasks), context.rng):
                if share_E[which]:
                    context.check()
                    task, index = self._fresh(sources[which], index, seen)
                    if task is None:
                        share_E[which] = 0
                    else:
                        tasks.append(task)
        context.check()
        self._next_index = index
        return tasks

    def state_dict(self) -> dict[str, Any]:
        """The next task's index."""
        return {"next_index": self._next_index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with the saved index."""
        self._next_index = state["next_index"]

    def _levels(self, outcomes: TaskOutcomes) -> tuple[list[TaskSource], np.ndarray]:
        """Returns a source for each level in play whose prompts fit, and each one's share of the tasks, not summed."""
        sources: list[TaskSource] = []
        shares = [np.zeros(0)]
        for ladder in self._ladders:
            evidence = ladder.evidence(outcomes, self._half_life_versions)
            at_E, rate_E = levels_in_play(ladder.own, evidence, len(ladder.levels), self._target)
            written = [ladder.source_at(at) for at in at_E.tolist()]
            fits_E = np.array([(source.max_prompt_chars or 0) <= self._max_chars for source in written])
            sources += itertools.compress(written, fits_E)
            shares.append(ladder.share * level_shares(rate_E[fits_E], self._target, self._floor))
        return sources, np.concatenate(shares)

    def _fresh(self, source: TaskSource, first: int, seen: set[str]) -> tuple[Task | None, int]:
        """Returns a task that is new and fits, and the index behind it; no task where the level seems to have none."""
        for index in range(first, first + _MAX_TRIES):
            try:
                task = source.task(self._seed, index)
            except ValueError:  # finds none
                continue
            name = task_hash(task.prompt)
            if name not in seen and len(task.prompt) <= self._max_chars:
                seen.add(name)
                return task, index + 1
        return None, first + _MAX_TRIES


class _Ladder:
    """The levels of one source, from the easiest to the hardest, and what is known of them."""

    def __init__(self, source: GradedSource, share: float) -> None:
        self.levels = source.reachable_levels()
        self.share = share
        self.own = [self.levels.index(level) for level in source.levels]
        self._source = source
        (self._name,) = source.verifiers
        self._sources: dict[int, TaskSource] = {}

    def source_at(self, at: int) -> TaskSource:
        """The source at a position of the ladder."""
        if at not in self._sources:
            self._sources[at] = self._source.at_level(self.levels[at])
        return self._sources[at]

    def evidence(self, outcomes: TaskOutcomes, half_life_versions: float) -> Evidence:
        """What was passed and failed at each level seen. The longer ago that was, the less it counts."""
        kinds, counts = outcomes.kinds, outcomes.by_kind
        is_seen = counts.attempts(range(len(kinds))) > 0
        keys = [
            key
            for key, (name, level) in enumerate(kinds)
            if is_seen[key] and name == self._name and level in self.levels
        ]
        at_K = np.array([self.levels.index(kinds[key][1]) for key in keys], np.int64)
        version_K = counts.last_version(keys)
        worth_K = 0.5 ** ((version_K.max(initial=-1) - version_K) / half_life_versions)
        passes_K = counts.successes(keys)
        return Evidence(at_K, passes_K, counts.attempts(keys) - passes_K, worth_K)


def _ladders(source: TaskSource) -> list[_Ladder]:
    ladders, reasons = [], []
    for part, share in _parts(source):
        if not hasattr(part, "reachable_levels"):
            reasons.append(f"{part.name} has no levels to choose from")
            continue
        try:
            ladders.append(_Ladder(cast(GradedSource, part), share))
        except ValueError as error:
            reasons.append(str(error))
    if not ladders:
        raise ValueError(f"procedural_curriculum: no source can write at a level of choice: {'; '.join(reasons)}")
    return ladders


def _parts(source: TaskSource) -> Iterator[tuple[TaskSource, float]]:
    if not isinstance(source, Mixture):
        yield source, 1.0
        return
    for part, share in source.parts:
        for inner, inner_share in _parts(part):
            yield inner, share * inner_share


def _spread(share_E: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """Returns `count` places, each as often as its share says to within one, in random order."""
    at = (rng.random() + np.arange(count)) / count * share_E.sum()
    places = np.minimum(np.searchsorted(np.cumsum(share_E), at, side="right"), len(share_E) - 1)
    return rng.permutation(places).tolist()
