"""How a run ends: its result, its error, its last lines."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from dynrl.metrics import Row


class RunError(RuntimeError):
    """A run that could not go on; the message says what was counted and what would help."""


@dataclass
class RunResult:
    """What a run leaves.

    Attributes:
      params: the weights after the last step.
      metrics: the rows of metrics.jsonl.
      policy: the sampler, holding those weights; a request asks for 1 or num_generations_per_prompt completions.
      tokenizer: encodes its prompts and decodes its completions.
      reason: why the run ended.
      summary: its last lines.
    """

    params: Any
    metrics: list[Row]
    policy: Any
    tokenizer: Any
    reason: str
    summary: list[str] = field(default_factory=list)


def summarise(
    rows: Sequence[Row], workdir: epath.Path, reason: str, steps: str, generated_tokens: int, begin: float
) -> list[str]:
    """The last lines of a run, which began at `time.perf_counter() == begin`."""
    scores = [r["eval/main/pass_at_1"] for r in rows if r.get("eval/main/pass_at_1") is not None]
    recompiles = rows[-1].get("run/recompiles", 0) if rows else 0
    return [
        f"ended: {reason}",
        f"accuracy {scores[0]:.3f} -> {scores[-1]:.3f}" if scores else "no evaluation was made",
        f"steps {steps}, generated tokens {generated_tokens:,}, {time.perf_counter() - begin:.0f} s, recompiles after "
        f"warm-up {recompiles}",
        f"metrics {workdir / 'metrics.jsonl'}, checkpoints {workdir / 'checkpoints'}, tensorboard --logdir "
        f"{workdir / 'tensorboard'}",
    ]
