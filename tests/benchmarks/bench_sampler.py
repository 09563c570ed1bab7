"""The slot engine: how busy its slots are, how fast it decodes beside others, what it adds to a bare decode step.

    python tests/benchmarks/bench_sampler.py [--transformers-python VENV/bin/python] [--tunix-python VENV/bin/python]

Prints JSON lines. Ratios are taken within this run, on the same weights, prompts and lengths: the sides take turns,
`--repeats` times, and a ratio is the median of those turns' ratios, since a shared machine's speed drifts. A peer's
virtual environment holds `transformers` with a CPU build of torch, or `google-tunix`; without one its lines say
"skipped".

Requests have log-normal completion lengths (sigma 0.8, median a quarter of the maximum, cut there; seed 0), fixed by
`max_tokens` with the stop token ignored, so that every side makes the same tokens. Peers decode batches of S rows,
each to its longest, as trainers use them: neither `generate` nor Tunix's sampler refills a row.
"""

import argparse
import dataclasses
import heapq
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.compile_counter import CompileCounter
from dynrl.config import MeshConfig, ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import init_params
from dynrl.models.policy import completion_logprobs, decode_step
from dynrl.sampling.distribution import Settings, sample
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.host_arrays import prefill_array
from dynrl.sampling.options import EngineOptions
from dynrl.types import Payload, Purpose, Request, SamplingParams

VOCAB, EOS, PAD, PROMPT, SEED = 512, 1, 0, 16, 7


def say(name: str, value: Any, goal: float | None = None, ok: bool | None = None, **more: Any) -> None:
    """One result line."""
    row: dict[str, Any] = {"name": name, "value": round(value, 5) if isinstance(value, float) else value}
    if goal is not None:
        row |= {"goal": goal, "ok": value >= goal if ok is None else ok}
    print(json.dumps(row | more), flush=True)


def model(width: int, **more: Any) -> ModelConfig:
    """A Llama of 4 layers."""
    heads = width // 32
    return ModelConfig(
        num_layers=4,
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=32,
        mlp_width=4 * width,
        rope_base=1e6,
        **more,
    )


def weights(config: ModelConfig) -> Any:
    """Random weights, large enough that completions vary."""
    params = init_params(config, VOCAB, jax.random.key(SEED))
    return jax.tree.map(lambda x: np.asarray(x) * (4 if x.ndim > 1 else 1), params)


def lengths(n: int, longest: int) -> np.ndarray:
    """Log-normal completion lengths."""
    draws = np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, n)
    return np.clip(np.round(draws), 1, longest).astype(int)


def requests(max_tokens: Sequence[int] | np.ndarray, num_samples: int = 1, temperature: float = 1.0) -> list[Request]:
    """Prompts of PROMPT tokens, one per length."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(2, VOCAB, (len(max_tokens), PROMPT)).tolist()
    return [
        Request(i, i, 0, Purpose.TRAIN, prompt, num_samples, SamplingParams(temperature, int(n), ignore_eos=True))
        for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True))
    ]


def make_engine(config: ModelConfig, params: Any, slots: int, longest: int, **options: Any) -> SlotEngine:
    """Warm and with weights."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    o: dict[str, Any] = {"num_slots": slots, "max_prompt_tokens": PROMPT, "max_completion_tokens": longest} | options
    engine = SlotEngine(config, mesh, EngineOptions(**o), eos_id=EOS, pad_id=PAD, vocab_size=VOCAB, seed=SEED)
    placed = jax.tree.map(sharding.place, params, sharding.param_shardings(params, mesh))
    engine.update_weights(placed, 0)
    engine.warm_up()
    return engine


def drain(engine: SlotEngine, batch: Sequence[Request]) -> list[Any]:
    """Submits, and polls to the end, for as many groups at once as a poll returns, as rounds do."""
    engine.submit(batch)
    groups = []
    while engine.num_in_flight:
        found = engine.poll(engine.groups_per_poll(batch[0].num_samples))
        groups += [] if found is None else [found]
    return groups


def timed(run: Callable[[], Any]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, np.ndarray]:
    """Seconds of each, taking turns."""
    secs = [[timed(run) for run in runs.values()] for _ in range(repeats)]
    return dict(zip(runs, np.transpose(secs), strict=True))


