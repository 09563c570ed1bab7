"""The schedules alone: what they dispatch, what a step trains on, what is too old, which budgets end a step."""

import json
import math

import pytest
from simulation import make_config

from dynrl.rollout.ledger import Ledger, Phase
from dynrl.rollout.schedules import BUILT_IN_SCHEDULES, BaseSchedule, Capabilities, make_schedule
from dynrl.types import Verdict

PATH = [Phase.IN_FLIGHT, Phase.JUDGING, Phase.READY, Phase.TRAINING]


class View:
    """What the controller shows a schedule."""

    versions_per_step = 1
    num_steps = 100

    def __init__(self, batch_size=4, version=0, filling=None, short=0):
        self.batch_size, self.version, self.short = batch_size, version, short
        self.filling = version if filling is None else filling
        self.ledger = Ledger()

    def size(self, step):
        return self.batch_size - (self.short if step == self.filling else 0)

    def wanted(self, num_kept, full):
        return num_kept

    def add(self, num, phase, version=0, for_step=-1):
        for _ in range(num):
            ticket = self.ledger.dispatch(0, 0, version, 0, 0, for_step=for_step)
            for later in PATH[1 : PATH.index(phase) + 1]:
                self.ledger.move([ticket.ticket], later)
        return self


def schedule_of(name, batch_size=4, schedule=None, **dynamic_sampling):
    return make_schedule(make_config(100, batch_size, schedule={"name": name, **(schedule or {})}, **dynamic_sampling))


def rounds(batch_size=4, **config):
    return schedule_of("rounds", batch_size, **config)


# ---- Names ----


def test_unknown_schedule_names_key_and_choices():
    with pytest.raises(ValueError, match=r"unknown schedule 'window' \(did you mean 'windowed'\?\); built in"):
        schedule_of("window")


class Hasty(BaseSchedule):
    """Trains on whatever is ready, one group ahead of need."""

    capabilities = Capabilities(completion_order=True)

    def __init__(self, config, ahead=1):
        self._size, self._ahead = config.num_prompts_per_step, ahead

    def admit(self, view):
        return [-1] * (self._size + self._ahead - view.ledger.num_running - view.ledger.level(Phase.READY))

    def select(self, view):
        ready = sorted(view.ledger.open[Phase.READY])
        return ready[: self._size] if len(ready) >= self._size else None

    @property
    def max_open(self):
        return 2 * self._size + self._ahead


class Nothing:
    """No schedule."""

    def __init__(self, config):
        pass


def test_a_schedule_of_ones_own():
    made = schedule_of("test_schedules:Hasty", schedule={"kwargs": {"ahead": 3}})
    assert len(made.admit(View())) == 7
    with pytest.raises(TypeError, match=r"takes no argument 'ahed' \(did you mean 'ahead'"):
        schedule_of("test_schedules:Hasty", schedule={"kwargs": {"ahed": 3}})
    with pytest.raises(TypeError, match=r"lacks capabilities, oldest_version, .*, admit, select"):
        schedule_of("test_schedules:Nothing")


@pytest.mark.parametrize("name", BUILT_IN_SCHEDULES)
def test_capabilities_are_those_of_the_table(name):
    c = schedule_of(name).capabilities
    assert c.has_rounds == (name == "rounds")
    assert c.stamps_steps == (name == "in_order")
    assert c.gates_admission == (name != "windowed")
    assert c.completion_order == (name not in ("rounds", "in_order"))


# ---- rounds ----


@pytest.mark.parametrize(
    ("refill", "oversample", "ready", "num"),
    [
        ("deficit", 1.0, 0, 4),
        ("deficit", 1.0, 3, 1),
        ("deficit", 1.0, 4, 0),
        ("deficit", 1.0, 6, 0),  # a surplus larger than a step
        ("deficit", 1.5, 0, 6),
        ("deficit", 1.5, 3, 2),  # ceil(1.5 * 1)
        ("deficit", 3.0, 2, 6),
        ("full", 1.0, 3, 4),  # as published: whole rounds
        ("full", 1.5, 3, 6),
        ("full", 1.5, 4, 0),
    ],
)
def test_round_sizes(refill, oversample, ready, num):
    schedule = rounds(refill=refill, oversample=oversample)
    view = View().add(ready, Phase.READY)
    view.wanted = lambda num_kept, full: math.ceil(oversample * num_kept)
    assert schedule.admit(view) == [-1] * num


