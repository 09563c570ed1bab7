"""From a configuration to the parts of a run: everything that `loop.py` then moves data through."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dynrl.build_rollout import build_schedule, make_buffer
from dynrl.build_sampler import make_sampler
from dynrl.build_tasks import (
    find_environments,
    find_generator,
    make_proposals,
    make_selection,
    make_self_propose,
    make_tasks,
    max_observation_tokens,
    named,
)
from dynrl.compile_counter import CompileCounter
from dynrl.config import ConfigError, RunConfig
from dynrl.core import ESTIMATORS, check_estimator
from dynrl.models import sharding
from dynrl.models.tokenizer import Tokenizer
from dynrl.rollout.buffer import GroupBuffer
from dynrl.rollout.judge import Judge
from dynrl.rollout.producer import Producer
from dynrl.rollout.records import warm_up_gather
from dynrl.rollout.side_rollouts import warm_up_texts
from dynrl.rollout.statistics import RolloutStatistics
from dynrl.rollout.turns import TurnPlayer
from dynrl.sampling.engine import SlotEngine
from dynrl.tasks.base import TaskSource
from dynrl.tasks.generators.base import TaskGenerator
from dynrl.tasks.proposals import Proposals
from dynrl.tasks.selectors import Selection, VisitCounter
from dynrl.tasks.self_propose import SelfPropose
from dynrl.tasks.store import FrozenTasks, TaskStore
from dynrl.tasks.verifiers import Verifiers
from dynrl.training.state import TrainState, abstract_state, init_state, make_optimizer, state_shardings, with_params
from dynrl.training.step import jit_train_step
from dynrl.training.warm_start import cache_key, cached_warm_start, warm_start


@dataclass
class Parts:
    """The parts, in the order of the data's path."""

    config: RunConfig
    mesh: Mesh
    sampler_mesh: Mesh  # the same, unless devices are set apart for it
    source: TaskSource
    store: TaskStore
    eval_tasks: FrozenTasks
    selection: Selection
    make_generator: Callable[[], TaskGenerator] | None
    proposals: Proposals  # reads a generator's
    self_propose: SelfPropose | None
    visits: VisitCounter
    tokenizer: Tokenizer
    sampler: SlotEngine
    player: TurnPlayer
    pools: list[Verifiers]  # `verifiers`, and those of the environments
    verifiers: Verifiers
    judge: Judge
    buffer: GroupBuffer
    producer: Producer
    statistics: RolloutStatistics
    optimizer: Any
    state: TrainState
    train_step: Any
    compiles: CompileCounter
    warnings: list[str]  # of the configuration
    padding_frac: float  # of evaluation prompts

    def publish(self, version: int) -> None:
        """Gives the sampler the present weights."""
        params = self.state.params
        if self.sampler_mesh is not self.mesh:
            params = jax.device_put(params, sharding.param_shardings(params, self.sampler_mesh))
        self.sampler.update_weights(params, version)

    def close(self) -> None:
        """Ends the verifier workers."""
        for pool in self.pools:
            pool.close()


def cache_dir() -> epath.Path:
    """Where warm starts and compiled programs are kept: $DYNRL_CACHE, or ~/.cache/dynrl."""
    return epath.Path(os.environ.get("DYNRL_CACHE") or "~/.cache/dynrl").expanduser()


def check_backend() -> None:
    """Raises RuntimeError when JAX fell back to the CPU on a machine with an accelerator."""
    if jax.default_backend() != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return
    for kind, paths in {"cuda": ("/dev/nvidia0",), "tpu": ("/dev/accel0", "/dev/vfio/0")}.items():
        if any(os.path.exists(p) for p in paths):
            raise RuntimeError(
                f"this machine has an accelerator ({kind}), but JAX runs on the CPU: pip install -e '.[{kind}]'; to "
                "use the CPU on purpose set JAX_PLATFORMS=cpu"
            )


def setup_compile_cache(config: RunConfig) -> None:
    """Keeps compiled programs between runs, unless the user has chosen a place already."""
    if config.compile_cache and jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def check_algorithm(config: RunConfig) -> list[str]:
    """Checks estimator, rewards and filter against each other (law 2). Returns warnings.

    Raises:
      ConfigError: for what cannot work.
    """
    c, ds, g = config.loss, config.dynamic_sampling, config.num_generations_per_prompt
    named("loss.estimator", check_estimator, c.estimator, c.estimator_kwargs)
    estimator = ESTIMATORS[c.estimator]
    if estimator.per_component != bool(c.rewards):
        need = "normalises several rewards: name them" if estimator.per_component else "takes one reward: name none"
        raise ConfigError(f"config.loss.rewards: {c.rewards!r}, but loss.estimator = {c.estimator!r} {need}")
    if g == 1 and estimator.needs_group:
        raise ConfigError(
            f"config.num_generations_per_prompt: 1 gives loss.estimator = {c.estimator!r} no baseline: use at least 2"
        )
    options, live = c.estimator_kwargs, config.rollout_failure.min_live_per_group or g
    of_groups = not estimator.batch_normalised or estimator.per_component  # whose std is
    for key in ("k", "ddof") if of_groups else ():  # a group of so many live rollouts has no advantage
        value = estimator.option(key, options)
        if value is not None and value >= live > 1:
            raise ConfigError(
                f"config.loss.estimator_kwargs: {key} = {value} leaves a group of {live} live rollouts (the fewest, by "
                f"rollout_failure.min_live_per_group) without an advantage: it must be below {live}"
            )
    weights = options.get("weights")
    if weights is not None and len(weights) != len(c.rewards):
        raise ConfigError(
            f"config.loss.estimator_kwargs: weights = {weights} are {len(weights)}, loss.rewards names {len(c.rewards)}"
        )
    if not (ds.enable and estimator.uses_uniform_groups):
        return []
    if estimator.batch_normalised:
        return [
            f"loss.estimator = {c.estimator!r} normalises over the batch and learns from groups without signal too, "
            "which dynamic_sampling.enable = True drops: its mean and std are those of the kept groups",
        ]
    raise ConfigError(
        f"config.loss.estimator: {c.estimator!r} learns from groups without signal, which dynamic_sampling.enable = "
        "True drops: set it to False"
    )


