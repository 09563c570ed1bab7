"""The losses with numbers derived by hand."""

import jax
import numpy as np
import pytest
from loss_helpers import value_and_grad

from dynrl.core import policy_loss

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def sums_of(metrics):
    return {name: float(total) for name, (total, _) in metrics.items()}


def grid(*rows):
    """Rows of up to three tokens in one shape for all tests by hand, so that eager operations compile once."""
    out = np.full((4, 3), np.nan, np.float32)
    for n, row in enumerate(rows):
        out[n, : len(row)] = row
    return out


def by_hand(ratios, advantages, old=-1.0):
    """Arrays with these ratios to `old`, which is the sampler's too; everything else is masked out and NaN."""
    log_ratio = np.log(grid(*ratios))
    old = np.where(np.isnan(log_ratio), np.nan, np.float32(old))
    padded = np.array([*advantages, *[np.nan] * (4 - len(advantages))], np.float32)
    return old + log_ratio, old, old, padded, ~np.isnan(log_ratio)


def assert_rows(actual, *rows):
    np.testing.assert_allclose(actual, np.nan_to_num(grid(*rows)), rtol=1e-5, atol=1e-6)


@WRAPS
def test_ppo_by_hand(wrap):
    # Ratios 1.5, 0.5, 1.5, 0.5 under A = 1, -1, -1, 1, clip to [.8, 1.2]; old = behavior.
    #   min(1.5, 1.2) = 1.2 (clipped high)     min(-.5, -.8) = -.8 (clipped low)
    #   min(-1.5, -1.2) = -1.5                 min(.5, .8) = .5
    # Loss -1.2 + .8 + 1.5 - .5 = .6; gradients -A * r where not clipped: 0, 0, 1.5, -.5.
    batch = by_hand([[1.5], [0.5], [1.5], [0.5]], [1.0, -1.0, -1.0, 1.0])
    (loss, (weight, metrics)), (grad, _) = wrap(value_and_grad)(batch)
    np.testing.assert_allclose((loss, weight), (0.6, 4), rtol=1e-6)
    assert_rows(grad, [0], [0], [1.5], [-0.5])
    assert {float(count) for _, count in metrics.values()} == {4.0}
    sums = sums_of(metrics)
    assert (sums["clip_frac"], sums["clip_low_frac"], sums["clip_high_frac"]) == (2, 1, 1)
    np.testing.assert_allclose(sums["ratio"], 4.0, rtol=1e-6)
    assert (sums["tis_frac"], sums["kl_sampler_trainer"]) == (0, 0)
    # k3: 2 * (.5 - log 1.5) + 2 * (-.5 - log .5) = -2 log .75
    np.testing.assert_allclose(sums["kl_old_new"], -2 * np.log(0.75), rtol=1e-5)


def test_separate_bounds_and_importance_weights():
    # Ratio 1.5 with clip_high .28: 1.28. Weights: exp(log 3) = 3 cut to 2; exp(log .5) = .5.
    logp, old, _, advantages, mask = by_hand([[1.5, 1.5]], [1.0])
    batch = (logp, old, old - np.log(grid([3.0, 0.5])), advantages, mask)
    (loss, (_, metrics)), _ = jax.jit(lambda batch: value_and_grad(batch, clip_high=0.28))(batch)
    np.testing.assert_allclose(loss, -1.28 * (2 + 0.5), rtol=1e-6)
    assert float(metrics["tis_frac"][0]) == 1
    # k3 with ratios 3 and .5: (2 - log 3) + (-.5 - log .5)
    np.testing.assert_allclose(metrics["kl_sampler_trainer"][0], 1.5 - np.log(1.5), rtol=1e-5)
    (loss, (_, metrics)), _ = jax.jit(lambda batch: value_and_grad(batch, clip_high=0.28, tis_cap=None))(batch)
    np.testing.assert_allclose(loss, -2.56, rtol=1e-6)
    assert float(metrics["tis_frac"][0]) == 0