@pytest.mark.parametrize("phase", [Phase.IN_FLIGHT, Phase.JUDGING])
def test_nothing_is_decided_while_a_round_is_under_way(phase):
    view = View(version=99).add(5, Phase.READY).add(1, phase)
    schedule = rounds()
    assert schedule.admit(view) == []
    assert schedule.select(view) is None
    assert schedule.admit(View().add(1, phase)) == []


def test_select_takes_the_oldest_in_dispatch_order():
    """Taking the first that finish prefers short answers (tinker-cookbook#822)."""
    view = View().add(1, Phase.READY).add(5, Phase.IN_FLIGHT)
    for number in (5, 4, 3, 2, 1):  # the last one finished first
        view.ledger.move([number], Phase.READY)
    assert rounds().select(view) == [0, 1, 2, 3]
    assert rounds().select(View().add(3, Phase.READY)) is None


@pytest.mark.parametrize("age", [0, 2, 3])
def test_age_of_carried_groups(age):
    assert rounds(max_surplus_age_versions=age).oldest_version(View(version=5)) == 5 - age


def play(schedule, *kept_in_rounds, num=4):
    """Rounds of `num` groups, of which so many are kept."""
    for kept in kept_in_rounds:
        schedule.on_dispatch(num)
        schedule.on_end([Verdict.KEPT] * kept + [Verdict.FILTERED] * (num - kept))
    return schedule


def test_rounds_are_counted_within_a_step():
    schedule = rounds()
    assert schedule.round_number == 0
    play(schedule, 1, 1)
    assert schedule.round_number == 2
    schedule.on_step()
    assert schedule.round_number == 0


@pytest.mark.parametrize(
    ("cap", "num_rounds", "ends"), [(0, 50, False), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True)]
)
def test_cap_on_rounds(cap, num_rounds, ends):
    exhausted = play(rounds(max_num_gen_batches=cap), *[1] * num_rounds).exhausted(View())
    assert (exhausted is not None) == ends
    if exhausted:
        assert f"dynamic_sampling.max_num_gen_batches = {cap} rounds are used up" in exhausted.why
        assert "max_num_gen_batches = 0 lifts the cap" in exhausted.advice


def test_budget_for_work_that_keeps_nothing_has_no_use_for_a_cap():
    schedule = rounds(max_num_gen_batches=0, max_replacements_per_slot=2)
    play(schedule, 0, 0)  # each of the 4 slots: one attempt and one replacement
    assert schedule.exhausted(View()) is None
    play(schedule, 0)  # and the second replacement, which was the last
    exhausted = schedule.exhausted(View())
    assert exhausted is not None
    assert "12 groups in a row were not kept" in exhausted.why
    assert "dynamic_sampling.max_replacements_per_slot = 2 replacements of each of 4" in exhausted.why
    assert "max_num_gen_batches" not in exhausted.advice  # the cap has nothing to do with it


def test_small_rounds_count_as_what_they_are():
    """One group is missing, and one in a hundred is kept: 33 rounds of one group are no reason to give up."""
    schedule = rounds(batch_size=64, max_num_gen_batches=0)
    play(schedule, 63, num=64)
    play(schedule, *[0] * 99, num=1)
    assert schedule.exhausted(View(64)) is None
    play(schedule, *[0] * (33 * 64 - 101), num=1)
    assert schedule.exhausted(View(64)) is None
    play(schedule, 0, num=1)  # with the one dropped in the first round, 33 for each slot
    assert schedule.exhausted(View(64)) is not None


def test_anything_kept_starts_the_count_again():
    schedule = rounds(max_num_gen_batches=0, max_replacements_per_slot=1)
    assert play(schedule, 0, 1, 0).exhausted(View()) is None  # 3 + 4 after the last that was kept
    assert play(schedule, 0).exhausted(View()) is not None
    schedule.on_step()
    assert play(schedule, 0).exhausted(View()) is None


