"""Times the backfill's scatter against the fastest write of as many bytes, a donated dynamic_update_slice.

    python tests/benchmarks/bench_backfill.py [--groups 4096 --rollouts 16 --tokens 2048 --repeats 9]

Prints one JSON line. The ratio is the worst over everything, half and nothing kept; each is a ratio of medians, of
times taken alternately. The default needs 2 GiB of memory.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.core import scatter_kept

GOAL = 1.5


def _secs(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - start


def run(groups: int, rollouts: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Returns the benchmark's result line."""
    rows = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (groups, rollouts, tokens)).copy()
    buffer = jnp.zeros_like(rows)
    zero = jnp.int32(0)
    scatter = jax.jit(scatter_kept, donate_argnums=0)
    update = jax.jit(
        lambda buffer, rows, start: jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, 0), donate_argnums=0
    )
    keeps = {
        "all": np.ones(groups, bool),
        "half": np.random.default_rng(0).random(groups) < 0.5,
        "none": np.zeros(groups, bool),
    }
    keeps = {name: jnp.asarray(keep_P) for name, keep_P in keeps.items()}
    secs: dict[str, list[float]] = {name: [] for name in (*keeps, "update")}
    for repeat in range(repeats + 1):
        for name, keep_P in keeps.items():
            (buffer, _, _), scatter_secs = _secs(scatter, buffer, zero, rows, keep_P)
            buffer, update_secs = _secs(update, buffer, rows, zero)
            if repeat:  # the first round compiles
                secs[name].append(scatter_secs)
                secs["update"].append(update_secs)
    medians = {name: statistics.median(times) for name, times in secs.items()}
    ratio = max(medians[name] for name in keeps) / medians["update"]
    return {
        "name": "scatter_kept_vs_dynamic_update_slice",
        "value": round(ratio, 3),
        "goal": GOAL,
        "ok": ratio <= GOAL,
        "mib": rows.nbytes / 2**20,
        "backend": jax.default_backend(),
        **{f"scatter_{name}_secs": round(medians[name], 5) for name in keeps},
        "dynamic_update_slice_secs": round(medians["update"], 5),
    }


def main() -> None:
    """Parses the flags and prints the line."""
    parser = argparse.ArgumentParser(description="scatter_kept against dynamic_update_slice")
    parser.add_argument("--groups", type=int, default=4096)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    print(json.dumps(run(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
