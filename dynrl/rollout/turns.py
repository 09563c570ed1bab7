"""Plays turns: rollouts whose task is an environment go on with what it answers.

The player stands before the sampler, for training and evaluation alike. A turn that ended in one poll is judged by
worker processes while others decode, and answered at the beginning of the next poll: so the same run takes the same
turns again (law 7). Sampled ids stay as they were sampled; the environment's own tokens are masked from the loss by
the sampler.

Where there are several processes, each has its share of the turns judged, and all hear of all answers (law 4).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dynrl.journal import Journal
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.answers import Answer, exchange
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.follow_up import Turn
from dynrl.tasks.environments import Environment, turn_result, turns_text
from dynrl.tasks.rewards import metric_value
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Finish, Groups, Request, Reward, Scores, Status, Task

_OPENING = -1  # in the place of a sample: what the environment says first


class TurnPlayer:
    """A sampler whose requests come with their tasks.

    Args:
      sampler: the slot engine.
      verifiers: a pool for turns alone; None where no task is an environment.
      tokenizer: decodes turns, encodes observations.
      environments: by source.
      names: rewards that are wanted, "score" or components.
      max_tokens: of one observation.
    """

    def __init__(
        self, sampler: SlotEngine, verifiers: Verifiers | None, tokenizer: Tokenizer,
        environments: Mapping[str, type[Environment]], names: Sequence[str], max_tokens: int,
    ) -> None:  # fmt: skip
        self.sampler = sampler
        self._verifiers, self._tokenizer, self._environments = verifiers, tokenizer, environments
        self._names, self._max_tokens = list(dict.fromkeys(["score", *names])), max_tokens
        self.journal = Journal()  # of the run, once it has a workdir
        self._tasks: dict[int, Task] = {}  # by ticket, of those that are played
        self._visits: dict[int, tuple[int, int]] = {}  # visit and attempt
        self._openings: dict[int, Request] = {}  # that wait for the environment's first words
        self._texts: dict[tuple[int, int], list[str]] = {}  # the turns so far, by ticket and sample
        self._answers: dict[tuple[int, int], Answer] = {}  # the last one
        self._ended: list[Turn] = []  # since the last poll
        self._pending: dict[int, tuple[int, int]] = {}  # by number with the verifiers
        self._results: dict[tuple[int, int], tuple[Reward, Status]] = {}
        self._submitted = 0
        self._problem: Exception | None = None  # of this process
        self.given_tokens = [0, 0]  # to training and to evaluation, in this process's life

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not yet returned or cancelled."""
        return self.sampler.num_in_flight + len(self._openings)

    def plays(self, task: Task) -> bool:
        """Whether a task is an environment's."""
        return task.source in self._environments

    def begins(self, tasks: Sequence[Task]) -> list[bool]:
        """Whether the environment of each task begins without an error. Of this process alone."""
        assert self._verifiers is not None
        first = self._submitted + 1
        self._submitted += len(tasks)
        for i, task in enumerate(tasks):
            self._verifiers.submit(first + i, task, [turns_text([])])
        begun: dict[int, bool] = {}
        while len(begun) < len(tasks):
            judged = self._verifiers.wait(1.0)
            begun |= {s.ticket: s.statuses[0] is Status.OK for s in judged if s.ticket >= first}
            self._took([s for s in judged if s.ticket < first])
        return [begun[first + i] for i in range(len(tasks))]

    def submit(self, requests: Sequence[Request], tasks: Sequence[Task], attempts: Sequence[int] = ()) -> None:
        """Queues requests; see `Sampler.submit`. `attempts` says how often each group was dispatched, now included."""
        plain = []
        for request, task, attempt in zip(requests, tasks, attempts or [1] * len(tasks), strict=True):
            environment = self._environments.get(task.source)
            if environment is None:
                plain.append(request)
                continue
            self._tasks[request.ticket], self._visits[request.ticket] = task, (request.visit, attempt)
            strings = (*request.params.stop_strings, *environment.stop_strings)
            params = dataclasses.replace(request.params, stop_strings=tuple(dict.fromkeys(strings)))
            played = dataclasses.replace(request, params=params, multi_turn=True)
            if environment.has_opening:
                self._openings[request.ticket] = played
                self._judge(request.ticket, _OPENING, [])
            else:
                plain.append(played)
        if plain:
            self.sampler.submit(plain)

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drops the named groups."""
        self.sampler.cancel(tickets)
        gone = set(tickets)
        for ticket in tickets:
            for by_ticket in (self._tasks, self._visits, self._openings):
                by_ticket.pop(ticket, None)
        for known in (self._texts, self._answers, self._results):
            for key in [k for k in known if k[0] in gone]:
                del known[key]
        self._pending = {i: key for i, key in self._pending.items() if key[0] not in gone}
        self._ended = [t for t in self._ended if t.ticket not in gone]

    def poll(self, min_groups: int = 1) -> Groups | None:
        """Answers the turns that ended by the last poll, and polls the sampler."""
        if self._ended or self._openings:
            self._answer()
        groups = self.sampler.poll(min_groups)
        if self._environments:
            self._hear(self.sampler.take_turns())
        return groups

    def take_scores(self, groups: Groups) -> dict[int, Scores]:
        """The rewards of handed-over groups that were played, by ticket."""
        scores = {}
        for i in np.flatnonzero(groups.valid_P) if self._tasks else ():
            ticket = int(groups.tickets_P[i])
            if self._tasks.pop(ticket, None) is None:
                continue
            del self._visits[ticket]
            rewards, statuses = [], []
            for sample in range(groups.host_length_PG.shape[1]):
                self._texts.pop((ticket, sample), None)
                answer = self._answers.pop((ticket, sample), None)
                if groups.host_finish_PG[i, sample] == Finish.FAILED:  # in its last turn, which was never judged
                    answer = None
                status = Status.SAMPLER if answer is None else answer.status
                values = [float("nan")] * len(self._names) if answer is None else answer.rewards
                rewards.append(Reward(values[0], dict(zip(self._names[1:], values[1:], strict=True))))
                statuses.append(status)
            scores[ticket] = Scores(ticket, tuple(rewards), tuple(statuses))
        return scores

    # ---- Turns ----

    def _hear(self, turns: Sequence[Turn]) -> None:
        self._ended += turns
        for t in turns:
            texts = self._texts.setdefault((t.ticket, t.sample), [])
            texts.append(self._tokenizer.decode(t.tokens))
            self._judge(t.ticket, t.sample, texts)

    def _judge(self, ticket: int, sample: int, texts: Sequence[str]) -> None:
        """Has a turn judged, by the process whose turn it is."""
        assert self._verifiers is not None
        if ticket % jax.process_count() != jax.process_index():
            return
        self._submitted += 1
        self._pending[self._submitted] = ticket, sample
        try:
            self._verifiers.submit(self._submitted, self._tasks[ticket], [turns_text(texts)])
        except Exception as problem:  # raised where all processes hear of it
            self._problem = problem

    def _answer(self) -> None:
        """Waits for the judgements, and tells the sampler how each rollout goes on."""
        keys = [*((ticket, _OPENING) for ticket in self._openings), *((t.ticket, t.sample) for t in self._ended)]
        turns: list[Turn | None] = [*[None] * len(self._openings), *self._ended]
        self._ended, answers = [], self._gathered(keys)
        for (ticket, sample), turn, answer in zip(keys, turns, answers, strict=True):
            if turn is None:
                self._open(self._openings.pop(ticket), answer)
                continue
            before = self._answers.get((ticket, sample))
            if before is not None and before.status is not Status.OK:  # without the opening there is nothing to play
                answer = before
            self._answers[ticket, sample] = answer
            room = turn.room > len(answer.tokens)
            if answer.done or turn.finish is Finish.LENGTH or not (answer.tokens and room):
                self.sampler.finish(ticket, sample, truncated=not answer.done)
            else:
                self.sampler.extend(ticket, sample, answer.tokens)
                self.given_tokens[ticket < 0] += len(answer.tokens)

    def _open(self, request: Request, answer: Answer) -> None:
        """What the environment says first belongs to the prompt."""
        if answer.status is not Status.OK:  # every rollout of the group is lost
            for sample in range(request.num_samples):
                self._answers[request.ticket, sample] = answer
        try:
            self.sampler.submit([dataclasses.replace(request, prompt=[*request.prompt, *answer.tokens])])
        except ValueError as error:
            task = self._tasks[request.ticket]
            raise ValueError(
                f"environment of source {task.source}, task {task.task_id}: with its opening, {error}"
            ) from error

    def _gathered(self, keys: Sequence[tuple[int, int]]) -> list[Answer]:
        """Answers by key, on every process; a problem of one process is raised on all."""
        own, problem = [], self._problem
        if problem is None:
            try:
                self._wait()
                own = [self._own_answer(key) for key in keys]
            except Exception as raised:
                problem = raised
        if jax.process_count() == 1:
            if problem is not None:
                raise problem
            return [answer for answer in own if answer is not None]
        return exchange(own, len(keys), len(self._names), self._max_tokens, problem)

    def _wait(self) -> None:
        assert self._verifiers is not None
        while self._pending:
            self._took(self._verifiers.wait(1.0))

    def _took(self, judged: Sequence[Scores]) -> None:
        for scores in judged:
            key = self._pending.pop(scores.ticket, None)
            if key is not None:
                self._results[key] = scores.rewards[0], scores.statuses[0]

    def _own_answer(self, key: tuple[int, int]) -> Answer | None:
        found = self._results.pop(key, None)
        if found is None:
            return None
        reward, status = found
        if self._missed(key, status):
            status = Status.TIMEOUT
        observation, done = turn_result(reward, status)
        task = self._tasks[key[0]]
        try:
            tokens = [] if done else self._tokenizer.encode(observation)  # nobody reads it then
            if len(tokens) > self._max_tokens:
                raise ValueError(f"{len(tokens)} tokens are more than the {self._max_tokens} that there is room for")
        except ValueError as error:
            raise ValueError(
                f"environment of source {task.source}, task {task.task_id}: observation {observation!r}: {error}"
            ) from error
        if status is Status.OK:
            rewards = [metric_value(reward, name) for name in self._names]
        else:
            rewards = [0.0 if status.live else float("nan")] * len(self._names)
        return Answer(status, done, rewards, tokens)

    def _missed(self, key: tuple[int, int], status: Status) -> bool:
        """Whether the turn missed its deadline, now or, in training, before a restart."""
        ticket, sample = key
        missed = status is Status.TIMEOUT
        if ticket < 0:
            return missed
        where = sample, len(self._texts.get(key, ()))
        fact = ("turn", self._tasks[ticket].task_id, *self._visits[ticket], *where)
        if missed and not self.journal.get(*fact):
            self.journal.write(fact, True)
        return missed or bool(self.journal.get(*fact))

    def warm_up(self) -> None:
        """Compiles the program that processes exchange answers with."""
        if self._environments and jax.process_count() > 1:
            exchange([], 0, len(self._names), self._max_tokens, None)

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able. What is with the verifiers is judged again after a restart."""
        answers = [[*key, a.status, a.done, a.rewards, a.tokens] for key, a in self._answers.items()]
        return {
            "visits": [[t, *visit] for t, visit in self._visits.items()],
            "texts": [[*key, texts] for key, texts in self._texts.items()],
            "answers": answers,
            "ended": [list(t) for t in self._ended],
            "openings": list(self._openings),
        }

    def load_state_dict(self, state: Mapping[str, Any], tasks: Mapping[int, Task], requests: Sequence[Request]) -> None:
        """The inverse.

        Args:
          state: of `state_dict`.
          tasks: by ticket, of what is in flight.
          requests: of the groups that wait for their openings.
        """
        self._visits = {t: (visit, attempt) for t, visit, attempt in state["visits"]}
        self._tasks = {t: tasks[t] for t in self._visits}
        self._texts = {(t, s): list(texts) for t, s, texts in state["texts"]}
        self._answers = {(t, s): Answer(Status(status), *rest) for t, s, status, *rest in state["answers"]}
        self._ended = [Turn(*fields, finish=Finish(finish)) for *fields, finish in state["ended"]]
        for t in self._ended:
            self._judge(t.ticket, t.sample, self._texts[t.ticket, t.sample])
        self.submit(requests, [tasks[r.ticket] for r in requests], [self._visits[r.ticket][1] for r in requests])
