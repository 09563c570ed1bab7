"""The controller: a pure reducer, `apply(state, event) -> (state, commands)`. Plain Python: no JAX, clock or I/O.

It decides what is drawn, what a step trains on, what is dropped, and when the run ends. Everything it knows comes
as an event, so the same events give the same commands on every process and after every restart (laws 4 and 7).
Payloads are not here: they lie in the `GroupBuffer`, by ticket. What happens when a budget is used up stands in
`budgets.py`.
"""

from collections.abc import Sequence

from dynrl.config import RunConfig
from dynrl.rollout.budgets import data_ended, failures_exhausted, short_note, shrink, slot_exhausted, step_exhausted
from dynrl.rollout.events import (
    AttemptsFailed,
    Cancel,
    Command,
    Dispatch,
    Draw,
    Event,
    GroupsDeferred,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    Retry,
    StepTrained,
    StopRequested,
    TasksDrawn,
    Train,
)
from dynrl.rollout.ledger import Dropped, Phase, Ticket
from dynrl.rollout.schedules import make_schedule
from dynrl.rollout.state import ControllerState
from dynrl.types import Verdict

_OF_REWARDS = ("mixed", "all_pass", "all_fail", "uniform")  # patterns that say nothing about a failed group


def initial_state(config: RunConfig) -> ControllerState:
    """The state before the first event."""
    return ControllerState(config, make_schedule(config))


def apply(state: ControllerState, event: Event) -> tuple[ControllerState, list[Command]]:
    """Takes one event.

    Args:
      state: consumed: updated in place and returned, so that an event costs what it is about, not what is open.
      event: what happened.

    Returns:
      The new state, and what to do next, in order.

    Raises:
      ValueError: for an event that cannot have happened (an unknown ticket, an answer that nobody waits for).
      AssertionError: when the ledger does not balance.
    """
    commands: list[Command] = []
    match event:
        case TasksDrawn():
            commands += _drawn(state, event)
        case GroupsGenerated():
            state.ledger.move(event.tickets, Phase.JUDGING)
        case GroupsDeferred():
            _deferred(state, event)
        case GroupsJudged():
            commands += _judged(state, event)
        case AttemptsFailed():
            commands += _attempts_failed(state, event)
        case StepTrained():
            commands += _trained(state, event)
        case StopRequested():
            commands += state.stop(event.reason)
        case Resumed():
            commands += _resumed(state, event)
    commands += _decide(state)
    state.ledger.check()
    return state, commands


# ---- Events ----


def _resumed(state: ControllerState, event: Resumed) -> list[Command]:
    """Resubmits what was under way, and asks again for what was not answered."""
    under_way = ()
    if not event.in_flight:  # what was deferred is lost with what it waited for
        state.ledger.end(list(state.ledger.open[Phase.DEFERRED]), dropped=Dropped.CANCELLED)
        under_way = tuple(state.ledger.restart())
    commands: list[Command] = [Dispatch(under_way)] if under_way else []
    if state.training:
        commands.append(Train(tuple(sorted(state.ledger.open[Phase.TRAINING])), state.train_note))
    return [*commands, Draw(len(state.drawing))] if state.drawing else commands


def _drawn(state: ControllerState, event: TasksDrawn) -> list[Command]:
    """Gives each drawn task the place that it is for: that of a dropped group first."""
    stamps, state.drawing = state.drawing, []
    if not stamps:
        raise ValueError(f"{len(event.draws)} tasks were drawn, but no Draw is outstanding")
    if len(event.draws) > event.requested:
        raise ValueError(f"{len(event.draws)} tasks were drawn, {event.requested} asked for")
    state.data_ended |= len(event.draws) < event.requested
    if not event.draws:
        return []
    cohort = state.keep_rate.dispatched([d.source for d in event.draws])
    round_number, version, filling = state.schedule.round_number, state.version, state.filling
    tickets: list[Ticket] = []
    for number, ((task_id, visit, source, base), step) in enumerate(
        zip(event.draws, stamps, strict=False), state.ledger.next_ticket
    ):
        vacancies = state.vacancies.get(step)
        index = round_number if not vacancies else vacancies.pop()
        tickets.append(Ticket(number, task_id, visit, version, filling, index, step, 1, cohort, source, base))
    state.ledger.dispatch_all(tickets)
    state.totals["replaced_groups"] += sum(t.replacement_index > 0 for t in tickets)
    state.schedule.on_dispatch(len(tickets))
    state.totals["num_rounds"] += state.schedule.capabilities.has_rounds
    return [Dispatch(tuple(tickets))]


