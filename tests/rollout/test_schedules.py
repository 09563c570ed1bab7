"""The schedule `rounds` alone: how large a round is, what a step trains on, which budgets end it."""

import json
from dataclasses import dataclass, field

import pytest

from dynrl.config import DynamicSamplingConfig
from dynrl.rollout.ledger import Ledger, Phase
from dynrl.rollout.schedules import Rounds, make_schedule
from dynrl.types import Verdict


@dataclass
class View:
    """What the controller shows a schedule."""

    batch_size: int = 4
    version: int = 0
    ledger: Ledger = field(default_factory=Ledger)

    def add(self, num, phase, version=0):
        for _ in range(num):
            ticket = self.ledger.dispatch(0, 0, version, 0, 0)
            if phase is not Phase.IN_FLIGHT:
                self.ledger.move([ticket.ticket], phase)
        return self


def rounds(batch_size=4, **config):
    return make_schedule("rounds", DynamicSamplingConfig(**config), batch_size)


def test_unknown_schedule_names_key_and_choices():
    with pytest.raises(ValueError, match=r"schedule\.name: 'windowed' is not a schedule; there is: rounds"):
        make_schedule("windowed", DynamicSamplingConfig(), 4)


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
    assert schedule.admit(View().add(ready, Phase.READY)) == num


@pytest.mark.parametrize("phase", [Phase.IN_FLIGHT, Phase.JUDGING])
def test_nothing_is_decided_while_a_round_is_under_way(phase):
    view = View(version=99).add(5, Phase.READY).add(1, phase)
    schedule = rounds()
    assert schedule.admit(view) == 0
    assert schedule.select(view) is None
    assert schedule.admit(View().add(1, phase)) == 0


def test_select_takes_the_oldest_in_dispatch_order():
    """Taking the first that finish prefers short answers (tinker-cookbook#822)."""
    view = View().add(1, Phase.READY).add(5, Phase.IN_FLIGHT)
    for number in (5, 4, 3, 2, 1):  # the last one finished first
        view.ledger.move([number], Phase.READY)
    assert rounds().select(view) == [0, 1, 2, 3]
    assert rounds().select(View().add(3, Phase.READY)) is None


def test_evict_by_version_of_dispatch():
    view = View(version=5).add(1, Phase.READY, version=2).add(1, Phase.READY, version=3).add(1, Phase.READY, version=5)
    assert rounds(max_surplus_age_versions=3).evict(view) == []
    assert rounds(max_surplus_age_versions=2).evict(view) == [0]
    assert rounds(max_surplus_age_versions=0).evict(view) == [0, 1]


def play(schedule, *kept_in_rounds, num=4):
    """Rounds of `num` groups, of which so many are kept."""
    for kept in kept_in_rounds:
        schedule.on_dispatch(num)
        schedule.on_end([Verdict.KEPT] * kept + [Verdict.FILTERED] * (num - kept))
    return schedule


def test_replacement_index_is_the_number_of_rounds_before():
    schedule = rounds()
    assert schedule.replacement_index() == 0
    play(schedule, 1, 1)
    assert (schedule.replacement_index(), schedule.num_rounds) == (2, 2)
    schedule.on_step()
    assert (schedule.replacement_index(), schedule.num_rounds) == (0, 0)


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


def test_largest_round():
    for oversample, groups in ((1.0, 4), (1.5, 6), (1.1, 5), (3.0, 12)):
        assert Rounds.max_groups_per_round(DynamicSamplingConfig(oversample=oversample), 4) == groups
