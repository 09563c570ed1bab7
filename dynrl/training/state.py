"""The train state and the optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from dynrl.config import ModelConfig, TrainConfig
from dynrl.models import sharding
from dynrl.models.decoder import Params, init_params
from dynrl.types import Array


class TrainState(NamedTuple):
    """What an update changes.

    `updates` is the weights' version: the optimizer updates that they have seen. One that was skipped, for want of a
    row or of a finite gradient, counts too, so that the host knows the version without waiting for the device.
    """

    params: Params
    opt_state: Any
    updates: Array  # int32 scalar
    reference: Params  # the policy that KL is measured from, which no update changes; empty without a KL term


def learning_rate(config: TrainConfig, num_steps: int) -> optax.Schedule:
    """The schedule over optimizer steps, not over rounds or updates: warm-up, then constant, linear or cosine.

    Updates within one step (minibatches, epochs) share its learning rate. Generation rounds do not enter.
    """
    peak, decay = config.learning_rate, max(num_steps - config.warmup_steps, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, decay),
        "cosine": optax.cosine_decay_schedule(peak, decay),
    }[config.lr_schedule]
    if not config.warmup_steps:
        return after
    # Step 0 already learns: the ramp ends at the peak in step warmup_steps.
    ramp = optax.linear_schedule(peak / (config.warmup_steps + 1), peak, config.warmup_steps)
    return optax.join_schedules([ramp, after], [config.warmup_steps])


def make_optimizer(config: TrainConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm; weight decay spares norms and biases."""
    per_step = config.num_epochs * config.num_minibatches
    schedule = learning_rate(config, num_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            lambda count: schedule(jnp.asarray(count) // per_step),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(params: Params) -> Any:
    """By name, not by rank: under scan_layers norms and biases have a leading axis of layers."""

    def one(path: tuple[Any, ...], _: Array) -> bool:
        return path[-1].key not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(one, params)


def fresh_state(params: Params, optimizer: optax.GradientTransformation, reference: bool) -> TrainState:
    """The state around given weights before any update; under jit."""
    copy = jax.tree.map(jnp.copy, params) if reference else {}
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32), copy)


def init_state(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, mesh: Mesh, seed: int,
    reference: bool = False,
) -> TrainState:  # fmt: skip
    """Random weights, each array made in its shard. The same numbers on every mesh."""

    def init(key: Array) -> TrainState:
        return fresh_state(init_params(config, vocab_size, key), optimizer, reference)

    key = jax.random.key(seed, impl="threefry2x32")
    return jax.jit(init, out_shardings=state_shardings(config, vocab_size, optimizer, mesh, reference))(key)


def with_params(state: TrainState, params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state around given weights, in the same shardings; they are the reference too, where there is one."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(lambda p: fresh_state(p, optimizer, bool(state.reference)), out_shardings=shardings)(params)


def state_shardings(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, mesh: Mesh, reference: bool = False
) -> TrainState:
    """A TrainState of NamedSharding: optimizer moments and reference lie as their parameters do."""
    return sharding.param_shardings(abstract_state(config, vocab_size, optimizer, reference), mesh)


def abstract_state(
    config: ModelConfig, vocab_size: int, optimizer: optax.GradientTransformation, reference: bool = False
) -> TrainState:
    """Shapes and dtypes of a TrainState, without its arrays."""

    def shapes(key: Array) -> TrainState:
        return fresh_state(init_params(config, vocab_size, key), optimizer, reference)

    return jax.eval_shape(shapes, jax.eval_shape(lambda: jax.random.key(0)))
