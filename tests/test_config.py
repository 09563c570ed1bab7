import dataclasses
import json

import pytest
from ml_collections import ConfigDict
from tiny import tiny_mapping

from dynrl.bookkeeping import check_same_config
from dynrl.build import build, check_algorithm
from dynrl.build_rollout import build_schedule, make_buffer
from dynrl.build_tasks import make_tasks
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
    ({"train": {"weight_decay": -0.1}}, r"config\.train\.weight_decay: -0\.1 must be finite and not negative"),
    ({"train": {"adam_b1": 1.0}}, r"config\.train\.adam_b1: 1\.0 must lie in \[0, 1\)"),
    ({"seed": -1}, r"config\.seed: -1 must lie in 0 to"),
    ({"seed": 2**32}, r"config\.seed: 4294967296 must lie in 0 to"),
    ({"model": 3}, r"config\.model: expected a group of keys, got 3"),
    ({"model": {"dtype": "float16"}}, r"config\.model\.dtype: 'float16' is not one of 'float32', 'bfloat16'"),
    ({"model": {"num_heads": 4, "num_kv_heads": 3}}, r"config\.model\.num_heads: 4 is no multiple of num_kv_heads = 3"),
    ({"model": {"head_dim": 7}}, r"config\.model\.head_dim: 7 must be even"),
    ({"loss": {"clip_low": 1.5}}, r"config\.loss\.clip_low: 1\.5 must be at most 1 \(no lower bound\)"),
    ({"loss": {"loss": "reinforce"}}, r"config\.loss\.loss: 'reinforce' is not one of 'ppo', 'gspo', 'cispo'"),
    ({"loss": {"dual_clip": 0.9}}, r"config\.loss\.dual_clip: 0\.9 must be 0 \(off\) or above 1"),
    ({"loss": {"dual_clip": 3.0, "loss": "cispo"}}, r"config\.loss\.dual_clip: 3\.0 has no meaning for loss\.loss"),
    ({"loss": {"constant_length": 5}}, r"config\.loss\.constant_length: 5 has no meaning for loss\.aggregation = 'tok"),
    ({"loss": {"overlong": "penalty"}}, r"config\.loss\.overlong_cache_tokens: 0 must lie in 1 to .* = 12"),
    (
        {"loss": {"overlong": "penalty", "overlong_cache_tokens": 13}},
        r"config\.loss\.overlong_cache_tokens: 13 must lie in 1 to sampler\.max_completion_tokens = 12",
    ),
    ({"loss": {"overlong_cache_tokens": 4}}, r"overlong_cache_tokens: 4 .* and be 0 without"),
    ({"loss": {"kl": "k4"}}, r"config\.loss\.kl: 'k4' is not one of 'k1', 'k2', 'k3'"),
    ({"loss": {"kl_coef": float("inf")}}, r"config\.loss\.kl_coef: inf must be finite"),
    ({"loss": {"rewards": "score"}}, r"config\.loss\.rewards: expected a tuple, got 'score'"),
    ({"loss": {"rewards": ("score", 1)}}, r"config\.loss\.rewards\[1\]: expected str, got int 1"),
    ({"loss": {"rewards": ("score", "score")}}, r"config\.loss\.rewards: .* names a reward twice"),
    (
        {"loss": {"rewards": ("style", "form")}},
        r"config\.dynamic_sampling\.metric: 'score' is not among loss\.rewards = \('style', 'form'\)",
    ),
    (
        {"loss": {"rewards": ("score", "form"), "overlong": "penalty", "overlong_cache_tokens": 4}},
        r"config\.loss\.overlong: 'penalty' shapes one reward",
    ),
    ({"loss": {"kl": "k1"}}, r"config\.loss\.kl: 'k1' has no meaning with loss\.kl_coef = 0"),
    ({"loss": {"regularize": "all"}}, r"config\.loss\.regularize: 'all' has no meaning without loss\.kl_coef or"),
    ({"tasks": {"long_prompts": "cut"}}, r"config\.tasks\.long_prompts: 'cut' is not one of 'error', 'skip'"),
    ({"reward": {"verifiers": "exact_match"}}, r"config\.reward\.verifiers: expected a mapping"),
    ({"reward": {"timeout_secs": 0}}, r"config\.reward\.timeout_secs: 0\.0 must be positive"),
    ({"model": {"tokenizer": "bpe"}}, r"config\.model\.tokenizer: 'bpe' is not one of 'auto', 'char', 'byte'"),
    ({"evaluation": {"temperature": float("nan")}}, r"config\.evaluation\.temperature: nan must be finite"),
    ({"mesh": {"data": -1}}, r"config\.mesh\.data: -1 must not be negative"),
    ({"sampler": {"chunk_steps": 0}}, r"config\.sampler\.chunk_steps: 0 must be positive"),
    ({"tasks": {"source_kwargs": {"a": {1, 2}}}}, r"config\.tasks\.source_kwargs: .* is not JSON-able"),
    ({"tasks": {"source_kwargs": {"a": float("nan")}}}, r"config\.tasks\.source_kwargs: .* is not JSON-able"),
    ({3: 1}, r"config\.3: there is no such key"),
    ({"loss": {"tis_cap": 0.5}}, r"config\.loss\.tis_cap: 0\.5 must be 0 \(off\) or at least 1"),
    ({"dynamic_sampling": {"oversample": 0.5}}, r"config\.dynamic_sampling\.oversample: 0\.5 must be at least 1"),
    ({"dynamic_sampling": {"filter_kwargs": 1}}, r"config\.dynamic_sampling\.filter_kwargs: expected a mapping, got 1"),
    ({"rollout_failure": {"min_live_per_group": 9}}, r"min_live_per_group: 9 exceeds num_generations_per_prompt = 8"),
    ({"train": {"num_minibatches": 3}}, r"config\.num_prompts_per_step: 64 is no multiple of train\.num_minibatches"),
    ({"sampler": {"num_slots": 0}}, r"config\.sampler\.num_slots: 0 and memory_budget_mb = 0: one of them must be 0"),
    ({"sampler": {"memory_budget_mb": 9}}, r"num_slots: 128 and memory_budget_mb = 9: one of them must be 0"),
    ({"sampler": {"stop_strings": ("a", "")}}, r"config\.sampler\.stop_strings: .* holds an empty string"),
    ({"sampler": {"kv_dtype": "int4"}}, r"config\.sampler\.kv_dtype: 'int4' is not one of"),
    ({"evaluation": {"top_p": 0.0}}, r"config\.evaluation\.top_p: 0\.0 must lie above 0"),
    ({"evaluation": {"min_p": 2.0}}, r"config\.evaluation\.min_p: 2\.0 must lie in 0 to 1"),
    (
        {"schedule": {"mode": "async", "name": "in_order"}},
        r"config\.schedule\.max_lookahead_versions: 0 leaves nothing to do while .* needs at least the 1 versions",
    ),
    (
        {"schedule": {"mode": "async", "name": "windowed"}, "train": {"num_epochs": 2}},
        r"config\.schedule\.max_staleness_versions: 1 leaves nothing to do while .* needs at least the 2 versions",
    ),
    ({"dynamic_sampling": {"on_exhausted": "relax"}}, r"on_exhausted: 'relax' admits groups .* 'has_signal' refuses"),
    (
        {"dynamic_sampling": {"max_oversample": 0.5}},
        r"dynamic_sampling\.max_oversample: 0\.5 must be at least 1",
    ),
    ({"dynamic_sampling": {"oversample": "some"}}, r"dynamic_sampling\.oversample: 'some' is not one of 'none', 'adap"),
    ({"dynamic_sampling": {"oversample": float("inf")}}, r"dynamic_sampling\.oversample: inf must be at least 1"),
    ({"dynamic_sampling": {"oversample": None}}, r"dynamic_sampling\.oversample: expected float, got NoneType None"),
    ({"rollout_failure": {"max_infra_attempts_per_prompt": 0}}, r"max_infra_attempts_per_prompt: 0 must be positive"),
    ({"sampler": {"top_p": 0.9}}, r"config\.sampler\.top_p: there is no such key"),  # training recomputes it all
]


