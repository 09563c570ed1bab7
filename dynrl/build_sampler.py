"""From a configuration to the slot engine that training and evaluation share, if it fits beside the weights."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dynrl.build_tasks import named
from dynrl.config import RunConfig
from dynrl.models import sharding
from dynrl.models.tokenizer import Tokenizer
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.memory import check_fits, slots_for_budget
from dynrl.sampling.options import EngineOptions, cache_shape
from dynrl.training.state import TrainState


def _bytes_per_device(shapes: Any, shardings: Any) -> int:
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, shardings)
    return sum(jax.tree.leaves(sizes))


def make_sampler(
    config: RunConfig, mesh: Mesh, tokenizer: Tokenizer, shapes: TrainState, shardings: TrainState, *,
    max_extend_tokens: int, alone: bool,
) -> SlotEngine:  # fmt: skip
    """The slot engine, for training and evaluation.

    Args:
      config: the run's.
      mesh: to sample on.
      tokenizer: of prompts and completions.
      shapes: of the train state.
      shardings: of the train state.
      max_extend_tokens: of an environment's observation; 0 without environments.
      alone: whether training has devices of its own.

    Raises:
      ConfigError: for an engine that does not fit beside training.
    """
    params = _bytes_per_device(shapes.params, shardings.params)
    train_bytes = _bytes_per_device(shapes, shardings) + params  # and gradients
    weight_bytes = 2 * params * jnp.dtype(config.model.dtype).itemsize // 4  # the old ones stay while new ones come
    c, g, shards = config.sampler, config.num_generations_per_prompt, sharding.num_row_shards(mesh)
    options = EngineOptions(
        num_slots=c.num_slots,
        max_prompt_tokens=config.tasks.max_prompt_tokens,
        max_completion_tokens=c.max_completion_tokens,
        group_sizes=tuple({1, g, config.generation.probe_samples} - {0}),
        chunk_steps=c.chunk_steps,
        refill_slots=c.refill_slots,
        prefill_tokens=c.prefill_tokens,
        kv_dtype=c.kv_dtype,
        weight_update=c.weight_update,
        max_extend_tokens=max_extend_tokens,
    )
    shape = cache_shape(config.model, options, shards)
    if not c.num_slots:
        slots = named("sampler.memory_budget_mb", slots_for_budget, shape, c.memory_budget_mb << 20, shards)
        options = dataclasses.replace(options, num_slots=slots)
    takes = {
        "training": 0 if alone else train_bytes,
        "sampler's weights": weight_bytes,
        "sampler": shape.engine_bytes(options.num_slots) // shards,
    }
    named("sampler.num_slots", check_fits, takes)
    return named(
        "sampler.num_slots",
        SlotEngine,
        config.model,
        mesh,
        options,
        eos_id=tokenizer.eos_id,
        pad_id=tokenizer.pad_id,
        vocab_size=tokenizer.vocab_size,
        seed=config.seed,
        decode=tokenizer.decode,
    )
