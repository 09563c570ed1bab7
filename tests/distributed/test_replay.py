"""One device, eight emulated ones, and two processes of two: the same rollouts give the same decisions (law 4).

A run on one device leaves a checkpoint after each step and all its rollouts. Each configuration then takes every
step once more, from its checkpoint and with its rollouts. Two processes also run freely, resume, and stop.
"""

import json
import shutil
from pathlib import Path

import pytest
from processes import work
from run_helpers import reproducible

from dynrl.config import to_mapping

NUM_STEPS = 6
WORKER = Path(__file__).with_name("replay_worker.py")


@pytest.fixture(scope="module")
def mapping(tiny_config):
    """B and P are multiples of eight, and so is the buffer's capacity, 7 + 9: it is the same on every mesh."""
    config = tiny_config(
        num_steps=NUM_STEPS, tensorboard=False, model__num_layers=1, train__learning_rate=0.003,
        reward__verifier="user_code:coin", warm_start__num_steps=2, warm_start__batch_size=16,
        dynamic_sampling__oversample=1.125, dynamic_sampling__refill="full", checkpoint__every_steps=1,
        checkpoint__max_to_keep=20, fail_on_recompile=True,
    )  # fmt: skip
    return to_mapping(config)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def recording(mapping, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    (seen,) = work(WORKER, folder, cache, {"mode": "record", "config": mapping}, 1, 1)
    return folder, seen["whole"]


def comparable(row):
    """Without what no replay has: an evaluation after the last step, and row-steps of the sampler."""
    return {k: v for k, v in reproducible(row).items() if not k.startswith(("eval/", "sampler/slot"))}


def close(a, b):
    return a == b if a is None or b is None else a == pytest.approx(b, rel=1e-5, abs=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("num_processes", "num_devices"), [(1, 1), (1, 8), (2, 4)])
def test_recorded_rollouts_give_the_same_steps(recording, mapping, cache, tmp_path, num_processes, num_devices):
    folder, whole = recording
    for step in range(NUM_STEPS):
        target = tmp_path / f"from_{step}"
        shutil.copytree(folder / "run" / "checkpoints" / str(step), target / "checkpoints" / str(step))
        shutil.copy(folder / "run" / "metrics.jsonl", target)
    spec = {"mode": "replay", "config": mapping, "steps": list(range(NUM_STEPS))}
    spec["rollouts"] = str(folder / "rollouts.npz")
    seen = work(WORKER, tmp_path, cache, spec, num_processes, num_devices)

    expected_rows = {r["run/step"]: r for r in whole["rows"]}
    assert any(r.get("backfill/carried_groups") for r in whole["rows"])
    for step in map(str, range(NUM_STEPS)):
        views = [s[step] for s in seen]
        for view in views:
            assert view["verdicts"]
            assert view["verdicts"] == {t: whole["verdicts"][t] for t in view["verdicts"]}
            assert [b["tickets"] for b in view["batches"]] == [whole["batches"][int(step)]["tickets"]]
        rows = {i: h for v in views for i, h in v["batches"][0]["rows"].items()}
        assert sum(len(v["batches"][0]["rows"]) for v in views) == len(rows) == 8
        assert rows == whole["batches"][int(step)]["rows"]
        assert all(not v["rows"] for v in views[1:])  # the first process writes
        (row,) = [r for r in views[0]["rows"] if r["run/step"] == int(step) + 1]
        expected, got = comparable(expected_rows[int(step) + 1]), comparable(row)
        assert got.keys() == expected.keys()
        wrong = {k: (got[k], expected[k]) for k in got if not close(got[k], expected[k])}
        assert not wrong, (step, wrong)
        if num_devices == 1:
            assert got == expected


@pytest.mark.slow
def test_two_processes_run_resume_and_stop_together(mapping, cache, tmp_path):
    spec = {"mode": "free", "config": {**mapping, "checkpoint": {"every_steps": 2, "max_to_keep": 2}}}
    spec["parts"] = [[3, None], [5, None], [20, 1]]  # the last part: process 1 is interrupted in its second step
    first, second = work(WORKER, tmp_path, cache, spec, 2, 4)
    for part, last in (("3", 3), ("5", 5), ("20", 7)):
        a, b = first[part], second[part]
        for key in ("reason", "step", "digest", "weights", "verdicts"):
            assert a[key] == b[key], (part, key)
        assert a["step"] == last
        assert a["recompiles"] == b["recompiles"] == []
        assert not b["rows"]
        trained = [t for t in a["verified"] + b["verified"] if t >= 0]
        assert len(trained) == len(set(trained))
        assert set(map(str, trained)) == a["verdicts"].keys()
        assert a["verified"]
        assert b["verified"]
        assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in a["rows"] if r["run/step"])
    assert first["20"]["reason"] == "interrupted"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["run/step"] for r in rows] == list(range(8))
    assert rows[0]["eval/main/pass_at_1"] is not None


