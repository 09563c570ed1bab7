"""From a configuration to the parts of a run: everything that `loop.py` then moves data through."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from dynrl.compile_counter import CompileCounter
from dynrl.config import ConfigError, RunConfig
from dynrl.core import ESTIMATORS, check_estimator
from dynrl.models import sharding
from dynrl.models.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer
from dynrl.rollout.buffer import GroupBuffer
from dynrl.rollout.judge import Judge
from dynrl.rollout.records import warm_up_gather
from dynrl.rollout.rounds import RoundsProducer
from dynrl.rollout.schedules import Rounds
from dynrl.rollout.statistics import RolloutStatistics
from dynrl.sampling.lockstep import LockstepSampler
from dynrl.tasks.base import TaskSource as ProceduralSource
from dynrl.tasks.selectors import Selector, VisitCounter, make_selector
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import FrozenTasks, TaskStore, make_frozen
from dynrl.tasks.verifiers import Verifiers
from dynrl.training.state import TrainState, init_state, make_optimizer, state_shardings, with_params
from dynrl.training.step import jit_train_step
from dynrl.training.warm_start import cache_key, cached_warm_start, warm_start


@dataclass
class Parts:
    """The parts, in the order of the data's path."""

    config: RunConfig
    mesh: Mesh
    source: ProceduralSource
    store: TaskStore
    eval_tasks: FrozenTasks
    selector: Selector
    visits: VisitCounter
    tokenizer: Tokenizer
    sampler: LockstepSampler
    eval_sampler: LockstepSampler
    verifiers: Verifiers
    judge: Judge
    buffer: GroupBuffer
    producer: RoundsProducer
    statistics: RolloutStatistics
    optimizer: Any
    state: TrainState
    train_step: Any
    compiles: CompileCounter
    warnings: list[str]  # of the configuration

    def close(self) -> None:
        """Ends the verifier workers."""
        self.verifiers.close()


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


