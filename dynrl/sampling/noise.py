"""Random numbers that depend on a rollout's identity only (law 6).

The key of a token is fold_in over (seed, purpose, task_id, visit, sample, position). Slot, batch, process, device
count and policy version do not enter, so whatever the schedule does, the noise is bitwise the same. The generator
is threefry whatever jax's default is, since its numbers do not depend on sharding.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.types import Array, Request


class Identity(NamedTuple):
    """Identities of P groups, uint32 [P] each; 64-bit ids are split in halves."""

    purpose_P: Array
    task_low_P: Array
    task_high_P: Array
    visit_P: Array


def identities(requests: list[Request], num_groups: int) -> Identity:
    """Host arrays for `requests`, padded with zeros to `num_groups`."""
    fields = np.zeros((4, num_groups), np.uint32)
    for i, r in enumerate(requests):
        fields[:, i] = (int(r.purpose), r.task_id & 0xFFFFFFFF, (r.task_id >> 32) & 0xFFFFFFFF, r.visit)
    return Identity(*fields)


def rollout_keys(seed: Array, identity: Identity, num_samples: int) -> Array:
    """Key data uint32 [P * num_samples, 2], one per rollout, groups in order."""

    def one_group(*fields: Array) -> Array:
        key = jax.random.key(seed, impl="threefry2x32")
        for value in fields:
            key = jax.random.fold_in(key, value)
        return jax.vmap(lambda g: jax.random.key_data(jax.random.fold_in(key, g)))(jnp.arange(num_samples))

    return jax.vmap(one_group)(*identity).reshape(-1, 2)


def gumbel(keys_N2: Array, position: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise, float32 [N, V], for the token at `position` of each rollout."""

    def one(key_data: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(one)(keys_N2)


def sample(logits_NV: Array, keys_N2: Array, position: Array, temperature_N: Array) -> tuple[Array, Array, Array]:
    """Draws one token per row by the Gumbel-max trick; temperature 0 takes the arg max.

    Returns:
      (token int32 [N], its log-prob under the distribution that was sampled float32 [N], finite bool [N]). Greedy
      rows get the log-prob at temperature 1. A row with a non-finite logit has finite = False and token 0.
    """
    finite_N = jnp.all(jnp.isfinite(logits_NV), axis=-1)
    logits_NV = jnp.where(finite_N[:, None], logits_NV, 0.0)
    greedy_N = temperature_N == 0
    # Below the maximum before scaling: at a small temperature the quotients would lose their differences, or overflow.
    below_max_NV = logits_NV - jnp.max(logits_NV, axis=-1, keepdims=True)
    scaled_NV = below_max_NV / jnp.where(greedy_N, 1.0, temperature_N)[:, None]
    noise_NV = jnp.where(greedy_N[:, None], 0.0, gumbel(keys_N2, position, logits_NV.shape[-1]))
    token_N = jnp.argmax(scaled_NV + noise_NV, axis=-1).astype(jnp.int32)
    chosen_NV = jnp.arange(logits_NV.shape[-1])[None] == token_N[:, None]
    logp_N = jnp.sum(jnp.where(chosen_NV, jax.nn.log_softmax(scaled_NV), 0.0), axis=-1)
    return jnp.where(finite_N, token_N, 0), logp_N, finite_N
