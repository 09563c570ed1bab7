"""Every file of configs/ is a run: shrunk, it trains; and the algorithms are what their headers say."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import ROOT, quick_build
from tiny import tiny_mapping

import dynrl
from dynrl.config import from_mapping, known_keys

pytestmark = pytest.mark.usefixtures("quick_compiles")

sys.path.insert(0, str(ROOT))  # as launch/train.py does

ALGORITHMS = {  # estimator, loss, aggregation, whether groups are filtered
    "grpo": ("grpo", "ppo", "sequence_mean", False),
    "dapo": ("grpo", "ppo", "token_mean", True),
    "dr_grpo": ("dr_grpo", "ppo", "constant", False),
    "rloo": ("rloo", "ppo", "constant", False),
    "gspo": ("grpo", "gspo", "sequence_mean", False),
    "cispo": ("grpo", "cispo", "token_mean", True),
    "rl_zvp": ("rl_zvp", "ppo", "token_mean", False),
}


def config_of(name, arg=""):
    return importlib.import_module(f"configs.{name}").get_config(arg)


def test_no_file_is_forgotten():
    names = {path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__"}
    assert names == {*ALGORITHMS, "quickstart", "calculator", "dynamic_tasks", "gsm8k", "reasoning_gym"}
    for name in names:
        header = (ROOT / "configs" / f"{name}.py").read_text().split('"""')[1]
        assert f"python launch/train.py --config=configs/{name}.py" in header
        if name in ALGORITHMS:
            assert "Deviations from the paper:\n- " in header


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_train(name, tmp_path):
    shipped = from_mapping(config_of(name))
    loss = shipped.loss
    facts = (loss.estimator, loss.loss, loss.aggregation, shipped.dynamic_sampling.enable)
    assert facts == ALGORITHMS[name]
    config = config_of(name)
    tiny = tiny_mapping(model__num_layers=1, warm_start__num_steps=0, reward__verifier="user_code:coin", num_steps=2)
    for group in ("model", "tasks", "reward", "sampler", "evaluation", "warm_start", "checkpoint"):
        config[group] = tiny[group]
    for key in ("num_steps", "num_prompts_per_step", "num_generations_per_prompt", "progress"):
        config[key] = tiny[key]
    config.train.num_microbatches, config.tensorboard = 1, False
    if config.loss.overlong == "penalty":
        config.loss.overlong_cache_tokens = 2
    result = dynrl.run(config, str(tmp_path), (), quick_build)
    rows: Any = result.metrics[1:]
    assert len(rows) == 2
    for row in rows:
        assert row["train_step/grad_norm"] > 0
        assert row["train_step/nonfinite"] == row["run/recompiles"] == 0
        if name in ("dapo", "cispo", "rl_zvp"):  # every group trains: filtered, or by its entropy
            assert row["train_batch/zero_advantage_groups_frac"] == 0
    assert ("train_step/kl_ref" in rows[0]) == (loss.kl_coef > 0)
    if loss.kl_coef:
        assert rows[0]["train_step/kl_ref"] == pytest.approx(0, abs=1e-6)  # the reference is where training begins
        assert rows[1]["train_step/kl_ref"] > 0


def test_the_calculator_plays_turns(tmp_path):
    config = config_of("calculator", "grpo")  # random weights: few answers are right, and every group is trained
    tiny = tiny_mapping(model__num_layers=1)
    for group in ("model", "warm_start", "checkpoint"):
        config[group] = tiny[group]
    config.warm_start.num_steps = 0
    for key in ("num_prompts_per_step", "num_generations_per_prompt", "progress"):
        config[key] = tiny[key]
    config.num_steps, config.tensorboard, config.train.num_microbatches = 1, False, 1
    config.sampler.num_slots, config.evaluation.num_tasks, config.evaluation.every_steps = 16, 8, 0
    rows: Any = dynrl.run(config, str(tmp_path), (), quick_build).metrics
    assert [r["run/step"] for r in rows] == [0, 1]
    assert rows[1]["run/recompiles"] == 0
    assert rows[1]["length/all/mean"] <= 40


@pytest.mark.parametrize(
    "arg", ["", "reappend,greso", "self_propose,learnability", "none,difficulty_pools", ",weighted"]
)
def test_dynamic_tasks_train(arg, tmp_path):
    config = config_of("dynamic_tasks", arg)
    tiny = tiny_mapping(model__num_layers=1)
    for group in ("model", "warm_start", "checkpoint"):
        config[group] = tiny[group]
    for key in ("num_prompts_per_step", "num_generations_per_prompt", "progress"):
        config[key] = tiny[key]
    config.num_steps, config.tensorboard, config.train.num_microbatches, config.warm_start.num_steps = 3, False, 1, 0
    config.sampler.num_slots, config.evaluation.num_tasks, config.evaluation.every_steps = 32, 8, 0
    config.reward.verifier, config.generation.self_check = "user_code:coin", not config.generation.generator
    config.dynamic_sampling.max_num_gen_batches = 0
    rows: Any = dynrl.run(config, str(tmp_path), (), quick_build).metrics
    assert [r["run/step"] for r in rows] == [0, 1, 2, 3]
    assert rows[-1]["run/recompiles"] == 0
    grown = sum(r.get("tasks/appended") or r.get("self_propose/admitted") or 0 for r in rows)
    assert (grown > 0) == (not arg.startswith("none"))
    assert rows[-1]["reward/score/base/mean"] is not None  # the floor's share of draws


def test_an_algorithm_takes_another_configuration_with_its_argument():
    plain, changed = config_of("quickstart", "grpo"), config_of("dr_grpo", "quickstart:grpo")
    assert not changed.dynamic_sampling.enable
    assert changed.tasks == plain.tasks
    with pytest.raises(ValueError, match=r"configs/nope\.py: there is no such configuration"):
        config_of("grpo", "nope")
    with pytest.raises(ValueError, match="takes one of dapo, grpo"):
        config_of("grpo", "quickstart:nope")


def test_configurations_set_known_keys_only():
    for path in sorted(Path(ROOT / "configs").glob("*.py")):
        if path.stem != "__init__":
            flat = {key for key, _ in walk(config_of(path.stem).to_dict())}
            assert flat <= {*known_keys()}


def walk(mapping, prefix=""):
    for key, value in mapping.items():
        if f"{prefix}{key}" in known_keys() and isinstance(value, dict) and not key.endswith(("kwargs", "verifiers")):
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
