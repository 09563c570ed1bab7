import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.sampling.noise import Identity, gumbel, identities, rollout_keys, sample
from dynrl.types import Purpose, Request, SamplingParams

BASE = Request(0, 123, 4, Purpose.TRAIN, [3], 2, SamplingParams())
SAMPLE = jax.jit(sample)
KEYS = jax.jit(rollout_keys, static_argnums=2)


def keys_of(requests, seed=7, num_samples=3, pad_to=None):
    return np.asarray(KEYS(np.uint32(seed), identities(requests, pad_to or len(requests)), num_samples))


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
    crowd = keys_of([other, other, same, other], pad_to=6)  # another row, another number of rows
    np.testing.assert_array_equal(crowd[6:9], alone)
    np.testing.assert_array_equal(keys_of([BASE], num_samples=5)[:3], alone)  # and another group size
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.jit(lambda: rollout_keys(jnp.uint32(7), identities([BASE], 1), 3))(), alone)


def test_identities_are_host_arrays_padded_with_zeros():
    # Host code must not compile anything: NumPy only.
    got = identities([dataclasses.replace(BASE, task_id=2**33 + 5)], 3)
    assert all(isinstance(x, np.ndarray) and x.dtype == np.uint32 for x in got)
    assert [x.tolist() for x in got] == [[0, 0, 0], [5, 0, 0], [2, 0, 0], [4, 0, 0]]
    assert Identity._fields == ("purpose_P", "task_low_P", "task_high_P", "visit_P")


def test_the_noise_of_a_token_depends_on_its_position_only():
    keys = keys_of([BASE, dataclasses.replace(BASE, visit=9)])
    noise = np.asarray(gumbel(keys, jnp.int32(2), 50))
    np.testing.assert_array_equal(gumbel(keys[[4, 1]], jnp.int32(2), 50), noise[[4, 1]])
    assert not (np.asarray(gumbel(keys, jnp.int32(3), 50)) == noise).any()
    # A standard Gumbel variable has mean 0.5772 and variance pi^2 / 6; 300 draws.
    assert abs(noise.mean() - 0.5772) < 4 * np.sqrt(np.pi**2 / 6 / 300)


def draw(logits_V, temperature, n=6000, position=0):
    keys = keys_of([BASE], num_samples=6000)[:n]
    logits = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (n, len(logits_V)))
    token, logp, finite = SAMPLE(logits, keys, jnp.int32(position), jnp.full(n, temperature, jnp.float32))
    return np.asarray(token), np.asarray(logp), np.asarray(finite)


LOGITS = np.array([1.0, -0.5, 0.3, 2.0, -1.0, 0.3])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("position", [0, 3])
def test_frequencies_are_the_softmax_s(temperature, position):
    token, logp, finite = draw(LOGITS, temperature, position=position)
    p = np.exp(LOGITS / temperature)
    p /= p.sum()
    expected = 6000 * p
    chi2 = ((np.bincount(token, minlength=6) - expected) ** 2 / expected).sum()
    assert chi2 < 25.7  # 5 degrees of freedom: 1 seed in 10,000 lies above; the seed is fixed
    # The log-prob is that of the distribution drawn from, not of the one at temperature 1.
    np.testing.assert_allclose(logp, np.log(p)[token], rtol=1e-5, atol=1e-6)
    assert finite.all()


def test_temperature_zero_takes_the_best_at_the_log_prob_of_temperature_one():
    token, logp, _ = draw(LOGITS, 0.0, n=200)
    assert (token == 3).all()
    np.testing.assert_allclose(logp, 2.0 - np.log(np.exp(LOGITS).sum()), rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1.2e-38])
def test_a_tiny_temperature_is_greedy(temperature):
    # logits / temperature may leave float32's range; the sampled distribution is a point all the same.
    token, logp, finite = draw(LOGITS * 40, temperature, n=200)
    assert (token == 3).all()
    np.testing.assert_allclose(logp, 0.0, atol=1e-6)
    assert finite.all()


def test_a_huge_temperature_is_uniform():
    token, logp, _ = draw(LOGITS, 1e30)
    assert (((np.bincount(token, minlength=6) - 1000) ** 2) / 1000).sum() < 25.7
    np.testing.assert_allclose(logp, -np.log(6), rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_non_finite_logit_draws_nothing(bad, temperature):
    logits = np.tile(LOGITS.astype(np.float32), (4, 1))
    keys, t = keys_of([BASE], num_samples=4), jnp.full(4, temperature, jnp.float32)
    want = SAMPLE(logits, keys, jnp.int32(0), t)
    spoiled = logits.copy()
    spoiled[2, 1] = bad
    got = SAMPLE(spoiled, keys, jnp.int32(0), t)
    assert got[2].tolist() == [True, True, False, True]
    assert int(got[0][2]) == 0
    assert np.isfinite(got[1]).all()
    for x, y in zip(got, want, strict=True):  # its neighbours do not notice
        np.testing.assert_array_equal(np.delete(x, 2), np.delete(y, 2))


def test_rows_have_their_own_temperature():
    keys = keys_of([BASE], num_samples=4)
    logits = np.tile(LOGITS.astype(np.float32), (4, 1))
    mixed = SAMPLE(logits, keys, jnp.int32(1), jnp.array([0.0, 0.5, 1.0, 2.0]))
    for i, t in enumerate([0.0, 0.5, 1.0, 2.0]):
        single = SAMPLE(logits, keys, jnp.int32(1), jnp.full(4, t))
        for x, y in zip(mixed, single, strict=True):
            np.testing.assert_array_equal(x[i], y[i])