@WRAPS
def test_dual_clip_by_hand(wrap):
    # Ratios 5, 2, .5, 5 under A = -1, -1, -1, 1, dual_clip 3, clip to [.8, 1.2]:
    #   max(-5, -3) = -3, without gradient     -2     -.8 (clipped low)     1.2 (clipped high)
    # Loss 3 + 2 + .8 - 1.2 = 4.6; gradients 0, 2, 0, 0.
    batch = by_hand([[5.0], [2.0], [0.5], [5.0]], [-1.0, -1.0, -1.0, 1.0])
    (loss, (_, metrics)), (grad, _) = wrap(lambda batch: value_and_grad(batch, dual_clip=3.0))(batch)
    np.testing.assert_allclose(loss, 4.6, rtol=1e-6)
    assert_rows(grad, [0], [2], [0], [0])
    sums = sums_of(metrics)
    assert (sums["dual_clip_frac"], sums["clip_frac"], sums["clip_low_frac"]) == (1, 2, 1)


@WRAPS
def test_gspo_by_hand(wrap):
    # Row 1: ratios 4 and 1 over two tokens, s = exp((log 4 + 0) / 2) = 2, clipped to 1.2 under A = 1.
    # Row 2: ratios 4 and 1, s = 2 under A = -1: not clipped. Row 3: one token, ratio 1.1: s = 1.1, A = 1.
    # Objectives 1.2, 1.2, -2, -2, 1.1: loss .5. Gradients -s * A where not clipped: 0, 0, 2, 2, -1.1.
    batch = by_hand([[4.0, 1.0], [4.0, 1.0], [1.1]], [1.0, -1.0, 1.0])
    (loss, (weight, metrics)), (grad, _) = wrap(lambda batch: value_and_grad(batch, loss="gspo"))(batch)
    np.testing.assert_allclose((loss, weight), (0.5, 5), rtol=1e-5)
    assert_rows(grad, [0, 0], [2, 2], [-1.1])
    sums = sums_of(metrics)
    assert (sums["clip_frac"], sums["clip_high_frac"], sums["clip_low_frac"]) == (2, 2, 0)
    np.testing.assert_allclose(sums["ratio"], 4 * 2 + 1.1, rtol=1e-5)
    # The tokens' own k3 all the same: 2 * (3 - log 4) + (.1 - log 1.1).
    np.testing.assert_allclose(sums["kl_old_new"], 6 - 2 * np.log(4) + 0.1 - np.log(1.1), rtol=1e-5)


def test_gspo_with_one_advantage_a_token_by_hand():
    # As above with A = -1 and 0 in row 2, and 0 elsewhere: objectives -2 and 0, gradients 2 and 0.
    logp, old, _, _, mask = by_hand([[4.0, 1.0], [4.0, 1.0], [1.1]], [])
    batch = (logp, old, old, grid([0.0, 0.0], [-1.0, 0.0], [0.0]), mask)
    (loss, _), (grad, _) = jax.jit(lambda batch: value_and_grad(batch, loss="gspo"))(batch)
    np.testing.assert_allclose(loss, 2.0, rtol=1e-5)
    assert_rows(grad, [0, 0], [2, 0], [0])


@WRAPS
def test_cispo_by_hand(wrap):
    # Ratios 1.5, .5, 1 under A = 1, 1, -2 and logp -1, -2, -3: weights 1.2, .8, 1.
    # Objectives -1.2, -1.6, 6: loss -3.2. Gradients -weight * A, where clipped too: -1.2, -.8, 2.
    logp, ratios = grid([-1.0], [-2.0], [-3.0]), grid([1.5], [0.5], [1.0])
    old = logp - np.log(ratios)
    batch = (logp, old, old, np.array([1, 1, -2, np.nan], np.float32), ~np.isnan(logp))
    (loss, (_, metrics)), (grad, _) = wrap(lambda batch: value_and_grad(batch, loss="cispo"))(batch)
    np.testing.assert_allclose(loss, -3.2, rtol=1e-5)
    assert_rows(grad, [-1.2], [-0.8], [2])
    sums = sums_of(metrics)
    assert (sums["clip_frac"], sums["clip_low_frac"], sums["clip_high_frac"]) == (2, 1, 1)
    # Without a lower bound the second weight is .5: objective -1, gradient -.5.
    (loss, (_, metrics)), (grad, _) = wrap(lambda batch: value_and_grad(batch, loss="cispo", clip_low=1.0))(batch)
    np.testing.assert_allclose(loss, -3.8, rtol=1e-5)
    assert_rows(grad, [-1.2], [-0.5], [2])
    assert float(metrics["clip_low_frac"][0]) == 0


