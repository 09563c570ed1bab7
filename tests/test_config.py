import dataclasses

import pytest
from ml_collections import ConfigDict
from tiny import tiny_mapping

from dynrl.config import ConfigError, RunConfig, changed_keys, from_mapping, known_keys, to_mapping

WRONG = [
    ({"num_step": 1}, r"config\.num_step: there is no such key; did you mean num_steps"),
    ({"train": {"lr": 1.0}}, r"config\.train\.lr: there is no such key"),
    ({"dynamic_sampling": {"max_gen_batches": 1}}, r"did you mean dynamic_sampling\.max_num_gen_batches"),
    ({"num_steps": "10"}, r"config\.num_steps: expected int, got str '10'"),
    ({"num_steps": 1.5}, r"config\.num_steps: expected int, got float"),
    ({"num_steps": True}, r"config\.num_steps: expected int, got bool"),
    ({"train": {"learning_rate": None}}, r"config\.train\.learning_rate: expected float, got NoneType"),
    ({"train": {"learning_rate": 0.0}}, r"config\.train\.learning_rate: 0\.0 must be positive"),
    ({"train": {"learning_rate": float("nan")}}, r"config\.train\.learning_rate: nan must be positive"),
    ({"train": {"weight_decay": -0.1}}, r"config\.train\.weight_decay: -0\.1 must not be negative"),
    ({"train": {"adam_b1": 1.0}}, r"config\.train\.adam_b1: 1\.0 must lie in \[0, 1\)"),
    ({"seed": -1}, r"config\.seed: -1 must lie in 0 to"),
    ({"seed": 2**32}, r"config\.seed: 4294967296 must lie in 0 to"),
    ({"model": 3}, r"config\.model: expected a group of keys, got 3"),
    ({"model": {"dtype": "float16"}}, r"config\.model\.dtype: 'float16' is not one of 'float32', 'bfloat16'"),
    ({"model": {"num_heads": 4, "num_kv_heads": 3}}, r"config\.model\.num_heads: 4 is no multiple of num_kv_heads = 3"),
    ({"model": {"head_dim": 7}}, r"config\.model\.head_dim: 7 must be even"),
    ({"loss": {"estimator": "ppo"}}, r"config\.loss\.estimator: 'ppo' is not one of"),
    ({"loss": {"clip_low": 1.0}}, r"config\.loss\.clip_low: 1\.0 must be below 1"),
    ({"loss": {"tis_cap": 0.5}}, r"config\.loss\.tis_cap: 0\.5 must be 0 \(off\) or at least 1"),
    ({"schedule": {"name": "windowed"}}, r"config\.schedule\.name: 'windowed' is not a schedule"),
    ({"dynamic_sampling": {"oversample": 0.5}}, r"config\.dynamic_sampling\.oversample: 0\.5 must be at least 1"),
    ({"dynamic_sampling": {"filter_kwargs": 1}}, r"config\.dynamic_sampling\.filter_kwargs: expected a mapping, got 1"),
    (
        {"num_generations_per_prompt": 1},
        r"config\.num_generations_per_prompt: 1 gives loss.estimator = 'grpo' no baseline",
    ),
    ({"rollout_failure": {"min_live_per_group": 9}}, r"min_live_per_group: 9 exceeds num_generations_per_prompt = 8"),
    ({"train": {"num_minibatches": 3}}, r"config\.num_prompts_per_step: 64 is no multiple of train\.num_minibatches"),
    ({"sampler": {"num_slots": 100}}, r"config\.sampler\.num_slots: 100 is no multiple of num_generations_per_prompt"),
    ({"tasks": {"num_tasks": 10}}, r"config\.tasks\.num_tasks: 10 is less than one step"),
]


@pytest.mark.parametrize(("mapping", "message"), WRONG)
def test_wrong_configurations_name_the_key(mapping, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)


def test_round_trip_and_config_dict():
    mapping = tiny_mapping(train__learning_rate=1)
    config = from_mapping(ConfigDict(mapping))
    assert config.train.learning_rate == 1.0
    assert isinstance(config.train.learning_rate, float)
    assert from_mapping(to_mapping(config)) == config


def test_changed_keys_are_full_names():
    old, new = to_mapping(RunConfig()), to_mapping(RunConfig())
    new["train"]["learning_rate"] = 1.0
    new["tasks"]["source_kwargs"] = {"min_length": 3}
    assert changed_keys(old, new) == ["tasks.source_kwargs.min_length", "train.learning_rate"]
    assert changed_keys({"a": (1, 2)}, {"a": [1, 2]}) == []
    assert changed_keys({"a": [{"b": (1, {"c": (2,)})}]}, {"a": [{"b": [1, {"c": [2]}]}]}) == []  # as JSON has it


def test_known_keys_cover_every_field():
    keys = known_keys()
    assert "train.learning_rate" in keys
    assert "num_steps" in keys
    assert len(keys) > len(dataclasses.fields(RunConfig))