def test_state_round_trip_in_the_middle_of_a_round():
    schedule = play(rounds(max_num_gen_batches=0, max_replacements_per_slot=2), 2, 0)
    schedule.on_dispatch(4)
    schedule.on_end([Verdict.FILTERED])
    again = rounds(max_num_gen_batches=0, max_replacements_per_slot=2)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.state_dict() == schedule.state_dict()
    for each in (schedule, again):
        for _ in range(3):
            each.on_end([Verdict.FILTERED])
    assert again.state_dict() == schedule.state_dict()
    assert again.exhausted(View()) == schedule.exhausted(View())


@pytest.mark.parametrize(
    ("oversample", "groups"), [(1.0, 4), ("none", 4), (1.5, 6), (1.1, 5), (3.0, 12), ("adaptive", 10)]
)
def test_what_a_step_leaves_over_and_the_largest_round_fit(oversample, groups):
    assert rounds(oversample=oversample, max_oversample=2.5).max_open == 3 + groups


# ---- in_order ----


def in_order(lookahead=1, **config):
    return schedule_of("in_order", schedule={"max_lookahead_versions": lookahead}, **config)


def test_each_group_is_for_a_step_in_reach_the_nearest_first():
    assert in_order(0).admit(View()) == [0] * 4
    assert in_order(2).admit(View(version=3)) == [3] * 4 + [4] * 4 + [5] * 4
    view = View(version=3).add(2, Phase.READY, for_step=3).add(1, Phase.IN_FLIGHT, for_step=3)
    view.add(4, Phase.JUDGING, for_step=4).add(1, Phase.TRAINING, for_step=2)
    assert in_order(1).admit(view) == [3]
    assert in_order(1).admit(View(version=99)) == [99] * 4  # step 100 is not of the run
    # A step is out at the trainer, whose weights are not there yet: the step after it is one version ahead.
    assert in_order(0).admit(View(version=3, filling=4)) == []
    assert in_order(1).admit(View(version=3, filling=4)) == [4] * 4


def test_a_step_trains_its_own_groups_only():
    view = View(version=3).add(3, Phase.READY, for_step=3).add(4, Phase.READY, for_step=4)
    assert in_order().select(view) is None
    view.add(2, Phase.READY, for_step=3)
    assert in_order().select(view) == [0, 1, 2, 7]
    view.short = 1  # a slot was given up
    assert in_order().select(view) == [0, 1, 2]
    assert in_order().admit(view) == []


def test_several_versions_are_a_step():
    config = make_config(
        100, 4, schedule={"name": "in_order", "max_lookahead_versions": 3}, train={"num_minibatches": 2}
    )
    view = View(version=6, filling=3)
    view.versions_per_step = 2
    assert set(make_schedule(config).admit(view)) == {3, 4}  # step 4 begins with version 8
    assert make_schedule(config).oldest_version(view) == 6 - 8


# ---- ready_first, weight_fifo, windowed ----


def gated(name="ready_first", staleness=1, **config):
    return schedule_of(name, schedule={"max_staleness_versions": staleness}, **config)


@pytest.mark.parametrize("name", ["ready_first", "weight_fifo"])
def test_no_more_are_open_than_the_steps_in_reach_train(name):
    assert len(gated(name, 0).admit(View(version=7))) == 4
    view = View(version=7).add(3, Phase.READY, version=7).add(2, Phase.IN_FLIGHT, version=7)
    assert len(gated(name, 2).admit(view)) == 12 - 5
    view.short = 2
    assert len(gated(name, 2).admit(view)) == 10 - 5
    assert len(gated(name, 2).admit(View(version=98))) == 8  # the run ends
    assert gated(name, 0).admit(View(version=3, filling=4)) == []
    assert len(gated(name, 1).admit(View(version=3, filling=4))) == 4


@pytest.mark.parametrize("name", ["ready_first", "weight_fifo"])
def test_a_step_waits_for_groups_that_would_be_too_old_for_the_next(name):
    view = View(version=7).add(1, Phase.IN_FLIGHT, version=6).add(6, Phase.READY, version=7)
    assert gated(name, 1).select(view) is None
    assert gated(name, 2).select(view) is not None
    view.ledger.move([0], Phase.JUDGING)
    assert gated(name, 1).select(view) is None
    view.ledger.move([0], Phase.READY)
    chosen = gated(name, 1).select(view)
    assert chosen is not None
    assert 0 in chosen  # though it was the last to finish
    assert gated(name, 1).oldest_version(view) == 6


