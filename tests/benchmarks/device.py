"""One pass over an accelerator: are the numbers right, and how far is the speed from what the chip can do?

    python tests/benchmarks/device.py [--tiny]

Prints JSON lines: correctness first, then decoding against the measured memory bandwidth, and the train step against
the measured matmul rate. `--tiny` makes everything small, to try the script on a CPU.
"""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dynrl
from dynrl.build import build, warm_up
from dynrl.compile_counter import CompileCounter
from dynrl.config import MeshConfig, ModelConfig, RunConfig, from_mapping
from dynrl.models import sharding
from dynrl.models.decoder import init_params
from dynrl.models.policy import completion_logprobs
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.options import EngineOptions
from dynrl.types import Groups, Payload, Purpose, Request, SamplingParams

EOS, PAD = 1, 0


def say(name: str, value: Any, **more: Any) -> None:
    """One result line."""
    print(
        json.dumps({"name": name, "value": round(value, 5) if isinstance(value, float) else value} | more), flush=True
    )


def least_secs(run: Callable[[], Any], repeats: int = 5) -> float:
    """The fastest of some calls, after one that compiles."""
    jax.block_until_ready(run())
    secs = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        secs.append(time.perf_counter() - begin)
    return min(secs)


def bandwidth(num_bytes: int) -> float:
    """Bytes per second that an elementwise program reads and writes."""
    x = jnp.zeros(num_bytes // 2, jnp.bfloat16)
    return 2 * x.nbytes / least_secs(partial(jax.jit(lambda x: x + 1), x))


def matmul_rate(size: int, dtype: str) -> float:
    """FLOP per second of square matmuls."""
    x = jnp.ones((size, size), dtype)
    times = 8

    def run(x: Any) -> Any:
        return jax.lax.fori_loop(0, times, lambda _, y: jnp.dot(x, y) * (1 / size), x)

    return 2 * times * size**3 / least_secs(partial(jax.jit(run), x))


def make_engine(
    config: ModelConfig, vocab: int, slots: int, prompt: int, longest: int, **options: Any
) -> tuple[SlotEngine, Any]:
    """Warm, with random weights, which come back too."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    sizes = EngineOptions(slots, prompt, longest, **options)
    engine = SlotEngine(config, mesh, sizes, eos_id=EOS, pad_id=PAD, vocab_size=vocab, seed=7)
    params = jax.jit(partial(init_params, config, vocab))(jax.random.key(0))
    engine.update_weights(params, 0)
    engine.warm_up()
    return engine, params


def requests(num: int, prompt: int, lengths: np.ndarray, vocab: int, temperature: float = 1.0) -> list[Request]:
    """Random prompts; completions of given lengths."""
    prompts = np.random.default_rng(1).integers(2, vocab, (num, prompt)).tolist()
    params = [SamplingParams(temperature, int(n), ignore_eos=True) for n in lengths]
    return [Request(i, i, 0, Purpose.TRAIN, prompts[i], 1, params[i]) for i in range(num)]


def drain(engine: SlotEngine, batch: list[Request]) -> list[Groups]:
    """Everything that a batch gives."""
    engine.submit(batch)
    found = []
    while engine.num_in_flight:
        groups = engine.poll(engine.groups_per_poll(1))
        found += [] if groups is None else [groups]
    return found


def correctness(tiny: bool) -> None:
    """Recorded against recomputed log-probs, the same tokens again in another order, compiles, greedy tokens."""
    vocab, slots, prompt, longest = 512, 32, 16, 16 if tiny else 64
    base = ModelConfig(num_layers=2 if tiny else 4, width=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_width=256)
    for dtype, kv in (("float32", "auto"), ("bfloat16", "auto"), ("float32", "int8")):
        config = dataclasses.replace(base, dtype=dtype)
        engine, params = make_engine(config, vocab, slots, prompt, longest, kv_dtype=kv)
        lengths = np.random.default_rng(0).integers(1, longest + 1, 4 * slots)
        batch = requests(len(lengths), prompt, lengths, vocab)
        errors, tokens = [], []
        recompute = jax.jit(partial(completion_logprobs, config=config))
        for groups in drain(engine, batch):
            payload = Payload(*(np.asarray(x) for x in groups.payload))
            made = payload.mask_PGT & groups.valid_P[:, None, None]
            logp, _ = recompute(params, payload)
            errors.append(np.abs(np.asarray(logp) - payload.logp_PGT)[made])
            tokens += [
                (t, row[m].tolist()) for t, row, m in zip(groups.tickets_P, payload.tokens_PGT, made, strict=True)
            ]
        error = np.concatenate(errors)
        say(f"logp_error_{dtype}_cache_{kv}", float(error.max()), mean=float(error.mean()), tokens=error.size)
        counter = CompileCounter()
        again = [
            (t, row[m & v].tolist())
            for groups in drain(engine, batch[::-1])
            for t, row, m, v in zip(
                groups.tickets_P, np.asarray(groups.payload.tokens_PGT), np.asarray(groups.payload.mask_PGT),
                groups.valid_P, strict=True,
            )
        ]  # fmt: skip
        found = dict(again)
        same = sum(found[t] == row for t, row in tokens if t >= 0)
        say(f"same_tokens_in_reverse_order_{dtype}_cache_{kv}", same, of=len(batch))
        say(f"compiles_after_warm_up_{dtype}_cache_{kv}", counter.count)
    greedy(base, vocab, prompt, longest)


def greedy(config: ModelConfig, vocab: int, prompt: int, longest: int) -> None:
    """Whether the trainer finds each completion's last greedy token likelier than 32 others in its place."""
    engine, params = make_engine(config, vocab, 32, prompt, longest)
    hits, num = 0, 0
    recompute = jax.jit(partial(completion_logprobs, config=config))
    for groups in drain(engine, requests(32, prompt, np.full(32, longest), vocab, temperature=0.0)):
        payload = Payload(*(np.asarray(x) for x in groups.payload))
        chosen, _ = recompute(params, payload)
        rivals = [recompute(params, payload._replace(tokens_PGT=_last_replaced(payload, v)))[0] for v in range(2, 34)]
        last = np.stack([np.asarray(x)[..., -1] for x in rivals])
        hits += int((np.asarray(chosen)[..., -1] >= last.max(axis=0) - 1e-5)[groups.valid_P].sum())
        num += int(groups.valid_P.sum())
    say("greedy_token_beats_32_others", hits, of=num)


def _last_replaced(payload: Payload, token: int) -> np.ndarray:
    tokens = np.array(payload.tokens_PGT)
    tokens[..., -1] = token
    return tokens


def decoding(tiny: bool, bytes_per_sec: float) -> None:
    """Tokens per second of a model of about a billion parameters, against what reading weights and cache allows."""
    vocab, prompt, longest = (512, 16, 32) if tiny else (32_000, 128, 384)
    config = ModelConfig(
        num_layers=2 if tiny else 16, width=128 if tiny else 2048, num_heads=4 if tiny else 32,
        num_kv_heads=2 if tiny else 8, head_dim=32 if tiny else 64, mlp_width=256 if tiny else 8192, dtype="bfloat16",
    )  # fmt: skip
    for slots in (8,) if tiny else (64, 256):
        engine, params = make_engine(config, vocab, slots, prompt, longest, prefill_tokens=64 if tiny else 4096)
        lengths = np.clip(np.random.default_rng(0).lognormal(np.log(longest / 4), 0.8, 8 * slots), 1, longest)
        batch = requests(len(lengths), prompt, lengths.astype(int), vocab)
        drain(engine, batch[:slots])
        before = engine.counters
        begin = time.perf_counter()
        drain(engine, batch)
        secs = time.perf_counter() - begin
        c = {k: v - before[k] for k, v in engine.counters.items()}
        weights = 2 * sum(x.size for x in jax.tree.leaves(params))  # bfloat16
        cache = slots * engine.shape.columns * engine.shape.token_bytes  # a step reads all columns
        bound = slots / ((weights + cache) / bytes_per_sec)
        busy = c["tokens"] / c["slot_steps"]
        say(
            f"decode_tokens_per_sec_{slots}_slots", c["tokens"] / secs, utilisation=round(busy, 4),
            bandwidth_bound=round(bound), of_bound_while_busy=round(c["tokens"] / secs / busy / bound, 4),
            step_ms=round(1e3 * secs / (c["slot_steps"] / slots), 3), weights_mb=weights >> 20, cache_mb=cache >> 20,
            prompt=prompt, longest=longest,
        )  # fmt: skip


def train_config(tiny: bool) -> RunConfig:
    """Digit sorting with a large policy: few prompts, long enough a step."""
    return from_mapping(
        {
            "num_steps": 4,
            "num_prompts_per_step": 4 if tiny else 64,
            "num_generations_per_prompt": 4 if tiny else 16,
            "tensorboard": False,
            "progress": "plain",
            "fail_on_recompile": False,
            "model": {
                "num_layers": 2 if tiny else 16, "width": 64 if tiny else 2048, "num_heads": 4 if tiny else 32,
                "num_kv_heads": 4 if tiny else 8, "head_dim": 16 if tiny else 64, "mlp_width": 128 if tiny else 8192,
                "dtype": "bfloat16",
            },
            "warm_start": {"num_steps": 0},
            "evaluation": {"num_tasks": 8, "every_steps": 0},
            "dynamic_sampling": {"enable": False},
            "checkpoint": {"every_steps": 1000},
        }
    )  # fmt: skip


def training(tiny: bool, flops_per_sec: float) -> None:
    """A run's own train step, on a batch of its shapes: 6 FLOP per weight and token, the cost of attention left out."""
    config = train_config(tiny)
    parts = build(config)
    warm_up(parts)
    batch = parts.buffer.warm_up(parts.sampler.filler(config.num_generations_per_prompt))
    size = sum(x.size for x in jax.tree.leaves(parts.state.params))
    prompts = config.num_prompts_per_step
    rows = prompts * config.num_generations_per_prompt
    tokens = rows * config.sampler.max_completion_tokens + prompts * config.tasks.max_prompt_tokens
    state = parts.state

    def step() -> Any:
        nonlocal state
        state, metrics = parts.train_step(state, batch)
        return metrics

    secs = least_secs(step)
    flops = 6 * size * tokens * config.train.num_epochs
    say(
        "train_step_flop_per_sec", flops / secs, matmul_flop_per_sec=round(flops_per_sec),
        of_matmul=round(flops / secs / flops_per_sec, 4), secs=round(secs, 4), parameters=size, tokens=tokens,
    )  # fmt: skip
    parts.close()


def whole_run(tiny: bool) -> None:
    """Four steps of the loop: every part together, on this backend."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        result = dynrl.run(train_config(tiny), folder)
        rows = result.metrics
        say(
            "run", result.reason, secs=round(time.perf_counter() - begin, 1), recompiles=rows[-1]["run/recompiles"],
            step_secs=[r["time/step_secs"] for r in rows if "time/step_secs" in r],
        )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    say("device", str(jax.devices()[0].device_kind), backend=jax.default_backend(), jax=jax.__version__)
    correctness(tiny)
    speed = bandwidth(2**24 if tiny else 2**32)
    say("memory_gb_per_sec", speed / 1e9)
    decoding(tiny, speed)
    rate = matmul_rate(256 if tiny else 8192, "bfloat16")
    say("matmul_tflop_per_sec", rate / 1e12)
    training(tiny, rate)
    whole_run(tiny)
