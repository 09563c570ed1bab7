"""What a configuration may hold: types and ranges of single values, and combinations that cannot work.

A value's type and range stand in its annotation (`dynrl.config`); what concerns several keys stands here in `validate`.
Rules that need the core's or the tasks' own knowledge are checked where these are built (`dynrl.build`).
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from dynrl.config import RunConfig


class ConfigError(ValueError):
    """A configuration that cannot work. The message starts with the key's full name."""


def convert(cls: type, mapping: Mapping[str, Any], prefix: str = "") -> Any:
    """A dataclass from a nested mapping. Raises ConfigError, naming the key, for what does not fit its annotations."""
    hints = typing.get_type_hints(cls, include_extras=True)
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"config: expected a mapping of keys, got {mapping!r:.80}")
    for key in mapping:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=3)
            hint = f"; did you mean {', '.join(prefix + n for n in near)}?" if near else ""
            raise ConfigError(f"config.{prefix}{key}: there is no such key{hint}")
    return cls(**{key: _checked(hints[key], value, prefix + key) for key, value in mapping.items()})


def _checked(hint: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{name}: expected a group of keys, got {value!r}")
        return convert(typing.cast(type, hint), value, name + ".")
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(f"config.{name}: {value!r} is not one of {', '.join(map(repr, choices))}")
        return value
    if origin is Annotated:
        base, why, holds = typing.get_args(hint)
        value = _checked(base, value, name)
        if not holds(value):
            raise ConfigError(f"config.{name}: {value!r} {why}")
        return value
    if origin is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(f"config.{name}: expected a tuple, got {value!r}")
        return tuple(_checked(typing.get_args(hint)[0], v, f"{name}[{i}]") for i, v in enumerate(value))
    if origin in (types.UnionType, typing.Union):  # of a plain type and words
        plain, words = typing.get_args(hint)
        if isinstance(value, str):
            return _checked(words, value, name)
        return _checked(plain, value, name)
    if origin is not None:  # Mapping[str, Any]
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{name}: expected a mapping, got {value!r}")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.{name}: {value!r} is not JSON-able: {error}") from error
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"config.{name}: expected {hint.__name__}, got {type(value).__name__} {value!r}")
    return value


def validate(config: "RunConfig") -> None:
    """Checks ranges and combinations. Raises ConfigError at the first that cannot work."""

    def require(ok: bool, key: str, why: str) -> None:
        if not ok:
            value = _get(config, key)
            raise ConfigError(f"config.{key}: {value!r} {why}")

    _validate_shapes(config, require)
    _validate_loss(config, require)
    g, ds = config.num_generations_per_prompt, config.dynamic_sampling
    fixed = not isinstance(ds.oversample, str)
    require(
        not fixed or 1 <= float(ds.oversample) < math.inf,
        "dynamic_sampling.oversample",
        "must be at least 1: fewer groups cannot fill a step",
    )
    require(
        config.rollout_failure.min_live_per_group <= g,
        "rollout_failure.min_live_per_group",
        f"exceeds num_generations_per_prompt = {g}",
    )
    _validate_schedule(config, require)
    _validate_generation(config, require)
    failure = config.rollout_failure
    require(
        failure.retry_backoff_secs <= failure.max_retry_backoff_secs,
        "rollout_failure.retry_backoff_secs",
        f"exceeds rollout_failure.max_retry_backoff_secs = {failure.max_retry_backoff_secs}",
    )
    require(0 <= config.train.adam_b1 < 1, "train.adam_b1", "must lie in [0, 1)")
    require(0 <= config.train.adam_b2 < 1, "train.adam_b2", "must lie in [0, 1)")