def median(values: np.ndarray) -> float:
    """As a float."""
    return float(np.median(values))


def counted(engine: SlotEngine, run: Callable[[], Any]) -> dict[str, int]:
    """What the engine's counters grew by."""
    before = engine.counters
    run()
    return {k: v - before[k] for k, v in engine.counters.items()}


def lockstep(engine: SlotEngine, batch: Sequence[Request], slots: int) -> None:
    """Rounds of S rows, each to its longest: the engine without refilling, a single chunk per round."""
    for i in range(0, len(batch), slots):
        drain(engine, batch[i : i + slots])


class Bare:
    """The decode step alone, in a jitted loop at the engine's shapes, all rows in step.

    The model, a draw and its log-prob; without the draw, the model and the largest logit.
    """

    def __init__(self, engine: SlotEngine, config: ModelConfig, longest: int, *, draw: bool = True) -> None:
        slots = engine.arrays.state.slots
        self._params, self._steps, self._slots = engine.arrays.params, longest, jax.tree.map(jnp.copy, slots)
        self._layers = jax.tree.map(jnp.zeros_like, engine.arrays.state.layers)
        ones, none = jnp.ones(slots.token_S.shape), jnp.zeros_like(slots.token_S)
        settings = Settings(ones, none, ones, jnp.zeros(ones.shape))

        def loop(params: Any, layers: Any, slots: Any, steps: Any) -> Any:
            def body(i: Any, carry: Any) -> Any:
                token, layers, logp = carry
                position = jnp.full(token.shape, PROMPT - 1 + i)
                logits, layers = decode_step(params, token, position, layers, config)
                if not draw:
                    best = jnp.max(logits, axis=-1, keepdims=True)
                    ids = jnp.arange(VOCAB, dtype=jnp.int32)[None]
                    return jnp.min(jnp.where(logits == best, ids, VOCAB), axis=-1), layers, logp
                drawn = sample(logits, slots.keys_S2, position, settings)
                return drawn.token_N, layers, logp + drawn.logp_N

            return jax.lax.fori_loop(0, steps, body, (slots.token_S, layers, jnp.zeros(ones.shape)))

        self._loop = jax.jit(loop, donate_argnums=1, compiler_options=engine._device.compiler_options)
        self.run()

    def run(self, times: int = 1) -> None:
        """`times` sequences of `longest` steps."""
        for _ in range(times):
            token, self._layers, _ = self._loop(self._params, self._layers, self._slots, self._steps)
            jax.block_until_ready(token)


def list_scheduling(counts: Sequence[int], slots: int) -> float:
    """The utilisation of slots that are refilled at once, in order: the most that an engine can reach."""
    busy = [0] * slots
    for n in counts:
        heapq.heapreplace(busy, busy[0] + int(n))
    return sum(counts) / (slots * max(busy))


def utilisation(args: argparse.Namespace) -> None:
    """Slot-steps that made a token, at two depths of the queue, beside lock-step rounds.

    Once over 4 S and 16 S requests to the last, where the longest ones run alone at the end; once while the queue is
    kept at that depth.
    """
    config, s, t = model(64), 32, 128
    params = weights(config)
    engine = make_engine(config, params, s, t)
    rounds = make_engine(config, params, s, t, chunk_steps=t)
    for depth, goal in ((4, 0.80), (16, 0.93)):
        counts = lengths(depth * s, t)
        batch = requests(counts)
        c = counted(engine, partial(drain, engine, batch))
        bound = list_scheduling(counts.tolist(), s)
        more = {"refilled_at_once": round(bound, 4), "slots": s, "prompt": PROMPT, "longest": t}
        say(f"utilisation_of_{depth}_s_requests", c["tokens"] / c["slot_steps"], goal, **more)
        c = counted(rounds, partial(lockstep, rounds, batch, s))
        say(f"utilisation_of_{depth}_s_requests_lockstep", c["tokens"] / c["slot_steps"])
        c = counted(engine, partial(keep_deep, engine, requests(lengths(64 * s, t)), depth * s, s))
        say(f"utilisation_at_depth_{depth}_s", c["tokens"] / c["slot_steps"], goal)
    groups = make_engine(config, params, s, t, group_sizes=(16,))
    c = counted(groups, partial(drain, groups, requests(lengths(32, t), 16)))
    say("utilisation_of_16_s_requests_in_groups_of_16", c["tokens"] / c["slot_steps"])


