"""From a configuration to the rollout side: its schedule, whether that can work, and the buffer that it needs."""

from jax.sharding import Mesh

from dynrl.build_tasks import named
from dynrl.config import ConfigError, RunConfig
from dynrl.rollout.buffer import GroupBuffer
from dynrl.rollout.schedules import Schedule, make_schedule
from dynrl.validation import ignored_keys


def build_schedule(config: RunConfig) -> tuple[Schedule, list[str]]:
    """The schedule, and warnings.

    Raises:
      ConfigError: for a schedule that does not exist, or that cannot work with the rest of the configuration.
    """
    schedule = named("schedule.name", make_schedule, config)
    s, ds, name = config.schedule, config.dynamic_sampling, f"schedule.name = {config.schedule.name!r}"
    can = schedule.capabilities

    def require(ok: bool, key: str, value: str, why: str) -> None:
        if not ok:
            raise ConfigError(f"config.{key}: {value!r} {why}")

    require(
        not (can.has_rounds and s.mode == "async"),
        "schedule.mode",
        s.mode,
        f"generates while a step is trained, which {name} does not: use in_order or another",
    )
    require(not can.has_rounds or s.clock == "logical", "schedule.clock", s.clock, f"has no meaning for {name}")
    require(
        can.has_rounds or ds.surplus == "carry",
        "dynamic_sampling.surplus",
        ds.surplus,
        "trains on the first groups to finish and discards slower ones, which favours short answers: without rounds, "
        "surplus is carried",
    )
    require(
        not can.has_rounds or config.rollout_failure.on_dropped_prompt == "replace",
        "rollout_failure.on_dropped_prompt",
        config.rollout_failure.on_dropped_prompt,
        f"has no meaning for {name}: the next round replaces failed groups; dynamic_sampling.on_exhausted = 'short' "
        "trains fewer",
    )
    warnings = ignored_keys(config, RunConfig())
    if can.completion_order and not can.gates_admission:
        warnings.append(
            f"{name} drops groups that take longer than schedule.max_staleness_versions = {s.max_staleness_versions} "
            "updates, which favours short answers; in_order, ready_first and weight_fifo wait for them"
        )
    carries = not can.completion_order and ds.surplus == "carry"
    if carries and ds.max_surplus_age_versions < config.versions_per_step:
        warnings.append(
            f"dynamic_sampling.max_surplus_age_versions = {ds.max_surplus_age_versions} makes every carried group too "
            f"old: a step is train.num_epochs * train.num_minibatches = {config.versions_per_step} versions"
        )
    return schedule, warnings


def make_buffer(config: RunConfig, schedule: Schedule, mesh: Mesh, max_deferred: int = 0) -> GroupBuffer:
    """A buffer for all groups that may be ready at once: as many as may be open, and those held to relax the filter.

    `max_deferred` groups more may be open whose verdicts wait for others.
    """
    b, size = config.num_prompts_per_step, config.dynamic_sampling.buffer_groups
    needed = schedule.max_open + max_deferred + (b if config.dynamic_sampling.on_exhausted == "relax" else 0)
    if 0 < size < needed:
        raise ConfigError(
            f"config.dynamic_sampling.buffer_groups: {size} is too few for schedule.name = {config.schedule.name!r}, "
            f"under which {needed} groups may be ready at once; 0 takes as many as that"
        )
    return named(
        "num_prompts_per_step",
        GroupBuffer,
        mesh,
        capacity=size or needed,
        batch_size=b,
        num_samples=config.num_generations_per_prompt,
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_completion_tokens=config.sampler.max_completion_tokens,
        num_rewards=len(config.loss.rewards),
    )
