"""What the controller does when a budget is used up or the data has ended. Plain Python.

Each function changes the state so that the next decision can go on, or stops the run with the counts, the keys and
what would lift the limit.
"""

import math
from collections.abc import Sequence

from dynrl.rollout.events import Command, Warn
from dynrl.rollout.ledger import Dropped, Phase, Ticket
from dynrl.rollout.schedules import Exhausted
from dynrl.rollout.state import ControllerState
from dynrl.types import Verdict

# ---- A slot, or a step, that cannot be filled ----


def slot_exhausted(state: ControllerState, ticket: Ticket) -> list[Command]:
    """The last replacement that a slot may have was filtered: the policy of `on_exhausted`, for this slot."""
    config, step = state.config.dynamic_sampling, max(ticket.for_step, state.filling)
    limit, policy = config.max_replacements_per_slot, config.on_exhausted
    key = f"dynamic_sampling.max_replacements_per_slot = {limit}"
    why = f"a slot used up {key}"
    advice = f"a dynamic_sampling.max_replacements_per_slot above {limit} goes on for longer"
    if policy == "carry":
        times, rest = divmod(ticket.replacement_index + 1, limit + 1)
        _vacant_again(state, ticket)
        if rest:
            return []
        state.totals["exhausted_slots"] += 1
        return _unfilled(state, f"{why} {times} times", times, "A slot was not filled")
    state.totals["exhausted_slots"] += ticket.replacement_index == limit  # once, where it goes on
    if policy == "short":
        return give_up_slot(state, step, f"{state.shortfall[step] + 1} slots used up {key}")
    if policy == "relax":
        if _relax(state, 1, ticket.for_step):
            return []
        if ticket.replacement_index <= 2 * limit:  # one that the filter refused may still come
            _vacant_again(state, ticket)
            return []
    return _raise(state, Exhausted(f"{why}; {_expected(state)}", advice))


def _vacant_again(state: ControllerState, ticket: Ticket) -> None:
    """The slot's next replacement, beyond its budget."""
    step = max(ticket.for_step, state.filling) if ticket.for_step >= 0 else -1
    state.vacancies.setdefault(step, []).append(ticket.replacement_index + 1)


def step_exhausted(state: ControllerState, exhausted: Exhausted) -> list[Command]:
    """No more groups may be dispatched for the step being filled: the policy of `on_exhausted`, for all of it."""
    policy, step = state.config.dynamic_sampling.on_exhausted, state.filling
    ready = state.ledger.level(Phase.READY)
    missing = state.size(step) - ready
    if missing <= 0:
        raise RuntimeError(f"schedule {state.config.schedule.name!r} wants more groups for a step that has enough")
    have = _have(state, exhausted.why)
    if policy == "relax" and _relax(state, missing):
        return []
    if policy == "carry":
        state.totals["unfilled_steps"] += 1
        state.unfilled_steps += 1
        return _again(state, have)
    if policy == "short" and ready:
        state.why_short[step] = have
        state.shortfall[step] += missing
        return []
    if policy == "short":
        return _empty_step(state, have)
    return _raise(state, exhausted)


def give_up_slot(state: ControllerState, step: int, why: str) -> list[Command]:
    """The step will train on one group less."""
    state.shortfall[step] += 1
    state.why_short[step] = why
    if state.size(step) > 0:
        return []
    del state.shortfall[step], state.why_short[step]
    return _empty_step(state, _have(state, why))


def _empty_step(state: ControllerState, why: str) -> list[Command]:
    """A short step without a group makes no update."""
    state.totals["unfilled_steps"] += 1
    state.unfilled_steps += 1
    return _again(state, f"no update: {why}")


def _again(state: ControllerState, why: str) -> list[Command]:
    commands = _unfilled(state, why, state.unfilled_steps)
    return commands if state.stopped else [*commands, *state.begin_step()]


def _unfilled(state: ControllerState, why: str, times: int, what: str = "A step could not be filled") -> list[Command]:
    """Goes on, so many times."""
    cap = state.config.dynamic_sampling.max_consecutive_unfilled_steps
    if times > cap:
        return state.stop(
            f"{why}. {what} {times} times in a row, more than dynamic_sampling.max_consecutive_unfilled_steps = {cap}",
            failed=True,
        )
    return [Warn(why)]


def _relax(state: ControllerState, num: int, for_step: int = -1) -> bool:
    """Admits so many groups that the filter refused but that carry signal, those of the largest spread."""
    chosen = sorted(state.held, key=lambda n: (-state.held[n], n))[:num]
    if len(chosen) < num:
        return False
    for number in chosen:
        del state.held[number]
        if for_step >= 0:
            state.ledger.stamp(number, max(for_step, state.filling))
    state.ledger.move(chosen, Phase.READY)
    state.totals["relaxed_groups"] += num
    return True


