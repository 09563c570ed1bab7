"""Everything that turns rewards into a loss, against float64 NumPy written anew, on 10,000 random groups.

Groups of 1 to 64 rollouts are padded to 64, so that a handful of programs serves all of them; what lies in the
padding and in dead rollouts is garbage.
"""

import functools
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import OPTIONS, arguments, make_batch, poison, reference_loss

from dynrl.core import ESTIMATORS, group_advantages, group_stats, has_signal, make_filter, policy_loss

BATCHES, GROUPS, SIZE, TOKENS = 100, 100, 64, 2
DEFAULTS = {"atol": 1e-6, "rtol": 1e-6}
EXACT = {"atol": 0.0, "rtol": 0.0}
FILTERS = {
    "mixed_sign": {},
    "accuracy_band": {"low": 0.2345, "high": 0.789},
    "min_std": {"threshold": 0.3456},
    "keep_all": {},
}


def make_rewards(seed):
    """Float32 rewards and live, [BATCHES, GROUPS, SIZE]; every other batch is of one kind."""
    rng = np.random.default_rng(seed)
    shape = (BATCHES, GROUPS, SIZE)
    per_group = (BATCHES, GROUPS, 1)
    equal = np.broadcast_to(rng.choice([0.1, 0.7, 1 / 3, 0.0, 1.0, -1.0], per_group), shape).astype(np.float32)
    off = (rng.random(shape) < 0.5) & (equal != 0)  # XLA takes a denormal for 0
    residue = np.nextafter(equal, np.float32(2), where=off, out=equal.copy())
    tiny = rng.integers(0, 9, shape) / 16
    kinds = [
        rng.integers(0, 2, shape), equal, residue, rng.random(shape), rng.normal(size=shape), 1e6 + tiny, -1e6 - tiny,
        1e6 + rng.integers(0, 200, shape) / 16,
    ]  # fmt: skip
    kind = rng.integers(0, len(kinds), per_group)
    kind[::2] = rng.integers(0, len(kinds), (BATCHES // 2, 1, 1))
    rewards = np.choose(kind, [k.astype(np.float32) for k in kinds])
    size = rng.integers(1, SIZE + 1, per_group)
    live = rng.random(shape) < rng.choice([0.0, 0.3, 0.9, 1.0], per_group, p=[0.02, 0.1, 0.38, 0.5])
    live &= np.arange(SIZE) < size
    bad = rng.random(shape) < rng.choice([0.0, 0.2], per_group, p=[0.7, 0.3])
    rewards[bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    padding = np.broadcast_to(np.arange(SIZE) >= size, shape)
    rewards[padding] = rng.choice(np.array([np.nan, np.inf, 0.5, -1e30], np.float32), padding.sum())
    return rewards, live


@pytest.fixture(scope="module")
def groups():
    return make_rewards(0)


class Masked:
    """Sums over live rollouts in float64, keeping the axes that were reduced."""

    def __init__(self, rewards, live, axis: int | tuple[int, int] = -1):
        self.live = live & np.isfinite(rewards)
        self.r = np.where(self.live, rewards, 0).astype(np.float64)
        self.axis, self.n = axis, self.live.sum(axis, keepdims=True)
        low = np.where(self.live, self.r, np.inf).min(axis, keepdims=True)
        high = np.where(self.live, self.r, -np.inf).max(axis, keepdims=True)
        self.low, self.high = np.where(self.n > 0, low, 0), np.where(self.n > 0, high, 0)
        self.mean = self.sum(self.r) / np.maximum(self.n, 1)

    def sum(self, x):
        return np.where(self.live, x, 0).sum(self.axis, keepdims=True)

    def std(self, ddof):
        variance = self.sum((self.r - self.mean) ** 2) / np.maximum(self.n - ddof, 1)
        return np.where(self.n > ddof, np.sqrt(variance), 0)

    def signal(self, atol, rtol):
        limit = atol + rtol * np.maximum(abs(self.low), abs(self.high))
        return (self.n >= 2) & (self.high - self.low > limit)


def grpo(rewards, live, tol, ddof=1, eps=1e-6):
    g = Masked(rewards, live)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(g.live & g.signal(**tol), (g.r - g.mean) / (g.std(ddof) + eps), 0)


def dr_grpo(rewards, live, tol):
    g = Masked(rewards, live)
    return np.where(g.live & g.signal(**tol), g.r - g.mean, 0)


def rloo(rewards, live, tol):
    g = Masked(rewards, live)
    return np.where(g.live & g.signal(**tol), g.r - (g.sum(g.r) - g.r) / np.maximum(g.n - 1, 1), 0)


def over_batch(values, live, ddof, eps):
    square = (values**2).sum((-2, -1), keepdims=True) / (live.sum((-2, -1), keepdims=True) - ddof)
    return values / (np.sqrt(square) + eps)


def reinforce_pp(rewards, live, tol, ddof=1, eps=1e-6):
    b = Masked(rewards, live, (-2, -1))
    return np.where(b.live & b.signal(**tol), (b.r - b.mean) / (b.std(ddof) + eps), 0)


def reinforce_pp_baseline(rewards, live, tol, ddof=1, eps=1e-6):
    return over_batch(dr_grpo(rewards, live, tol), live & np.isfinite(rewards), ddof, eps)


def pass_at_k(rewards, live, tol, k=4):
    table = np.zeros((2, SIZE + 1, SIZE + 1))  # by outcome, n, c
    for n in range(k, SIZE + 1):
        for c in range(1, n):
            fails, sigma = comb(n - c, k) / comb(n, k), 0.0
            sigma = (fails * (1 - fails)) ** 0.5
            if sigma:
                table[1, n, c] = fails / sigma
                table[0, n, c] = (fails - comb(n - c - 1, k - 1) / comb(n - 1, k - 1)) / sigma
    g = Masked(rewards, live)
    right = g.live & (g.r > 0)
    value = table[right.astype(int), g.n, g.sum(right).astype(int)]
    return np.where(g.live & g.signal(**tol), value, 0)


def gdpo(rewards, live, tol, weights=(1.0, 1.0), batch_norm=True, ddof=1, eps=1e-6):
    live = live & np.isfinite(rewards).all(-1)
    parts = [w * grpo(rewards[..., i], live, tol, ddof, eps) for i, w in enumerate(weights)]
    return over_batch(sum(parts), live, ddof, eps) if batch_norm else sum(parts)


def rl_zvp(rewards, live, tol, entropy, mask, alpha=0.1):
    g = Masked(rewards, live)
    mask = mask & g.live[..., None]
    entropy = np.where(mask, entropy, 0)  # entropies are not negative, so 0 is no maximum among them
    right, wrong = (g.low > 0)[..., None], (g.high <= 0)[..., None]
    punished = entropy - entropy.max(-1, keepdims=True)
    shaped = np.where(mask, alpha * (np.where(right, entropy, 0) + np.where(wrong, punished, 0)), 0)
    return np.where(g.signal(**tol)[..., None], grpo(rewards, live, tol)[..., None], shaped)


def run(estimator, rewards, live, **static):
    """All batches in one program; the options of its result are traced, so that other values compile nothing."""

    @jax.jit
    def program(rewards, live, extra, options):
        one = functools.partial(group_advantages, estimator=estimator, **options, **static)
        return jax.vmap(lambda r, m, e: one(r, m, **e))(rewards, live, extra)

    return lambda extra, options: np.asarray(program(rewards, live, extra, options))


def assert_close(actual, expected, live):
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=3e-5)
    dead = ~live if actual.ndim == live.ndim else ~live[..., None]
    np.testing.assert_array_equal(actual[np.broadcast_to(dead, actual.shape)], 0)


def test_stats_signal_and_filters(groups):
    rewards, live = groups

    @jax.jit
    def program(rewards, live):
        stats = group_stats(rewards, live)
        return stats, has_signal(stats), {f: make_filter(f, **o)(stats, rewards, live) for f, o in FILTERS.items()}

    flat = [x.reshape(-1, SIZE) for x in groups]
    stats, signal, kept = jax.tree.map(lambda x: np.asarray(x).reshape(BATCHES, GROUPS), program(*flat))
    g = Masked(rewards, live)
    expected = {"count": g.n, "positives": g.sum(g.r > 0), "min": g.low, "max": g.high}
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(stats, name), value[..., 0], err_msg=name)
    for name, value in {"mean": g.mean, "std": g.std(1), "spread": g.high - g.low}.items():
        np.testing.assert_allclose(getattr(stats, name), value[..., 0], rtol=1e-5, atol=2e-6, err_msg=name)
    g_signal = g.signal(**DEFAULTS)[..., 0]
    np.testing.assert_array_equal(signal, g_signal)
    assert 0.3 < signal.mean() < 0.7
    mean, positives, count = g.mean[..., 0], expected["positives"][..., 0], g.n[..., 0]
    band, deviation = FILTERS["accuracy_band"], FILTERS["min_std"]["threshold"]
    filters = {
        "mixed_sign": (positives > 0) & (positives < count),
        "accuracy_band": (mean > band["low"]) & (mean < band["high"]) & g_signal,
        "min_std": (g.std(1)[..., 0] >= deviation) & g_signal,
        "keep_all": np.ones(g_signal.shape, bool),
    }
    for name, value in filters.items():
        np.testing.assert_array_equal(kept[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        (grpo, {"ddof": 0, "eps": 0.1}),
        (dr_grpo, {}),
        (rloo, {}),
        (reinforce_pp, {"ddof": 0, "eps": 0.1}),
        (reinforce_pp_baseline, {"ddof": 0, "eps": 0.1}),
        (pass_at_k, {"k": 1}),
        (pass_at_k, {"k": 31}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_estimators_of_one_reward(groups, reference, options):
    rewards, live = groups
    program = run(reference.__name__, rewards, live)
    finite = live & np.isfinite(rewards)
    full = {name: 4 if name == "k" else {"ddof": 1, "eps": 1e-6}[name] for name in options}
    assert_close(program({}, DEFAULTS | full), reference(rewards, live, DEFAULTS), finite)
    assert_close(program({}, EXACT | options), reference(rewards, live, EXACT, **options), finite)


def test_gdpo(groups):
    rewards, live = groups
    rewards = np.stack([rewards, make_rewards(1)[0]], axis=-1)
    finite = live & np.isfinite(rewards).all(-1)
    actual = run("gdpo", rewards, live)({}, DEFAULTS)
    assert_close(actual, gdpo(rewards, live, DEFAULTS), finite)
    options = {"weights": (2.0, -0.3), "batch_norm": False}
    actual = run("gdpo", rewards, live, **options)({}, DEFAULTS)
    assert_close(actual, gdpo(rewards, live, DEFAULTS, **options), finite)
    no_signal = ~(
        Masked(rewards[..., 0], finite).signal(**DEFAULTS) | Masked(rewards[..., 1], finite).signal(**DEFAULTS)
    )
    np.testing.assert_array_equal(actual[no_signal[..., 0]], 0)


def test_rl_zvp(groups):
    rewards, live = groups
    rng = np.random.default_rng(2)
    entropy = rng.exponential(size=(*rewards.shape, TOKENS)).astype(np.float32)
    mask = rng.random(entropy.shape) < 0.7
    poisoned = np.where(mask, entropy, np.nan)
    actual = run("rl_zvp", rewards, live)({"entropy_PGT": poisoned, "mask_PGT": mask}, DEFAULTS)
    assert_close(actual, rl_zvp(rewards, live, DEFAULTS, entropy, mask), live & np.isfinite(rewards))


def test_every_estimator_has_a_reference():
    assert all(name in globals() for name in ESTIMATORS)


@pytest.mark.parametrize("name", OPTIONS)
def test_losses(name):
    """1,250 batches of 8 rows and 6 tokens."""
    batch = make_batch(3, (1250, 8, 6), token_advantages="token" in name or "cispo" in name)
    expected = reference_loss(batch, **OPTIONS[name])
    batch = {key: x.astype(np.float32) if x.dtype != bool else x for key, x in poison(batch).items()}
    arrays, options = arguments(batch, OPTIONS[name])
    named = {key: options.pop(key) for key in list(options) if key.endswith("_NT")}
    program = jax.jit(jax.vmap(lambda arrays, named: policy_loss(*arrays, **named, **options)))
    loss, weight, metrics = program(arrays, named)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(weight, expected[1])
    assert metrics.keys() == expected[2].keys()
    for key, value in expected[2].items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-4, err_msg=key)
    assert loss.dtype == jnp.float32
