"""Every schedule in every mode: random runs, checked after every event; resumed at every event; events in any order.

What is checked at each event stands in `simulation.py` (conservation, batches, the buffer's payloads, room, what
counts as a failure) and in `watch` below (budgets, replacement lineages).
"""

import json
import math
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
    unit,
)

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
        random_durations(seed), world["train_ticks"], randomly_lost(seed, world["lost"]), hook,
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
    lives = 1 + sampling.max_consecutive_unfilled_steps if sampling.on_exhausted == "carry" else 1
    attempts = max(failure.max_infra_attempts_per_prompt, failure.max_data_attempts_per_prompt)
    for tickets in state.ledger.open.values():
        for ticket in tickets.values():
            assert ticket.attempts <= attempts
            if config.schedule.name == "rounds":
                assert not sampling.max_num_gen_batches or ticket.replacement_index < sampling.max_num_gen_batches
            else:
                assert ticket.replacement_index < per_slot * lives
                assert ticket.for_step < 0 or state.filling <= ticket.for_step or ticket.ticket in state.ledger.open[
                    Phase.TRAINING
                ]


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


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=400)
def test_random_runs_keep_the_books(world, schedule, sampling, policies, failure):
    check_whole(make_run(world, schedule, sampling, policies, failure, hook=watch).run())


# ------------------------------------------------------------------------------------------------------- starvation


@given(WORLD, SCHEDULE, SAMPLING, max_examples=150)
def test_no_step_starves(world, schedule, sampling):
    """Something is kept, data is endless, budgets are out of reach: every step closes, with B groups."""
    world = world | {"num_tasks": None, "fail": min(world["fail"], 0.5), "lost": min(world["lost"], 0.5)}
    budgets = {"max_num_gen_batches": 0, "max_replacements_per_slot": OUT_OF_REACH}
    failure = {"max_skipped_prompts": OUT_OF_REACH, "max_consecutive_dropped_prompts": OUT_OF_REACH}
    run = make_run(world, schedule, sampling, budgets, failure).run()
    assert run.stop == Stop("all 4 steps were made", failed=False)
    assert sizes(run) == [2 * world["batch_size"]] * 4
    check_whole(run)


# ----------------------------------------------------------------------------------------------------------- resume


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


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=50)
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


@given(WORLD, SCHEDULE, SAMPLING, POLICIES, FAILURE, max_examples=50)
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
        "train_ticks": 20, "seed": 3,
    }  # fmt: skip
    run = make_run(world, schedule, options, budgets, failure, 200, hook).run()
    assert run.stop == Stop("all 200 steps were made", failed=False)
    # Each open ticket holds five numbers that may have grown by two digits; each cohort and each total some more.
    assert largest[3] <= largest[1] + run.state.schedule.max_open * 5 * 2 + 200
