"""Evaluation on frozen tasks: one completion per task, its noise fixed by the task, so that steps are comparable."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dynrl.config import RunConfig
from dynrl.metrics import Row, Sums
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.records import empty_records, gather, records_of, submit_for_judgement
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.store import FrozenTasks
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Groups, Purpose, Request, SamplingParams, Scores


class Evaluation:
    """Evaluates on frozen tasks, with whatever else is under way in sampler and verifiers.

    Args:
      config: the run's.
      tasks: the frozen ones.
      player: the sampler.
      verifiers: the pool.
      tokenizer: encodes prompts, decodes completions.
      other_groups: takes groups of training that end meanwhile.
      other_scores: takes scores of training that come meanwhile.
      progress: called as groups come.
    """

    def __init__(
        self, config: RunConfig, tasks: FrozenTasks, player: TurnPlayer, verifiers: Verifiers, tokenizer: Tokenizer,
        other_groups: Callable[[Groups], None], other_scores: Callable[[Sequence[Scores]], None],
        progress: Callable[[], None],
    ) -> None:  # fmt: skip
        self._config, self._player, self._verifiers, self._tokenizer = config, player, verifiers, tokenizer
        self._other_groups, self._other_scores, self._progress = other_groups, other_scores, progress
        # Negative tickets: evaluation is not in the ledger, and must not meet its numbers in the verifiers.
        self._tasks = {-1 - i: task for i, task in enumerate(tasks.get(range(len(tasks))))}
        self._ids = {t: t for t in self._tasks}
        self._scores: dict[int, Scores] = {}
        self._problem: Exception | None = None  # of this process; raised where all processes hear of it

    def __call__(self) -> tuple[Row, int]:
        """Samples every task once with the sampler's present weights and scores it.

        A completion passes with a score of `evaluation.pass_score`; partial credit shows in the mean. A dead one fails.

        Returns:
          eval/main/pass_at_1, eval/main/reward, and pass_at_1 by level, and by source where there are several; and the
          number of tokens that were sampled.
        """
        self._scores, self._problem = {}, None
        given = self._player.given_tokens[True]
        handed_over = self._sample()
        sums, tokens = Sums(), given - self._player.given_tokens[True]
        sources = {task.source for task in self._tasks.values()}
        for groups in handed_over:
            own = empty_records(groups) if self._problem else records_of(groups, self._scores, "score")
            records = gather(own, groups.owned_P, self._problem)
            for i in np.flatnonzero(groups.valid_P):
                tokens += int(records.length[i, 0])
                score = float(records.score[i, 0]) if records.live[i, 0] else 0.0
                task = self._tasks[int(groups.tickets_P[i])]
                passed = score >= self._config.evaluation.pass_score - 1e-6  # scores are float32
                sums.add("eval/main/pass_at_1", passed, 1)
                sums.add("eval/main/reward", score, 1)
                sums.add(f"eval/main/level/{task.level}", passed, 1)
                if len(sources) > 1:
                    sums.add(f"eval/main/source/{task.source}", passed, 1)
        return dict(sorted(sums.row().items())), tokens

    def _requests(self) -> list[Request]:
        c, s = self._config.evaluation, self._config.sampler
        params = SamplingParams(
            c.temperature,
            s.max_completion_tokens,
            top_k=c.top_k,
            top_p=c.top_p,
            min_p=c.min_p,
            stop_strings=s.stop_strings,
        )
        encode = self._tokenizer.encode
        return [Request(t, x.task_id, 0, Purpose.EVAL, encode(x.prompt), 1, params) for t, x in self._tasks.items()]

    def _sample(self) -> list[Groups]:
        """The completions, once all that this process owns are scored."""
        player, handed_over = self._player, []
        player.submit(self._requests(), list(self._tasks.values()))
        left, num_owned = len(self._tasks), 0
        while left:
            groups = player.poll(player.sampler.groups_per_poll(1))
            if groups is not None:
                ours_P = groups.valid_P & (groups.tickets_P < 0)
                left -= int(ours_P.sum())
                num_owned += int((ours_P & groups.owned_P).sum())
                if ours_P.any():
                    handed_over.append(dataclasses.replace(groups, valid_P=ours_P))
                    self._verify(handed_over[-1])
                if (groups.valid_P & ~ours_P).any():
                    self._other_groups(dataclasses.replace(groups, valid_P=groups.valid_P & ~ours_P))
                self._progress()
            self._collect(self._verifiers.poll)
        while self._problem is None and len(self._scores) < num_owned:
            self._collect(partial(self._verifiers.wait, 1.0))
        return handed_over

    def _verify(self, groups: Groups) -> None:
        """Has completions scored, unless turns have been already."""
        played = self._player.take_scores(groups)
        mine = groups.tickets_P[groups.valid_P & groups.owned_P].tolist()
        self._scores |= {t: played[t] for t in mine if t in played}
        rest = dataclasses.replace(groups, valid_P=groups.valid_P & ~np.isin(groups.tickets_P, list(played)))
        self._collect(partial(submit_for_judgement, rest, self._tasks, self._tokenizer, self._verifiers, self._ids))

    def _collect(self, call: Callable[[], list[Scores] | None]) -> None:
        try:
            found = call() or ()
        except Exception as problem:
            self._problem = self._problem or problem
            return
        self._scores.update((s.ticket, s) for s in found if s.ticket < 0)
        self._other_scores([s for s in found if s.ticket >= 0])
