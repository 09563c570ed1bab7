"""What a schedule is. Plain Python without JAX.

A schedule looks at the controller's state and answers: how many groups to dispatch now, which ready groups a step
trains on, which are too old. It changes nothing but its own state. The controller books what follows, gives back the
credit of whatever is dropped and keeps replacements in their lineages, so that a schedule cannot leak a group.

Versions count optimizer updates; a step is `view.versions_per_step` of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dynrl.rollout.ledger import Ledger, Phase
from dynrl.types import Verdict


@dataclass(frozen=True)
class Capabilities:
    """What a schedule does, for start-up checks and for the controller's bookkeeping.

    Attributes:
      stamps_steps: each dispatched group belongs to one step, and a hole in a step is filled by lending.
      gates_admission: dispatching depends on versions; otherwise only on what is open.
      has_rounds: groups are dispatched in rounds, whose numbers are their replacement indices.
      completion_order: which groups a step trains on depends on the order in which they finish.
    """

    stamps_steps: bool = False
    gates_admission: bool = True
    has_rounds: bool = False
    completion_order: bool = False


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
        """Of the sampler's weights: what is dispatched now has it."""
        ...

    @property
    def versions_per_step(self) -> int:
        """Optimizer updates of a step."""
        ...

    @property
    def filling(self) -> int:
        """The step that is being filled: the first one that has not been handed to the trainer."""
        ...

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        ...

    def size(self, step: int) -> int:
        """Groups that a step trains on: B, or fewer where slots of it were given up."""
        ...

    def wanted(self, num_kept: int, full: int) -> int:
        """Groups to dispatch so that `num_kept` of them are kept, as `oversample` has it.

        Args:
          num_kept: groups that are missing.
          full: B, or B for each of several steps: `max_oversample` times as many are the most.
        """
        ...


class Schedule(Protocol):
    """The order of work."""

    capabilities: Capabilities

    def admit(self, view: View) -> Sequence[int]:
        """An entry for each group to dispatch now: the step that is to train it, or -1 where no step is stamped.

        It is asked more often than it is followed, and must change nothing.
        """
        ...

    def select(self, view: View) -> list[int] | None:
        """The ready groups to train on now, exactly `view.size(view.filling)` of them, or None."""
        ...

    def oldest_version(self, view: View) -> int:
        """Groups that were dispatched by older weights than these are too old to train on."""
        ...

    def evict(self, view: View) -> list[int]:
        """Ready groups to drop because there are too many."""
        ...

    def exhausted(self, view: View) -> Exhausted | None:
        """Why no more groups may be dispatched for this step, or None. Budgets of lineages are the controller's."""
        ...

    def on_dispatch(self, num: int) -> None:
        """`num` groups were dispatched."""
        ...

    def on_end(self, verdicts: Sequence[Verdict]) -> None:
        """Groups were judged, in this order."""
        ...

    def on_step(self) -> None:
        """The step was handed to the trainer, or given up; the next one begins."""
        ...

    @property
    def round_number(self) -> int:
        """Rounds dispatched for the step being filled; 0 where a schedule has none."""
        ...

    @property
    def max_open(self) -> int:
        """Groups that are open at once, at most; the group buffer follows it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        ...


class BaseSchedule:
    """Answers that most schedules give; what is left to them is `admit`, `select` and `max_open`."""

    capabilities = Capabilities()

    def oldest_version(self, view: View) -> int:
        """No group is too old."""
        return 0

    def evict(self, view: View) -> list[int]:
        """Nothing."""
        return []

    def exhausted(self, view: View) -> Exhausted | None:
        """No budget of its own."""
        return None

    def on_dispatch(self, num: int) -> None:
        """Keeps no account."""

    def on_end(self, verdicts: Sequence[Verdict]) -> None:
        """Keeps no account."""

    def on_step(self) -> None:
        """Keeps no account."""

    @property
    def round_number(self) -> int:
        """Has no rounds."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def oldest_first(view: View, num: int) -> list[int]:
    """The first `num` ready groups in dispatch order."""
    return sorted(view.ledger.open[Phase.READY])[:num]
