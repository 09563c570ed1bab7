"""The book of groups: every ticket ends once, and what is open is all that is kept."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.rollout.ledger import Dropped, Ledger, Phase


def ledger_with(num, phase=Phase.IN_FLIGHT):
    ledger = Ledger()
    for i in range(num):
        ticket = ledger.dispatch(task_id=10 + i, visit=0, version=0, step=0, replacement_index=0)
        for later in list(Phase)[1 : list(Phase).index(phase) + 1]:
            ledger.move([ticket.ticket], later)
    return ledger


def test_tickets_are_numbered_in_dispatch_order_and_never_reused():
    ledger = ledger_with(3, Phase.READY)
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


@pytest.mark.parametrize(("phase", "to"), [(a, b) for i, a in enumerate(Phase) for b in list(Phase)[: i + 1]])
def test_a_phase_never_goes_back(phase, to):
    ledger = ledger_with(1, phase)
    with pytest.raises(ValueError, match=f"ticket 0 is {phase}: it cannot become {to}"):
        ledger.move([0], to)
    assert ledger.level(phase) == 1
    ledger.check()


@pytest.mark.parametrize("phase", [Phase.IN_FLIGHT, Phase.JUDGING])
def test_only_a_ready_group_can_be_trained(phase):
    ledger = ledger_with(1, phase)
    with pytest.raises(ValueError, match=f"ticket 0 is {phase}: only a ready group can be trained"):
        ledger.end([0])
    assert 0 in ledger.open[phase]
    ledger.end([0], failed=True)  # but it can fail, or be dropped, at any time
    assert ledger.totals()["failed"] == 1


@pytest.mark.parametrize("act", [lambda x, n: x.move([n], Phase.READY), lambda x, n: x.end([n])])
def test_a_ticket_that_is_not_open_is_an_error(act):
    ledger = ledger_with(1, Phase.READY)
    ledger.end([0])
    for number in (0, 7):  # ended, and never dispatched
        with pytest.raises(ValueError, match=f"ticket {number} is not open"):
            act(ledger, number)


def test_restart_puts_work_back_in_flight():
    ledger = ledger_with(3)
    ledger.move([0, 2], Phase.JUDGING)
    ledger.move([2], Phase.READY)
    assert [t.ticket for t in ledger.restart()] == [0, 1]
    assert [ledger.level(phase) for phase in Phase] == [2, 0, 1]
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
    st.tuples(st.sampled_from(["dispatch", "move", "restart", *Dropped, "failed", "trained"]), st.integers(0, 99))
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
                if phase is not Phase.READY:
                    ledger.move([number], Phase.JUDGING if phase is Phase.IN_FLIGHT else Phase.READY)
            elif action != "trained" or phase is Phase.READY:
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


def test_a_state_that_does_not_balance_is_refused():
    state = ledger_with(2).state_dict()
    state["open"]["in_flight"].pop()
    with pytest.raises(AssertionError, match="does not balance"):
        Ledger.from_state_dict(state)
