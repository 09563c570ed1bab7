"""A run without models: drives the controller as the loop does, and keeps a book of its own beside it.

Verdicts are a function of a ticket's identity, as they are in a run whose noise does not depend on the schedule.
"""

import itertools
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynrl.config import RunConfig, from_mapping
from dynrl.rollout.controller import ControllerState, apply, initial_state
from dynrl.rollout.events import (
    Dispatch,
    Draw,
    Free,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    StepTrained,
    Stop,
    TasksDrawn,
    Train,
    Warn,
)
from dynrl.rollout.ledger import Phase, Ticket
from dynrl.types import Verdict


def make_config(num_steps=3, batch_size=4, failure=None, **dynamic_sampling):
    return from_mapping(
        {
            "num_steps": num_steps,
            "num_prompts_per_step": batch_size,
            "dynamic_sampling": dynamic_sampling,
            "rollout_failure": failure or {},
        }
    )


def random_verdict(seed, keep, fail=0.0, stale=0.0):
    """Independent draws, fixed by the ticket's task and visit."""

    def verdict(ticket):
        u = random.Random(f"{seed}/{ticket.task_id}/{ticket.visit}").random()
        if u < fail:
            return Verdict.FAILED
        if u < fail + stale:
            return Verdict.STALE
        return Verdict.KEPT if u < fail + stale + (1 - fail - stale) * keep else Verdict.FILTERED

    return verdict