def _deferred(state: ControllerState, event: GroupsDeferred) -> None:
    """Others take their places, and their verdicts will say nothing of the keep rate of what is drawn now."""
    state.ledger.move(event.tickets, Phase.DEFERRED)
    tickets = [state.ledger.open[Phase.DEFERRED][n] for n in event.tickets]
    state.keep_rate.ended(tickets, Verdict.STALE)
    for ticket in tickets:
        _vacate(state, ticket, ticket.replacement_index)


def _deferred_judged(state: ControllerState, judgements: list[Judgement]) -> list[Command]:
    """Those that are kept come on top of what the step asked for; nothing replaces the others."""
    deferred, ledger = state.ledger.open[Phase.DEFERRED], state.ledger
    stamps, oldest = state.schedule.capabilities.stamps_steps, state.schedule.oldest_version(state)
    stored = state.config.dynamic_sampling.on_exhausted == "relax"  # what has signal, though refused
    commands: list[Command] = []
    for j in judgements:
        ticket, n = deferred[j.ticket], j.ticket
        state.verdicts[j.verdict] += 1
        state.failed_in_row = state.failed_in_row + 1 if j.verdict is Verdict.FAILED else 0
        if j.verdict is Verdict.FAILED:
            ledger.end([n], failed=True)
            commands += failures_exhausted(state)
        elif j.verdict is not Verdict.KEPT or ticket.version < oldest:
            reason = Dropped.FILTERED if j.verdict is Verdict.FILTERED else Dropped.STALE
            if j.verdict is Verdict.KEPT or (stored and j.signal):
                commands += state.drop([n], reason)
            else:
                ledger.end([n], dropped=reason)
        else:
            ledger.move([n], Phase.READY)
            if stamps and ticket.for_step < state.filling:
                ledger.stamp(n, state.filling)
    return commands


def _judged(state: ControllerState, event: GroupsJudged) -> list[Command]:
    ledger, judgements = state.ledger, event.judgements
    commands: list[Command] = []
    if ledger.open[Phase.DEFERRED]:
        deferred = set(ledger.open[Phase.DEFERRED])
        commands += _deferred_judged(state, [j for j in judgements if j.ticket in deferred])
        judgements = [j for j in judgements if j.ticket not in deferred]
    ledger.check_running([j.ticket for j in judgements])
    failed = [j for j in judgements if j.verdict is Verdict.FAILED]
    of_rewards = [j.pattern for j in judgements if j.verdict is not Verdict.FAILED or j.pattern not in _OF_REWARDS]
    state.patterns.update(of_rewards)
    commands += _kept(state, [j.ticket for j in judgements if j.verdict is Verdict.KEPT])
    commands += _filtered(state, [j for j in judgements if j.verdict is Verdict.FILTERED])
    if stale := [j.ticket for j in judgements if j.verdict is Verdict.STALE]:
        gone = ledger.end(stale, dropped=Dropped.STALE)
        state.count(Verdict.STALE, gone)
        for ticket in gone:
            _vacate(state, ticket, ticket.replacement_index)
    # In the order in which they came: a group that did not fail ends a run of failures.
    for j in judgements if failed else ():
        if j.verdict is Verdict.FAILED:
            commands += _failed(state, j.ticket, j.cause, judged=True)
        else:
            state.failed_in_row = 0
    if not failed and judgements:
        state.failed_in_row = 0
    retried = ledger.open[Phase.IN_FLIGHT]
    state.schedule.on_end([j.verdict for j in judgements if j.ticket not in retried])
    return commands


def _kept(state: ControllerState, numbers: list[int]) -> list[Command]:
    state.ledger.move(numbers, Phase.READY)
    ready = state.ledger.open[Phase.READY]
    tickets = [ready[n] for n in numbers]
    state.count(Verdict.KEPT, tickets)
    oldest = state.schedule.oldest_version(state)
    return _drop_ready(state, [t.ticket for t in tickets if t.version < oldest], Dropped.STALE)


