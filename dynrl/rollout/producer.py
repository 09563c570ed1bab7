"""The producer: dispatched groups in, events of the controller out, kept payloads into the buffer.

Verification overlaps with generation: groups go to the verifiers as the sampler hands them over, while it decodes
the next chunk. They are judged at sync points (law 4), where the records of all processes are gathered and every
process takes the same events. When that is makes all the difference between the modes:

- rounds: when everything dispatched is generated and verified;
- a logical clock: one poll after they were handed over, whatever the verifiers have done by then: it is waited for
  them, so that the same run makes the same events again (law 7);
- a wall clock: as soon as all processes have their scores.
"""

import dataclasses
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from dynrl.config import RunConfig
from dynrl.core import shaped_rewards
from dynrl.models.sharding import any_process, local_rows
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.buffer import RECORD, GroupBuffer
from dynrl.rollout.deadlines import Deadlines
from dynrl.rollout.deferral import Deferral
from dynrl.rollout.events import AttemptsFailed, GroupsDeferred, GroupsGenerated, GroupsJudged, Judgement
from dynrl.rollout.judge import Judge
from dynrl.rollout.ledger import Ticket
from dynrl.rollout.records import (
    JudgedGroups,
    Records,
    buffer_records,
    empty_records,
    gather,
    records_of,
    submit_for_judgement,
)
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.self_propose import SelfPropose
from dynrl.tasks.store import FrozenTasks, TaskStore
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import (
    Finish,
    Groups,
    Outcome,
    Payload,
    Purpose,
    Request,
    Reward,
    SamplingParams,
    Scores,
    Status,
    Task,
    Verdict,
)

T = TypeVar("T")
Events = list[GroupsGenerated | GroupsDeferred | GroupsJudged | AttemptsFailed]
_ATTEMPT = 2**40  # times the attempt, in the number that names a group to the verifiers: late scores do not meet


@dataclasses.dataclass
class HandedOver:
    """A set of groups that the sampler has finished."""

    groups: Groups
    poll: int  # the number of the poll that handed it over


