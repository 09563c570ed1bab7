"""The real controller, ledger and schedules in a simulated run of 4,096 groups per step: who waits for whom.

    python tests/benchmarks/sim_controller.py [--tiny] [--only NAME]

A discrete-event simulation without models. A slot is one rollout that is being decoded; a group has G = 4, so that
4,096 groups fill the 16,384 slots. Lengths are log-normal (median 16 chunks of decoding, sigma 0.8, cut off at 256
chunks), a chunk takes one simulated second however many slots are busy, and a slot comes free when its rollout ends.
A group is generated when its last rollout has ended, is judged at once, and is filtered with probability 0.33. Freed
slots take the oldest rollout that waits. The controller is told once per chunk, as by the real engine.

Who trains when: under rounds and `streaming` nothing is generated while a step is trained; under `async` slots and
trainer are different devices. The train seconds per step are a quarter of what the slots need at least to generate a
step (generation bound), as much (balanced), and twice that (training bound).

One JSON line per number and one per run, each run in a process of its own. What a run prints:

    trainer_idle    share of the time in which no step is trained
    slot_use        busy slot-seconds of all slot-seconds, those during training included
    waste           share of the generated chunks whose group was not trained
    staleness       versions between a group's dispatch and its step, in the mean
    steps_per_hour  of simulated time
    tickets, cpu_secs, peak_mb  of the process; the goal is over a million tickets in 30 s and 200 MB

Where each loses:

- rounds: every round waits for its longest rollout while the slots empty: they are used 3% at factor 1, where a step
  is some five rounds, and 16% at factor 3, the best, where surplus is carried and a round serves two steps.
- in_order: a step trains its own groups only. Oversampling frees it of its stragglers, which become the next step's,
  but with a lookahead of one version not all slots find work: beside a trainer on other devices it is the slowest.
- ready_first, weight_fifo: nothing may become too old, so that a step waits for stragglers of earlier ones. The tail of
  the lengths (8 steps here) has to fit into `max_staleness_versions`, or the slots run dry; and where the trainer is
  slower than the slots, ready groups pile up as far as that allows, and are as old when they are trained.
- windowed: the sampler never waits, so that stragglers beyond the window and all that the trainer cannot take are
  wasted: in the async, training-bound case most of what is generated.

All of them lose their advantage over rounds as training takes over: streaming cannot be faster than the trainer.

The speed of a chunk is taken as constant. Where decoding gets faster as slots come free, the tail of a round costs
less than here: `--floor 0.3` gives a chunk with no busy slot 0.3 of the time of a full one.
"""

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections import defaultdict, deque
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from dynrl.config import RunConfig, from_mapping
from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import (
    Command,
    Dispatch,
    Draw,
    Drawn,
    Free,
    GroupsGenerated,
    GroupsJudged,
    Judgement,
    Resumed,
    StepTrained,
    Stop,
    TasksDrawn,
    Train,
)
from dynrl.rollout.ledger import Phase
from dynrl.types import Verdict

SIGMA, MEDIAN, LONGEST = 0.8, 16, 256  # of a rollout, in chunks
NUM_SAMPLES = 4  # rollouts of a group
REGIMES = {"generation_bound": 0.25, "balanced": 1.0, "training_bound": 2.0}
FACTORS = (1.0, 1.5, 2.0, 3.0, "adaptive")
STREAMING = ("in_order", "ready_first", "weight_fifo", "windowed")
AHEAD = {"in_order": 1, "ready_first": 8, "weight_fifo": 8, "windowed": 8}  # lookahead or staleness, in versions


class Size(NamedTuple):
    """Of the simulated run."""

    batch_size: int = 4096
    num_steps: int = 250
    num_slots: int = 16384
    drop_rate: float = 0.33


FULL, TINY = Size(), Size(64, 12, 256)


