"""Numbers derived by hand for every estimator, eager and jitted."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import group_advantages
from dynrl.types import Array

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
# Live 1, 0, 0, 0: mean 1/4, std (ddof 1) 1/2.
REWARDS = jnp.array([[1.0, 0.0, 7.0, 0.0, 0.0]])
LIVE = jnp.array([[True, True, False, True, True]])


def run(wrap, rewards: Array = REWARDS, live: Array = LIVE, **options):
    return wrap(functools.partial(group_advantages, **options))(rewards, live)


@WRAPS
def test_grpo_dr_grpo_and_rloo(wrap):
    np.testing.assert_allclose(run(wrap, eps=0.0), [[1.5, -0.5, 0, -0.5, -0.5]])
    np.testing.assert_allclose(run(wrap, eps=0.5), [[0.75, -0.25, 0, -0.25, -0.25]])
    # ddof 0: std = sqrt(3/16) = sqrt(3)/4, so 3/4 / std = sqrt(3).
    np.testing.assert_allclose(run(wrap, eps=0.0, ddof=0)[0, 0], np.sqrt(3), rtol=1e-6)
    np.testing.assert_allclose(run(wrap, estimator="dr_grpo"), [[0.75, -0.25, 0, -0.25, -0.25]])
    # The others' means: (0+0+0)/3 = 0, and (1+0+0)/3 = 1/3.
    third = 1 / 3
    np.testing.assert_allclose(run(wrap, estimator="rloo"), [[1, -third, 0, -third, -third]], rtol=1e-6)


@WRAPS
@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp", "reinforce_pp_baseline"])
def test_without_a_degree_of_freedom_there_is_no_advantage(wrap, estimator):
    """As many rollouts as ddof: the std is unknown, and dividing by eps alone would give 750,000."""
    rewards, live = jnp.array([[1.0, 0, 0, 0]]), jnp.ones((1, 4), bool)
    for ddof in (4, 5):
        np.testing.assert_array_equal(run(wrap, rewards, live, estimator=estimator, ddof=ddof), np.zeros((1, 4)))
    assert 0.8 < np.abs(run(wrap, rewards, live, estimator=estimator, ddof=3)).max() < 1  # 3/4 / sqrt(3/4)


@WRAPS
def test_reinforce_pp(wrap):
    # Live 3, 1, 1 | 1, 1 | 5: mean 2, squares 1+1+1+1+1+9 = 14 over 6, std (ddof 0) sqrt(7/3).
    rewards = jnp.array([[3.0, 1.0, 1.0], [1.0, 1.0, jnp.nan], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    live = jnp.array([[True] * 3, [True] * 3, [True, False, False], [False] * 3])
    expected = np.array([[1, -1, -1], [-1, -1, 0], [3, 0, 0], [0, 0, 0]])
    got = run(wrap, rewards, live, estimator="reinforce_pp", ddof=0, eps=0.0)
    np.testing.assert_allclose(got, expected / np.sqrt(7 / 3), rtol=1e-6)
    # ddof 1: std sqrt(14/5); eps adds to it.
    got = run(wrap, rewards, live, estimator="reinforce_pp", eps=0.1)
    np.testing.assert_allclose(got, expected / (np.sqrt(14 / 5) + 0.1), rtol=1e-6)
    # A batch of equal rewards, and one within the tolerance: exactly 0.
    for batch in (np.full((4, 3), 0.1, np.float32), np.full((4, 3), 0.7, np.float32)):
        batch[0, 0] += 1e-7
        np.testing.assert_array_equal(run(wrap, batch, live, estimator="reinforce_pp"), np.zeros((4, 3)))


@WRAPS
def test_reinforce_pp_baseline(wrap):
    # Minus the groups' means 2 and 1: 1, -1 | 0, 0 | 0. Squares 2 over five live: std (ddof 1) sqrt(1/2).
    rewards = jnp.array([[3.0, 1.0, 9.0], [1.0, 1.0, 9.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    live = jnp.array([[True, True, False], [True, True, False], [True, False, False], [False] * 3])
    got = run(wrap, rewards, live, estimator="reinforce_pp_baseline", eps=0.0)
    np.testing.assert_allclose(got[0], np.sqrt(2) * np.array([1, -1, 0]), rtol=1e-6)
    np.testing.assert_array_equal(got[1:], np.zeros((3, 3)))


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@WRAPS
def test_pass_at_k(wrap, k):
    # Five live, two of them above 0: m = 3. F = C(3, k) / C(5, k): 3/5, 3/10, 1/10, 0. A_positive = sqrt(F / (1 - F)).
    # k = 2: sqrt(3/7). A_negative = (F - C(2, k-1) / C(4, k-1)) / sqrt(F (1 - F)); k = 2: (3/10 - 2/4) / sqrt(21/100)
    # = -2 / sqrt(21). k = 1 is GRPO with ddof 0: 3/5 / sqrt(6/25), and -2/5 / sqrt(6/25). k = 4: no draw fails.
    rewards = jnp.array([[2.0, 0.0, -1.0, jnp.inf, 0.5, 0.0]])
    positive = {1: 3 / np.sqrt(6), 2: np.sqrt(3 / 7), 3: np.sqrt(1 / 9), 4: 0}[k]
    negative = {1: -2 / np.sqrt(6), 2: -2 / np.sqrt(21), 3: (1 / 10 - 1 / 6) / 0.3, 4: 0}[k]
    got = run(wrap, rewards, None, estimator="pass_at_k", k=k)
    np.testing.assert_allclose(got, [[positive, negative, negative, 0, positive, negative]], rtol=1e-6)


def test_pass_at_k_without_a_choice():
    # Fewer live than k: the only draw is the whole group. Nothing above 0, or everything: nothing to tell apart.
    groups = jnp.array([[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, -1, 0, -1, 0, 0], [1, 2, 1, 2, 1, 1]], jnp.float32)
    live = jnp.array([[True] * 6, [True] * 3 + [False] * 3, [True] * 6, [True] * 6])
    got = np.asarray(run(jax.jit, groups, live, estimator="pass_at_k", k=4))
    assert got[0].all()
    np.testing.assert_array_equal(got[1:], np.zeros((3, 6)))


def test_pass_at_k_of_many():
    # 128 rollouts, 64 of them right, k = 32: F = C(64, 32) / C(128, 32) = 1.2e-12, far from under- and overflow.
    fails = math.comb(64, 32) / math.comb(128, 32)
    rewards = jnp.arange(128.0)[None] % 2
    got = run(jax.jit, rewards, None, estimator="pass_at_k", k=32)
    np.testing.assert_allclose(got[0, 1], (fails / (1 - fails)) ** 0.5, rtol=1e-4)
    np.testing.assert_allclose(got[0, 0], -got[0, 1], rtol=1e-6)  # c = m


@WRAPS
def test_gdpo(wrap):
    # Group 1: components (1, 0) and (0, 4), each +-1/sqrt(2) after GRPO (ddof 1): (1, -1) and (-1, 1), over sqrt(2).
    # Group 2: the second component is constant, so it adds 0. Group 3: no signal. A NaN component kills a rollout.
    first = [[1.0, 0.0, 9.0], [1.0, 0.0, 0.0], [2.0, 2.0, 2.0], [np.inf, 1.0, 0.0]]
    second = [[0.0, 4.0, np.nan], [0.1, 0.1, 0.1], [0.7, 0.7, 0.7], [1.0, np.nan, 2.0]]
    rewards = np.stack([first, second], axis=-1).astype(np.float32)
    live = np.broadcast_to([[True], [True], [True], [False]], (4, 3))
    sums = functools.partial(run, wrap, rewards, live, estimator="gdpo", eps=0.0, batch_norm=False)
    two, one = 2 / np.sqrt(3), -1 / np.sqrt(3)  # group 2: mean 1/3, std 1/sqrt(3)
    cancelled = sums()
    np.testing.assert_allclose(cancelled, [[0, 0, 0], [two, one, one], [0, 0, 0], [0, 0, 0]], rtol=1e-6)
    np.testing.assert_array_equal(cancelled[0], np.zeros(3))  # and nothing is left of rounding
    weighted = np.array([[2 / np.sqrt(2), -2 / np.sqrt(2), 0], [3 * two, 3 * one, 3 * one], [0, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(sums(weights=(3.0, 1.0)), weighted, rtol=1e-6)
    # Over the batch's std: squares 4 + 18 = 22 over eight live, ddof 1: sqrt(22/7).
    got = run(wrap, rewards, live, estimator="gdpo", eps=0.0, weights=(3.0, 1.0))
    np.testing.assert_allclose(got, weighted / np.sqrt(22 / 7), rtol=1e-6)


def test_gdpo_components_that_cancel_leave_no_rounding():
    # -r and 0.3 * r are opposite after GRPO, but for their last bits; over a std of last bits they would be large.
    first = np.random.default_rng(0).random((50, 8)).astype(np.float32)
    rewards = np.stack([-first, np.float32(0.3) * first], axis=-1)
    got = run(jax.jit, rewards, None, estimator="gdpo", eps=0.0)
    np.testing.assert_array_equal(got, np.zeros((50, 8)))


@WRAPS
def test_rl_zvp(wrap):
    # Group 1 has signal: +-1/sqrt(2). Group 2 is all right: alpha * H. Group 3 is all wrong: alpha * (H - max H), the
    # maximum over what is masked in. Group 4 is mixed within the tolerance: 0. A dead rollout and masked-out tokens: 0.
    rewards = jnp.array([[1.0, 0.0, 7.0], [0.5, 0.5, 7.0], [0.0, -1e-9, 7.0], [1e-9, -1e-9, 7.0]])
    entropy = np.broadcast_to(np.array([1, 3, np.nan], np.float32), (4, 3, 3))
    mask = np.broadcast_to([True, True, False], (4, 3, 3)).copy()
    mask[2, 1, 1] = False
    live = np.broadcast_to([True, True, False], (4, 3)).copy()
    live[1, 1] = False
    arrays = {"entropy_PGT": entropy, "mask_PGT": mask}
    got = wrap(lambda r, m, x: group_advantages(r, m, estimator="rl_zvp", alpha=0.2, eps=0.0, **x))(
        rewards, live, arrays
    )
    root = 1 / np.sqrt(2)
    expected = [
        [[root] * 3, [-root] * 3],
        [[0.2, 0.6, 0], [0, 0, 0]],
        [[-0.4, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
    ]
    np.testing.assert_allclose(got[:, :2], expected, rtol=1e-6)
    np.testing.assert_array_equal(got[:, 2], np.zeros((4, 3)))


def test_rl_zvp_takes_entropies_as_constants():
    rewards, mask = jnp.array([[1.0, 1.0], [0.0, 0.0]]), jnp.ones((2, 2, 3), bool)

    def total(entropy):
        return group_advantages(rewards, estimator="rl_zvp", entropy_PGT=entropy, mask_PGT=mask).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(jnp.ones((2, 2, 3))), np.zeros((2, 2, 3)))
