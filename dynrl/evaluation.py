"""Evaluation on frozen tasks: one completion per task, its noise fixed by the task, so that steps are comparable."""

from dynrl.config import RunConfig
from dynrl.metrics import Row, Sums
from dynrl.rollout.side_rollouts import SideRollouts
from dynrl.tasks.store import FrozenTasks
from dynrl.types import Purpose, SamplingParams


class Evaluation:
    """Evaluates on frozen tasks, with whatever else is under way in sampler and verifiers.

    Args:
      config: the run's.
      tasks: the frozen ones.
      rollouts: samples and scores.
    """

    def __init__(self, config: RunConfig, tasks: FrozenTasks, rollouts: SideRollouts) -> None:
        self._tasks, self._rollouts = tasks.get(range(len(tasks))), rollouts
        c, s = config.evaluation, config.sampler
        self._params = SamplingParams(
            c.temperature,
            s.max_completion_tokens,
            top_k=c.top_k,
            top_p=c.top_p,
            min_p=c.min_p,
            stop_strings=s.stop_strings,
        )
        self._pass_score = c.pass_score

    def __call__(self, step: int) -> tuple[Row, int]:
        """Samples every task once with the sampler's present weights and scores it.

        A completion passes with a score of `evaluation.pass_score`; partial credit shows in the mean. A dead one fails.

        Args:
          step: how many there were.

        Returns:
          eval/main/pass_at_1, eval/main/reward, and pass_at_1 by level, and by source where there are several; and the
          number of tokens that were sampled.
        """
        scored = self._rollouts.score(self._tasks, 1, Purpose.EVAL, self._params, step)
        sums, sources = Sums(), {task.source for task in self._tasks}
        for task, score in zip(self._tasks, scored.score_NG[:, 0].tolist(), strict=True):
            passed = score >= self._pass_score - 1e-6  # scores are float32
            sums.add("eval/main/pass_at_1", passed, 1)
            sums.add("eval/main/reward", score, 1)
            sums.add(f"eval/main/level/{task.level}", passed, 1)
            if len(sources) > 1:
                sums.add(f"eval/main/source/{task.source}", passed, 1)
        return dict(sorted(sums.row().items())), scored.num_tokens
