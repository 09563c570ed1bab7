"""`dynrl.run` from end to end, on policies of a few thousand parameters."""

import itertools
import json
import math
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath
from run_helpers import ROOT, child_environment, quick_build, reproducible, write_config_file

import dynrl
from dynrl.build import build
from dynrl.config import ConfigError, to_mapping
from dynrl.loop import RunError
from dynrl.models import sharding
from dynrl.models.sharding import place, replicated
from dynrl.rollout.ledger import Phase
from dynrl.training.warm_start import cached_warm_start
from dynrl.types import Verdict

pytestmark = pytest.mark.usefixtures("quick_compiles")

STEP_KEYS = {
    *(f"reward/score/{p}/mean" for p in ("all", "kept", "trained", "first_attempt")),
    *(f"group_filter/{name}_frac" for name in ("zero_variance", "all_pass", "all_fail")),
    "train_batch/zero_advantage_groups_frac",
    *(f"backfill/{name}" for name in ("num_rounds", "surplus_groups", "carried_groups")),
    *(f"ledger/{name}" for name in ("dispatched", "trained", "dropped", "failed", "in_flight", "ready")),
    *(f"sampler/{name}" for name in ("tokens", "tokens_per_sec", "slot_utilisation")),
    *(f"train_step/{name}" for name in ("loss", "grad_norm", "entropy", "clip_frac", "kl_sampler_trainer")),
    *(f"time/{name}_secs" for name in ("sampler", "reward", "backfill", "train_step", "step")),
    *(f"run/{name}" for name in ("step", "version", "recompiles", "generated_tokens")),
}


@pytest.fixture(scope="module")
def config_of(tiny_config):
    """A configuration of a single layer without a warm start, judged by chance."""

    def make(**overrides):
        chosen = {"model__num_layers": 1, "warm_start__num_steps": 0, "reward__verifier": "user_code:coin"}
        return tiny_config(**{**chosen, "tensorboard": False, **overrides})

    return make


def quick_run(config, workdir, callbacks=(), build_parts=quick_build) -> Any:
    return dynrl.run(config, str(workdir), callbacks, build_parts)


def on_disk(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def check_steps(rows, num_steps):
    """Rows of one run: all steps once, every key that tools read, a ledger that balances, nothing compiled late."""
    assert [r["run/step"] for r in rows] == list(range(num_steps + 1))
    assert rows[0]["eval/main/pass_at_1"] is not None
    for row in rows[1:]:
        assert not STEP_KEYS - row.keys()
        assert all(v is None or math.isfinite(v) for v in row.values())
        ended = row["ledger/trained"] + row["ledger/dropped"] + row["ledger/failed"]
        levels = sum(row[f"ledger/{phase}"] for phase in Phase)
        assert row["ledger/dispatched"] == ended + levels
        reasons = [v for k, v in row.items() if k.startswith("ledger/dropped/")]
        assert row["ledger/dropped"] == sum(reasons)
        # What is left over is ready, or in the next batch at once.
        assert row["ledger/ready"] + row["ledger/training"] == row["backfill/surplus_groups"]
        assert row["run/recompiles"] == 0


@pytest.fixture(scope="module")
def finished(config_of, tmp_path_factory):
    """A run of 5 steps, a checkpoint every second one, with a warm start and TensorBoard."""
    workdir = tmp_path_factory.mktemp("finished")
    config = config_of(
        num_steps=5, tensorboard=True, warm_start__num_steps=3, warm_start__batch_size=16,
        dynamic_sampling__oversample=1.125,
    )  # fmt: skip
    return config, workdir, quick_run(config, workdir)


def test_a_run_leaves_its_files_and_rows(finished):
    config, workdir, result = finished
    rows = on_disk(workdir)
    check_steps(rows, 5)
    assert rows == result.metrics
    assert rows[-1]["eval/main/pass_at_1"] is not None
    patterns = ["pre", "post"]
    assert all(any(k.startswith(f"group_filter/pattern/{p}/") for k in rows[-1]) for p in patterns)
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in rows[1:])
    assert all(r["train_batch/groups"] == config.num_prompts_per_step for r in rows[1:])
    assert all(r["run/version"] == r["run/step"] for r in rows)
    assert sum(r["sampler/tokens"] for r in rows[1:]) == rows[-1]["run/generated_tokens"]
    assert list((workdir / "tensorboard").iterdir())
    assert {"4", "5"} <= {p.name for p in (workdir / "checkpoints").iterdir()}
    assert json.loads((workdir / "config.json").read_text()) == json.loads(json.dumps(to_mapping(config)))
    warm = [json.loads(line) for line in (workdir / "warm_start.jsonl").read_text().splitlines()]
    assert [r["warm_start/step"] for r in warm] == [3]
    text = "\n".join(result.summary)
    assert "steps 5 of 5" in text
    assert "recompiles after warm-up 0" in text
    assert "accuracy" in text
    assert str(workdir) in text


