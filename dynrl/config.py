"""The configuration of a run: frozen dataclasses, and their conversion from ml_collections.

A `ConfigDict` is converted once, at start-up. Unknown keys, wrong types and impossible values raise `ConfigError`,
which names the key in full. Every key here is read by something; a test holds the package to that.

Lengths are in tokens, times in seconds (`_secs`), counts start with `num_` or `max_`. Steps are optimizer steps.
"""

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from dynrl.validation import ConfigError, convert, validate

__all__ = ["ConfigError"]

PositiveInt = Annotated[int, "must be positive", lambda x: x > 0]
PositiveFloat = Annotated[float, "must be positive and finite", lambda x: 0 < x < math.inf]
NonNegativeInt = Annotated[int, "must not be negative", lambda x: x >= 0]
NonNegativeFloat = Annotated[float, "must be finite and not negative", lambda x: 0 <= x < math.inf]
Fraction = Annotated[float, "must lie in 0 to 1", lambda x: 0 <= x <= 1]
Probability = Annotated[float, "must lie between 0 and 1", lambda x: 0 < x < 1]


@dataclass(frozen=True)
class ModelConfig:
    """The decoder's architecture; the knobs that Llama- and Qwen-type checkpoints need."""

    num_layers: PositiveInt = 2
    width: PositiveInt = 64
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 4
    head_dim: PositiveInt = 16
    mlp_width: PositiveInt = 256
    activation: Literal["silu", "gelu", "relu"] = "silu"
    gated_mlp: bool = True  # SwiGLU with silu, GeGLU with gelu
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    rope_base: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations and matmuls; parameters stay float32
    tokenizer: Literal["auto", "char", "byte"] = "auto"  # auto: characters where the source declares them, else bytes
    scan_layers: bool = False  # one compiled layer: less compile time for deep models, slower steps on CPU
    remat: Literal["none", "full", "dots"] = "none"  # what the backward pass recomputes


@dataclass(frozen=True)
class MeshConfig:
    """Device mesh. `data` = 0 takes every device that the other axes leave."""

    data: NonNegativeInt = 0
    fsdp: PositiveInt = 1
    tensor: PositiveInt = 1


@dataclass(frozen=True)
class TasksConfig:
    """Training tasks and how they are chosen."""

    source: str = "digit_sorting"  # a built-in name, or package.module:Class
    source_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_tasks: PositiveInt = 100_000  # at most; a finite source may have fewer
    selector: str = "epoch"  # a built-in name, or package.module:Class
    selector_kwargs: Mapping[str, Any] = field(default_factory=dict)
    floor_share: Fraction = 0.25  # of the draws: base tasks in turn, whatever a selector prefers (not epoch, uniform)
    new_first: bool = False  # tasks that were appended are drawn once before the selector is asked
    max_prompt_tokens: PositiveInt = 12
    long_prompts: Literal["error", "skip"] = "error"  # a longer prompt ends the run, or its group is dropped


@dataclass(frozen=True)
class GenerationConfig:
    """Dynamic data generation: new training tasks while training runs. An empty `generator` leaves it out."""

    generator: str = ""  # procedural_curriculum | mutate_hardest | reappend | package.module:Class
    generator_kwargs: Mapping[str, Any] = field(default_factory=dict)
    every_steps: NonNegativeInt = 1  # it is asked after every so many steps; 0 = only for the two reasons below
    keep_rate_below: Fraction = 0.0  # it is asked too when fewer groups than this share are kept
    selectable_below: NonNegativeInt = 0  # and when the selector has fewer tasks left to select from
    admit_after_steps: NonNegativeInt = 1  # steps that it may work beside training; 0: training waits for it at once
    deadline_secs: PositiveFloat = 60.0  # from asking; what comes later is lost
    max_consecutive_generator_failures: PositiveInt = 3
    on_generator_failures: Literal["warn", "raise"] = "warn"  # after that many; "warn" goes on without it
    max_tasks_per_call: PositiveInt = 64  # admitted at once
    max_tasks: NonNegativeInt = 0  # admitted in a run; 0 = any number
    deduplicate: Literal["appended", "all", "none"] = (
        "appended"  # against tasks appended before, base ones too, or none
    )
    self_check: bool = True  # a task's own answer must pass its verifier
    probe_samples: NonNegativeInt = 0  # rollouts of each task, of which some and not all must pass; 0 = no probe


