"""Evaluation on frozen tasks: one completion per task, its noise fixed by the task, so that steps are comparable."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dynrl.config import RunConfig
from dynrl.metrics import Row, Sums
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.records import empty_records, gather, records_of, submit_for_judgement
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.store import FrozenTasks
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Groups, Purpose, Request, SamplingParams, Scores


def evaluate(
    config: RunConfig, tasks: FrozenTasks, player: TurnPlayer, verifiers: Verifiers, tokenizer: Tokenizer,
    other_groups: Callable[[Groups], None], other_scores: Callable[[Sequence[Scores]], None],
    progress: Callable[[], None] = lambda: None,
) -> tuple[Row, int]:  # fmt: skip
    """Samples every task once with the sampler's present weights and scores it.

    A completion passes with a score of `evaluation.pass_score`; partial credit shows in the mean. A dead one fails.
    Training may be under way in sampler and verifiers: what ends meanwhile goes to `other_groups` and `other_scores`.
    `progress` is called as groups come.

    Returns:
      eval/main/pass_at_1, eval/main/reward, and pass_at_1 by level, and by source where there are several; and the
      number of tokens that were sampled.
    """
    all_tasks = tasks.get(range(len(tasks)))
    sources = {task.source for task in all_tasks}
    c = config.evaluation
    params = SamplingParams(
        c.temperature,
        config.sampler.max_completion_tokens,
        top_k=c.top_k,
        top_p=c.top_p,
        min_p=c.min_p,
        stop_strings=config.sampler.stop_strings,
    )
    # Negative tickets: evaluation is not in the ledger, and must not meet its numbers in the verifiers.
    by_ticket = {-1 - i: task for i, task in enumerate(all_tasks)}
    player.submit(
        [Request(t, task.task_id, 0, Purpose.EVAL, tokenizer.encode(task.prompt), 1, params)
         for t, task in by_ticket.items()],
        all_tasks,
    )  # fmt: skip
    handed_over: list[Groups] = []
    scores: dict[int, Scores] = {}
    ids = {t: t for t in by_ticket}
    problem: Exception | None = None  # of this process

    def verify(call: Callable[[], Any]) -> None:
        """Raised where all processes hear of it."""
        nonlocal problem
        try:
            found = call() or ()
        except Exception as raised:
            problem = problem or raised
            return
        scores.update((s.ticket, s) for s in found if s.ticket < 0)
        other_scores([s for s in found if s.ticket >= 0])

    left, mine, given = len(all_tasks), 0, player.given_tokens[True]
    while left:
        groups = player.poll(player.sampler.groups_per_poll(1))
        if groups is not None:
            ours_P = groups.valid_P & (groups.tickets_P < 0)
            ours = dataclasses.replace(groups, valid_P=ours_P)
            left -= int(ours_P.sum())
            mine += int((ours_P & groups.owned_P).sum())
            if ours_P.any():
                handed_over.append(ours)
            played = player.take_scores(ours)
            scores |= {t: played[t] for t in ours.tickets_P[ours_P & ours.owned_P].tolist() if t in played}
            rest = dataclasses.replace(ours, valid_P=ours_P & ~np.isin(ours.tickets_P, list(played)))
            verify(partial(submit_for_judgement, rest, by_ticket, tokenizer, verifiers, ids))
            progress()
            if (groups.valid_P & ~ours_P).any():
                other_groups(dataclasses.replace(groups, valid_P=groups.valid_P & ~ours_P))
        verify(verifiers.poll)
    while problem is None and len(scores) < mine:
        verify(partial(verifiers.wait, 1.0))
    sums, tokens = Sums(), given - player.given_tokens[True]
    for groups in handed_over:
        own = records_of(groups, scores, "score") if problem is None else empty_records(groups)
        records = gather(own, groups.owned_P, problem)
        for i in np.flatnonzero(groups.valid_P):
            tokens += int(records.length[i, 0])
            score = float(records.score[i, 0]) if records.live[i, 0] else 0.0
            task = by_ticket[int(groups.tickets_P[i])]
            passed = score >= c.pass_score - 1e-6  # scores are float32
            sums.add("eval/main/pass_at_1", passed, 1)
            sums.add("eval/main/reward", score, 1)
            sums.add(f"eval/main/level/{task.level}", passed, 1)
            if len(sources) > 1:
                sums.add(f"eval/main/source/{task.source}", passed, 1)
    return dict(sorted(sums.row().items())), tokens
