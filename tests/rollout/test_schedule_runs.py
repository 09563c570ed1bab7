"""Every schedule in every mode: random runs, checked after every event; resumed at every event; events in any order.

What is checked at each event stands in `simulation.py` (conservation, batches, the buffer's payloads, room, what
counts as a failure) and in `watch` below (budgets, replacement lineages).
"""

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import given as given_
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulation import (
    Simulation,
    expected_exhaustions,
    make_config,
    payload_of,
    random_durations,
    random_judgement,
    randomly_lost,
    run_at_once,
    unit,
)

from dynrl.config import from_mapping, to_mapping
from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import (
    AttemptsFailed,
    Cancel,
    Dispatch,
    Draw,
    Drawn,
    Free,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    Retry,
    StepTrained,
    Stop,
    StopRequested,
    TasksDrawn,
    Train,
)
from dynrl.rollout.ledger import Phase
from dynrl.types import Verdict

KEPT, FILTERED, FAILED, STALE = Verdict.KEPT, Verdict.FILTERED, Verdict.FAILED, Verdict.STALE
SCHEDULES = ["rounds", "in_order", "ready_first", "weight_fifo", "windowed"]
MODES = ["streaming", "async"]
OUT_OF_REACH = 10**6

SCHEDULE = st.fixed_dictionaries(
    {
        "name": st.sampled_from(SCHEDULES),
        "mode": st.sampled_from(MODES),
        "max_lookahead_versions": st.integers(0, 3),
        "max_staleness_versions": st.integers(0, 3),
        "sample_freshest_first": st.booleans(),
    }
)
SAMPLING = st.fixed_dictionaries(
    {
        "oversample": st.sampled_from(["none", 1.5, "adaptive"]),
        "surplus": st.sampled_from(["carry", "drop"]),
        "max_surplus_age_versions": st.integers(0, 3),
        "refill": st.sampled_from(["deficit", "full"]),
    }
)
POLICIES = st.fixed_dictionaries(
    {
        "on_exhausted": st.sampled_from(["raise", "short", "relax", "carry"]),
        "max_num_gen_batches": st.integers(0, 4),
        "max_replacements_per_slot": st.integers(1, 3),
        "max_consecutive_unfilled_steps": st.integers(0, 2),
        "on_data_end": st.sampled_from(["short", "stop"]),
    }
)
FAILURE = st.fixed_dictionaries(
    {
        "on_dropped_prompt": st.sampled_from(["replace", "shrink"]),
        "min_step_batch_fraction": st.sampled_from([0.0, 0.5, 1.0]),
        "max_infra_attempts_per_prompt": st.integers(1, 3),
        "max_data_attempts_per_prompt": st.integers(1, 2),
        "max_skipped_prompts": st.sampled_from([5, 40]),
        "max_consecutive_dropped_prompts": st.sampled_from([2, 12]),
    }
)
WORLD = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 5),
        "updates": st.integers(1, 2),
        "keep": st.floats(0.05, 1),
        "fail": st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.95]),
        "stale": st.sampled_from([0.0, 0.05]),
        "lost": st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        "deferred": st.sampled_from([0, 0, 0, 0.1, 0.5]),
        "num_tasks": st.none() | st.integers(0, 60),
        "train_ticks": st.integers(0, 30),
        "seed": st.integers(0, 10**6),
    }
)


