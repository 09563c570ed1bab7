"""A group while it is verified, and how its verdicts become `Scores`. Plain records: no processes, no threads."""

from collections import Counter
from dataclasses import dataclass, field

from dynrl.tasks.verifier_worker import Verdict
from dynrl.types import Reward, Scores, Status, Task

_DEAD = float("nan")


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

    def scores(self, metric: str) -> Scores:
        """The finished group's rewards. A live rollout without a reward has score 0, and the metric's component."""
        verdicts = [self.verdicts[index] for index in range(len(self.texts))]
        statuses = tuple(Status(verdict.status) for verdict in verdicts)
        rewards = []
        for verdict, status in zip(verdicts, statuses, strict=True):
            score, components = (verdict.score, verdict.components) if status.live else (_DEAD, {})
            if status is not Status.OK and metric != "score":
                components = {metric: score}
            rewards.append(Reward(score, components, verdict.info))
        return Scores(self.ticket, tuple(rewards), statuses)


@dataclass
class Job:
    """Some rollouts of one group, for one worker."""

    job_id: int
    group: Group
    indices: tuple[int, ...]

    @property
    def open_indices(self) -> list[int]:
        """The rollouts without a verdict."""
        return [index for index in self.indices if index not in self.group.verdicts]
