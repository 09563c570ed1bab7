"""The book of every dispatched group (law 5). Plain Python: no JAX, no clock, no I/O.

    dispatched = trained + dropped{filtered, stale, evicted, cancelled, surplus} + failed
               + open{in_flight, judging, ready}

A ticket is one dispatched group. Only open tickets are held; ended ones are counted.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Phase(enum.StrEnum):
    """Where an open ticket is."""

    IN_FLIGHT = "in_flight"
    JUDGING = "judging"
    READY = "ready"


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
      replacement_index: 0 for a first attempt, one more along each replacement.
    """

    ticket: int
    task_id: int
    visit: int
    version: int
    step: int
    replacement_index: int


@dataclass
class Ledger:
    """Open tickets by phase, and run totals of ended ones."""

    next_ticket: int = 0
    trained: int = 0
    failed: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Dropped), 0))
    open: dict[Phase, dict[int, Ticket]] = field(default_factory=lambda: {phase: {} for phase in Phase})

    @property
    def dispatched(self) -> int:
        """Tickets ever opened."""
        return self.next_ticket

    def level(self, phase: Phase) -> int:
        """How many open tickets are in a phase."""
        return len(self.open[phase])

    def dispatch(self, task_id: int, visit: int, version: int, step: int, replacement_index: int) -> Ticket:
        """Opens a ticket."""
        ticket = Ticket(self.next_ticket, task_id, visit, version, step, replacement_index)
        self.next_ticket += 1
        self.open[Phase.IN_FLIGHT][ticket.ticket] = ticket
        return ticket

    def move(self, numbers: Iterable[int], phase: Phase) -> None:
        """Moves open tickets to a later phase. Raises ValueError for one that is not open or not before it."""
        earlier = [tickets for p, tickets in self.open.items() if _ORDER[p] < _ORDER[phase]]
        target = self.open[phase]
        for number in numbers:
            for tickets in earlier:
                if number in tickets:
                    target[number] = tickets.pop(number)
                    break
            else:
                raise ValueError(f"ticket {number} is {self._phase(number)}: it cannot become {phase}")

    def restart(self) -> list[Ticket]:
        """Puts what was being judged back in flight, since the process that had it is gone; all that is in flight."""
        self.open[Phase.IN_FLIGHT] |= self.open[Phase.JUDGING]
        self.open[Phase.JUDGING].clear()
        return self.in_order(Phase.IN_FLIGHT)

    def end(self, numbers: Iterable[int], *, dropped: Dropped | None = None, failed: bool = False) -> None:
        """Closes tickets: dropped for a reason, failed, or else trained, which only a ready one can be."""
        trained = dropped is None and not failed
        for number in numbers:
            phase = self._phase(number)
            if trained and phase is not Phase.READY:
                raise ValueError(f"ticket {number} is {phase}: only a ready group can be trained")
            del self.open[phase][number]
            self.trained += trained
            self.failed += failed
            if dropped is not None:
                self.dropped[dropped] += 1

    def in_order(self, phase: Phase) -> list[Ticket]:
        """The open tickets of a phase in dispatch order."""
        return sorted(self.open[phase].values())

    def check(self) -> None:
        """Raises AssertionError when a ticket was lost or counted twice."""
        num_open = sum(map(len, self.open.values()))
        if self.dispatched != self.trained + self.failed + sum(self.dropped.values()) + num_open:
            raise AssertionError(f"the ledger does not balance: {self.totals()}, {num_open} open tickets")

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
        """JSON-able; size follows the open tickets."""
        return {
            "next_ticket": self.next_ticket,
            "trained": self.trained,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            "open": {str(phase): [list(t) for t in self.in_order(phase)] for phase in Phase},
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Ledger":
        """The inverse of `state_dict`."""
        tickets = {phase: {t[0]: Ticket(*t) for t in state["open"][phase]} for phase in Phase}
        ledger = cls(state["next_ticket"], state["trained"], state["failed"], dict(state["dropped"]), tickets)
        ledger.check()
        return ledger

    def _phase(self, number: int) -> Phase:
        for phase, tickets in self.open.items():
            if number in tickets:
                return phase
        raise ValueError(f"ticket {number} is not open: it never was, or it has ended already")


_ORDER = {phase: i for i, phase in enumerate(Phase)}
