"""The train step: one TrainBatch of exactly B groups in, new weights and metrics out.

A batch is cut into minibatches (one optimizer update each) and those into microbatches (gradients summed as sums,
divided once by the update's whole weight). Both cuts take the same share from every row shard, so no cut moves data.
Groups keep their order: it is dispatch order, and tasks are drawn at random.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dynrl.config import ConfigError, RunConfig
from dynrl.core import (
    ESTIMATORS,
    group_advantages,
    masked_sum_count,
    policy_loss,
    safe_divide,
    shaped_rewards,
)
from dynrl.models import sharding
from dynrl.models.decoder import Params
from dynrl.models.policy import completion_logprobs
from dynrl.training.state import TrainState, learning_rate
from dynrl.types import Array, Finish, TrainBatch

Sums = dict[str, tuple[Array, Array]]


class Part(NamedTuple):
    """What the loss of some groups needs, [b, G, ...]."""

    batch: TrainBatch
    advantages_BG: Array  # zeros where the estimator needs each token's entropy
    mask_BGT: Array
    old_logp_BGT: Array | None  # None where the only update of a step is its first
    ref_logp_BGT: Array | None  # None without a KL term


def loss_mask(batch: TrainBatch, overlong: str) -> Array:
    """Bool [B, G, T]: the tokens to train on; real groups, live rollouts, and truncated ones unless masked."""
    row_BG = batch.real_B[:, None] & batch.live_BG
    if overlong == "mask":
        row_BG &= batch.payload.finish_PG != Finish.LENGTH
    return batch.payload.mask_PGT & row_BG[:, :, None]


def cut(tree: Any, num_parts: int, index: Array | int, shards: int) -> Any:
    """Part `index` of `num_parts` along the leading axis, the same share of every row shard."""

    def one(x: Array) -> Array:
        size = x.shape[0] // (shards * num_parts)
        parts = x.reshape(shards, num_parts, size, *x.shape[1:])
        return jax.lax.dynamic_index_in_dim(parts, index, 1, keepdims=False).reshape(shards * size, *x.shape[1:])

    return jax.tree.map(one, tree)


def estimator_input(batch: TrainBatch, config: RunConfig) -> Array:
    """The rewards that advantages are computed from: raw, or with DAPO's penalty for overlong completions."""
    return shaped_rewards(batch.rewards_BG, batch.payload.length_PG, **config.overlong_kwargs)


def _logprobs(params: Params, batch: TrainBatch, config: RunConfig) -> tuple[Array, Array]:
    return completion_logprobs(
        params,
        batch.payload,
        config.model,
        temperature=config.sampler.temperature,
        chunk_tokens=config.train.logprob_chunk_tokens,
        entropy_gradient=config.loss.entropy_coef > 0,
    )


def _loss(params: Params, part: Part, config: RunConfig) -> tuple[Array, tuple[Array, Sums]]:
    """Loss sum of some groups, with its weight and metric sums."""
    logp_BGT, entropy_BGT = _logprobs(params, part.batch, config)
    old_BGT = jax.lax.stop_gradient(logp_BGT) if part.old_logp_BGT is None else part.old_logp_BGT
    c, t = config.loss, logp_BGT.shape[-1]
    advantages = part.advantages_BG[..., None]
    if ESTIMATORS[c.estimator].per_token:
        advantages = group_advantages(
            estimator_input(part.batch, config),
            part.batch.live_BG & part.batch.real_B[:, None],
            estimator=c.estimator,
            entropy_PGT=jax.lax.stop_gradient(entropy_BGT),
            mask_PGT=part.mask_BGT,
            **c.estimator_kwargs,
        )

    def rows(x: Array) -> Array:
        return x.reshape(-1, t)

    terms: dict[str, Any] = {}
    if c.kl_coef:
        terms = {"kl": c.kl, "kl_coef": c.kl_coef, "ref_logp_NT": rows(part.ref_logp_BGT)}
    if c.entropy_coef:
        terms |= {"entropy_coef": c.entropy_coef, "entropy_NT": rows(entropy_BGT)}
    if terms and c.regularize == "signal":
        terms["regularize_mask_NT"] = rows(part.mask_BGT & (advantages != 0).any(-1, keepdims=True))
    constant = (c.constant_length or config.sampler.max_completion_tokens) if c.aggregation == "constant" else None
    loss_sum, weight, sums = policy_loss(
        rows(logp_BGT),
        rows(old_BGT),
        rows(part.batch.payload.logp_PGT),
        advantages.reshape(-1, t) if advantages.shape[-1] == t else advantages.reshape(-1),
        rows(part.mask_BGT),
        loss=c.loss,
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip or None,
        aggregation=c.aggregation,
        constant_length=constant,
        tis_cap=c.tis_cap or None,
        **terms,
    )
    sums["loss"] = (jax.lax.stop_gradient(loss_sum), weight)
    sums["entropy"] = masked_sum_count(jax.lax.stop_gradient(entropy_BGT), part.mask_BGT)
    return loss_sum, (weight, sums)


