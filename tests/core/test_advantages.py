import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import ESTIMATORS, check_estimator, group_advantages

ALL = pytest.mark.parametrize("estimator", ESTIMATORS)
# Those that give groups without signal nothing.
CENTRED = tuple(name for name, declared in ESTIMATORS.items() if not declared.uses_uniform_groups)
EXACT = {"atol": 0.0, "rtol": 0.0}
TOKENS = 3


def advantages(rewards, live=None, *, estimator, axis_name=None, **options):
    """Any estimator on rewards [P, G]: GDPO gets them as two components, RL-ZVP gets entropies that grow with G."""
    rewards = jnp.asarray(rewards)
    if ESTIMATORS[estimator].per_component:
        rewards = jnp.stack([rewards, 2 * rewards], axis=-1)
    if ESTIMATORS[estimator].per_token:
        entropy = jnp.broadcast_to(jnp.arange(1.0, TOKENS + 1), (*rewards.shape, TOKENS))
        options |= {"entropy_PGT": entropy, "mask_PGT": jnp.ones(entropy.shape, bool)}
    return group_advantages(rewards, live, estimator=estimator, axis_name=axis_name, **options)


jitted = jax.jit(advantages, static_argnames=("estimator", "batch_norm"))


@pytest.mark.parametrize("estimator", CENTRED)
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e6 + 1 / 3, 0.0])
def test_equal_rewards_give_exactly_zero(estimator, value):
    for options in ({}, EXACT):
        got = jitted(np.full((2, 8), value, np.float32), estimator=estimator, **options)
        np.testing.assert_array_equal(got, np.zeros((2, 8)))


@pytest.mark.parametrize("estimator", CENTRED)
def test_rounding_residue_gives_exactly_zero(estimator):
    rewards = np.full((2, 8), 0.7, np.float32)
    rewards[0, 0] = np.nextafter(rewards[0, 0], np.float32(1))
    np.testing.assert_array_equal(jitted(rewards, estimator=estimator), np.zeros((2, 8)))


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if name != "pass_at_k"])  # which counts r > 0
def test_offset_of_a_million_changes_nothing(estimator):
    rewards = np.random.default_rng(0).integers(0, 9, (50, 8)) / np.float32(16)
    rewards[:, 0] = 1.0
    rewards[:, 1] = 0.0
    options = {"estimator": estimator, **EXACT}
    plain, offset = jitted(rewards, **options), jitted(rewards + np.float32(1e6), **options)
    if estimator == "gdpo":  # twice a reward of 1e6 + 1/16 is exact too, but not its mean with 50 others
        np.testing.assert_allclose(plain, offset, rtol=1e-6)
    else:
        np.testing.assert_array_equal(plain, offset)


@ALL
def test_nothing_live(estimator):
    rewards = np.array([[1, 0, 1], [np.nan, np.inf, -np.inf], [1, 0, 1]], np.float32)
    live = np.array([[False] * 3, [True] * 3, [False] * 3])
    got = jitted(rewards, live, estimator=estimator)
    np.testing.assert_array_equal(got, np.zeros(got.shape))
    if ESTIMATORS[estimator].needs_group:  # one live rollout, and a singleton
        live[2, 0] = True
        np.testing.assert_array_equal(jitted(rewards, live, estimator=estimator), np.zeros((3, 3)))
        np.testing.assert_array_equal(jitted(rewards[:, :1], estimator=estimator), np.zeros((3, 1)))


@ALL
def test_declarations(estimator):
    """What an estimator declares is what it does."""
    declared = ESTIMATORS[estimator]
    groups = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    options = {"k": 2} if estimator == "pass_at_k" else {}
    got = np.asarray(jitted(groups, estimator=estimator, **options))
    assert got.shape == ((4, 4, TOKENS) if declared.per_token else (4, 4))
    used = (got != 0).reshape(4, -1).any(1)
    assert used.tolist() == [True, declared.uses_uniform_groups, declared.uses_uniform_groups, True]
    others = np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], np.float32)
    same = np.array_equal(np.asarray(jitted(others, estimator=estimator, **options))[0], got[0])
    assert same != declared.batch_normalised
    singletons = np.asarray(jitted(groups[:, :1], estimator=estimator, **options))
    assert singletons.any() != declared.needs_group


