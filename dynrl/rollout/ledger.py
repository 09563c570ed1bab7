"""The book of every dispatched group (law 5). Plain Python: no JAX, no clock, no I/O.

    dispatched = trained + dropped{filtered, stale, evicted, cancelled, surplus} + failed
               + open{in_flight, judging, deferred, ready, held, training}

A ticket is one dispatched group. Only open tickets are held; ended ones are counted.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Phase(enum.StrEnum):
    """Where an open ticket is."""

    IN_FLIGHT = "in_flight"
    JUDGING = "judging"
    DEFERRED = "deferred"  # generated; judged when other groups are, by what becomes of these: nobody waits for it
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
      attempts: how often it was dispatched; more than once where one failed.
      cohort: the number of the draw that it belongs to.
      source: of the task.
      base: whether it was drawn from the base distribution, and not for what a selector made of it.
      data_failures: attempts that failed for the task's data; the others failed for infrastructure.
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
    base: bool = True
    data_failures: int = 0


# A ticket may enter a phase from these. Back to IN_FLIGHT go retries.
_FROM = {
    Phase.IN_FLIGHT: (Phase.JUDGING, Phase.IN_FLIGHT),
    Phase.JUDGING: (Phase.IN_FLIGHT,),
    Phase.DEFERRED: (Phase.JUDGING, Phase.IN_FLIGHT),
    Phase.READY: (Phase.JUDGING, Phase.HELD, Phase.IN_FLIGHT, Phase.DEFERRED),
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
        ticket = Ticket(
            self.next_ticket, task_id, visit, version, step, replacement_index, for_step, 1, cohort, source
        )  # fmt: skip
        self.dispatch_all([ticket])
        return ticket

    def dispatch_all(self, tickets: Sequence[Ticket]) -> None:
        """Opens tickets, whose numbers go on where the last one ended."""
        self.next_ticket += len(tickets)
        self._enter(Phase.IN_FLIGHT, tickets)

    def move(self, numbers: Iterable[int], phase: Phase) -> None:
        """Moves open tickets to another phase. Raises ValueError for one that is not open or cannot come there."""
        numbers = list(numbers)
        tickets = self._take(numbers, _FROM[phase], f"it cannot become {phase}", to=phase)
        self.open[phase].update(zip(numbers, tickets, strict=True))
        if phase not in _RUNNING:  # which it can be entered from only
            self._index(phase, tickets)

    def retry(self, number: int, of_data: bool = False) -> Ticket:
        """Puts a running ticket in flight again, as another attempt, after one that failed for its data or not."""
        (ticket,) = self._take([number], _RUNNING, "it cannot be tried again")
        ticket = ticket._replace(attempts=ticket.attempts + 1, data_failures=ticket.data_failures + of_data)
        self._enter(Phase.IN_FLIGHT, [ticket])
        return ticket

    def stamp(self, number: int, step: int) -> None:
        """Gives an open ticket to another step."""
        phase = self.phase_of(number)
        (ticket,) = self._take([number], (phase,))
        self._enter(phase, [ticket._replace(for_step=step)])

    def restamp(self, step: int, new: int) -> None:
        """Gives all open tickets of a step to another."""
        ready = list(self.ready_of_step.get(step, ()))
        for phase in (Phase.READY, *_RUNNING):
            if phase is Phase.READY or self.running_of_step[step]:
                numbers = ready if phase is Phase.READY else _of_step(self.open[phase], step)
                tickets = self._take(numbers, (phase,))
                self._enter(phase, [t._replace(for_step=new) for t in tickets])

    def restart(self) -> list[Ticket]:
        """Puts what was being judged back in flight, since the process that had it is gone; all that is in flight."""
        self.move(list(self.open[Phase.JUDGING]), Phase.IN_FLIGHT)
        return self.in_order(Phase.IN_FLIGHT)

    def end(self, numbers: Iterable[int], *, dropped: Dropped | None = None, failed: bool = False) -> list[Ticket]:
        """Closes tickets: dropped for a reason, failed, or else trained, which only one in training can be."""
        trained = dropped is None and not failed
        if trained:
            ended = self._take(numbers, (Phase.TRAINING,), "only a ready group that is in a batch can be trained")
        else:
            ended = self._take(numbers, tuple(Phase))
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

    def check_running(self, numbers: Sequence[int]) -> None:
        """Raises ValueError for a ticket that is neither in flight nor being judged."""
        self._find(numbers, _RUNNING, "it has been judged already")

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
            ledger._enter(phase, [Ticket(*fields) for fields in state["open"][phase]])
        ledger.check()
        return ledger

    # Many at once, since at thousands of groups per step it is here that the controller's time goes.

    def _find(self, numbers: Sequence[int], phases: Sequence[Phase], why: str) -> dict[Phase, Sequence[int]]:
        """These tickets by phase. Raises ValueError, with `why`, when one is in none of the phases."""
        found: dict[Phase, Sequence[int]] = {}
        for phase in phases:
            if not numbers:
                break
            tickets = self.open[phase]
            if here := [n for n in numbers if n in tickets]:
                found[phase] = here
                numbers = [n for n in numbers if n not in tickets] if len(here) < len(numbers) else ()
        if numbers:
            raise ValueError(f"ticket {numbers[0]} is {self.phase_of(numbers[0])}: {why}")
        return found

    def _take(
        self, numbers: Iterable[int], phases: Sequence[Phase], why: str = "", to: Phase | None = None
    ) -> list[Ticket]:  # fmt: skip
        """Takes tickets out of their phases, all or none of them. Returns them in the same order."""
        numbers = list(numbers)
        found = self._find(numbers, phases, why)
        by_number: dict[int, Ticket] = {}
        tickets: list[Ticket] = []
        for phase, here in found.items():
            pop = self.open[phase].pop
            tickets = [pop(n) for n in here]
            if to not in _RUNNING:
                self._unindex(phase, tickets)
            if len(found) > 1:
                by_number.update(zip(here, tickets, strict=True))
        return [by_number[n] for n in numbers] if by_number else tickets

    def _enter(self, phase: Phase, tickets: Sequence[Ticket]) -> None:
        self.open[phase].update([(t.ticket, t) for t in tickets])
        self._index(phase, tickets)

    def _index(self, phase: Phase, tickets: Sequence[Ticket]) -> None:
        if phase in _RUNNING:
            self.running_of_step.update([t.for_step for t in tickets])
            self.running_of_version.update([t.version for t in tickets])
        elif phase is Phase.READY:
            for ticket in tickets:
                self.ready_of_step.setdefault(ticket.for_step, {})[ticket.ticket] = None

    def _unindex(self, phase: Phase, tickets: Sequence[Ticket]) -> None:
        if phase in _RUNNING:
            _subtract(self.running_of_step, [t.for_step for t in tickets])
            _subtract(self.running_of_version, [t.version for t in tickets])
        elif phase is Phase.READY:
            for ticket in tickets:
                ready = self.ready_of_step[ticket.for_step]
                del ready[ticket.ticket]
                if not ready:
                    del self.ready_of_step[ticket.for_step]


def _of_step(tickets: Mapping[int, Ticket], step: int) -> list[int]:
    return [n for n, t in tickets.items() if t.for_step == step]


def _subtract(counts: Counter[int], keys: Sequence[int]) -> None:
    for key, num in Counter(keys).items():
        counts[key] -= num
        if not counts[key]:
            del counts[key]
