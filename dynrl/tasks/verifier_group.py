"""Groups while they are verified: how they travel, and how their verdicts become `Scores`. No processes, no threads."""

import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynrl.tasks.verifier_worker import Verdict
from dynrl.types import Reward, Scores, Status, Task

_DEAD = float("nan")
_MAX_UNITS = 16  # in one message
_MAX_CHARS = 1 << 20  # no further unit joins a message with so much text


@dataclass
class Group:
    """One submitted group, until all its rollouts are judged."""

    order: int
    ticket: int
    task: Task
    verifier: str
    texts: tuple[str | None, ...]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)

    @property
    def finished(self) -> bool:
        """Whether every rollout has its verdict."""
        return len(self.verdicts) == len(self.texts)

    def scores(self, metrics: Sequence[str]) -> Scores:
        """The finished group's rewards. A live rollout without a reward has score 0, and the metrics' components."""
        verdicts = [self.verdicts[index] for index in range(len(self.texts))]
        statuses = tuple(Status(verdict.status) for verdict in verdicts)
        rewards = []
        for verdict, status in zip(verdicts, statuses, strict=True):
            score, components = (verdict.score, verdict.components) if status.live else (_DEAD, {})
            if status is not Status.OK:
                components = {metric: score for metric in metrics if metric != "score"}
            rewards.append(Reward(score, components, verdict.info))
        return Scores(self.ticket, tuple(rewards), statuses)


@dataclass(frozen=True)
class Unit:
    """Some rollouts of one group that wait for a worker; `alone`: not to share a message with others."""

    group: Group
    indices: tuple[int, ...]
    alone: bool = False

    @property
    def open_indices(self) -> tuple[int, ...]:
        """The rollouts without a verdict."""
        return tuple(index for index in self.indices if index not in self.group.verdicts)

    @property
    def texts(self) -> list[str | None]:
        """Its completions."""
        return [self.group.texts[index] for index in self.indices]


class Job:
    """What one message asks of a worker: units, whose rollouts are numbered through."""

    def __init__(self, job_id: int, units: Sequence[Unit]) -> None:
        self.job_id = job_id
        self.units = units
        self.rollouts = [(unit.group, index) for unit in units for index in unit.indices]
        self.alone = len(self.rollouts) == 1

    def remainder(self, suspect: int | None) -> list[Unit]:
        """What to judge again when the worker was lost at rollout `suspect` (None: unknown).

        Units that it had not reached stay whole. Of the others, each rollout without a verdict goes alone.
        """
        units, start = [], 0
        for unit in self.units:
            if suspect is not None and start > suspect:
                units.append(unit)
            else:
                units += [Unit(unit.group, (index,), alone=True) for index in unit.open_indices]
            start += len(unit.indices)
        return units


class Message(NamedTuple):
    """Units for one worker with their pickled tasks and texts; and those that cannot be sent, with the reason."""

    units: list[Unit]
    bodies: list[bytes]
    unpicklable: list[tuple[Unit, Exception]]


def take_units(waiting: deque[Unit], num_units: int) -> Message:
    """Takes at most `num_units` units from the front of the queue, or one that goes alone."""
    message = Message([], [], [])
    num_chars = 0
    while waiting and len(message.units) < min(num_units, _MAX_UNITS) and num_chars < _MAX_CHARS:
        if waiting[0].alone and message.units:
            break
        unit = waiting.popleft()
        try:
            body = pickle.dumps((unit.group.task, unit.texts), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            message.unpicklable.append((unit, error))
            continue
        message.units.append(unit)
        message.bodies.append(body)
        num_chars += sum(len(text or "") for text in unit.texts)
        if unit.alone:
            break
    return message
