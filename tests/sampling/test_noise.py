import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.sampling.noise import gumbel, identity, rollout_keys
from dynrl.types import Purpose, Request, SamplingParams

BASE = Request(0, 123, 4, Purpose.TRAIN, [3], 2, SamplingParams())
KEYS = jax.jit(rollout_keys)
GUMBEL = jax.jit(gumbel, static_argnums=2)


def keys_of(requests, seed=7, num_samples=3, pad_to=None):
    rows = [identity(r, sample) for r in requests for sample in range(num_samples)]
    rows += [(0,) * 5] * ((pad_to or len(rows)) - len(rows))
    return np.asarray(KEYS(np.uint32(seed), np.array(rows, np.uint32)))


def test_an_identity_is_five_numbers_of_32_bits():
    request = dataclasses.replace(BASE, purpose=Purpose.PROPOSE, task_id=2**33 + 5, visit=6)
    assert identity(request, 1) == (3, 5, 2, 6, 1)  # purpose, low half, high half, visit, sample
    # A task that has no id yet is -1: all bits of both halves.
    assert identity(dataclasses.replace(BASE, task_id=-1), 0) == (0, 2**32 - 1, 2**32 - 1, 4, 0)
    assert identity(dataclasses.replace(BASE, task_id=2**63 - 1), 0) == (0, 2**32 - 1, 2**31 - 1, 4, 0)


def test_keys_are_the_fold_of_the_fields_in_their_order():
    # Law 6 fixes the order, and what is checkpointed of a run depends on it: never reorder.
    for seed, sample in ((7, 0), (2**32 - 1, 2)):
        key = jax.random.key(jnp.uint32(seed), impl="threefry2x32")
        for number in (0, 123, 0, 4, sample):
            key = jax.random.fold_in(key, number)
        np.testing.assert_array_equal(keys_of([BASE], seed)[sample], jax.random.key_data(key))
    assert keys_of([BASE]).dtype == np.uint32


def test_every_identity_field_gives_other_noise():
    big = 2**32
    others = [
        dataclasses.replace(BASE, purpose=Purpose.EVAL),
        dataclasses.replace(BASE, task_id=124),
        dataclasses.replace(BASE, task_id=123 + big),  # the high half counts
        dataclasses.replace(BASE, task_id=123 * big),  # and the halves are told apart
        dataclasses.replace(BASE, task_id=-1),
        dataclasses.replace(BASE, visit=5),
        dataclasses.replace(BASE, task_id=4, visit=123),  # fields are not summed
    ]
    keys = keys_of([BASE, *others])
    other_seed = keys_of([BASE], seed=8)
    assert keys.shape == (8 * 3, 2)  # samples differ too: all 24 and 3 are distinct
    assert len(np.unique(np.concatenate([keys, other_seed]), axis=0)) == 27


def test_nothing_else_enters():
    same = dataclasses.replace(BASE, ticket=99, prompt=[1, 2], num_samples=5, params=SamplingParams(0.3, 7))
    other = dataclasses.replace(BASE, task_id=5)
    alone = keys_of([BASE])
    crowd = keys_of([other, other, same, other], pad_to=24)  # another row, another number of rows
    np.testing.assert_array_equal(crowd[6:9], alone)
    np.testing.assert_array_equal(keys_of([same], num_samples=5)[:3], alone)  # and another group size
    fields = np.array([identity(BASE, i) for i in range(3)], np.uint32)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.jit(lambda: rollout_keys(jnp.uint32(7), fields))(), alone)
        other_default = jax.jit(lambda: gumbel(alone, np.arange(3), 50))()
    np.testing.assert_array_equal(other_default, GUMBEL(alone, np.arange(3), 50))


def test_the_noise_of_a_token_depends_on_its_rollout_and_position_only():
    keys = keys_of([BASE, dataclasses.replace(BASE, visit=9)])
    twos = np.full(6, 2, np.int32)
    noise = np.asarray(GUMBEL(keys, twos, 50))
    assert noise.dtype == np.float32
    np.testing.assert_array_equal(GUMBEL(keys[[4, 1]], twos[:2], 50), noise[[4, 1]])
    assert not (np.asarray(GUMBEL(keys, twos + 1, 50)) == noise).any()
    # Each row at a position of its own, and by the fold of the position into the rollout's key.
    mixed = np.asarray(GUMBEL(keys, np.array([2, 0, 2, 7, 2, 3], np.int32), 50))
    np.testing.assert_array_equal(mixed[[0, 2, 4]], noise[[0, 2, 4]])
    assert not (mixed[[1, 3, 5]] == noise[[1, 3, 5]]).any()
    key = jax.random.fold_in(jax.random.wrap_key_data(keys[3], impl="threefry2x32"), 7)
    np.testing.assert_array_equal(mixed[3], jax.random.gumbel(key, (50,)))
    # A standard Gumbel variable has mean 0.5772 and variance pi^2 / 6; 300 draws.
    assert abs(noise.mean() - 0.5772) < 4 * np.sqrt(np.pi**2 / 6 / 300)


def test_positions_are_independent_draws():
    # Of 1,000 positions of 10 rollouts, neighbours in position, rollout and vocabulary: correlations of size
    # 1 / sqrt(n), here with n >= 30,000, stay below 5 of them.
    keys = np.tile(keys_of([BASE], num_samples=10), (1000, 1))
    noise = np.asarray(GUMBEL(keys, np.repeat(np.arange(1000, dtype=np.int32), 10), 4)).reshape(1000, 10, 4)
    assert np.isfinite(noise).all()
    z = (noise - noise.mean()) / noise.std()
    for pair in (z[1:] * z[:-1], z[:, 1:] * z[:, :-1], z[:, :, 1:] * z[:, :, :-1]):
        assert abs(pair.mean()) < 5 / np.sqrt(pair.size)