@dataclass(frozen=True)
class SelfProposeConfig:
    """The policy proposes tasks itself (Absolute Zero, arXiv:2505.03335). An empty `kind` leaves it out."""

    kind: str = ""  # digits | expression | program | package.module:Class
    kind_kwargs: Mapping[str, Any] = field(default_factory=dict)
    groups_per_step: PositiveInt = 4  # of proposals, among the num_prompts_per_step of a step
    invalid_reward: float = -1.0  # of a text that is no task, or none that is new
    uniform_reward: float = 0.0  # of a task that the solver passes always or never
    max_wait_steps: PositiveInt = 8  # a task that nobody has tried for so long counts as unsolved
    deduplicate: Literal["appended", "all", "none"] = "appended"  # as in generation


@dataclass(frozen=True)
class RewardConfig:
    """Verification of completions, in worker processes."""

    verifier: str = "default"  # the source's own; or, for all tasks, a built-in name or package.module:function
    verifiers: Mapping[str, Any] = field(default_factory=dict)  # by source name, before `verifier`
    num_workers: PositiveInt = 1
    timeout_secs: PositiveFloat = 5.0  # per completion; one that misses it scores 0
    max_consecutive_timeouts: PositiveInt = 32  # completions in a row that miss it; more end the run
    memory_limit_mb: NonNegativeInt = 1024  # per worker, on Linux; 0 = no limit


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on frozen tasks, disjoint from training by hash of the prompt."""

    source: str = ""  # empty = tasks.source with tasks.source_kwargs
    source_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_tasks: PositiveInt = 1024
    every_steps: NonNegativeInt = 50  # 0 = only before the first and after the last step
    temperature: NonNegativeFloat = 0.0  # 0 = greedy
    top_k: NonNegativeInt = 0  # 0 = all; training samples from the whole distribution, which it recomputes
    top_p: Annotated[float, "must lie above 0 and be at most 1", lambda x: 0 < x <= 1] = 1.0
    min_p: Annotated[float, "must lie in 0 to 1", lambda x: 0 <= x <= 1] = 0.0
    pass_score: float = 1.0  # a completion with at least this score passes
    seed: NonNegativeInt = 20_000_000  # of the evaluation tasks


@dataclass(frozen=True)
class SamplerConfig:
    """The decode engine."""

    num_slots: NonNegativeInt = 128  # completions decoded together; 0 = what memory_budget_mb holds
    memory_budget_mb: NonNegativeInt = 0  # of the engine without weights, over all devices; with num_slots = 0
    max_completion_tokens: PositiveInt = 12
    temperature: PositiveFloat = 1.0
    stop_strings: tuple[str, ...] = ()  # a completion ends with the token that completes one, in evaluation too
    chunk_steps: PositiveInt = 16  # decode steps between two looks of the host, at most
    refill_slots: NonNegativeInt = 0  # or sooner: slots that came free and nobody is prepared for; 0 = a sixteenth
    prefill_tokens: PositiveInt = 512  # of prompts of one length bucket, in one program and row shard
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"  # of the cache; auto = model.dtype
    weight_update: Literal["in_flight", "drain"] = "in_flight"  # new weights act at once, or when what runs has ended


@dataclass(frozen=True)
class DynamicSamplingConfig:
    """DAPO's dynamic sampling (arXiv:2503.14476, section 3.2): which groups are kept, and how a step is filled."""

    enable: bool = True
    metric: str = "score"  # the raw reward that the filter looks at
    filter: str = "has_signal"  # a built-in name, or package.module:function
    filter_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_num_gen_batches: NonNegativeInt = 10  # rounds per step; 0 = no cap
    max_replacements_per_slot: PositiveInt = 32  # under rounds: B times as many groups in a row may not be kept
    on_exhausted: Literal["raise", "short", "relax", "carry"] = "raise"
    max_consecutive_unfilled_steps: NonNegativeInt = 3  # "short", "carry": tries in a row that may train nothing
    on_data_end: Literal["short", "stop"] = "short"
    oversample: float | Literal["none", "adaptive"] = 1.0  # groups dispatched per group that is missing; 1 = none
    max_oversample: PositiveFloat = 4.0  # at most, where it is adaptive
    fill_probability: Probability = 0.9  # with which adaptive oversampling fills the step at once
    refill: Literal["deficit", "full"] = "deficit"  # later rounds: what is missing, or whole rounds as published
    surplus: Literal["carry", "drop"] = "carry"
    max_surplus_age_versions: NonNegativeInt = 8  # carried groups older than this are dropped as stale
    buffer_groups: NonNegativeInt = 0  # ready groups that are kept on the devices; 0 = as many as may be ready at once


