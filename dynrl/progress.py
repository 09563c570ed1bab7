"""What a person sees while a run goes on: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
from tqdm import tqdm

from dynrl.metrics import Row


class Progress:
    """Shows steps as they are made. Silent on every process but the first.

    Args:
      mode: auto (a bar on a terminal, else plain), bar, plain or none.
      num_steps: the run's length.
      first_step: where it begins or resumes.
    """

    def __init__(self, mode: str, num_steps: int, first_step: int = 0) -> None:
        if jax.process_index() != 0:
            mode = "none"
        self._mode = ("bar" if sys.stderr.isatty() else "plain") if mode == "auto" else mode
        self._num_steps = num_steps
        self._begin, self._first_step = time.monotonic(), first_step
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step") if self._mode == "bar" else None

    def say(self, message: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._mode != "none":
            tqdm.write(message, file=sys.stderr if self._bar is not None else sys.stdout)
            sys.stdout.flush()

    def step(self, row: Row) -> None:
        """Shows one optimizer step."""
        step = int(row["run/step"] or 0)
        shown = {
            "reward": row.get("reward/score/all/mean"),
            "kept": row.get("group_filter/kept_frac"),
            "rounds": row.get("backfill/num_rounds"),
            "tok/s": row.get("sampler/tokens_per_sec"),
            "eval": row.get("eval/main/pass_at_1"),
        }
        shown = {k: v for k, v in shown.items() if v is not None}
        if self._bar is not None:
            self._bar.set_postfix(_short(shown), refresh=False)
            self._bar.update(step - self._bar.n)
        elif self._mode == "plain":
            made = max(step - self._first_step, 1)
            left = (time.monotonic() - self._begin) / made * (self._num_steps - step)
            text = " ".join(f"{k} {v}" for k, v in _short(shown).items())
            self.say(f"step {step}/{self._num_steps} {text} left {left:.0f}s")

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _short(values: Mapping[str, Any]) -> dict[str, str]:
    return {k: f"{v:.0f}" if abs(v) >= 100 or isinstance(v, int) else f"{v:.3f}" for k, v in values.items()}
