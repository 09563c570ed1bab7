"""A supervised warm start for models trained from scratch: cross-entropy on the reference answers of fresh tasks.

A task that is solved in several turns shows how in its metadata's `demonstration`: a list of [text, trained] pairs,
which stand in the answer's place. What an environment or a tool says is part of it, and not trained on, as in rollouts.

The result is cached by content: the key covers everything that determines the weights, so a cached warm start gives
the same run, row for row, as one that was just trained. Mesh and workdir do not enter.
"""

import dataclasses
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh

from dynrl.config import ModelConfig, RunConfig
from dynrl.models import sharding
from dynrl.models.decoder import Params
from dynrl.models.policy import completion_logprobs
from dynrl.models.tokenizer import Tokenizer
from dynrl.types import Array, Payload, Task

TaskAt = Callable[[int], Task]  # a pure function of the index


def cache_key(config: RunConfig, source: Mapping[str, Any], excluded: str, tokenizer_fingerprint: str) -> str:
    """Hash of what determines the warm-started weights.

    Args:
      config: the run's.
      source: what identifies the training tasks and their contents, JSON-able.
      excluded: what identifies the evaluation tasks, which are left out.
      tokenizer_fingerprint: the tokenizer's.
    """
    content = {
        "model": dataclasses.asdict(config.model),
        "warm_start": {k: v for k, v in dataclasses.asdict(config.warm_start).items() if k != "cache"},
        "source": dict(source),
        "excluded": excluded,
        "lengths": [config.tasks.max_prompt_tokens, config.sampler.max_completion_tokens],
        "tokenizer": tokenizer_fingerprint,
        "seed": config.seed,
        "jax": [jax.__version__, jax.default_backend()],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def encode_batch(tasks: list[Task], tokenizer: Tokenizer, max_prompt: int, max_completion: int) -> Payload:
    """Prompts and answers as a payload of one rollout per group; only the fields that log-probs need are filled.

    Raises:
      ValueError: naming the task, when its prompt or its answer with the stop token does not fit, or its demonstration
        is none.
    """
    n = len(tasks)
    prompt_PL = np.full((n, max_prompt), tokenizer.pad_id, np.int32)
    length_P = np.ones(n, np.int32)
    tokens_PGT = np.zeros((n, 1, max_completion), np.int32)
    mask_PGT = np.zeros((n, 1, max_completion), bool)
    for i, task in enumerate(tasks):
        prompt, answer, trained = tokenizer.encode(task.prompt), [], []
        for text, is_trained in _segments(task):  # encoded one by one, as turns and observations are in a rollout
            ids = tokenizer.encode(text)
            answer += ids
            trained += [is_trained] * len(ids)
        answer.append(tokenizer.eos_id)
        if not 0 < len(prompt) <= max_prompt or len(answer) > max_completion:
            raise ValueError(
                f"task {task.prompt!r} -> {task.answer!r} of source {task.source} has {len(prompt)} prompt and "
                f"{len(answer)} answer tokens; tasks.max_prompt_tokens = {max_prompt} and "
                f"sampler.max_completion_tokens = {max_completion}"
            )
        prompt_PL[i, max_prompt - len(prompt) :] = prompt
        length_P[i] = len(prompt)
        tokens_PGT[i, 0, : len(answer)] = answer
        mask_PGT[i, 0, : len(answer)] = [*trained, True]
    unused = np.zeros((n, 1), np.int32)
    logp_PGT, version_PGT = np.zeros_like(tokens_PGT, np.float32), np.zeros_like(tokens_PGT)
    return Payload(prompt_PL, length_P, tokens_PGT, logp_PGT, mask_PGT, version_PGT, unused, unused)


def _segments(task: Task) -> list[tuple[str, bool]]:
    """What is shown after the prompt, and which of it the policy is to write itself."""
    shown = task.metadata.get("demonstration")
    if shown is None:
        return [(task.answer, True)]
    if not isinstance(shown, list) or not shown or not all(_is_segment(entry) for entry in shown):
        raise ValueError(
            f"task {task.prompt!r} of source {task.source}: the metadata's demonstration must be a list of "
            f"[text, trained] pairs, got {shown!r:.200}"
        )
    return [(text, is_trained) for text, is_trained in shown]


def _is_segment(entry: Any) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    return isinstance(entry[0], str) and isinstance(entry[1], bool)


def supervised_step(
    params: Params, opt_state: Any, batch: Payload, model: ModelConfig, optimizer: optax.GradientTransformation
) -> tuple[Params, Any, Array]:
    """One update on mean token cross-entropy. Returns the loss too."""

    def loss(params: Params) -> Array:
        logp, _ = completion_logprobs(params, batch, model)
        return -jnp.sum(jnp.where(batch.mask_PGT, logp, 0.0)) / batch.mask_PGT.sum()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def warm_start(
    params: Params, config: RunConfig, tokenizer: Tokenizer, task_at: TaskAt, mesh: Mesh,
    log: Callable[[int, float], None],
) -> Params:  # fmt: skip
    """Trains `params` (donated) for `warm_start.num_steps` steps on tasks 0, 1, 2, ... of `task_at`.

    Args:
      params: random weights, placed.
      config: the run's.
      tokenizer: encodes prompts and answers.
      task_at: the i-th training task of the stage.
      mesh: the device mesh.
      log: called with (step, loss) every 20 steps and at the end.
    """
    c = config.warm_start
    decay = optax.cosine_decay_schedule(c.learning_rate, max(c.num_steps - c.warmup_steps, 1), alpha=0.1)
    ramp = optax.linear_schedule(0.0, c.learning_rate, max(c.warmup_steps, 1))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.join_schedules([ramp, decay], [c.warmup_steps]))
    )
    shardings = jax.tree.map(lambda x: x.sharding, params)
    opt_shapes = jax.eval_shape(optimizer.init, params)
    opt_shardings = sharding.param_shardings(opt_shapes, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=opt_shardings)(params)
    step = jax.jit(
        partial(supervised_step, model=config.model, optimizer=optimizer),
        donate_argnums=(0, 1),
        out_shardings=(shardings, opt_shardings, sharding.replicated(mesh)),
    )
    rows = sharding.rows(mesh)
    for i in range(c.num_steps):
        tasks = [task_at(i * c.batch_size + j) for j in range(c.batch_size)]
        host = encode_batch(tasks, tokenizer, config.tasks.max_prompt_tokens, config.sampler.max_completion_tokens)
        batch = jax.tree.map(lambda x: sharding.place(x, rows), host)
        params, opt_state, loss = step(params, opt_state, batch)
        if (i + 1) % 20 == 0 or i + 1 == c.num_steps:
            log(i + 1, float(loss))
    return params


