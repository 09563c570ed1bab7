import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import policy_loss
from dynrl.types import Array

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
AGGREGATIONS = pytest.mark.parametrize(
    "options", [{}, {"aggregation": "sequence_mean"}, {"aggregation": "constant", "constant_length": 7}]
)


def reference(
    logp, old, behavior, advantages, mask, low=0.2, high=0.2, cap=2.0, aggregation="token_mean", constant_length=None
):
    """Float64, token by token; also the analytic gradient of loss_sum with respect to logp."""
    sums = dict.fromkeys(
        ("clip_frac", "clip_low_frac", "clip_high_frac", "ratio", "tis_frac", "kl_sampler_trainer", "kl_old_new"), 0.0
    )
    grad, loss = np.zeros(logp.shape), 0.0
    for n in range(len(logp)):
        tokens = np.flatnonzero(mask[n])
        denominator = {"token_mean": 1, "sequence_mean": max(len(tokens), 1), "constant": constant_length}[aggregation]
        for t in tokens:
            r, drift = np.exp(logp[n, t] - old[n, t]), old[n, t] - behavior[n, t]
            weight = 1.0 if cap is None else min(np.exp(drift), cap)
            clipped = min(max(r, 1 - low), 1 + high) * advantages[n]
            active = clipped < r * advantages[n]
            loss -= weight * min(r * advantages[n], clipped) / denominator
            grad[n, t] = 0 if active else -weight * advantages[n] * r / denominator
            sums["clip_frac"] += active
            sums["clip_low_frac"] += active and r < 1 - low
            sums["clip_high_frac"] += active and r > 1 + high
            sums["ratio"] += r
            sums["tis_frac"] += cap is not None and np.exp(drift) > cap
            sums["kl_sampler_trainer"] += np.exp(drift) - 1 - drift
            sums["kl_old_new"] += r - 1 - np.log(r)
    weight_sum = mask.sum() if aggregation == "token_mean" else mask.any(axis=1).sum()
    return loss, weight_sum, {name: (value, mask.sum()) for name, value in sums.items()}, grad


def make_batch(seed=0, rows=40, length=9):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=(rows, length))
    logp, behavior = old + 0.3 * rng.normal(size=old.shape), old + 0.5 * rng.normal(size=old.shape)
    advantages = rng.normal(size=rows) * (rng.random(rows) < 0.8)
    mask = rng.random(old.shape) < rng.choice([0.0, 0.5, 1.0], (rows, 1))
    return logp, old, behavior, advantages, mask


def poison(batch) -> tuple[Array, Array, Array, Array, Array]:
    """Fills everything masked out with garbage."""
    logp, old, behavior, advantages, mask = (np.array(x) for x in batch)
    rng = np.random.default_rng(1)
    for x in (logp, old, behavior):
        x[~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30], (~mask).sum())
    advantages[~mask.any(axis=1)] = np.nan
    return logp, old, behavior, advantages, mask


def value_and_grad(batch, **options):
    def loss(logp):
        loss_sum, weight_sum, metrics = policy_loss(logp, *batch[1:], **options)
        return loss_sum, (weight_sum, metrics)

    return jax.value_and_grad(loss, has_aux=True)(jnp.asarray(batch[0]))


@WRAPS
def test_hand_derived(wrap):
    # Ratios 1.5, 0.5, 1.5, 0.5 under A = 1, -1, -1, 1, clip to [.8, 1.2]; old = behavior.
    #   min(1.5, 1.2) = 1.2 (clipped high)     min(-.5, -.8) = -.8 (clipped low)
    #   min(-1.5, -1.2) = -1.5                 min(.5, .8) = .5
    # Loss -1.2 + .8 + 1.5 - .5 = .6; gradients -A * r where not clipped: 0, 0, 1.5, -.5.
    ratios, advantages = jnp.array([1.5, 0.5, 1.5, 0.5]), jnp.array([1.0, -1.0, -1.0, 1.0])
    old, mask = jnp.full((4, 1), -1.0), jnp.ones((4, 1), bool)
    batch = (old + jnp.log(ratios)[:, None], old, old, advantages, mask)
    (loss, (weight, metrics)), grad = wrap(value_and_grad)(batch)
    np.testing.assert_allclose((loss, weight), (0.6, 4), rtol=1e-6)
    np.testing.assert_allclose(grad[:, 0], [0, 0, 1.5, -0.5], atol=1e-6)
    sums = {name: float(total) for name, (total, _) in metrics.items()}
    assert {float(count) for _, count in metrics.values()} == {4.0}
    assert (sums["clip_frac"], sums["clip_low_frac"], sums["clip_high_frac"]) == (2, 1, 1)
    np.testing.assert_allclose(sums["ratio"], 4.0, rtol=1e-6)
    assert (sums["tis_frac"], sums["kl_sampler_trainer"]) == (0, 0)
    # k3: 2 * (.5 - log 1.5) + 2 * (-.5 - log .5) = -2 log .75
    np.testing.assert_allclose(sums["kl_old_new"], -2 * np.log(0.75), rtol=1e-5)