@pytest.mark.parametrize(("mapping", "message"), WRONG)
def test_wrong_configurations_name_the_key(mapping, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)


# What only the core, the sources or the machine know is checked when the parts are built.
WRONG_PARTS = [
    ({"num_generations_per_prompt": 1}, r"num_generations_per_prompt: 1 gives loss\.estimator = 'grpo' no baseline"),
    (
        {"num_generations_per_prompt": 1, "loss": {"estimator": "reinforce_pp"}},
        r"dynamic_sampling\.filter: 'has_signal' drops every group of one rollout; .*'mixed_sign'",
    ),
    (
        {
            "num_generations_per_prompt": 1,
            "loss": {"estimator": "reinforce_pp"},
            "dynamic_sampling": {"filter": "all_of", "filter_kwargs": {"filters": ("mixed_sign", "has_signal")}},
        },
        r"dynamic_sampling\.filter: .*all_of.* drops every group of one rollout",
    ),
    ({"loss": {"estimator": "pass_at_k"}}, r"loss\.estimator_kwargs: k = 4 leaves a group of 4 live .* below 4"),
    ({"loss": {"estimator_kwargs": {"ddof": 4}}}, r"loss\.estimator_kwargs: ddof = 4 leaves a group of 4 live"),
    (
        {"loss": {"estimator_kwargs": {"ddof": 2}}, "rollout_failure": {"min_live_per_group": 2}},
        r"loss\.estimator_kwargs: ddof = 2 leaves a group of 2 live rollouts .*min_live_per_group",
    ),
    (
        {"loss": {"estimator": "gdpo", "rewards": ("score", "a"), "estimator_kwargs": {"weights": (1, 2, 3)}}},
        r"loss\.estimator_kwargs: weights = \(1, 2, 3\) are 3, loss\.rewards names 2",
    ),
    ({"loss": {"estimator": "gpro"}}, r"loss\.estimator: .*'gpro'.*did you mean 'grpo'"),
    ({"loss": {"estimator_kwargs": {"dof": 1}}}, r"loss\.estimator: .*dof.*did you mean 'ddof'"),
    ({"loss": {"estimator": "pass_at_k", "estimator_kwargs": {"k": 0}}}, r"loss\.estimator: .*k.*at least 1"),
    ({"loss": {"estimator": "gdpo"}}, r"loss\.rewards: \(\), but loss\.estimator = 'gdpo' normalises several rewards"),
    ({"loss": {"rewards": ("score", "form")}}, r"loss\.rewards: .*, but loss\.estimator = 'grpo' takes one reward"),
    (
        {"loss": {"estimator": "rl_zvp"}},
        r"loss\.estimator: 'rl_zvp' learns from groups without signal.*set it to False",
    ),
    ({"dynamic_sampling": {"filter": "has_signals"}}, r"dynamic_sampling\.filter: .*did you mean 'has_signal'"),
    ({"dynamic_sampling": {"filter": "min_std"}}, r"dynamic_sampling\.filter: .*threshold"),
    (
        {"tasks": {"source": "digit_sort"}},
        r"tasks\.source: unknown task source 'digit_sort'.*did you mean 'digit_sorting'",
    ),
    (
        {"tasks": {"source_kwargs": {"max_len": 3}}},
        r"tasks\.source: .*takes no argument 'max_len'.*did you mean 'max_length'",
    ),
    ({"tasks": {"max_prompt_tokens": 3}}, r"tasks\.max_prompt_tokens: 3 is too few for source digit_sorting"),
    ({"tasks": {"selector": "random"}}, r"tasks\.selector: unknown selector 'random'"),
    ({"tasks": {"selector_kwargs": {"epochs": 3}}}, r"tasks\.selector: .*'epochs'.*did you mean 'num_epochs'"),
    ({"evaluation": {"num_tasks": 20_000}}, r"evaluation\.num_tasks: digit_sorting gave"),
    ({"tasks": {"num_tasks": 5}}, r"tasks\.num_tasks: 5 training tasks are less than one step's .* = 8"),
    ({"evaluation": {"source_kwargs": {"a": 1}}}, r"evaluation\.source_kwargs: .*evaluation\.source is empty"),
    ({"reward": {"verifier": "exact"}}, r"reward\.verifier: no verifier 'exact'.*did you mean 'exact_match'"),
    ({"reward": {"verifiers": {"sums": "exact_match"}}}, r"reward\.verifiers: .*'sums'.*digit_sorting"),
    ({"mesh": {"tensor": 3}}, r"mesh: data 0 x fsdp 1 x tensor 3 does not give the 8 devices"),
    (
        {"num_prompts_per_step": 12},
        r"num_prompts_per_step: 12 groups per step are no multiple of the mesh's 8 row shards",
    ),
    (
        {"sampler": {"num_slots": 12}},
        r"sampler\.num_slots: 12 slots are not a positive multiple of the mesh's 8 row shards .* use 16",
    ),
    (
        {"model": {"num_layers": 32, "head_dim": 128}, "sampler": {"num_slots": 0, "memory_budget_mb": 1}},
        r"sampler\.memory_budget_mb: 1\.0 MiB do not hold 8 slots: those take .* MiB",
    ),
    (
        {"sampler": {"num_slots": 8_000_000}, "model": {"num_layers": 30, "head_dim": 128}},
        r"sampler\.num_slots: .* MiB do not fit into the .* MiB of a device: training .* MiB, sampler .* MiB",
    ),
]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"schedule": {"mode": "async"}}, r"schedule\.mode: 'async' generates .* schedule\.name = 'rounds' does not"),
        ({"schedule": {"clock": "wall"}}, r"schedule\.clock: 'wall' has no meaning for schedule\.name = 'rounds'"),
        (
            {"schedule": {"name": "ready_first"}, "dynamic_sampling": {"surplus": "drop"}},
            r"dynamic_sampling\.surplus: 'drop' .* favours short answers",
        ),
        ({"rollout_failure": {"on_dropped_prompt": "shrink"}}, r"on_dropped_prompt: 'shrink' has no meaning for sched"),
        ({"schedule": {"name": "in_ordre"}}, r"schedule\.name: unknown schedule 'in_ordre' \(did you mean 'in_order'"),
    ],
)
def test_schedules_that_cannot_work_name_the_key(mapping, message):
    with pytest.raises(ConfigError, match=rf"^config\.(rollout_failure\.)?{message}"):
        build_schedule(from_mapping(mapping))