def test_the_same_call_again_trains_nothing(finished, tmp_path):
    config, workdir, result = finished
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    again = quick_run(config, tmp_path)
    assert list(map(reproducible, again.metrics)) == list(map(reproducible, result.metrics))
    assert on_disk(tmp_path) == again.metrics
    jax.tree.map(np.testing.assert_array_equal, again.params, result.params)
    assert "steps 5 of 5" in "\n".join(again.summary)


def test_more_steps_go_on_as_if_they_had_been_asked_for_at_first(finished, config_of, tmp_path):
    config, workdir, result = finished
    shutil.copytree(workdir, tmp_path / "more", dirs_exist_ok=True)
    longer = {"tensorboard": True, "warm_start__num_steps": 3, "warm_start__batch_size": 16}
    config = config_of(num_steps=8, dynamic_sampling__oversample=1.125, **longer)
    more = quick_run(config, tmp_path / "more")
    check_steps(more.metrics, 8)
    # The other run finds the warm start in the cache, which must not change a row either.
    whole = quick_run(config, tmp_path / "whole")
    assert not (tmp_path / "whole" / "warm_start.jsonl").exists()
    jax.tree.map(np.testing.assert_array_equal, more.params, whole.params)

    def without_evaluation(row):
        return {k: v for k, v in reproducible(row).items() if not k.startswith("eval/")}

    assert list(map(without_evaluation, more.metrics)) == list(map(without_evaluation, whole.metrics))
    assert list(map(reproducible, whole.metrics[:5])) == list(map(reproducible, result.metrics[:5]))


def test_the_row_that_a_checkpoint_holds_is_whole(config_of, tmp_path):
    quick_run(config_of(num_steps=2), tmp_path)  # the last checkpoint falls due with the last step
    check_steps(quick_run(config_of(num_steps=3), tmp_path).metrics, 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [("loss__clip_high", 0.3), ("num_steps", 4), ("seed", 1), ("dynamic_sampling__refill", "full")],
)
def test_another_configuration_is_refused_by_name(finished, config_of, key, value):
    _, workdir, _ = finished
    before = (workdir / "metrics.jsonl").read_bytes()
    same = {"num_steps": 5, "tensorboard": True, "warm_start__num_steps": 3, "warm_start__batch_size": 16}
    with pytest.raises(ConfigError, match=key.replace("__", ".")) as error:
        quick_run(config_of(**{**same, "dynamic_sampling__oversample": 1.125, key: value}), workdir)
    assert str(error.value).count("Changed: " + key.replace("__", ".") + ".") == 1
    assert (workdir / "metrics.jsonl").read_bytes() == before


def test_the_cache_of_warm_starts_survives_whoever_writes_it_first(mesh1, tmp_path):
    params = {"w": place(np.arange(4.0, dtype=np.float32), replicated(mesh1))}
    target = epath.Path(tmp_path / "cache" / "key")

    def make(params):  # another run of the same warm start is done first
        if not target.exists():
            cached_warm_start(params, target, lambda p: p)
        return params

    got, cached = cached_warm_start(params, target, make)
    assert not cached
    np.testing.assert_array_equal(got["w"], np.arange(4.0))
    got, cached = cached_warm_start(params, target, make)
    assert cached
    np.testing.assert_array_equal(got["w"], np.arange(4.0))


