"""Faults that users reported of other systems, as far as pure functions can have them; docstrings name the reports.

Each test shows the fault in a few lines of naive code, and that it is not here. Nearby: that equal and nearly equal
rewards give exactly 0 under every estimator is in test_advantages.py, dead rollouts in test_group_stats.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dynrl.core import (
    group_advantages,
    group_stats,
    has_signal,
    make_filter,
    policy_loss,
    safe_divide,
    soft_overlong_penalty,
    token_logprobs,
)

SIGNAL = make_filter("has_signal")
advantages_of = jax.jit(group_advantages, static_argnames="estimator")
loss_of = jax.jit(policy_loss, static_argnames=("aggregation", "constant_length"))


def kept(rewards, live=None):
    """The default filter's verdicts of NumPy rewards."""
    return SIGNAL(group_stats(rewards, live), rewards, live).tolist()


def test_report_leave_one_out_std_drops_single_rollouts_of_a_mixed_group():
    """NeMo-RL#3469."""
    rewards = np.array([[1, 0, 0, 0]], np.float32)
    others_std = [np.delete(rewards[0], i).std() for i in range(4)]
    assert others_std[0] == 0  # the naive test per rollout drops the one that was right
    assert all(std > 0 for std in others_std[1:])
    assert kept(rewards) == [True]  # one verdict per group
    for estimator in ("grpo", "rloo"):
        assert np.all(advantages_of(rewards, estimator=estimator) != 0)


def test_report_float_residue_of_equal_rewards_passes_std_above_0():
    """NeMo-RL#4161, atropos#481."""
    rewards = np.full((1, 8), 0.1, np.float32)
    mean = functools.reduce(np.add, rewards[0]) / np.float32(8)  # rounds at every step
    std = np.sqrt(((rewards - mean) ** 2).sum() / 7)
    assert std > 0
    assert abs((rewards - mean) / std).max() > 0.5  # a full-sized advantage out of nothing
    assert kept(rewards) == [False]
    np.testing.assert_array_equal(advantages_of(rewards, eps=0.0), np.zeros((1, 8)))


def test_report_masked_rollouts_and_judge_noise_defeat_an_exact_test():
    """SkyRL#1801."""
    noisy = np.array([[0.8, 0.8 + 5e-7, 0.8, 0.1], [0.8, 0.8, 0.8, np.nan]], np.float32)
    live = np.array([[True, True, True, False], [True] * 4])
    assert not np.any(noisy.max(axis=1) == noisy.min(axis=1))  # so an exact test keeps both
    assert kept(noisy, live) == [False, False]
    np.testing.assert_array_equal(advantages_of(noisy, live), np.zeros((2, 4)))


def test_report_constant_partial_credit_passes_a_filter_on_the_mean():
    """OpenRLHF#1270."""
    rewards = np.full((1, 4), 0.5, np.float32)
    assert 0 < rewards.mean() < 1
    assert kept(rewards) == [False]
    band = make_filter("accuracy_band", low=0.0, high=1.0)
    assert band(group_stats(rewards), rewards).tolist() == [False]


def test_report_a_filter_on_the_shaped_reward_keeps_all_wrong_groups():
    """NeMo-RL#2431, verl-recipe#125."""
    raw = np.array([[0, 0, 0, 0], [1, 0, 0, 0]], np.float32)
    length = np.array([[5, 18, 19, 20], [5, 6, 7, 20]])
    shaped = raw + soft_overlong_penalty(length, max_tokens=20, cache_tokens=4)
    assert kept(shaped) == [True, True]  # the all-wrong group would teach nothing but length
    assert kept(raw) == [False, True]


def test_report_kl_and_entropy_terms_act_on_rows_without_signal():
    """trl#7068."""
    rewards = np.array([[1, 0], [1, 1]], np.float32)
    advantages = advantages_of(rewards).reshape(-1)
    signal_N = np.repeat(has_signal(group_stats(rewards)), 2)
    logp, mask = jnp.full((4, 3), -1.0), jnp.ones((4, 3), bool)

    def gradients(regularize_mask):
        def loss(logp, entropy):
            terms = {"kl_coef": 0.1, "ref_logp_NT": jnp.full((4, 3), -1.5), "entropy_coef": 0.1, "entropy_NT": entropy}
            return policy_loss(logp, logp, logp, advantages, mask, **terms, regularize_mask_NT=regularize_mask)[0]

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(logp, jnp.ones((4, 3)))

    for grad in gradients(None):
        assert np.all(grad[2:] != 0)  # the group without signal is trained
    for grad in gradients(jnp.asarray(signal_N)[:, None] & mask):
        assert np.all(grad[:2] != 0)
        np.testing.assert_array_equal(grad[2:], np.zeros((2, 3)))


