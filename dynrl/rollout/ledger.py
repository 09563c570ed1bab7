"""The book of every dispatched group (law 5). Plain Python: no JAX, no clock, no I/O.

    dispatched = trained + dropped{filtered, stale, evicted, cancelled, surplus} + failed
               + open{in_flight, judging, ready, held, training}

A ticket is one dispatched group. Only open tickets are held; ended ones are counted.
"""

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Phase(enum.StrEnum):
    """Where an open ticket is."""

    IN_FLIGHT = "in_flight"
    JUDGING = "judging"
    READY = "ready"
    HELD = "held"  # refused by the filter, and kept in case that the step cannot be filled otherwise
    TRAINING = "training"  # in the batch of a Train that is outstanding


class Dropped(enum.StrEnum):
    """Why a ticket ended without being trained or failing."""

    FILTERED = "filtered"
    STALE = "stale"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    SURPLUS = "surplus"


class Ticket(NamedTuple):
    """One dispatched group.

    Attributes:
      ticket: its number, in dispatch order; never reused.
      task_id: the task.
      visit: how many times the task had been drawn before.
      version: the policy version at dispatch.
      step: the step being filled at dispatch.
      replacement_index: 0 for a first attempt, one more along each replacement of a filtered group.
      for_step: the step that is to train it, under a schedule that stamps steps; else -1.
      attempts: how often it was dispatched; more than once when infrastructure failed.
      cohort: the number of the draw that it belongs to.
      source: of the task.
    """

    ticket: int
    task_id: int
    visit: int
    version: int
    step: int
    replacement_index: int
    for_step: int = -1
    attempts: int = 1
    cohort: int = 0
    source: str = ""


# A ticket may enter a phase from these. Back to IN_FLIGHT go retries.
_FROM = {
    Phase.IN_FLIGHT: (Phase.JUDGING, Phase.IN_FLIGHT),
    Phase.JUDGING: (Phase.IN_FLIGHT,),
    Phase.READY: (Phase.JUDGING, Phase.HELD, Phase.IN_FLIGHT),
    Phase.HELD: (Phase.JUDGING, Phase.IN_FLIGHT),
    Phase.TRAINING: (Phase.READY,),
}
_RUNNING = (Phase.IN_FLIGHT, Phase.JUDGING)


