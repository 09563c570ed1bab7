"""Schedules without rounds: what is dropped is replaced at once, while other groups go on.

All of them bound how old a trained group can be, in versions between its dispatch and the start of its step. What
fits into that bound is dispatched ahead, so that the sampler is never without work.
"""

import math
import sys
from collections.abc import Sequence

from dynrl.config import RunConfig
from dynrl.rollout.ledger import Phase
from dynrl.rollout.schedules.base import BaseSchedule, Capabilities, View, oldest_first
from dynrl.rollout.schedules.rounds import largest_factor


def most_running(config: RunConfig) -> int:
    """Groups under way at once that are of use: B, or twice what the slots hold.

    Twice, since the rollouts of a group end one by one. What waits behind these would only grow old: under a window
    of several steps, as old as the window.
    """
    slots = config.sampler.num_slots
    if not slots:  # as many as memory holds, which nobody knows here
        return sys.maxsize
    return max(2 * math.ceil(slots / config.num_generations_per_prompt), config.num_prompts_per_step)


class InOrder(BaseSchedule):
    """Each group is stamped with the step that trains it, up to `max_lookahead_versions` ahead of the weights.

    A step trains its own groups, whichever finish first. Where one is dropped, a finished group of a later step is
    promoted into its place by the controller, and the fresh one repays the lender. Groups that oversampling made too
    many of belong to the next step. A step waits for those that would then be older than `max_surplus_age_versions`,
    and trains them: nothing is dropped for being slow.
    """

    capabilities = Capabilities(stamps_steps=True)

    def __init__(self, config: RunConfig) -> None:
        self._batch_size = config.num_prompts_per_step
        self._lookahead = config.schedule.max_lookahead_versions
        self._max_age = max(self._lookahead, config.dynamic_sampling.max_surplus_age_versions)
        self._num_steps = self._lookahead // config.versions_per_step + 1  # in reach
        self._factor = largest_factor(config.dynamic_sampling)

    def _steps(self, view: View) -> range:
        """Steps for which groups may be dispatched now."""
        ahead = (view.version + self._lookahead) // view.versions_per_step
        return range(view.filling, min(ahead + 1, view.num_steps))

    def admit(self, view: View) -> Sequence[int]:
        """What each step in reach still lacks, the nearest one first."""
        ledger, stamps = view.ledger, []
        ready = running = 0  # what nearer steps have too many, which will be this one's
        for step in self._steps(view):
            ready, running = ready + ledger.ready_for(step), running + ledger.running_of_step[step]
            missing = view.size(step) - ready
            wanted = view.wanted(missing, self._batch_size) if missing > 0 else 0
            stamps += [step] * (wanted - running)
            ready, running = max(-missing, 0), max(running - wanted, 0)
        return stamps

    def select(self, view: View) -> list[int] | None:
        """The step's own groups, when they are there: first what would be too old afterwards."""
        ledger, step, size = view.ledger, view.filling, view.size(view.filling)
        last_call = self.oldest_version(view) + view.versions_per_step  # what the next step will find too old
        if ledger.ready_for(step) < size or not size or self._awaits(view, last_call):
            return None
        ready = ledger.open[Phase.READY]
        return sorted(sorted(ledger.ready_of_step[step], key=lambda n: (ready[n].version >= last_call, n))[:size])

    def _awaits(self, view: View, last_call: int) -> bool:
        """Whether a group of this step is under way that was dispatched before the last call."""
        ledger, step = view.ledger, view.filling
        if not ledger.running_of_step[step] or all(v >= last_call for v in ledger.running_of_version):
            return False
        running = (ledger.open[phase].values() for phase in (Phase.IN_FLIGHT, Phase.JUDGING))
        return any(t.for_step == step and t.version < last_call for tickets in running for t in tickets)

    def oldest_version(self, view: View) -> int:
        """A stamp bounds the age; what is carried to the next step may have `max_surplus_age_versions`."""
        return view.filling * view.versions_per_step - self._max_age

    @property
    def max_open(self) -> int:
        """All that may be dispatched for the steps in reach, what may be ready for them, and a batch."""
        return math.ceil(self._batch_size * (self._num_steps * (self._factor + 1) + 1))