def _gradients(params: Params, part: Part, config: RunConfig, shards: int) -> tuple[Any, Array, Sums]:
    """Summed gradients, loss weight and metric sums over the microbatches of a part."""
    grad = jax.grad(partial(_loss, config=config), has_aux=True)
    num = config.train.num_microbatches

    def one(index: Array | int) -> tuple[Any, Array, Sums]:
        g, (weight, sums) = grad(params, cut(part, num, index, shards) if num > 1 else part)
        return g, weight, sums

    if num == 1:
        return one(0)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0))
    return jax.lax.scan(lambda acc, i: (jax.tree.map(jnp.add, acc, one(i)), None), total, jnp.arange(num))[0]


def prepare(state: TrainState, batch: TrainBatch, config: RunConfig, on_policy: bool) -> tuple[Part, dict[str, Array]]:
    """Advantages, masks, and the log-probs of other weights: the step's first ones (if needed), the reference.

    Returns the whole batch as a part, and metrics of the batch.
    """
    c, live_BG = config.loss, batch.live_BG & batch.real_B[:, None]
    mask_BGT = loss_mask(batch, c.overlong)
    if ESTIMATORS[c.estimator].per_token:
        advantages_BG, trains_BG = jnp.zeros(live_BG.shape, jnp.float32), live_BG
    else:
        rewards = estimator_input(batch, config)
        roles = (0, 1) if config.self_propose.kind and ESTIMATORS[c.estimator].batch_normalised else (None,)
        advantages_BG = jnp.zeros(live_BG.shape, jnp.float32)
        for role in roles:  # proposer and solver are normalised apart: their rewards have nothing in common
            live = live_BG if role is None else live_BG & (batch.role_B == role)[:, None]
            advantages_BG += group_advantages(rewards, live, estimator=c.estimator, **c.estimator_kwargs)
        trains_BG = advantages_BG != 0
    old_BGT = None if on_policy else _logprobs(state.params, batch, config)[0]
    ref_BGT = _logprobs(state.reference, batch, config)[0] if c.kl_coef else None
    trains_B = jnp.any(trains_BG & mask_BGT.any(-1), axis=1)
    zero_B = batch.real_B & ~trains_B
    real = batch.real_B.sum()
    metrics = {
        "train_batch/zero_advantage_groups_frac": safe_divide(zero_B.sum().astype(jnp.float32), real),
        "train_batch/groups": real,
        "train_batch/tokens": mask_BGT.sum(),
    }
    return Part(batch, advantages_BG, mask_BGT, old_BGT, ref_BGT), metrics