# What a message advises clears it.
@pytest.mark.parametrize(
    "mapping",
    [
        {"schedule": {"mode": "async", "name": "in_order", "max_lookahead_versions": 1}},
        {"schedule": {"mode": "async", "name": "windowed", "max_staleness_versions": 2}, "train": {"num_epochs": 2}},
        {"schedule": {"name": "ready_first"}, "dynamic_sampling": {"surplus": "carry"}},
        {"dynamic_sampling": {"on_exhausted": "short"}},
        {"dynamic_sampling": {"on_exhausted": "relax", "filter": "min_std", "filter_kwargs": {"threshold": 0.3}}},
        {"dynamic_sampling": {"oversample": "adaptive"}},
    ],
)
def test_right_configurations_pass(mapping):
    config = from_mapping(mapping)
    build_schedule(config)
    whole = to_mapping(config)
    assert all(whole[group].items() >= values.items() for group, values in mapping.items())


def test_keys_that_the_schedule_does_not_look_at_are_warned_of():
    ignored = {
        "schedule__max_lookahead_versions": 2, "schedule__sample_freshest_first": False,
        "dynamic_sampling__max_oversample": 2.0,
    }  # fmt: skip
    warnings = build_schedule(from_mapping(tiny_mapping(**ignored)))[1]
    assert [w.split(" ")[0] for w in warnings] == [
        "schedule.max_lookahead_versions", "schedule.sample_freshest_first", "dynamic_sampling.max_oversample",
    ]  # fmt: skip
    used = {"schedule__name": "in_order", "dynamic_sampling__oversample": "adaptive"}
    warnings = build_schedule(from_mapping(tiny_mapping(**ignored, **used)))[1]
    assert [w.split(" ")[0] for w in warnings] == ["schedule.sample_freshest_first"]
    windowed = tiny_mapping(schedule__name="windowed", schedule__max_staleness_versions=2)
    (warning,) = build_schedule(from_mapping(windowed))[1]
    assert "schedule.max_staleness_versions = 2 updates, which favours short answers" in warning
    assert build_schedule(from_mapping(tiny_mapping()))[1] == []


