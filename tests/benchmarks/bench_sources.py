"""What mixed sources and verifiers cost on the quickstart's step: python tests/benchmarks/bench_sources.py.

The quickstart's digits alone, and mixed half and half with countdown, each judged by its own verifier, at the same
model, lengths and number of groups, in turns: one round of 64 groups per step, none filtered. Prints, for each arm,
milliseconds per step by phase, and `tasks`: drawing the tasks and making the requests. Medians over steps.
"""

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import dynrl
from dynrl.build import build

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.py"
DIGITS = {"min_length": 3, "max_length": 11}
COUNTDOWN = {"min_numbers": 2, "max_numbers": 2, "max_number": 9, "max_target": 99}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "digit_sorting": ("digit_sorting", DIGITS),
    "mixture": (
        "mixture",
        {"sources": ({"name": "digit_sorting", "kwargs": DIGITS}, {"name": "countdown", "kwargs": COUNTDOWN})},
    ),
}


def measure(arm: str, steps: int) -> dict[str, list[float]]:
    """Seconds by phase of each step, the first ones left out."""
    spec: Any = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("grpo")
    config.num_steps, config.evaluation.every_steps, config.evaluation.num_tasks = steps, 0, 64
    config.warm_start.num_steps, config.progress = 0, "none"
    config.tasks.source, config.tasks.source_kwargs = ARMS[arm]
    spent: list[float] = []

    def timed_parts(run_config: Any) -> Any:
        parts = build(run_config)
        draw, dispatch = parts.selection.draw, parts.producer.dispatch

        def timed(function: Any, first: bool) -> Any:
            def call(*args: Any) -> Any:
                begin = time.perf_counter()
                result = function(*args)
                now = time.perf_counter() - begin
                spent.append(now) if first else spent.append(spent.pop() + now)
                return result

            return call

        parts.selection.draw = timed(draw, True)
        parts.producer.dispatch = timed(dispatch, False)
        return parts

    with tempfile.TemporaryDirectory() as workdir:
        rows = dynrl.run(config, workdir, (), timed_parts).metrics[6:]
    phases = ("sampler", "reward", "backfill", "train_step", "step")
    secs = {phase: [float(r[f"time/{phase}_secs"] or 0) for r in rows] for phase in phases}
    return {"tasks": spent[5:], **secs}


def main() -> None:
    """Parses the flags and prints the lines."""
    parser = argparse.ArgumentParser(description="mixed sources and verifiers on the quickstart's step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=2)
    flags = parser.parse_args()
    secs: dict[str, dict[str, list[float]]] = {arm: {} for arm in ARMS}
    for _ in range(flags.turns):
        for arm in ARMS:
            for phase, values in measure(arm, flags.steps).items():
                secs[arm].setdefault(phase, []).extend(values)
    median = {arm: {p: 1e3 * statistics.median(v) for p, v in phases.items()} for arm, phases in secs.items()}
    for arm, phases in median.items():
        for phase, value in phases.items():
            print(json.dumps({"name": f"sources/{arm}/{phase}_ms_per_step", "value": round(value, 2)}))
    alone, mixed = median["digit_sorting"], median["mixture"]
    extra = sum(mixed[p] - alone[p] for p in ("tasks", "reward", "backfill"))
    print(json.dumps({"name": "sources/extra_host_frac", "value": round(extra / alone["step"], 4)}))


if __name__ == "__main__":
    main()
