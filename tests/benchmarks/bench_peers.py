"""Seconds per GRPO step beside TRL's GRPOTrainer, by phase, on the CPU.

    python tests/benchmarks/bench_peers.py --peer-python PEER_VENV/bin/python [--blocks 5 --steps 8]

The peer's virtual environment holds `trl` and `datasets` with a CPU build of torch. Both sides make whole steps:
generate 512 completions (64 groups of 8, 12 new tokens each, prompts of 4 to 12 tokens padded to 12), reward them,
update once. They start from fresh random weights of one architecture (SwiGLU, tied embeddings, vocabulary 13) with
one learning rate, loss and reward function; neither filters. The stop token lies outside of the vocabulary, so that
every completion has the full length on both sides; the result says what was generated.

Each side is a process of its own that compiles, warms up and then waits. The sides take turns, a block of steps
each; a pair of blocks gives a ratio of medians, and the result is the median ratio. Alternation is not enough on a
busy machine: torch's threads meet at barriers and lose far more to foreign load than XLA's do (2 to 8 s a step on two
busy cores, as they sleep or spin there), which would flatter dynrl. So every block measures what other processes took
of the cores, and only quiet pairs count; without enough of them the result says so and is not ok. `cpu_secs` are the
seconds of all of a side's threads per step; under load they compare better than wall time does.

Prints JSON lines: the ratio, then one line per phase. Without a peer the value is "skipped".
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

GOAL = 0.7
NUM_GROUPS, NUM_SAMPLES, NUM_TOKENS, MAX_PROMPT_TOKENS = 64, 8, 12, 12
MODEL = {"num_layers": 2, "width": 64, "num_heads": 4, "head_dim": 16, "mlp_width": 256}
NUM_PEER_TASKS = 20_000
WARM_UP_STEPS = 10
MAX_OTHERS_FRAC = 0.05  # of the cores, in a quiet block
PHASES = ("generation", "reward", "backfill", "update", "rest")


Pair = dict[str, dict[str, float]]  # a block of each side


class Finished(Exception):
    """Raised where a side waits for its next block, when there is none."""


class Pacer:
    """A side's end of the protocol: a line with a number asks for as many steps, a line of JSON reports them.

    Whatever else the side prints goes to stderr.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._wanted, self._since = 0, 0.0
        self._steps: list[dict[str, float]] = []

    def say(self, message: dict[str, Any]) -> None:
        """Sends a line to the benchmark."""
        print(json.dumps(message), file=self._out, flush=True)

    def wait(self) -> None:
        """Waits for the next block. The clock starts when it returns. Raises Finished when there is none."""
        line = sys.stdin.readline().strip()
        if not line:
            raise Finished
        self._wanted, self._steps, self._since = int(line), [], time.perf_counter()

    def step(self, phases: dict[str, float], num_tokens: int) -> None:
        """Ends a step: seconds by phase (the rest is computed), and how many tokens were generated."""
        now = time.perf_counter()
        total = now - self._since
        rest = total - sum(phases.values())
        self._steps.append({**phases, "rest": rest, "step": total, "tokens": num_tokens})
        self._since = now
        if len(self._steps) == self._wanted:
            self.say({"steps": self._steps})
            self.wait()


# ------------------------------------------------------------------------------------------------ dynrl's side


def dynrl_config(flags: argparse.Namespace) -> Any:
    """The run's configuration: plain GRPO, no evaluation or checkpoint between the steps."""
    from dynrl.config import config_dict

    c = config_dict()
    c.num_steps, c.num_prompts_per_step, c.num_generations_per_prompt = 1_000_000, NUM_GROUPS, NUM_SAMPLES
    c.tensorboard, c.progress = False, "none"
    c.model.update({**MODEL, "num_kv_heads": flags.kv_heads, "activation": "silu", "gated_mlp": True})
    c.tasks.source_kwargs = {"min_length": 3, "max_length": MAX_PROMPT_TOKENS - 1}
    c.tasks.max_prompt_tokens, c.sampler.max_completion_tokens = MAX_PROMPT_TOKENS, NUM_TOKENS
    c.sampler.num_slots = flags.num_slots
    c.reward.verifier = "prefix_fraction"
    c.dynamic_sampling.enable = False
    c.train.learning_rate, c.train.num_microbatches = flags.learning_rate, flags.num_microbatches
    c.evaluation.num_tasks, c.evaluation.every_steps = 8, 0
    c.checkpoint.every_steps = 1_000_000
    return c


