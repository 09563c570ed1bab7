"""What dynamic sampling costs beside generation, verification and training, in milliseconds per step.

    python tests/benchmarks/bench_overhead.py [--steps 200]

The quickstart's sizes: steps of 64 groups of 8 rollouts, 16 groups handed over at a time, half of them kept, so that
a step takes about eight rounds. Sampler and verifiers are scripted; filter, buffer, controller, statistics and what
the producer does around them are real. One JSON line per part and one for the sum, whose goal is 1% of a step of
200 ms. Lower quartiles over steps, so that the machine's other work counts little; device work is waited for at the
end of a step and booked on the buffer.
"""

import argparse
import json
import time
from collections import defaultdict, deque
from typing import Any

import jax
import numpy as np

from dynrl.config import MeshConfig, RunConfig, from_mapping
from dynrl.models import sharding
from dynrl.rollout.buffer import GroupBuffer
from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import Dispatch, Draw, Free, Resumed, StepTrained, Stop, TasksDrawn, Train
from dynrl.rollout.judge import Judge
from dynrl.rollout.rounds import RoundsProducer
from dynrl.rollout.statistics import RolloutStatistics
from dynrl.types import Groups, Payload, Reward, Scores, Status, Task

GOAL_MS = 2.0
P, G, L, T, B = 16, 8, 12, 12, 64


class ScriptedSampler:
    """Hands the requested groups over, P at a time, with one and the same payload."""

    def __init__(self, mesh: Any) -> None:
        def rows(*shape: int, dtype: Any = np.int32) -> Any:
            return sharding.place(np.ones((P, *shape), dtype), sharding.rows(mesh))

        self.payload = Payload(
            rows(L), rows(), rows(G, T), rows(G, T, dtype=np.float32), rows(G, T, dtype=bool), rows(G, T), rows(G),
            rows(G),
        )  # fmt: skip
        self._queue: list[int] = []

    @property
    def num_in_flight(self) -> int:
        return len(self._queue)

    def submit(self, requests: Any) -> None:
        self._queue += [r.ticket for r in requests]

    def poll(self) -> Groups:
        now, self._queue = self._queue[:P], self._queue[P:]
        return self.groups(now)

    def groups(self, tickets: list[int]) -> Groups:
        tickets_P = np.full(P, -1, np.int64)
        tickets_P[: len(tickets)] = tickets
        return Groups(
            self.payload, tickets_P, tickets_P >= 0, np.ones(P, bool), np.ones((P, G, T), np.int32),
            np.ones((P, G), np.int32), np.zeros((P, G), np.int32),
        )  # fmt: skip

    def cancel(self, tickets: Any) -> None: ...
    def update_weights(self, params: Any, version: int) -> None: ...


class ScriptedVerifiers:
    """A quarter of the groups all right, a quarter all wrong."""

    num_pending = 0

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._done: list[Scores] = []

    def submit(self, ticket: int, task: Task, texts: Any) -> None:
        right = self._rng.random(G) < 0.5 if self._rng.random() < 0.5 else np.full(G, self._rng.random() < 0.5)
        self._done.append(Scores(ticket, tuple(Reward(float(r)) for r in right), (Status.OK,) * G))

    def poll(self) -> list[Scores]:
        done, self._done = self._done, []
        return done


class ScriptedTexts:
    """A tokenizer and a task store that cost nothing."""

    def encode(self, text: str) -> list[int]:
        return [1]

    def decode_batch(self, tokens: Any, lengths: Any) -> list[str]:
        return [""] * len(lengths)

    def get(self, ids: Any) -> list[Task]:
        return [Task(i, "s", "1", "1") for i in ids]


class Clock:
    """Seconds by part; time spent in an inner part is not counted in the outer one."""

    def __init__(self) -> None:
        self.secs: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, part: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - begin
                self.secs[part] += spent - self._inner.pop()
                self._inner[-1] += spent

        return call


def measure(config: RunConfig, steps: int) -> list[dict[str, float]]:
    """Seconds by part, per step."""
    mesh, clock = sharding.make_mesh(MeshConfig()), Clock()
    sampler, verifiers, texts = ScriptedSampler(mesh), ScriptedVerifiers(), ScriptedTexts()
    judge = Judge(config.dynamic_sampling, "grpo", G)
    buffer = GroupBuffer(
        mesh, capacity=2 * B, batch_size=B, num_samples=G, max_prompt_tokens=L, max_completion_tokens=T
    )
    judge.warm_up(P, G)
    buffer.warm_up(sampler.groups([]))
    stats = RolloutStatistics("score")
    buffer.put = clock.timed("buffer", buffer.put)
    timed_judge: Any = clock.timed("judge", judge)
    timed_judge.host_mask = clock.timed("judge", judge.host_mask)
    producer = RoundsProducer(config, sampler, verifiers, timed_judge, buffer, texts, texts)  # type: ignore[arg-type]
    take, close_round = clock.timed("buffer", buffer.take), clock.timed("producer", producer.poll)
    advance, count = clock.timed("controller", apply), clock.timed("statistics", lambda f, *args: f(*args))
    wait, free = clock.timed("buffer", jax.block_until_ready), clock.timed("buffer", buffer.free)

    state, queue = apply(initial_state(config), Resumed())
    queue, rows, drawn = deque(queue), [], 0
    while True:
        if not queue:
            events = producer.poll() if sampler.num_in_flight else close_round()
            count(stats.judged, producer.take_judged())
            for event in events:
                state, commands = advance(state, event)
                queue += commands
            continue
        match queue.popleft():
            case Draw(num):
                draws = tuple((drawn + i, 0) for i in range(num))
                drawn += num
                state, commands = advance(state, TasksDrawn(draws, num))
                queue += commands
            case Dispatch(tickets):
                producer.dispatch(tickets)
            case Train(tickets):
                step, version = state.step, state.version
                count(stats.trained, [buffer.record(t) for t in tickets], step, version)
                batch = take(tickets)
                free(tickets)
                wait((batch, buffer.arrays))
                state, commands = advance(state, StepTrained(version + 1))
                queue += commands
                count(stats.row, state.ledger.totals(), 1, 0)
                rows.append(dict(clock.secs))
                clock.secs.clear()
            case Free(tickets):
                free(tickets)
            case Stop():
                return rows[steps // 10 :]


def main() -> None:
    """Parses the flags and prints the lines."""
    parser = argparse.ArgumentParser(description="overhead of dynamic sampling per step")
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    config = from_mapping(
        {"num_steps": steps, "sampler": {"num_slots": P * G}, "dynamic_sampling": {"max_num_gen_batches": 0}}
    )
    rows = measure(config, steps)
    for part in sorted(rows[0]):
        value = 1e3 * float(np.quantile([row[part] for row in rows], 0.25))
        print(json.dumps({"name": f"overhead/{part}_ms_per_step", "value": round(value, 3)}))
    total = 1e3 * float(np.quantile([sum(row.values()) for row in rows], 0.25))
    line = {"name": "overhead/total_ms_per_step", "value": round(total, 3), "goal": GOAL_MS, "ok": total <= GOAL_MS}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