def test_finite_data_ends_the_run_with_its_reason(config_of, tmp_path):
    data = {"tasks__num_tasks": 30, "tasks__selector_kwargs": {"num_epochs": 1}, "num_steps": 50}
    short = quick_run(config_of(**data), tmp_path / "short")
    last = short.metrics[-1]
    check_steps(short.metrics, last["run/step"])
    assert last["run/step"] < 50
    assert last["ledger/dispatched"] == 30
    assert last["ledger/ready"] == 0
    assert 0 < last["train_batch/groups"] < 8
    assert last["train_batch/zero_advantage_groups_frac"] == 0
    assert last["eval/main/pass_at_1"] is not None
    assert f"the data ended after {last['run/step']} of 50 steps" in short.reason
    assert short.reason in "\n".join(short.summary)
    # The same without a short step: what was ready is dropped, and counted in the message.
    stop = quick_run(config_of(**data, dynamic_sampling__on_data_end="stop"), tmp_path / "stop")
    assert stop.metrics[-1]["run/step"] == last["run/step"] - 1
    assert all(r["train_batch/groups"] == 8 for r in stop.metrics[1:])
    assert "the data ended" in stop.reason
    # An ended run stays ended.
    for name, result in (("short", short), ("stop", stop)):
        end = "short" if name == "short" else "stop"
        again = quick_run(config_of(**data, dynamic_sampling__on_data_end=end), tmp_path / name)
        assert list(map(reproducible, again.metrics)) == list(map(reproducible, result.metrics))
        assert again.reason == result.reason


def test_a_used_up_budget_is_an_error_with_counts(config_of, tmp_path):
    config = config_of(reward__verifier="user_code:never", dynamic_sampling__max_num_gen_batches=3)
    with pytest.raises(RunError) as error:
        quick_run(config, tmp_path)
    for part in ("max_num_gen_batches = 3", "24 groups were judged", "24 filtered", "24 all_fail", "drop rate 100%"):
        assert part in str(error.value)
    assert [r["run/step"] for r in on_disk(tmp_path)] == [0]


def test_without_a_cap_the_other_budget_ends_it(config_of, tmp_path):
    budget = {"dynamic_sampling__max_num_gen_batches": 0, "dynamic_sampling__max_replacements_per_slot": 2}
    with pytest.raises(RunError, match="max_replacements_per_slot = 2"):
        quick_run(config_of(reward__verifier="user_code:never", **budget), tmp_path)


def test_short_steps_train_what_was_kept(config_of, tmp_path):
    config = config_of(
        num_steps=4, reward__verifier="user_code:rare", dynamic_sampling__max_num_gen_batches=1,
        dynamic_sampling__on_exhausted="short",
    )  # fmt: skip
    result = quick_run(config, tmp_path)
    check_steps(result.metrics, 4)
    groups = [r["train_batch/groups"] for r in result.metrics[1:]]
    assert min(groups) < 8
    assert min(groups) > 0
    assert all(r["backfill/num_rounds"] == 1 for r in result.metrics[1:])
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in result.metrics[1:])


def test_steps_that_keep_nothing_make_no_update_and_end(config_of, tmp_path):
    config = config_of(
        reward__verifier="user_code:never", dynamic_sampling__max_num_gen_batches=1,
        dynamic_sampling__on_exhausted="short", dynamic_sampling__max_consecutive_unfilled_steps=2,
    )  # fmt: skip
    with pytest.raises(RunError, match=r"3 times in a row, .*max_consecutive_unfilled_steps = 2"):
        quick_run(config, tmp_path)
    assert [r["run/step"] for r in on_disk(tmp_path)] == [0]


@pytest.mark.parametrize("enable", [True, False])
def test_a_broken_verifier_ends_the_run_by_name(config_of, tmp_path, enable):
    config = config_of(
        reward__verifier="user_code:broken", dynamic_sampling__enable=enable,
        rollout_failure__max_consecutive_dropped_prompts=10,
    )  # fmt: skip
    with pytest.raises(RunError) as error:
        quick_run(config, tmp_path)
    for part in ("max_consecutive_dropped_prompts = 10", "64 error", "user_code:broken", "the judge is out"):
        assert part in str(error.value)