def make_tasks(config: RunConfig) -> tuple[ProceduralSource, TaskStore, FrozenTasks]:
    """The source, the training tasks, and the evaluation tasks, which share no prompt with them."""
    try:
        source = make_source(config.tasks.source, **config.tasks.source_kwargs)
        frozen = make_frozen(source, config.evaluation.seed, config.evaluation.num_tasks)
        store = TaskStore(source, config.seed, config.tasks.num_tasks, frozen.hashes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.tasks: {error}") from error
    for key, needed, have in (
        ("tasks.max_prompt_tokens", source.max_prompt_chars, config.tasks.max_prompt_tokens),
        ("sampler.max_completion_tokens", (source.max_answer_chars or 0) + 1, config.sampler.max_completion_tokens),
    ):
        if needed is not None and have < needed:
            raise ConfigError(f"config.{key}: {have} is too few for source {source.name}, which needs {needed}")
    return source, store, frozen


def make_tokenizer(kind: str, *sources: ProceduralSource) -> Tokenizer:
    """A tokenizer for what the sources write: their characters where all declare them, or bytes."""
    alphabets = [s.alphabet for s in sources if s.alphabet is not None]
    if kind == "byte" or (kind == "auto" and len(alphabets) < len(sources)):
        return ByteTokenizer()
    if len(alphabets) < len(sources):
        missing = next(s.name for s in sources if s.alphabet is None)
        raise ConfigError(
            f"config.model.tokenizer: 'char' needs an alphabet, which source {missing} does not declare; 'byte' needs "
            "none"
        )
    return CharTokenizer(frozenset().union(*alphabets))


def check_algorithm(config: RunConfig) -> list[str]:
    """Checks estimator, rewards and filter against each other (law 2). Returns warnings.

    Raises:
      ConfigError: for what cannot work.
    """
    c, ds, g = config.loss, config.dynamic_sampling, config.num_generations_per_prompt
    try:
        check_estimator(c.estimator, c.estimator_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.loss.estimator: {error}") from error
    estimator = ESTIMATORS[c.estimator]
    if estimator.per_component != bool(c.rewards):
        need = "normalises several rewards: name them" if estimator.per_component else "takes one reward: name none"
        raise ConfigError(f"config.loss.rewards: {c.rewards!r}, but loss.estimator = {c.estimator!r} {need}")
    if g == 1 and estimator.needs_group:
        raise ConfigError(
            f"config.num_generations_per_prompt: 1 gives loss.estimator = {c.estimator!r} no baseline: use at least 2"
        )
    if g == 1 and ds.enable and ds.filter in ("has_signal", "accuracy_band", "min_std"):
        raise ConfigError(
            f"config.dynamic_sampling.filter: {ds.filter!r} drops every group of one rollout; dynamic_sampling.filter "
            "= 'mixed_sign' keeps them, and so does dynamic_sampling.enable = False"
        )
    if not (ds.enable and estimator.uses_uniform_groups):
        return []
    if estimator.batch_normalised:
        return [
            f"loss.estimator = {c.estimator!r} normalises over the batch and learns from groups without signal too, "
            "which dynamic_sampling.enable = True drops: its mean and std are those of the kept groups"
        ]
    raise ConfigError(
        f"config.loss.estimator: {c.estimator!r} learns from groups without signal, which dynamic_sampling.enable = "
        "True drops: set it to False"
    )


def make_sampler(config: RunConfig, mesh: Mesh, tokenizer: Tokenizer, num_samples: int) -> LockstepSampler:
    """A sampler of `sampler.num_slots` rows for requests of `num_samples` completions."""
    return LockstepSampler(
        config.model,
        mesh,
        num_groups=config.sampler.num_slots // num_samples,
        num_samples=num_samples,
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_completion_tokens=config.sampler.max_completion_tokens,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        vocab_size=tokenizer.vocab_size,
        chunk_steps=config.sampler.chunk_steps,
        seed=config.seed,
    )


def build(config: RunConfig) -> Parts:
    """Makes every part. Raises ConfigError for what cannot work together."""
    check_backend()
    setup_compile_cache(config)
    compiles = CompileCounter()
    mesh = sharding.make_mesh(config.mesh)
    source, store, eval_tasks = make_tasks(config)
    tokenizer = make_tokenizer(config.model.tokenizer, source)
    warnings = check_algorithm(config)
    g, failure, ds = config.num_generations_per_prompt, config.rollout_failure, config.dynamic_sampling
    num_rewards = len(config.loss.rewards)
    try:
        judge = Judge(ds, config.loss, failure.min_live_per_group or g)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"config.dynamic_sampling.filter: {error}") from error
    sampler = make_sampler(config, mesh, tokenizer, g)
    eval_sampler = make_sampler(config, mesh, tokenizer, 1)
    buffer = GroupBuffer(
        mesh,
        capacity=config.num_prompts_per_step - 1 + Rounds.max_groups_per_round(ds, config.num_prompts_per_step),
        batch_size=config.num_prompts_per_step,
        num_samples=g,
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_completion_tokens=config.sampler.max_completion_tokens,
        num_rewards=num_rewards,
    )
    optimizer = make_optimizer(config.train, config.num_steps)
    reference = config.loss.kl_coef > 0
    shardings = state_shardings(config.model, tokenizer.vocab_size, optimizer, mesh, reference)
    verifiers = Verifiers(
        {source.name: config.reward.verifier},
        num_workers=config.reward.num_workers,
        timeout_secs=config.reward.timeout_secs,
        max_attempts=failure.max_infra_attempts_per_prompt,
        memory_limit_mb=config.reward.memory_limit_mb or None,
        metric=ds.metric,
    )
    return Parts(
        config=config,
        mesh=mesh,
        source=source,
        store=store,
        eval_tasks=eval_tasks,
        selector=make_selector(config.tasks.selector, seed=config.seed, **config.tasks.selector_kwargs),
        visits=VisitCounter(),
        tokenizer=tokenizer,
        sampler=sampler,
        eval_sampler=eval_sampler,
        verifiers=verifiers,
        judge=judge,
        buffer=buffer,
        producer=RoundsProducer(config, sampler, verifiers, judge, buffer, tokenizer, store),
        statistics=RolloutStatistics(ds.metric),
        optimizer=optimizer,
        state=init_state(config.model, tokenizer.vocab_size, optimizer, mesh, config.seed, reference),
        train_step=jit_train_step(config, optimizer, mesh, shardings),
        compiles=compiles,
        warnings=warnings,
    )


WARM_START_SEED_OFFSET = 10_000_000  # warm-start tasks are drawn apart from the training tasks


def run_warm_start(parts: Parts, log: Any) -> bool:
    """Replaces the random weights by warm-started ones. Returns whether they came from the cache."""
    config = parts.config

    def make(params: Any) -> Any:
        def task_at(index: int) -> Any:
            return parts.source.task(config.seed + WARM_START_SEED_OFFSET, index, parts.eval_tasks.hashes)

        return warm_start(params, config, parts.tokenizer, task_at, parts.mesh, log)

    key = cache_key(config, parts.tokenizer.fingerprint)
    directory = cache_dir() / "warm_start" / key if config.warm_start.cache else None
    params, cached = cached_warm_start(parts.state.params, directory, make)
    parts.state = with_params(parts.state, params, parts.optimizer)
    return cached


def warm_up(parts: Parts) -> None:
    """Compiles every program of the run by running it on nothing: no rows, no groups, no update."""
    for sampler in (parts.sampler, parts.eval_sampler):
        sampler.update_weights(parts.state.params, 0)
    parts.eval_sampler.warm_up()
    batch = parts.buffer.warm_up(parts.sampler.warm_up())
    g = parts.config.num_generations_per_prompt
    num_slots = parts.config.sampler.num_slots
    num_rewards = len(parts.config.loss.rewards)
    parts.judge.warm_up(num_slots // g, g, num_rewards)
    warm_up_gather(num_slots // g, g, num_rewards)
    warm_up_gather(num_slots, 1)  # evaluation
    sharding.any_process(False)
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
        f"KV cache {parts.sampler.cache_bytes / 2**20:.1f} MiB, group buffer {parts.buffer.capacity} groups "
        f"({mib(parts.buffer.arrays)})",
        f"step: {b} groups of {g}, filter {parts.judge.filter.name}; sampler: {config.sampler.num_slots} rows at once",
        f"source {parts.source.name}: {len(parts.store):,} training and {len(parts.eval_tasks):,} evaluation tasks",
        *(f"warning: {warning}" for warning in parts.warnings),
    ]