def pace(parts: Any, pacer: Pacer) -> None:
    """Hooks the pacer into a run's parts.

    A step ends where the loop has waited for the train step and reads the phases' seconds. The pause comes at the
    next poll, when the device is idle and the loop's own clock has been read.
    """
    producer, buffer, sampler = parts.producer, parts.buffer, parts.sampler
    take, take_secs, poll = buffer.take, producer.take_secs, producer.poll
    training_since: list[float] = []
    ended: list[dict[str, float]] = []
    tokens = [0]

    def timed_take(tickets: Any) -> Any:
        training_since.append(time.perf_counter())
        return take(tickets)

    def seen_take_secs() -> dict[str, float]:
        secs = take_secs()
        update = time.perf_counter() - training_since.pop()
        ended.append(
            {"generation": secs["sampler"], "reward": secs["reward"], "backfill": secs["backfill"], "update": update}
        )
        return secs

    def paced_poll() -> Any:
        if ended:
            before, tokens[0] = tokens[0], sampler.counters["tokens"]
            pacer.step(ended.pop(), tokens[0] - before)
        return poll()

    buffer.take, producer.take_secs, producer.poll = timed_take, seen_take_secs, paced_poll


def run_dynrl(flags: argparse.Namespace) -> None:
    """The process of dynrl's side."""
    pacer = Pacer()
    import jax

    import dynrl
    import dynrl.build
    import dynrl.build_tasks
    from dynrl.models.tokenizer import CharTokenizer

    def endless_tokenizer(kind: str, source: Any, *others: Any) -> CharTokenizer:
        tokenizer = CharTokenizer(source.alphabet)
        tokenizer.eos_id = tokenizer.vocab_size  # a token that the policy cannot emit
        return tokenizer

    def build(config: Any) -> Any:
        parts = dynrl.build.build(config)
        pace(parts, pacer)
        num_params = sum(x.size for x in jax.tree.leaves(parts.state.params))
        versions = {"jax": jax.__version__, "dynrl": dynrl.__version__}
        pacer.say({"num_params": num_params, "vocab_size": parts.tokenizer.vocab_size, "versions": versions})
        pacer.wait()
        return parts

    dynrl.build_tasks.make_tokenizer = endless_tokenizer
    with tempfile.TemporaryDirectory() as workdir, contextlib.suppress(Finished):
        dynrl.run(dynrl_config(flags), workdir, build_parts=build)


# ------------------------------------------------------------------------------------------------ the benchmark


