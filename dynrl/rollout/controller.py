"""The controller: a pure reducer, `apply(state, event) -> (state, commands)`. Plain Python: no JAX, clock or I/O.

It decides what is drawn, what a step trains on, what is dropped, and when the run ends. Everything it knows comes
as an event, so the same events give the same commands on every process and after every restart (laws 4 and 7).
Payloads are not here: they lie in the `GroupBuffer`, by ticket.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynrl.config import RunConfig
from dynrl.rollout.events import (
    Command,
    Dispatch,
    Draw,
    Event,
    Free,
    GroupsGenerated,
    GroupsJudged,
    Resumed,
    StepTrained,
    Stop,
    StopRequested,
    TasksDrawn,
    Train,
    Warn,
)
from dynrl.rollout.ledger import Dropped, Ledger, Phase
from dynrl.rollout.schedules import Exhausted, Schedule, make_schedule
from dynrl.types import Verdict

_OF_REWARDS = ("mixed", "all_pass", "all_fail", "uniform")  # patterns that say nothing about a failed group


@dataclass
class ControllerState:
    """Everything the reducer knows; `state_dict` is JSON-able and bounded by what is open."""

    config: RunConfig
    schedule: Schedule
    ledger: Ledger = field(default_factory=Ledger)
    step: int = 0  # optimizer steps made
    version: int = 0
    awaiting: str = ""  # "draw" or "train": a command whose answer is outstanding
    training: tuple[int, ...] = ()  # the tickets of the outstanding Train
    data_ended: bool = False
    stopped: bool = False
    empty_steps: int = 0  # steps in a row that ended without a group
    failed_in_row: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)  # of the step being filled, for messages
    patterns: Counter[str] = field(default_factory=Counter)

    @property
    def batch_size(self) -> int:
        """B."""
        return self.config.num_prompts_per_step

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "ledger": self.ledger.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
            "version": self.version,
            "awaiting": self.awaiting,
            "training": list(self.training),
            "data_ended": self.data_ended,
            "empty_steps": self.empty_steps,
            "failed_in_row": self.failed_in_row,
            "verdicts": dict(self.verdicts),
            "patterns": dict(self.patterns),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. A restored run is not stopped: it may have been given more steps."""
        self.ledger = Ledger.from_state_dict(state["ledger"])
        self.schedule.load_state_dict(state["schedule"])
        self.step, self.version = state["step"], state["version"]
        self.awaiting, self.training = state["awaiting"], tuple(state["training"])
        self.data_ended, self.stopped = state["data_ended"], False
        self.empty_steps, self.failed_in_row = state["empty_steps"], state["failed_in_row"]
        self.verdicts, self.patterns = Counter(state["verdicts"]), Counter(state["patterns"])


def initial_state(config: RunConfig) -> ControllerState:
    """The state before the first event."""
    schedule = make_schedule(config.schedule.name, config.dynamic_sampling, config.num_prompts_per_step)
    return ControllerState(config, schedule)


def apply(state: ControllerState, event: Event) -> tuple[ControllerState, list[Command]]:
    """Takes one event.

    Args:
      state: consumed: updated in place and returned, so that an event costs O(1).
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
        case GroupsJudged():
            commands += _judged(state, event)
        case StepTrained():
            commands += _trained(state, event)
        case StopRequested():
            commands += _stop(state, event.reason)
        case Resumed():
            commands += _resumed(state)
    if not state.stopped and not state.awaiting:
        commands += _decide(state)
    state.ledger.check()
    return state, commands


def _resumed(state: ControllerState) -> list[Command]:
    """Forgets commands whose answer never came, which are decided again, and resubmits what was under way."""
    state.awaiting, state.training = "", ()
    under_way = tuple(state.ledger.restart())
    return [Dispatch(under_way)] if under_way else []


def _drawn(state: ControllerState, event: TasksDrawn) -> list[Command]:
    if state.awaiting != "draw":
        raise ValueError(f"{len(event.draws)} tasks were drawn, but no Draw is outstanding")
    if len(event.draws) > event.requested:
        raise ValueError(f"{len(event.draws)} tasks were drawn, {event.requested} asked for")
    state.awaiting = ""
    state.data_ended |= len(event.draws) < event.requested
    if not event.draws:
        return []
    index = state.schedule.replacement_index()
    tickets = tuple(state.ledger.dispatch(t, v, state.version, state.step, index) for t, v in event.draws)
    state.schedule.on_dispatch(len(tickets))
    return [Dispatch(tickets)]


def _judged(state: ControllerState, event: GroupsJudged) -> list[Command]:
    ledger, budget, longest_run = state.ledger, state.config.rollout_failure, 0
    state.verdicts.update([j.verdict for j in event.judgements])
    state.patterns.update(
        [j.pattern for j in event.judgements if j.verdict is not Verdict.FAILED or j.pattern not in _OF_REWARDS]
    )
    ended: dict[Verdict, list[int]] = {verdict: [] for verdict in Verdict}
    for ticket, verdict, _ in event.judgements:
        ended[verdict].append(ticket)
        if verdict is Verdict.FAILED:
            state.failed_in_row += 1
            longest_run = max(longest_run, state.failed_in_row)
        else:
            state.failed_in_row = 0
    state.schedule.on_end([j.verdict for j in event.judgements])
    ledger.move(ended[Verdict.KEPT], Phase.READY)
    ledger.end(ended[Verdict.FILTERED], dropped=Dropped.FILTERED)
    ledger.end(ended[Verdict.STALE], dropped=Dropped.STALE)
    ledger.end(ended[Verdict.FAILED], failed=True)
    for used, limit, key in (
        (ledger.failed, budget.max_skipped_prompts, "max_skipped_prompts"),
        (longest_run, budget.max_consecutive_dropped_prompts, "max_consecutive_dropped_prompts"),
    ):
        if used > limit:
            why = f"{used} groups failed, more than rollout_failure.{key} = {limit}; {_counts(state)}"
            return _stop(state, why, failed=True)
    return []


def _trained(state: ControllerState, event: StepTrained) -> list[Command]:
    if state.awaiting != "train":
        raise ValueError("a step was trained, but no Train is outstanding")
    state.ledger.end(state.training)
    state.awaiting, state.training = "", ()
    state.step += 1
    state.version = event.version
    state.empty_steps = 0
    return _next_step(state)


def _next_step(state: ControllerState) -> list[Command]:
    """Clears the step's counts; what is left over is carried, or dropped as configured."""
    state.schedule.on_step()
    state.verdicts.clear()
    state.patterns.clear()
    if state.config.dynamic_sampling.surplus == "carry":
        return []
    return _drop(state, [t.ticket for t in state.ledger.in_order(Phase.READY)], Dropped.SURPLUS)