class ReadyFirst(BaseSchedule):
    """Any ready group is trained, the first to finish first, and none is ever too old.

    Dispatching waits for the trainer: no more groups are open than the steps up to `max_staleness_versions` from now
    take. Groups that would be too old for the next step are trained in this one; if they are not finished, the step
    waits for them. So nothing is dropped for being slow, and short answers get no preference in the long run.
    """

    capabilities = Capabilities(completion_order=True)

    def __init__(self, config: RunConfig) -> None:
        self._batch_size = config.num_prompts_per_step
        self._staleness = config.schedule.max_staleness_versions
        self._num_steps = self._staleness // config.versions_per_step + 1  # in reach
        self._factor = largest_factor(config.dynamic_sampling)
        self._most_running = most_running(config)

    def _horizon(self, view: View) -> int:
        """Steps, from the one being filled on, that may train what is dispatched now."""
        last = (view.version + self._staleness) // view.versions_per_step
        return max(min(last, view.num_steps - 1) - view.filling + 1, 0)

    def admit(self, view: View) -> Sequence[int]:
        """As many as the steps in reach still lack."""
        horizon = self._horizon(view)
        full = horizon * self._batch_size
        missing = full - (self._batch_size - view.size(view.filling)) - view.ledger.level(Phase.READY)
        if horizon == 0 or missing <= 0:
            return []
        return [-1] * (min(view.wanted(missing, full), self._most_running) - view.ledger.num_running)

    def select(self, view: View) -> list[int] | None:
        """What would be too old afterwards, all of it, and then whatever the schedule prefers."""
        size, ready = view.size(view.filling), view.ledger.open[Phase.READY]
        if len(ready) < size or not size:
            return None
        last_call = self.oldest_version(view) + view.versions_per_step  # what the next step will find too old
        if any(version < last_call for version in view.ledger.running_of_version):
            return None
        due = sorted(n for n, t in ready.items() if t.version < last_call)[:size]
        rest = self._preferred(view, size - len(due), set(due)) if len(due) < size else []
        return sorted(due + rest)

    def _preferred(self, view: View, num: int, taken: set[int]) -> list[int]:
        """The first to have become ready."""
        chosen = []
        for number in view.ledger.open[Phase.READY]:
            if len(chosen) == num:
                break
            if number not in taken:
                chosen.append(number)
        return chosen

    def oldest_version(self, view: View) -> int:
        """At the step being filled. Nothing reaches it but surplus of oversampling and what short steps left over."""
        return view.filling * view.versions_per_step - self._staleness

    @property
    def max_open(self) -> int:
        """All that may be dispatched for the steps in reach, what may be ready for them, and a batch."""
        running = min(math.ceil(self._batch_size * self._num_steps * self._factor), self._most_running)
        return self._batch_size * (self._num_steps + 1) + running


class WeightFifo(ReadyFirst):
    """As `ready_first`, but groups of the oldest weights are trained first."""

    def _preferred(self, view: View, num: int, taken: set[int]) -> list[int]:
        return [n for n in sorted(view.ledger.open[Phase.READY]) if n not in taken][:num]


class Windowed(BaseSchedule):
    """The sampler never waits for the trainer: groups are dispatched whatever the version, and old ones dropped.

    A step takes the freshest groups, or the oldest (`sample_freshest_first = False`), of those not older than
    `max_staleness_versions`. Groups that take longer than this are lost: long answers are at a disadvantage.
    """

    capabilities = Capabilities(gates_admission=False, completion_order=True)

    def __init__(self, config: RunConfig) -> None:
        self._batch_size = config.num_prompts_per_step
        self._staleness, self._freshest = config.schedule.max_staleness_versions, config.schedule.sample_freshest_first
        self._num_steps = self._staleness // config.versions_per_step + 1  # of the window
        self._factor = largest_factor(config.dynamic_sampling)
        self._most_running = most_running(config)

    def admit(self, view: View) -> Sequence[int]:
        """Whatever is missing to the number of groups that run at once."""
        if view.filling >= view.num_steps:
            return []
        full = min(self._num_steps, view.num_steps - view.filling) * self._batch_size
        return [-1] * (min(view.wanted(full, full), self._most_running) - view.ledger.num_running)

    def select(self, view: View) -> list[int] | None:
        """B groups of the window."""
        size = view.size(view.filling)
        if view.ledger.level(Phase.READY) < size or not size:
            return None
        if not self._freshest:
            return oldest_first(view, size)
        return sorted(sorted(view.ledger.open[Phase.READY])[-size:])

    def oldest_version(self, view: View) -> int:
        """The beginning of the window."""
        return view.filling * view.versions_per_step - self._staleness

    def evict(self, view: View) -> list[int]:
        """The oldest, when more are ready than the steps of a window can train."""
        excess = view.ledger.level(Phase.READY) - self._num_steps * self._batch_size
        return oldest_first(view, excess) if excess > 0 else []

    @property
    def max_open(self) -> int:
        """What runs at once, what is ready, and a batch."""
        running = min(math.ceil(self._batch_size * self._num_steps * self._factor), self._most_running)
        return self._batch_size * (self._num_steps + 1) + running