def test_a_buffer_that_is_too_small_says_how_many_it_needs(mesh1):
    mapping = {"schedule__name": "in_order", "schedule__max_lookahead_versions": 2, "dynamic_sampling__oversample": 1.5}
    small = from_mapping(tiny_mapping(**mapping, dynamic_sampling__buffer_groups=20))
    with pytest.raises(ConfigError, match=r"buffer_groups: 20 is too few for schedule\.name = 'in_order'") as error:
        make_buffer(small, build_schedule(small)[0], mesh1)
    needed = int(str(error.value).split("under which ")[1].split()[0])
    enough = from_mapping(tiny_mapping(**mapping, dynamic_sampling__buffer_groups=needed))
    assert make_buffer(enough, build_schedule(enough)[0], mesh1).capacity == needed


@pytest.mark.parametrize(("overrides", "message"), WRONG_PARTS)
def test_parts_that_cannot_work_name_the_key(overrides, message):
    mapping = tiny_mapping()
    for key, value in overrides.items():
        mapping[key] = mapping[key] | value if isinstance(value, dict) else value
    config = from_mapping(mapping)
    with pytest.raises(ConfigError, match=rf"^config\.({message})"):
        build(config)


def test_long_rows_of_a_file_are_an_error_or_skipped(tmp_path):
    rows = [{"prompt": f"{i}", "answer": "long rationale"} for i in range(30)] + [{"prompt": "9" * 50, "answer": "1"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "tasks__source": "jsonl", "tasks__source_kwargs": {"path": str(tmp_path / "rows.jsonl")},
        "evaluation__num_tasks": 5, "warm_start__num_steps": 0,
    }  # fmt: skip
    for tokenizer in ("char", "byte"):
        config = from_mapping(tiny_mapping(**changes, model__tokenizer=tokenizer))
        with pytest.raises(ConfigError, match=r"tasks\.max_prompt_tokens: 5 is too few for source jsonl, .* 50"):
            make_tasks(config)
        tasks = make_tasks(
            from_mapping(tiny_mapping(**changes, model__tokenizer=tokenizer, tasks__long_prompts="skip"))
        )
        assert len(tasks.store) == 26
    # A warm start must learn the answers word for word.
    changes |= {"warm_start__num_steps": 1, "tasks__long_prompts": "skip"}
    with pytest.raises(ConfigError, match=r"sampler\.max_completion_tokens: 6 is too few for source jsonl, .* 15"):
        make_tasks(from_mapping(tiny_mapping(**changes)))


def test_one_source_name_has_one_verifier(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}", "answer": "1"}}\n' for i in range(30)))
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f'{{"prompt": "{i}", "answer": "1"}}\n' for i in range(30, 40)))
    changes = {
        "tasks__source": "jsonl", "tasks__source_kwargs": {"path": str(path), "verifier": "integer_match"},
        "evaluation__source": "jsonl", "evaluation__source_kwargs": {"path": str(other)}, "evaluation__num_tasks": 5,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"evaluation\.source: tasks of source 'jsonl' are judged by 'exact_match'"):
        make_tasks(from_mapping(tiny_mapping(**changes)))
    tasks = make_tasks(from_mapping(tiny_mapping(**changes, reward__verifier="gsm8k")))
    assert tasks.verifiers == {"jsonl": "gsm8k"}