def _filtered(state: ControllerState, judgements: list[Judgement]) -> list[Command]:
    """Each leaves its place to a fresh draw. Where that may be needed, refused groups with signal are held."""
    tickets: list[Ticket] = []
    commands: list[Command] = []
    if state.config.dynamic_sampling.on_exhausted == "relax":
        stored = [j for j in judgements if j.signal]
        held = _hold(state, stored)
        old = [j.ticket for j in stored if j.ticket not in held]
        tickets += [*held.values(), *map(state.ledger.running, old)]
        commands += state.drop(old, Dropped.FILTERED)
        judgements = [j for j in judgements if not j.signal]
    tickets += state.ledger.end([j.ticket for j in judgements], dropped=Dropped.FILTERED)
    state.count(Verdict.FILTERED, tickets)
    limit = state.config.dynamic_sampling.max_replacements_per_slot
    for ticket in tickets:
        index = ticket.replacement_index + 1
        if index <= limit or state.schedule.capabilities.has_rounds:
            _vacate(state, ticket, index)
        else:
            commands += slot_exhausted(state, ticket)
    return commands + _let_go(state)


def _hold(state: ControllerState, judgements: list[Judgement]) -> dict[int, Ticket]:
    """Holds those of these groups that are not too old to be trained."""
    ledger, oldest = state.ledger, state.schedule.oldest_version(state)
    young = [j for j in judgements if ledger.running(j.ticket).version >= oldest]
    ledger.move([j.ticket for j in young], Phase.HELD)
    state.held |= {j.ticket: j.spread for j in young}
    return {j.ticket: ledger.open[Phase.HELD][j.ticket] for j in young}


def _let_go(state: ControllerState) -> list[Command]:
    """Of the held groups, as many stay as a step could need: those of the largest spread."""
    excess = len(state.held) - state.batch_size
    if excess <= 0:
        return []
    return state.drop(sorted(state.held, key=lambda n: (state.held[n], -n))[:excess], Dropped.FILTERED)


def _vacate(state: ControllerState, ticket: Ticket, index: int) -> None:
    """The place of a dropped group goes to a fresh draw, of replacement index `index`.

    Under a schedule that stamps steps, a finished group of the latest possible step takes the place at once, and the
    fresh one repays that step.
    """
    step = ticket.for_step
    if step >= 0:
        lender = max(state.ledger.ready_of_step, default=-1)
        if lender > step and step >= state.filling:
            state.ledger.stamp(next(iter(state.ledger.ready_of_step[lender])), step)
            state.totals["promoted_groups"] += 1
            step = lender
        step = max(step, state.filling)
    if not state.schedule.capabilities.has_rounds:
        state.vacancies.setdefault(step, []).append(index)


def _attempts_failed(state: ControllerState, event: AttemptsFailed) -> list[Command]:
    state.last_failure = event.why
    commands: list[Command] = []
    for number in event.tickets:
        commands += _failed(state, number, "infra")
    return commands


def _failed(state: ControllerState, number: int, cause: str, judged: bool = False) -> list[Command]:
    """Tries again, under its own budget, or gives the group up."""
    budget, ledger = state.config.rollout_failure, state.ledger
    ticket = ledger.running(number)
    of_data = cause == "data"
    failures = ticket.data_failures if of_data else ticket.attempts - 1 - ticket.data_failures
    limit = budget.max_data_attempts_per_prompt if of_data else budget.max_infra_attempts_per_prompt
    if cause and failures + 1 < limit:
        state.totals["retried_groups"] += 1
        delay = budget.retry_backoff_secs * 2 ** (ticket.attempts - 1)
        return [Retry(ledger.retry(number, of_data), min(delay, budget.max_retry_backoff_secs))]
    gone = ledger.end([number], failed=True)
    state.count(Verdict.FAILED, gone)
    state.failed_in_row += 1
    commands: list[Command] = [] if judged else [Cancel((number,))]
    commands += failures_exhausted(state)
    if state.stopped:
        return commands
    if budget.on_dropped_prompt == "shrink" and not state.schedule.capabilities.has_rounds:
        return commands + shrink(state, ticket)
    _vacate(state, ticket, ticket.replacement_index)
    return commands


def _trained(state: ControllerState, event: StepTrained) -> list[Command]:
    if not state.training:
        raise ValueError("a step was trained, but no Train is outstanding")
    state.ledger.end(list(state.ledger.open[Phase.TRAINING]))
    state.training, state.train_note = False, ""
    state.step += 1
    state.version = event.version
    if state.config.dynamic_sampling.surplus == "carry" or state.schedule.capabilities.stamps_steps:
        return []  # what is stamped for later steps is no surplus
    return state.drop([t.ticket for t in state.ledger.in_order(Phase.READY)], Dropped.SURPLUS)


# ---- Decisions ----


