"""DAPO's dynamic sampling in whole rounds (arXiv:2503.14476, section 3.2)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dynrl.config import DynamicSamplingConfig, RunConfig
from dynrl.rollout.ledger import Phase
from dynrl.rollout.schedules.base import BaseSchedule, Capabilities, Exhausted, View, oldest_first
from dynrl.types import Verdict


@dataclass
class RoundsState:
    """Counts within the step being filled."""

    num_rounds: int = 0
    not_kept_in_row: int = 0  # groups judged since the last that was kept, failed ones apart


class Rounds(BaseSchedule):
    """Whole rounds, until B groups with signal are there.

    A round is dispatched when nothing is in flight and the ready groups do not fill the step. It has as many groups
    as `oversample` wants for the missing ones (`refill = "deficit"`), or for a whole step (`refill = "full"`, as
    published). Ready groups are trained in dispatch order, so that short answers get no preference. All groups of
    one round share one replacement index: round k of a step replaces what round k - 1 dropped.

    Two budgets: `max_num_gen_batches` rounds per step (0 = no cap), and, whatever the cap, groups in a row that are
    not kept: as many as `max_replacements_per_slot` replacements of each of the B slots. Groups are counted, not
    rounds, because the last rounds of a step are small: one group is missing, and one in a hundred is kept.
    """

    capabilities = Capabilities(has_rounds=True)

    def __init__(self, config: RunConfig) -> None:
        self._config, self._batch_size = config.dynamic_sampling, config.num_prompts_per_step
        self._training = self._batch_size if config.schedule.mode == "async" else 0
        self._state = RoundsState()

    @property
    def round_number(self) -> int:
        """Rounds dispatched for the step being filled."""
        return self._state.num_rounds

    @property
    def max_open(self) -> int:
        """What a step may leave over, the largest round, and a batch where it is trained meanwhile."""
        largest = math.ceil(self._batch_size * largest_factor(self._config))
        return self._batch_size - 1 + largest + self._training

    def admit(self, view: View) -> Sequence[int]:
        """A round when everything dispatched has been judged and the step is not full."""
        missing = view.size(view.filling) - view.ledger.level(Phase.READY)
        if view.ledger.num_running or missing <= 0:
            return []
        wanted = self._batch_size if self._config.refill == "full" else missing
        return [-1] * view.wanted(wanted, self._batch_size)

    def on_dispatch(self, num: int) -> None:
        """Begins a round."""
        self._state.num_rounds += 1

    def on_end(self, verdicts: Sequence[Verdict]) -> None:
        """Counts groups that were not kept."""
        for verdict in verdicts:
            if verdict is Verdict.KEPT:
                self._state.not_kept_in_row = 0
            elif verdict is not Verdict.FAILED:  # which has budgets of its own
                self._state.not_kept_in_row += 1

    def on_step(self) -> None:
        """A new step has all its rounds again."""
        self._state = RoundsState()

    def select(self, view: View) -> list[int] | None:
        """The oldest ready groups, once the round is over and there are enough."""
        size = view.size(view.filling)
        if view.ledger.num_running or view.ledger.level(Phase.READY) < size:
            return None
        return oldest_first(view, size)

    def oldest_version(self, view: View) -> int:
        """Carried groups may have `max_surplus_age_versions`."""
        return view.filling * view.versions_per_step - self._config.max_surplus_age_versions

    def exhausted(self, view: View) -> Exhausted | None:
        """The budget that forbids another round, with its key."""
        s, cap, replacements = self._state, self._config.max_num_gen_batches, self._config.max_replacements_per_slot
        if cap and s.num_rounds >= cap:
            return Exhausted(
                f"dynamic_sampling.max_num_gen_batches = {cap} rounds are used up",
                "dynamic_sampling.max_num_gen_batches = 0 lifts the cap on rounds",
            )
        if s.not_kept_in_row >= (1 + replacements) * self._batch_size:
            return Exhausted(
                f"{s.not_kept_in_row} groups in a row were not kept, which uses up "
                f"dynamic_sampling.max_replacements_per_slot = {replacements} replacements of each of "
                f"{self._batch_size}",
                f"a dynamic_sampling.max_replacements_per_slot above {replacements} goes on for longer",
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._state = RoundsState(**state)


def largest_factor(config: DynamicSamplingConfig) -> float:
    """Groups dispatched per group that is missing, at most."""
    if isinstance(config.oversample, str):
        return config.max_oversample if config.oversample == "adaptive" else 1.0
    return config.oversample