@pytest.mark.parametrize(
    ("wrap", "kl", "values", "grads"),
    [
        # d = ref - logp = log 2 and -log 2, so r = 2 and 1/2; gradients with respect to logp = -d.
        (jax.jit, "k1", [-np.log(2), np.log(2)], [1, 1]),
        (jax.jit, "k2", [np.log(2) ** 2 / 2] * 2, [-np.log(2), np.log(2)]),
        (jax.jit, "k3", [1 - np.log(2), np.log(2) - 0.5], [1 - 2, 1 - 0.5]),
        (lambda f: f, "k3", [1 - np.log(2), np.log(2) - 0.5], [1 - 2, 1 - 0.5]),
    ],
)
def test_kl_and_entropy_by_hand(wrap, kl, values, grads):
    # Advantages 0, so that only the terms act: .1 * KL on both tokens, -.3 * (1 + 2) of entropy.
    logp, old, _, _, mask = by_hand([[1.0], [1.0]], [])
    terms = {"ref_logp_NT": old + np.log(grid([2.0], [0.5])), "entropy_NT": grid([1.0], [2.0])}
    options = {"kl": kl, "kl_coef": 0.1, "entropy_coef": 0.3}

    def both(logp, terms, only_first):
        arrays = (logp, old, old, np.zeros(4, np.float32), mask)
        whole = value_and_grad(arrays, terms, **options)
        return whole, value_and_grad(arrays, terms | {"regularize_mask_NT": only_first}, **options)

    whole, first = wrap(both)(logp, terms, np.array([True, False, True, True])[:, None] & np.ones((4, 3), bool))
    (loss, (weight, metrics)), (grad, extra) = whole
    np.testing.assert_allclose((loss, weight), (0.1 * sum(values) - 0.9, 2), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_ref"], (sum(values), 2), rtol=1e-5, atol=1e-6)
    assert_rows(grad, [0.1 * grads[0]], [0.1 * grads[1]])
    assert_rows(extra["entropy_NT"], [-0.3], [-0.3])
    # Only on the first token; its weight stays that of the loss.
    (loss, (weight, metrics)), (grad, extra) = first
    np.testing.assert_allclose((loss, weight), (0.1 * values[0] - 0.3, 2), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_ref"], (values[0], 1), rtol=1e-5)
    assert_rows(grad, [0.1 * grads[0]])
    assert_rows(extra["entropy_NT"], [-0.3])


@WRAPS
def test_aggregations_by_hand(wrap):
    # On-policy (ratio 1): token loss -A. Rows of 3, 1 and 0 tokens with A = 1, -2, 5.
    logp, old, behavior, advantages, _ = by_hand([[1.0] * 3] * 4, [1.0, -2.0, 5.0])
    mask = np.array([[True] * 3, [False, True, False], [False] * 3, [False] * 3])
    batch = (logp, old, behavior, advantages, mask)

    def run(**options):
        return [float(x) for x in wrap(lambda batch: policy_loss(*batch, **options)[:2])(batch)]

    assert run() == [-1.0, 4.0]  # -3 + 2 over four tokens
    assert run(aggregation="sequence_mean") == [1.0, 2.0]  # -1 + 2 over two rows
    assert run(aggregation="constant", constant_length=4) == [-0.25, 2.0]  # (-3 + 2) / 4 over two rows