@dataclass
class Simulation:
    """One run.

    Attributes:
      verdict: ticket -> Verdict.
      num_tasks: data there is; None for endless.
      seed: of the order in which a round's groups finish; None for dispatch order.
      hook: called after every event.
      visit_period: tasks come again after as many draws.
    """

    config: RunConfig
    verdict: Callable[[Ticket], Verdict]
    num_tasks: int | None = None
    seed: int | None = 0
    hook: Callable[[Any], None] | None = None
    visit_period: int = 50
    state: ControllerState = field(init=False)
    queue: deque = field(default_factory=deque)
    drawn: int = 0
    updates_per_step: int = 1
    # The book: what the commands and events said, never read from the state.
    in_flight: dict = field(default_factory=dict)
    judging: dict = field(default_factory=dict)
    ready: set = field(default_factory=set)
    ended: dict = field(default_factory=lambda: dict.fromkeys(("trained", "failed", "filtered", "stale", "freed"), 0))
    num_dispatched: int = 0
    rounds_of_step: int = 0
    executed: list = field(default_factory=list)  # Draw, Train and Stop as executed
    tickets: list = field(default_factory=list)  # identities in order of dispatch
    trains: list = field(default_factory=list)
    warnings: list = field(default_factory=list)
    freed: list = field(default_factory=list)
    stop: Any = None  # the Stop, at the end

    def __post_init__(self):
        self.state = initial_state(self.config)

    @property
    def version(self):
        return len(self.trains) * self.updates_per_step

    def run(self):
        self._apply(Resumed())
        while self.stop is None:
            if not self.queue:
                self._produce()
                continue
            self._execute(self.queue.popleft())
        return self

    def _apply(self, event):
        self._book(event)
        self.state, commands = apply(self.state, event)
        for command in commands:
            if isinstance(command, Free):  # freed before anything else, as the loop does
                assert set(command.tickets) <= self.ready
                self.ready -= set(command.tickets)
                self.ended["freed"] += len(command.tickets)
                self.freed.append(command.tickets)
            else:
                if isinstance(command, Warn):
                    self.rounds_of_step = 0
                self.queue.append(command)
        self.check()
        if self.hook:
            self.hook(self)

    def _book(self, event):
        if isinstance(event, GroupsGenerated):
            self.judging |= {t: self.in_flight.pop(t) for t in event.tickets}
        elif isinstance(event, GroupsJudged):
            for ticket, verdict, _ in event.judgements:
                del self.judging[ticket]
                if verdict is Verdict.KEPT:
                    self.ready.add(ticket)
                else:
                    self.ended[verdict] += 1
        elif isinstance(event, StepTrained):
            self.ready -= set(self.trains[-1][0])
            self.ended["trained"] += len(self.trains[-1][0])
            self.rounds_of_step = 0

    def _execute(self, command):
        if isinstance(command, Draw | Train | Stop):
            self.executed.append(command)
        match command:
            case Draw(num):
                left = num if self.num_tasks is None else min(num, self.num_tasks - self.drawn)
                period, drawn = self.visit_period, range(self.drawn, self.drawn + left)
                draws = tuple((n % period, n // period) for n in drawn)
                self.drawn += left
                if left:
                    self.num_dispatched += left
                    self._expect_tickets(draws)
                self._apply(TasksDrawn(draws, num))
            case Dispatch(tickets):
                for t in tickets:
                    assert t.ticket in self.in_flight
                    self.in_flight[t.ticket] = t
                    identity = (t.ticket, t.task_id, t.visit, t.version, t.step, t.replacement_index)
                    if t.ticket == len(self.tickets):
                        self.tickets.append(identity)
                    assert self.tickets[t.ticket] == identity  # also when it is dispatched again
            case Train(tickets, note):
                self._check_train(tickets, note)
                self.trains.append((tickets, note))
                self._apply(StepTrained(self.version))
            case Warn(message):
                self.warnings.append(message)
            case Stop():
                self.stop = command

    def _expect_tickets(self, draws):
        first = self.num_dispatched - len(draws)
        for i, (task_id, visit) in enumerate(draws):
            identity = (first + i, task_id, visit, self.version, self.state.step, self.rounds_of_step)
            self.tickets.append(identity)
            self.in_flight[first + i] = None
        self.rounds_of_step += 1

    def _check_train(self, tickets, note):
        size = self.config.num_prompts_per_step
        assert set(tickets) <= self.ready
        assert list(tickets) == sorted(set(tickets))  # distinct, in dispatch order
        assert len(tickets) == size or (0 < len(tickets) < size and note.startswith("short step: "))

    def _produce(self):
        """All events of a round; groups finish in any order and number, each generated before it is judged."""
        assert self.in_flight or self.judging, "the controller waits, and nothing is under way"
        steps = [(t, kind) for t in [*self.judging, *self.in_flight] for kind in ("generated", "judged")]
        if self.seed is not None:
            # A fixed place for every ticket and kind, so that an interrupted run sees the same order.
            def place(step):
                number, kind = step
                begin = random.Random(f"{self.seed}/{number}").random()
                return begin if kind == "generated" else begin + random.Random(f"{self.seed}/{number}/j").random()

            steps.sort(key=place)
        steps = [s for s in steps if s[1] == "judged" or s[0] in self.in_flight]
        while steps:
            kind, num = steps[0][1], 1 if self.seed is None else random.Random(f"{self.seed}/{steps[0]}").randint(1, 5)
            numbers = [n for n, _ in itertools.takewhile(lambda s: s[1] == kind, steps[:num])]  # noqa: B023
            del steps[: len(numbers)]
            if kind == "judged":
                verdicts = [self.verdict(self.judging[n]) for n in numbers]
                patterns = ["mixed" if v is Verdict.KEPT else "all_fail" for v in verdicts]
                self._apply(GroupsJudged(tuple(map(Judgement, numbers, verdicts, patterns))))
            else:
                self._apply(GroupsGenerated(tuple(numbers)))
            if self.queue:
                assert isinstance(self.queue[0], Stop) or not steps
                if isinstance(self.queue[0], Stop):
                    return

    def check(self):
        """Conservation (law 5), from this book."""
        totals = self.state.ledger.totals()
        dropped = totals["dropped"]
        assert totals["dispatched"] == self.num_dispatched
        assert (totals["trained"], totals["failed"]) == (self.ended["trained"], self.ended["failed"])
        assert dropped["filtered"] == self.ended["filtered"]
        assert dropped["stale"] + dropped["surplus"] == self.ended["stale"] + self.ended["freed"]
        assert dropped["evicted"] == dropped["cancelled"] == 0
        assert {t.ticket for t in self.state.ledger.in_order(Phase.READY)} == self.ready
        levels = {"ready": len(self.ready), "judging": len(self.judging), "in_flight": len(self.in_flight)}
        assert {name: totals[name] for name in levels} == levels
        num_open = sum(levels.values())
        assert totals["dispatched"] == totals["trained"] + totals["failed"] + sum(dropped.values()) + num_open

    # ------------------------------------------------------------------------------------------------- resume

    def snapshot(self):
        """What a checkpoint taken now would hold, as text; the book beside it."""
        document = json.dumps(self.state.state_dict())
        rounds = self.rounds_of_step
        return document, self.drawn, set(self.ready), dict(self.ended), len(self.trains), rounds, len(self.executed)

    def resumed(self, snapshot):
        """A new process that goes on from a snapshot of this run."""
        document, drawn, ready, ended, num_trains, rounds, _ = snapshot
        again = Simulation(self.config, self.verdict, self.num_tasks, self.seed, visit_period=self.visit_period)
        again.state.load_state_dict(json.loads(document))
        again.drawn, again.ready, again.ended = drawn, set(ready), dict(ended)
        again.trains, again.rounds_of_step = self.trains[:num_trains], rounds
        again.num_dispatched = again.state.ledger.dispatched
        again.tickets = self.tickets[: again.num_dispatched]
        for phase in (Phase.IN_FLIGHT, Phase.JUDGING):
            again.in_flight |= again.state.ledger.open[phase]  # the process that had it is gone
        return again