@pytest.mark.slow
def test_two_processes_go_on_with_work_that_was_under_way(mapping, cache, tmp_path):
    """Each process has its own rows of what was with the verifiers, and takes no other's for its own."""
    schedule = {"name": "ready_first", "max_staleness_versions": 2}
    config = {**mapping, "schedule": schedule, "checkpoint": {"every_steps": 2, "max_to_keep": 9}}
    spec = {"mode": "free", "config": config, "parts": [[5, 1], [6, None]]}  # process 1 is interrupted after two steps
    first, second = work(WORKER, tmp_path, cache, spec, 2, 4)
    for part, last in (("5", 2), ("6", 6)):
        a, b = first[part], second[part]
        for key in ("reason", "step", "digest", "weights", "verdicts"):
            assert a[key] == b[key], (part, key)
        assert a["step"] == last
        assert a["recompiles"] == b["recompiles"] == []
        scores = [score for verdict in a["verdicts"].values() for score in verdict[2]]
        assert set(scores) == {0.0, 1.0}
        assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in a["rows"] if r["run/step"])
    (path,) = (tmp_path / "run" / "checkpoints" / "2" / "document").glob("*metadata*")
    assert json.loads(path.read_text())["in_flight"]["producer"]["handed_over"]
    trained = [t for part in first.values() for batch in part["batches"] for t in batch["tickets"]]
    assert len(trained) == len(set(trained)) == 6 * 8


@pytest.mark.slow
@pytest.mark.parametrize("grows", ["generator", "self_propose"])
def test_two_processes_grow_the_same_tasks(mapping, cache, tmp_path, grows):
    """One process asks the generator, which asks the policy; each reads the proposals of its own rows."""
    schedule = {"name": "ready_first", "max_staleness_versions": 4}
    config = {**mapping, "schedule": schedule, "checkpoint": {"every_steps": 1, "max_to_keep": 9}}
    if grows == "generator":
        config["tasks"] = {**mapping["tasks"], "new_first": True}
        generation = {"generator": "user_generators:Asking", "self_check": False, "probe_samples": 2}
        config["generation"] = {**mapping["generation"], **generation}
    else:
        kind = {"kind": "user_kinds:AnyText", "groups_per_step": 2}
        config["self_propose"] = {**mapping["self_propose"], **kind}
    spec = {"mode": "free", "config": config, "parts": [[3, None], [6, None]]}
    first, second = work(WORKER, tmp_path, cache, spec, 2, 4)
    for part, last in (("3", 3), ("6", 6)):
        a, b = first[part], second[part]
        for key in ("reason", "step", "digest", "weights", "verdicts", "tasks"):
            assert a[key] == b[key], (part, key)
        assert a["step"] == last
        assert a["recompiles"] == b["recompiles"] == []
    grown = [first[part]["tasks"] for part in ("3", "6")]
    assert 0 < len(grown[0]) < len(grown[1])
    assert grown[1][: len(grown[0])] == grown[0]
    log = [json.loads(line) for line in (tmp_path / "run" / "tasks.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in log if "prompt" in row] == [task["prompt"] for task in grown[1]]


@pytest.mark.slow
def test_skewed_processes_take_the_same_events_and_break_together(mapping, cache, tmp_path):
    streaming = {"name": "in_order", "max_lookahead_versions": 1}
    parts = {
        "rounds": {"schedule": {"name": "rounds"}},
        "streaming": {"schedule": streaming},
        "broken": {"schedule": streaming},
    }
    config = mapping | {"num_steps": 4, "reward": mapping["reward"] | {"verifier": "user_code:skewed"}}
    spec = {"mode": "skewed", "config": config, "parts": list(parts.items())}
    first, second = work(WORKER, tmp_path, cache, spec, 2, 4)
    for name in parts:
        a, b = first[name], second[name]
        if name != "broken":
            assert a == b, name
            assert a["reason"] == "all 4 steps were made", a
            assert len(a["digests"]) > 10
        else:  # as far as both came
            assert a["digests"] == b["digests"]
            assert "no worker is left" in b["error"]
            assert "on another process; its log says how" in a["error"]