def lengths(rng: np.random.Generator, num: int, sigma: float) -> np.ndarray:
    """Chunks of so many rollouts."""
    return np.clip(np.ceil(MEDIAN * np.exp(sigma * rng.standard_normal(num))), 1, LONGEST).astype(np.int64)


def fewest_secs(size: Size, sigma: float) -> int:
    """Seconds in which the slots, never idle, generate the groups of a step with none to spare."""
    chunks = lengths(np.random.default_rng(0), 10**6, sigma).mean()
    return round(size.batch_size / (1 - size.drop_rate) * NUM_SAMPLES * chunks / size.num_slots)


class Slots:
    """Decodes rollouts in the order of their dispatch. Groups are named by their tickets, which are numbered so."""

    def __init__(self, num_slots: int, sigma: float) -> None:
        self.num_slots, self.free, self._sigma = num_slots, num_slots, sigma
        self.now = 0
        self._rng = np.random.default_rng(1)
        self._waiting = 0  # rollouts
        self._first = 0  # ticket of the group that is started next or partly
        self._ends = np.zeros(0, np.int64)  # of that group's rollouts
        self._chunks = np.zeros(0, np.int64)
        self._freed = np.zeros(LONGEST + 1, np.int64)  # by chunk, a ring
        self._finished: dict[int, list[np.ndarray]] = defaultdict(list)  # tickets by chunk
        self.chunks_of_group = np.zeros(1 << 16, np.int32)

    def dispatch(self, num: int) -> None:
        """Groups that follow the last."""
        self._waiting += num * NUM_SAMPLES

    @property
    def busy(self) -> int:
        """Rollouts that are being decoded."""
        return self.num_slots - self.free

    def start(self) -> None:
        """Fills free slots."""
        num = min(self.free, self._waiting)
        if not num:
            return
        chunks = lengths(self._rng, num, self._sigma)
        self.free -= num
        self._waiting -= num
        self._freed += np.roll(np.bincount(chunks, minlength=LONGEST + 1), self.now)
        chunks = np.concatenate([self._chunks, chunks])
        ends = np.concatenate([self._ends, chunks[len(self._ends) :] + self.now])
        groups = len(ends) // NUM_SAMPLES
        self._ends, self._chunks = ends[groups * NUM_SAMPLES :], chunks[groups * NUM_SAMPLES :]
        if not groups:
            return
        tickets = np.arange(self._first, self._first + groups)
        self._first += groups
        while len(self.chunks_of_group) < self._first:
            self.chunks_of_group = np.concatenate([self.chunks_of_group, np.zeros_like(self.chunks_of_group)])
        self.chunks_of_group[tickets] = chunks[: groups * NUM_SAMPLES].reshape(groups, NUM_SAMPLES).sum(1)
        last = ends[: groups * NUM_SAMPLES].reshape(groups, NUM_SAMPLES).max(1)
        order = np.argsort(last, kind="stable")
        last, tickets = last[order], tickets[order]
        bounds = [0, *(np.flatnonzero(np.diff(last)) + 1).tolist(), len(last)]
        for begin, end in pairwise(bounds):
            self._finished[int(last[begin])].append(tickets[begin:end])

    def decode(self) -> list[int]:
        """One chunk. Returns the groups that it finished."""
        self.now += 1
        at = self.now % len(self._freed)
        self.free += int(self._freed[at])
        self._freed[at] = 0
        finished = self._finished.pop(self.now, [])
        return np.concatenate(finished).tolist() if finished else []


def judgements(tickets: list[int], dropped: list[bool]) -> tuple[Judgement, ...]:
    """Without signal, or kept."""
    return tuple([
        Judgement(n, Verdict.FILTERED, "all_fail") if d else Judgement(n, Verdict.KEPT, "mixed")
        for n, d in zip(tickets, dropped, strict=True)
    ])  # fmt: skip


