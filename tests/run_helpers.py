"""What the end-to-end tests share: quick runs, and rows and payloads to compare."""

import fnmatch
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import dynrl.build
from dynrl.config import RunConfig, to_mapping
from dynrl.models import sharding

ROOT = Path(__file__).parents[1]
UNREPRODUCIBLE = ("time/*", "memory/*", "*_secs", "*_per_sec", "*mfu*")


_REAL = {name: getattr(dynrl.build, name) for name in ("make_sampler", "jit_train_step", "init_state")}
_MADE: dict[Any, Any] = {}


def quick_build(config: RunConfig, num_devices: int = 1) -> dynrl.build.Parts:
    """Parts on the first devices, with programs that earlier runs of the session have traced and compiled."""
    mapping = to_mapping(config)
    lengths = (config.tasks.max_prompt_tokens, config.tasks.source_kwargs, config.num_generations_per_prompt)
    key = repr((num_devices, config.seed, lengths, [mapping[k] for k in ("model", "mesh", "sampler")]))
    learning = repr([config.num_prompts_per_step, mapping["loss"], mapping["train"]])

    def make_sampler(config: Any, *parts: Any, **options: Any) -> Any:
        sampler = _once((key, "sampler"), lambda: _REAL["make_sampler"](config, *parts, **options))
        sampler.cancel(list(sampler._table.tickets()))  # what a run left that ended in the middle of it
        while sampler._running is not None:
            sampler.poll()
        return sampler

    def jit_train_step(*args: Any) -> Any:
        return _once((key, learning, "step"), lambda: _REAL["jit_train_step"](*args))

    def init_state(*args: Any) -> Any:
        def make() -> tuple[Any, Any]:  # kept on the host: a train step donates its state
            state = _REAL["init_state"](*args)
            return jax.tree.map(np.asarray, state), jax.tree.map(lambda x: x.sharding, state)

        return jax.tree.map(sharding.place, *_once((key, learning, "state"), make))

    make_mesh = sharding.make_mesh
    with (
        mock.patch.multiple(
            dynrl.build, make_sampler=make_sampler, jit_train_step=jit_train_step, init_state=init_state
        ),
        mock.patch.object(sharding, "make_mesh", lambda config: make_mesh(config, jax.devices()[:num_devices])),
    ):
        return dynrl.build.build(config)


def _once(key: Any, make: Any) -> Any:
    if key not in _MADE:
        _MADE[key] = make()
    return _MADE[key]


def reproducible(row: dict[str, Any]) -> dict[str, Any]:
    """The part of a metrics row that a repetition must give again, bit for bit."""
    return {k: v for k, v in row.items() if not any(fnmatch.fnmatchcase(k, p) for p in UNREPRODUCIBLE)}


def rows_of(workdir: Path) -> list[dict[str, Any]]:
    """The reproducible part of all rows of a run."""
    return [reproducible(json.loads(line)) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def restart_from(workdir: Path, target: Path, step: int) -> None:
    """What is on the disk of a run that was killed after this checkpoint: `target` goes on from there."""
    shutil.copytree(workdir / "checkpoints" / str(step), target / "checkpoints" / str(step))
    for path in workdir.glob("*.jsonl"):
        shutil.copy(path, target)


def child_environment(num_devices: int, cache: Path) -> dict[str, str]:
    """For a run in a process of its own that imports what these tests import, and compiles as quickly."""
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "DYNRL_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }


def write_config_file(path: Path, config: RunConfig) -> Path:
    """A file that launch/train.py takes as its --config."""
    body = f"def get_config():\n    return ConfigDict({to_mapping(config)!r})\n"
    path.write_text(f"from ml_collections import ConfigDict\n\n\n{body}")
    return path


def wrap(thing: Any, name: str, around: Any) -> None:
    """Puts `around(original)` in the place of a method of one object."""
    setattr(thing, name, around(getattr(thing, name)))


def row_hashes(*trees: Any) -> list[str]:
    """A hash per row over the leading axis of every array, in order: shapes, dtypes and bits."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(trees)]

    def one(i: int) -> str:
        digest = hashlib.sha256()
        for x in arrays:
            digest.update(f"{x.shape[1:]} {x.dtype} ".encode() + np.ascontiguousarray(x[i]).tobytes())
        return digest.hexdigest()

    return [one(i) for i in range(len(arrays[0]))]