def test_the_first_to_finish_or_the_oldest_weights():
    view = View(version=7).add(3, Phase.JUDGING, version=6).add(3, Phase.JUDGING, version=7)
    view.ledger.move([5, 3, 0, 4, 2, 1], Phase.READY)
    assert gated("ready_first", 5).select(view) == [0, 3, 4, 5]
    assert gated("weight_fifo", 5).select(view) == [0, 1, 2, 3]
    assert gated("ready_first", 1).select(view) == [0, 1, 2, 5]  # the three of version 6 are due


def test_the_window_never_waits():
    schedule = gated("windowed", 1)
    view = View(version=7).add(6, Phase.READY, version=7).add(3, Phase.IN_FLIGHT, version=6)
    assert len(schedule.admit(view)) == 8 - 3
    assert schedule.select(view) == [2, 3, 4, 5]
    assert schedule_of("windowed", schedule={"sample_freshest_first": False}).select(view) == [0, 1, 2, 3]
    assert schedule.evict(view) == []
    view.add(4, Phase.READY, version=7)
    assert schedule.evict(view) == [0, 1]  # two steps' worth stay
    assert schedule.oldest_version(view) == 6
    assert len(schedule.admit(View(version=99))) == 4
    assert schedule.admit(View(version=99, filling=100)) == []


@pytest.mark.parametrize("name", ["in_order", "ready_first", "weight_fifo", "windowed"])
def test_nothing_is_selected_before_there_is_enough(name):
    view = View().add(3, Phase.READY, for_step=0)
    assert schedule_of(name).select(view) is None
    assert schedule_of(name).state_dict() == {}
    assert schedule_of(name).exhausted(view) is None


# ---- No preference for what is quick ----


def test_in_order_waits_for_its_own_groups_that_would_be_too_old_for_the_next_step():
    options = {"oversample": 2.0, "max_surplus_age_versions": 0}
    schedule = schedule_of("in_order", 2, {"max_lookahead_versions": 0}, **options)
    view = View(batch_size=2)
    view.add(2, Phase.JUDGING, for_step=0)  # slow: tickets 0 and 1
    view.add(2, Phase.READY, for_step=0)
    assert schedule.select(view) is None
    view.ledger.move([0], Phase.READY)
    assert schedule.select(view) is None
    view.ledger.move([1], Phase.READY)
    assert schedule.select(view) == [0, 1]  # in dispatch order, whoever was first


def test_in_order_does_not_wait_for_what_the_next_step_may_train():
    schedule = schedule_of("in_order", 2, {"max_lookahead_versions": 0}, oversample=2.0, max_surplus_age_versions=1)
    view = View(batch_size=2)
    view.add(2, Phase.JUDGING, for_step=0).add(2, Phase.READY, for_step=0)
    assert schedule.select(view) == [2, 3]
    late = View(batch_size=2, version=1)
    late.add(1, Phase.JUDGING, version=0, for_step=1).add(2, Phase.READY, version=1, for_step=1)
    assert schedule.select(late) is None


def test_in_order_trains_first_what_would_be_too_old():
    schedule = schedule_of("in_order", 2, {"max_lookahead_versions": 0}, oversample=2.0, max_surplus_age_versions=1)
    view = View(batch_size=2, version=1)
    view.add(2, Phase.READY, version=1, for_step=1).add(1, Phase.READY, version=0, for_step=1)
    assert schedule.select(view) == [0, 2]


def test_failures_spend_no_budget_of_the_filters_rounds():
    schedule, view = rounds(1, max_num_gen_batches=0, max_replacements_per_slot=1), View(1)
    schedule.on_end([Verdict.FILTERED, *[Verdict.FAILED] * 9])
    assert schedule.exhausted(view) is None
    schedule.on_end([Verdict.FILTERED])
    assert schedule.exhausted(view) is not None