def test_what_works_but_is_not_what_one_wants_is_a_warning():
    config = from_mapping(tiny_mapping(loss__estimator="reinforce_pp"))
    (warning,) = check_algorithm(config)
    assert "loss.estimator = 'reinforce_pp' normalises over the batch" in warning
    assert check_algorithm(from_mapping(tiny_mapping(loss__estimator="reinforce_pp_baseline"))) == []
    old = tiny_mapping(train__num_minibatches=2, train__num_epochs=5)
    (warning,) = build_schedule(from_mapping(old))[1]
    assert "max_surplus_age_versions = 8 makes every carried group too old: a step is" in warning
    off = tiny_mapping(loss__estimator="reinforce_pp", dynamic_sampling__enable=False)
    assert check_algorithm(from_mapping(off)) == []


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


def test_a_run_resumes_with_keys_that_it_did_not_know():
    config = from_mapping(tiny_mapping())
    old = to_mapping(config)
    del old["sampler"]["prefill_tokens"], old["warm_start"], old["compile_cache"]
    old["warm_start"] = {"num_steps": 60, "batch_size": 64}
    check_same_config(old, config)
    for key, value in (("sampler__prefill_tokens", 99), ("tasks__source_kwargs", {"min_length": 3})):
        changed = from_mapping(tiny_mapping(**{key: value}))
        name = key.replace("__", ".")
        with pytest.raises(ConfigError, match=rf"^config\.{name}.*: this workdir's run .* Changed: {name}"):
            check_same_config(old, changed)
    check_same_config(old, from_mapping(tiny_mapping(num_steps=10)))
    for key, value in (  # what the messages of a budget that is used up advise
        ("dynamic_sampling__on_exhausted", "short"), ("dynamic_sampling__max_num_gen_batches", 0),
        ("dynamic_sampling__max_replacements_per_slot", 99), ("rollout_failure__max_skipped_prompts", 9999),
        ("reward__timeout_secs", 60.0), ("train__max_nonfinite_updates", 9),
    ):  # fmt: skip
        check_same_config(old, from_mapping(tiny_mapping(**{key: value})))
    with pytest.raises(ConfigError, match=r"^config\.num_steps"):
        check_same_config(old, from_mapping(tiny_mapping(num_steps=1)))