class Run:
    """One simulated run of the controller."""

    def __init__(self, config: RunConfig, size: Size, sigma: float, train_secs: int, floor: float) -> None:
        self.config, self.size, self.train_secs, self.floor = config, size, train_secs, floor
        self.overlaps = config.schedule.mode == "async"
        self.state = initial_state(config)
        self.slots = Slots(size.num_slots, sigma)
        self.commands: deque[Command] = deque()
        self.kept = np.zeros(0, bool)
        self._rng = np.random.default_rng(2)
        self.training_until: float | None = None
        self.secs = self.busy_secs = 0.0
        self.trained_chunks = self.dropped_chunks = self.staleness = self.trained = self.drawn = 0

    def apply(self, event: Any) -> None:
        """Tells the controller."""
        self.state, commands = apply(self.state, event)
        self.commands += commands

    def run(self) -> None:
        """To its end."""
        self.apply(Resumed())
        while not self.state.stopped:
            while self.commands:
                self._execute(self.commands.popleft())
                if self.state.stopped:
                    return
            self._chunk()

    def _execute(self, command: Command) -> None:
        match command:
            case Draw(num):
                draws = tuple([Drawn(n, 0) for n in range(self.drawn, self.drawn + num)])
                self.drawn += num
                self.apply(TasksDrawn(draws, num))
            case Dispatch(tickets):
                self.slots.dispatch(len(tickets))
            case Free(tickets):
                self.dropped_chunks += self._chunks(tickets)
            case Train(tickets):
                self.trained_chunks += self._chunks(tickets)
                self.trained += len(tickets)
                start, training = (
                    self.state.step * self.config.versions_per_step,
                    self.state.ledger.open[Phase.TRAINING],
                )
                self.staleness += sum(start - training[n].version for n in tickets)
                if self.overlaps:
                    self.training_until = self.secs + self.train_secs
                else:
                    self.apply(StepTrained((self.state.step + 1) * self.config.versions_per_step))
            case Stop(reason, failed):
                assert not failed, reason

    def _chunks(self, tickets: Any) -> int:
        return int(self.slots.chunks_of_group[np.asarray(tickets, np.int64)].sum())

    def _chunk(self) -> None:
        slots = self.slots
        slots.start()
        if not slots.busy:  # only the trainer is at work
            assert self.training_until is not None, "nothing is under way"
            self.secs = max(self.secs, self.training_until)
        else:
            secs = self.floor + (1 - self.floor) * slots.busy / slots.num_slots
            self.busy_secs += slots.busy * secs
            self.secs += secs
            done = slots.decode()
            if done:
                self.apply(GroupsGenerated(tuple(done)))
                self._judge(done)
        if self.training_until is not None and self.training_until <= self.secs:
            self.training_until = None
            self.apply(StepTrained((self.state.step + 1) * self.config.versions_per_step))

    def _judge(self, done: list[int]) -> None:
        while len(self.kept) <= max(done):
            self.kept = np.concatenate([self.kept, self._rng.random(1 << 16) >= self.size.drop_rate])
        dropped = ~self.kept[done]
        self.dropped_chunks += self._chunks(np.asarray(done)[dropped])
        self.apply(GroupsJudged(judgements(done, dropped.tolist())))

    def result(self, train_secs: float) -> dict[str, Any]:
        """What the lines print, for a step that takes so long to train."""
        training = self.state.step * train_secs
        secs = self.secs + (0 if self.overlaps else training)
        return {
            "train_secs": train_secs,
            "steps_per_hour": round(self.state.step / secs * 3600, 2),
            "trainer_idle": round(1 - training / secs, 3),
            "slot_use": round(self.busy_secs / (secs * self.size.num_slots), 3),
            "waste": round(1 - self.trained_chunks / (self.trained_chunks + self.dropped_chunks), 3),
            "staleness": round(self.staleness / self.trained, 3),
            "steps": self.state.step,
            "tickets": self.state.ledger.dispatched,
            "promoted": self.state.totals["promoted_groups"],
            "dropped": dict(self.state.ledger.dropped),
        }


