"""The book of every dispatched group (law 5). Plain Python: no JAX, no clock, no I/O.

    dispatched = trained + dropped{filtered, stale, evicted, cancelled, surplus} + failed
               + open{in_flight, judging, ready}

A ticket is one dispatched group. Only open tickets are held; ended ones are counted.
"""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


class Phase(enum.StrEnum):
    """Where an open ticket is."""

    IN_FLIGHT = "in_flight"
    JUDGING = "judging"
    READY = "ready"


_ORDER = {phase: i for i, phase in enumerate(Phase)}


class Dropped(enum.StrEnum):
    """Why a ticket ended without being trained or failing."""

    FILTERED = "filtered"
    STALE = "stale"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    SURPLUS = "surplus"


@dataclass
class Ticket:
    """One dispatched group.

    Attributes:
      ticket: its number, in dispatch order; never reused.
      task_id: the task.
      visit: how many times the task had been drawn before.
      version: the policy version at dispatch.
      step: the step being filled at dispatch.
      replacement_index: 0 for a first attempt, one more along each replacement.
      phase: where it is.
    """

    ticket: int
    task_id: int
    visit: int
    version: int
    step: int
    replacement_index: int
    phase: Phase = Phase.IN_FLIGHT


@dataclass
class Ledger:
    """Open tickets in dispatch order, and run totals of ended ones."""

    next_ticket: int = 0
    trained: int = 0
    failed: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(map(str, Dropped), 0))
    open: dict[int, Ticket] = field(default_factory=dict)
    levels: Counter[str] = field(default_factory=Counter)  # open tickets per phase

    @property
    def dispatched(self) -> int:
        """Tickets ever opened."""
        return self.next_ticket

    def dispatch(self, task_id: int, visit: int, version: int, step: int, replacement_index: int) -> Ticket:
        """Opens a ticket."""
        ticket = Ticket(self.next_ticket, task_id, visit, version, step, replacement_index)
        self.next_ticket += 1
        self.open[ticket.ticket] = ticket
        self.levels[ticket.phase] += 1
        return ticket

    def move(self, number: int, phase: Phase) -> None:
        """Moves an open ticket to a later phase. Raises ValueError for one that is not open or not before it."""
        ticket = self._get(number)
        if _ORDER[phase] <= _ORDER[ticket.phase]:
            raise ValueError(f"ticket {number} is {ticket.phase}: it cannot become {phase}")
        self.levels[ticket.phase] -= 1
        self.levels[phase] += 1
        ticket.phase = phase

    def restart(self, number: int) -> None:
        """Puts an open ticket back in flight: the process that had it is gone."""
        ticket = self._get(number)
        self.levels[ticket.phase] -= 1
        self.levels[Phase.IN_FLIGHT] += 1
        ticket.phase = Phase.IN_FLIGHT

    def end(self, number: int, *, dropped: Dropped | None = None, failed: bool = False) -> Ticket:
        """Closes a ticket: dropped for a reason, failed, or else trained, which only a ready one can be."""
        ticket = self._get(number)
        if dropped is None and not failed and ticket.phase is not Phase.READY:
            raise ValueError(f"ticket {number} is {ticket.phase}: only a ready group can be trained")
        del self.open[number]
        self.levels[ticket.phase] -= 1
        if dropped is not None:
            self.dropped[dropped] += 1
        elif failed:
            self.failed += 1
        else:
            self.trained += 1
        return ticket

    def ready(self) -> Iterator[Ticket]:
        """Ready tickets in dispatch order."""
        return (t for t in self.open.values() if t.phase is Phase.READY)

    def check(self) -> None:
        """Raises AssertionError when a ticket was lost or counted twice."""
        ended = self.trained + self.failed + sum(self.dropped.values())
        levels = sum(self.levels.values())
        if (
            self.dispatched != ended + len(self.open)
            or levels != len(self.open)
            or min(self.levels.values(), default=0) < 0
        ):
            raise AssertionError(f"the ledger does not balance: {self.totals()}, {len(self.open)} open tickets")

    def totals(self) -> dict[str, Any]:
        """Counts for metrics and messages."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            **{phase: self.levels[phase] for phase in map(str, Phase)},
        }

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; size follows the open tickets."""
        return {
            "next_ticket": self.next_ticket,
            "trained": self.trained,
            "failed": self.failed,
            "dropped": dict(self.dropped),
            "open": [asdict(t) for t in self.open.values()],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Ledger":
        """The inverse of `state_dict`."""
        tickets = [Ticket(**{**t, "phase": Phase(t["phase"])}) for t in state["open"]]
        ledger = cls(state["next_ticket"], state["trained"], state["failed"], dict(state["dropped"]))
        ledger.open = {t.ticket: t for t in tickets}
        ledger.levels = Counter(str(t.phase) for t in tickets)
        ledger.check()
        return ledger

    def _get(self, number: int) -> Ticket:
        if number not in self.open:
            raise ValueError(f"ticket {number} is not open: it never was, or it has ended already")
        return self.open[number]
