"""Who is dispatched when, and which ready groups a step trains on. Plain Python without JAX.

A schedule looks at the controller's state and answers four questions; it changes nothing but its own state. The
controller books what follows, so that a schedule cannot leak a group.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from dynrl.config import DynamicSamplingConfig
from dynrl.rollout.ledger import Ledger, Phase
from dynrl.types import Verdict


@dataclass(frozen=True)
class Capabilities:
    """What a schedule does, for start-up checks and for the controller's bookkeeping."""

    stamps_steps: bool = False  # each dispatched group belongs to one step
    gates_admission: bool = True  # dispatching depends on versions or on what is open
    evicts: bool = False  # ready groups can become too old


class Exhausted(NamedTuple):
    """A budget that is used up."""

    why: str  # with the key and its value
    advice: str  # what would lift it


class View(Protocol):
    """What a schedule may look at."""

    @property
    def ledger(self) -> Ledger:
        """The open tickets."""
        ...

    @property
    def version(self) -> int:
        """Of the newest weights."""
        ...

    @property
    def batch_size(self) -> int:
        """B."""
        ...


class Schedule(Protocol):
    """The order of work."""

    capabilities: Capabilities

    @property
    def num_rounds(self) -> int:
        """Rounds dispatched for the step being filled; 0 where a schedule has none."""
        ...

    def admit(self, view: View) -> int:
        """How many groups to draw and dispatch now."""
        ...

    def replacement_index(self) -> int:
        """The replacement index of what is dispatched next."""
        ...

    def on_dispatch(self, num: int) -> None:
        """`num` groups were dispatched."""
        ...

    def on_end(self, verdicts: Sequence[Verdict]) -> None:
        """Groups were judged, in this order."""
        ...

    def on_step(self) -> None:
        """The step was trained, or given up; the next one begins."""
        ...

    def select(self, view: View) -> list[int] | None:
        """The B tickets to train on now, or None."""
        ...

    def evict(self, view: View) -> list[int]:
        """Ready tickets that have become too old."""
        ...

    def exhausted(self, view: View) -> Exhausted | None:
        """Why no more groups may be drawn for this step, or None."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        ...


def _round_runs(view: View) -> bool:
    return bool(view.ledger.level(Phase.IN_FLIGHT) or view.ledger.level(Phase.JUDGING))


@dataclass
class RoundsState:
    """Counts within the step being filled."""

    num_rounds: int = 0
    not_kept_in_row: int = 0  # groups judged since the last that was kept


class Rounds:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): whole rounds, until B groups with signal are there.

    A round is dispatched when nothing is in flight and the ready groups do not fill the step. It has
    `oversample` groups per missing one (`refill = "deficit"`), or per group of a whole step (`refill = "full"`, as
    published). Ready groups are trained in dispatch order, so that short answers get no preference. All groups of
    one round share one replacement index: round k of a step replaces what round k - 1 dropped.

    Two budgets: `max_num_gen_batches` rounds per step (0 = no cap), and, whatever the cap, groups in a row that are
    not kept: as many as `max_replacements_per_slot` replacements of each of the B slots. Groups are counted, not
    rounds, because the last rounds of a step are small: one group is missing, and one in a hundred is kept.
    """

    capabilities = Capabilities(stamps_steps=False, gates_admission=True, evicts=True)

    def __init__(self, config: DynamicSamplingConfig, batch_size: int) -> None:
        self._config = config
        self._batch_size = batch_size
        self._state = RoundsState()

    @property
    def num_rounds(self) -> int:
        """Rounds dispatched for the step being filled."""
        return self._state.num_rounds

    @staticmethod
    def max_groups_per_round(config: DynamicSamplingConfig, batch_size: int) -> int:
        """The largest round."""
        return math.ceil(batch_size * config.oversample)

    def admit(self, view: View) -> int:
        """A round when everything dispatched has been judged and the step is not full; else 0."""
        missing = view.batch_size - view.ledger.level(Phase.READY)
        if _round_runs(view) or missing <= 0:
            return 0
        wanted = view.batch_size if self._config.refill == "full" else missing
        return math.ceil(wanted * self._config.oversample)

    def replacement_index(self) -> int:
        """The number of rounds that this step has had."""
        return self._state.num_rounds

    def on_dispatch(self, num: int) -> None:
        """Begins a round."""
        self._state.num_rounds += 1

    def on_end(self, verdicts: Sequence[Verdict]) -> None:
        """Counts groups that were not kept."""
        for i, verdict in enumerate(reversed(verdicts)):
            if verdict is Verdict.KEPT:
                self._state.not_kept_in_row = i
                return
        self._state.not_kept_in_row += len(verdicts)

    def on_step(self) -> None:
        """A new step has all its rounds again."""
        self._state = RoundsState()

    def select(self, view: View) -> list[int] | None:
        """The B oldest ready groups, once the round is over and there are as many."""
        if _round_runs(view) or view.ledger.level(Phase.READY) < view.batch_size:
            return None
        return [t.ticket for t in view.ledger.in_order(Phase.READY)[: view.batch_size]]

    def evict(self, view: View) -> list[int]:
        """Carried groups older than `max_surplus_age_versions`; nothing changes while a round runs."""
        if _round_runs(view):
            return []
        oldest = view.version - self._config.max_surplus_age_versions
        return [t.ticket for t in view.ledger.in_order(Phase.READY) if t.version < oldest]

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


def make_schedule(name: str, config: DynamicSamplingConfig, batch_size: int) -> Rounds:
    """A schedule by name. Raises ValueError for an unknown one."""
    if name != "rounds":
        raise ValueError(f"schedule.name: {name!r} is not a schedule; there is: rounds")
    return Rounds(config, batch_size)