@dataclass(frozen=True)
class RolloutFailureConfig:
    """Budgets for infrastructure and verifier failures; a filtered group never counts here."""

    max_infra_attempts_per_prompt: PositiveInt = 3
    max_data_attempts_per_prompt: PositiveInt = 1  # where the verifier raised, or returned no number
    retry_backoff_secs: NonNegativeFloat = 0.5  # before the second attempt; twice as long before each further one
    max_retry_backoff_secs: NonNegativeFloat = 30.0
    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    min_step_batch_fraction: Fraction = 0.5  # "shrink": groups that a step must have, as a share of B
    group_deadline_secs: NonNegativeFloat = 0.0  # of polling, from a group's dispatch to its last token; 0 = none
    stall_secs: NonNegativeFloat = 1800.0  # without a group or step done; 0 = never mind
    on_stall: Literal["report", "stop"] = "report"
    min_live_per_group: NonNegativeInt = 0  # fewer live rollouts fail the group; 0 = num_generations_per_prompt
    max_skipped_prompts: NonNegativeInt = 1000  # failed groups in a run
    max_consecutive_dropped_prompts: NonNegativeInt = 128  # failed groups in a row


@dataclass(frozen=True)
class ScheduleConfig:
    """Who trains when."""

    name: str = "rounds"  # rounds | in_order | ready_first | weight_fifo | windowed | package.module:Class
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # of a class of your own
    mode: Literal["streaming", "async"] = "streaming"  # "async": groups are generated while a step is trained
    clock: Literal["logical", "wall"] = "logical"  # when verdicts, and new weights under async, are taken: see README
    chunks_per_update: PositiveInt = 4  # async on a logical clock: sampler polls while a step is trained
    sampler_devices: NonNegativeInt = 0  # async: the last ones only sample, the others only train; 0 = all do both
    max_lookahead_versions: NonNegativeInt = 0  # in_order: how far ahead of the weights a group's step may be
    max_staleness_versions: NonNegativeInt = 1  # the others: updates between a group's dispatch and its step
    sample_freshest_first: bool = True  # windowed


@dataclass(frozen=True)
class LossConfig:
    """Advantages and the policy loss."""

    estimator: str = "grpo"  # of the advantages; see dynrl.core.ESTIMATORS
    estimator_kwargs: Mapping[str, Any] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()  # several named rewards, for an estimator that normalises each (gdpo)
    loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: PositiveFloat = 0.2  # 1 = no lower bound
    clip_high: PositiveFloat = 0.28
    dual_clip: NonNegativeFloat = 0.0  # bound of the ratio where the advantage is negative; 0 = none
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    constant_length: NonNegativeInt = 0  # aggregation = "constant"; 0 = sampler.max_completion_tokens
    tis_cap: NonNegativeFloat = 2.0  # truncation of the importance weight old/behavior; 0 = no importance weight
    kl: Literal["k1", "k2", "k3"] = "k3"  # estimator of KL(policy || reference), as a term of the loss
    kl_coef: NonNegativeFloat = 0.0  # the reference is the policy that training begins with; 0 = none
    entropy_coef: NonNegativeFloat = 0.0  # of the entropy bonus
    regularize: Literal["signal", "all"] = "signal"  # KL and entropy act where the advantage is not 0, or everywhere
    overlong: Literal["keep", "mask", "penalty"] = "keep"  # truncated rollouts; "mask": after the advantages
    overlong_cache_tokens: NonNegativeInt = 0  # "penalty": over so many last tokens it falls linearly to -1
    short_step_scale: Literal["real", "nominal"] = "real"  # denominator of a short step


