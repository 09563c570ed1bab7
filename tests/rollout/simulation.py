"""A run without models: drives the controller as the loop does, and keeps a book of its own beside it.

Time goes in ticks. A dispatched group takes some to be generated and some to be judged; both, and its verdict, are a
function of its identity, as they are in a run whose noise does not depend on the schedule.
"""

import copy
import json
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dynrl.config import RunConfig
from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import (
    AttemptsFailed,
    Cancel,
    Dispatch,
    Draw,
    Drawn,
    Free,
    GroupsDeferred,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    Retry,
    StepTrained,
    Stop,
    TasksDrawn,
    Train,
    Warn,
)
from dynrl.rollout.ledger import Phase, Ticket
from dynrl.rollout.state import ControllerState
from dynrl.types import Verdict
from dynrl.validation import convert


def make_config(num_steps=3, batch_size=4, failure=None, schedule=None, train=None, **dynamic_sampling):
    return convert(
        RunConfig,
        {
            "num_steps": num_steps,
            "num_prompts_per_step": batch_size,
            "dynamic_sampling": dynamic_sampling,
            "rollout_failure": failure or {},
            "schedule": schedule or {},
            "train": train or {},
        },
    )


def unit(*identity):
    """A number in [0, 1) that belongs to an identity."""
    return random.Random("/".join(map(str, identity))).random()


def random_verdict(seed, keep, fail=0.0, stale=0.0):
    """Independent draws, fixed by the ticket's task and visit."""

    def verdict(ticket):
        u = unit(seed, ticket.task_id, ticket.visit)
        if u < fail:
            return Verdict.FAILED
        if u < fail + stale:
            return Verdict.STALE
        return Verdict.KEPT if u < fail + stale + (1 - fail - stale) * keep else Verdict.FILTERED

    return verdict


def random_judgement(seed, keep, fail=0.0, stale=0.0):
    """The same with a cause, a spread, and a signal of some that are refused; each attempt fails on its own."""
    decide = random_verdict(seed, keep, 0.0, stale)

    def judge(ticket):
        r = random.Random(f"{seed}/{ticket.task_id}/{ticket.visit}/{ticket.attempts}")
        verdict = Verdict.FAILED if r.random() < fail else decide(ticket)
        cause: Any = r.choice(["infra", "data", ""]) if verdict is Verdict.FAILED else ""
        pattern = "mixed" if verdict is Verdict.KEPT else r.choice(["mixed", "all_pass", "all_fail"])
        signal = verdict is Verdict.FILTERED and pattern == "mixed"
        return Judgement(ticket.ticket, verdict, pattern, cause, r.random(), signal)

    return judge


def randomly_lost(seed, rate):
    """Each attempt on its own."""
    return lambda ticket: unit("lost", seed, ticket.task_id, ticket.visit, ticket.attempts) < rate


def payload_of(ticket):
    """Stands for tokens and log-probs: a hash of all that determines them."""
    return unit("payload", ticket.task_id, ticket.visit, ticket.version, ticket.attempts)


def no_time(ticket):
    return 0, 0


def random_durations(seed, longest=40):
    """Log-normal ticks of generation, a few of judgement."""

    def durations(ticket):
        r = random.Random(f"{seed}/{ticket.task_id}/{ticket.visit}/{ticket.attempts}")
        return min(int(r.lognormvariate(1.5, 0.8)), longest), r.randrange(4)

    return durations