class Producer:
    """Runs dispatched groups through sampler, verifiers and filter.

    Args:
      config: the run's.
      player: the sampler, and what plays turns with it.
      verifiers: the pool.
      judge: the filter.
      buffer: takes the kept groups.
      tokenizer: encodes prompts, decodes completions.
      store: where tasks are looked up.
      in_rounds: whether nothing is judged before everything dispatched is generated and verified.
      self_propose: what becomes of the policy's own proposals, where it makes any.
    """

    def __init__(
        self, config: RunConfig, player: TurnPlayer, verifiers: Verifiers, judge: Judge, buffer: GroupBuffer,
        tokenizer: Tokenizer, store: TaskStore | FrozenTasks | SelfPropose, in_rounds: bool,
        self_propose: SelfPropose | None = None,
    ) -> None:  # fmt: skip
        self._config, self._in_rounds = config, in_rounds
        self._player, self._verifiers, self._judge, self._buffer = player, verifiers, judge, buffer
        self._tokenizer, self._store = tokenizer, store
        c = config.sampler
        self._params = SamplingParams(c.temperature, c.max_completion_tokens, stop_strings=c.stop_strings)
        # In rounds nothing is decided before all are there: they come in as few payloads as possible.
        self._min_groups = player.sampler.groups_per_poll(config.num_generations_per_prompt) if in_rounds else 1
        metrics = [name for name in (config.dynamic_sampling.metric, *config.loss.rewards) if name != "score"]
        replays = in_rounds or config.schedule.clock == "logical"
        self.deadlines = Deadlines(config.rollout_failure.group_deadline_secs, metrics, replays)
        self._deferral = None if self_propose is None else Deferral(self_propose, metrics)
        self._tickets: dict[int, Ticket] = {}  # dispatched and not judged
        self._tasks: dict[int, Task] = {}
        self._handed_over: deque[HandedOver] = deque()
        self._scores: dict[int, Scores] = {}  # by ticket
        self._awaited: dict[int, int] = {}  # tickets, by their number with the verifiers
        self._too_long: list[Ticket] = []  # whose prompts do not fit
        self._judged: list[JudgedGroups] = []
        self._skipped: list[Outcome] = []  # since `take_skipped`
        self._problem: Exception | None = None  # of this process; raised where all processes hear of it
        self.num_polls = 0
        self.secs = {"sampler": 0.0, "reward": 0.0, "backfill": 0.0}  # by phase, since `take_secs`

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._tickets

    def unknown(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Those of the tickets that are not under way here."""
        return [t for t in tickets if t.ticket not in self._tickets]

    def take_judged(self) -> list[JudgedGroups]:
        """The groups judged since the last call, for metrics and the selector."""
        judged, self._judged = self._judged, []
        return judged

    def take_skipped(self) -> list[Outcome]:
        """The groups since the last call that were never generated: their prompts are too long."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def take_secs(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        secs, self.secs = self.secs, dict.fromkeys(self.secs, 0.0)
        return secs

    @property
    def _num_running(self) -> int:
        """Groups that somebody waits for."""
        return len(self._tickets) - (len(self._deferral.tickets) if self._deferral is not None else 0)

    # ---- What the controller commands ----

    def dispatch(self, tickets: Sequence[Ticket]) -> None:
        """Sends groups to the sampler.

        Raises:
          ValueError: naming ticket and task, for a prompt that the sampler refuses.
        """
        tasks = self._store.get([t.task_id for t in tickets])
        limit = self._config.tasks.max_prompt_tokens
        requests, theirs, attempts = [], [], []
        for t, task in zip(tickets, tasks, strict=True):
            request = self._request(t, task)
            if len(request.prompt) > limit and self._config.tasks.long_prompts == "skip":
                self._too_long.append(t)
            else:
                requests.append(request)
                theirs.append(task)
                attempts.append(t.attempts)
        self._player.submit(requests, theirs, attempts)
        self._tickets |= {t.ticket: t for t in tickets}
        self._tasks |= {t.ticket: task for t, task in zip(tickets, tasks, strict=True)}
        self.deadlines.began(tickets)

    def _request(self, t: Ticket, task: Task) -> Request:
        prompt, g = self._encode(task), self._config.num_generations_per_prompt
        return Request(t.ticket, t.task_id, t.visit, Purpose.TRAIN, prompt, g, self._params)

    def _encode(self, task: Task) -> list[int]:
        try:
            return self._tokenizer.encode(task.prompt)
        except ValueError as error:
            raise ValueError(f"task {task.task_id} of source {task.source}: {error}") from error

    def retry(self, ticket: Ticket, delay_secs: float) -> None:
        """Forgets what there is of the group's last attempt, and dispatches it again after a while."""
        self.cancel([ticket.ticket])
        self._tickets[ticket.ticket] = ticket
        self.deadlines.wait(ticket, delay_secs)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these groups any more."""
        gone = set(numbers)
        self._player.cancel(numbers)
        if self._deferral is not None:
            self._deferral.cancel(gone)
        self._awaited = {i: t for i, t in self._awaited.items() if t not in gone}
        self._too_long = [t for t in self._too_long if t.ticket not in gone]
        self._forget(gone)
        for handed in self._handed_over:
            rows_P = np.isin(handed.groups.tickets_P, numbers)
            if rows_P.any():
                tickets_P = np.where(rows_P, -1, handed.groups.tickets_P)
                handed.groups = dataclasses.replace(
                    handed.groups, tickets_P=tickets_P, valid_P=handed.groups.valid_P & ~rows_P
                )

    def _forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            for known in (self._tickets, self._tasks, self._scores):
                known.pop(number, None)
        self.deadlines.forget(numbers)

    def cancel_all(self) -> None:
        """The run is over."""
        self.cancel(list(self._tickets))

    # ---- What happens ----

    def poll(self) -> Events:
        """One chunk of decoding, or a wait for verifiers; events in the order in which the controller takes them."""
        self.num_polls += 1
        started = time.monotonic()
        events = self._watch_deadlines()
        if self._player.num_in_flight:
            begin = time.perf_counter()
            groups = self._player.poll(self._min_groups)
            self.secs["sampler"] += time.perf_counter() - begin
            if groups is not None:
                events += self.receive(groups)
        begin = time.perf_counter()
        self._collect(self._verifiers.poll)
        due = self._due()
        self.secs["reward"] += time.perf_counter() - begin
        begin = time.perf_counter()
        events += self._judge_all(due)
        self.secs["backfill"] += time.perf_counter() - begin
        if not events and self._num_running and self.deadlines.num_waiting == self._num_running:
            time.sleep(0.02)  # nothing else to do
        self.deadlines.spent(time.monotonic() - started)
        return events

    def _watch_deadlines(self) -> Events:
        """Dispatches again what has waited, and gives up groups that take too long."""
        due = self.deadlines.due(self.num_polls)
        if due:
            self.dispatch(due)
        late = self.deadlines.late(self._tickets, self.num_polls)
        if not late:
            return []
        secs = f"rollout_failure.group_deadline_secs = {self._config.rollout_failure.group_deadline_secs:g}"
        first = self._tasks[late[0]].task_id
        self.cancel(late)
        why = f"{len(late)} groups were not generated within {secs}, the first one of task {first}"
        return [AttemptsFailed(tuple(late), why)]

    def receive(self, groups: Groups) -> Events:
        """Takes finished groups, from `poll` or from whoever polls the sampler for something else meanwhile."""
        begin = time.perf_counter()
        self._handed_over.append(HandedOver(groups, self.num_polls))
        numbers = tuple(groups.tickets_P[groups.valid_P].tolist())
        self.deadlines.generated(numbers)
        self._verify(groups)
        self.secs["reward"] += time.perf_counter() - begin
        return [GroupsGenerated(numbers)]

    def _verify(self, groups: Groups) -> None:
        played = self._player.take_scores(groups)
        self._scores |= played
        groups = dataclasses.replace(groups, valid_P=groups.valid_P & ~np.isin(groups.tickets_P, list(played)))
        mine = groups.tickets_P[groups.valid_P & groups.owned_P].tolist()
        ids = {t: _ATTEMPT * (self._tickets[t].attempts - 1) + t for t in mine}
        self._awaited |= {i: t for t, i in ids.items()}
        self._guarded(lambda: submit_for_judgement(groups, self._tasks, self._tokenizer, self._verifiers, ids))

    def _guarded(self, call: Callable[[], T]) -> T | None:
        """What the call gives; a problem of this process alone is raised where the others hear of it: at a gather."""
        try:
            return call()
        except Exception as problem:
            if jax.process_count() == 1:
                raise
            self._problem = self._problem or problem
            return None

    def collect(self, scores: Iterable[Scores]) -> None:
        """Takes scores, from the verifiers or from whoever waits for others meanwhile."""
        for s in scores:
            ticket = self._awaited.pop(s.ticket, None)
            if ticket is not None:
                self._scores[ticket] = self.deadlines.with_timeouts(s, self._tickets[ticket])

    def _collect(self, found: Callable[[], list[Scores]]) -> None:
        self.collect(self._guarded(found) or ())

    def _due(self) -> list[Groups]:
        """The sets that are judged now, complete with their scores."""
        if self._in_rounds:
            if self._player.num_in_flight or self.deadlines.num_waiting:
                return []
            num = len(self._handed_over)
        elif self._config.schedule.clock == "wall":
            return self._scored()
        else:
            last = self.num_polls if not self._player.num_in_flight else self.num_polls - 1
            num = sum(h.poll <= last for h in self._handed_over)
        due = [self._handed_over.popleft().groups for _ in range(num)]
        while self._problem is None and any(not self._has_scores(groups) for groups in due):
            self._collect(lambda: self._verifiers.wait(1.0))
        return due

    def _scored(self) -> list[Groups]:
        """The sets of which all processes have the scores, whenever that is."""
        due, waiting = [], deque[HandedOver]()
        for handed in self._handed_over:
            if any_process(self._problem is None and not self._has_scores(handed.groups)):
                waiting.append(handed)
            else:
                due.append(handed.groups)
        self._handed_over = waiting
        if not due and self._handed_over and not self._player.num_in_flight:
            self._collect(lambda: self._verifiers.wait(0.02))
        return due

    def _has_scores(self, groups: Groups) -> bool:
        mine = groups.tickets_P[groups.valid_P & groups.owned_P].tolist()
        return all(t in self._scores for t in mine)

    # ---- Judgement ----

    def _judge_all(self, due: Sequence[Groups]) -> Events:
        """Gathers, judges, stores what is kept, and tells the controller in ticket order."""
        events, late = [], []
        if self._deferral is not None:
            due, late, events = self._defer(self._deferral, due)
        waits = self._in_rounds and not due and (self._handed_over or len(self._too_long) < self._num_running)
        too_long = [] if waits else self._too_long
        judged = [self._judge_groups(groups) for groups in [*due, *late]]
        self._judged += judged
        judgements = [*itertools.chain.from_iterable(j.judgements() for j in judged)]
        judgements += [Judgement(t.ticket, Verdict.FILTERED, "too_long") for t in too_long]
        for t in too_long:
            task, verdict = self._tasks[t.ticket], Verdict.FILTERED
            self._skipped.append(
                Outcome(t.task_id, t.visit, verdict, 0, 0, math.nan, t.version, task.source, task.level)
            )
        self._too_long = self._too_long if waits else []
        self._forget({j.ticket for j in judgements})
        return [*events, *([GroupsJudged(tuple(sorted(judgements)))] if judgements else [])]

    def _defer(self, deferral: Deferral, due: Sequence[Groups]) -> tuple[list[Groups], list[Groups], Events]:
        """Parts what is judged now from the proposals among it, and adds those whose verdict has come."""
        rest, taken = [], []
        for groups in due:
            others, numbers = deferral.take(groups, self._tickets, self._scores, self._problem)
            taken += numbers
            if others.valid_P.any():
                rest.append(others)
        for number in taken:
            self._scores.pop(number, None)
        late, scores = deferral.due()
        self._scores |= scores
        return rest, late, [GroupsDeferred(tuple(sorted(taken)))] if taken else []

    def _judge_groups(self, groups: Groups) -> JudgedGroups:
        config, valid_P = self._config, groups.valid_P
        if self._problem is None:
            own = records_of(groups, self._scores, config.dynamic_sampling.metric, config.loss.rewards)
        else:
            own = empty_records(groups, len(config.loss.rewards))
        r = self._gather_filtered(own, groups)
        live_PG, trainable_PG, rewards = r.live & valid_P[:, None], r.length > 0, r.rewards
        if config.loss.overlong == "mask":
            trainable_PG &= r.finish != Finish.LENGTH
        shaped = shaped_rewards(rewards, r.length, **config.overlong_kwargs)
        judged = self._judge(r.metric, shaped, live_PG, trainable_PG, r.host_keep[:, 0] > 0)
        keep_P = (judged.verdict_P == Verdict.KEPT) & valid_P
        if config.dynamic_sampling.on_exhausted == "relax":
            keep_P |= judged.refused_P & valid_P
        numbers = groups.tickets_P[valid_P].tolist()
        tickets, tasks = [self._tickets[t] for t in numbers], [self._tasks[t] for t in numbers]
        if keep_P.any():
            records_P = np.zeros(len(valid_P), RECORD)
            records_P[valid_P] = buffer_records(r.rows(valid_P), tickets)
            self._buffer.put(groups, rewards, live_PG, keep_P, records_P)
        return JudgedGroups(tickets, tasks, judged.rows(valid_P), r.rows(valid_P))

    def _gather_filtered(self, own: Records, groups: Groups) -> Records:
        """The records of all processes, with the host filter's verdicts."""
        keep_P = np.zeros(len(groups.valid_P), np.int32)
        if self._problem is None:
            try:
                keep_P = self._judge.host_mask(own.metric, own.rewards, own.live, groups.valid_P & groups.owned_P)
            except Exception as raised:  # a user's code
                self._problem = raised
        return gather(own._replace(host_keep=keep_P[:, None].astype(np.int32)), groups.owned_P, self._problem)

    # ---- Checkpoints ----

    @property
    def arrays(self) -> list[Payload]:
        """Payloads that are with the verifiers, and those that are deferred."""
        deferred = [] if self._deferral is None else self._deferral.arrays
        return [*(h.groups.payload for h in self._handed_over), *deferred]

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; `arrays` are apart."""
        return {
            "tickets": [list(t) for t in self._tickets.values()],
            "deadlines": self.deadlines.state_dict(),
            "handed_over": [
                [h.poll, h.groups.tickets_P.tolist(), h.groups.valid_P.tolist()] for h in self._handed_over
            ],
            "deferred": [] if self._deferral is None else self._deferral.state_dict(),
            "too_long": [t.ticket for t in self._too_long],
            "scores": [[t, [list(r) for r in s.rewards], list(s.statuses)] for t, s in self._scores.items()],
            "turns": self._player.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Sequence[Payload]) -> None:
        """The inverse. What was with the verifiers goes there again."""
        self._tickets = {t[0]: Ticket(*t) for t in state["tickets"]}
        tasks = self._store.get([t.task_id for t in self._tickets.values()])
        self._tasks = dict(zip(self._tickets, tasks, strict=True))
        self.deadlines.load_state_dict(state["deadlines"], self._tickets)
        self._too_long = [self._tickets[t] for t in state["too_long"]]
        # Each process its own: the document is the first one's.
        owned_P = self._player.sampler.filler(self._config.num_generations_per_prompt).owned_P
        restored = []
        masks = [*(entry[1:] for entry in state["handed_over"]), *state["deferred"]]
        for (tickets, valid), payload in zip(masks, arrays, strict=True):
            host = (local_rows(getattr(payload, name)) for name in ("tokens_PGT", "length_PG", "finish_PG"))
            restored.append(Groups(payload, np.array(tickets), np.array(valid), owned_P, *host))
        for (poll, *_), groups in zip(state["handed_over"], restored, strict=False):
            self._handed_over.append(HandedOver(groups, poll))
        if self._deferral is not None:
            self._deferral.load_state_dict(restored[len(self._handed_over) :])
        for ticket, rewards, statuses in state["scores"]:
            self._scores[ticket] = Scores(ticket, tuple(Reward(*r) for r in rewards), tuple(map(Status, statuses)))
        for handed in self._handed_over:
            known_P = np.isin(handed.groups.tickets_P, list(self._scores))
            self._verify(dataclasses.replace(handed.groups, valid_P=handed.groups.valid_P & ~known_P))
        openings = [self._request(self._tickets[t], self._tasks[t]) for t in state["turns"]["openings"]]
        self._player.load_state_dict(state["turns"], self._tasks, openings)