@dataclass(frozen=True)
class TrainConfig:
    """The optimizer and how a batch is cut."""

    learning_rate: PositiveFloat = 3e-4
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    num_epochs: PositiveInt = 1  # passes over each batch
    num_minibatches: PositiveInt = 1  # optimizer updates per pass
    num_microbatches: PositiveInt = 1  # gradient accumulation within an update
    logprob_chunk_tokens: NonNegativeInt = 0  # tokens whose logits exist at once; 0 = all
    max_nonfinite_updates: NonNegativeInt = (
        3  # updates with a non-finite gradient are skipped; more than this end the run
    )


@dataclass(frozen=True)
class WarmStartConfig:
    """A supervised stage for models trained from scratch. `num_steps` = 0 leaves it out."""

    num_steps: NonNegativeInt = 0
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 3e-3
    warmup_steps: NonNegativeInt = 20
    cache: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many stay."""

    every_steps: PositiveInt = 50
    max_to_keep: PositiveInt = 2
    in_flight: Literal["state", "resubmit"] = "state"  # a restart goes on with groups under way, or begins them again


@dataclass(frozen=True)
class RunConfig:
    """A whole run. B = num_prompts_per_step, G = num_generations_per_prompt."""

    seed: Annotated[int, "must lie in 0 to 2**32 - 1", lambda x: 0 <= x < 2**32] = 0
    num_steps: NonNegativeInt = 100
    num_prompts_per_step: PositiveInt = 64
    num_generations_per_prompt: PositiveInt = 8
    fail_on_recompile: bool = False
    compile_cache: bool = True
    tensorboard: bool = True
    progress: Literal["auto", "bar", "plain", "none"] = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    self_propose: SelfProposeConfig = field(default_factory=SelfProposeConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    rollout_failure: RolloutFailureConfig = field(default_factory=RolloutFailureConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def versions_per_step(self) -> int:
        """Optimizer updates of a step."""
        return self.train.num_epochs * self.train.num_minibatches

    @property
    def overlong_kwargs(self) -> dict[str, Any]:
        """For `dynrl.core.shaped_rewards`."""
        c, limit = self.loss, self.sampler.max_completion_tokens
        return {"overlong": c.overlong, "max_tokens": limit, "cache_tokens": c.overlong_cache_tokens}


def from_mapping(mapping: Any) -> RunConfig:
    """Converts a `ConfigDict` (or any nested mapping) and validates it.

    Raises:
      ConfigError: naming the key, what it holds and what it may hold.
    """
    if hasattr(mapping, "to_dict"):
        mapping = mapping.to_dict()
    config = convert(RunConfig, mapping)
    validate(config)
    return config


def config_dict() -> Any:
    """A `ConfigDict` of every key at its default, for the files of configs/ to change."""
    from ml_collections import ConfigDict, FieldReference

    c: Any = ConfigDict(to_mapping(RunConfig()))
    # A number or a word: a plain field keeps the type that it begins with.
    c.dynamic_sampling.oversample = FieldReference(c.dynamic_sampling.oversample, field_type=object)
    return c


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested JSON-able dicts, every key present."""
    return dataclasses.asdict(config)


def known_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """Full names of all keys, groups included."""
    names = []
    for key, hint in typing.get_type_hints(cls).items():
        names.append(prefix + key)
        if dataclasses.is_dataclass(hint):
            names += known_keys(typing.cast(type, hint), f"{prefix}{key}.")
    return names


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Full names of the keys whose values differ."""
    names = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names += changed_keys(a, b, f"{prefix}{key}.")
        elif _plain(a) != _plain(b):
            names.append(prefix + key)
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
