"""One process of a run on given devices: records its rollouts, replays recorded ones step by step, or runs freely.

    python replay_worker.py SPEC.json PROCESS_ID

Writes RESULT_<process id>.json beside the spec: what this process saw.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from processes import join
from run_helpers import row_hashes, wrap

import dynrl.loop
from dynrl.build import Parts, build
from dynrl.config import from_mapping
from dynrl.interrupt import Interrupt
from dynrl.loop import Loop, run
from dynrl.models import sharding
from dynrl.rollout.controller import apply
from dynrl.rollout.producer import Producer
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.admission import row_of
from dynrl.tasks.store import TaskStore
from dynrl.tasks.verifiers import VerifierPoolError, Verifiers
from dynrl.types import Groups, Payload


class Recorder:
    """A sampler that keeps what another hands over, by ticket."""

    def __init__(self, sampler):
        self._sampler = sampler
        self._task_of = {}
        self.groups = {}

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    def submit(self, requests):
        self._task_of |= {r.ticket: r.task_id for r in requests}
        self._sampler.submit(requests)

    def poll(self, min_groups=1):
        groups = self._sampler.poll(min_groups)
        if groups is not None:
            payload = jax.tree.map(np.asarray, groups.payload)
            for i in np.flatnonzero(groups.valid_P & (groups.tickets_P >= 0)):  # evaluation has negative tickets
                ticket = int(groups.tickets_P[i])
                self.groups[ticket] = {"task_id": np.int64(self._task_of[ticket])}
                self.groups[ticket] |= {name: x[i] for name, x in payload._asdict().items()}
        return groups

    def save(self, path):
        np.savez(path, **{f"{t}/{name}": x for t, g in self.groups.items() for name, x in g.items()})


class Replayer:
    """A sampler that hands over recorded groups, P at a time, as global arrays; evaluation is sampled anew."""

    def __init__(self, sampler, mesh, num_rows, path):
        self._sampler, self._mesh, self._num_rows = sampler, mesh, num_rows
        self._queue = []
        self._groups = {}
        self._tokens = 0
        with np.load(path) as file:
            for key in file.files:
                ticket, name = key.split("/")
                self._groups.setdefault(int(ticket), {})[name] = file[key]

    def __getattr__(self, name):
        return getattr(self._sampler, name)

    @property
    def num_in_flight(self):
        return len(self._queue) + self._sampler.num_in_flight

    @property
    def counters(self):
        return {"tokens": self._tokens, "slot_steps": 0}

    def update_weights(self, params, version):
        self._sampler.update_weights(params, version)

    def submit(self, requests):
        if requests and requests[0].ticket < 0:
            self._sampler.submit(requests)
            return
        for request in requests:
            recorded = self._groups[request.ticket]
            assert recorded["task_id"] == request.task_id
            assert recorded["prompt_PL"][-len(request.prompt) :].tolist() == list(request.prompt)
        self._queue += [r.ticket for r in requests]

    def cancel(self, tickets):
        self._queue = [t for t in self._queue if t not in set(tickets)]

    def poll(self, min_groups=1):
        if not self._queue:
            return self._sampler.poll(min_groups)
        batch, self._queue = self._queue[: self._num_rows], self._queue[self._num_rows :]
        return self._hand_over(batch)

    def _hand_over(self, batch):
        p = self._num_rows
        some = next(iter(self._groups.values()))
        host = Payload(*(np.zeros((p, *some[name].shape), some[name].dtype) for name in Payload._fields))
        for i, ticket in enumerate(batch):
            for name, x in host._asdict().items():
                x[i] = self._groups[ticket][name]
        self._tokens += int(host.length_PG.sum())
        payload = jax.tree.map(lambda x: sharding.place(x, sharding.rows(self._mesh)), host)
        return Groups(
            payload=payload,
            tickets_P=np.array(batch + [-1] * (p - len(batch))),
            valid_P=np.arange(p) < len(batch),
            owned_P=sharding.owned_rows(self._mesh, p),
            host_tokens_PGT=sharding.local_rows(payload.tokens_PGT),
            host_length_PG=sharding.local_rows(payload.length_PG),
            host_finish_PG=sharding.local_rows(payload.finish_PG),
        )


class Witness:
    """What one process sees of a run."""

    def __init__(self):
        self.rows, self.batches, self.verdicts, self.verified = [], [], {}, []
        self._tickets = ()

    def write(self, step, row):
        self.rows.append(row)

    def close(self):
        pass

    def watch(self, parts: Parts, after_step=lambda num: None) -> Parts:
        """Notes batches, verdicts and verifications; `after_step` is told the number of steps seen."""

        def take(original):
            def noted(tickets):
                self._tickets = tuple(tickets)
                return original(tickets)

            return noted

        def train_step(original):
            def noted(state, batch):
                if self._tickets:
                    self.batches.append({"tickets": list(self._tickets), "rows": own_row_hashes(parts.mesh, batch)})
                    after_step(len(self.batches))
                return original(state, batch)

            return noted

        def take_judged(original):
            def noted():
                judged = original()
                for j in judged:
                    columns = (*j.judged[:2], j.records.score, j.records.status)
                    rows = zip(*(c.tolist() for c in columns), strict=True)
                    self.verdicts |= {t.ticket: list(row) for t, row in zip(j.tickets, rows, strict=True)}
                return judged

            return noted

        def submit(original):
            def noted(ticket, task, texts):
                self.verified.append(ticket)
                return original(ticket, task, texts)

            return noted

        wrap(parts.buffer, "take", take)
        wrap(parts, "train_step", train_step)
        wrap(parts.producer, "take_judged", take_judged)
        wrap(parts.verifiers, "submit", submit)
        return parts

    def result(self):
        return {
            "rows": self.rows, "batches": self.batches, "verdicts": self.verdicts, "verified": self.verified,
        }  # fmt: skip


def own_row_hashes(mesh, batch):
    """Hash by row of the batch, of the rows that this process owns."""
    owned = sharding.owned_rows(mesh, batch.real_B.shape[0])
    hashes = row_hashes(jax.tree.map(sharding.local_rows, batch))
    return {int(i): hashes[i] for i in np.flatnonzero(owned)}


def with_sampler(parts: Parts, sampler) -> Parts:
    player = TurnPlayer(sampler, None, parts.tokenizer, {}, (), 0)
    return dataclasses.replace(parts, sampler=sampler, player=player)


def producer_of(parts: Parts) -> Producer:
    return Producer(
        parts.config, parts.player, parts.verifiers, parts.judge, parts.buffer, parts.tokenizer, parts.store, True
    )


def record(spec, folder):
    """A run whose every step leaves a checkpoint, the first one before any update."""
    witness, recorders = Witness(), []

    def parts_of(config):
        parts = build(config)
        recorders.append(Recorder(parts.sampler))
        parts = with_sampler(parts, recorders[-1])
        return witness.watch(dataclasses.replace(parts, producer=producer_of(parts)))

    for num_steps in (0, spec["config"]["num_steps"]):
        run(from_mapping({**spec["config"], "num_steps": num_steps}), str(folder / "run"), [witness], parts_of)
    recorders[-1].save(folder / "rollouts.npz")
    return {"whole": witness.result()}


def replay(spec, folder):
    """One step from each checkpoint in turn, with the recorded rollouts; programs are compiled once."""
    config = from_mapping(spec["config"])
    shared = build(config)
    shared.verifiers.close()
    num_rows = shared.sampler.groups_per_poll(config.num_generations_per_prompt)
    result = {}
    for step in spec["steps"]:
        witness = Witness()

        def parts_of(config, witness=witness):
            sampler = Replayer(shared.sampler, shared.mesh, num_rows, spec["rollouts"])
            verifiers = Verifiers({shared.source.name: config.reward.verifier})
            store = TaskStore(shared.source, config.seed, len(shared.store), shared.eval_tasks.hashes)
            fresh = dataclasses.replace(shared, store=store, verifiers=verifiers, pools=[verifiers])
            parts = with_sampler(fresh, sampler)
            parts = dataclasses.replace(parts, producer=producer_of(parts))
            return witness.watch(parts, lambda num: os.kill(os.getpid(), signal.SIGINT))  # ends after the step

        run(config, str(folder / f"from_{step}"), [witness], parts_of)
        result[step] = witness.result()
    return result


def free(spec, folder):
    """Runs and resumes; in the last part one process alone is interrupted."""
    result = {}
    for num_steps, interrupted_in in spec["parts"]:

        def after_step(num, interrupted_in=interrupted_in):
            if num == 2 and interrupted_in == jax.process_index():
                os.kill(os.getpid(), signal.SIGINT)

        witness = Witness()
        parts = witness.watch(build(from_mapping({**spec["config"], "num_steps": num_steps})), after_step)
        try:
            with Interrupt() as interrupt:
                loop = Loop(parts, _path(folder / "run"), [witness], interrupt)
                reason = loop.train()
            loop.books.close()
        finally:
            parts.close()
        state = json.dumps(loop.controller.state_dict(), sort_keys=True)
        weights = [hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for x in jax.tree.leaves(parts.state.params)]
        result[num_steps] = {
            **witness.result(),
            "reason": reason,
            "step": loop.controller.step,
            "digest": hashlib.sha256(state.encode()).hexdigest(),
            "weights": weights,
            "recompiles": parts.compiles.names,
            "tasks": [row_of(task) for task in parts.store.get(range(parts.store.num_base, len(parts.store)))],
        }
    return result


def skewed(spec, folder):
    """Runs whose verifiers differ between the processes, in speed and in what they keep; in the last one they break.

    What the controller was told is hashed at every sync point.
    """
    result = {}
    for name, overrides in spec["parts"]:
        digests = []

        def noted(state, event, digests=digests):
            digests.append(hashlib.sha256(f"{digests[-1:]}{event}".encode()).hexdigest())
            return apply(state, event)

        def parts_of(config, breaks=name == "broken"):
            parts = build(config)
            if breaks and jax.process_index() == 1:
                wrap(parts.verifiers, "submit", lambda original: breaks_after(12, original))
            return parts

        config = from_mapping(spec["config"] | overrides)
        error = ""
        with mock.patch.object(dynrl.loop, "apply", noted):
            try:
                reason = run(config, str(folder / name), (), parts_of).reason
            except RuntimeError as raised:
                reason, error = "", str(raised)
        result[name] = {"digests": digests, "reason": reason, "error": error}
    return result


def breaks_after(num, original):
    calls = itertools.count()

    def submit(*args):
        if next(calls) >= num:
            raise VerifierPoolError("no worker is left")
        return original(*args)

    return submit


def _path(path):
    from etils import epath

    return epath.Path(path)


def main():
    spec_path, process = Path(sys.argv[1]), int(sys.argv[2])
    spec = json.loads(spec_path.read_text())
    join(spec, process)
    os.environ["DYNRL_TEST_PROCESS"] = str(process)  # verifier workers inherit it
    mode = {"record": record, "replay": replay, "free": free, "skewed": skewed}[spec["mode"]]
    result = mode(spec, spec_path.parent)
    (spec_path.parent / f"RESULT_{process}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
