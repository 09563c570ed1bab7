"""The producer of lock-step rounds: dispatched groups in, `GroupsJudged` events out, kept payloads into the buffer.

Verification overlaps with generation: groups go to the verifiers as the sampler hands them over, while it decodes
the next batch. Nothing is decided before the whole round is judged: that is the logical sync point (law 4), where
the records of all processes are gathered and every process takes the same events, in ticket order.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from dynrl.config import RunConfig
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.buffer import RECORD, GroupBuffer
from dynrl.rollout.events import GroupsGenerated, GroupsJudged, Judgement
from dynrl.rollout.judge import Judge, Judged
from dynrl.rollout.ledger import Ticket
from dynrl.tasks.rewards import metric_value
from dynrl.tasks.store import FrozenTasks, TaskStore
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import (
    Finish,
    Groups,
    Outcome,
    Purpose,
    Request,
    Sampler,
    SamplingParams,
    Scores,
    Status,
    Task,
    Verdict,
)

STATUSES = tuple(Status)
_STATUS_INDEX = {status: i for i, status in enumerate(STATUSES)}
_LIVE_STATUS = np.array([status.live for status in STATUSES])


class Records(NamedTuple):
    """What is decided and counted from, per rollout; NumPy [P, G]. The same on every process after `gather`."""

    score: np.ndarray  # float32
    metric: np.ndarray  # float32: the configured one
    status: np.ndarray  # int32, index into STATUSES
    length: np.ndarray  # int32
    finish: np.ndarray  # int32
    host_keep: np.ndarray  # int32 [P, 1]: a host filter's verdict

    @property
    def live(self) -> np.ndarray:
        """Bool [P, G]."""
        return _LIVE_STATUS[self.status]

    def rows(self, rows_P: np.ndarray) -> "Records":
        """The groups of a mask."""
        return Records(*(x[rows_P] for x in self))


@dataclass(frozen=True)
class JudgedGroups:
    """N judged groups with everything that metrics and selectors want to know of them.

    Attributes:
      tickets: theirs.
      judged: verdicts and statistics.
      records: scores, lengths and how each rollout ended, [N, G].
    """

    tickets: list[Ticket]
    judged: Judged
    records: Records

    def judgements(self) -> list[Judgement]:
        """What the controller is told."""
        rows = zip(self.tickets, self.judged.verdict_P.tolist(), self.judged.pattern_P.tolist(), strict=True)
        return [Judgement(t.ticket, verdict, pattern) for t, verdict, pattern in rows]

    def outcomes(self) -> list[Outcome]:
        """What the selector is told."""
        stats = self.judged.stats
        mean_N = np.where(stats.count > 0, stats.mean, np.nan)
        columns = [x.tolist() for x in (self.judged.verdict_P, stats.count, stats.positives, mean_N)]
        return [
            Outcome(t.task_id, t.visit, verdict, count, positives, mean, t.version)
            for t, verdict, count, positives, mean in zip(self.tickets, *columns, strict=True)
        ]


def gather(records: Records, owned_P: np.ndarray) -> Records:
    """Every process's rows, on every process: each row is taken from the process that owns it."""
    if jax.process_count() == 1:
        return records
    from jax.experimental import multihost_utils

    bits = [x.view(np.int32) if x.dtype == np.float32 else x.astype(np.int32) for x in records]
    own = np.where(owned_P[:, None], np.concatenate(bits, axis=1), 0)
    total = np.asarray(multihost_utils.process_allgather(own)).sum(axis=0, dtype=np.int32)
    columns = np.split(total, np.cumsum([x.shape[1] for x in bits])[:-1], axis=1)
    columns = [np.ascontiguousarray(x) for x in columns]
    return Records(*(c.view(np.float32) if r.dtype == np.float32 else c for c, r in zip(columns, records, strict=True)))


def warm_up_gather(num_groups: int, num_samples: int) -> None:
    """Compiles the program that `gather` runs where there are several processes."""
    zeros = np.zeros((num_groups, num_samples), np.int32)
    floats, ones = zeros.astype(np.float32), np.ones((num_groups, 1), np.int32)
    gather(Records(floats, floats, zeros, zeros, zeros, ones), np.zeros(num_groups, bool))


def submit_for_judgement(groups: Groups, tasks: dict[int, Task], tokenizer: Tokenizer, verifiers: Verifiers) -> None:
    """Decodes the finished completions that this process owns and hands them to the verifiers."""
    mine = np.flatnonzero(groups.valid_P & groups.owned_P)
    if not len(mine):
        return
    tokens_NT = groups.host_tokens_PGT[mine].reshape(-1, groups.host_tokens_PGT.shape[-1])
    texts: list[str | None] = list(tokenizer.decode_batch(tokens_NT, groups.host_length_PG[mine].ravel()))
    for n in np.flatnonzero(groups.host_finish_PG[mine].ravel() == Finish.FAILED).tolist():
        texts[n] = None
    num = len(texts) // len(mine)
    for i, ticket in enumerate(groups.tickets_P[mine].tolist()):
        verifiers.submit(ticket, tasks[ticket], texts[i * num : (i + 1) * num])


def records_of(groups: Groups, scores: dict[int, Scores], metric: str) -> Records:
    """Records of one handed-over set of groups, filled where this process owns the group."""
    p, g = groups.host_length_PG.shape
    score, value = np.zeros((p, g), np.float32), np.zeros((p, g), np.float32)
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
        overflow = _LIVE_STATUS[status] & ~(np.isfinite(score) & np.isfinite(value))
        status[overflow] = _STATUS_INDEX[Status.NONFINITE]
    ones = np.ones((p, 1), np.int32)
    return Records(score, value, status, groups.host_length_PG.astype(np.int32), groups.host_finish_PG, ones)