@dataclass
class Ledger:
    """Open tickets by phase, and run totals of ended ones."""

    next_ticket: int = 0
    trained: int = 0
    failed: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Dropped), 0))
    open: dict[Phase, dict[int, Ticket]] = field(default_factory=lambda: {phase: {} for phase in Phase})
    # Of what is open, for schedules that must not look through all of it at every event:
    running_of_step: Counter[int] = field(default_factory=Counter)  # in flight and judging, by for_step
    running_of_version: Counter[int] = field(default_factory=Counter)  # the same, by version
    ready_of_step: dict[int, dict[int, None]] = field(default_factory=dict)  # tickets, in the order they became ready

    @property
    def dispatched(self) -> int:
        """Tickets ever opened."""
        return self.next_ticket

    def level(self, phase: Phase) -> int:
        """How many open tickets are in a phase."""
        return len(self.open[phase])

    @property
    def num_running(self) -> int:
        """Groups that are being generated or judged."""
        return len(self.open[Phase.IN_FLIGHT]) + len(self.open[Phase.JUDGING])

    @property
    def num_open(self) -> int:
        """Groups that have not ended."""
        return sum(map(len, self.open.values()))

    def ready_for(self, step: int) -> int:
        """How many ready groups are stamped for a step."""
        return len(self.ready_of_step.get(step, ()))

    def dispatch(
        self, task_id: int, visit: int, version: int, step: int, replacement_index: int, *, for_step: int = -1,
        cohort: int = 0, source: str = "",
    ) -> Ticket:  # fmt: skip
        """Opens a ticket."""
        number = self.next_ticket
        ticket = Ticket(number, task_id, visit, version, step, replacement_index, for_step, 1, cohort, source)
        self.next_ticket += 1
        self._enter(Phase.IN_FLIGHT, ticket)
        return ticket

    def move(self, numbers: Iterable[int], phase: Phase) -> None:
        """Moves open tickets to another phase. Raises ValueError for one that is not open or cannot come there."""
        for number in numbers:
            for source in _FROM[phase]:
                if number in self.open[source]:
                    self._enter(phase, self._leave(source, number))
                    break
            else:
                raise ValueError(f"ticket {number} is {self.phase_of(number)}: it cannot become {phase}")

    def retry(self, number: int) -> Ticket:
        """Puts a running ticket in flight again, as another attempt."""
        phase = self.phase_of(number)
        if phase not in _RUNNING:
            raise ValueError(f"ticket {number} is {phase}: it cannot be tried again")
        ticket = self._leave(phase, number)
        ticket = ticket._replace(attempts=ticket.attempts + 1)
        self._enter(Phase.IN_FLIGHT, ticket)
        return ticket

    def stamp(self, number: int, step: int) -> None:
        """Gives an open ticket to another step."""
        phase = self.phase_of(number)
        self._enter(phase, self._leave(phase, number)._replace(for_step=step))

    def restamp(self, step: int, new: int) -> None:
        """Gives all open tickets of a step to another."""
        if step in self.ready_of_step:
            for number in list(self.ready_of_step[step]):
                self.stamp(number, new)
        if self.running_of_step[step]:
            for phase in _RUNNING:
                for number in [n for n, t in self.open[phase].items() if t.for_step == step]:
                    self.stamp(number, new)

    def restart(self) -> list[Ticket]:
        """Puts what was being judged back in flight, since the process that had it is gone; all that is in flight."""
        self.move(list(self.open[Phase.JUDGING]), Phase.IN_FLIGHT)
        return self.in_order(Phase.IN_FLIGHT)

    def end(self, numbers: Iterable[int], *, dropped: Dropped | None = None, failed: bool = False) -> list[Ticket]:
        """Closes tickets: dropped for a reason, failed, or else trained, which only one in training can be."""
        ended = []
        trained = dropped is None and not failed
        for number in numbers:
            phase = self.phase_of(number)
            if trained and phase is not Phase.TRAINING:
                raise ValueError(f"ticket {number} is {phase}: only a ready group that is in a batch can be trained")
            ended.append(self._leave(phase, number))
        self.trained += trained * len(ended)
        self.failed += failed * len(ended)
        if dropped is not None:
            self.dropped[dropped] += len(ended)
        return ended

    def in_order(self, phase: Phase) -> list[Ticket]:
        """The open tickets of a phase in dispatch order."""
        return sorted(self.open[phase].values())

    def running(self, number: int) -> Ticket:
        """A ticket that is in flight or being judged. Raises ValueError for any other."""
        for phase in _RUNNING:
            if (ticket := self.open[phase].get(number)) is not None:
                return ticket
        raise ValueError(f"ticket {number} is {self.phase_of(number)}: it has been judged already")

    def check_running(self, numbers: Iterable[int]) -> None:
        """Raises ValueError for a ticket that is neither in flight nor being judged."""
        for number in numbers:
            self.running(number)

    def phase_of(self, number: int) -> Phase:
        """Raises ValueError for a ticket that is not open."""
        for phase, tickets in self.open.items():
            if number in tickets:
                return phase
        raise ValueError(f"ticket {number} is not open: it never was, or it has ended already")

    def check(self) -> None:
        """Raises AssertionError when a ticket was lost or counted twice."""
        if self.dispatched != self.trained + self.failed + sum(self.dropped.values()) + self.num_open:
            raise AssertionError(f"the ledger does not balance: {self.totals()}, {self.num_open} open tickets")

    def totals(self) -> dict[str, Any]:
        """Counts for metrics and messages."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            **{str(phase): len(tickets) for phase, tickets in self.open.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; size follows the open tickets. Those of a phase are in the order in which they came there."""
        return {
            "next_ticket": self.next_ticket,
            "trained": self.trained,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            "open": {str(phase): [list(t) for t in self.open[phase].values()] for phase in Phase},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Ledger":
        """The inverse of `state_dict`."""
        ledger = cls(state["next_ticket"], state["trained"], state["failed"], dict(state["dropped"]))
        for phase in Phase:
            for fields in state["open"][phase]:
                ledger._enter(phase, Ticket(*fields))
        ledger.check()
        return ledger

    def _enter(self, phase: Phase, ticket: Ticket) -> None:
        self.open[phase][ticket.ticket] = ticket
        if phase in _RUNNING:
            self.running_of_step[ticket.for_step] += 1
            self.running_of_version[ticket.version] += 1
        elif phase is Phase.READY:
            self.ready_of_step.setdefault(ticket.for_step, {})[ticket.ticket] = None

    def _leave(self, phase: Phase, number: int) -> Ticket:
        ticket = self.open[phase].pop(number)
        if phase in _RUNNING:
            _decrement(self.running_of_step, ticket.for_step)
            _decrement(self.running_of_version, ticket.version)
        elif phase is Phase.READY:
            ready = self.ready_of_step[ticket.for_step]
            del ready[number]
            if not ready:
                del self.ready_of_step[ticket.for_step]
        return ticket


def _decrement(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