def _drop(state: ControllerState, tickets: Sequence[int], reason: Dropped) -> list[Command]:
    state.ledger.end(tickets, dropped=reason)
    return [Free(tuple(tickets))] if tickets else []


def _decide(state: ControllerState) -> list[Command]:
    """What to do now that no answer is outstanding."""
    if state.step >= state.config.num_steps:
        return _stop(state, f"all {state.config.num_steps} steps were made")
    commands = _drop(state, state.schedule.evict(state), Dropped.STALE)
    tickets = state.schedule.select(state)
    if tickets is not None:
        return [*commands, *_train(state, tickets)]
    num = state.schedule.admit(state)
    if num == 0:
        return commands
    if state.data_ended:
        return [*commands, *_end_of_data(state)]
    exhausted = state.schedule.exhausted(state)
    if exhausted is not None:
        return [*commands, *_end_of_budget(state, exhausted)]
    state.awaiting = "draw"
    return [*commands, Draw(num)]


def _train(state: ControllerState, tickets: Sequence[int], note: str = "") -> list[Command]:
    state.awaiting, state.training = "train", tuple(tickets)
    return [Train(state.training, note)]


def _end_of_data(state: ControllerState) -> list[Command]:
    ready = [t.ticket for t in state.ledger.in_order(Phase.READY)]
    made = f"the data ended after {state.step} of {state.config.num_steps} steps"
    if state.config.dynamic_sampling.on_data_end == "short" and ready:
        return _train(state, ready, f"short step: the data ended with {len(ready)} of {state.batch_size} groups ready")
    filtered = state.ledger.dropped[Dropped.FILTERED]
    judged = max(state.ledger.dispatched, 1)
    why = f"{made}; of {state.ledger.dispatched} groups {filtered} carried no signal ({filtered / judged:.0%})"
    return [*_drop(state, ready, Dropped.SURPLUS), *_stop(state, why)]


def _end_of_budget(state: ControllerState, exhausted: Exhausted) -> list[Command]:
    config = state.config.dynamic_sampling
    ready = [t.ticket for t in state.ledger.in_order(Phase.READY)]
    have = f"step {state.step} has {len(ready)} of {state.batch_size} groups: {exhausted.why}; {_counts(state)}"
    if config.on_exhausted == "raise":
        short = "dynamic_sampling.on_exhausted = 'short' trains on what was kept; " if ready else ""
        if state.verdicts[Verdict.FAILED] > state.verdicts[Verdict.FILTERED]:
            cure = "most groups failed, which the filter has no part in: their rollouts died in sampler or verifier"
        else:
            cure = "easier or harder tasks, as the counts say, raise the share that is kept"
        return _stop(state, f"{have}. {short}{exhausted.advice}; {cure}", failed=True)
    if ready:
        return _train(state, ready, f"short step: {have}")
    state.empty_steps += 1
    if state.empty_steps > config.max_consecutive_empty_steps:
        limit = f"dynamic_sampling.max_consecutive_empty_steps = {config.max_consecutive_empty_steps}"
        return _stop(
            state, f"{have}. Nothing was kept {state.empty_steps} times in a row, more than {limit}", failed=True
        )
    commands: list[Command] = [Warn(f"no update: {have}")]
    return [*commands, *_next_step(state), *_decide(state)]


def _counts(state: ControllerState) -> str:
    """This step's verdicts and reward patterns, in words."""
    judged = sum(state.verdicts.values())
    dropped = judged - state.verdicts[Verdict.KEPT]
    verdicts = ", ".join(f"{n} {v}" for v, n in sorted(state.verdicts.items()))
    patterns = ", ".join(f"{n} {p}" for p, n in sorted(state.patterns.items()))
    patterns = f" ({patterns})" if patterns else ""
    rate = f"drop rate {dropped / judged:.0%}" if judged else "nothing judged"
    return f"in this step {judged} groups were judged: {verdicts or '-'}{patterns}, {rate}"


def _stop(state: ControllerState, reason: str, failed: bool = False) -> list[Command]:
    state.stopped = True
    return [Stop(reason, failed)]
