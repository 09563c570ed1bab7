"""The controller: every rule by example, then random runs that are checked after every event."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Simulation, make_config, random_durations, random_verdict

from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import (
    Dispatch,
    Draw,
    Drawn,
    Free,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    StepTrained,
    Stop,
    StopRequested,
    TasksDrawn,
    Train,
)
from dynrl.rollout.ledger import Phase
from dynrl.rollout.schedules import BaseSchedule
from dynrl.types import Verdict

KEPT, FILTERED, FAILED, STALE = Verdict.KEPT, Verdict.FILTERED, Verdict.FAILED, Verdict.STALE


def judged(*judgement):
    """The event of one group."""
    return GroupsJudged((Judgement(*judgement),))


def every(n, verdict=FILTERED):
    """Keeps one group in n."""
    return lambda ticket: KEPT if ticket.ticket % n == n - 1 else verdict


def keep_all(ticket):
    return KEPT


def drop_all(ticket):
    return FILTERED


def simulate(verdict, *, num_tasks=None, num_steps=3, batch_size=4, failure=None, **dynamic_sampling):
    config = make_config(num_steps, batch_size, failure, **dynamic_sampling)
    return Simulation(config, verdict, num_tasks).run()


def sizes(run):
    return [len(tickets) for tickets, _ in run.trains]


def draws(run):
    return [c.num for c in run.executed if isinstance(c, Draw)]


def succeeded(run):
    return run.stop.failed is False and sizes(run) == [4, 4, 4]


# -------------------------------------------------------------------------------------------- rounds and their cap


def test_every_group_kept_is_one_round_per_step():
    run = simulate(keep_all)
    assert [t for t, _ in run.trains] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert draws(run) == [4, 4, 4]
    assert run.stop == Stop("all 3 steps were made", failed=False)
    assert {t.replacement_index for t in run.tickets} == {0}


def test_rounds_refill_the_deficit_until_the_step_is_full():
    """Rounds and steps are different counters (verl#991)."""
    # Even tickets are dropped: 4 -> 2 kept, 2 -> 1, 1 (ticket 6) -> 0, 1 (ticket 7) -> 1.
    run = simulate(every(2), num_steps=1)
    assert draws(run) == [4, 2, 1, 1]
    assert run.trains == [((1, 3, 5, 7), "")]
    assert [t.replacement_index for t in run.tickets] == [0] * 4 + [1] * 2 + [2, 3]


@pytest.mark.parametrize(("cap", "steps"), [(0, 1), (4, 1), (10, 1), (3, 0), (2, 0), (1, 0)])
def test_cap_on_rounds_trains_when_the_last_allowed_round_fills_the_step(cap, steps):
    """A cap that kills a run is a choice (DAPO#22).

    The step of the test above needs 4 rounds: a cap of exactly 4 trains it, one of 3 does not.
    """
    run = simulate(every(2), num_steps=1, max_num_gen_batches=cap)
    assert len(run.trains) == steps
    assert run.stop.failed == (steps == 0)
    if not steps:
        assert len(draws(run)) == cap
        assert f"dynamic_sampling.max_num_gen_batches = {cap} rounds are used up" in run.stop.reason


def test_cap_of_one_with_everything_kept_is_plain_grpo():
    assert succeeded(simulate(keep_all, max_num_gen_batches=1))


def test_overshoot_is_surplus():
    run = simulate(keep_all, num_steps=1, oversample=1.5)
    assert draws(run) == [6]
    assert run.trains == [((0, 1, 2, 3), "")]
    assert run.ready == {4, 5}


@pytest.mark.parametrize(
    ("oversample", "refill", "expected"),
    [
        (1.0, "deficit", [8, 4, 2, 1, 1]),
        (1.5, "deficit", [12, 3, 2]),  # 6 kept; 2 missing: 12, 13, 14, 1 kept; 1 missing: 15, 16, 1 kept
        (2.0, "deficit", [16]),
        (3.0, "deficit", [24]),
        (1.0, "full", [8, 8]),
        (1.5, "full", [12, 12]),
    ],
)
def test_oversampling_and_refill(oversample, refill, expected):
    """Odd tickets are kept, B = 8."""
    run = simulate(every(2), num_steps=1, batch_size=8, oversample=oversample, refill=refill)
    assert draws(run) == expected
    assert len(run.ready) == sum(expected) // 2 - 8
    assert run.trains == [(tuple(range(1, 16, 2)), "")]  # the oldest that were kept


# ------------------------------------------------------------------------------------------------ budgets and advice


def test_error_names_counts_keys_and_advice_that_clears_it():
    """Every value that the message advises ends the error."""
    options = {"num_steps": 3, "max_num_gen_batches": 2}
    reason = simulate(every(2), **options).stop.reason
    assert "step 0 has 3 of 4 groups: dynamic_sampling.max_num_gen_batches = 2 rounds are used up" in reason
    assert "6 groups were judged: 3 filtered, 3 kept (3 all_fail, 3 mixed), drop rate 50%" in reason
    assert "on_exhausted = 'short' trains on what was kept" in reason
    short = simulate(every(2), **options, on_exhausted="short")
    assert short.stop == Stop("all 3 steps were made", failed=False)
    assert all(note.startswith("short step: step ") for _, note in short.trains)
    assert "max_num_gen_batches = 0 lifts the cap" in reason
    assert succeeded(simulate(every(2), **options | {"max_num_gen_batches": 0}))
    assert "easier or harder tasks" in reason
    assert succeeded(simulate(keep_all, **options))


def test_failed_groups_are_not_laid_to_the_tasks():
    reason = simulate(lambda ticket: FAILED, max_num_gen_batches=2).stop.reason
    assert "8 groups were judged: 8 failed, drop rate 100%" in reason
    assert "most groups failed" in reason
    assert "easier or harder" not in reason


def test_short_is_advised_only_where_it_would_train():
    reason = simulate(drop_all, max_num_gen_batches=2).stop.reason
    assert "step 0 has 0 of 4 groups" in reason
    assert "on_exhausted" not in reason
    assert "max_num_gen_batches = 0" in reason


@pytest.mark.parametrize("replacements", [1, 2, 32])
def test_without_a_cap_a_filter_that_drops_everything_ends(replacements):
    run = simulate(drop_all, max_num_gen_batches=0, max_replacements_per_slot=replacements)
    assert run.stop.failed
    # One attempt and the replacements, of each of 4 slots.
    assert draws(run) == [4] * (1 + replacements)
    assert f"dynamic_sampling.max_replacements_per_slot = {replacements} replacements of each of 4" in run.stop.reason
    assert f"{4 * (1 + replacements)} filtered" in run.stop.reason
    assert "max_num_gen_batches" not in run.stop.reason  # it is not what ended the run
    assert f"max_replacements_per_slot above {replacements} goes on for longer" in run.stop.reason


def test_advice_about_replacements_clears_the_error():
    options = {"max_num_gen_batches": 0, "max_replacements_per_slot": 1}
    assert "max_replacements_per_slot above 1" in simulate(every(9), **options).stop.reason
    assert succeeded(simulate(every(9), **options | {"max_replacements_per_slot": 2}))


def test_without_a_cap_one_in_a_hundred_does_not_end_early():
    run = simulate(every(100), num_steps=2, max_num_gen_batches=0)
    assert run.stop == Stop("all 2 steps were made", failed=False)
    assert sizes(run) == [4, 4]


def test_short_steps_without_a_group_have_a_budget():
    run = simulate(drop_all, max_num_gen_batches=2, on_exhausted="short", max_consecutive_unfilled_steps=3)
    assert run.stop.failed
    assert run.trains == []
    assert draws(run) == [4] * 8  # three empty steps are allowed, the fourth is not
    assert len(run.warnings) == 3
    assert run.warnings[0].startswith("no update: step 0 has 0 of 4 groups: dynamic_sampling.max_num_gen_batches = 2")
    assert "A step could not be filled 4 times in a row" in run.stop.reason
    assert "dynamic_sampling.max_consecutive_unfilled_steps = 3" in run.stop.reason
    assert [t.replacement_index for t in run.tickets[::4]] == [0, 1] * 4  # each of them has all its rounds


def test_a_trained_step_resets_the_budget_for_empty_ones():
    # Of 6 steps' worth of single rounds, every third keeps one group; two empty ones in a row are allowed.
    options = {"max_num_gen_batches": 1, "on_exhausted": "short", "max_consecutive_unfilled_steps": 2}
    run = simulate(every(12), **options)
    assert (sizes(run), len(run.warnings), run.stop.failed) == ([1, 1, 1], 6, False)
    run = simulate(every(12), **options | {"max_consecutive_unfilled_steps": 1})
    assert run.stop.failed
    assert "dynamic_sampling.max_consecutive_unfilled_steps = 1" in run.stop.reason


def test_held_groups_take_no_room_from_rounds():
    """Three of four are kept, and then the filter refuses groups that carry signal until the rounds are used up."""

    def verdict(ticket):
        if ticket.ticket < 3:
            return KEPT
        return Judgement(ticket.ticket, FILTERED, "mixed", spread=0.5, signal=True)

    run = simulate(verdict, num_steps=1, on_exhausted="relax", max_num_gen_batches=8)
    assert run.stop == Stop("all 1 steps were made", failed=False)
    assert run.state.totals["relaxed_groups"] == 1
    assert len(draws(run)) == 8


# ----------------------------------------------------------------------------------------------------------- surplus


def test_surplus_is_carried_and_trained_first():
    run = simulate(keep_all, num_steps=2, oversample=1.5)
    assert [t for t, _ in run.trains] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert draws(run) == [6, 3]  # 2 were carried, 2 missing


def test_surplus_of_a_whole_step_needs_no_round():
    run = simulate(keep_all, num_steps=2, oversample=2.0)
    assert draws(run) == [8]
    assert sizes(run) == [4, 4]


def test_surplus_can_be_dropped():
    run = simulate(keep_all, num_steps=2, oversample=1.5, surplus="drop")
    assert [t for t, _ in run.trains] == [(0, 1, 2, 3), (6, 7, 8, 9)]
    assert run.freed == [(4, 5), (10, 11)]
    assert run.state.ledger.totals()["dropped"]["surplus"] == 4


@pytest.mark.parametrize(("age", "freed"), [(0, [(4, 5, 6, 7)]), (1, []), (8, [])])
def test_carried_groups_become_stale(age, freed):
    run = simulate(keep_all, num_steps=2, oversample=2.0, max_surplus_age_versions=age)
    assert run.freed[:1] == freed  # at the second step they are one version old
    assert run.state.ledger.totals()["dropped"]["stale"] == sum(map(len, run.freed))


def test_age_counts_versions_not_steps():
    for updates, stale in ((4, 0), (5, 4)):
        config = make_config(2, 5 * 4, train={"num_minibatches": updates}, oversample=2.0, max_surplus_age_versions=4)
        run = Simulation(config, keep_all)
        assert run.run().state.ledger.totals()["dropped"]["stale"] == 5 * stale


def test_a_stale_verdict_is_a_drop_of_its_own():
    run = simulate(every(2, STALE), num_steps=1)
    assert run.state.ledger.totals()["dropped"] == {
        "filtered": 0, "stale": 4, "evicted": 0, "cancelled": 0, "surplus": 0,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ end of data


@pytest.mark.parametrize(("on_data_end", "expected"), [("short", [4, 4, 2]), ("stop", [4, 4])])
def test_end_of_data(on_data_end, expected):
    run = simulate(keep_all, num_tasks=10, num_steps=9, on_data_end=on_data_end)
    assert sizes(run) == expected
    assert run.stop.failed is False
    assert run.stop.reason.startswith(f"the data ended after {len(expected)} of 9 steps; of 10 groups 0 carried no")
    assert run.state.ledger.totals()["dropped"]["surplus"] == 10 - sum(expected)
    if on_data_end == "short":
        assert run.trains[-1][1] == "short step: the data ended with 2 of 4 groups ready"


@pytest.mark.parametrize("on_data_end", ["short", "stop"])
def test_data_that_ends_with_nothing_ready_is_no_fault_of_the_filter(on_data_end):
    """An iterator that ended once hung the run (NeMo-RL#2899)."""
    run = simulate(drop_all, num_tasks=6, on_data_end=on_data_end)
    assert (run.trains, run.stop.failed) == ([], False)
    assert run.stop.reason == "the data ended after 0 of 3 steps; of 6 groups 6 carried no signal (100%)"


def test_no_data_at_all():
    run = simulate(keep_all, num_tasks=0)
    assert run.stop == Stop("the data ended after 0 of 3 steps; of 0 groups 0 carried no signal (0%)", failed=False)


def test_data_that_ends_exactly_with_a_step():
    run = simulate(keep_all, num_tasks=8, num_steps=2)
    assert run.stop.reason == "all 2 steps were made"
    assert simulate(keep_all, num_tasks=8).stop.reason.startswith("the data ended after 2 of 3 steps")


def test_the_last_partial_round_can_fill_a_step():
    run = simulate(every(2), num_tasks=8, num_steps=1)
    assert (sizes(run), run.stop.reason) == ([4], "all 1 steps were made")


def test_end_of_data_comes_before_the_cap():
    """At the cap with no data left the data is what ended: there would be nothing to lift the cap for."""
    run = simulate(every(2), num_tasks=5, max_num_gen_batches=2, on_data_end="stop")
    assert run.stop == Stop("the data ended after 0 of 3 steps; of 5 groups 3 carried no signal (60%)", failed=False)


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("key", ["max_skipped_prompts", "max_consecutive_dropped_prompts"])
def test_failure_budgets(key):
    run = simulate(lambda t: FAILED, failure={key: 5}, max_num_gen_batches=0)
    assert run.stop.failed
    assert f"6 groups failed, more than rollout_failure.{key} = 5" in run.stop.reason
    assert "6 groups were judged: 6 failed, drop rate 100%" in run.stop.reason
    # A larger budget clears it: the first 10 groups fail, the others do not.
    recovers = lambda t: FAILED if t.ticket < 10 else KEPT  # noqa: E731
    assert simulate(recovers, failure={key: 5}, max_num_gen_batches=0).stop.failed
    assert succeeded(simulate(recovers, failure={key: 10}, max_num_gen_batches=0))


def test_the_run_of_failures_ends_with_any_success_and_the_total_does_not():
    pattern = lambda t: FAILED if t.ticket % 3 else FILTERED if t.ticket % 2 else KEPT  # noqa: E731
    options = {"max_num_gen_batches": 0, "max_replacements_per_slot": 100}
    assert succeeded(simulate(pattern, failure={"max_consecutive_dropped_prompts": 2}, **options))
    run = simulate(pattern, failure={"max_consecutive_dropped_prompts": 1}, **options)
    assert "2 groups failed, more than rollout_failure.max_consecutive_dropped_prompts = 1" in run.stop.reason
    run = simulate(pattern, failure={"max_skipped_prompts": 9}, **options)
    assert "10 groups failed, more than rollout_failure.max_skipped_prompts = 9" in run.stop.reason


def test_filtered_groups_never_spend_the_failure_budgets():
    failure = {"max_skipped_prompts": 0, "max_consecutive_dropped_prompts": 0}
    assert succeeded(simulate(every(20), failure=failure, max_num_gen_batches=0))


def test_a_filtered_group_resets_the_run_of_failures():
    # failed, failed, filtered, failed, failed, kept, ...
    pattern = lambda t: (FAILED, FAILED, FILTERED, FAILED, FAILED, KEPT)[t.ticket % 6]  # noqa: E731
    failure = {"max_consecutive_dropped_prompts": 2}
    assert succeeded(simulate(pattern, failure=failure, max_num_gen_batches=0))


# --------------------------------------------------------------------------------------------------- begin and end


def test_no_steps_to_make():
    run = simulate(keep_all, num_steps=0)
    assert (run.executed, run.tickets) == ([Stop("all 0 steps were made")], [])


def test_dynamic_sampling_off_still_replaces_failed_groups():
    """With enable = False the judge keeps everything; the controller needs no branch for it."""
    run = simulate(every(2, FAILED), num_steps=1, enable=False)
    assert run.trains == [((1, 3, 5, 7), "")]


def test_stop_requested_stops_at_once_and_nothing_follows():
    state = initial_state(make_config())
    state, commands = apply(state, Resumed())
    assert commands == [Draw(4)]
    state, (dispatch,) = apply(state, TasksDrawn(tuple(Drawn(i, 0) for i in range(4)), 4))
    assert isinstance(dispatch, Dispatch)
    state, commands = apply(state, StopRequested("interrupted"))
    assert commands == [Stop("interrupted", failed=False)]
    for ticket in dispatch.tickets:
        state, commands = apply(state, GroupsGenerated((ticket.ticket,)))
        assert commands == []
        state, commands = apply(state, judged(ticket.ticket, KEPT, "mixed"))
        assert commands == []  # a full step, but the run is over
    # A restart goes on from there.
    again = initial_state(make_config())
    again.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert apply(again, Resumed())[1] == [Train((0, 1, 2, 3))]


def test_a_finished_run_can_be_given_more_steps():
    run = simulate(keep_all, num_steps=2, oversample=1.5)
    again = Simulation(make_config(3, oversample=1.5), keep_all)
    again.state.load_state_dict(json.loads(json.dumps(run.state.state_dict())))
    _, commands = apply(again.state, Resumed())
    assert commands == [Draw(5)]  # one group was carried: 3 missing, 1.5 times as many


def test_answers_that_nobody_waits_for():
    state, _ = apply(initial_state(make_config()), Resumed())
    with pytest.raises(ValueError, match="no Train is outstanding"):
        apply(state, StepTrained(1))
    state, _ = apply(state, TasksDrawn(tuple(Drawn(i, 0) for i in range(4)), 4))
    with pytest.raises(ValueError, match="4 tasks were drawn, but no Draw is outstanding"):
        apply(state, TasksDrawn(tuple(Drawn(i, 0) for i in range(4)), 4))
    with pytest.raises(ValueError, match="ticket 9 is not open"):
        apply(state, judged(9, KEPT, "mixed"))
    state, _ = apply(state, judged(0, FILTERED, "all_fail"))
    with pytest.raises(ValueError, match="ticket 0 is not open"):
        apply(state, judged(0, KEPT, "mixed"))


def test_more_tasks_than_asked_for_are_refused():
    state, _ = apply(initial_state(make_config()), Resumed())
    with pytest.raises(ValueError, match="5 tasks were drawn, 4 asked for"):
        apply(state, TasksDrawn(tuple(Drawn(i, 0) for i in range(5)), 4))


def test_freed_groups_leave_before_the_next_command():
    """The loop frees at once, so that a round that is drawn next finds room in the buffer."""
    state, _ = apply(initial_state(make_config(2, oversample=1.5, surplus="drop")), Resumed())
    state, _ = apply(state, TasksDrawn(tuple(Drawn(i, 0) for i in range(6)), 6))
    for i in range(5):
        state, commands = apply(state, judged(i, KEPT, "mixed"))
        assert commands == []
    state, commands = apply(state, judged(5, KEPT, "mixed"))
    assert commands == [Train((0, 1, 2, 3))]
    state, commands = apply(state, StepTrained(1))
    assert commands == [Free((4, 5)), Draw(6)]


# ------------------------------------------------------------------------------------------------------- random runs

RUNS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 5),
        "keep": st.floats(0, 1),
        "fail": st.sampled_from([0.0, 0.0, 0.1, 0.95]),
        "stale": st.sampled_from([0.0, 0.05]),
        "num_tasks": st.none() | st.integers(0, 60),
        "seed": st.integers(0, 10**6),
        "options": st.fixed_dictionaries(
            {
                "max_num_gen_batches": st.integers(0, 4),
                "max_replacements_per_slot": st.integers(1, 3),
                "on_exhausted": st.sampled_from(["raise", "short"]),
                "max_consecutive_unfilled_steps": st.integers(0, 2),
                "on_data_end": st.sampled_from(["short", "stop"]),
                "oversample": st.sampled_from([1.0, 1.5, 2.0, 3.0]),
                "refill": st.sampled_from(["deficit", "full"]),
                "surplus": st.sampled_from(["carry", "drop"]),
                "max_surplus_age_versions": st.integers(0, 2),
            }
        ),
    }
)
FAILURE = {"max_skipped_prompts": 20, "max_consecutive_dropped_prompts": 6}


