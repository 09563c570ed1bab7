"""Who is dispatched when, and which ready groups a step trains on. Plain Python without JAX.

A schedule looks at the controller's state and answers four questions; it changes nothing but its own state. The
controller books what follows, so that a schedule cannot leak a group.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from dynrl.config import DynamicSamplingConfig
from dynrl.rollout.ledger import Ledger, Phase
from dynrl.types import Verdict


@dataclass(frozen=True)
class Capabilities:
    """What a schedule does, for start-up checks and for the controller's bookkeeping."""

    stamps_steps: bool = False  # each dispatched group belongs to one step
    gates_admission: bool = True  # dispatching depends on versions or on what is open
    evicts: bool = False  # ready groups can become too old


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

    def on_end(self, verdict: Verdict) -> None:
        """A group was judged."""
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

    def exhausted(self, view: View) -> str | None:
        """Why no more groups may be drawn for this step, or None."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        ...


@dataclass
class RoundsState:
    """Counts within the step being filled."""

    num_rounds: int = 0
    fruitless_rounds: int = 0  # the last so many rounds kept nothing
    judged_in_round: int = 0
    kept_in_round: int = 0


class Rounds:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): whole rounds, until B groups with signal are there.

    A round is dispatched when nothing is in flight and the ready groups do not fill the step. It has
    `oversample` groups per missing one (`refill = "deficit"`), or per group of a whole step (`refill = "full"`, as
    published). Ready groups are trained in dispatch order, so that short answers get no preference. All groups of
    one round share one replacement index: round k of a step replaces what round k - 1 dropped.

    Two budgets: `max_num_gen_batches` rounds per step (0 = no cap), and `max_replacements_per_slot` replacement
    rounds in a row that keep nothing, whatever the cap.
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
        levels = view.ledger.levels
        missing = view.batch_size - levels[Phase.READY]
        if levels[Phase.IN_FLIGHT] or levels[Phase.JUDGING] or missing <= 0:
            return 0
        wanted = view.batch_size if self._config.refill == "full" else missing
        return math.ceil(wanted * self._config.oversample)

    def replacement_index(self) -> int:
        """The number of rounds that this step has had."""
        return self._state.num_rounds

    def on_dispatch(self, num: int) -> None:
        """Begins a round."""
        s = self._state
        if s.num_rounds:
            s.fruitless_rounds = 0 if s.kept_in_round else s.fruitless_rounds + 1
        s.num_rounds += 1
        s.judged_in_round = s.kept_in_round = 0

    def on_end(self, verdict: Verdict) -> None:
        """Counts towards the round."""
        self._state.judged_in_round += 1
        self._state.kept_in_round += verdict is Verdict.KEPT

    def on_step(self) -> None:
        """A new step has all its rounds again."""
        self._state = RoundsState()

    def select(self, view: View) -> list[int] | None:
        """The B oldest ready groups, once the round is over and there are as many."""
        levels = view.ledger.levels
        if levels[Phase.IN_FLIGHT] or levels[Phase.JUDGING] or levels[Phase.READY] < view.batch_size:
            return None
        ready = view.ledger.ready()
        return [next(ready).ticket for _ in range(view.batch_size)]

    def evict(self, view: View) -> list[int]:
        """Carried groups older than `max_surplus_age_versions`."""
        oldest = view.version - self._config.max_surplus_age_versions
        return [t.ticket for t in view.ledger.ready() if t.version < oldest]

    def exhausted(self, view: View) -> str | None:
        """The budget that forbids another round, with its key."""
        s, config = self._state, self._config
        if config.max_num_gen_batches and s.num_rounds >= config.max_num_gen_batches:
            return f"dynamic_sampling.max_num_gen_batches = {config.max_num_gen_batches} rounds are used up"
        in_a_row = s.fruitless_rounds + (s.num_rounds > 0 and s.kept_in_round == 0)
        if in_a_row > config.max_replacements_per_slot:
            return (
                f"{in_a_row} rounds in a row kept nothing, more than dynamic_sampling.max_replacements_per_slot = "
                f"{config.max_replacements_per_slot} replacements"
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