def _validate_schedule(config: "RunConfig", require: Callable[[bool, str, str], None]) -> None:
    """Of the built-in schedules; what one of your own reads, only it knows."""
    s, ds, updates = config.schedule, config.dynamic_sampling, config.versions_per_step
    asynchronous = s.mode == "async" and s.name != "rounds"  # which is refused where the schedule is made
    reach = "max_lookahead_versions" if s.name == "in_order" else "max_staleness_versions"
    require(
        not asynchronous or getattr(s, reach) >= updates,
        f"schedule.{reach}",
        f"leaves nothing to do while a step is trained: schedule.mode = 'async' needs at least the {updates} versions "
        "of a step",
    )
    require(
        not s.sampler_devices or s.mode == "async",
        "schedule.sampler_devices",
        "has no meaning for schedule.mode = 'streaming', where the same devices train and sample",
    )
    require(
        ds.on_exhausted != "relax" or (ds.enable and ds.filter != "has_signal"),
        "dynamic_sampling.on_exhausted",
        "admits groups that the filter refused though they carry signal, and 'has_signal' refuses none of these",
    )
    require(ds.max_oversample >= 1, "dynamic_sampling.max_oversample", "must be at least 1")


def _validate_generation(config: "RunConfig", require: Callable[[bool, str, str], None]) -> None:
    g, default = config.generation, type(config.generation)()
    for field in dataclasses.fields(g):
        same = getattr(g, field.name) == getattr(default, field.name)
        require(bool(g.generator) or same, f"generation.{field.name}", "has no meaning without generation.generator")
    p, default = config.self_propose, type(config.self_propose)()
    for field in dataclasses.fields(p):
        same = getattr(p, field.name) == getattr(default, field.name)
        require(bool(p.kind) or same, f"self_propose.{field.name}", "has no meaning without self_propose.kind")
    require(
        not p.kind or p.groups_per_step < config.num_prompts_per_step,
        "self_propose.groups_per_step",
        f"leaves no group of num_prompts_per_step = {config.num_prompts_per_step} to solve anything",
    )
    require(
        not config.tasks.new_first or bool(g.generator or p.kind),
        "tasks.new_first",
        "has no meaning without generation.generator or self_propose.kind",
    )
    require(
        not g.generator or bool(g.every_steps or g.keep_rate_below or g.selectable_below),
        "generation.every_steps",
        "asks the generator for nothing, with generation.keep_rate_below and generation.selectable_below 0 as well",
    )
    require(g.probe_samples != 1, "generation.probe_samples", "must be 0 (no probe) or at least 2: some pass, not all")
    selector, share = config.tasks.selector, config.tasks.floor_share
    require(
        selector not in ("epoch", "uniform") or share == type(config.tasks)().floor_share,
        "tasks.floor_share",
        f"has no meaning for tasks.selector = {selector!r}, all of whose draws are the base distribution's",
    )


def ignored_keys(config: "RunConfig", default: "RunConfig") -> list[str]:
    """Warnings of keys that are set, and that nothing looks at with what else is set."""
    s, ds, failure = config.schedule, config.dynamic_sampling, config.rollout_failure
    adaptive = ds.oversample == "adaptive"
    in_rounds, staged = s.name == "rounds", s.name in ("ready_first", "weight_fifo", "windowed")
    always = {
        "dynamic_sampling.filter": ds.enable,
        "dynamic_sampling.filter_kwargs": ds.enable,
        "dynamic_sampling.max_consecutive_unfilled_steps": ds.on_exhausted in ("short", "carry"),
        "rollout_failure.min_step_batch_fraction": failure.on_dropped_prompt == "shrink",
        "rollout_failure.on_stall": failure.stall_secs > 0,
        "schedule.chunks_per_update": s.mode == "async" and s.clock == "logical",
    }
    built_in = {
        "schedule.max_lookahead_versions": s.name == "in_order",
        "schedule.max_staleness_versions": staged,
        "schedule.sample_freshest_first": s.name == "windowed",
        "dynamic_sampling.refill": in_rounds,
        "dynamic_sampling.max_num_gen_batches": in_rounds,
        "dynamic_sampling.max_surplus_age_versions": not staged and ds.surplus == "carry",
        "dynamic_sampling.max_oversample": adaptive,
        "dynamic_sampling.fill_probability": adaptive,
    }
    keys = ("schedule.name", "schedule.mode", "dynamic_sampling.oversample")
    of_schedule = ", ".join(f"{key} = {_get(config, key)!r}" for key in keys)
    causes = {
        **dict.fromkeys(built_in, of_schedule),
        "dynamic_sampling.filter": "dynamic_sampling.enable = False",
        "dynamic_sampling.filter_kwargs": "dynamic_sampling.enable = False",
        "dynamic_sampling.max_consecutive_unfilled_steps": f"dynamic_sampling.on_exhausted = {ds.on_exhausted!r}",
        "rollout_failure.min_step_batch_fraction": f"rollout_failure.on_dropped_prompt = {failure.on_dropped_prompt!r}",
        "rollout_failure.on_stall": "rollout_failure.stall_secs = 0",
        "schedule.chunks_per_update": f"schedule.mode = {s.mode!r}, schedule.clock = {s.clock!r}",
    }
    return [
        f"{key} = {_get(config, key)!r} has no meaning with {causes[key]}"
        for key, read in {**always, **({} if ":" in s.name else built_in)}.items()
        if not read and _get(config, key) != _get(default, key)
    ]