def test_grpo_trains_every_group(config_of, tmp_path):
    result = quick_run(config_of(dynamic_sampling__enable=False, reward__verifier="user_code:rare"), tmp_path)
    check_steps(result.metrics, 3)
    for row in result.metrics[1:]:
        assert row["backfill/num_rounds"] == 1
        assert row["ledger/dropped"] == 0
        assert row["group_filter/zero_variance_frac"] == row["train_batch/zero_advantage_groups_frac"]
        assert row["reward/score/all/mean"] == row["reward/score/trained/mean"]
    assert max(r["train_batch/zero_advantage_groups_frac"] for r in result.metrics[1:]) > 0


def test_minibatches_and_epochs_are_updates_and_microbatches_are_not(config_of, tmp_path):
    cut = config_of(train__num_minibatches=2, train__num_epochs=2, train__num_microbatches=2)
    result = quick_run(cut, tmp_path / "cut")
    check_steps(result.metrics, 3)
    assert [r["run/version"] for r in result.metrics] == [0, 4, 8, 12]
    assert result.metrics[-1]["train_step/kl_old_new"] > 0
    whole = quick_run(config_of(num_steps=1), tmp_path / "whole")
    parts = quick_run(config_of(num_steps=1, train__num_microbatches=4), tmp_path / "parts")
    for key in ("train_step/loss", "train_step/grad_norm", "train_step/entropy"):
        assert parts.metrics[1][key] == pytest.approx(whole.metrics[1][key], rel=1e-4, abs=1e-6)


def test_the_version_counts_every_update_of_a_step_also_those_that_were_skipped(config_of, tmp_path):
    config = config_of(
        num_steps=3, train__num_minibatches=4, reward__verifier="user_code:rare",
        dynamic_sampling__max_num_gen_batches=1, dynamic_sampling__on_exhausted="short",
    )  # fmt: skip
    seen = {}

    def noting(config):
        seen["parts"] = quick_build(config)
        return seen["parts"]

    rows = quick_run(config, tmp_path, build_parts=noting).metrics
    assert min(r["train_batch/groups"] for r in rows[1:]) <= 6  # the last of four minibatches of two rows is empty
    assert [r["run/version"] for r in rows] == [0, 4, 8, 12]
    assert int(seen["parts"].state.updates) == 12


def test_surplus_is_carried_with_its_age_and_log_probs(config_of, tmp_path):
    config = config_of(
        num_steps=6, dynamic_sampling__oversample=1.5, dynamic_sampling__refill="full", train__learning_rate=0.01
    )
    result = quick_run(config, tmp_path / "carry")
    check_steps(result.metrics, 6)
    rows = result.metrics[1:]
    carried = [r for r in rows if r["backfill/carried_groups"]]
    assert carried
    for row in rows:
        assert (row["train_batch/staleness/mean"] > 0) == (row["backfill/carried_groups"] > 0)
        assert row["train_step/kl_sampler_trainer"] >= (1e-6 if row in carried else -1e-6)
        assert 0 <= row["train_step/tis_frac"] <= 1
    for before, row in itertools.pairwise(rows):
        assert row["backfill/carried_groups"] == min(before["backfill/surplus_groups"], 8)
    dropped = quick_run(
        config_of(num_steps=3, dynamic_sampling__oversample=1.5, dynamic_sampling__surplus="drop"), tmp_path / "drop"
    )
    assert all(r["backfill/carried_groups"] == 0 and r["ledger/ready"] == 0 for r in dropped.metrics[1:])
    assert dropped.metrics[-1]["ledger/dropped/surplus"] > 0


def test_the_surplus_of_a_selector_that_speaks_numpy_is_in_the_checkpoint(config_of, tmp_path):
    selector = {"tasks__selector": "user_code:NumpySelector", "dynamic_sampling__oversample": 1.5}
    assert quick_run(config_of(num_steps=2, **selector), tmp_path).metrics[-1]["ledger/ready"] > 0
    check_steps(quick_run(config_of(num_steps=3, **selector), tmp_path).metrics, 3)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_workdir_that_cannot_be_written_is_named(config_of, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=f"the workdir {tmp_path / name} cannot be written"):
        quick_run(config_of(), tmp_path / name)


