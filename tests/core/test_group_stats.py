import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import group_stats, has_signal


def assert_stats(actual, expected):
    for name in ("count", "positives", "min", "max"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(actual.mean, expected.mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(actual.std, expected.std, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(actual.spread, expected.spread, rtol=1e-6)


def test_numpy_and_jax_agree(random_groups):
    for rewards, live in random_groups[4:]:
        on_host, on_device = group_stats(rewards, live), jax.jit(group_stats)(rewards, live)
        assert all(isinstance(field, np.ndarray) for field in on_host)
        assert all(isinstance(field, jax.Array) for field in on_device)
        assert_stats(on_device, on_host)
        signal = has_signal(on_host)
        assert isinstance(signal, np.ndarray)
        np.testing.assert_array_equal(jax.jit(has_signal)(on_device), signal)


def test_hand_derived():
    # Live: 1, 0, 0, 0. Mean 1/4; squares (9/16 + 3/16) = 3/4; ddof 1: 3/4 / 3 = 1/4, std 1/2.
    stats = jax.jit(group_stats)(jnp.array([[1.0, 0.0, 9.0, 0.0, 0.0]]), jnp.array([[True, True, False, True, True]]))
    assert [float(field[0]) for field in stats] == [4, 1, 0.25, 0.5, 0, 1, 1]
    assert [field.dtype for field in stats] == [jnp.int32] * 2 + [jnp.float32] * 5


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 1 / 3, -0.1, 3e38])
def test_equal_rewards_have_exactly_no_spread(value):
    stats = jax.jit(group_stats)(jnp.full((1, 8), value, jnp.float32))
    assert (stats.spread[0], stats.std[0]) == (0, 0)
    assert stats.mean[0] == np.float32(value)
    assert not has_signal(stats)[0]
    assert not has_signal(stats, atol=0, rtol=0)[0]


def test_offset_of_a_million_keeps_the_std():
    # 1e6 + {0, 1/16}: std of four and four with ddof 1 = 1/32 * sqrt(8/7).
    rewards = jnp.array([[1e6, 1e6 + 0.0625] * 4])
    stats = group_stats(rewards)
    np.testing.assert_allclose(stats.std, np.sqrt(8 / 7) / 32, rtol=1e-6)
    assert has_signal(stats, rtol=0)[0]
    assert not has_signal(stats)[0]  # rtol 1e-6 of 1e6 is 1, as documented


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_dead_whatever_live_says(xp):
    rewards = xp.asarray(np.array([[np.nan, np.inf, 1.0, 0.0], [np.nan] * 4, [5.0] * 4], np.float32))
    live = xp.asarray(np.array([[True] * 4, [True] * 4, [False] * 4]))
    stats = group_stats(rewards, live)
    assert stats.count.tolist() == [2, 0, 0]
    for field in stats:
        assert np.isfinite(field).all()
        assert field[1] == field[2] == 0
    assert has_signal(stats).tolist() == [True, False, False]


def test_one_live_rollout_has_no_signal():
    stats = jax.jit(group_stats)(jnp.array([[0.3, 0.9], [0.3, jnp.nan]]), jnp.array([[True, False], [True, True]]))
    np.testing.assert_allclose(stats.mean, [0.3, 0.3])
    assert stats.std.tolist() == [0, 0]
    assert has_signal(stats, atol=-1.0).tolist() == [False, False]  # not even when every spread passes


def test_tolerance_is_absolute_plus_relative():
    # Limits 1e-6 + 1e-6 * max|r|: for 100 it is 1.01e-4; neighbouring float32 there are 7.6e-6 apart.
    below, above = np.float32(100 + 9e-5), np.float32(100 + 1.2e-4)
    rewards = np.array([[100, below], [100, above], [0, 9e-7], [0, 2e-6], [-100, -above]], np.float32)
    assert has_signal(group_stats(rewards)).tolist() == [False, True, False, True, True]
    assert jax.jit(lambda r: has_signal(group_stats(r)))(rewards).tolist() == [False, True, False, True, True]


def test_huge_rewards_stay_finite():
    stats = jax.jit(group_stats)(jnp.array([[1e38, -1e38, 1e38, -1e38], [1e30, 0, 0, 0]]))
    # Std of +-1 with ddof 1: sqrt(4/3); of {1, 0, 0, 0}: 1/2.
    np.testing.assert_allclose(stats.std, [np.sqrt(4 / 3) * 1e38, 0.5e30], rtol=1e-6)
    np.testing.assert_allclose(stats.mean, [0, 0.25e30], rtol=1e-6)


def test_padding_and_permutation_invariance(random_groups):
    rng = np.random.default_rng(1)
    rewards, live = random_groups[4]
    expected = group_stats(rewards, live)
    padded = np.concatenate([rewards, rng.normal(size=(len(rewards), 5)).astype(np.float32)], axis=1)
    padded_live = np.concatenate([live, np.zeros((len(rewards), 5), bool)], axis=1)
    order = rng.permutation(padded.shape[1])
    assert_stats(group_stats(jnp.asarray(padded[:, order]), padded_live[:, order]), expected)
    groups = rng.permutation(len(rewards))
    for actual, field in zip(group_stats(rewards[groups], live[groups]), expected, strict=True):
        np.testing.assert_array_equal(actual, field[groups])


def test_vmap_and_empty():
    rewards = jnp.arange(24.0).reshape(2, 3, 4)
    stats = jax.jit(jax.vmap(group_stats))(rewards)
    for index in range(2):
        for field, expected in zip(stats, group_stats(np.asarray(rewards)[index]), strict=True):
            np.testing.assert_allclose(field[index], expected, rtol=1e-6)
    assert jax.jit(group_stats)(jnp.zeros((0, 4))).mean.shape == (0,)
    assert jax.jit(group_stats)(jnp.zeros((3, 0))).count.tolist() == [0, 0, 0]


def test_gradients_are_finite():
    rewards = jnp.array([[0.1] * 4, [1.0, 0.0, 0.0, 0.0], [jnp.nan] * 4])
    grads = jax.jit(jax.grad(lambda r: sum(field.sum() for field in group_stats(r)[2:])))(rewards)
    assert np.isfinite(grads).all()


def test_wrong_shapes():
    with pytest.raises(ValueError, match=r"\[P, G\].*\(4,\)"):
        group_stats(jnp.zeros(4))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        group_stats(jnp.zeros((2, 4)), jnp.ones((2, 3), bool))
