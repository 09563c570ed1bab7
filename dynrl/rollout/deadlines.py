"""Time on the rollout side: attempts that wait to be repeated, groups that take too long, verifiers that did.

What the clock decides is written into the journal before it is used, and decided the same after a restart (law 7),
except where a run follows the wall clock. (What had not been decided when the run was killed may come otherwise, on a
slower machine.) Time is that spent in polls: evaluation and training do not count. The first process's clock counts
for all (law 4).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from dynrl.journal import Journal
from dynrl.models.sharding import common_number
from dynrl.rollout.ledger import Ticket
from dynrl.types import Reward, Scores, Status


class Deadlines:
    """Knows when each group was dispatched, and which wait for another attempt.

    Args:
      group_secs: between a group's dispatch and its last token; 0 = any time. Verifiers have deadlines of their own.
      metrics: components that a reward must have.
      replays: whether what was decided at a poll is decided at the same poll after a restart.
    """

    def __init__(self, group_secs: float, metrics: Sequence[str], replays: bool = True) -> None:
        self._group_secs, self._metrics, self._replays = group_secs, metrics, replays
        self.journal = Journal()  # of the run, once it has a workdir
        self._spent = 0.0  # seconds, of this process
        self._now = 0.0  # the same on every process
        self._since: dict[int, float] = {}  # dispatch, where there is a deadline
        self._retries: list[tuple[float, Ticket]] = []  # when they are due

    @property
    def num_waiting(self) -> int:
        """Groups that wait for another attempt."""
        return len(self._retries)

    def spent(self, secs: float) -> None:
        """A poll took so long."""
        self._spent += secs

    def _read_clock(self) -> None:
        self._now = common_number(int(self._spent * 100)) / 100

    def _passed(self, kind: str, t: Ticket, by_clock: bool, num_polls: int) -> bool:
        """Whether something happens to a group now: by the clock, or in the same poll as before a restart."""
        key = (kind, t.task_id, t.visit, t.attempts)
        poll = self.journal.get(*key) if self._replays else None
        if poll is not None:
            return num_polls >= poll
        if by_clock and jax.process_index() == 0:
            self.journal.write(key, num_polls)
        return by_clock

    def began(self, tickets: Sequence[Ticket]) -> None:
        """These groups are dispatched."""
        if self._group_secs:
            self._read_clock()
            self._since |= {t.ticket: self._now for t in tickets}

    def generated(self, numbers: Collection[int]) -> None:
        """These groups are with the verifiers."""
        for number in numbers:
            self._since.pop(number, None)

    def wait(self, ticket: Ticket, delay_secs: float) -> None:
        """This group is to be dispatched again after a while."""
        self._read_clock()
        self._retries.append((self._now + delay_secs, ticket))

    def forget(self, numbers: Collection[int]) -> None:
        """These groups have ended."""
        self.generated(numbers)
        if self._retries:
            self._retries = [r for r in self._retries if r[1].ticket not in numbers]

    def due(self, num_polls: int) -> list[Ticket]:
        """Reads the clock, and returns the groups whose wait is over."""
        if self._retries or self._since:
            self._read_clock()
        due = [t for when, t in self._retries if self._passed("retry", t, when <= self._now, num_polls)]
        numbers = {t.ticket for t in due}
        self._retries = [r for r in self._retries if r[1].ticket not in numbers]
        return due

    def late(self, tickets: Mapping[int, Ticket], num_polls: int) -> list[int]:
        """Groups past their deadline."""
        return [
            number
            for number, since in sorted(self._since.items())
            if self._passed("deadline", tickets[number], self._now - since > self._group_secs, num_polls)
        ]

    def with_timeouts(self, scores: Scores, t: Ticket) -> Scores:
        """See the function `with_timeouts`."""
        return with_timeouts(self.journal, ("timeout", t.task_id, t.visit, t.attempts), scores, self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: times as ages and waits."""
        return {
            "age": [[number, self._now - since] for number, since in self._since.items()],
            "wait": [[t.ticket, when - self._now] for when, t in self._retries],
        }

    def load_state_dict(self, state: Mapping[str, Any], tickets: Mapping[int, Ticket]) -> None:
        """The inverse."""
        self._read_clock()
        self._since = {number: self._now - age for number, age in state["age"]}
        self._retries = [(self._now + left, tickets[number]) for number, left in state["wait"]]


def with_timeouts(journal: Journal, key: tuple[object, ...], scores: Scores, metrics: Sequence[str] = ()) -> Scores:
    """The scores of a group, in which every verification has missed its deadline that did so before a restart.

    Args:
      journal: of the run.
      key: names the group in it.
      scores: as they came.
      metrics: components that a reward must have.
    """
    now = [i for i, status in enumerate(scores.statuses) if status is Status.TIMEOUT]
    before = journal.get(*key)
    if before is None:
        if now:
            journal.write(key, now)
        return scores
    missed, zero = set(before), Reward(0.0, dict.fromkeys(metrics, 0.0))
    statuses = [Status.TIMEOUT if i in missed else status for i, status in enumerate(scores.statuses)]
    rewards = [zero if i in missed else reward for i, reward in enumerate(scores.rewards)]
    return scores._replace(statuses=tuple(statuses), rewards=tuple(rewards))