def test_separate_bounds_and_importance_weights():
    # Ratio 1.5 with clip_high .28: 1.28. Weights: exp(log 3) = 3 cut to 2; exp(log .5) = .5.
    old = jnp.full((1, 2), -2.0)
    behavior = old - jnp.log(jnp.array([[3.0, 0.5]]))
    batch = (old + jnp.log(1.5), old, behavior, jnp.ones(1), jnp.ones((1, 2), bool))
    (loss, (_, metrics)), _ = jax.jit(lambda batch: value_and_grad(batch, clip_high=0.28))(batch)
    np.testing.assert_allclose(loss, -1.28 * (2 + 0.5), rtol=1e-6)
    assert float(metrics["tis_frac"][0]) == 1
    # k3 with ratios 3 and .5: (2 - log 3) + (-.5 - log .5)
    np.testing.assert_allclose(metrics["kl_sampler_trainer"][0], 1.5 - np.log(1.5), rtol=1e-5)
    (loss, (_, metrics)), _ = jax.jit(lambda batch: value_and_grad(batch, clip_high=0.28, tis_cap=None))(batch)
    np.testing.assert_allclose(loss, -2.56, rtol=1e-6)
    assert float(metrics["tis_frac"][0]) == 0


@WRAPS
def test_aggregations_by_hand(wrap):
    # On-policy (ratio 1): token loss -A. Rows of 3, 1 and 0 tokens with A = 1, -2, 5.
    logp, mask = jnp.zeros((3, 3)), jnp.array([[True] * 3, [False, True, False], [False] * 3])
    batch = (logp, logp, logp, jnp.array([1.0, -2.0, 5.0]), mask)

    def run(**options):
        return [float(x) for x in wrap(lambda batch: policy_loss(*batch, **options)[:2])(batch)]

    assert run() == [-1.0, 4.0]  # -3 + 2 over four tokens
    assert run(aggregation="sequence_mean") == [1.0, 2.0]  # -1 + 2 over two rows
    assert run(aggregation="constant", constant_length=4) == [-0.25, 2.0]  # (-3 + 2) / 4 over two rows


@AGGREGATIONS
@pytest.mark.parametrize(("low", "high", "cap"), [(0.2, 0.2, 2.0), (0.2, 0.28, 1.1), (0.1, 0.5, None)])
def test_against_float64_with_garbage_masked_out(options, low, high, cap):
    jitted = jax.jit(lambda batch: value_and_grad(batch, clip_low=low, clip_high=high, tis_cap=cap, **options))
    for seed in range(5):
        batch = make_batch(seed)
        loss, weight, metrics, grad = reference(*batch, low=low, high=high, cap=cap, **options)
        (actual_loss, (actual_weight, actual_metrics)), actual_grad = jitted(
            [np.asarray(x, np.float32 if x.dtype == float else bool) for x in poison(batch)]
        )
        np.testing.assert_allclose(actual_loss, loss, rtol=1e-4, atol=1e-4)
        assert float(actual_weight) == weight
        np.testing.assert_allclose(actual_grad, grad, rtol=1e-4, atol=1e-5)
        assert actual_metrics.keys() == metrics.keys()
        for name, expected in metrics.items():
            np.testing.assert_allclose(actual_metrics[name], expected, rtol=1e-4, err_msg=name)


@AGGREGATIONS
def test_gradient_against_finite_differences_in_float64(options):
    with jax.enable_x64(True):
        batch = poison(make_batch(3, rows=4, length=5))
        loss = jax.jit(lambda logp: policy_loss(logp, *batch[1:], **options)[0])
        grad = np.asarray(jax.grad(loss)(batch[0]))
        assert grad.dtype == np.float64
        for n, t in np.argwhere(batch[4]):
            step = np.zeros(batch[0].shape)
            step[n, t] = 1e-6
            numeric = (loss(batch[0] + step) - loss(batch[0] - step)) / 2e-6
            np.testing.assert_allclose(grad[n, t], numeric, rtol=1e-6, atol=1e-8)
        np.testing.assert_array_equal(grad[~batch[4]], 0)