@dataclass
class Simulation:
    """One run.

    Attributes:
      verdict: ticket -> Verdict, or a whole Judgement.
      num_tasks: data there is; None for endless.
      durations: ticket -> ticks of generation and of judgement.
      train_ticks: a step takes, where it overlaps with generation.
      lost: ticket -> whether infrastructure loses this attempt before it is judged.
      deferred: ticket -> whether its verdict waits for those of others.
      hook: called after every event.
      visit_period: tasks come again after as many draws.
    """

    config: RunConfig
    verdict: Callable[[Ticket], Any]
    num_tasks: int | None = None
    durations: Callable[[Ticket], tuple[int, int]] = no_time
    train_ticks: int = 5
    lost: Callable[[Ticket], bool] = lambda ticket: False
    deferred: Callable[[Ticket], bool] = lambda ticket: False
    hook: Callable[[Any], None] | None = None
    visit_period: int = 50
    state: ControllerState = field(init=False)
    queue: deque = field(default_factory=deque)
    now: int = 0
    drawn: int = 0
    # The book: what the commands and events said, never read from the state.
    in_flight: dict = field(default_factory=dict)  # ticket -> (when, Ticket)
    judging: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)  # deferred
    most_waiting: int = 0
    ready: set = field(default_factory=set)
    held: set = field(default_factory=set)
    buffer: dict = field(default_factory=dict)  # ticket -> its payload's hash, from judgement to training
    train_due: Any = None  # when a step that was under way at the checkpoint is done
    training: Any = None  # (when, tickets)
    ended: dict = field(
        default_factory=lambda: dict.fromkeys(("trained", "failed", "filtered", "stale", "freed", "cancelled"), 0)
    )
    num_dispatched: int = 0
    executed: list = field(default_factory=list)  # Draw, Train and Stop as executed
    tickets: list = field(default_factory=list)  # by number, as first dispatched
    trains: list = field(default_factory=list)  # (tickets, note)
    ages: list = field(default_factory=list)  # versions between dispatch and step, of each train
    warnings: list = field(default_factory=list)
    freed: list = field(default_factory=list)
    retries: list = field(default_factory=list)
    stop: Any = None  # the Stop, at the end

    def __post_init__(self):
        self.state = initial_state(self.config)

    @property
    def overlaps(self):
        return self.config.schedule.mode == "async"

    @property
    def version(self):
        """Of the sampler's weights."""
        return (len(self.trains) - (self.training is not None)) * self.config.versions_per_step

    def run(self, resumed=None):
        self.apply(resumed or Resumed())
        while self.stop is None:
            if self.queue:
                self._execute(self.queue.popleft())
            else:
                self._produce()
        return self

    def apply(self, event):
        self._book(event)
        failures = self.state.ledger.failed, self.state.failed_in_row
        self.state, commands = apply(self.state, event)
        self._check_failures(event, *failures)
        for command in commands:
            if isinstance(command, Free):  # freed before anything else, as the loop does
                assert set(command.tickets) <= self.ready | self.held
                self.ready -= set(command.tickets)
                self.held -= set(command.tickets)
                for number in command.tickets:
                    del self.buffer[number]
                self.ended["freed"] += len(command.tickets)
                self.freed.append(command.tickets)
            elif isinstance(command, Retry):
                number = command.ticket.ticket
                self.retries.append((command.ticket, command.delay_secs))
                self.in_flight[number] = (self.now + sum(self.durations(command.ticket)), command.ticket)
                self.ended["failed"] -= 1
            else:
                self.queue.append(command)
        self.check()
        if self.hook:
            self.hook(self)

    def _book(self, event):
        if isinstance(event, GroupsGenerated):
            for number in event.tickets:
                _, ticket = self.in_flight.pop(number)
                self.judging[number] = self.now + self.durations(ticket)[1], ticket
        elif isinstance(event, GroupsJudged):
            for j in event.judgements:
                _, ticket = (self.judging if j.ticket in self.judging else self.waiting).pop(j.ticket)
                holds = j.signal and self.config.dynamic_sampling.on_exhausted == "relax"
                if j.verdict is Verdict.KEPT or holds:  # what is too old is freed
                    self.buffer[j.ticket] = payload_of(ticket)
                if j.verdict is Verdict.KEPT:
                    self.ready.add(j.ticket)
                elif holds:
                    self.held.add(j.ticket)
                else:
                    self.ended[j.verdict] += 1
        elif isinstance(event, GroupsDeferred):
            for number in event.tickets:
                _, ticket = self.judging.pop(number)
                self.waiting[number] = self.now + 3 * sum(self.durations(ticket)), ticket
            self.most_waiting = max(self.most_waiting, len(self.waiting))
        elif isinstance(event, AttemptsFailed):
            for number in event.tickets:
                (self.in_flight if number in self.in_flight else self.judging).pop(number)
                self.ended["failed"] += 1
        elif isinstance(event, StepTrained):
            self.ended["trained"] += len(self.training[1])
            self.training = None

    def _execute(self, command):
        if isinstance(command, Draw | Train | Stop):
            self.executed.append(command)
        match command:
            case Draw(num):
                left = num if self.num_tasks is None else min(num, self.num_tasks - self.drawn)
                period, drawn = self.visit_period, range(self.drawn, self.drawn + left)
                draws = tuple(Drawn(n % period, n // period, "xy"[n % 2]) for n in drawn)
                self.drawn += left
                for i in range(left):
                    self.in_flight[self.num_dispatched + i] = None
                self.num_dispatched += left
                self.apply(TasksDrawn(draws, num))
            case Dispatch(tickets):
                for t in tickets:
                    assert t.ticket in self.in_flight
                    self.in_flight[t.ticket] = self.now + self.durations(t)[0], t
                    if t.ticket == len(self.tickets):
                        assert t.version == self.version
                        self.tickets.append(t)
                    assert self.tickets[t.ticket][:3] == t[:3]  # also when it is dispatched again
            case Train(tickets, note):
                self._check_train(tickets, note)
                self.ready -= set(tickets)
                self.trains.append((tickets, note))
                due = self.now + self.train_ticks if self.train_due is None else self.train_due
                self.training, self.train_due = (due if self.overlaps else self.now, tickets), None
                if not self.overlaps:
                    self._trained()
            case Cancel():
                pass
            case Warn(message):
                self.warnings.append(message)
            case Stop():
                self.stop = command

    def _trained(self):
        version = len(self.trains) * self.config.versions_per_step
        self.apply(StepTrained(version))

    def _check_train(self, tickets, note):
        size = self.config.num_prompts_per_step
        assert set(tickets) <= self.ready, set(tickets) - self.ready
        assert list(tickets) == sorted(set(tickets))  # distinct, in dispatch order
        assert len(tickets) == size or (0 < len(tickets) < size and note.removeprefix("short step: ") not in ("", note))
        for number in tickets:
            ticket = self.state.ledger.open[Phase.TRAINING][number]
            assert ticket[:3] == self.tickets[number][:3]
            assert self.buffer.pop(number) == payload_of(ticket)
        start = len(self.trains) * self.config.versions_per_step
        self.ages.append([start - self.tickets[n].version for n in tickets])

    def _produce(self):
        """The events of the next moment at which something happens; each group is generated before it is judged."""
        times = [w for held in (self.in_flight, self.judging, self.waiting) for w, _ in held.values()]
        if self.training:
            times.append(self.training[0])
        assert times, "the controller waits, and nothing is under way"
        self.now = max(self.now, min(times))
        done = sorted(n for n, (when, _) in self.in_flight.items() if when <= self.now)
        if lost := [n for n in done if self.lost(self.in_flight[n][1])]:
            self.apply(AttemptsFailed(tuple(lost), "the sampler was lost"))
        elif done:
            self.apply(GroupsGenerated(tuple(done)))
        elif judged := sorted(n for n, (when, _) in self.judging.items() if when <= self.now):
            if deferred := [n for n in judged if self.deferred(self.judging[n][1])]:
                self.apply(GroupsDeferred(tuple(deferred)))
            else:
                self.apply(GroupsJudged(tuple(self.judgement(self.judging[n][1]) for n in judged)))
        elif waited := sorted(n for n, (when, _) in self.waiting.items() if when <= self.now):
            self.apply(GroupsJudged(tuple(self.judgement(self.waiting[n][1]) for n in waited)))
        else:
            self._trained()

    def _check_failures(self, event, failed, in_row):
        """What is filtered, kept or stale is no failure."""
        if isinstance(event, GroupsJudged) and all(j.verdict is not Verdict.FAILED for j in event.judgements):
            assert self.state.ledger.failed == failed
            assert self.state.failed_in_row == 0
        elif not isinstance(event, GroupsJudged | AttemptsFailed):
            assert (self.state.ledger.failed, self.state.failed_in_row) == (failed, in_row)

    def judgement(self, ticket):
        verdict = self.verdict(ticket)
        if isinstance(verdict, Judgement):
            return verdict
        return Judgement(ticket.ticket, verdict, "mixed" if verdict is Verdict.KEPT else "all_fail")

    def check(self):
        """Conservation (law 5), from this book."""
        totals = self.state.ledger.totals()
        dropped = totals["dropped"]
        relaxed = self.held - self.state.held.keys()
        self.held -= relaxed
        self.ready |= relaxed
        assert totals["dispatched"] == self.num_dispatched
        assert (totals["trained"], totals["failed"]) == (self.ended["trained"], self.ended["failed"])
        gone = sum(self.ended[name] for name in ("filtered", "stale", "freed", "cancelled"))
        assert sum(dropped.values()) == gone
        assert dropped["filtered"] >= self.ended["filtered"]
        assert dropped["cancelled"] == self.ended["cancelled"]
        for phase, numbers in (
            ("ready", self.ready), ("held", self.held), ("judging", self.judging), ("in_flight", self.in_flight),
            ("deferred", self.waiting),
        ):  # fmt: skip
            if phase == "ready" and any(isinstance(c, Train) for c in self.queue):
                continue  # the state has them in training already
            assert self.state.ledger.open[Phase(phase)].keys() == set(numbers), phase
        num_open = sum(totals[str(phase)] for phase in Phase)
        assert totals["dispatched"] == totals["trained"] + totals["failed"] + sum(dropped.values()) + num_open
        assert num_open - len(self.held) <= self.state.schedule.max_open + self.most_waiting
        assert len(self.held) <= self.state.batch_size
        assert self.buffer.keys() == self.ready | self.held
        ledger = self.state.ledger
        running = [t for phase in (Phase.IN_FLIGHT, Phase.JUDGING) for t in ledger.open[phase].values()]
        for counts, key in ((ledger.running_of_step, "for_step"), (ledger.running_of_version, "version")):
            values = [getattr(t, key) for t in running]
            assert counts == {v: values.count(v) for v in set(values)}
        assert sum(map(len, ledger.ready_of_step.values())) == ledger.level(Phase.READY)
        assert set(self.state.held) == set(ledger.open[Phase.HELD])

    # ------------------------------------------------------------------------------------------------- resume

    def snapshot(self):
        """What a checkpoint taken now would hold, as text; the book beside it."""
        book = {name: copy.deepcopy(getattr(self, name)) for name in _BOOK}
        return json.dumps(self.state.state_dict()), book, len(self.executed)

    def resumed(self, snapshot, in_flight=False):
        """A new process that goes on from a snapshot of this run; with the sampler's work, or without."""
        document, book, _ = snapshot
        again = Simulation(
            self.config, self.verdict, self.num_tasks, self.durations, self.train_ticks, self.lost, self.deferred,
            visit_period=self.visit_period,
        )  # fmt: skip
        again.state.load_state_dict(json.loads(document))
        for name, value in copy.deepcopy(book).items():
            setattr(again, name, value)
        if again.training:  # the step is made again, from the checkpoint's weights; it takes as long as it would have
            again.trains.pop()
            again.ages.pop()
            again.train_due = again.training[0]
            again.buffer |= {n: payload_of(again.state.ledger.open[Phase.TRAINING][n]) for n in again.training[1]}
        again.ready |= again.state.ledger.open[Phase.TRAINING].keys()
        again.training = None
        if not in_flight:
            again.in_flight |= again.judging  # the process that had it is gone
            again.ended["cancelled"] += len(again.waiting)
            again.judging, again.waiting = {}, {}
        again.tickets = self.tickets[: again.state.ledger.dispatched]
        return again


_BOOK = (
    "now", "drawn", "in_flight", "judging", "waiting", "most_waiting", "ready", "held", "buffer", "training", "ended",
    "num_dispatched", "trains", "ages",
)  # fmt: skip


def expected_exhaustions(p, limit, slots):
    """Slots whose lineage of 1 + limit independent groups is filtered to its end."""
    return math.pow(p, limit + 1) * slots


def run_at_once(config, is_dropped):
    """The state after a run in which everything takes no time; nothing but the verdicts is looked at."""
    state = initial_state(config)
    state, commands = apply(state, Resumed())
    drawn = 0
    while not state.stopped:
        events = []
        for command in commands:
            if isinstance(command, Draw):
                draws = tuple(Drawn(n, 0) for n in range(drawn, drawn + command.num))
                drawn += command.num
                events.append(TasksDrawn(draws, command.num))
            elif isinstance(command, Dispatch):
                kept = Verdict.KEPT, "mixed"
                judgements = (Judgement(t.ticket, *((Verdict.FILTERED, "all_fail") if is_dropped(t) else kept))
                              for t in command.tickets)  # fmt: skip
                events.append(GroupsJudged(tuple(judgements)))
            elif isinstance(command, Train):
                events.append(StepTrained((state.step + 1) * config.versions_per_step))
        commands = []
        for event in events:
            commands += apply(state, event)[1]
    return state
