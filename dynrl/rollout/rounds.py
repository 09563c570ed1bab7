"""The producer of lock-step rounds: dispatched groups in, `GroupsJudged` events out, kept payloads into the buffer.

Verification overlaps with generation: groups go to the verifiers as the sampler hands them over, while it decodes
the next batch. Nothing is decided before the whole round is judged: that is the logical sync point (law 4), where
the records of all processes are gathered and every process takes the same events, in ticket order.
"""

import itertools
import time
from collections.abc import Iterable, Sequence

import numpy as np

from dynrl.config import RunConfig
from dynrl.core import soft_overlong_penalty
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.buffer import RECORD, GroupBuffer
from dynrl.rollout.events import GroupsGenerated, GroupsJudged, Judgement
from dynrl.rollout.judge import Judge
from dynrl.rollout.ledger import Ticket
from dynrl.rollout.records import (
    JudgedGroups,
    Records,
    buffer_records,
    gather,
    records_of,
    submit_for_judgement,
)
from dynrl.tasks.store import FrozenTasks, TaskStore
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Finish, Groups, Purpose, Request, Sampler, SamplingParams, Scores, Task, Verdict

_FILTER_FAILED = -1  # in the place of a host filter's verdict


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
        c = config.sampler
        self._params = SamplingParams(c.temperature, c.max_completion_tokens, stop_strings=c.stop_strings)
        self._groups_per_poll = sampler.groups_per_poll(config.num_generations_per_prompt)
        self._tickets: dict[int, Ticket] = {}
        self._tasks: dict[int, Task] = {}
        self._handed_over: list[Groups] = []
        self._scores: dict[int, Scores] = {}
        self._judged: list[JudgedGroups] = []
        self._too_long: list[Ticket] = []  # of the round, whose prompts do not fit
        self._skipped: list[Ticket] = []  # of the rounds since `take_skipped`
        self.secs = {"sampler": 0.0, "reward": 0.0, "backfill": 0.0}  # by phase, since `take_secs`

    @property
    def busy(self) -> bool:
        """Whether a round is running."""
        return bool(self._tickets)

    def take_judged(self) -> list[JudgedGroups]:
        """The groups judged since the last call, for metrics and the selector."""
        judged, self._judged = self._judged, []
        return judged

    def take_skipped(self) -> list[Ticket]:
        """The groups since the last call that were never generated: their prompts are too long."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def take_secs(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        secs, self.secs = self.secs, dict.fromkeys(self.secs, 0.0)
        return secs

    def dispatch(self, tickets: Sequence[Ticket]) -> None:
        """Starts a round. Raises ValueError, naming the ticket and task, for a prompt that the sampler refuses."""
        tasks = self._store.get([t.task_id for t in tickets])
        g, limit = self._config.num_generations_per_prompt, self._config.tasks.max_prompt_tokens
        requests = []
        for t, task in zip(tickets, tasks, strict=True):
            prompt = self._encode(task)
            if len(prompt) > limit and self._config.tasks.long_prompts == "skip":
                self._too_long.append(t)
            else:
                requests.append(Request(t.ticket, t.task_id, t.visit, Purpose.TRAIN, prompt, g, self._params))
        self._sampler.submit(requests)
        self._tickets = {t.ticket: t for t in tickets}
        self._tasks = {t.ticket: task for t, task in zip(tickets, tasks, strict=True)}

    def _encode(self, task: Task) -> list[int]:
        try:
            return self._tokenizer.encode(task.prompt)
        except ValueError as error:
            raise ValueError(f"task {task.task_id} of source {task.source}: {error}") from error

    def poll(self) -> list[GroupsGenerated | GroupsJudged]:
        """One chunk of decoding, or a wait for verifiers; the round's events once all of it is judged."""
        begin = time.perf_counter()
        if self._sampler.num_in_flight:
            groups = self._sampler.poll(self._groups_per_poll)  # nothing is decided before the round is complete
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
        judged = [self._judge_groups(groups) for groups in self._handed_over]
        self._judged += judged
        judgements = [*itertools.chain.from_iterable(j.judgements() for j in judged)]
        judgements += [Judgement(t.ticket, Verdict.FILTERED, "too_long") for t in self._too_long]
        self._skipped += self._too_long
        self._tickets, self._tasks, self._handed_over, self._scores, self._too_long = {}, {}, [], {}, []
        return [GroupsJudged(tuple(sorted(judgements)))]

    def _judge_groups(self, groups: Groups) -> JudgedGroups:
        loss, valid_P = self._config.loss, groups.valid_P
        own = records_of(groups, self._scores, self._config.dynamic_sampling.metric, loss.rewards)
        r = self._gather_filtered(own, groups)
        live_PG, trainable_PG, rewards = r.live & valid_P[:, None], r.length > 0, r.rewards
        if loss.overlong == "mask":
            trainable_PG &= r.finish != Finish.LENGTH
        shaped = rewards
        if loss.overlong == "penalty":
            shaped = rewards + soft_overlong_penalty(
                r.length,
                max_tokens=self._config.sampler.max_completion_tokens,
                cache_tokens=loss.overlong_cache_tokens,
            )
        judged = self._judge(r.metric, shaped, live_PG, trainable_PG, r.host_keep[:, 0] > 0)
        keep_P = (judged.verdict_P == Verdict.KEPT) & valid_P
        numbers = groups.tickets_P[valid_P].tolist()
        tickets, sources = [self._tickets[t] for t in numbers], [self._tasks[t].source for t in numbers]
        if keep_P.any():
            records_P = np.zeros(len(valid_P), RECORD)
            records_P[valid_P] = buffer_records(r.rows(valid_P), tickets)
            self._buffer.put(groups, rewards, live_PG, keep_P, records_P)
        return JudgedGroups(tickets, sources, judged.rows(valid_P), r.rows(valid_P))

    def _gather_filtered(self, own: Records, groups: Groups) -> Records:
        """The records of all processes, with the host filter's verdicts; one that raises ends every process (law 4)."""
        error, keep_P = None, np.full(len(groups.valid_P), _FILTER_FAILED, np.int32)
        try:
            keep_P = self._judge.host_mask(own.metric, own.rewards, own.live, groups.valid_P & groups.owned_P)
        except Exception as raised:  # a user's code: the others must hear of it before this one goes
            error = raised
        r = gather(own._replace(host_keep=keep_P[:, None].astype(np.int32)), groups.owned_P)
        if error is not None:
            raise error
        if (r.host_keep == _FILTER_FAILED).any():
            raise RuntimeError(f"filter {self._judge.filter.name!r} failed on another process; its log says how")
        return r