class RoundsProducer:
    """Runs dispatched groups through sampler, verifiers and filter.

    Args:
      config: the run's.
      sampler: the sampler.
      verifiers: the pool.
      judge: the filter.
      buffer: takes the kept groups.
      tokenizer: encodes prompts, decodes completions.
      store: where tasks are looked up.
    """

    def __init__(
        self, config: RunConfig, sampler: Sampler, verifiers: Verifiers, judge: Judge, buffer: GroupBuffer,
        tokenizer: Tokenizer, store: TaskStore | FrozenTasks,
    ) -> None:  # fmt: skip
        self._config = config
        self._sampler, self._verifiers, self._judge, self._buffer = sampler, verifiers, judge, buffer
        self._tokenizer, self._store = tokenizer, store
        self._params = SamplingParams(config.sampler.temperature, config.sampler.max_completion_tokens)
        self._tickets: dict[int, Ticket] = {}
        self._tasks: dict[int, Task] = {}
        self._handed_over: list[Groups] = []
        self._scores: dict[int, Scores] = {}
        self._judged: list[JudgedGroups] = []
        self.secs = {"sampler": 0.0, "reward": 0.0, "backfill": 0.0}  # by phase, since `take_secs`

    @property
    def busy(self) -> bool:
        """Whether a round is running."""
        return bool(self._tickets)

    def take_judged(self) -> list[JudgedGroups]:
        """The groups judged since the last call, for metrics and the selector."""
        judged, self._judged = self._judged, []
        return judged

    def take_secs(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        secs, self.secs = self.secs, dict.fromkeys(self.secs, 0.0)
        return secs

    def dispatch(self, tickets: Sequence[Ticket]) -> None:
        """Starts a round. Raises ValueError, naming the ticket and task, for a prompt that the sampler refuses."""
        tasks = self._store.get([t.task_id for t in tickets])
        g = self._config.num_generations_per_prompt
        requests = [
            Request(t.ticket, t.task_id, t.visit, Purpose.TRAIN, self._tokenizer.encode(task.prompt), g, self._params)
            for t, task in zip(tickets, tasks, strict=True)
        ]
        self._sampler.submit(requests)
        self._tickets = {t.ticket: t for t in tickets}
        self._tasks = {t.ticket: task for t, task in zip(tickets, tasks, strict=True)}

    def poll(self) -> list[GroupsGenerated | GroupsJudged]:
        """One chunk of decoding, or a wait for verifiers; the round's events once all of it is judged."""
        begin = time.perf_counter()
        if self._sampler.num_in_flight:
            groups = self._sampler.poll()
            self.secs["sampler"] += time.perf_counter() - begin
            begin = time.perf_counter()
            events: list[GroupsGenerated | GroupsJudged] = []
            if groups is not None:
                self._handed_over.append(groups)
                submit_for_judgement(groups, self._tasks, self._tokenizer, self._verifiers)
                events = [GroupsGenerated(tuple(groups.tickets_P[groups.valid_P].tolist()))]
            self._collect(self._verifiers.poll())
            self.secs["reward"] += time.perf_counter() - begin
            return events
        if self._verifiers.num_pending:
            self._collect(self._verifiers.wait(1.0))
            self.secs["reward"] += time.perf_counter() - begin
            return []
        events = self._close_round()
        self.secs["backfill"] += time.perf_counter() - begin
        return events

    def _collect(self, scores: Iterable[Scores]) -> None:
        self._scores.update((s.ticket, s) for s in scores)

    def _close_round(self) -> list[GroupsGenerated | GroupsJudged]:
        """Gathers, judges, stores what is kept, and tells the controller in ticket order."""
        self._judged = [self._judge_groups(groups) for groups in self._handed_over]
        self._tickets, self._tasks, self._handed_over, self._scores = {}, {}, [], {}
        judgements = itertools.chain.from_iterable(j.judgements() for j in self._judged)
        return [GroupsJudged(tuple(sorted(judgements)))]

    def _judge_groups(self, groups: Groups) -> JudgedGroups:
        own = records_of(groups, self._scores, self._config.dynamic_sampling.metric)
        mine_P = groups.valid_P & groups.owned_P
        own = own._replace(host_keep=self._judge.host_mask(own.metric, own.live, mine_P)[:, None].astype(np.int32))
        r = gather(own, groups.owned_P)
        live_PG = r.live & groups.valid_P[:, None]
        trainable_PG = r.length > 0
        if self._config.loss.overlong == "mask":
            trainable_PG &= r.finish != Finish.LENGTH
        judged = self._judge(r.metric, live_PG, trainable_PG, r.host_keep[:, 0] > 0)
        valid_P = groups.valid_P
        keep_P = (judged.verdict_P == Verdict.KEPT) & valid_P
        tickets = [self._tickets[t] for t in groups.tickets_P[valid_P].tolist()]
        if keep_P.any():
            records_P = np.zeros(len(valid_P), RECORD)
            records_P[valid_P] = _buffer_records(r.rows(valid_P), tickets)
            self._buffer.put(groups, np.where(live_PG, r.metric, 0.0).astype(np.float32), live_PG, keep_P, records_P)
        return JudgedGroups(tickets, judged.rows(valid_P), r.rows(valid_P))


def _buffer_records(records: Records, tickets: Sequence[Ticket]) -> np.ndarray:
    """What the metrics of the `trained` population need, kept beside the payload."""
    live_NG, out = records.live, np.zeros(len(tickets), RECORD)
    for name in ("score", "metric", "length"):
        out[name] = np.where(live_NG, getattr(records, name), 0).sum(1)
    out["live"], out["tokens"] = live_NG.sum(1), records.length.sum(1)
    out["step"], out["version"] = [t.step for t in tickets], [t.version for t in tickets]
    return out