def _validate_loss(config: "RunConfig", require: Callable[[bool, str, str], None]) -> None:
    c, limit = config.loss, config.sampler.max_completion_tokens
    require(c.clip_low <= 1, "loss.clip_low", "must be at most 1 (no lower bound): the ratio is positive")
    require(c.tis_cap == 0 or c.tis_cap >= 1, "loss.tis_cap", "must be 0 (off) or at least 1")
    require(c.dual_clip == 0 or c.dual_clip > 1, "loss.dual_clip", "must be 0 (off) or above 1")
    require(not c.dual_clip or c.loss != "cispo", "loss.dual_clip", "has no meaning for loss.loss = 'cispo'")
    require(
        not c.constant_length or c.aggregation == "constant",
        "loss.constant_length",
        f"has no meaning for loss.aggregation = {c.aggregation!r}; it belongs to 'constant'",
    )
    terms = c.kl_coef > 0 or c.entropy_coef > 0
    require(c.kl == "k3" or c.kl_coef > 0, "loss.kl", "has no meaning with loss.kl_coef = 0")
    require(c.regularize == "signal" or terms, "loss.regularize", "has no meaning without loss.kl_coef or entropy_coef")
    penalty = c.overlong == "penalty"
    require(
        (0 < c.overlong_cache_tokens <= limit) if penalty else c.overlong_cache_tokens == 0,
        "loss.overlong_cache_tokens",
        f"must lie in 1 to sampler.max_completion_tokens = {limit} with loss.overlong = 'penalty', and be 0 without",
    )
    require(len(set(c.rewards)) == len(c.rewards), "loss.rewards", "names a reward twice")
    metric = config.dynamic_sampling.metric
    require(
        not c.rewards or metric in c.rewards,
        "dynamic_sampling.metric",
        f"is not among loss.rewards = {c.rewards}: what metrics and messages look at must be trained on too",
    )
    require(not (penalty and c.rewards), "loss.overlong", "shapes one reward; with loss.rewards there are several")


def _validate_shapes(config: "RunConfig", require: Callable[[bool, str, str], None]) -> None:
    b, m, t = config.num_prompts_per_step, config.model, config.train
    require(m.num_heads % m.num_kv_heads == 0, "model.num_heads", f"is no multiple of num_kv_heads = {m.num_kv_heads}")
    require(m.head_dim % 2 == 0, "model.head_dim", "must be even: RoPE rotates pairs")
    require(
        b % (t.num_minibatches * t.num_microbatches) == 0,
        "num_prompts_per_step",
        f"is no multiple of train.num_minibatches * train.num_microbatches = {t.num_minibatches * t.num_microbatches}",
    )
    s = config.sampler
    require(
        (s.num_slots > 0) != (s.memory_budget_mb > 0),
        "sampler.num_slots",
        f"and memory_budget_mb = {s.memory_budget_mb}: one of them must be 0, and the other not",
    )
    require(all(s.stop_strings), "sampler.stop_strings", "holds an empty string")


def _get(config: "RunConfig", key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
