"""Times of the task side, one JSON line each: python tests/benchmarks/bench_tasks.py. Never gates."""

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dynrl.models.tokenizer import CharTokenizer
from dynrl.tasks.base import Draws
from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.proposal_kinds.base import make_kind
from dynrl.tasks.selectors import EpochSelector, UniformSelector, VisitCounter
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore, make_frozen
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Task

NUM_REPEATS = 5
NUM_GROUPS, GROUP = 64, 8  # for the verifiers: what one optimizer step of the quickstart judges


def report(name: str, goal_ms: float, work: Callable[[], object], per: int = 1) -> None:
    """Prints the median time of the work, divided by what it does."""
    times_ms = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - start) / per)
    value = round(float(np.median(times_ms)), 4)
    print(json.dumps({"name": f"tasks/{name}_ms", "value": value, "goal": goal_ms, "ok": value <= goal_ms}), flush=True)


def missing(name: str, *packages: str) -> bool:
    """Prints that a benchmark is skipped, where a package is not installed."""
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if absent:
        print(json.dumps({"name": f"tasks/{name}_ms", "skipped": f"no {', '.join(absent)}"}))
    return bool(absent)


def bench_selection() -> None:
    source = DigitSorting()
    exclude = make_frozen(source, 1, 512).hashes
    for each in (source, Arithmetic()):
        report(f"{each.name}_1000_tasks", 50, lambda each=each: [each.task(0, i, exclude) for i in range(1_000)])
    store = TaskStore(source, 0, 1_000_000, exclude)
    report("new_store_of_a_million", 50, lambda: TaskStore(source, 0, 1_000_000, exclude))
    report("epoch_first_draw_4096", 150, lambda: EpochSelector(0).draw(4_096, store))
    epoch, uniform, visits = EpochSelector(0), UniformSelector(0), VisitCounter()
    ids = epoch.draw(4_096, store)
    report("epoch_draw_4096", 150, lambda: epoch.draw(4_096, store))
    report("uniform_draw_4096", 150, lambda: uniform.draw(4_096, store))
    report("visits_4096", 20, lambda: visits.next_visits(ids))
    report("get_1000", 50, lambda: store.get(ids[:1_000]))
    new = [Task(-1, "made", f"{i}+1=", str(i + 1), 1, (i,), {"kind": "sum"}) for i in range(1_000)]
    report("append_1000", 20, lambda: store.append(new, step=1, version=1, generator="benchmark"))
    report("epoch_draw_4096_after_appends", 150, lambda: epoch.draw(4_096, store))
    with tempfile.TemporaryDirectory() as folder:
        logged = TaskStore(source, 0, 1_000, exclude)
        logged.open_log(Path(folder) / "tasks.jsonl")
        for size in ("thousand", "million"):
            while len(logged) < (1_000_000 if size == "million" else 2_000):
                logged.append(new, step=1, version=1, generator="benchmark")
            report(f"append_1000_to_a_logged_{size}", 20, lambda: logged.append(new, step=1, version=1))
            report(f"state_of_a_logged_{size}", 5, logged.state_dict)
    tokenizer = CharTokenizer(source.alphabet, multiple_of=8)
    rng = np.random.default_rng(0)
    tokens_NT, lengths_N = rng.integers(0, 13, (512, 12)), rng.integers(0, 13, 512)
    report("decode_batch_512x12", 2, lambda: tokenizer.decode_batch(tokens_NT, lengths_N))