@WRAPS
@AGGREGATIONS
def test_everything_masked(wrap, options):
    batch = poison((*make_batch()[:4], np.zeros((40, 9), bool)))
    (loss, (weight, metrics)), grad = wrap(lambda b: value_and_grad(b, **options))([jnp.asarray(x) for x in batch])
    assert (loss, weight) == (0, 0)
    assert all(total == count == 0 for total, count in metrics.values())
    np.testing.assert_array_equal(grad, np.zeros(grad.shape))


@AGGREGATIONS
def test_padding_and_permutation_invariance(options):
    batch = [np.asarray(x, np.float32 if x.dtype == float else bool) for x in make_batch()]
    (loss, (weight, metrics)), grad = value_and_grad(batch, **options)
    padded = [np.pad(x, ((0, 3), (0, 4))[: x.ndim], constant_values=0 if x.dtype == bool else np.nan) for x in batch]
    order = np.random.default_rng(0).permutation(len(padded[0]))
    (loss_2, (weight_2, metrics_2)), grad_2 = value_and_grad([x[order] for x in padded], **options)
    np.testing.assert_allclose(loss_2, loss, rtol=1e-5)
    assert weight_2 == weight
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics_2, metrics)
    np.testing.assert_array_equal(grad_2[np.argsort(order)][:40, :9], grad)


def test_extreme_differences_stay_finite():
    # Log-probs of -inf and differences of 1e30 in either direction, with zero and non-zero advantages.
    extreme = jnp.array([0.0, -1e30, -jnp.inf, -50.0])
    logp, old, behavior, advantages = (x.ravel() for x in jnp.meshgrid(extreme, extreme, extreme, jnp.arange(-1.0, 2)))
    both_infinite = (jnp.isinf(logp) & jnp.isinf(old)) | (jnp.isinf(old) & jnp.isinf(behavior))
    batch = (logp[:, None], old[:, None], behavior[:, None], advantages, ~both_infinite[:, None])
    (loss, (_, metrics)), grad = jax.jit(value_and_grad)(batch)
    assert np.isfinite(loss)
    assert np.isfinite(grad).all()
    assert all(np.isfinite(total) for total, _ in metrics.values())


def test_only_logp_has_a_gradient():
    batch = [jnp.asarray(x, jnp.float32) for x in make_batch()[:4]]
    mask = jnp.asarray(make_batch()[4])
    grads = jax.grad(lambda batch: policy_loss(batch[0], batch[1], batch[2], batch[3], mask)[0])(batch)
    assert np.any(grads[0])
    assert not any(np.any(g) for g in grads[1:])
    # On-policy, logp serves as old_logp too: the ratio is 1 and the gradient is -A.
    on_policy = jax.grad(lambda logp: policy_loss(logp, logp, logp, batch[3], mask)[0])(batch[0])
    np.testing.assert_allclose(on_policy, np.where(mask, -np.asarray(batch[3])[:, None], 0))


def test_bfloat16_is_summed_in_float32():
    logp = jnp.zeros((1, 3000), jnp.bfloat16)
    loss, weight, _ = jax.jit(policy_loss)(logp, logp, logp, jnp.ones(1), jnp.ones(logp.shape, bool))
    assert (loss.dtype, float(loss), float(weight)) == (jnp.float32, -3000, 3000)


def test_vmap():
    batches = [make_batch(seed) for seed in range(3)]
    stacked = [np.stack([np.asarray(b[i], np.float32 if i < 4 else bool) for b in batches]) for i in range(5)]
    losses = jax.jit(jax.vmap(lambda *batch: policy_loss(*batch)[0]))(*stacked)
    np.testing.assert_allclose(losses, [reference(*batch)[0] for batch in batches], rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "'mean' is unknown; there are token_mean, sequence_mean, constant"),
        ({"aggregation": "constant"}, "constant_length belongs to"),
        ({"constant_length": 8}, "constant_length belongs to"),
        ({"aggregation": "constant", "constant_length": 0}, "above 0"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(*make_batch(), **options)


def test_wrong_shapes():
    logp, old, behavior, advantages, mask = make_batch()
    with pytest.raises(ValueError, match=r"behavior_logp_NT.*\(39, 9\)"):
        policy_loss(logp, old, behavior[1:], advantages, mask)
    with pytest.raises(ValueError, match=r"advantages_N.*\(40, 8\)"):
        policy_loss(logp, old, behavior, np.zeros((40, 8)), mask)
