"""Time on the rollout side: attempts that wait to be repeated, groups that take too long, verifiers that did.

What the clock decides is written into the journal before it is used, and decided the same after a restart (law 7). The
first process's clock counts for all (law 4).
"""

import time
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
      group_secs: between a group's dispatch and its verdict; 0 = any time.
      metrics: components that a reward must have.
    """

    def __init__(self, group_secs: float, metrics: Sequence[str]) -> None:
        self._group_secs, self._metrics = group_secs, metrics
        self.journal = Journal()  # of the run, once it has a workdir
        self._epoch, self._now = time.monotonic(), 0.0  # seconds since, the same on every process
        self._since: dict[int, float] = {}  # dispatch, where there is a deadline
        self._retries: list[tuple[float, Ticket]] = []  # when they are due

    @property
    def num_waiting(self) -> int:
        """Groups that wait for another attempt."""
        return len(self._retries)

    def _read_clock(self) -> None:
        self._now = common_number(int((time.monotonic() - self._epoch) * 100)) / 100

    def began(self, tickets: Sequence[Ticket]) -> None:
        """These groups are dispatched."""
        if self._group_secs:
            self._read_clock()
            self._since |= {t.ticket: self._now for t in tickets}

    def wait(self, ticket: Ticket, delay_secs: float) -> None:
        """This group is to be dispatched again after a while."""
        self._read_clock()
        self._retries.append((self._now + delay_secs, ticket))

    def forget(self, numbers: Collection[int]) -> None:
        """These groups have ended."""
        for number in numbers:
            self._since.pop(number, None)
        if self._retries:
            self._retries = [r for r in self._retries if r[1].ticket not in numbers]

    def due(self) -> list[Ticket]:
        """Reads the clock, and returns the groups whose wait is over."""
        if self._retries or self._since:
            self._read_clock()
        due = [t for when, t in self._retries if when <= self._now]
        self._retries = [r for r in self._retries if r[0] > self._now]
        return due

    def late(self, tickets: Mapping[int, Ticket], num_polls: int) -> list[int]:
        """Groups past their deadline: by the clock, or in the same poll as before a restart."""
        late = []
        for number, since in sorted(self._since.items()):
            t = tickets[number]
            key = ("deadline", t.task_id, t.visit, t.attempts)
            poll = self.journal.get(*key)
            passed = self._now - since > self._group_secs if poll is None else num_polls >= poll
            if passed:
                late.append(number)
                if poll is None and jax.process_index() == 0:
                    self.journal.write(key, num_polls)
        return late

    def with_timeouts(self, scores: Scores, t: Ticket) -> Scores:
        """The scores of a group, in which every verification has missed its deadline that did so before a restart."""
        key = ("timeout", t.task_id, t.visit, t.attempts)
        now = [i for i, status in enumerate(scores.statuses) if status is Status.TIMEOUT]
        before = self.journal.get(*key)
        if before is None:
            if now:
                self.journal.write(key, now)
            return scores
        missed, zero = set(before), Reward(0.0, dict.fromkeys(self._metrics, 0.0))
        statuses = [Status.TIMEOUT if i in missed else status for i, status in enumerate(scores.statuses)]
        rewards = [zero if i in missed else reward for i, reward in enumerate(scores.rewards)]
        return scores._replace(statuses=tuple(statuses), rewards=tuple(rewards))

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