def bench_sources(folder: Path) -> None:
    """Milliseconds per task through a store, in random order."""
    rows = [{"question": f"What is {i} + {i}? " + "Say why. " * 25, "answer": str(2 * i)} for i in range(10_000)]
    jsonl, parquet = str(folder / "rows.jsonl"), str(folder / "rows.parquet")
    Path(jsonl).write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"prompt": "question"}
    report("open_jsonl_10000_rows", 1_000, lambda: make_source("jsonl", path=jsonl, **fields))
    parts = [{"name": "digit_sorting", "weight": 0.5}, {"name": "countdown", "weight": 0.3}]
    parts.append({"name": "jsonl", "weight": 0.2, "kwargs": {"path": jsonl, **fields}})
    sources = {
        "countdown": ("countdown", {}),
        "jsonl": ("jsonl", {"path": jsonl, **fields}),
        "mixture_of_3": ("mixture", {"sources": parts}),
    }
    if not missing("task_of_parquet", "pyarrow"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), parquet, row_group_size=2_500)
        report("open_parquet_10000_rows", 1_000, lambda: make_source("parquet", path=parquet, **fields))
        sources["parquet"] = ("parquet", {"path": parquet, **fields})
    if not missing("task_of_reasoning_gym", "reasoning_gym"):
        os.environ.setdefault("PYTHONHASHSEED", "0")
        for generator in ("gcd", "gsm_symbolic", "countdown"):
            sources[f"reasoning_gym/{generator}"] = ("reasoning_gym", {"generator": generator})
        from dynrl.tasks.reasoning_gym_entries import GENERATORS

        slow = {"futoshiki", "intermediate_integration", "knight_swap", "quantum_lock", "zebra_puzzles"}
        whole = [{"name": "reasoning_gym", "kwargs": {"generator": each}} for each in sorted(GENERATORS - slow)]
        sources["mixture_of_100_of_reasoning_gym"] = ("mixture", {"sources": whole})
    goals = {"reasoning_gym/countdown": 100, "mixture_of_100_of_reasoning_gym": 20}
    for name, (kind, kwargs) in sources.items():
        source = make_source(kind, **kwargs)
        store = TaskStore(source, 0, 5_000)
        ids = np.random.default_rng(0).permutation(5_000)[: 100 if "reasoning_gym" in name else 1_000].tolist()
        report(f"task_of_{name}", goals.get(name, 3), lambda store=store, ids=ids: store.get(ids), len(ids))


def bench_proposals() -> None:
    """Milliseconds per proposal that is accepted, and for a program that would never end."""
    for name, goal in (("digits", 1), ("expression", 1), ("program", 5)):
        kind = make_kind(name)
        texts = [kind.example(Draws(0, name, index)) for index in range(200)]
        report(f"proposal_of_{name}", goal, lambda kind=kind, texts=texts: [kind.read(text) for text in texts], 200)
    endless = "def f(x):\n    while True:\n        x += 1\nf(1)"
    report("proposal_of_an_endless_program", 100, lambda: make_kind("program").read(endless))


def bench_verifiers() -> None:
    """Milliseconds per group of 8 through the pool with one worker; and for its main thread, to submit them."""
    numbers = [("12", "#### 12"), ("13", "The answer is 13."), ("14", "no"), ("15", "#### 1,5")]
    texts = [text for _, text in numbers] * (GROUP // len(numbers))
    sums = [Task(i, "s", "p", "#### 12") for i in range(NUM_GROUPS)]
    latex = [r"\boxed{12}", r"So it is $\frac{24}{2}$.", "The answer is 12.", r"\boxed{x+1}"] * 2
    work = {
        "integer_match": ([Task(i, "s", "p", "12") for i in range(NUM_GROUPS)], ["12", "13", "x", "-12"] * 2),
        "gsm8k": (sums, texts),
        "countdown": (
            [make_source("countdown").task(0, i) for i in range(NUM_GROUPS)],
            ["1+2*3", "(4-1)/3", "x", "7"] * 2,
        ),
    }
    proposers = make_source("self_propose", kind="digits")
    work["proposal"] = ([proposers.task(0, i) for i in range(NUM_GROUPS)], ["3142", "77", "x", "12345678901"] * 2)
    if not missing("group_by_math_verify", "math_verify"):
        work["math_verify"] = ([Task(i, "s", "p", r"\frac{24}{2}") for i in range(NUM_GROUPS)], latex)
        work["math_verify_of_plain_numbers"] = (
            [Task(i, "s", "p", "12") for i in range(NUM_GROUPS)],
            [r"\boxed{12}"] * 8,
        )
    if not missing("group_by_reasoning_gym", "reasoning_gym"):
        for generator in ("gcd", "gsm_symbolic"):
            source = make_source("reasoning_gym", generator=generator)
            tasks = [source.task(0, i) for i in range(NUM_GROUPS)]
            work[f"reasoning_gym/{generator}"] = (tasks, ["<answer>6</answer>", "7", "x", "<answer>1.5</answer>"] * 2)
    for name, (tasks, group) in work.items():
        verifier = name.split("/")[0].removesuffix("_of_plain_numbers")
        with Verifiers({tasks[0].source: verifier}, timeout_secs=10.0) as verifiers:

            def judge(tasks=tasks, group=group, verifiers=verifiers) -> None:
                for ticket, task in enumerate(tasks):
                    verifiers.submit(ticket, task, group)
                while verifiers.num_pending:
                    verifiers.wait(1.0)

            judge()  # the first one builds what is cached
            report(f"group_by_{name}", 20 if "math" in name else 5, judge, NUM_GROUPS)


def main() -> None:
    bench_selection()
    with tempfile.TemporaryDirectory() as folder:
        bench_sources(Path(folder))
    bench_proposals()
    bench_verifiers()


if __name__ == "__main__":
    main()
