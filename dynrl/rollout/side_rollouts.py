"""Rollouts outside the ledger: evaluation, probes of proposed tasks, what a generator asks of the policy.

They share sampler and verifiers with training, whose groups and scores may come meanwhile and are passed on. Every
process must call with the same arguments at the same point (law 4), and so do the same again after a restart.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from dynrl.journal import Journal
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.deadlines import with_timeouts
from dynrl.rollout.records import Records, empty_records, gather, records_of, submit_for_judgement
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Groups, Purpose, Request, SamplingParams, Scores, Task


class Scored(NamedTuple):
    """Completions of N tasks, in their order.

    Attributes:
      score_NG: float32; 0 where dead.
      live_NG: bool.
      num_tokens: sampled, all together.
    """

    score_NG: np.ndarray
    live_NG: np.ndarray
    num_tokens: int


class SideRollouts:
    """Samples and scores what the ledger does not know.

    Args:
      player: the sampler.
      verifiers: the pool.
      tokenizer: encodes prompts, decodes completions.
      journal: of the run: a deadline that was missed is missed again after a restart.
      other_groups: takes groups of training that end meanwhile.
      other_scores: takes scores of training that come meanwhile.
      progress: called as groups come.
    """

    def __init__(
        self, player: TurnPlayer, verifiers: Verifiers, tokenizer: Tokenizer, journal: Journal,
        other_groups: Callable[[Groups], None], other_scores: Callable[[Sequence[Scores]], None],
        progress: Callable[[], None],
    ) -> None:  # fmt: skip
        self._player, self._verifiers, self._tokenizer, self._journal = player, verifiers, tokenizer, journal
        self._other_groups, self._other_scores, self._progress = other_groups, other_scores, progress
        self._tasks: dict[int, Task] = {}  # by ticket
        self._facts: dict[int, tuple[object, ...]] = {}  # by ticket: its name in the journal
        self._scores: dict[int, Scores] = {}
        self._problem: Exception | None = None  # of this process; raised where all processes hear of it

    def score(
        self, tasks: Sequence[Task], num_samples: int, purpose: Purpose, params: SamplingParams, when: int,
        visit: int = 0,
    ) -> Scored:  # fmt: skip
        """Samples each task with the sampler's present weights, and has the completions scored.

        Args:
          tasks: which; their ids and `visit` name the noise.
          num_samples: completions of each.
          purpose: names the noise too.
          params: how to sample.
          when: the step, for the journal.
          visit: see tasks.
        """
        if not tasks:
            return Scored(np.zeros((0, num_samples), np.float32), np.zeros((0, num_samples), bool), 0)
        # Negative tickets: they are not in the ledger, and must not meet its numbers in the verifiers.
        self._tasks = {-1 - i: task for i, task in enumerate(tasks)}
        self._facts = {t: ("side", int(purpose), when, x.task_id, visit) for t, x in self._tasks.items()}
        encode = self._tokenizer.encode
        requests = [
            Request(t, x.task_id, visit, purpose, encode(x.prompt), num_samples, params) for t, x in self._tasks.items()
        ]
        given = self._player.given_tokens[True]
        handed_over = self._run(requests, verify=True)
        tokens = given - self._player.given_tokens[True]
        score_NG, live_NG = np.zeros((len(tasks), num_samples), np.float32), np.zeros((len(tasks), num_samples), bool)
        for groups in handed_over:
            records = self._gathered(groups)
            rows = np.flatnonzero(groups.valid_P)
            where = -1 - groups.tickets_P[rows]
            live_NG[where] = records.live[rows]
            score_NG[where] = np.where(records.live[rows], records.score[rows], 0)
            tokens += int(records.length[rows].sum())
        return Scored(score_NG, live_NG, tokens)

    def complete(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, first_id: int, visit: int
    ) -> tuple[list[str], int]:
        """One completion of each prompt, unverified.

        Args:
          prompts: token ids.
          params: how to sample.
          first_id: with `visit` names the noise, prompt after prompt.
          visit: see first_id.

        Returns:
          The texts, and the number of tokens sampled.
        """
        requests = [
            Request(-1 - i, first_id + i, visit, Purpose.PROPOSE, prompt, 1, params) for i, prompt in enumerate(prompts)
        ]
        self._tasks = {r.ticket: Task(r.task_id, "", "", "") for r in requests}  # of no environment
        texts, tokens = [""] * len(prompts), 0
        for groups in self._run(requests, verify=False):
            tokens_PT, length_P = _everywhere(groups)
            rows = np.flatnonzero(groups.valid_P)
            decoded = self._tokenizer.decode_batch(tokens_PT[rows], length_P[rows])
            for ticket, text in zip(groups.tickets_P[rows].tolist(), decoded, strict=True):
                texts[-1 - ticket] = text
            tokens += int(length_P[rows].sum())
        return texts, tokens

    def references_pass(self, tasks: Sequence[Task], pass_score: float) -> list[bool]:
        """Whether each task's own answer passes its verifier; of an environment's task, whether it begins.

        Of this process alone: nothing is sampled or gathered.
        """
        played = [i for i, task in enumerate(tasks) if self._player.plays(task)]
        passed = dict(zip(played, self._player.begins([tasks[i] for i in played]) if played else (), strict=True))
        for i, task in enumerate(tasks):
            if i not in passed:
                self._verifiers.submit(-1 - i, task, [task.answer])
        while len(passed) < len(tasks):
            found = self._verifiers.wait(1.0)
            ours = [s for s in found if s.ticket < 0]
            passed |= {-1 - s.ticket: s.statuses[0].live and s.rewards[0].score >= pass_score - 1e-6 for s in ours}
            self._other_scores([s for s in found if s.ticket >= 0])
            self._progress()
        return [passed[i] for i in range(len(tasks))]

    def _run(self, requests: Sequence[Request], verify: bool) -> list[Groups]:
        """The completions, once all that this process owns are scored."""
        self._scores, self._problem = {}, None
        player, handed_over = self._player, []
        player.submit(requests, [self._tasks[r.ticket] for r in requests])
        left, num_owned = len(requests), 0
        while left:
            groups = player.poll(player.sampler.groups_per_poll(requests[0].num_samples))
            if groups is not None:
                ours_P = groups.valid_P & (groups.tickets_P < 0)
                left -= int(ours_P.sum())
                num_owned += int((ours_P & groups.owned_P).sum())
                if ours_P.any():
                    handed_over.append(dataclasses.replace(groups, valid_P=ours_P))
                    if verify:
                        self._verify(handed_over[-1])
                if (groups.valid_P & ~ours_P).any():
                    self._other_groups(dataclasses.replace(groups, valid_P=groups.valid_P & ~ours_P))
                self._progress()
            self._collect(self._verifiers.poll)
        while verify and self._problem is None and len(self._scores) < num_owned:
            self._collect(partial(self._verifiers.wait, 1.0))
        return handed_over

    def _verify(self, groups: Groups) -> None:
        """Has completions scored, unless turns have been already."""
        played = self._player.take_scores(groups)
        mine = groups.tickets_P[groups.valid_P & groups.owned_P].tolist()
        self._scores |= {t: played[t] for t in mine if t in played}
        rest = dataclasses.replace(groups, valid_P=groups.valid_P & ~np.isin(groups.tickets_P, list(played)))
        ids = {t: t for t in self._tasks}
        self._collect(partial(submit_for_judgement, rest, self._tasks, self._tokenizer, self._verifiers, ids))

    def _collect(self, call: Callable[[], list[Scores] | None]) -> None:
        try:
            found = call() or ()
        except Exception as problem:
            self._problem = self._problem or problem
            return
        for s in found:
            if s.ticket < 0:
                self._scores[s.ticket] = with_timeouts(self._journal, self._facts[s.ticket], s)
        self._other_scores([s for s in found if s.ticket >= 0])

    def _gathered(self, groups: Groups) -> Records:
        own = empty_records(groups) if self._problem else records_of(groups, self._scores, "score")
        return gather(own, groups.owned_P, self._problem)


def _everywhere(groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """The tokens [P, T] and lengths [P] of groups of one, on every process."""
    tokens_PT, length_P = groups.host_tokens_PGT[:, 0], groups.host_length_PG[:, 0]
    if jax.process_count() == 1:
        return tokens_PT, length_P
    from jax.experimental import multihost_utils

    own = np.where(groups.owned_P[:, None], np.concatenate([tokens_PT, length_P[:, None]], axis=1), 0).astype(np.int32)
    total = np.asarray(multihost_utils.process_allgather(own)).sum(axis=0, dtype=np.int32)
    return total[:, :-1], total[:, -1]


def warm_up_texts(filler: Groups) -> None:
    """Compiles the program that `SideRollouts.complete` runs where there are several processes."""
    _everywhere(filler)