def _moved_where(apply: Array, step: Array, moved: TrainState, state: TrainState) -> TrainState:
    """The moved state where an update applies. Schedules count on wherever there is a step: they count steps."""

    def one(new: Any, old: Any) -> Any:
        if isinstance(new, optax.ScaleByScheduleState):
            return optax.ScaleByScheduleState(jnp.where(step, new.count, old.count))
        return jnp.where(apply, new, old)

    return jax.tree.map(one, moved, state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))


def update(
    state: TrainState, part: Part, index: Array, config: RunConfig, optimizer: optax.GradientTransformation,
    shards: int,
) -> tuple[TrainState, tuple[Sums, Array]]:  # fmt: skip
    """One optimizer update on minibatch `index` of the batch.

    A minibatch without a trained token makes no update: Adam's moments and weight decay would still move the
    weights. Nor does one with a non-finite gradient. The learning rate's schedule goes on all the same.

    Returns:
      The new state, and (metric sums, 1 where the gradient was non-finite).
    """
    num = config.train.num_minibatches
    mini = cut(part, num, index, shards) if num > 1 else part
    grads, weight, sums = _gradients(state.params, mini, config, shards)
    denominator = weight
    if config.loss.short_step_scale == "nominal":
        real_b = mini.batch.real_B  # the minibatch's own: its rows may be fewer than another's
        denominator = weight * real_b.shape[0] / jnp.maximum(real_b.sum(), 1)
    grads = jax.tree.map(lambda g: safe_divide(g, denominator), grads)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    apply = finite & (weight > 0)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    step = part.batch.real_B.any()
    moved = state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    state = _moved_where(apply, step, moved, state)._replace(updates=state.updates + step)
    sums["grad_norm"] = (norm, (weight > 0).astype(norm.dtype))
    return state, (sums, (~finite).astype(jnp.int32))


def train_step(
    state: TrainState, batch: TrainBatch, config: RunConfig, optimizer: optax.GradientTransformation, shards: int
) -> tuple[TrainState, dict[str, Array]]:
    """All updates of one step: `num_epochs` passes over `num_minibatches` minibatches.

    Returns:
      The new state, and scalar metrics: means over the tokens of all updates, `grad_norm` over the updates that had
      any, and the number of non-finite ones.
    """
    per_epoch = config.train.num_minibatches
    num_updates, step = config.versions_per_step, state.updates // config.versions_per_step
    part, metrics = prepare(state, batch, config, on_policy=num_updates == 1)
    one = partial(update, part=part, config=config, optimizer=optimizer, shards=shards)
    if num_updates == 1:
        state, (sums, nonfinite) = one(state, index=jnp.zeros((), jnp.int32))
    else:
        state, stacked = jax.lax.scan(lambda s, i: one(s, index=i % per_epoch), state, jnp.arange(num_updates))
        sums, nonfinite = jax.tree.map(lambda x: x.sum(0), stacked)
    rate = learning_rate(config.train, config.num_steps)
    metrics |= {f"train_step/{name}": safe_divide(total, count) for name, (total, count) in sums.items()}
    metrics["train_step/learning_rate"] = jnp.float32(rate(step))
    return state, metrics | {"train_step/nonfinite": nonfinite}


def jit_train_step(
    config: RunConfig, optimizer: optax.GradientTransformation, mesh: Mesh, shardings: TrainState
) -> Any:
    """`(state, batch) -> (state, metrics)`, jitted; the state is donated, metrics are replicated.

    Raises:
      ConfigError: when the row shards cannot all give the same share to every minibatch and microbatch.
    """
    shards = sharding.num_row_shards(mesh)
    parts = shards * config.train.num_minibatches * config.train.num_microbatches
    if config.num_prompts_per_step % parts:
        raise ConfigError(
            f"config.num_prompts_per_step: {config.num_prompts_per_step} is no multiple of the mesh's {shards} row "
            f"shards (data x fsdp) * train.num_minibatches * train.num_microbatches = {parts}"
        )
    step = partial(train_step, config=config, optimizer=optimizer, shards=shards)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, sharding.replicated(mesh)))