def busy_secs() -> float:
    """Seconds that the machine's cores have been busy with anything, stolen time included. Linux only."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def await_quiet(deadline: float) -> None:
    """Waits for a second in which the cores idle, but not beyond the deadline (of time.monotonic)."""
    limit = MAX_OTHERS_FRAC * (os.cpu_count() or 1)
    while time.monotonic() < deadline:
        busy = busy_secs()
        time.sleep(1.0)
        if busy_secs() - busy <= limit:
            return


def session_secs(session: int) -> float:
    """CPU seconds of the processes of a session, with their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Side:
    """One side's process, in a session of its own."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self._name = name
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, **env}, start_new_session=True,
        )  # fmt: skip

    def send(self, line: str) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Waits for a line. Raises RuntimeError, with the end of its stderr, when the process has died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self._name} ended early:\n{self._errors.read()[-4000:]}")
        return json.loads(line)

    def block(self, num_steps: int) -> dict[str, float]:
        """Has it make steps, and returns the medians of their figures, and the cores' use meanwhile."""
        begin, busy, own = time.perf_counter(), busy_secs(), session_secs(self._process.pid)
        self.send(str(num_steps))
        steps = self.receive()["steps"]
        own, busy = session_secs(self._process.pid) - own, busy_secs() - busy
        medians = {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        cores = (os.cpu_count() or 1) * (time.perf_counter() - begin)
        return {**medians, "cpu": own / num_steps, "others": max(busy - own, 0.0) / cores}

    def close(self) -> None:
        """Ends the process: without a next block it stops by itself."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._errors.close()


def peer_available(python: str) -> bool:
    """Whether the peer's interpreter finds what its side imports."""
    names = ("trl", "torch", "transformers", "datasets")
    code = f"import importlib.util as u; raise SystemExit(not all(u.find_spec(n) for n in {names}))"
    try:
        return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError:
        return False


def peer_spec(flags: argparse.Namespace) -> dict[str, Any]:
    """What the peer's side is told: the model, the batch and the tasks, which dynrl's own source makes."""
    from dynrl.tasks.procedural import DigitSorting

    source = DigitSorting(3, MAX_PROMPT_TOKENS - 1)
    tasks = [source.task(0, i) for i in range(NUM_PEER_TASKS)]
    return {
        **MODEL,
        "num_kv_heads": flags.kv_heads,
        "alphabet": "".join(sorted(source.alphabet)),
        "num_groups": NUM_GROUPS,
        "num_samples": NUM_SAMPLES,
        "num_tokens": NUM_TOKENS,
        "learning_rate": flags.learning_rate,
        "num_microbatches": flags.peer_microbatches,
        "num_threads": len(os.sched_getaffinity(0)),
        "prompts": [task.prompt for task in tasks],
        "answers": [task.answer for task in tasks],
    }


def start_sides(flags: argparse.Namespace) -> dict[str, Side]:
    """Starts both processes."""
    own = [sys.executable, __file__, *sys.argv[1:], "--side"]
    peer = [flags.peer_python, str(Path(__file__).with_name("peer_trl.py"))]
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": wait_policy()}
    return {"dynrl": Side("dynrl", own, {"JAX_PLATFORMS": "cpu"}), "trl": Side("trl", peer, env)}


def wait_policy() -> str:
    """How torch's threads wait: asleep, which foreign load hurts least, unless the environment says otherwise."""
    return os.environ.get("OMP_WAIT_POLICY", "PASSIVE")


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs both sides in turn and returns the result lines."""
    sides = start_sides(flags)
    try:
        sides["trl"].send(json.dumps(peer_spec(flags)))
        facts = {name: side.receive() for name, side in sides.items()}
        for key in ("num_params", "vocab_size"):
            if facts["dynrl"][key] != facts["trl"][key]:
                raise RuntimeError(f"the sides differ in {key}: {facts['dynrl'][key]} and {facts['trl'][key]}")
        for side in sides.values():
            side.block(WARM_UP_STEPS)
        pairs: list[Pair] = []
        deadline = time.monotonic() + flags.max_wait_secs
        while len(pairs) < flags.blocks or (sum(map(quiet, pairs)) < flags.blocks and time.monotonic() < deadline):
            await_quiet(deadline)
            pairs.append({name: side.block(flags.steps) for name, side in sides.items()})
    finally:
        for side in sides.values():
            side.close()
    return result_lines(flags, facts, pairs)


def quiet(pair: Pair) -> bool:
    """Whether other processes left the cores to both sides."""
    return max(block["others"] for block in pair.values()) <= MAX_OTHERS_FRAC


def result_lines(flags: argparse.Namespace, facts: dict[str, Any], pairs: list[Pair]) -> list[dict[str, Any]]:
    """The ratio of whole steps, and a line per phase; from the quiet pairs where there are enough."""
    num_pairs, found = len(pairs), [pair for pair in pairs if quiet(pair)]
    enough = len(found) >= flags.blocks
    pairs = found if enough else pairs

    def median(name: str, key: str) -> float:
        return statistics.median(pair[name].get(key, 0.0) for pair in pairs)

    ratios = [pair["dynrl"]["step"] / pair["trl"]["step"] for pair in pairs]
    value = statistics.median(ratios)
    rows = NUM_GROUPS * NUM_SAMPLES
    lengths = {name: median(name, "tokens") / rows for name in facts}
    result = {
        "name": "step_secs_vs_trl",
        "value": round(value, 3),
        "goal": GOAL,
        "ok": value <= GOAL and enough,
        "quiet": enough,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "others_frac": [round(max(block["others"] for block in pair.values()), 3) for pair in pairs],
        "num_pairs": num_pairs,
        "dynrl_secs": round(median("dynrl", "step"), 4),
        "trl_secs": round(median("trl", "step"), 4),
        "cpu_secs": {name: round(median(name, "cpu"), 4) for name in facts},
        "mean_generated_tokens": {name: round(length, 3) for name, length in lengths.items()},
        "equal_work": abs(lengths["dynrl"] / lengths["trl"] - 1) <= 0.02,
        "num_params": facts["dynrl"]["num_params"],
        "kv_heads": flags.kv_heads,
        "num_microbatches": {"dynrl": flags.num_microbatches, "trl": flags.peer_microbatches},
        "num_slots": flags.num_slots,
        "peer_wait_policy": wait_policy(),
        "versions": {**facts["dynrl"]["versions"], **facts["trl"]["versions"]},
    }
    phases = [
        {
            "name": f"{phase}_secs_vs_trl",
            "value": round(median("dynrl", phase) / median("trl", phase), 3) if median("trl", phase) else None,
            "dynrl_secs": round(median("dynrl", phase), 4),
            "trl_secs": round(median("trl", phase), 4),
        }
        for phase in PHASES
    ]
    return [result, *phases]


def main() -> None:
    """Parses the flags and prints the lines."""
    parser = argparse.ArgumentParser(description="dynrl's GRPO step beside that of TRL's GRPOTrainer")
    parser.add_argument("--peer-python", default="", help="interpreter of the environment that holds trl")
    parser.add_argument("--blocks", type=int, default=5, help="quiet pairs of blocks that are wanted")
    parser.add_argument("--max-wait-secs", type=float, default=120.0, help="how long quiet pairs are sought")
    parser.add_argument("--steps", type=int, default=8, help="steps in a block")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--num-microbatches", type=int, default=4, help="dynrl's train.num_microbatches")
    parser.add_argument("--peer-microbatches", type=int, default=1, help="TRL's gradient_accumulation_steps")
    parser.add_argument("--num-slots", type=int, default=512, help="dynrl's sampler.num_slots")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.side:
        run_dynrl(flags)
    elif not peer_available(flags.peer_python):
        print(json.dumps({"name": "step_secs_vs_trl", "value": "skipped", "goal": GOAL}))
    else:
        for line in measure(flags):
            print(json.dumps(line))


if __name__ == "__main__":
    main()
