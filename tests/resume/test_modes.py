"""Killed at a checkpoint and restarted, a streaming or asynchronous run is the run that was not (law 7)."""

import json

import jax
import numpy as np
import pytest
from run_helpers import quick_build, restart_from, rows_of

import dynrl
from dynrl.build import build

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM_STEPS = 7
MODES = {
    "in_order": {"name": "in_order", "max_lookahead_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 2},
    "weight_fifo async": {"name": "weight_fifo", "max_staleness_versions": 2, "mode": "async", "chunks_per_update": 2},
    "windowed async": {"name": "windowed", "max_staleness_versions": 1, "mode": "async", "chunks_per_update": 3},
    "in_order async": {"name": "in_order", "max_lookahead_versions": 1, "mode": "async", "chunks_per_update": 2},
}


def run(config, workdir):
    return dynrl.run(config, str(workdir), (), quick_build)


def in_flight_at(workdir, step):
    (path,) = (workdir / "checkpoints" / str(step) / "document").glob("*metadata*")
    return json.loads(path.read_text())["in_flight"]


@pytest.fixture
def config_of(tiny_config):
    def make(schedule, **overrides):
        chosen = {
            "num_steps": NUM_STEPS, "model__num_layers": 1, "warm_start__num_steps": 0, "tensorboard": False,
            "reward__verifier": "user_code:rare", "checkpoint__every_steps": 2, "checkpoint__max_to_keep": 20,
            "evaluation__every_steps": 3, "dynamic_sampling__oversample": 1.5, "train__learning_rate": 0.003,
        }  # fmt: skip
        schedule = {f"schedule__{key}": value for key, value in schedule.items()}
        return tiny_config(**{**chosen, **schedule, **overrides})

    return make


@pytest.mark.parametrize("mode", MODES)
def test_from_any_checkpoint_the_run_goes_on_bitwise(config_of, tmp_path, mode):
    config = config_of(MODES[mode])
    whole = run(config, tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert [r["run/step"] for r in rows] == list(range(NUM_STEPS + 1))
    assert all(r["run/recompiles"] == 0 for r in rows[1:])
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in rows[1:])
    under_way = []
    for step in (2, 4, 6):
        target = tmp_path / f"from_{step}"
        restart_from(tmp_path / "whole", target, step)
        saved = in_flight_at(target, step)
        under_way.append(saved is not None and bool(saved["producer"]["tickets"]))
        again = run(config, target)
        for got, want in zip(rows_of(target), rows, strict=True):
            assert got == want
        jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert any(under_way)


@pytest.mark.parametrize("mode", ["in_order", "windowed async"])
def test_resubmitted_work_is_conserved(config_of, tmp_path, mode):
    config = config_of(MODES[mode], checkpoint__in_flight="resubmit")
    run(config, tmp_path / "whole")
    target = tmp_path / "again"
    restart_from(tmp_path / "whole", target, 4)
    assert in_flight_at(target, 4) is None
    run(config, target)
    rows = rows_of(target)
    assert rows[:5] == rows_of(tmp_path / "whole")[:5]
    assert [r["run/step"] for r in rows] == list(range(NUM_STEPS + 1))
    assert rows[-1]["ledger/trained"] == NUM_STEPS * 8


@pytest.mark.parametrize("mode", ["rounds", "in_order"])
def test_turns_go_on_where_they_were(config_of, tmp_path, mode):
    """Rollouts of several turns: what the environment answered is neither trained nor asked for twice."""
    schedule = {"name": "rounds"} if mode == "rounds" else MODES[mode]
    config = config_of(
        schedule, tasks__source="calculator", tasks__source_kwargs={"max_digits": 1, "max_terms": 3},
        tasks__max_prompt_tokens=6, sampler__max_completion_tokens=20, reward__verifier="user_code:Talker",
        num_generations_per_prompt=2, num_steps=4,
    )  # fmt: skip
    whole = run(config, tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    assert [r["run/step"] for r in rows] == list(range(5))
    assert all(r["run/recompiles"] == 0 for r in rows[1:])
    target = tmp_path / "again"
    restart_from(tmp_path / "whole", target, 2)
    saved = in_flight_at(target, 2)
    assert (saved is None) == (mode == "rounds")
    if saved:
        assert saved["producer"]["turns"]["texts"]
    again = run(config, target)
    assert rows_of(target) == rows
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_sampling_on_devices_of_its_own(config_of, tmp_path):
    """Four devices train while four sample; what they make is the same run from any checkpoint."""
    config = config_of(MODES["in_order async"], schedule__sampler_devices=4, mesh__data=4)
    seen = []

    def build_parts(config):
        parts = build(config)
        seen.append((parts.state.params["embedding"].sharding, parts.sampler.arrays.state.slots.token_S.sharding))
        return parts

    whole = dynrl.run(config, str(tmp_path / "whole"), (), build_parts)
    (trains, samples) = seen[0]
    assert not trains.device_set & samples.device_set
    rows = rows_of(tmp_path / "whole")
    assert [r["run/step"] for r in rows] == list(range(NUM_STEPS + 1))
    assert all(r["run/recompiles"] == 0 for r in rows[1:])
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in rows[1:])
    target = tmp_path / "again"
    restart_from(tmp_path / "whole", target, 4)
    again = dynrl.run(config, str(target), (), build)
    assert rows_of(target) == rows
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_on_a_wall_clock_nothing_is_lost(config_of, tmp_path):
    config = config_of(MODES["ready_first"], schedule__mode="async", schedule__clock="wall")
    run(config, tmp_path)
    rows = rows_of(tmp_path)
    assert [r["run/step"] for r in rows] == list(range(NUM_STEPS + 1))
    assert rows[-1]["ledger/trained"] == NUM_STEPS * 8
    assert max(r["train_batch/staleness/mean"] for r in rows[1:]) <= 2
