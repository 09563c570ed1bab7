"""One process of a slot engine on given devices, under random use; each feeds the slots of its own devices.

    python sampler_worker.py SPEC.json PROCESS_ID

Writes RESULT_<process id>.json beside the spec: every group of which this process owns the row (a hash, and the
log-probs), and how many rollouts it planned for its devices' slots.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
from processes import join
from run_helpers import row_hashes, wrap

from dynrl.compile_counter import CompileCounter
from dynrl.config import MeshConfig, ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import init_params
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.options import EngineOptions
from dynrl.types import Purpose, Request, SamplingParams

EOS, PAD, VOCAB, G, L, T = 1, 0, 12, 2, 5, 8
CONFIG = ModelConfig(num_layers=1, width=16, num_heads=4, num_kv_heads=4, head_dim=4, mlp_width=16)


def as_text(ids):
    return "".join(chr(ord("a") + i - 2) for i in ids if i >= 2)


def main():
    spec_path, process = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads(spec_path.read_text())
    join(spec, process)
    mesh = sharding.make_mesh(MeshConfig(**spec["mesh"]))
    options = EngineOptions(
        num_slots=8, max_prompt_tokens=L, max_completion_tokens=T, group_sizes=(1, G), chunk_steps=3,
        prefill_tokens=8, max_extend_tokens=3, weight_update="in_flight",
    )  # fmt: skip
    engine = SlotEngine(CONFIG, mesh, options, eos_id=EOS, pad_id=PAD, vocab_size=VOCAB, seed=7, decode=as_text)
    host = jax.tree.map(np.asarray, jax.jit(partial(init_params, CONFIG, VOCAB))(jax.random.key(0)))
    params = jax.tree.map(sharding.place, host, sharding.param_shardings(host, mesh))
    engine.update_weights(params, 0)
    engine.warm_up()
    compiles = CompileCounter()

    fed = [0, 0]  # rollouts planned: of this process's shards, of others
    own, shards = sharding.own_shards(mesh), sharding.num_row_shards(mesh)

    def counted(original):
        def chunk(params, control, host):
            for shard, rows in enumerate(np.split(host, shards)):
                fed[shard not in own] += int(rows[:, 0].sum())
            return original(params, control, host)

        return chunk

    wrap(engine._device, "chunk", counted)
    rng = np.random.default_rng(0)
    out, number, gone = {}, 0, set()
    for version in range(60):
        for _ in range(rng.integers(0, 4) if version < 50 else 0):
            prompt = rng.integers(2, VOCAB, rng.integers(1, L + 1)).tolist()
            settings = SamplingParams(
                1.0, int(rng.integers(4, T + 1)), stop_strings=[(), ("c", "de")][rng.integers(2)], ignore_eos=True
            )
            r = Request(number, number, 0, Purpose.TRAIN, prompt, int(rng.choice([1, G])), settings)
            engine.submit([dataclasses.replace(r, multi_turn=bool(rng.integers(2)))])
            number += 1
        if rng.random() < 0.15 and number:
            gone.add(int(rng.integers(number)))
            engine.cancel([*gone])
        if rng.random() < 0.2:
            engine.update_weights(params, version)
        poll(engine, out)
    while engine.num_in_flight:
        poll(engine, out)
    table = {"groups": out, "fed": fed, "counters": engine.counters, "compiled": compiles.names, "submitted": number}
    (spec_path.parent / f"RESULT_{process}.json").write_text(json.dumps(table))


def poll(engine, out):
    groups = engine.poll()
    if groups is not None:
        payload = jax.tree.map(sharding.local_rows, groups.payload)
        hashes = row_hashes(payload._replace(logp_PGT=()))
        for i in np.flatnonzero(groups.valid_P & groups.owned_P):
            ticket = int(groups.tickets_P[i])
            assert ticket not in out
            out[ticket] = [hashes[i], payload.logp_PGT[i].ravel().tolist()]
    for turn in engine.take_turns():
        if turn.length <= 4 and turn.room >= 3:
            engine.extend(turn.ticket, turn.sample, [2 + turn.length, 3])
        else:
            engine.finish(turn.ticket, turn.sample)


if __name__ == "__main__":
    main()
