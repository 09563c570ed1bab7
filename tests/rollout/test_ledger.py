"""The book of groups: every ticket ends once, and what is open is all that is kept."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.rollout.ledger import Dropped, Ledger, Phase

PATH = [Phase.IN_FLIGHT, Phase.JUDGING, Phase.READY, Phase.TRAINING]


def ledger_with(num, phase=Phase.IN_FLIGHT):
    ledger = Ledger()
    for i in range(num):
        ticket = ledger.dispatch(task_id=10 + i, visit=0, version=0, step=0, replacement_index=0)
        for later in PATH[1 : PATH.index(phase) + 1]:
            ledger.move([ticket.ticket], later)
    return ledger


def test_tickets_are_numbered_in_dispatch_order_and_never_reused():
    ledger = ledger_with(3, Phase.READY)
    ledger.move([2], Phase.TRAINING)
    ledger.end([2])
    assert ledger.dispatch(9, 4, 5, 6, 7).ticket == 3
    ticket = ledger.open[Phase.IN_FLIGHT][3]
    assert (ticket.task_id, ticket.visit, ticket.version, ticket.step, ticket.replacement_index) == (9, 4, 5, 6, 7)
    assert [t.ticket for t in ledger.in_order(Phase.READY)] == [0, 1]


def test_ready_keeps_dispatch_order_whatever_order_groups_finish_in():
    ledger = ledger_with(4)
    for number in (3, 1, 0, 2):
        ledger.move([number], Phase.READY)  # a group may go straight to ready
    assert [t.ticket for t in ledger.in_order(Phase.READY)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("phase", "to"), [(a, b) for i, a in enumerate(PATH) for b in PATH[1 : i + 1]] + [(Phase.READY, Phase.IN_FLIGHT)]
)
def test_a_phase_never_goes_back(phase, to):
    ledger = ledger_with(1, phase)
    with pytest.raises(ValueError, match=f"ticket 0 is {phase}: it cannot become {to}"):
        ledger.move([0], to)
    assert ledger.level(phase) == 1
    ledger.check()


@pytest.mark.parametrize("phase", [Phase.IN_FLIGHT, Phase.JUDGING, Phase.READY])
def test_only_a_group_of_the_batch_can_be_trained(phase):
    ledger = ledger_with(1, phase)
    with pytest.raises(ValueError, match=f"ticket 0 is {phase}: only a ready group that is in a batch can be trained"):
        ledger.end([0])
    assert 0 in ledger.open[phase]
    ledger.end([0], failed=True)  # but it can fail, or be dropped, at any time
    assert ledger.totals()["failed"] == 1


def test_a_held_group_may_still_become_ready():
    ledger = ledger_with(1, Phase.JUDGING)
    ledger.move([0], Phase.HELD)
    ledger.move([0], Phase.READY)
    with pytest.raises(ValueError, match="ticket 0 is ready: it cannot become held"):
        ledger.move([0], Phase.HELD)


@pytest.mark.parametrize("phase", PATH)
def test_a_retry_is_another_attempt_of_the_same_ticket(phase):
    ledger = ledger_with(2, phase)
    if phase in (Phase.READY, Phase.TRAINING):
        with pytest.raises(ValueError, match=f"ticket 1 is {phase}: it cannot be tried again"):
            ledger.retry(1)
        return
    before = ledger.open[phase][1]
    assert ledger.retry(1) == before._replace(attempts=2)
    assert ledger.retry(1).attempts == 3
    assert (ledger.dispatched, ledger.num_running) == (2, 2)
    assert ledger.phase_of(1) is Phase.IN_FLIGHT


def test_stamps_move_with_their_groups():
    ledger = Ledger()
    for step in (0, 0, 1, 1, 2):
        ledger.dispatch(0, 0, 0, 0, 0, for_step=step)
    ledger.move([3, 2], Phase.READY)
    assert (ledger.running_of_step, ledger.ready_of_step) == ({0: 2, 2: 1}, {1: {3: None, 2: None}})
    ledger.stamp(3, 0)  # promoted
    assert ledger.ready_of_step == {1: {2: None}, 0: {3: None}}
    ledger.restamp(0, 1)
    assert (ledger.running_of_step, ledger.ready_of_step) == ({1: 2, 2: 1}, {1: {2: None, 3: None}})
    assert [t.for_step for t in ledger.in_order(Phase.READY)] == [1, 1]
    assert (ledger.ready_for(1), ledger.ready_for(7)) == (2, 0)


@pytest.mark.parametrize("act", [lambda x, n: x.move([n], Phase.READY), lambda x, n: x.end([n])])
def test_a_ticket_that_is_not_open_is_an_error(act):
    ledger = ledger_with(1, Phase.TRAINING)
    ledger.end([0])
    for number in (0, 7):  # ended, and never dispatched
        with pytest.raises(ValueError, match=f"ticket {number} is not open"):
            act(ledger, number)


def test_restart_puts_work_back_in_flight():
    ledger = ledger_with(3)
    ledger.move([0, 2], Phase.JUDGING)
    ledger.move([2], Phase.READY)
    assert [t.ticket for t in ledger.restart()] == [0, 1]
    assert [ledger.level(phase) for phase in Phase] == [2, 0, 0, 1, 0, 0]
    ledger.check()


@pytest.mark.parametrize(
    "break_it",
    [
        lambda x: x.open[Phase.IN_FLIGHT].clear(),  # lost
        lambda x: setattr(x, "trained", 1),  # counted twice
        lambda x: x.open[Phase.READY].update({0: x.open[Phase.IN_FLIGHT][0]}),  # in two phases
    ],
)
def test_check_finds_what_does_not_balance(break_it):
    ledger = ledger_with(2)
    ledger.check()
    break_it(ledger)
    with pytest.raises(AssertionError, match=r"does not balance.*'dispatched': 2"):
        ledger.check()


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["dispatch", "move", "move", "hold", "retry", "stamp", "restart", *Dropped, "failed", "trained"]
        ),
        st.integers(0, 99),
    )
)


@settings(deadline=None, max_examples=60)
@given(ACTIONS)
def test_conservation_and_round_trip(actions):
    ledger, ended, phases = Ledger(), {str(d): 0 for d in Dropped} | {"failed": 0, "trained": 0}, {}
    for action, pick in actions:
        if action == "dispatch":
            ledger.dispatch(pick, 0, 0, 0, 0)
        elif action == "restart":
            ledger.restart()
        elif phases:
            number = sorted(phases)[pick % len(phases)]
            phase = phases[number]
            if action == "move":
                if phase in PATH[:-1]:
                    ledger.move([number], PATH[PATH.index(phase) + 1])
                elif phase is Phase.HELD:
                    ledger.move([number], Phase.READY)
            elif action == "hold":
                if phase is Phase.JUDGING:
                    ledger.move([number], Phase.HELD)
            elif action == "retry":
                if phase in PATH[:2]:
                    ledger.retry(number)
            elif action == "stamp":
                ledger.stamp(number, pick % 3)
            elif action != "trained" or phase is Phase.TRAINING:
                ledger.end(
                    [number],
                    dropped=Dropped(action) if action in list(Dropped) else None,
                    failed=action == "failed",
                )
                ended[str(action)] += 1
        ledger.check()
        phases = {number: phase for phase, tickets in ledger.open.items() for number in tickets}
        totals = ledger.totals()
        assert totals["dropped"] | {"failed": totals["failed"], "trained": totals["trained"]} == ended
        assert {p: totals[p] for p in Phase} == {p: list(phases.values()).count(p) for p in Phase}
        assert totals["dispatched"] == sum(ended.values()) + len(phases)
    again = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert again.totals() == ledger.totals()
    assert again.open == ledger.open
    assert again.state_dict() == ledger.state_dict()
    for name in ("running_of_step", "running_of_version", "ready_of_step"):
        assert getattr(again, name) == getattr(ledger, name)
    assert [list(x) for x in again.ready_of_step.values()] == [list(x) for x in ledger.ready_of_step.values()]


def test_a_state_that_does_not_balance_is_refused():
    state = ledger_with(2).state_dict()
    state["open"]["in_flight"].pop()
    with pytest.raises(AssertionError, match="does not balance"):
        Ledger.from_state_dict(state)