def _decide(state: ControllerState) -> list[Command]:
    """What to do now that no answer is outstanding."""
    commands: list[Command] = []
    if state.stopped or state.drawing or (state.training and not state.overlaps):
        return commands
    if state.step >= state.config.num_steps:
        return state.stop(f"all {state.config.num_steps} steps were made")
    commands += _evict(state)
    if not state.training:  # so a step is left
        tickets = state.schedule.select(state)
        if tickets is not None:
            _check_selection(state, tickets)
            commands += _train(state, tickets)
            if not state.overlaps:
                return commands
            commands += _evict(state)  # for the step after
    return commands + _admit(state)


def _check_selection(state: ControllerState, tickets: Sequence[int]) -> None:
    """Raises ValueError, naming the schedule, for a batch that is none: a schedule may be a user's own."""
    ready, size = state.ledger.open[Phase.READY], state.size(state.filling)
    strange = [n for n in tickets if n not in ready]
    if strange or len(set(tickets)) != len(tickets) or len(tickets) != size:
        what = f"ticket {strange[0]}, which is not ready" if strange else f"{list(tickets)!r:.200}"
        raise ValueError(
            f"schedule {state.config.schedule.name!r}: select returned {what}, for a step of {size} groups: it must "
            f"return exactly {size} different ready groups (`view.size(view.filling)`), or None"
        )


def _evict(state: ControllerState) -> list[Command]:
    """Drops ready groups that have become too old for the step being filled, or too many."""
    commands: list[Command] = []
    if state.scanned_for != state.filling:
        state.scanned_for = state.filling
        oldest = state.schedule.oldest_version(state)
        ready = state.ledger.open[Phase.READY]
        commands += _drop_ready(state, [n for n, t in ready.items() if t.version < oldest], Dropped.STALE)
    return commands + _drop_ready(state, state.schedule.evict(state), Dropped.EVICTED)


def _drop_ready(state: ControllerState, numbers: Sequence[int], reason: Dropped) -> list[Command]:
    if not numbers:
        return []
    ready = state.ledger.open[Phase.READY]
    gone = [ready[n] for n in numbers]
    commands = state.drop(numbers, reason)  # first, or one of them could be promoted
    for ticket in gone:
        _vacate(state, ticket, ticket.replacement_index)
    return commands


def _train(state: ControllerState, tickets: Sequence[int]) -> list[Command]:
    """Hands the step being filled to the trainer. The next one begins, with what is left over."""
    step, note = state.filling, short_note(state, tickets)
    state.ledger.move(tickets, Phase.TRAINING)
    state.training, state.train_note = True, note
    state.unfilled_steps = 0
    commands: list[Command] = [Train(tuple(tickets), note), *state.begin_step()]
    if state.schedule.capabilities.stamps_steps:
        if state.config.dynamic_sampling.surplus == "drop":
            commands += state.drop(list(state.ledger.ready_of_step.get(step, ())), Dropped.SURPLUS)
        state.ledger.restamp(step, step + 1)
    if state.schedule.capabilities.stamps_steps:
        state.vacancies.pop(step, None)  # the step needs no more
    elif state.vacancies:  # the steps in reach need so many
        missing = len(state.schedule.admit(state))
        state.vacancies = {-1: state.vacancies[-1][:missing]} if missing else {}
    return commands


def _admit(state: ControllerState) -> list[Command]:
    """Draws what the schedule wants, if there is data, room and a budget for it."""
    if state.data_ended:
        if state.ledger.num_running or state.training:
            return []
        return _retry_step(state, data_ended(state))
    stamps = list(state.schedule.admit(state))
    if not stamps:
        return []
    exhausted = state.schedule.exhausted(state)
    if exhausted is not None and state.training:
        return []  # what is left over then may fill the step
    if exhausted is not None:
        return _retry_step(state, step_exhausted(state, exhausted))
    # Held and deferred groups have room of their own.
    apart = state.ledger.level(Phase.HELD) + state.ledger.level(Phase.DEFERRED)
    room = state.schedule.max_open - (state.ledger.num_open - apart)
    state.drawing = stamps[: max(room, 0)]
    if not state.drawing and not state.ledger.num_running and not state.training:
        raise RuntimeError(f"schedule {state.config.schedule.name!r}: max_open = {state.schedule.max_open} is too few")
    return [Draw(len(state.drawing))] if state.drawing else []


def _retry_step(state: ControllerState, commands: list[Command]) -> list[Command]:
    """Decides again, after a policy has changed what the step needs."""
    if state.stopped:
        return commands
    if state.data_ended and state.schedule.select(state) is None:
        raise RuntimeError(f"schedule {state.config.schedule.name!r} selects nothing, though nothing more will come")
    return [*commands, *_decide(state)]