def test_partial_credit_does_not_pass(config_of, tmp_path):
    config = config_of(num_steps=0, reward__verifier="prefix_fraction", evaluation__temperature=1.0)
    (row,) = quick_run(config, tmp_path / "strict").metrics
    assert row["eval/main/pass_at_1"] < row["eval/main/reward"] < 0.5
    config = config_of(
        num_steps=0, reward__verifier="prefix_fraction", evaluation__temperature=1.0, evaluation__pass_score=1e-3
    )
    (lax,) = quick_run(config, tmp_path / "lax").metrics
    assert lax["eval/main/pass_at_1"] > row["eval/main/reward"] == lax["eval/main/reward"]


def test_a_callback_gets_every_row_and_its_end(config_of, tmp_path):
    class Writer:
        def __init__(self):
            self.rows, self.closed = [], False

        def write(self, step, row):
            assert row["run/step"] == step
            self.rows.append(row)

        def close(self):
            self.closed = True

    writer = Writer()
    result = quick_run(config_of(num_steps=2), tmp_path, [writer])
    assert writer.rows == result.metrics
    assert writer.closed


def test_eight_devices_make_a_whole_run(config_of, tmp_path):
    config = config_of(num_steps=3, dynamic_sampling__oversample=1.5, dynamic_sampling__refill="full")
    result = quick_run(config, tmp_path, build_parts=lambda c: quick_build(c, 8))
    check_steps(result.metrics, 3)
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in result.metrics[1:])


def test_nothing_compiles_while_kept_counts_range_from_none_to_all(config_of, tmp_path):
    kept = []

    def watched(config):
        parts = build_one_device(config)
        take = parts.producer.take_judged

        def take_judged():
            judged = take()
            verdicts = [v for j in judged for v in j.judged.verdict_P]
            if verdicts:
                kept.append((verdicts.count(Verdict.KEPT), len(verdicts)))
            return judged

        parts.producer.take_judged = take_judged
        return parts

    def build_one_device(config):
        make_mesh = sharding.make_mesh
        with mock.patch.object(sharding, "make_mesh", lambda c: make_mesh(c, jax.devices()[:1])):
            return build(config)

    config = config_of(
        num_steps=200, fail_on_recompile=True, dynamic_sampling__filter="user_code:in_bursts",
        dynamic_sampling__oversample=1.5, dynamic_sampling__max_num_gen_batches=0, checkpoint__every_steps=50,
        evaluation__every_steps=25,
    )  # fmt: skip
    result = quick_run(config, tmp_path, build_parts=watched)
    check_steps(result.metrics, 200)
    assert (0, 12) in kept
    assert any(k == n == 12 for k, n in kept) or max(k for k, _ in kept) >= 11
    assert len({k for k, _ in kept}) >= 8


@pytest.fixture(scope="module")
def config_file(config_of, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.py"
    return write_config_file(path, config_of())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--config.num_stepz=3"], ["config.num_stepz", "num_steps"]),
        (["--config.loss.clip_hi=0.3"], ["config.loss.clip_hi", "loss.clip_high"]),
        (["--config.num_prompts_per_step=0"], ["config.num_prompts_per_step", "must be positive"]),
        (["--config.sampler.num_slots=0"], ["config.sampler.num_slots", "memory_budget_mb"]),
        (["--config.num_steps=many"], ["num_steps"]),
        (["stray"], ["stray"]),
        (None, ["workdir"]),
    ],
)  # fmt: skip
def test_the_command_line_names_what_is_wrong(config_file, tmp_path, flags, expected):
    command = [sys.executable, "launch/train.py", f"--config={config_file}"]
    command += [f"--workdir={tmp_path / 'run'}", *flags] if flags is not None else []
    environment = child_environment(1, tmp_path / "cache")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert all(part in output for part in expected), output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()
