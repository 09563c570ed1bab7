"""What is known of groups on their way from the sampler to the controller: scores, lengths, verdicts, as arrays.

Every producer uses these: completions to the verifiers, their scores into records, the records of all processes
together (law 4), and what metrics, controller and selector are told of judged groups.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.buffer import RECORD
from dynrl.rollout.events import Judgement
from dynrl.rollout.judge import Judged
from dynrl.rollout.ledger import Ticket
from dynrl.tasks.rewards import metric_value
from dynrl.tasks.self_propose import FIRST_ID
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Finish, Groups, Outcome, Scores, Status, Task, Verdict

STATUSES = tuple(Status)
_STATUS_INDEX = {status: i for i, status in enumerate(STATUSES)}
_SAMPLER, _CRASHED = _STATUS_INDEX[Status.SAMPLER], _STATUS_INDEX[Status.CRASHED]
_LIVE_STATUS = np.array([status.live for status in STATUSES])


class Records(NamedTuple):
    """What is decided and counted from, per rollout; NumPy [P, G]. The same on every process after `gather`."""

    score: np.ndarray  # float32
    metric: np.ndarray  # float32: the configured one
    status: np.ndarray  # int32, index into STATUSES
    length: np.ndarray  # int32
    finish: np.ndarray  # int32
    host_keep: np.ndarray  # int32 [P, 1]: a host filter's verdict
    components: np.ndarray  # float32 [P, G * K]: several named rewards; K = 0 where the metric is all

    @property
    def live(self) -> np.ndarray:
        """Bool [P, G]."""
        return _LIVE_STATUS[self.status]

    @property
    def rewards(self) -> np.ndarray:
        """What the estimator takes: the metric [P, G], or the named rewards [P, G, K]; 0 where dead."""
        p, g = self.metric.shape
        rewards = self.components.reshape(p, g, -1) if self.components.size else self.metric
        return np.where(self.live.reshape(p, g, *[1] * (rewards.ndim - 2)), rewards, np.float32(0))

    def rows(self, rows_P: np.ndarray) -> "Records":
        """The groups of a mask."""
        return Records(*(x[rows_P] for x in self))


@dataclass(frozen=True)
class JudgedGroups:
    """N judged groups with everything that metrics and selectors want to know of them.

    Attributes:
      tickets: theirs.
      tasks: theirs.
      judged: verdicts and statistics.
      records: scores, lengths and how each rollout ended, [N, G].
    """

    tickets: list[Ticket]
    tasks: list[Task]
    judged: Judged
    records: Records

    @property
    def sources(self) -> list[str]:
        """Of the tasks."""
        return [task.source for task in self.tasks]

    def rows(self, rows_N: np.ndarray) -> "JudgedGroups":
        """The groups of a mask."""
        tickets, tasks = list(itertools.compress(self.tickets, rows_N)), list(itertools.compress(self.tasks, rows_N))
        return JudgedGroups(tickets, tasks, self.judged.rows(rows_N), self.records.rows(rows_N))

    def judgements(self) -> list[Judgement]:
        """What the controller is told."""
        j = self.judged
        sampler_N, crashed_N = ((self.records.status == s).any(1) for s in (_SAMPLER, _CRASHED))
        failed_N = j.verdict_P == Verdict.FAILED
        # A crash has had its attempts already: the verifiers' pool tries again by itself, and without sampling again.
        cause_N = np.where(sampler_N, "infra", np.where(crashed_N, "", "data"))
        cause_N = np.where(failed_N, cause_N, "")
        columns = (j.verdict_P, j.pattern_P, cause_N, j.stats.spread, j.refused_P)
        rows = zip(self.tickets, *(c.tolist() for c in columns), strict=True)
        return [Judgement(t.ticket, *values) for t, *values in rows]

    def outcomes(self) -> list[Outcome]:
        """What the selector is told."""
        stats = self.judged.stats
        mean_N = np.where(stats.count > 0, stats.mean, np.nan)
        signal_N = self.judged.pattern_P == "mixed"
        columns = [x.tolist() for x in (self.judged.verdict_P, stats.count, stats.positives, mean_N, signal_N)]
        return [
            Outcome(t.task_id, t.visit, verdict, count, positives, mean, t.version, x.source, x.level, signal)
            for t, x, verdict, count, positives, mean, signal in zip(self.tickets, self.tasks, *columns, strict=True)
        ]


def gather(records: Records, owned_P: np.ndarray, problem: Exception | None = None) -> Records:
    """Every process's rows, on every process: each row is taken from the process that owns it.

    A process with a problem (its filter or verifiers failed) gathers too, so that the others hear of it (law 4): it
    raises the problem, and they a RuntimeError.
    """
    if jax.process_count() == 1:
        if problem is not None:
            raise problem
        return records
    from jax.experimental import multihost_utils

    bits = [x.view(np.int32) if x.dtype == np.float32 else x.astype(np.int32) for x in records]
    own = np.where(owned_P[:, None], np.concatenate(bits, axis=1), 0)
    own = np.concatenate([own, np.full((1, own.shape[1]), problem is not None, np.int32)])
    total = np.asarray(multihost_utils.process_allgather(own)).sum(axis=0, dtype=np.int32)
    if problem is not None:
        raise problem
    if total[-1, 0]:
        raise RuntimeError("filter or verifiers failed on another process; its log says how")
    columns = np.split(total[:-1], np.cumsum([x.shape[1] for x in bits])[:-1], axis=1)
    columns = [np.ascontiguousarray(x) for x in columns]
    return Records(*(c.view(np.float32) if r.dtype == np.float32 else c for c, r in zip(columns, records, strict=True)))


def warm_up_gather(num_groups: int, num_samples: int, num_rewards: int = 0) -> None:
    """Compiles the program that `gather` runs where there are several processes."""
    zeros = np.zeros((num_groups, num_samples), np.int32)
    gather(_records(zeros.astype(np.float32), zeros, num_rewards), np.zeros(num_groups, bool))


def submit_for_judgement(
    groups: Groups, tasks: Mapping[int, Task], tokenizer: Tokenizer, verifiers: Verifiers, ids: Mapping[int, int]
) -> None:
    """Decodes the finished completions that this process owns and hands them to the verifiers.

    Args:
      groups: from the sampler.
      tasks: by ticket.
      tokenizer: decodes.
      verifiers: the pool.
      ids: the numbers by which the pool is to know the tickets.
    """
    mine = np.flatnonzero(groups.valid_P & groups.owned_P)
    if not len(mine):
        return
    tokens_NT = groups.host_tokens_PGT[mine].reshape(-1, groups.host_tokens_PGT.shape[-1])
    texts: list[str | None] = list(tokenizer.decode_batch(tokens_NT, groups.host_length_PG[mine].ravel()))
    for n in np.flatnonzero(groups.host_finish_PG[mine].ravel() == Finish.FAILED).tolist():
        texts[n] = None
    num = len(texts) // len(mine)
    for i, ticket in enumerate(groups.tickets_P[mine].tolist()):
        verifiers.submit(ids[ticket], tasks[ticket], texts[i * num : (i + 1) * num])


def records_of(groups: Groups, scores: dict[int, Scores], metric: str, names: Sequence[str] = ()) -> Records:
    """Records of one handed-over set of groups, filled where this process owns the group.

    Args:
      groups: from the sampler.
      scores: by ticket, of those groups at least that this process owns.
      metric: the reward that filter and metrics look at.
      names: several rewards, for an estimator that takes them.
    """
    p, g = groups.host_length_PG.shape
    score, value = np.zeros((p, g), np.float32), np.zeros((p, g), np.float32)
    components = np.zeros((p, g, len(names)), np.float32)
    status = np.full((p, g), _STATUS_INDEX[Status.SAMPLER], np.int32)
    mine = np.flatnonzero(groups.valid_P & groups.owned_P)
    if len(mine):
        judged = [scores[t] for t in groups.tickets_P[mine].tolist()]
        status[mine] = [[_STATUS_INDEX[s] for s in j.statuses] for j in judged]
        with np.errstate(over="ignore"):  # finite for the verifier, infinite in float32
            score[mine] = [[r.score for r in j.rewards] for j in judged]
            value[mine] = (
                score[mine] if metric == "score" else [[metric_value(r, metric) for r in j.rewards] for j in judged]
            )
            if names:
                components[mine] = [[[metric_value(r, n) for n in names] for r in j.rewards] for j in judged]
        finite = np.isfinite(score) & np.isfinite(value) & np.isfinite(components).all(-1)
        overflow = _LIVE_STATUS[status] & ~finite
        status[overflow] = _STATUS_INDEX[Status.NONFINITE]
    length, finish = groups.host_length_PG.astype(np.int32), groups.host_finish_PG
    return Records(score, value, status, length, finish, np.ones((p, 1), np.int32), components.reshape(p, -1))


def empty_records(groups: Groups, num_rewards: int = 0) -> Records:
    """Of the shapes of `records_of`; what a process gathers that cannot judge."""
    zeros = np.zeros(groups.host_length_PG.shape, np.int32)
    return _records(zeros.astype(np.float32), zeros, num_rewards)


def _records(floats: np.ndarray, zeros: np.ndarray, num_rewards: int) -> Records:
    p, g = zeros.shape
    components = np.zeros((p, g * num_rewards), np.float32)
    return Records(floats, floats, zeros, zeros, zeros, np.ones((p, 1), np.int32), components)


def buffer_records(records: Records, tickets: Sequence[Ticket]) -> np.ndarray:
    """What the metrics of the `trained` population need, kept beside the payload."""
    live_NG, out = records.live, np.zeros(len(tickets), RECORD)
    for name in ("score", "metric", "length"):
        out[name] = np.where(live_NG, getattr(records, name), 0).sum(1)
    out["live"], out["tokens"] = live_NG.sum(1), records.length.sum(1)
    out["step"], out["version"] = [t.step for t in tickets], [t.version for t in tickets]
    out["role"] = [t.task_id >= FIRST_ID for t in tickets]
    return out
