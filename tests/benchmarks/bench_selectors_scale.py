"""Times of selection over a million tasks, one JSON line each: python tests/benchmarks/bench_selectors_scale.py.

Never gates. Each selector draws from a store with a procedural base of a million tasks: before anything is known, when
all of them were visited, and after appends. Then it learns from 4,096 outcomes, and its state becomes text.
"""

import itertools
import json
import time
from collections.abc import Callable

import numpy as np

from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import BUILT_IN_SELECTORS, Selection, Selector, make_selector
from dynrl.tasks.store import TaskStore, make_frozen
from dynrl.types import Outcome, Task, Verdict

NUM_TASKS, NUM_DRAWN, NUM_APPENDED = 1_000_000, 4_096, 1_000
NUM_REPEATS = 5
WEIGHTS = [{"level": level, "weight": 1.0 / level} for level in range(2, 12)]


def report(name: str, goal_ms: float, work: Callable[[], object], num_repeats: int = NUM_REPEATS) -> None:
    """Prints the median time of the work."""
    times_ms = []
    for _ in range(num_repeats):
        start = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - start))
    value = round(float(np.median(times_ms)), 3)
    line = {"name": f"selectors_scale/{name}_ms", "value": value, "goal": goal_ms, "ok": value <= goal_ms}
    print(json.dumps(line), flush=True)


def outcomes_of(ids: np.ndarray, visit: int, rng: np.random.Generator) -> list[Outcome]:
    """Groups of 8: half of them uniform; the level says how hard a task is."""
    kinds = itertools.cycle([("digit_sorting", level) for level in range(2, 12)])
    positives = rng.choice([0, 2, 4, 6, 8, 8], len(ids)).tolist()
    return [
        Outcome(task_id, visit, Verdict.KEPT, 8, positive, positive / 8, visit, *kind, signal=0 < positive < 8)
        for task_id, positive, kind in zip(ids.tolist(), positives, kinds, strict=False)
    ]


def make(name: str) -> Selector:
    """The selector with its default arguments, where it has them."""
    return make_selector(name, seed=0, **({"weights": WEIGHTS} if name == "weighted" else {}))


def bench_selector(name: str, store: TaskStore) -> None:
    """Times of one selector, a floor of a tenth included where it can have one."""
    selector = make(name)
    share = 0.0 if getattr(selector, "is_base_distribution", False) else 0.1
    selection = Selection(selector, 0, floor_share=share, new_first=True)
    rng = np.random.default_rng(0)
    report(f"{name}/first_draw_{NUM_DRAWN}", 150, lambda: selection.draw(NUM_DRAWN, store), 1)
    report(f"{name}/draw_{NUM_DRAWN}", 150, lambda: selection.draw(NUM_DRAWN, store))
    report(f"{name}/draw_1", 2, lambda: selection.draw(1, store))
    for visit in (0, 1):
        for ids in np.split(rng.permutation(NUM_TASKS), 100):
            for outcome in outcomes_of(ids, visit, rng):
                selection.observe(outcome)
    report(f"{name}/first_draw_{NUM_DRAWN}_all_seen", 150, lambda: selection.draw(NUM_DRAWN, store), 1)
    report(f"{name}/draw_{NUM_DRAWN}_all_seen", 150, lambda: selection.draw(NUM_DRAWN, store))
    more = outcomes_of(rng.permutation(NUM_TASKS)[:NUM_DRAWN], 2, rng)
    report(f"{name}/observe_{NUM_DRAWN}", 150, lambda: [selection.observe(outcome) for outcome in more])
    report(f"{name}/num_selectable", 150, lambda: selection.num_selectable(store))
    report(f"{name}/state_to_json", 1_000, lambda: json.dumps(selection.state_dict()))
    report(f"{name}/draw_{NUM_DRAWN}_after_appends", 150, lambda: append_and_draw(selection, store))


def append_and_draw(selection: Selection, store: TaskStore) -> None:
    """The appended tasks come first."""
    new = append(store)
    assert set(new) <= {draw.task_id for draw in selection.draw(NUM_DRAWN, store)}


def append(store: TaskStore) -> range:
    """A thousand tasks, with parents and metadata."""
    new = [Task(-1, "made", f"{i}+1=", str(i + 1), 1, (i,), {"kind": "sum"}) for i in range(NUM_APPENDED)]
    return store.append(new, step=1, version=1, generator="benchmark")


def bench_store(exclude: frozenset[str]) -> None:
    """Kinds and appends."""
    store = TaskStore(DigitSorting(), 0, NUM_TASKS, exclude)
    rng = np.random.default_rng(0)
    report("kinds_of_4096_new", 150, lambda: store.kinds(rng.integers(0, NUM_TASKS, NUM_DRAWN)))
    report("kinds_of_a_million_new", 5_000, lambda: store.kind_codes(np.arange(NUM_TASKS)), 1)
    report("kinds_of_a_million_known", 150, lambda: store.kind_codes(np.arange(NUM_TASKS)))
    report(f"append_{NUM_APPENDED}", 20, lambda: append(store))


def bench_outcomes() -> None:
    """Counts of a million tasks that were all visited three times: nothing repeats."""
    rng = np.random.default_rng(0)
    outcomes = TaskOutcomes(0.9, 0.98)
    for visit in range(3):
        for ids in np.split(rng.permutation(NUM_TASKS), 10):
            outcomes.observe_all(outcomes_of(ids, visit, rng))
    more = outcomes_of(rng.permutation(NUM_TASKS)[:NUM_DRAWN], 3, rng)
    report(f"outcomes_observe_all_{NUM_DRAWN}", 20, lambda: outcomes.observe_all(more))
    report("outcomes_snapshot", 100, outcomes.snapshot)
    report("outcomes_state_to_json", 1_000, lambda: json.dumps(outcomes.state_dict()))
    text = json.dumps(outcomes.state_dict())
    restored = TaskOutcomes(0.9, 0.98)
    report("outcomes_from_json", 1_000, lambda: restored.load_state_dict(json.loads(text)))
    print(json.dumps({"name": "selectors_scale/outcomes_state_mib", "value": round(len(text) / 2**20, 1)}))


def main() -> None:
    """Runs all of it."""
    exclude = make_frozen(DigitSorting(), 1, 512).hashes
    bench_store(exclude)
    bench_outcomes()
    for name in BUILT_IN_SELECTORS:
        bench_selector(name, TaskStore(DigitSorting(), 0, NUM_TASKS, exclude))


if __name__ == "__main__":
    main()