def make_config(size: Size, name: str, mode: str, oversample: Any, ahead: int, **sampling: Any) -> RunConfig:
    """A run of this schedule whose budgets are out of reach."""
    schedule = {"name": name, "mode": mode, "max_lookahead_versions": ahead, "max_staleness_versions": ahead}
    budgets = {"max_num_gen_batches": 0, "max_replacements_per_slot": 10**6} | sampling
    return from_mapping(
        {
            "num_steps": size.num_steps,
            "num_prompts_per_step": size.batch_size,
            "num_generations_per_prompt": NUM_SAMPLES,
            "sampler": {"num_slots": size.num_slots},
            "schedule": schedule,
            "dynamic_sampling": {"oversample": oversample, **budgets},
        }
    )


def one(job: dict[str, Any]) -> None:
    """A run, in this process; prints its results by regime."""
    size, sigma, base = Size(*job["size"]), job["sigma"], fewest_secs(Size(*job["size"]), job["sigma"])
    gc.set_threshold(100_000, 50, 1000)  # nothing here makes cycles; looking for them is a fifth of the time
    begin = time.process_time()
    config = make_config(size, job["name"], job["mode"], job["oversample"], job["ahead"])
    # Where training and generation alternate, how long a step is trained changes nothing but the sum.
    regimes = [job["regime"]] if job["mode"] == "async" else list(REGIMES)
    run = Run(config, size, sigma, round(REGIMES[regimes[0]] * base), job["floor"])
    run.run()
    cpu = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    spent = {"cpu_secs": round(cpu, 1), "peak_mb": round(peak)}
    print(json.dumps({regime: run.result(round(REGIMES[regime] * base)) | spent for regime in regimes}))


def print_line(name: str, value: Any, goal: Any = None, ok: bool | None = None, **others: Any) -> None:
    """One line, with its goal if it has one."""
    judged = {} if ok is None else {"goal": goal, "ok": ok}
    print(json.dumps({"name": name, "value": value, **judged, **others}), flush=True)


