"""What dynamic sampling costs beside generation, verification and training: shares of the quickstart's step time.

    python tests/benchmarks/bench_overhead.py [--steps 60]

A real run of configs/quickstart.py with clocks around the parts: device work that a part waits for is booked on it,
and so is what cold caches cost it after a train step. What never waits for the device (controller, statistics, what
the selector is told) is booked by the thread's CPU time: part of it runs while the device trains on all cores, and
delays nothing. One JSON line per part in milliseconds per step, and one for the share of filter, buffer and
controller, whose goal is 1%. `host` is everything that the host does for dynamic sampling: these three, the records
that they work on, statistics, and what the selector is told.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import dynrl
import dynrl.loop
import dynrl.rollout.producer
from dynrl.build import build

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.py"
WARM = 5  # first steps, left out
CORE = ("filter", "buffer", "controller")


class Clock:
    """Seconds by part and step; time spent in an inner part is not counted in the outer one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._secs: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, part: str, function: Any, now: Any = time.perf_counter) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = now() - begin
                self._secs[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return call

    def wrap(self, part: str, owner: Any, *names: str, now: Any = time.perf_counter) -> None:
        for name in names:
            setattr(owner, name, self.timed(part, getattr(owner, name), now))

    def end_step(self) -> None:
        self.steps.append(dict(self._secs))
        self._secs.clear()


def measure(steps: int, workdir: str) -> tuple[list[dict[str, float]], list[Any]]:
    """Seconds by part, and the metrics, of each step."""
    spec: Any = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.num_steps, config.evaluation.every_steps, config.progress = steps, 0, "none"
    clock = Clock()

    def timed_parts(run_config: Any) -> Any:
        parts = build(run_config)
        clock.wrap("buffer", parts.buffer, "put", "take", "free", "records")
        clock.wrap("statistics", parts.statistics, "judged", "trained", "freed", "row", now=time.thread_time)
        clock.wrap("producer", parts.producer, "_judge_all")
        parts.producer._judge = timed_judge = clock.timed("filter", parts.judge)
        timed_judge.host_mask = clock.timed("filter", parts.judge.host_mask)
        return parts

    class Writer:
        def write(self, step: int, row: Any) -> None:
            clock.end_step()  # a row is written while the next step is made: each entry spans one step

        def close(self) -> None: ...

    with (
        mock.patch.object(dynrl.loop, "apply", clock.timed("controller", dynrl.loop.apply, time.thread_time)),
        mock.patch.object(dynrl.loop.Loop, "_produce", _selector_clock(clock)),
    ):
        result = dynrl.run(config, workdir, [Writer()], timed_parts)
    return clock.steps[WARM:-1], result.metrics[WARM:-1]


def _selector_clock(clock: Clock) -> Any:
    """Times what `Loop._produce` does beside polling."""
    produce = dynrl.loop.Loop._produce

    def timed(self: Any) -> Any:
        poll = self.parts.producer.poll
        self.parts.producer.poll = clock.timed("(poll)", poll, time.thread_time)
        try:
            return clock.timed("selector", produce, time.thread_time)(self)
        finally:
            self.parts.producer.poll = poll

    return timed


def main() -> None:
    """Parses the flags and prints the lines."""
    parser = argparse.ArgumentParser(description="overhead of dynamic sampling in the quickstart")
    parser.add_argument("--steps", type=int, default=60)
    with tempfile.TemporaryDirectory() as workdir:
        steps, rows = measure(parser.parse_args().steps, workdir)
    step_ms = 1e3 * statistics.fmean(float(r["time/step_secs"]) for r in rows)
    rounds = statistics.fmean(float(r["backfill/num_rounds"]) for r in rows)
    parts = sorted({part for step in steps for part in step} - {"(poll)"})
    ms = {part: 1e3 * statistics.fmean(step.get(part, 0.0) for step in steps) for part in parts}
    for part, value in ms.items():
        print(json.dumps({"name": f"overhead/{part}_ms_per_step", "value": round(value, 3)}))
    print(json.dumps({"name": "overhead/step_ms", "value": round(step_ms, 1), "num_rounds": round(rounds, 2)}))
    print(json.dumps({"name": "overhead/host_frac", "value": round(sum(ms.values()) / step_ms, 4)}))
    core = sum(ms[part] for part in CORE) / step_ms
    print(json.dumps({"name": "overhead/core_frac", "value": round(core, 4), "goal": 0.01, "ok": core <= 0.01}))


if __name__ == "__main__":
    main()