def keep_deep(engine: SlotEngine, batch: Sequence[Request], depth: int, slots: int) -> None:
    """Keeps `depth` requests waiting until the batch is used up, then cancels the rest."""
    left, open_ = list(batch), set()
    while left:
        more = depth + slots - engine.num_in_flight
        now, left = left[:more], left[more:]
        engine.submit(now)
        open_ |= {r.ticket for r in now}
        groups = engine.poll()
        if groups is not None:
            open_ -= set(groups.tickets_P[groups.valid_P].tolist())
    engine.cancel(sorted(open_))
    engine.poll()


def speed(args: argparse.Namespace) -> None:
    """Tokens per second beside lock-step rounds and the bare step; prefill as its own line."""
    config, s, t = model(128), 32, 128
    params = weights(config)
    batch = requests(lengths(16 * s, t))
    tokens = sum(r.params.max_tokens for r in batch)
    engine = make_engine(config, params, s, t)
    rounds = make_engine(config, params, s, t, chunk_steps=t)
    bare, logits = Bare(engine, config, t), Bare(engine, config, t, draw=False)
    runs: dict[str, Callable[[], Any]]
    runs = {"engine": partial(drain, engine, batch), "lockstep": partial(lockstep, rounds, batch, s)}
    c = counted(engine, runs["engine"])
    busy, times = c["tokens"] / c["slot_steps"], round(c["slot_steps"] / s / t)  # as long as the engine takes
    runs |= {"bare": partial(bare.run, times), "logits": partial(logits.run, times)}
    runs["prefill"] = partial(prefill_only, engine, len(batch))
    secs = in_turns(runs, args.repeats)
    shape: dict[str, Any] = {"slots": s, "width": 128, "prompt": PROMPT, "longest": t, "tokens": tokens}
    say("tokens_per_sec", tokens / median(secs["engine"]), **shape)
    lockstep_speed = round(tokens / median(secs["lockstep"]))
    say("over_lockstep", median(secs["lockstep"] / secs["engine"]), 2.5, lockstep_tokens_per_sec=lockstep_speed)
    decoding = secs["engine"] - secs["prefill"]
    for name, engine_secs, side in (
        ("over_bare_step", secs["engine"], "bare"),
        ("over_bare_step_prefill_apart", decoding, "bare"),
        ("over_bare_step_without_draw", secs["engine"], "logits"),
    ):
        raw = times * s * t / secs[side]
        more: dict[str, Any] = {"utilisation": round(busy, 4), "bare_tokens_per_sec": round(median(raw))}
        say(name, median(tokens / engine_secs / (busy * raw)), 0.92 if side == "bare" else None, **more)
    say("prefill_tokens_per_sec", len(batch) * (PROMPT - 1) / median(secs["prefill"]))