def in_a_process(flag: str, job: Any) -> Any:
    """What a run prints, in a process of its own, so that its memory is its own."""
    command = [sys.executable, __file__, flag, json.dumps(job)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def jobs(size: Size, floor: float, only: str) -> list[dict[str, Any]]:
    """All runs: rounds by factor, each other schedule in both modes, the async one by regime."""
    shared = {"size": size, "sigma": SIGMA, "floor": floor}
    runs: list[dict[str, Any]] = [
        {"name": "rounds", "mode": "streaming", "oversample": factor, "ahead": 0} for factor in FACTORS
    ]
    for name in STREAMING:
        adaptive = {"name": name, "oversample": "adaptive", "ahead": AHEAD[name]}
        runs += [{**adaptive, "mode": "streaming"}, *({**adaptive, "mode": "async", "regime": r} for r in REGIMES)]
    return [shared | run for run in runs if only in run["name"]]


def simulate(size: Size, floor: float, only: str) -> None:
    """Every schedule, and how it compares with rounds."""
    speed: dict[tuple[str, str], float] = {}  # steps per hour by run and regime
    for job in jobs(size, floor, only):
        rounds = job["name"] == "rounds"
        run = f"rounds/{job['oversample']}" if rounds else f"{job['name']}/{job['mode']}"
        results = in_a_process("--one", job)
        for regime, result in results.items():
            speed[run, regime] = result["steps_per_hour"]
            print_line(f"sim/{run}/{regime}", result["steps_per_hour"], **result)
        spent = next(iter(results.values()))
        if size == FULL:
            least = spent["tickets"] > 10**6
            print_line(f"cpu_secs/{run}/{next(iter(results))}", spent["cpu_secs"], 30, least and spent["cpu_secs"] < 30)
            print_line(f"peak_mb/{run}/{next(iter(results))}", spent["peak_mb"], 200, spent["peak_mb"] < 200)
    for (run, regime), steps_per_hour in speed.items():
        if run.startswith("rounds") or ("rounds/1.0", regime) not in speed:
            continue
        best = max(speed[f"rounds/{factor}", regime] for factor in FACTORS if factor != "adaptive")
        for against, value, goal in (("best", best, 1.3), ("1", speed["rounds/1.0", regime], 1.5)):
            ratio, name = round(steps_per_hour / value, 2), f"against_rounds_{against}/{run}/{regime}"
            if run.endswith("async"):  # it has the trainer's devices beside the slots': no fair race
                print_line(name, ratio)
            else:
                print_line(name, ratio, goal, ratio >= goal)


EXHAUSTION = {(0.33, 3): 12_100, (0.6, 12): 1_340, (0.8, 32): 649}  # (p, N) and about how many slots to expect


def exhaust(job: dict[str, Any]) -> None:
    """Slots that use up their N replacements under in_order, everything taking no time; prints how many.

    The drop rate is p; with a spread, p - spread in one half of the steps and p + spread in the other.
    """
    size, p, limit = Size(*job["size"]), job["p"], job["limit"]
    rng = np.random.default_rng(3)
    state = initial_state(make_config(size, "in_order", "streaming", "none", 0, max_replacements_per_slot=limit,
                                      on_exhausted="short"))  # fmt: skip
    drawn, commands = 0, deque(apply(state, Resumed())[1])
    while not state.stopped:
        match commands.popleft():
            case Draw(num):
                event: Any = TasksDrawn(tuple([Drawn(n, 0) for n in range(drawn, drawn + num)]), num)
                drawn += num
            case Dispatch(tickets):
                rate = p + job["spread"] * (1 if tickets[0].step % 2 else -1)
                dropped = (rng.random(len(tickets)) < rate).tolist()
                event = GroupsJudged(judgements([t.ticket for t in tickets], dropped))
            case _:
                event = StepTrained((state.step + 1) * state.config.versions_per_step)
        commands += apply(state, event)[1]
    print(json.dumps([state.totals["exhausted_slots"], state.ledger.dispatched]))


def exhaustion(size: Size) -> None:
    """The formula p^(N + 1) * B * steps against the controller."""
    slots = size.batch_size * size.num_steps
    for p, limit in EXHAUSTION:
        lowest = p ** (limit + 1) * slots
        for spread in (0.0, 0.1):
            job = {"size": size, "p": p, "limit": limit, "spread": spread}
            count, tickets = in_a_process("--exhaust", job)
            expected = ((p - spread) ** (limit + 1) + (p + spread) ** (limit + 1)) / 2 * slots
            deviations = round((count - expected) / math.sqrt(expected), 2)
            name = f"exhausted/p={p},N={limit}" + (f",spread={spread}" if spread else "")
            ok = abs(deviations) <= 4 and count >= lowest - 4 * math.sqrt(lowest)
            print_line(name, count, round(expected, 1), ok, formula=round(lowest, 1), deviations=deviations,
                       tickets=tickets)  # fmt: skip


def main() -> None:
    """Everything, or one run of it where this is a child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="64 groups, 12 steps, 256 slots")
    parser.add_argument("--only", default="", help="schedules whose name holds this, or exhausted")
    parser.add_argument(
        "--floor", type=float, default=1.0, help="share of its time that a chunk takes with empty slots"
    )
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--exhaust", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one)
    if args.exhaust:
        return exhaust(args.exhaust)
    size = TINY if args.tiny else FULL
    train_secs = {regime: round(share * fewest_secs(size, SIGMA)) for regime, share in REGIMES.items()}
    print_line("settings", size._asdict(), sigma=SIGMA, median_chunks=MEDIAN, longest_chunks=LONGEST, ahead=AHEAD,
               floor=args.floor, train_secs=train_secs)  # fmt: skip
    if args.only != "exhausted":
        simulate(size, args.floor, args.only)
    if args.only in ("", "exhausted"):
        exhaustion(size)


if __name__ == "__main__":
    main()