def random_run(batch_size, keep, fail, stale, num_tasks, seed, options, num_steps=4, hook=None):
    config = make_config(num_steps, batch_size, FAILURE, **options)
    verdict, durations = random_verdict(seed, keep, fail, stale), random_durations(seed)
    return Simulation(config, verdict, num_tasks, durations, hook=hook)


@settings(deadline=None, max_examples=150)
@given(RUNS)
def test_random_runs_keep_the_books(arguments):
    """The simulation checks conservation after every event, and every batch and dispatch as it is commanded."""
    run = random_run(**arguments).run()
    trained = [t for tickets, _ in run.trains for t in tickets]
    assert len(trained) == len(set(trained))
    assert run.state.step == len(run.trains) <= 4
    assert run.stop.reason


@settings(deadline=None, max_examples=40)
@given(RUNS)
def test_resumed_at_every_event_the_run_goes_on_the_same(arguments):
    """Work in flight is dispatched again under the same identity; every later draw, batch and end is the same."""
    snapshots = []

    def hook(run):
        if not run.state.stopped or not any(isinstance(c, Stop) and c.failed for c in run.queue):
            snapshots.append(run.snapshot())

    whole = random_run(**arguments, num_steps=3, hook=hook).run()
    for snapshot in snapshots[:: max(1, len(snapshots) // 100)] + snapshots[-1:]:
        again = whole.resumed(snapshot).run()
        assert again.executed == whole.executed[snapshot[-1] :]
        assert again.tickets == whole.tickets
        assert again.trains == whole.trains
        assert again.state.ledger.totals() == whole.state.ledger.totals()


@settings(deadline=None, max_examples=25)
@given(
    keep=st.floats(0.05, 1), seed=st.integers(0, 10**6), batch_size=st.integers(1, 8),
    oversample=st.sampled_from([1.0, 1.5, 3.0]), refill=st.sampled_from(["deficit", "full"]),
    surplus=st.sampled_from(["carry", "drop"]), age=st.integers(0, 3),
)  # fmt: skip
def test_no_step_starves(keep, seed, batch_size, oversample, refill, surplus, age):
    """Something is kept, data is endless, budgets are out of reach: every step closes, with B groups."""
    options = {"oversample": oversample, "refill": refill, "surplus": surplus, "max_surplus_age_versions": age}
    config = make_config(4, batch_size, max_num_gen_batches=0, max_replacements_per_slot=10_000, **options)
    run = Simulation(config, random_verdict(seed, keep), durations=random_durations(seed)).run()
    assert run.stop == Stop("all 4 steps were made", failed=False)
    assert sizes(run) == [batch_size] * 4


def test_state_is_bounded_by_what_is_open():
    """Over 200 steps only the digits of the counts grow."""
    size_of_step = {}

    def hook(run):
        if run.state.training:
            size_of_step[run.state.step] = len(json.dumps(run.state.state_dict()))

    config = make_config(200, 8, max_num_gen_batches=0, oversample=1.5, max_surplus_age_versions=2)
    run = Simulation(config, random_verdict(1, 0.5, fail=0.02), durations=random_durations(1), hook=hook).run()
    assert run.stop == Stop("all 200 steps were made", failed=False)
    largest = [max(size_of_step[s] for s in range(begin, begin + 50)) for begin in (10, 150)]
    # At most B - 1 + ceil(1.5 * B) = 19 tickets are open; each number may have grown by two digits.
    assert largest[1] <= largest[0] + 19 * 6 * 2


# ---- Schedules of one's own ----


class Chooses(BaseSchedule):
    """Selects as it is told."""

    max_open = 8
    chosen: Any = staticmethod(lambda view: None)

    def __init__(self, config):
        pass

    def admit(self, view):
        return [-1] * (view.size(view.filling) - view.ledger.num_running - view.ledger.level(Phase.READY))

    def select(self, view):
        ready = sorted(view.ledger.open[Phase.READY])
        return type(self).chosen(ready) if len(ready) >= 2 else None


@pytest.mark.parametrize(
    ("chosen", "what"),
    [
        (lambda ready: ready[:1], r"\[0\]"),
        (lambda ready: ready[:1] * 2, r"\[0, 0\]"),
        (lambda ready: [*ready, 77], "ticket 77, which is not ready"),
        (lambda ready: [], r"\[\]"),
    ],
)
def test_a_selection_that_is_no_batch_names_the_schedule(monkeypatch, chosen, what):
    monkeypatch.setattr(Chooses, "chosen", staticmethod(chosen))
    config = make_config(2, 2, schedule={"name": f"{__name__}:Chooses"})
    with pytest.raises(ValueError, match=rf"schedule '.*:Chooses': select returned {what}, for a step of 2 groups"):
        Simulation(config, lambda ticket: Verdict.KEPT).run()


def test_attempts_are_counted_by_cause():
    """One failure of the infrastructure leaves the task's data its own attempts."""
    causes: Any = iter(["infra", "data", "infra", "data"])
    failure = {"max_infra_attempts_per_prompt": 3, "max_data_attempts_per_prompt": 2, "retry_backoff_secs": 0.0}

    def judge(ticket):
        if ticket.ticket:
            return Verdict.KEPT
        return Judgement(0, Verdict.FAILED, "mixed", next(causes))

    run = Simulation(make_config(1, 1, failure, schedule={"name": "in_order"}), judge).run()
    # Twice failed for infrastructure, of three attempts; the second failure for data is one too many.
    assert [(t.attempts, t.data_failures) for t, _ in run.retries] == [(2, 0), (3, 1), (4, 1)]
    assert run.state.ledger.failed == 1


@pytest.mark.parametrize("name", ["ready_first", "weight_fifo", "in_order"])
def test_replacements_of_later_steps_keep_their_lineage(name):
    """Without oversampling, each place of each step has one first attempt, whenever the step before was trained."""
    schedule = {"name": name, "max_staleness_versions": 2, "max_lookahead_versions": 2}
    config = make_config(12, 4, schedule=schedule, oversample="none", max_replacements_per_slot=99)
    run = Simulation(config, random_verdict(5, 0.5), durations=random_durations(5)).run()
    assert run.state.ledger.dropped["filtered"] > 20
    assert run.state.totals["replaced_groups"] == run.state.ledger.dropped["filtered"]
    assert sum(t.replacement_index == 0 for t in run.tickets) == 12 * 4
