"""Times of the task side, one JSON line each: python tests/tasks/benchmark_tasks.py. Never gates."""

import json
import time
from collections.abc import Callable

import numpy as np

from dynrl.models.tokenizer import CharTokenizer
from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.selectors import EpochSelector, UniformSelector, VisitCounter
from dynrl.tasks.store import TaskStore, make_frozen
from dynrl.types import Task

NUM_REPEATS = 5


def report(name: str, goal_ms: float, work: Callable[[], object]) -> None:
    times_ms = []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - start))
    value = round(float(np.median(times_ms)), 3)
    print(json.dumps({"name": f"tasks/{name}_ms", "value": value, "goal": goal_ms, "ok": value <= goal_ms}))


def main() -> None:
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
    tokenizer = CharTokenizer(source.alphabet, multiple_of=8)
    rng = np.random.default_rng(0)
    tokens_NT, lengths_N = rng.integers(0, 13, (512, 12)), rng.integers(0, 13, 512)
    report("decode_batch_512x12", 2, lambda: tokenizer.decode_batch(tokens_NT, lengths_N))


if __name__ == "__main__":
    main()