def _raise(state: ControllerState, exhausted: Exhausted) -> list[Command]:
    policy = state.config.dynamic_sampling.on_exhausted
    short = ""
    if policy == "raise" and state.ledger.level(Phase.READY):
        short = "dynamic_sampling.on_exhausted = 'short' trains on what was kept; "
    if policy == "relax":
        num = len(state.held)
        short = f"dynamic_sampling.on_exhausted = 'relax', but only {num} refused groups carry signal; "
    if state.verdicts[Verdict.FAILED] > state.verdicts[Verdict.FILTERED]:
        last = f" (last: {state.last_failure})" if state.last_failure else ""
        cure = f"most groups failed, which the filter has no part in{last}"
    elif 2 * state.patterns["too_long"] > state.verdicts.total():
        cure = "most prompts are too long: tasks.max_prompt_tokens"
    else:
        cure = "easier or harder tasks, as the counts say, raise the share that is kept"
    return state.stop(f"{_have(state, exhausted.why)}. {short}{exhausted.advice}; {cure}", failed=True)


# ---- Failures ----


def failures_exhausted(state: ControllerState) -> list[Command]:
    """Whether groups failed too often, in a row or in all."""
    budget = state.config.rollout_failure
    for used, limit, key in (
        (state.ledger.failed, budget.max_skipped_prompts, "max_skipped_prompts"),
        (state.failed_in_row, budget.max_consecutive_dropped_prompts, "max_consecutive_dropped_prompts"),
    ):
        if used > limit:
            last = f"; last: {state.last_failure}" if state.last_failure else ""
            why = f"{used} groups failed, more than rollout_failure.{key} = {limit}; {_counts(state)}{last}"
            return state.stop(why, failed=True)
    return []


def shrink(state: ControllerState, ticket: Ticket) -> list[Command]:
    """`on_dropped_prompt = "shrink"`: the step goes without the failed group, down to a share of B."""
    step = max(ticket.for_step, state.filling)
    fraction = state.config.rollout_failure.min_step_batch_fraction
    fewest = math.ceil(fraction * state.batch_size)
    if state.size(step) - 1 < fewest:
        return state.stop(
            f"step {step} would have {state.size(step) - 1} of {state.batch_size} groups after failures, fewer than "
            f"rollout_failure.min_step_batch_fraction = {fraction} allows ({fewest}); {_counts(state)}",
            failed=True,
        )
    return give_up_slot(state, step, "groups failed, and rollout_failure.on_dropped_prompt = 'shrink'")


# ---- The end of the data ----


def data_ended(state: ControllerState) -> list[Command]:
    """When nothing is under way any more: trains what is left, or ends the run."""
    ledger, step = state.ledger, state.filling
    ready = [t.ticket for t in ledger.in_order(Phase.READY)]
    size = state.size(step)
    if state.schedule.capabilities.stamps_steps:
        for number in ready[:size]:  # later steps will not be filled: this one is
            ledger.stamp(number, step)
    if len(ready) >= size > 0:
        return []
    if state.config.dynamic_sampling.on_data_end == "short" and ready:
        state.why_short[step] = f"the data ended with {len(ready)} of {state.batch_size} groups ready"
        state.shortfall[step] = state.batch_size - len(ready)
        return []
    freed = [*state.drop(list(state.held), Dropped.FILTERED), *state.drop(ready, Dropped.SURPLUS)]
    made = f"the data ended after {state.step} of {state.config.num_steps} steps"
    filtered = ledger.dropped[Dropped.FILTERED]
    judged = max(ledger.dispatched, 1)
    why = f"{made}; of {ledger.dispatched} groups {filtered} carried no signal ({filtered / judged:.0%})"
    return [*freed, *state.stop(why)]


# ---- In words ----


def short_note(state: ControllerState, tickets: Sequence[int]) -> str:
    """What is said of a step of fewer than B groups."""
    if len(tickets) == state.batch_size:
        return ""
    state.totals["short_steps"] += 1
    return f"short step: {state.why_short[state.filling]}"


def _have(state: ControllerState, why: str) -> str:
    ledger, step = state.ledger, state.filling
    ready = ledger.ready_for(step) if state.schedule.capabilities.stamps_steps else ledger.level(Phase.READY)
    return f"step {step} has {ready} of {state.batch_size} groups: {why}; {_counts(state)}"


def _expected(state: ControllerState) -> str:
    """How many slots may be expected to end like this: p^(N + 1) of them, for a drop rate of p."""
    rate, judged = state.keep_rate.mean, state.keep_rate.judged
    if rate is None:
        judged = sum(state.verdicts[v] for v in (Verdict.KEPT, Verdict.FILTERED))
        rate = state.verdicts[Verdict.KEPT] / max(judged, 1)
    limit = state.config.dynamic_sampling.max_replacements_per_slot
    slots = state.batch_size * state.num_steps
    number = (1 - rate) ** (limit + 1) * slots
    return (
        f"at the drop rate of {1 - rate:.0%}, that of {judged} groups so far, at least {number:.3g} of the run's "
        f"{slots} slots end like this (more if tasks differ)"
    )


def _counts(state: ControllerState) -> str:
    """This step's verdicts and reward patterns."""
    judged = sum(state.verdicts.values())
    dropped = judged - state.verdicts[Verdict.KEPT]
    verdicts = ", ".join(f"{n} {v}" for v, n in sorted(state.verdicts.items()) if n)
    patterns = ", ".join(f"{n} {p}" for p, n in sorted(state.patterns.items()))
    patterns = f" ({patterns})" if patterns else ""
    rate = f"drop rate {dropped / judged:.0%}" if judged else "nothing judged"
    return f"in this step {judged} groups were judged: {verdicts or '-'}{patterns}, {rate}"