def test_report_truncation_masked_before_the_group_statistics_misaligns_rows():
    """open-instruct#1794."""
    rewards, truncated = np.array([[1, 0, 0, 1]], np.float32), np.array([[False, False, True, False]])
    advantages = advantages_of(rewards, estimator="dr_grpo")
    np.testing.assert_array_equal(advantages, [[0.5, -0.5, -0.5, 0.5]])  # the baseline sees the truncated one
    too_early = advantages_of(rewards[~truncated][None], estimator="dr_grpo")
    np.testing.assert_allclose(too_early, [[1 / 3, -2 / 3, 1 / 3]], rtol=1e-6)  # another baseline, other rows
    logp = jnp.full((4, 2), -1.0)
    mask = jnp.broadcast_to(~truncated.reshape(4, 1), (4, 2))
    grad = jax.jit(jax.grad(lambda x: policy_loss(x, logp, logp, advantages.reshape(-1), mask)[0]))(logp)
    np.testing.assert_allclose(grad, [[-0.5] * 2, [0.5] * 2, [0] * 2, [-0.5] * 2])


def test_report_packed_loss_normalised_wrongly():
    """tunix#1662. Rows of 1 and 5 tokens in two microbatches: sums and counts give the batch's mean."""
    logp, advantages = jnp.zeros((2, 5)), jnp.array([1.0, -2.0])
    mask = jnp.array([[True, False, False, False, False], [True] * 5])
    for options in ({}, {"aggregation": "sequence_mean"}, {"aggregation": "constant", "constant_length": 5}):

        def part(rows, options=options):
            return loss_of(logp[rows], logp[rows], logp[rows], advantages[rows], mask[rows], **options)[:2]

        whole_sum, whole_weight = part(slice(0, 2))
        parts = [part(slice(i, i + 1)) for i in range(2)]
        total_sum, total_weight = (sum(p[i] for p in parts) for i in range(2))
        np.testing.assert_allclose(total_sum / total_weight, whole_sum / whole_weight, rtol=1e-6)
    # Token mean: (-1 + 5 * 2) / 6 = 1.5; the mean of the microbatches' means is (-1 + 2) / 2.
    means = [loss_of(*(x[i : i + 1] for x in (logp, logp, logp, advantages, mask)))[:2] for i in range(2)]
    np.testing.assert_allclose([float(safe_divide(*m)) for m in means], [-1, 2])
    loss, weight, _ = loss_of(logp, logp, logp, advantages, mask)
    np.testing.assert_allclose(loss / weight, 1.5)


def test_report_a_sampler_with_another_support_biases_no_clip_and_shows():
    """trl#7269. Probabilities .6, .3, .1 with top-p .9: the sampler's log-probs are those of 2/3 and 1/3."""
    unembed = jnp.log(jnp.array([[0.6, 0.3, 0.1]]))
    targets = jnp.array([[0, 1]])
    logp, _ = token_logprobs(jnp.ones((1, 2, 1)), unembed, targets)
    behavior = jnp.log(jnp.array([[2 / 3, 1 / 3]]))
    naive_ratio = np.exp(logp - behavior)
    np.testing.assert_allclose(naive_ratio, [[0.9, 0.9]], rtol=1e-5)  # off from 1 before any training
    _, _, metrics = loss_of(logp, logp, behavior, jnp.ones(1), jnp.ones((1, 2), bool))
    np.testing.assert_allclose(metrics["ratio"], (2, 2), rtol=1e-6)
    # k3 of the drift log .9, per token: -.1 - log .9
    np.testing.assert_allclose(metrics["kl_sampler_trainer"][0], 2 * (-0.1 - np.log(0.9)), rtol=1e-3)