def cached_warm_start(
    params: Params, cache_dir: epath.Path | None, make: Callable[[Params], Params]
) -> tuple[Params, bool]:
    """The weights of `cache_dir`, or those that `make(params)` trains, stored there for the next run.

    Runs may share a cache at the same moment, and the hosts of one run need not share it: the weights are read where
    every process has them.

    Returns:
      The weights, and whether they came from the cache.

    Raises:
      RuntimeError: naming the folder, when it is damaged.
    """
    if cache_dir is None:
        return make(params), False
    if not sharding.any_process(not cache_dir.exists()):
        return _read(cache_dir, params), True
    params = make(params)
    problem = _store(cache_dir, params)
    if problem:
        warnings.warn(f"the warm start is not cached in {cache_dir}: {problem}", stacklevel=2)
    return params, False


def _read(cache_dir: epath.Path, params: Params) -> Params:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(cache_dir, abstract)
    except Exception as error:  # orbax, tensorstore and JSON each raise their own
        raise RuntimeError(
            f"the cached warm start {cache_dir} cannot be read: {type(error).__name__}: {error}\n"
            "Without that folder, the same command trains it again"
        ) from error


def _store(cache_dir: epath.Path, params: Params) -> str:
    """Writes beside the target and renames, so that what lies there is whole. Returns why it could not.

    The folder beside it is this run's own: orbax deletes what it takes for the rest of an earlier attempt.
    """
    own = cache_dir.with_name(f"{cache_dir.name}.{sharding.common_number(uuid.uuid4().int % 2**31)}")
    first, problem = jax.process_index() == 0, ""
    if first:
        try:  # made before orbax runs, whose threads outlive a failure by minutes
            own.mkdir(parents=True)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    if sharding.any_process(bool(problem)):
        return problem
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(own / "weights", params)
        checkpointer.wait_until_finished()
    if first:
        try:
            (own / "weights").rename(cache_dir)
        except OSError as error:  # another run of the same warm start was done first; what it stored is the same
            problem = "" if cache_dir.exists() else f"{type(error).__name__}: {error}"
        own.rmtree(missing_ok=True)
    return problem
