"""What the controller is told, and what it answers. Plain records: an event holds everything its handling needs."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dynrl.rollout.ledger import Ticket
from dynrl.types import Verdict

Cause = Literal["", "infra", "data"]


class Drawn(NamedTuple):
    """One drawn task."""

    task_id: int
    visit: int
    source: str = ""
    base: bool = True


@dataclass(frozen=True)
class TasksDrawn:
    """The answer to a Draw. Fewer than asked for means that the data ended."""

    draws: tuple[Drawn, ...]
    requested: int


@dataclass(frozen=True)
class GroupsGenerated:
    """The sampler has finished these groups; the verifiers have them."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class GroupsDeferred:
    """These groups are judged later, by what becomes of others. Their places go to fresh draws."""

    tickets: tuple[int, ...]


class Judgement(NamedTuple):
    """A group's verdict.

    Attributes:
      ticket: the group.
      verdict: what became of it.
      pattern: mixed, all_pass, all_fail, uniform or too_long, for messages.
      cause: why it FAILED: infrastructure (tried again), or the task's data. Empty: it is not tried again.
      spread: of the metric over the live rollouts.
      signal: whether a FILTERED group carries some, which the configured filter refused.
    """

    ticket: int
    verdict: Verdict
    pattern: str
    cause: Cause = ""
    spread: float = 0.0
    signal: bool = False


@dataclass(frozen=True)
class GroupsJudged:
    """These groups, of one sync point, have their verdicts. They are booked in this order, then it is decided once."""

    judgements: tuple[Judgement, ...]


@dataclass(frozen=True)
class AttemptsFailed:
    """Infrastructure lost these groups before they were judged: a deadline passed, or a worker is gone."""

    tickets: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class StepTrained:
    """The batch of a Train command went through the optimizer, and the sampler has the weights of this version."""

    version: int


@dataclass(frozen=True)
class StopRequested:
    """Someone outside asks for an end."""

    reason: str


@dataclass(frozen=True)
class Resumed:
    """The state is new or was restored: work begins.

    `in_flight`: whether sampler and verifiers were restored with their work; else it is dispatched again.
    """

    in_flight: bool = False


Event = (
    TasksDrawn | GroupsGenerated | GroupsDeferred | GroupsJudged | AttemptsFailed | StepTrained | StopRequested
    | Resumed
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """Draw n tasks from the selector and answer with TasksDrawn."""

    num: int


@dataclass(frozen=True)
class Dispatch:
    """Have these groups generated and judged."""

    tickets: tuple[Ticket, ...]


@dataclass(frozen=True)
class Retry:
    """Cancel what is left of this group's attempt, and dispatch it again after a delay."""

    ticket: Ticket
    delay_secs: float


@dataclass(frozen=True)
class Cancel:
    """Nobody waits for these groups any more."""

    tickets: tuple[int, ...]


@dataclass(frozen=True)
class Train:
    """Train on these groups and answer with StepTrained. Fewer than B tickets make a short step."""

    tickets: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Free:
    """These judged groups will not be trained; their payloads can go."""

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


Command = Draw | Dispatch | Retry | Cancel | Train | Free | Warn | Stop