def given(*strategies, max_examples):
    """Settings of this file."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    return lambda test: settings(deadline=None, max_examples=max_examples, suppress_health_check=slow)(
        given_(*strategies)(test)
    )


def make_run(world, schedule, sampling, policies, failure, num_steps=4, hook=None):
    config = make_config(
        num_steps, world["batch_size"] * 2, failure, schedule, {"num_minibatches": world["updates"]},
        **sampling, **policies,
    )  # fmt: skip
    seed = world["seed"]
    return Simulation(
        config, random_judgement(seed, world["keep"], world["fail"], world["stale"]), world["num_tasks"],
        random_durations(seed), world["train_ticks"], randomly_lost(seed, world["lost"]),
        lambda ticket: unit("deferred", seed, ticket.task_id) < world["deferred"], hook,
    )  # fmt: skip


def sizes(run):
    return [len(tickets) for tickets, _ in run.trains]


def staleness_bound(config):
    schedule, sampling = config.schedule, config.dynamic_sampling
    if schedule.name == "rounds":
        return sampling.max_surplus_age_versions
    if schedule.name == "in_order":
        return max(schedule.max_lookahead_versions, sampling.max_surplus_age_versions)
    return schedule.max_staleness_versions


def watch(run):
    """Budgets and lineages, after every event."""
    state, config = run.state, run.config
    sampling, failure = config.dynamic_sampling, config.rollout_failure
    if not state.stopped:
        assert state.ledger.failed <= failure.max_skipped_prompts
        assert state.failed_in_row <= failure.max_consecutive_dropped_prompts
        assert state.unfilled_steps <= sampling.max_consecutive_unfilled_steps
    per_slot = 1 + sampling.max_replacements_per_slot
    lives = {"carry": 1 + sampling.max_consecutive_unfilled_steps, "relax": 2}.get(sampling.on_exhausted, 1)
    attempts = failure.max_infra_attempts_per_prompt + failure.max_data_attempts_per_prompt - 1
    for tickets in state.ledger.open.values():
        for ticket in tickets.values():
            assert ticket.attempts <= attempts
            if config.schedule.name == "rounds":
                assert not sampling.max_num_gen_batches or ticket.replacement_index < sampling.max_num_gen_batches
            else:
                assert ticket.replacement_index < per_slot * lives
                assert (
                    ticket.for_step < 0
                    or state.filling <= ticket.for_step
                    or ticket.ticket in state.ledger.open[Phase.TRAINING]
                    or ticket.ticket in state.ledger.open[Phase.DEFERRED]
                )


def check_whole(run):
    """What must hold at the end of any run."""
    config = run.config
    trained = [t for tickets, _ in run.trains for t in tickets]
    assert len(trained) == len(set(trained))
    assert run.stop.reason
    assert sum(isinstance(c, Stop) for c in [*run.executed, *run.queue]) == 1
    bound = staleness_bound(config)
    assert all(0 <= age <= bound for ages in run.ages for age in ages), (max(map(max, run.ages)), bound)
    sampling, failure = config.dynamic_sampling, config.rollout_failure
    size = config.num_prompts_per_step
    shrinks = failure.on_dropped_prompt == "shrink" and config.schedule.name != "rounds"
    for i, num in enumerate(sizes(run)):
        data_ended = run.state.data_ended and i == len(run.trains) - 1 and sampling.on_data_end == "short"
        fewest = math.ceil(failure.min_step_batch_fraction * size) if shrinks else size
        assert num == size or sampling.on_exhausted == "short" or data_ended or num >= fewest


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=250)
def test_random_runs_keep_the_books(world, schedule, sampling, policies, failure):
    check_whole(make_run(world, schedule, sampling, policies, failure, hook=watch).run())


# ---- starvation ----


@given(WORLD, SCHEDULE, SAMPLING, max_examples=100)
def test_no_step_starves(world, schedule, sampling):
    """Something is kept, data is endless, budgets are out of reach: every step closes, with B groups."""
    world = world | {"num_tasks": None, "fail": min(world["fail"], 0.5), "lost": min(world["lost"], 0.5)}
    budgets = {"max_num_gen_batches": 0, "max_replacements_per_slot": OUT_OF_REACH}
    failure = {"max_skipped_prompts": OUT_OF_REACH, "max_consecutive_dropped_prompts": OUT_OF_REACH}
    run = make_run(world, schedule, sampling, budgets, failure).run()
    assert run.stop == Stop("all 4 steps were made", failed=False)
    assert sizes(run) == [2 * world["batch_size"]] * 4
    check_whole(run)


# ---- resume ----


def every_event(snapshots, in_flight):
    """A hook that takes a checkpoint after each event that one may follow."""

    def hook(run):
        failed = any(isinstance(c, Stop) and c.failed for c in run.queue)
        # The sampler's work is part of a checkpoint once the sampler has it.
        if not failed and not (in_flight and any(isinstance(c, Dispatch) for c in run.queue)):
            snapshots.append((run.snapshot(), run.training is not None))

    return hook


def spread_out(items, num):
    return items[:: max(1, len(items) // num)] + items[-1:]


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=40)
def test_with_the_samplers_work_kept_everything_after_is_the_same(world, schedule, sampling, policies, failure):
    snapshots = []
    arguments = world, schedule, sampling, policies, failure, 3
    whole = make_run(*arguments, hook=every_event(snapshots, in_flight=True)).run()
    for snapshot, training in spread_out(snapshots, 60):
        again = whole.resumed(snapshot, in_flight=True)
        again.run(Resumed(in_flight=True))
        made_again = [c for c in whole.executed[: snapshot[-1]] if isinstance(c, Train)][-1:] if training else []
        assert again.executed == made_again + whole.executed[snapshot[-1] :]
        assert (again.tickets, again.trains, again.ages) == (whole.tickets, whole.trains, whole.ages)
        assert again.state.state_dict() == whole.state.state_dict()


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=40)
def test_with_work_in_flight_dispatched_again_the_books_hold(world, schedule, sampling, policies, failure):
    """Other groups may be ready first, so that batches differ; none is trained twice, and the run comes to an end."""
    snapshots = []
    arguments = world, schedule, sampling, policies, failure, 3
    whole = make_run(*arguments, hook=every_event(snapshots, in_flight=False)).run()
    for snapshot, _ in spread_out(snapshots, 40):
        check_whole(whole.resumed(snapshot).run())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_state_is_bounded_by_what_is_open(name, mode):
    """Over 200 steps only the digits of the counts grow."""
    largest = Counter()

    def hook(run):
        if run.state.step % 10 == 0 or run.state.training:
            state = run.state.state_dict()
            largest[run.state.step // 50] = max(largest[run.state.step // 50], len(json.dumps(state)))

    options = {"oversample": 1.5, "max_surplus_age_versions": 2, "max_num_gen_batches": 0, "on_exhausted": "relax"}
    budgets = {"max_replacements_per_slot": OUT_OF_REACH}
    failure = {"max_skipped_prompts": OUT_OF_REACH, "max_consecutive_dropped_prompts": OUT_OF_REACH}
    schedule = {"name": name, "mode": mode, "max_lookahead_versions": 1, "max_staleness_versions": 1}
    world = {
        "batch_size": 2, "updates": 1, "keep": 0.6, "fail": 0.05, "stale": 0.02, "lost": 0.05, "num_tasks": None,
        "deferred": 0.1, "train_ticks": 20, "seed": 3,
    }  # fmt: skip
    run = make_run(world, schedule, options, budgets, failure, 200, hook).run()
    assert run.stop == Stop("all 200 steps were made", failed=False)
    # Each open ticket holds five numbers that may have grown by two digits; each cohort and each total some more.
    assert largest[3] <= largest[1] + run.state.schedule.max_open * 5 * 2 + 200


# ---- events in any order that is legal ----

MACHINE = st.fixed_dictionaries(
    {
        "on_exhausted": st.sampled_from(["short", "relax", "carry"]),
        "max_num_gen_batches": st.sampled_from([0, 3]),
        "max_replacements_per_slot": st.integers(1, 4),
        "max_consecutive_unfilled_steps": st.just(OUT_OF_REACH),
    }
)
VERDICTS = st.sampled_from([KEPT, KEPT, KEPT, FILTERED, FILTERED, FAILED, STALE])


def identities(tickets):
    """What no schedule changes; the step that a group is for may be another tomorrow."""
    return {number: ticket._replace(for_step=-1) for number, ticket in tickets.items()}


class AnyOrder(RuleBasedStateMachine):
    """The controller under events as nobody would have planned them, with a book beside it."""

    num_data = 80

    @initialize(
        schedule=SCHEDULE, sampling=SAMPLING, policies=MACHINE, failure=FAILURE, updates=st.integers(1, 2),
        half=st.integers(1, 2),
    )  # fmt: skip
    def begin(self, schedule, sampling, policies, failure, updates, half):
        failure = failure | {"max_skipped_prompts": 200, "max_consecutive_dropped_prompts": 200}
        options = {"num_minibatches": updates}
        self.config = make_config(6, 2 * half, failure, schedule, options, **sampling, **policies)
        self.state = initial_state(self.config)
        self.running, self.generated = {}, set()  # tickets
        self.buffer = {}  # ticket -> payload
        self.draw, self.train, self.stop = 0, (), None  # outstanding
        self.opened, self.drawn, self.trained, self.versions = 0, 0, set(), 0
        self.gone = Counter()
        self.do(Resumed())

    def do(self, event):
        self.state, commands = apply(self.state, event)
        for command in commands:
            match command:
                case Draw(num):
                    assert not self.draw
                    assert num > 0
                    self.draw = num
                case Dispatch(tickets):
                    for ticket in tickets:
                        self.opened += ticket.ticket == self.opened
                        self.running[ticket.ticket] = ticket
                        self.generated.discard(ticket.ticket)
                case Retry(ticket, delay):
                    assert delay > 0
                    assert ticket.attempts == self.running[ticket.ticket].attempts + 1
                    self.running[ticket.ticket] = ticket
                    self.generated.discard(ticket.ticket)
                case Cancel(tickets):
                    for number in tickets:
                        self.gone["failed"] += 1
                        del self.running[number]
                        self.generated.discard(number)
                case Free(tickets):
                    for number in tickets:
                        self.gone["freed"] += 1
                        del self.buffer[number]
                case Train(tickets, note):
                    assert not self.train
                    assert len(tickets) == self.config.num_prompts_per_step or note.removeprefix("short step: ")
                    assert 0 < len(tickets) <= self.config.num_prompts_per_step
                    assert not self.trained & set(tickets)
                    start, bound = self.state.step * self.config.versions_per_step, staleness_bound(self.config)
                    for number in tickets:
                        ticket = self.state.ledger.open[Phase.TRAINING][number]
                        assert self.buffer[number] == payload_of(ticket)
                        assert 0 <= start - ticket.version <= bound
                    self.train = tickets
                case Stop():
                    assert self.stop is None
                    self.stop = command

    @property
    def going(self):
        return self.stop is None

    @precondition(lambda self: self.going and self.draw)
    @rule(num_left=st.sampled_from([0, 1, OUT_OF_REACH, OUT_OF_REACH, OUT_OF_REACH]))
    def tasks_are_drawn(self, num_left):
        num = min(self.draw, num_left, self.num_data - self.drawn)
        draws = tuple(Drawn(self.drawn + i, 0, "xy"[i % 2]) for i in range(num))
        self.drawn += num
        requested, self.draw = self.draw, 0
        self.do(TasksDrawn(draws, requested))

    @precondition(lambda self: self.going and self.running)
    @rule(data=st.data())
    def some_are_generated(self, data):
        numbers = sorted(self.running.keys() - self.generated)
        assume(numbers)
        chosen = data.draw(st.lists(st.sampled_from(numbers), min_size=1, unique=True))
        self.generated |= set(chosen)
        self.do(GroupsGenerated(tuple(chosen)))

    @precondition(lambda self: self.going and self.running)
    @rule(data=st.data(), cause=st.sampled_from(["", "infra", "data"]))
    def some_are_judged(self, data, cause):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, unique=True))
        judgements = []
        for number in chosen:
            verdict, spread = data.draw(VERDICTS), data.draw(st.floats(0.1, 1))
            signal = verdict is FILTERED and spread > 0.5
            judgements.append(Judgement(number, verdict, "mixed", cause if verdict is FAILED else "", spread, signal))
        before = self.state.ledger.totals()
        tickets = {number: self.running[number] for number in chosen}
        self.buffer |= {n: payload_of(t) for n, t in tickets.items()}  # of those that are not kept, taken out below
        self.running = {n: t for n, t in self.running.items() if n not in tickets} | {
            j.ticket: tickets[j.ticket] for j in judgements if j.verdict is FAILED
        }  # fmt: skip
        self.generated -= set(chosen)
        held_before = set(self.state.held)
        oldest = self.state.schedule.oldest_version(self.state)
        for j in judgements:
            holds = j.signal and self.config.dynamic_sampling.on_exhausted == "relax"
            if j.verdict is KEPT or (holds and tickets[j.ticket].version >= oldest):
                continue
            del self.buffer[j.ticket]
            self.gone[j.verdict] += j.verdict is not FAILED
        assert held_before <= self.buffer.keys()
        self.do(GroupsJudged(tuple(judgements)))
        for j in judgements:
            if j.verdict is FAILED and j.ticket not in self.state.ledger.open[Phase.IN_FLIGHT]:
                del self.running[j.ticket]
                self.gone["failed"] += 1
        if all(j.verdict is not FAILED for j in judgements):
            assert self.state.ledger.failed == before["failed"]

    @precondition(lambda self: self.going and self.running)
    @rule(data=st.data())
    def attempts_are_lost(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.running)), min_size=1, max_size=2, unique=True))
        self.do(AttemptsFailed(tuple(chosen), "a worker died"))

    @precondition(lambda self: self.going and self.train)
    @rule()
    def the_step_is_trained(self):
        tickets, self.train = self.train, ()
        self.trained |= set(tickets)
        for number in tickets:
            del self.buffer[number]
        self.versions += self.config.versions_per_step
        self.do(StepTrained(self.versions))

    @precondition(lambda self: self.going and self.running)
    @rule(data=st.data())
    def what_has_been_judged_is_not_judged_again(self, data):
        over = sorted(set(range(self.opened)) - self.running.keys())
        assume(over)
        number, verdict = data.draw(st.sampled_from(over)), data.draw(VERDICTS)
        before = json.dumps(self.state.state_dict())
        with pytest.raises(ValueError, match=f"ticket {number} is "):
            apply(self.state, GroupsJudged((Judgement(number, verdict, "mixed"),)))
        with pytest.raises(ValueError, match=f"ticket {number} is "):
            apply(self.state, AttemptsFailed((number,), "late"))
        self.state.load_state_dict(json.loads(before))

    @precondition(lambda self: self.going or not self.stop.failed)
    @rule(in_flight=st.booleans(), asked=st.booleans())
    def a_new_process_goes_on(self, in_flight, asked):
        if asked and self.going:
            self.do(StopRequested("asked for"))
            assert self.stop == Stop("asked for")
        document = json.dumps(self.state.state_dict())
        self.state = initial_state(self.config)
        self.state.load_state_dict(json.loads(document))
        assert json.dumps(self.state.state_dict()) == document
        self.draw, self.train, self.stop = 0, (), None
        if not in_flight:
            self.generated = set()
        under_way, self.running = self.running, self.running if in_flight else {}
        self.do(Resumed(in_flight))
        assert identities(self.running) == identities(under_way)

    @precondition(lambda self: not self.going)
    @rule(event=st.sampled_from([StopRequested("again"), Resumed(in_flight=True)]))
    def nothing_is_begun_after_the_end(self, event):
        self.state, commands = apply(self.state, event)
        assert not [c for c in commands if isinstance(c, Stop)]

    @invariant()
    def the_books_agree(self):
        ledger = self.state.ledger
        ledger.check()
        running = ledger.open[Phase.IN_FLIGHT] | ledger.open[Phase.JUDGING]
        assert identities(self.running) == identities(running)
        in_buffer = [n for phase in (Phase.READY, Phase.HELD, Phase.TRAINING) for n in ledger.open[phase]]
        assert sorted(in_buffer) == sorted(self.buffer)
        assert len(self.buffer) + len(self.running) <= self.state.schedule.max_open
        dropped = sum(ledger.dropped.values())
        assert (ledger.trained, ledger.failed) == (len(self.trained), self.gone["failed"])
        assert dropped == self.gone[FILTERED] + self.gone[STALE] + self.gone["freed"]
        assert self.opened == ledger.dispatched

    @invariant()
    def something_is_under_way(self):
        assert self.running or self.draw or self.train or self.stop, "the controller waits, and nothing is under way"


AnyOrder.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=60)
TestAnyOrder = AnyOrder.TestCase


# ---- examples, as found ----


def begun(batch_size=2, name="in_order", mode="streaming", ahead=1, failure=None, **sampling):
    """A state whose first draws have been answered."""
    schedule = {"name": name, "mode": mode, "max_lookahead_versions": ahead, "max_staleness_versions": ahead}
    state = initial_state(make_config(9, batch_size, failure, schedule, **sampling))
    answered(state, apply(state, Resumed())[1])
    return state


def answered(state, commands):
    """The commands, once every Draw is answered."""
    draws = [c.num for c in commands if isinstance(c, Draw)]
    for num in draws:
        first = state.ledger.next_ticket
        commands += answered(state, apply(state, TasksDrawn(tuple(Drawn(first + i, 0) for i in range(num)), num))[1])
    return commands


def judge(state, *judgements):
    return answered(state, apply(state, GroupsJudged(tuple(Judgement(*j) for j in judgements)))[1])


def commands_of(kind, commands):
    return [c for c in commands if isinstance(c, kind)]


def test_of_several_reasons_to_stop_the_first_counts():
    state = begun(failure={"max_consecutive_dropped_prompts": 0}, max_replacements_per_slot=1)
    commands = judge(state, (0, FAILED, "error"), (1, FAILED, "error"))
    assert len(commands_of(Stop, commands)) == 1
    assert apply(state, StopRequested("too"))[1] == []


def test_a_refused_group_that_is_too_old_is_not_held():
    """Its step would train it beyond max_staleness_versions."""
    state = begun(name="windowed", ahead=0, oversample=2.0, on_exhausted="relax")
    judge(state, (0, KEPT, "mixed"), (1, KEPT, "mixed"))  # a step; 2 and 3 are under way
    answered(state, apply(state, StepTrained(1))[1])
    judge(state, (2, FILTERED, "mixed", "", 0.5, True), (4, FILTERED, "mixed", "", 0.5, True))
    assert list(state.held) == [4]
    assert state.ledger.dropped["filtered"] == 1


def test_groups_held_for_a_later_step_outlast_the_step_before():
    state = begun(on_exhausted="relax", max_replacements_per_slot=1)  # 0 and 1 are for step 0, 2 and 3 for step 1
    judge(state, (3, FILTERED, "mixed", "", 0.5, True))
    commands = judge(state, (0, KEPT, "mixed"), (1, KEPT, "mixed"))
    assert commands_of(Train, commands) == [Train((0, 1))]
    assert list(state.held) == [3]
    answered(state, apply(state, StepTrained(1))[1])
    judge(state, (4, FILTERED, "all_fail"))  # the one that replaced it was its last: it may stand in
    assert state.ledger.open[Phase.READY].keys() == {3}
    assert judge(state, (2, KEPT, "mixed"))[0] == Train((2, 3))


def test_groups_of_later_steps_are_no_surplus():
    state = begun(oversample=1.5, surplus="drop", batch_size=2)  # 0, 1, 2 for step 0; 3, 4, 5 for step 1
    judge(state, (3, KEPT, "mixed"), (2, KEPT, "mixed"), (1, KEPT, "mixed"))
    assert state.training  # 1 and 2
    answered(state, apply(state, StepTrained(1))[1])
    assert state.ledger.open[Phase.READY].keys() == {3}
    assert state.ledger.dropped["surplus"] == 0
    state = begun(oversample=1.5, surplus="drop", batch_size=2)
    commands = judge(state, *((n, KEPT, "mixed") for n in range(4)))
    assert commands_of(Free, commands) == [Free((2,))]  # what step 0 left over


def test_a_budget_for_rounds_waits_for_the_trainer():
    """Two steps are never out at once: the exhausted one is decided when the one before is trained."""
    options = {"max_num_gen_batches": 1, "on_exhausted": "short"}
    state = begun(name="rounds", mode="async", **options)
    assert commands_of(Train, judge(state, (0, KEPT, "mixed"), (1, KEPT, "mixed"))) == [Train((0, 1))]
    assert judge(state, (2, KEPT, "mixed"), (3, FILTERED, "all_fail")) == []
    commands = apply(state, StepTrained(1))[1]
    assert [c.tickets for c in commands_of(Train, commands)] == [(2,)]
    assert commands_of(Draw, commands) == [Draw(2)]  # for the step after, in the same breath


def test_a_later_step_that_was_made_short_says_why():
    state = begun(failure={"on_dropped_prompt": "shrink"})
    judge(state, (2, FAILED, "error"))  # of step 1
    judge(state, (0, KEPT, "mixed"), (1, KEPT, "mixed"))
    answered(state, apply(state, StepTrained(1))[1])
    (train,) = commands_of(Train, judge(state, (3, KEPT, "mixed")))
    assert train == Train((3,), "short step: groups failed, and rollout_failure.on_dropped_prompt = 'shrink'")


@pytest.mark.parametrize("verdict", [KEPT, FILTERED, FAILED, STALE])
def test_a_second_verdict_is_refused(verdict):
    state = begun()
    judge(state, (0, KEPT, "mixed"))
    with pytest.raises(ValueError, match="ticket 0 is ready: it has been judged already"):
        judge(state, (0, verdict, "mixed"))
    with pytest.raises(ValueError, match="ticket 0 is ready"):
        apply(state, AttemptsFailed((0,), "late"))
    assert state.ledger.level(Phase.READY) == 1


def test_attempts_that_are_made_again_do_not_spend_the_filters_budget():
    """Under rounds with B = 1 and one replacement, two groups may be filtered in a row; a lost attempt is neither."""
    state = begun(1, "rounds", max_replacements_per_slot=1, max_num_gen_batches=0)
    for _ in range(2):
        assert commands_of(Retry, judge(state, (0, FAILED, "error", "infra")))
    commands = judge(state, (0, FILTERED, "all_fail"))
    assert not commands_of(Stop, commands)
    assert commands_of(Stop, judge(state, (1, FILTERED, "all_fail")))


def test_a_group_that_is_too_old_itself_is_not_promoted():
    """0 to 2 are for step 0; those left over are for step 1, and too old when step 2 begins."""
    state = begun(1, oversample=3.0, max_surplus_age_versions=0, ahead=0)
    assert commands_of(Train, judge(state, (0, KEPT, "mixed"), (1, KEPT, "mixed"), (2, KEPT, "mixed")))
    commands = answered(state, apply(state, StepTrained(1))[1])
    assert commands_of(Free, commands) == [Free((1, 2))]
    assert state.totals["promoted_groups"] == 0
    assert state.ledger.dropped["stale"] == 2


@pytest.mark.parametrize("name", ["ready_first", "weight_fifo", "windowed"])
@pytest.mark.parametrize(("slots", "num"), [(64, 16), (0, 36), (16, 4), (10_000, 36)])
def test_no_more_are_under_way_than_the_slots_have_a_use_for(name, slots, num):
    """What waits behind the slots grows old. B = 4 groups of G = 8, a window of nine steps."""
    mapping = to_mapping(make_config(99, 4, None, {"name": name, "max_staleness_versions": 8}))
    mapping["sampler"] |= {"num_slots": slots, "memory_budget_mb": 0 if slots else 64}  # as many as that holds
    assert apply(initial_state(from_mapping(mapping)), Resumed())[1] == [Draw(num)]


def test_held_groups_count_as_without_signal_where_the_data_ended():
    state = begun(on_exhausted="relax", ahead=0)
    held = Judgement(0, FILTERED, "mixed", "", 0.5, True)
    assert apply(state, GroupsJudged((held, Judgement(1, FILTERED, "all_fail"))))[1] == [Draw(2)]
    (stop,) = commands_of(Stop, apply(state, TasksDrawn((), 2))[1])
    assert stop.reason == "the data ended after 0 of 9 steps; of 2 groups 2 carried no signal (100%)"


# ---- how many slots exhaust their budget ----


def exhausted_slots(p, limit, batch_size, num_steps, spread=0.0, of_step=False):
    """Slots of a run under in_order that used up their replacements.

    The drop rate of a task is p - spread or p + spread; tasks of both kinds are mixed, or alternate step by step.
    """
    sampling = {"max_replacements_per_slot": limit, "on_exhausted": "short"}
    rng = random.Random(batch_size)

    def is_dropped(ticket):
        hard = ticket.step % 2 if of_step else rng.random() < 0.5
        return rng.random() < (p + spread if hard else p - spread)

    config = make_config(num_steps, batch_size, None, {"name": "in_order"}, **sampling)
    return run_at_once(config, is_dropped).totals["exhausted_slots"]


def near(count, expected):
    return abs(count - expected) <= 4 * math.sqrt(expected)


@pytest.mark.parametrize(("p", "limit"), [(0.33, 3), (0.6, 12), (0.8, 32)])
def test_slots_exhaust_their_replacements_as_often_as_the_formula_says(p, limit):
    """p^(N + 1) of the slots, within four standard deviations; the full size is in benchmarks/sim_controller.py."""
    expected = expected_exhaustions(p, limit, 512 * 50)  # 304, 33, 16
    assert near(exhausted_slots(p, limit, 512, 50), expected)


def test_the_formula_is_a_lower_bound_where_tasks_differ():
    """By Jensen's inequality: the mean of p^(N + 1) is at least (the mean of p)^(N + 1).

    They are equal where a lineage meets tasks of all kinds, whatever these are; not where its tasks are of a kind, as
    under a curriculum that serves one level at a time.
    """
    p, limit, spread, slots = 0.6, 12, 0.15, 512 * 20
    lowest = expected_exhaustions(p, limit, slots)  # 13
    assert near(exhausted_slots(p, limit, 512, 20, spread), lowest)
    more = (expected_exhaustions(p - spread, limit, slots) + expected_exhaustions(p + spread, limit, slots)) / 2  # 122
    count = exhausted_slots(p, limit, 512, 20, spread, of_step=True)
    assert near(count, more)
    assert count > lowest + 4 * math.sqrt(lowest)