def prefill_only(engine: SlotEngine, num_prompts: int) -> None:
    """The engine's prefill programs for so many prompts."""
    bucket, device, params = PROMPT - 1, engine._device, engine.arrays.params
    width = engine._width(bucket)
    group = prefill_array([], (), bucket, width, 1, 2 * width)
    for _ in range(-(-num_prompts // width)):
        device.prefill(params, group)
    jax.block_until_ready(device.state.prefix)


def equal_lengths(args: argparse.Namespace) -> None:
    """64 new tokens after 16, and the log-normal lengths, beside transformers and Tunix."""
    for width, goal in ((128, 1.8), (256, 1.4)):
        config, s, t = model(width), 32, 64
        params = weights(config)
        engine = make_engine(config, params, s, t)
        batch = requests([t] * s)
        peers(args, f"equal_width_{width}", config, params, s, [t] * s, partial(drain, engine, batch), goal)
    config, s, t = model(128), 32, 128
    params = weights(config)
    engine, batch = make_engine(config, params, s, t), requests(lengths(16 * s, t))
    counts = [r.params.max_tokens for r in batch]
    peers(args, "mixed_width_128", config, params, s, counts, partial(drain, engine, batch), 6.0)


def peers(
    args: argparse.Namespace, name: str, config: ModelConfig, params: Any, slots: int, counts: Sequence[int],
    run: Callable[[], Any], goal: float,
) -> None:  # fmt: skip
    """One peer after the other takes turns with the engine."""
    tokens = int(sum(counts))
    for peer, python in PEERS:
        python = getattr(args, python)
        if not python:
            say(f"{name}_over_{peer}", "skipped")
            continue
        with Peer(python, peer, config, params, slots, counts) as other:
            ours, theirs = np.transpose([(timed(run), other.seconds()) for _ in range(args.repeats)])
        speeds = {"tokens_per_sec": ours, f"{peer}_tokens_per_sec": theirs}
        more: dict[str, Any] = {key: round(tokens / median(secs)) for key, secs in speeds.items()}
        say(f"{name}_over_{peer}", median(theirs / ours), goal, **more)


PEERS = (("transformers", "transformers_python"), ("tunix", "tunix_python"), ("tunix_greedy", "tunix_python"))


class Peer:
    """A peer's process (`peer_sampler.py`): compiles, warms up, then makes all completions each time it is asked."""

    def __init__(
        self, python: str, peer: str, config: ModelConfig, params: Any, slots: int, counts: Sequence[int]
    ) -> None:  # fmt: skip
        flat = {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
        self._file = Path(tempfile.mkstemp(suffix=".npz")[1])
        prompts = np.array([r.prompt for r in requests(counts)])
        np.savez(self._file, **flat, __prompts=prompts, __counts=np.array(counts))
        script = Path(__file__).parent / "peer_sampler.py"
        spec = json.dumps({**dataclasses.asdict(config), "slots": slots, "vocab": VOCAB})
        self._process = subprocess.Popen(
            [python, str(script), peer, str(self._file), spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> "Peer":
        self.seconds()  # warm-up
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()
        self._file.unlink()

    def seconds(self) -> float:
        """Of one whole pass."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; its messages are above")
        return float(line)


def sharing(args: argparse.Namespace) -> None:
    """Prompt tokens prefilled for groups of 16, as groups and as single requests."""
    config, s, t = model(64), 32, 16
    engine = make_engine(config, weights(config), s, t, group_sizes=(1, 16))
    shared = counted(engine, partial(drain, engine, requests([4] * 64, 16)))["prefill_tokens"]
    single = counted(engine, partial(drain, engine, requests([4] * 64 * 16)))["prefill_tokens"]
    say("prefill_shared_over_single", shared / single, 1 / 12, ok=shared / single <= 1 / 12)


def identity(args: argparse.Namespace) -> None:
    """Rollouts of 10,000 whose tokens change with the number of slots, the chunk and the order of requests (law 6)."""
    config, t, n = model(64), 32, 10_000
    params = weights(config)
    batch = requests(lengths(n, t))
    tokens: list[dict[int, bytes]] = []
    for slots, chunk, order in ((32, 16, 1), (32, 5, -1), (24, 16, -1)):
        engine = make_engine(config, params, slots, t, chunk_steps=chunk)
        tokens.append({})
        for groups in drain(engine, batch[::order]):
            for i in np.flatnonzero(groups.valid_P):
                tokens[-1][int(groups.tickets_P[i])] = groups.host_tokens_PGT[i].tobytes()
    first, same_slots, other_slots = tokens
    for name, other, goal in (("same", same_slots, 0), ("other", other_slots, 1)):
        changed = sum(first[i] != other[i] for i in range(n))
        say(f"rollouts_changed_at_{name}_number_of_slots", changed, goal, ok=changed <= goal, rollouts=n)


def compiles(args: argparse.Namespace) -> None:
    """Programs compiled over 600 random requests, with cancels and new weights."""
    config, s, t = model(64), 16, 24
    engine = make_engine(config, weights(config), s, t, weight_update="in_flight", group_sizes=(1, 4))
    counter, rng, sent, open_ = CompileCounter(), np.random.default_rng(0), 0, set()
    while sent < 600 or engine.num_in_flight:
        for _ in range(int(rng.integers(0, 6)) if sent < 600 else 0):
            options = {"top_k": int(rng.choice([0, 5])), "top_p": float(rng.choice([1.0, 0.9]))}
            p = SamplingParams(float(rng.choice([0.0, 0.8, 1.0])), int(rng.integers(1, t + 1)), **options)
            prompt = rng.integers(2, VOCAB, rng.integers(1, PROMPT + 1)).tolist()
            engine.submit([Request(sent, sent, 0, Purpose.TRAIN, prompt, int(rng.choice([1, 4])), p)])
            open_.add(sent)
            sent += 1
        if open_ and rng.random() < 0.1:
            engine.cancel([int(rng.choice(sorted(open_)))])
        if rng.random() < 0.2:
            engine.update_weights(engine.arrays.params, sent)
        groups = engine.poll()
        if groups is not None:
            open_ -= set(groups.tickets_P[groups.valid_P].tolist())
    say("compiles_after_warm_up", counter.count, 0, ok=counter.count == 0, requests=sent)


def log_probs(args: argparse.Namespace) -> None:
    """Recorded against recomputed log-probs, float32, bfloat16 and an int8 cache, over 200 rollouts."""
    base, s, t = model(128), 32, 64
    params = weights(base)
    for name, config, kv, goal in (
        ("float32", base, "auto", 1e-4),
        ("bfloat16", dataclasses.replace(base, dtype="bfloat16"), "auto", None),
        ("int8_cache", base, "int8", None),
    ):
        engine = make_engine(config, params, s, t, kv_dtype=kv)
        recompute = jax.jit(partial(completion_logprobs, config=config))
        errors = []
        for groups in drain(engine, requests(lengths(200, t))):
            payload = Payload(*(np.asarray(x) for x in groups.payload))
            logp, _ = recompute(params, payload)
            errors.append(np.abs(np.asarray(logp) - payload.logp_PGT)[payload.mask_PGT & groups.valid_P[:, None, None]])
        error = np.concatenate(errors)
        more = {"mean": float(error.mean()), "tokens": error.size}
        say(f"logp_error_{name}", float(error.max()), goal, ok=goal is None or float(error.max()) <= goal, **more)


def greedy(args: argparse.Namespace) -> None:
    """Greedy tokens beside transformers' on a tiny Llama, 64 prompts of 1 to 16 tokens."""
    if not args.transformers_python:
        say("greedy_equal_to_transformers", "skipped")
        return
    config, s, t = model(64, tie_embeddings=True), 16, 24
    params = weights(config)
    engine = make_engine(config, params, s, t)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, VOCAB, rng.integers(1, PROMPT + 1)).tolist() for _ in range(64)]
    batch = [
        Request(i, i, 0, Purpose.EVAL, p, 1, SamplingParams(0.0, t, ignore_eos=True)) for i, p in enumerate(prompts)
    ]
    ours: dict[int, list[int]] = {}
    for groups in drain(engine, batch):
        for i in np.flatnonzero(groups.valid_P):
            ours[int(groups.tickets_P[i])] = groups.host_tokens_PGT[i, 0].tolist()
    flat = {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    file = Path(tempfile.mkstemp(suffix=".npz")[1])
    np.savez(file, **flat)
    spec = json.dumps({**dataclasses.asdict(config), "prompts": prompts, "new": t, "vocab": VOCAB})
    script = str(Path(__file__).parent / "peer_sampler.py")
    out = subprocess.run(
        [args.transformers_python, script, "greedy", str(file)], input=spec, capture_output=True, text=True, check=True
    )
    file.unlink()
    equal = sum(ours[i] == row for i, row in enumerate(json.loads(out.stdout.splitlines()[-1])))
    say("greedy_equal_to_transformers", equal, 64)


PARTS = {f.__name__: f for f in (utilisation, speed, sharing, identity, compiles, log_probs, greedy, equal_lengths)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers-python", default="")
    parser.add_argument("--tunix-python", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    for part in arguments.only:
        PARTS[part](arguments)
