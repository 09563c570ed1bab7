"""Random numbers that depend on a rollout's identity only (law 6).

The key of a token is fold_in over (seed, purpose, task_id, visit, sample, position). Slot, batch, process, device
count and policy version do not enter, so whatever the schedule does, the noise is bitwise the same. The generator
is threefry whatever jax's default is, since its numbers do not depend on sharding.
"""

import jax
import jax.numpy as jnp

from dynrl.types import Array, Request


def identity(request: Request, sample: int) -> tuple[int, int, int, int, int]:
    """What a rollout's noise depends on beside the seed, as uint32: a 64-bit task id is split in halves."""
    low, high = request.task_id & 0xFFFFFFFF, (request.task_id >> 32) & 0xFFFFFFFF
    return int(request.purpose), low, high, request.visit, sample


def rollout_keys(seed: Array, identity_N5: Array) -> Array:
    """Key data uint32 [N, 2] of rollouts with these identities, uint32 [N, 5]."""
    zeros_N = jnp.zeros(identity_N5.shape[0], jnp.uint32)
    key_N = zeros_N, zeros_N + seed.astype(jnp.uint32)
    for i in range(identity_N5.shape[1]):
        key_N = _threefry(key_N, (zeros_N, identity_N5[:, i]))
    return jnp.stack(key_N, axis=1)


def gumbel(keys_N2: Array, position_N: Array, vocab_size: int) -> Array:
    """Standard Gumbel noise, float32 [N, V], for the token at `position_N` of each rollout's completion."""
    zeros_N = jnp.zeros(position_N.shape, jnp.uint32)
    key_N = _threefry((keys_N2[:, 0], keys_N2[:, 1]), (zeros_N, position_N.astype(jnp.uint32)))
    count_1V = jnp.arange(vocab_size, dtype=jnp.uint32)[None]
    a_NV, b_NV = _threefry((key_N[0][:, None], key_N[1][:, None]), (jnp.zeros_like(count_1V), count_1V))
    mantissa_NV = ((a_NV ^ b_NV) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)  # of a float in [1, 2)
    tiny = jnp.finfo(jnp.float32).tiny
    uniform_NV = jax.lax.bitcast_convert_type(mantissa_NV, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform_NV * (1.0 - tiny) + tiny)))


_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def _threefry(key: tuple[Array, Array], count: tuple[Array, Array]) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), arrays broadcast against each other.

    The numbers of jax.random, which are tested for. On a CPU jax runs its rounds as a loop of small programs; written
    out, they become one, and the noise of 32 rows of 512 tokens takes less than half the time.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    a, b = count[0] + keys[0], count[1] + keys[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            a = a + b
            b = ((b << jnp.uint32(r)) | (b >> jnp.uint32(32 - r))) ^ a
        a = a + keys[(i + 1) % 3]
        b = b + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return a, b