def make_verifiers(config: RunConfig, by_source: dict[str, str]) -> Verifiers:
    """The pool of verifier workers."""
    return named(
        "reward.verifier",
        Verifiers,
        by_source,
        num_workers=config.reward.num_workers,
        timeout_secs=config.reward.timeout_secs,
        max_attempts=config.rollout_failure.max_infra_attempts_per_prompt,
        max_consecutive_timeouts=config.reward.max_consecutive_timeouts,
        memory_limit_mb=(config.reward.memory_limit_mb or None) if sys.platform == "linux" else None,
        metrics=config.loss.rewards or (config.dynamic_sampling.metric,),
    )


def make_judge(config: RunConfig) -> Judge:
    """The filter, and what else decides which groups are kept."""
    g = config.num_generations_per_prompt
    min_live = config.rollout_failure.min_live_per_group or g
    judge = named("dynamic_sampling.filter", Judge, config.dynamic_sampling, config.loss, min_live)
    if g == 1 and not judge.keeps_singletons():
        raise ConfigError(
            f"config.dynamic_sampling.filter: {judge.filter.name!r} drops every group of one rollout; "
            "dynamic_sampling.filter = 'mixed_sign' keeps them, and so does dynamic_sampling.enable = False"
        )
    return judge


def build(config: RunConfig) -> Parts:
    """Makes every part. Raises ConfigError for what cannot work together."""
    check_backend()
    setup_compile_cache(config)
    compiles = CompileCounter()
    warnings = check_algorithm(config)
    mesh, sampler_mesh = sharding.split_meshes(config.mesh, config.schedule.sampler_devices)
    tasks = make_tasks(config)
    tokenizer = tasks.tokenizer
    judge = make_judge(config)
    selection, make_generator = make_selection(config), find_generator(config)
    schedule, of_schedule = build_schedule(config)
    self_propose = make_self_propose(config, tasks)
    buffer = make_buffer(config, schedule, mesh, self_propose.max_deferred if self_propose else 0)
    optimizer = make_optimizer(config.train, config.num_steps)
    reference = config.loss.kl_coef > 0
    shardings = state_shardings(config.model, tokenizer.vocab_size, optimizer, mesh, reference)
    train_step = jit_train_step(config, optimizer, mesh, shardings)
    shapes = abstract_state(config.model, tokenizer.vocab_size, optimizer, reference)
    environments = find_environments(tasks.verifiers)
    room = max_observation_tokens(config, environments, tokenizer)
    sampler = make_sampler(
        config, sampler_mesh, tokenizer, shapes, shardings, max_extend_tokens=room, alone=sampler_mesh is not mesh
    )
    _check_rows(config, sampler, mesh)
    # Last of what can fail: these start processes.
    verifiers = make_verifiers(config, tasks.verifiers)
    played = {source: tasks.verifiers[source] for source in environments}
    turn_verifiers = make_verifiers(config, played) if played else None
    names = (config.dynamic_sampling.metric, *config.loss.rewards)
    player = TurnPlayer(sampler, turn_verifiers, tokenizer, environments, names, room)
    return Parts(
        config=config,
        mesh=mesh,
        sampler_mesh=sampler_mesh,
        source=tasks.source,
        store=tasks.store,
        eval_tasks=tasks.frozen,
        selection=selection,
        make_generator=make_generator,
        proposals=make_proposals(config, tasks, config.generation.deduplicate),
        self_propose=self_propose,
        visits=VisitCounter(),
        tokenizer=tokenizer,
        sampler=sampler,
        player=player,
        pools=[verifiers, turn_verifiers] if turn_verifiers else [verifiers],
        verifiers=verifiers,
        judge=judge,
        buffer=buffer,
        producer=Producer(
            config,
            player,
            verifiers,
            judge,
            buffer,
            tokenizer,
            self_propose or tasks.store,
            schedule.capabilities.has_rounds,
            self_propose,
        ),
        statistics=RolloutStatistics(
            config.dynamic_sampling.metric,
            sorted(tasks.verifiers if self_propose else tasks.source.verifiers),
            holds=config.dynamic_sampling.on_exhausted == "relax",
        ),
        optimizer=optimizer,
        state=init_state(config.model, tokenizer.vocab_size, optimizer, mesh, config.seed, reference),
        train_step=train_step,
        compiles=compiles,
        warnings=warnings + of_schedule,
        padding_frac=tasks.padding_frac,
    )


