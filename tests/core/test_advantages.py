import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import group_advantages

ESTIMATORS = ("grpo", "dr_grpo", "rloo")
jitted = jax.jit(group_advantages, static_argnames="estimator")


def reference(rewards, live, estimator, ddof=1, eps=1e-6, atol=1e-6, rtol=1e-6):
    """Plain float64 from the papers' equations, one group at a time; RLOO as leave-one-out means."""
    advantages = np.zeros(rewards.shape)
    for group, (rewards_G, live_G) in enumerate(zip(rewards, live, strict=True)):
        where = np.flatnonzero(live_G & np.isfinite(rewards_G))
        r = rewards_G[where].astype(np.float64)
        if len(r) < 2 or r.max() - r.min() <= atol + rtol * abs(r).max():
            continue
        if estimator == "grpo":
            advantages[group, where] = (r - r.mean()) / (r.std(ddof=ddof) + eps)
        elif estimator == "dr_grpo":
            advantages[group, where] = r - r.mean()
        else:
            advantages[group, where] = r - (r.sum() - r) / (len(r) - 1)
    return advantages


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_float64(random_groups, estimator):
    for index, (rewards, live) in enumerate(random_groups):
        for options in ({}, {"atol": 0.0, "rtol": 0.0, "ddof": 0}):
            expected = reference(rewards, live, estimator, **options)
            actual = jitted(rewards, live, estimator=estimator, **options)
            assert actual.dtype == jnp.float32
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
            np.testing.assert_array_equal(np.asarray(actual)[expected == 0], 0)  # exactly, not nearly
        if index == 4:
            eager = group_advantages(rewards, live, estimator=estimator)
            np.testing.assert_allclose(eager, reference(rewards, live, estimator), rtol=2e-5, atol=2e-5)


def test_hand_derived():
    # Live 1, 0, 0, 0: mean 1/4, std (ddof 1) 1/2.
    rewards, live = jnp.array([[1.0, 0.0, 7.0, 0.0, 0.0]]), jnp.array([[True, True, False, True, True]])
    np.testing.assert_allclose(jitted(rewards, live, eps=0.0), [[1.5, -0.5, 0, -0.5, -0.5]])
    np.testing.assert_allclose(jitted(rewards, live, eps=0.5), [[0.75, -0.25, 0, -0.25, -0.25]])
    # ddof 0: std = sqrt(3/16) = sqrt(3)/4, so 3/4 / std = sqrt(3).
    np.testing.assert_allclose(jitted(rewards, live, eps=0.0, ddof=0)[0, 0], np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(jitted(rewards, live, estimator="dr_grpo"), [[0.75, -0.25, 0, -0.25, -0.25]])
    # The others' means: (0+0+0)/3 = 0, and (1+0+0)/3 = 1/3.
    third = 1 / 3
    np.testing.assert_allclose(jitted(rewards, live, estimator="rloo"), [[1, -third, 0, -third, -third]], rtol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 1 / 3, 0.0])
def test_equal_rewards_give_exactly_zero(estimator, value):
    for options in ({}, {"atol": 0.0, "rtol": 0.0, "eps": 0.0}):
        advantages = jitted(np.full((2, 8), value, np.float32), estimator=estimator, **options)
        np.testing.assert_array_equal(advantages, np.zeros((2, 8)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_rounding_residue_gives_exactly_zero(estimator):
    rewards = np.full((1, 8), 0.7, np.float32)
    rewards[0, 0] = np.nextafter(rewards[0, 0], np.float32(1))
    np.testing.assert_array_equal(jitted(rewards, estimator=estimator), np.zeros((1, 8)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_offset_of_a_million_changes_nothing(estimator):
    rewards = np.random.default_rng(0).integers(0, 9, (50, 8)) / np.float32(16)
    rewards[:, 0] = 1.0
    rewards[:, 1] = 0.0
    options = {"estimator": estimator, "atol": 0.0, "rtol": 0.0}
    plain, offset = jitted(rewards, **options), jitted(rewards + np.float32(1e6), **options)
    np.testing.assert_array_equal(plain, offset)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_live(estimator):
    rewards = np.array([[1, 0, 1], [np.nan, np.inf, -np.inf], [1, 0, 1]], np.float32)
    live = np.array([[False] * 3, [True] * 3, [True, False, False]])
    np.testing.assert_array_equal(jitted(rewards, live, estimator=estimator), np.zeros((3, 3)))
    np.testing.assert_array_equal(jitted(rewards[:, :1], estimator=estimator), np.zeros((3, 1)))  # singletons


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_padding_permutation_and_vmap(random_groups, estimator):
    rng = np.random.default_rng(1)
    rewards, live = random_groups[4]
    expected = np.asarray(jitted(rewards, live, estimator=estimator))
    noise = np.where(rng.random((len(rewards), 5)) < 0.5, np.nan, 1e9).astype(np.float32)
    padded = np.concatenate([rewards, noise], axis=1)
    padded_live = np.concatenate([live, np.zeros(noise.shape, bool)], axis=1)
    order = rng.permutation(padded.shape[1])
    actual = np.asarray(jitted(padded[:, order], padded_live[:, order], estimator=estimator))[:, np.argsort(order)]
    np.testing.assert_allclose(actual[:, :8], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actual[:, 8:], 0)
    batched = jax.vmap(lambda r, m: group_advantages(r, m, estimator=estimator))
    both = batched(np.stack([rewards, rewards[::-1]]), np.stack([live, live[::-1]]))
    np.testing.assert_allclose(both, np.stack([expected, expected[::-1]]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_huge_rewards_and_gradients_stay_finite(estimator):
    rewards = jnp.array([[1e38, -1e38, 1e38, -1e38], [0.1] * 4, [1.0, 0, 0, 0], [jnp.nan] * 4])
    assert np.isfinite(jitted(rewards, estimator=estimator)).all()
    if estimator == "grpo":  # +-1 / sqrt(4/3)
        np.testing.assert_allclose(jitted(rewards)[0, 0], np.sqrt(3 / 4), rtol=1e-5)
    grads = jax.grad(lambda r: (group_advantages(r, estimator=estimator) ** 2).sum())(rewards[1:])
    assert np.isfinite(grads).all()


def test_unknown_estimator_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpro' is unknown; there are grpo, dr_grpo, rloo"):
        group_advantages(jnp.zeros((1, 2)), estimator="gpro")
