"""What the controller knows. Plain Python; JAX, clocks and I/O are elsewhere."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynrl.config import RunConfig
from dynrl.rollout.events import Command, Free, Stop
from dynrl.rollout.keep_rate import KeepRate
from dynrl.rollout.ledger import Dropped, Ledger, Phase, Ticket
from dynrl.rollout.schedules import Schedule
from dynrl.types import Verdict

TOTALS = (
    "num_rounds", "replaced_groups", "promoted_groups", "retried_groups", "relaxed_groups", "exhausted_slots",
    "short_steps", "unfilled_steps",
)  # fmt: skip


@dataclass
class ControllerState:
    """Everything the reducer knows; `state_dict` is JSON-able and bounded by what is open.

    Attributes:
      step: optimizer steps made.
      version: of the sampler's weights.
      drawing: a stamp for each group of the Draw that is outstanding.
      training: whether a Train is outstanding; its tickets are in Phase.TRAINING.
      train_note: what is said of it.
      vacancies: replacement indices that wait for a draw, by the step that lacks a group (-1 without stamps).
      shortfall: slots that were given up, by step.
      why_short: why slots were given up, by step.
      held: spread of the groups in Phase.HELD.
      unfilled_steps: attempts in a row to fill a step that came to nothing.
      scanned_for: the step for which ready groups were last looked through for old ones.
    """

    config: RunConfig
    schedule: Schedule
    ledger: Ledger = field(default_factory=Ledger)
    keep_rate: KeepRate = field(init=False)
    step: int = 0
    version: int = 0
    drawing: list[int] = field(default_factory=list)
    training: bool = False
    train_note: str = ""
    data_ended: bool = False
    stopped: bool = False
    vacancies: dict[int, list[int]] = field(default_factory=dict)
    shortfall: Counter[int] = field(default_factory=Counter)
    why_short: dict[int, str] = field(default_factory=dict)
    held: dict[int, float] = field(default_factory=dict)
    unfilled_steps: int = 0
    failed_in_row: int = 0
    scanned_for: int = -1
    last_failure: str = ""
    verdicts: Counter[str] = field(default_factory=Counter)  # of the step being filled, for messages
    patterns: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(TOTALS, 0)))  # of the run

    def __post_init__(self) -> None:
        self.keep_rate = KeepRate(self.batch_size, self.config.dynamic_sampling.fill_probability)

    # ---- What schedules look at ----

    @property
    def batch_size(self) -> int:
        """B."""
        return self.config.num_prompts_per_step

    @property
    def num_steps(self) -> int:
        """Of the run."""
        return self.config.num_steps

    @property
    def versions_per_step(self) -> int:
        """Optimizer updates of a step."""
        return self.config.versions_per_step

    @property
    def filling(self) -> int:
        """The step that is being filled."""
        return self.step + self.training

    @property
    def overlaps(self) -> bool:
        """Whether groups are dispatched and judged while a step is trained."""
        return self.config.schedule.mode == "async"

    def size(self, step: int) -> int:
        """Groups that a step trains on."""
        return self.batch_size - self.shortfall[step] if self.shortfall else self.batch_size

    def wanted(self, num_kept: int, full: int) -> int:
        """Groups to dispatch for `num_kept`; see `schedules.View`."""
        factor = self.config.dynamic_sampling.oversample
        if factor == "none":
            return num_kept
        if factor == "adaptive":
            limit = math.ceil(full * self.config.dynamic_sampling.max_oversample)
            return self.keep_rate.groups_for(num_kept, limit)
        return math.ceil(num_kept * float(factor))

    # ---- What happens to it ----

    def count(self, verdict: Verdict, tickets: Sequence[Ticket]) -> None:
        """Notes verdicts, for messages and the keep rate."""
        if tickets:
            self.verdicts[verdict] += len(tickets)
            self.keep_rate.ended(tickets, verdict)

    def drop(self, numbers: Sequence[int], reason: Dropped) -> list[Command]:
        """Ends groups whose payloads are in the buffer."""
        for number in numbers:
            self.held.pop(number, None)
        self.ledger.end(numbers, dropped=reason)
        return [Free(tuple(numbers))] if numbers else []

    def begin_step(self) -> list[Command]:
        """A step was handed to the trainer or given up: counts and budgets begin anew, its held groups are let go."""
        self.schedule.on_step()
        self.verdicts.clear()
        self.patterns.clear()
        for by_step in (self.shortfall, self.why_short):
            for step in [s for s in by_step if s < self.filling]:
                del by_step[step]
        held = self.ledger.open[Phase.HELD]
        return self.drop([n for n in self.held if held[n].for_step < self.filling], Dropped.FILTERED)

    def stop(self, reason: str, failed: bool = False) -> list[Command]:
        """Ends the run, once: of several reasons in one event the first one counts."""
        if self.stopped:
            return []
        self.stopped = True
        return [Stop(reason, failed)]

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ledger": self.ledger.state_dict(),
            "schedule": self.schedule.state_dict(),
            "keep_rate": self.keep_rate.state_dict(),
            **{name: getattr(self, name) for name in _PLAIN},
            **{name: list(getattr(self, name)) for name in ("drawing",)},
            **{name: [[k, v] for k, v in getattr(self, name).items()] for name in _KEYED},
            **{name: dict(getattr(self, name)) for name in _COUNTS},
            "vacancies": [[step, list(indices)] for step, indices in self.vacancies.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. A restored run is not stopped: it may have been given more steps."""
        self.ledger = Ledger.from_state_dict(state["ledger"])
        self.schedule.load_state_dict(state["schedule"])
        self.keep_rate.load_state_dict(state["keep_rate"])
        for name in _PLAIN:
            setattr(self, name, state[name])
        self.stopped, self.drawing = False, list(state["drawing"])
        self.shortfall, self.held = Counter(dict(state["shortfall"])), dict(state["held"])
        self.why_short = dict(state["why_short"])
        for name in _COUNTS:
            setattr(self, name, Counter(state[name]))
        self.vacancies = {step: list(indices) for step, indices in state["vacancies"]}


_PLAIN = (
    "step", "version", "training", "train_note", "data_ended", "unfilled_steps", "failed_in_row", "scanned_for",
    "last_failure",
)  # fmt: skip
_KEYED = ("shortfall", "why_short", "held")
_COUNTS = ("verdicts", "patterns", "totals")