@ALL
def test_padding_permutation_and_vmap(random_groups, estimator):
    rng = np.random.default_rng(1)
    rewards, live = random_groups[4]
    rewards = np.where(abs(rewards) > 1e5, rewards - 1e6 * np.sign(rewards), rewards)  # or a batch's std is 1e6
    options = {"alpha": 0.3} if estimator == "rl_zvp" else {}
    run = functools.partial(advantages, estimator=estimator, **options)
    expected = np.asarray(jax.jit(run)(rewards, live))
    assert np.isfinite(expected).all()
    noise = np.where(rng.random((len(rewards), 5)) < 0.5, np.nan, 1e9).astype(np.float32)
    padded = np.concatenate([rewards, noise], axis=1)
    padded_live = np.concatenate([live, np.zeros(noise.shape, bool)], axis=1)
    order = rng.permutation(padded.shape[1])
    actual = np.asarray(jax.jit(run)(padded[:, order], padded_live[:, order]))[:, np.argsort(order)]
    np.testing.assert_allclose(actual[:, :8], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(actual[:, 8:], 0)
    groups = rng.permutation(len(rewards))
    both = jax.jit(jax.vmap(run))(np.stack([rewards, rewards[groups]]), np.stack([live, live[groups]]))
    np.testing.assert_allclose(both, np.stack([expected, expected[groups]]), rtol=1e-5, atol=1e-5)


@ALL
def test_huge_rewards_and_gradients_stay_finite(estimator):
    rewards = jnp.array([[1e38, -1e38, 1e38, -1e38], [0.1] * 4, [1.0, 0, 0, 0], [jnp.nan] * 4])
    assert np.isfinite(jitted(rewards, estimator=estimator)).all()
    if estimator == "grpo":  # +-1 / sqrt(4/3)
        np.testing.assert_allclose(jitted(rewards, estimator="grpo")[0, 0], np.sqrt(3 / 4), rtol=1e-5)
    grads = jax.jit(jax.grad(lambda r: (advantages(r, estimator=estimator) ** 2).sum()))(rewards[1:])
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_large_batch_of_huge_rewards(estimator):
    # 64 groups of half 2**59 and half -2**59: mean 0, std (ddof 0) 2**59, so +-1, though the squares sum to 2**130.
    rewards = np.where(np.arange(64) % 2, 2.0**59, -(2.0**59)).astype(np.float32)
    got = jitted(np.broadcast_to(rewards, (64, 64)), estimator=estimator, ddof=0)
    np.testing.assert_allclose(got, np.broadcast_to(np.sign(rewards), (64, 64)), rtol=1e-6)
    # +-1e38 beside +-1: squares 2e76 over four, ddof 0, std 1e38 / sqrt(2); the small ones vanish, and do not grow.
    got = jitted(np.array([[1e38, -1e38], [1, -1]], np.float32), estimator=estimator, ddof=0)
    np.testing.assert_allclose(got, np.sqrt(2) * np.array([[1, -1], [0, 0]]), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline", "gdpo"])
def test_a_batch_over_an_axis_is_the_whole_batch(random_groups, estimator):
    rewards, live = (x.reshape(8, 50, 8) for x in random_groups[4])
    rewards = np.where(abs(rewards) > 1e5, 0, rewards) + np.arange(8, dtype=np.float32)[:, None, None]  # own minima
    run = functools.partial(advantages, estimator=estimator)
    spread = jax.jit(jax.vmap(functools.partial(run, axis_name="data"), axis_name="data"))(rewards, live)
    whole = jax.jit(run)(rewards.reshape(400, 8), live.reshape(400, 8))
    np.testing.assert_allclose(spread.reshape(400, 8), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("gpro", {}, ValueError, r"'gpro' is unknown; there are grpo, dr_grpo, rloo, .*did you mean 'grpo'"),
        ("reinforce", {}, ValueError, r"did you mean 'reinforce_pp'"),
        ("pass_at_k", {"K": 4}, TypeError, r"takes k, atol, rtol; got 'K'"),
        ("rl_zvp", {"alhpa": 0.1}, TypeError, r"got 'alhpa'; did you mean 'alpha'\?"),
        ("grpo", {"k": 4}, TypeError, "takes ddof, eps, atol, rtol; got 'k'"),
        ("rloo", {"ddof": 1}, TypeError, "got 'ddof'"),
        ("pass_at_k", {"k": 0}, ValueError, "k must be at least 1, got 0"),
        ("pass_at_k", {"k": 2.0}, ValueError, "k must be an integer"),
        ("grpo", {"ddof": -1}, ValueError, "'grpo': ddof must be at least 0"),
        ("grpo", {"eps": -1e-6}, ValueError, "eps must be at least 0"),
        ("grpo", {"eps": True}, ValueError, "eps must be a finite number"),
        ("dr_grpo", {"rtol": np.inf}, ValueError, "rtol must be a finite number"),
        ("rl_zvp", {"alpha": -0.1}, ValueError, "alpha must be at least 0"),
        ("gdpo", {"batch_norm": 1}, ValueError, "batch_norm must be True or False"),
        ("gdpo", {"weights": 1.0}, ValueError, "weights must be a tuple"),
        ("gdpo", {"weights": (1.0, "a")}, ValueError, "weights must be a finite number"),
        ("gdpo", {"weights": (0.0, 0)}, ValueError, "must not all be 0"),
    ],
)
def test_wrong_options(name, options, error, message):
    with pytest.raises(error, match=message):
        check_estimator(name, options)
    if options != {"ddof": 1}:  # ddof and eps are ignored where there is no std
        with pytest.raises(error, match=message):
            group_advantages(jnp.zeros((1, 2)), estimator=name, **options)


def test_right_options_return_the_declarations():
    assert check_estimator("gdpo", {"weights": (1, 0.5), "batch_norm": False, "ddof": 0, "eps": 0}).per_component
    assert check_estimator("rl_zvp", {"alpha": 0.2, "atol": 0}).uses_uniform_groups
    assert not check_estimator("grpo", {}).batch_normalised
    assert list(ESTIMATORS)[:3] == ["grpo", "dr_grpo", "rloo"]
    rewards = jnp.array([[1.0, 0.0]])
    np.testing.assert_array_equal(group_advantages(rewards, estimator="dr_grpo", ddof=0, eps=1.0), [[0.5, -0.5]])


def test_wrong_inputs():
    flat, tokens = jnp.zeros((2, 4)), jnp.zeros((2, 4, 3))
    mask = jnp.ones((2, 4, 3), bool)
    for name, rewards, arrays, error, message in [
        ("grpo", tokens, {}, ValueError, r"'grpo' takes rewards with the axes \[P, G\], got shape \(2, 4, 3\)"),
        ("gdpo", flat, {}, ValueError, r"\[P, G, K\], got shape \(2, 4\)"),
        ("gdpo", tokens, {"weights": (1.0, 1.0)}, ValueError, "2 weights for 3 components"),
        ("grpo", flat, {"live_PG": mask[:, :3, 0]}, ValueError, r"live_PG has shape \(2, 3\)"),
        ("grpo", flat, {"entropy_PGT": tokens}, TypeError, "'grpo' takes no entropy_PGT"),
        ("rl_zvp", flat, {"entropy_PGT": tokens}, TypeError, "'rl_zvp' needs mask_PGT"),
        ("rl_zvp", flat, {"entropy_PGT": tokens, "mask_PGT": mask[:, :, :2]}, ValueError, r"one shape \[P, G, T\]"),
        ("rl_zvp", flat[:1], {"entropy_PGT": tokens, "mask_PGT": mask}, ValueError, r"one shape \[P, G, T\]"),
    ]:
        with pytest.raises(error, match=message):
            group_advantages(rewards, estimator=name, **arrays)