def _check_rows(config: RunConfig, sampler: SlotEngine, mesh: Mesh) -> None:
    """Groups that were sampled elsewhere are split over the training devices."""
    p, shards = sampler.groups_per_poll(config.num_generations_per_prompt), sharding.num_row_shards(mesh)
    if p % shards:
        raise ConfigError(
            f"config.sampler.num_slots: {config.sampler.num_slots} hand over {p} groups at a time, which the {shards} "
            f"row shards of the training devices do not divide: {shards} times as many slots would do"
        )


WARM_START_SEED_OFFSET = 10_000_000  # warm-start tasks are drawn apart from the training tasks


def run_warm_start(parts: Parts, log: Any) -> bool:
    """Replaces the random weights by warm-started ones. Returns whether they came from the cache."""
    config, proposer = parts.config, parts.self_propose
    every = max(2, config.num_prompts_per_step // config.self_propose.groups_per_step)  # as often as in training

    def make(params: Any) -> Any:
        def task_at(index: int) -> Any:
            if proposer is not None and index % every == 0:
                return proposer.example(config.seed + WARM_START_SEED_OFFSET, index)
            if parts.source.num_tasks is not None:  # no fresh ones: the training tasks, in turn
                return parts.store.get([index % len(parts.store)])[0]
            return parts.source.task(config.seed + WARM_START_SEED_OFFSET, index, parts.eval_tasks.hashes)

        return warm_start(params, config, parts.tokenizer, task_at, parts.mesh, log)

    tasks = {"name": config.tasks.source, "kwargs": parts.source.kwargs}
    if parts.source.num_tasks is not None:
        tasks["num_tasks"] = len(parts.store)
    if proposer is not None:
        tasks["self_propose"] = proposer.identity
    key = cache_key(config, tasks, parts.eval_tasks.fingerprint, parts.tokenizer.fingerprint)
    directory = cache_dir() / "warm_start" / key if config.warm_start.cache else None
    params, cached = cached_warm_start(parts.state.params, directory, make)
    parts.state = with_params(parts.state, params, parts.optimizer)
    return cached


def warm_up(parts: Parts) -> None:
    """Compiles every program of the run by running it on nothing: no rows, no groups, no update."""
    g, num_rewards = parts.config.num_generations_per_prompt, len(parts.config.loss.rewards)
    parts.publish(0)
    parts.sampler.warm_up()
    parts.player.warm_up()
    batch = parts.buffer.warm_up(parts.sampler.filler(g))
    p = parts.sampler.groups_per_poll(g)
    parts.judge.warm_up(p, g, num_rewards)
    warm_up_gather(p, g, num_rewards)
    warm_up_gather(parts.sampler.groups_per_poll(1), 1)  # evaluation
    if parts.make_generator is not None:
        if k := parts.config.generation.probe_samples:
            warm_up_gather(parts.sampler.groups_per_poll(k), k)
        warm_up_texts(parts.sampler.filler(1))
        sharding.common_bytes(b" ")
    if parts.self_propose is not None:
        sharding.bytes_of_all(b" ")
    sharding.any_process(False)
    sharding.common_number(0)
    parts.state, metrics = parts.train_step(parts.state, batch)
    jax.tree.map(np.asarray, metrics)


def describe(parts: Parts) -> list[str]:
    """The lines shown at the start: where the run lies and what it takes."""
    config, mesh = parts.config, parts.mesh

    def mib(tree: Any) -> str:
        return f"{sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) / 2**20:.1f} MiB"

    params = sum(x.size for x in jax.tree.leaves(parts.state.params))
    shape = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    b, g = config.num_prompts_per_step, config.num_generations_per_prompt
    return [
        f"backend {jax.default_backend()}, {jax.device_count()} devices, {jax.process_count()} processes, mesh {shape}",
        f"policy {params:,} parameters ({mib(parts.state.params)}), optimizer {mib(parts.state.opt_state)}, "
        f"group buffer {parts.buffer.capacity} groups ({mib(parts.buffer.arrays)})",
        f"sampler: {parts.sampler.describe()}",
        f"step: {b} groups of {g}, filter {parts.judge.filter.name}, schedule {config.schedule.name}"
        + (f" ({config.schedule.mode})" if config.schedule.name != "rounds" else ""),
        f"source {parts.source.name}: {len(parts.store):,} training and {len(parts.eval_tasks):,} evaluation tasks, "
        f"{parts.padding_frac:.0%} of whose prompts is padding",
        *(f"warning: {warning}" for warning in parts.warnings),
    ]
