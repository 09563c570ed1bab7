"""What the controller is told, and what it answers. Plain records: an event holds everything its handling needs."""

from dataclasses import dataclass
from typing import NamedTuple

from dynrl.rollout.ledger import Ticket
from dynrl.types import Verdict


@dataclass(frozen=True)
class TasksDrawn:
    """The answer to a Draw: (task_id, visit) per task. Fewer than asked for means that the data ended."""

    draws: tuple[tuple[int, int], ...]
    requested: int


@dataclass(frozen=True)
class GroupsGenerated:
    """The sampler has finished these groups; the verifiers have them."""

    tickets: tuple[int, ...]


class Judgement(NamedTuple):
    """A group's verdict. `pattern` is mixed, all_pass, all_fail, uniform or too_long, for messages."""

    ticket: int
    verdict: Verdict
    pattern: str


@dataclass(frozen=True)
class GroupsJudged:
    """These groups, of one sync point, have their verdicts. They are booked in this order, then it is decided once."""

    judgements: tuple[Judgement, ...]


@dataclass(frozen=True)
class StepTrained:
    """The batch of a Train command went through the optimizer; the weights have now seen `version` updates."""

    version: int


@dataclass(frozen=True)
class StopRequested:
    """Someone outside asks for an end."""

    reason: str


@dataclass(frozen=True)
class Resumed:
    """The state is new or was restored: work begins, and what was under way is dispatched again."""


Event = TasksDrawn | GroupsGenerated | GroupsJudged | StepTrained | StopRequested | Resumed


@dataclass(frozen=True)
class Draw:
    """Draw n tasks from the selector and answer with TasksDrawn."""

    num: int


@dataclass(frozen=True)
class Dispatch:
    """Have these groups generated and judged."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True)
class Train:
    """Train on these groups and answer with StepTrained. Fewer than B tickets make a short step."""

    tickets: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Free:
    """These ready groups will not be trained; their payloads can go."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Warn:
    """Tell the user."""

    message: str


@dataclass(frozen=True)
class Stop:
    """The run ends. `failed` means that it could not go on."""

    reason: str
    failed: bool = False


Command = Draw | Dispatch | Train | Free | Warn | Stop
