"""Drawing a token, against a float64 reference that sorts; compiled at few shapes, since compiling takes the time."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.sampling.distribution import Draw, Settings, sample
from dynrl.sampling.noise import rollout_keys

SAMPLE = jax.jit(sample)
N = 6000
KEYS = np.asarray(jax.jit(rollout_keys)(np.uint32(7), np.array([[0, 123, 0, 4, i] for i in range(N)], np.uint32)))
LOGITS = np.array([1.0, -0.5, 0.3, 2.0, -1.0, 0.3])
# Chi-square values that 1 in 10,000 exceeds, by degrees of freedom. Seeds are fixed.
CHI2 = (0.0, 15.1, 18.4, 21.1, 23.5, 25.7)


def settings(n, temperature: Any = 1.0, top_k: Any = 0, top_p: Any = 1.0, min_p: Any = 0.0):
    """Each a number or one per row."""

    def rows(x, dtype):
        return np.array(np.broadcast_to(np.asarray(x, dtype), n))

    return Settings(
        rows(temperature, np.float32), rows(top_k, np.int32), rows(top_p, np.float32), rows(min_p, np.float32)
    )


def run(logits_NV, asked, position=0, keys=KEYS, function: Any = SAMPLE):
    logits_NV = np.asarray(logits_NV, np.float32)
    n = len(logits_NV)
    return Draw(*map(np.asarray, function(logits_NV, keys[:n], np.full(n, position, np.int32), asked)))


def draw(logits_V, n: Any = N, position: Any = 0, **asked: Any):
    """Many draws from one distribution."""
    return run(np.tile(np.asarray(logits_V, np.float32), (n, 1)), settings(n, **asked), position)


def reference(logits_V, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """(which tokens are kept, log-probs among those, log-probs among all), in float64, by sorting."""
    x = np.asarray(logits_V, np.float64)
    if temperature == 0:
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    x = (x - x.max()) / temperature
    order = np.argsort(-x)
    p = np.exp(x[order])  # relative to the most likely token

    def with_ties(n):
        return int((x >= x[order[n - 1]]).sum())

    n = with_ties(top_k) if 0 < top_k < len(x) else len(x)
    if top_p < 1:
        n = with_ties(min(n, 1 + int((np.cumsum(p[:n]) / p[:n].sum() < top_p).sum())))
    n = min(n, int((p >= min_p).sum()))
    kept = np.zeros(len(x), bool)
    kept[order[:n]] = True
    return kept, np.where(kept, x - np.log(p[:n].sum()), -np.inf), x - np.log(p.sum())


def agrees(draw, i, logits_V, asked):
    """Whether row i is a draw from the reference's distribution.

    Where the float32 mass is within rounding of top_p, or a probability within rounding of min_p, both sides are right.
    """
    temperature, top_k, top_p, min_p = (x[i].item() for x in asked)
    for nudge_p, nudge_m in itertools.product((1, 1 - 3e-6, 1 + 3e-6), repeat=2):
        nudged = min(top_p * nudge_p, 1.0) if top_p < 1 else 1.0
        kept, logp_V, full_V = reference(logits_V, temperature, top_k, nudged, min(min_p * nudge_m, 1.0))
        token = draw.token_N[i]
        tolerance = 1e-5 + 1e-6 * abs(full_V[token])
        if (
            kept[token]
            and abs(draw.logp_N[i] - logp_V[token]) < tolerance
            and abs(draw.full_logp_N[i] - full_V[token]) < tolerance
        ):
            return True
    return False


# ---- Temperature ----


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
@pytest.mark.parametrize("position", [0, 3])
def test_frequencies_are_the_softmax_s(temperature, position):
    got = draw(LOGITS, position=position, temperature=temperature)
    p = np.exp(LOGITS / temperature)
    p /= p.sum()
    assert chi2_of(got.token_N, p) < CHI2[5]
    # The log-prob is that of the distribution drawn from, not of the one at temperature 1.
    np.testing.assert_allclose(got.logp_N, np.log(p)[got.token_N], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.full_logp_N, got.logp_N)  # nothing is cut off
    assert got.finite_N.all()
    assert [x.dtype for x in got] == [np.int32, np.float32, np.float32, bool]


def chi2_of(tokens, p):
    expected = len(tokens) * p[p > 0]
    counts = np.bincount(tokens, minlength=len(p))
    assert (counts[p == 0] == 0).all()
    return ((counts[p > 0] - expected) ** 2 / expected).sum()


def test_temperature_zero_takes_the_best_at_the_log_prob_of_temperature_one():
    got = draw(LOGITS, temperature=0.0)
    assert (got.token_N == 3).all()
    np.testing.assert_allclose(got.logp_N, 2.0 - np.log(np.exp(LOGITS).sum()), rtol=1e-6)
    # Truncation does not touch it: the best token is always kept, and its log-prob stays that of the whole.
    for asked in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 2, "top_p": 0.5, "min_p": 0.5}):
        for x, y in zip(draw(LOGITS, temperature=0.0, **asked), got, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1.2e-38])
@pytest.mark.parametrize("asked", [{}, {"top_k": 4, "top_p": 0.9, "min_p": 0.01}])
def test_a_tiny_temperature_is_greedy(temperature, asked):
    # logits / temperature may leave float32's range; the sampled distribution is a point all the same.
    got = draw(LOGITS * 40, temperature=temperature, **asked)
    assert (got.token_N == 3).all()
    np.testing.assert_allclose(got.logp_N, 0.0, atol=1e-6)
    np.testing.assert_allclose(got.full_logp_N, 0.0, atol=1e-6)
    assert got.finite_N.all()


def test_a_huge_temperature_is_uniform():
    got = draw(LOGITS, temperature=1e30)
    assert chi2_of(got.token_N, np.full(6, 1 / 6)) < CHI2[5]
    np.testing.assert_allclose(got.logp_N, -np.log(6), rtol=1e-6)
    # At a temperature of infinity all tokens would tie; at this one top_k still tells them apart.
    assert chi2_of(draw(LOGITS, temperature=1e30, top_k=2).token_N, np.array([1, 0, 0, 1, 0, 0]) / 2) < CHI2[1]


def test_equal_logits_tie():
    # Every token is as likely as the last one kept.
    got = draw(np.full(6, -3.0), top_k=2, top_p=0.3, min_p=1.0)
    assert chi2_of(got.token_N, np.full(6, 1 / 6)) < CHI2[5]
    np.testing.assert_allclose(got.logp_N, -np.log(6), rtol=1e-6)


# ---- Truncation ----

# Probabilities of the tokens, at temperature 1; the order is that of neither ids nor probabilities.
P = np.array([0.15, 0.01, 0.40, 0.04, 0.30, 0.10])
BY_HAND = {
    "top_k 1": ({"top_k": 1}, {2}),
    "top_k 3": ({"top_k": 3}, {2, 4, 0}),
    "top_p 0.39: the best alone has more": ({"top_p": 0.39}, {2}),
    "top_p 0.41": ({"top_p": 0.41}, {2, 4}),
    "top_p 0.69: two have 0.70": ({"top_p": 0.69}, {2, 4}),
    "top_p 0.71": ({"top_p": 0.71}, {2, 4, 0}),
    "top_p 0.96: four have 0.95": ({"top_p": 0.96}, {2, 4, 0, 5, 3}),
    "min_p 0.3: at least 0.12": ({"min_p": 0.3}, {2, 4, 0}),
    "min_p 0.2: at least 0.08": ({"min_p": 0.2}, {2, 4, 0, 5}),
    "min_p 0.02: at least 0.008, all": ({"min_p": 0.02}, {0, 1, 2, 3, 4, 5}),
    # Of the 0.85 that top_k leaves, two tokens have 82%; of everything they have 70%, and three would be needed.
    "top_p comes after top_k": ({"top_k": 3, "top_p": 0.8}, {2, 4}),
    "top_p 0.8 alone": ({"top_p": 0.8}, {2, 4, 0}),
    # Of what min_p leaves, 0.85, two tokens have 82%: top_p would keep two of three if it came after min_p.
    "top_p comes before min_p": ({"top_p": 0.8, "min_p": 0.3}, {2, 4, 0}),
    "the strictest counts: top_k": ({"top_k": 2, "top_p": 0.9, "min_p": 0.01}, {2, 4}),
    "the strictest counts: top_p": ({"top_k": 5, "top_p": 0.3, "min_p": 0.01}, {2}),
    "the strictest counts: min_p": ({"top_k": 5, "top_p": 0.98, "min_p": 0.7}, {2, 4}),
    # Squared: 0.16, 0.09, 0.0225, 0.01, 0.0016, 0.0001 of 0.2842; two have 88%, and the third 14% of the best.
    "temperature comes before top_p": ({"temperature": 0.5, "top_p": 0.8}, {2, 4}),
    "temperature comes before min_p": ({"temperature": 0.5, "min_p": 0.3}, {2, 4}),
    # Roots: 0.63, 0.55, 0.39, 0.32, 0.2, 0.1 of 2.18; three have 72%, four 86%.
    "and a hot one": ({"temperature": 2.0, "top_p": 0.8}, {2, 4, 0, 5}),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_numbers_by_hand(name):
    asked, kept = BY_HAND[name]
    got = draw(np.log(P), **asked)
    share = P ** (1 / asked.get("temperature", 1.0))
    full = share / share.sum()
    left = np.where(np.isin(np.arange(6), [*kept]), full, 0.0)
    left /= left.sum()
    assert set(got.token_N) == kept
    assert chi2_of(got.token_N, left) <= CHI2[len(kept) - 1]
    np.testing.assert_allclose(got.logp_N, np.log(left[got.token_N]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.full_logp_N, np.log(full[got.token_N]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"top_k": 3}, {3, 0, 2, 5}),  # 2 and 5 tie for the third place
        ({"top_k": 4}, {3, 0, 2, 5}),
        ({"top_p": 0.8}, {3, 0, 2, 5}),  # shares 0.54, 0.20, 0.10, 0.10: three reach 0.83
        (
            {"top_k": 3, "top_p": 0.85},
            {3, 0, 2, 5},
        ),  # of the four left: 0.58, 0.21, 0.11, 0.11; of three, two have 0.88
        ({"min_p": 0.18}, {3, 0, 2, 5}),  # exp(-1.7) = 0.183
    ],
)
def test_tokens_that_tie_with_the_last_one_kept_are_kept(asked, kept):
    assert set(draw(LOGITS, **asked).token_N) == kept


def test_settings_that_keep_everything_change_no_bit():
    want = draw(LOGITS)
    for asked in ({"top_k": 6}, {"top_k": 7}, {"top_k": 2**31 - 1}, {"min_p": 1e-30}, {"top_k": 6, "min_p": 1e-20}):
        for x, y in zip(draw(LOGITS, **asked), want, strict=True):
            np.testing.assert_array_equal(x, y)
    # In float64 the five best have 0.974; one step of float32 below 1 needs the last one, too.
    for x, y in zip(draw(LOGITS, top_p=1 - 2**-24), want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "asked",
    [{"top_p": 1e-3}, {"top_p": 1e-30}, {"top_p": 1e-45}, {"top_k": 1}, {"min_p": 1.0}, {"min_p": 1 - 2**-24}],
)
def test_the_strictest_settings_keep_the_best(asked):
    got = draw(LOGITS, **asked)
    assert (got.token_N == 3).all()
    np.testing.assert_array_equal(got.logp_N, 0.0)
    np.testing.assert_allclose(got.full_logp_N, 2.0 - np.log(np.exp(LOGITS).sum()), rtol=1e-6)


def test_which_rows_are_greedy_and_which_truncated():
    asked = settings(
        6, [0.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 3, 0, 0, 3], [1, 1, 1, 0.9, 1, 0.9], [0, 0, 0, 0, 0.1, 0]
    )
    asked = Settings(*map(jnp.asarray, asked))
    assert asked.greedy_N.tolist() == [True, False, False, False, False, True]
    assert asked.truncated_N.tolist() == [False, False, True, True, True, False]


# ---- Many random cases, rows of one program ----

R, V = 512, 40
KINDS = {
    "normal": lambda rng: rng.normal(size=(R, V)) * 1.5,
    "ties": lambda rng: rng.integers(-3, 3, (R, V)),
    "steep": lambda rng: rng.normal(size=(R, V)) * 12 + 1e3,
    "flat": lambda rng: rng.normal(size=(R, V)) * 0.03 - 50,
    "two levels": lambda rng: (rng.random((R, V)) < 0.3) * 2.0,
}


def random_settings(rng, n, v):
    """All combinations of what may be asked, each with values at random."""

    def some(values, off, share=0.6):
        return np.where(rng.random(n) < share, values, off)

    return settings(
        n,
        some(rng.choice([0.2, 0.7, 1.0, 1.3, 5.0], n), 0.0, 0.9),
        some(rng.integers(1, v + 3, n), 0),
        some(rng.choice([*rng.uniform(0, 1, 20), 1e-6, 1 - 1e-4], n), 1.0),
        some(rng.choice([*rng.uniform(0, 1, 20), 1e-4, 1.0], n), 0.0),
    )


def random_case(kind="normal", seed=0):
    rng = np.random.default_rng(seed)
    return np.asarray(KINDS[kind](rng), np.float32), random_settings(rng, R, V)


@pytest.mark.parametrize("kind", KINDS)
def test_random_cases_are_the_reference_s(kind):
    logits, asked = random_case(kind, seed=len(kind))
    got = run(logits, asked, position=5)
    wrong = [i for i in range(R) if not agrees(got, i, logits[i], asked)]
    assert not wrong, [(i, [x[i] for x in asked]) for i in wrong[:3]]
    assert got.finite_N.all()
    assert (got.logp_N >= got.full_logp_N).all()  # what is cut off leaves more for the others


@pytest.mark.parametrize(
    "asked", [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.15}, {"top_k": 9, "top_p": 0.7, "min_p": 0.1}]
)
def test_truncated_frequencies(asked):
    # 20 times 512 draws from one distribution over 40 tokens, each 12% less likely than the one before.
    logits = np.random.default_rng(3).permutation(-0.1 * np.arange(V))
    tokens = [run(np.tile(logits, (R, 1)), settings(R, 0.8, **asked), position).token_N for position in range(20)]
    kept, logp_V, _ = reference(logits, 0.8, **asked)
    assert 5 <= kept.sum() <= 20
    chi2 = chi2_of(np.concatenate(tokens), np.exp(logp_V))
    n = kept.sum() - 1
    assert chi2 < n * (1 - 2 / (9 * n) + 3.719 * np.sqrt(2 / (9 * n))) ** 3  # 1 in 10,000, by Wilson and Hilferty


@pytest.mark.parametrize("v", [1, 2, 3, 1000, 5000])
def test_vocabularies_of_all_sizes(v):
    rng = np.random.default_rng(v)
    logits, asked = (rng.normal(size=(64, v)) * 2).astype(np.float32), random_settings(rng, 64, v)
    got = run(logits, asked)
    assert all(agrees(got, i, logits[i], asked) for i in range(64))
    if v == 1:
        assert (got.token_N == 0).all()
        np.testing.assert_array_equal([got.logp_N, got.full_logp_N], 0.0)


# ---- Rows do not notice each other ----


def test_a_row_is_the_same_bit_by_bit_whatever_its_neighbours_ask():
    logits, asked = random_case()
    want = run(logits, asked, position=2)
    kinds = [np.asarray(x) for x in (asked.temperature_N == 0, Settings(*map(jnp.asarray, asked)).truncated_N)]
    subjects = [kinds[0], kinds[1], ~kinds[0] & ~kinds[1], np.arange(R) % 2 == 0, np.arange(R) == 77]
    neighbours = [
        {"temperature": 0.0},
        {},
        {"top_k": 3},
        {"temperature": 0.01, "top_p": 0.5, "min_p": 0.2},
        {"temperature": 0.0, "top_p": 0.5},
    ]
    for mine, theirs in itertools.product(subjects, neighbours):
        assert mine.any()
        other = Settings(*(np.where(mine, x, y) for x, y in zip(asked, settings(R, **theirs), strict=True)))
        other_logits = np.where(mine[:, None], logits, np.float32(np.nan) if "top_k" in theirs else -logits)
        for x, y in zip(run(other_logits, other, position=2), want, strict=True):
            np.testing.assert_array_equal(x[mine], y[mine])


def test_a_row_may_stand_anywhere():
    logits, asked = random_case()
    order = np.random.default_rng(1).permutation(R)
    want = run(logits, asked)
    got = run(logits[order], Settings(*(x[order] for x in asked)), keys=KEYS[:R][order])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y[order])


def test_each_row_draws_at_its_own_position():
    logits, asked = random_case()
    position = np.arange(R, dtype=np.int32) % 3
    got = SAMPLE(logits, KEYS[:R], position, asked)
    for at in range(3):
        for x, y in zip(got, run(logits, asked, position=at), strict=True):
            np.testing.assert_array_equal(np.asarray(x)[position == at], y[position == at])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_with_a_non_finite_logit_draws_nothing(bad, asked):
    logits = np.tile(LOGITS.astype(np.float32), (N, 1))
    want = draw(LOGITS, **asked)
    spoiled = logits.copy()
    spoiled[2, 1] = bad
    spoiled[5] = bad  # nothing else either
    got = run(spoiled, settings(N, **asked))
    assert np.flatnonzero(~got.finite_N).tolist() == [2, 5]
    assert got.token_N[[2, 5]].tolist() == [0, 0]
    assert np.isfinite(got.logp_N).all()
    assert np.isfinite(got.full_logp_N).all()
    for x, y in zip(got, want, strict=True):  # its neighbours do not notice
        np.testing.assert_array_equal(np.delete(x, [2, 5]), np.delete(y, [2, 5]))


def test_eager_equals_jitted():
    for kind in ("normal", "ties", "steep"):
        logits, asked = random_case(kind, seed=9)
        eager = run(logits, Settings(*map(jnp.asarray, asked)), function=sample)
        jitted = run(logits, asked)
        np.testing.assert_array_equal(eager.token_N, jitted.token_N)
        np.testing.assert_array_equal(eager.finite_N, jitted.finite_N)
        np.testing.assert_allclose(eager.logp_N, jitted.logp_N, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(eager.full_logp_N, jitted.full_logp_N, rtol=1e-6, atol=1e-6)
