"""The quickstart, dapo beside grpo, over several seeds: accuracy gained, and steps, tokens and seconds to a target.

    python tests/benchmarks/bench_quickstart.py --seeds 0 1 2 --workdir runs/bench_quickstart
    python tests/benchmarks/bench_quickstart.py --arms grpo dapo in_order ready_first weight_fifo windowed \
        in_order_async ready_first_async

The target is the accuracy that grpo ends with, per seed. All arms start from the same warm start. Finished runs in
the workdir are read, not made again.

The streaming arms train on groups of the newest weights, as far as their schedule can: this task's learning rate is
as high as on-policy training bears, and every version between sampling and training costs accuracy per step. The
asynchronous ones cannot do without one version, and are given 200 steps in place of 150.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STREAMING = ["--config.dynamic_sampling.oversample=adaptive", "--config.dynamic_sampling.refill=deficit"]
ASYNC = ["--config.schedule.mode=async", "--config.num_steps=200"]


def schedule(name: str, key: str, versions: int) -> list[str]:
    """Overrides for a schedule without rounds."""
    return [*STREAMING, f"--config.schedule.name={name}", f"--config.schedule.{key}={versions}"]


# Algorithm of the configuration, and overrides.
ARMS: dict[str, tuple[str, list[str]]] = {
    "grpo": ("grpo", []),
    "dapo": ("dapo", []),  # rounds
    "in_order": ("dapo", schedule("in_order", "max_lookahead_versions", 0)),
    "ready_first": ("dapo", schedule("ready_first", "max_staleness_versions", 0)),
    "weight_fifo": ("dapo", schedule("weight_fifo", "max_staleness_versions", 0)),
    "windowed": ("dapo", schedule("windowed", "max_staleness_versions", 1)),
    "in_order_async": ("dapo", [*schedule("in_order", "max_lookahead_versions", 1), *ASYNC]),
    "ready_first_async": ("dapo", [*schedule("ready_first", "max_staleness_versions", 1), *ASYNC]),
}


def run(arm: str, seed: int, workdir: Path, overrides: list[str]) -> float:
    """Runs one arm, unless its result is there. Returns its wall seconds."""
    done = workdir / "secs.json"
    if not done.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        algorithm, own = ARMS[arm]
        overrides = [*own, *overrides]
        command = [sys.executable, "launch/train.py", f"--config=configs/quickstart.py:{algorithm}"]
        command.append(f"--workdir={workdir}")
        with (workdir / "log.txt").open("w") as log:
            subprocess.run(
                [*command, f"--config.seed={seed}", *overrides], cwd=ROOT, check=True, stdout=log, stderr=log
            )
        done.write_text(json.dumps(time.perf_counter() - begin))
    return json.loads(done.read_text())


def read(workdir: Path) -> tuple[list[dict], list[dict]]:
    """All rows, and those with an evaluation."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return rows, [r for r in rows if r.get("eval/main/pass_at_1") is not None]


def reach(results: tuple[list[dict], list[dict]], target: float) -> dict[str, float | None]:
    """Steps, generated tokens and step seconds until the first evaluation at the target."""
    rows, evaluated = results
    hit = next((r for r in evaluated if r["run/step"] and r["eval/main/pass_at_1"] >= target), None)
    if hit is None:
        return {"steps": None, "tokens": None, "secs": None}
    until = [r for r in rows if 0 < r["run/step"] <= hit["run/step"]]
    secs = sum(r["time/step_secs"] for r in until)
    return {"steps": hit["run/step"], "tokens": hit["run/generated_tokens"], "secs": secs}


def main() -> None:
    """Prints one JSON line per result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "bench_quickstart")
    parser.add_argument("--arms", nargs="+", default=["grpo", "dapo"], choices=list(ARMS), help="grpo among them")
    parser.add_argument("overrides", nargs="*", help="passed on, such as --config.num_steps=50 (after --)")
    args = parser.parse_args()
    gains: dict[str, list[float]] = {arm: [] for arm in args.arms}
    reached: dict[str, list[dict]] = {arm: [] for arm in args.arms}
    for seed in args.seeds:
        results = {}
        for arm in args.arms:
            workdir = args.workdir.resolve() / f"{arm}_{seed}"
            secs = run(arm, seed, workdir, args.overrides)
            results[arm] = read(workdir)
            rows, evaluated = results[arm]
            before, after = (evaluated[i]["eval/main/pass_at_1"] for i in (0, -1))
            gains[arm].append(after - before)
            line = {"name": f"quickstart_{arm}_seed{seed}", "before": before, "after": after, "wall_secs": secs}
            line |= {"steps": rows[-1]["run/step"], "tokens": rows[-1]["run/generated_tokens"]}
            print(json.dumps(line | {"recompiles": rows[-1]["run/recompiles"]}), flush=True)
        target = results["grpo"][1][-1]["eval/main/pass_at_1"]
        for arm in args.arms:
            found = reach(results[arm], target)
            reached[arm].append(found)
            print(json.dumps({"name": f"to_grpo_accuracy_{arm}_seed{seed}", "target": target, **found}), flush=True)
    for arm in args.arms:
        mean = statistics.mean(gains[arm])
        goal = {"goal": 0.2, "ok": mean >= 0.2} if arm == "dapo" else {}
        print(json.dumps({"name": f"accuracy_gain_{arm}", "value": mean, **goal}))
        for key in ("steps", "tokens", "secs"):
            values = [r[key] for r in reached[arm]]
            value = None if None in values else statistics.mean(values)
            print(json.dumps({"name": f"{key}_to_grpo_accuracy_{arm}", "value": value}))


if __name__ == "__main__":
    main()
