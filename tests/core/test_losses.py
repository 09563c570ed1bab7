import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import OPTIONS, arguments, make_batch, poison

from dynrl.core import policy_loss

WRAPS = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
CASES = pytest.mark.parametrize(
    "name", ["ppo", "ppo_sequence_k1", "ppo_dual_k3_entropy", "gspo_constant_dual", "gspo_token_k2", "cispo_k2_entropy"]
)
BATCH = {key: x.astype(np.float32) if x.dtype != bool else x for key, x in make_batch(0, (12, 5)).items()}


def case(batch, name):
    """(arrays and arrays by name, the other options) of a case."""
    arrays, options = arguments(batch, OPTIONS[name])
    named = {key: options.pop(key) for key in list(options) if key.endswith("_NT")}
    return (arrays, named), options


def value_and_grad(arrays, named=None, **options):
    """((loss, (weight, metrics)), gradients of loss_sum by logp and, if there is one, by entropy)."""
    named = dict(named or {})
    entropy = {key: named.pop(key) for key in ("entropy_NT",) if key in named}

    def loss(logp, entropy):
        loss_sum, weight_sum, metrics = policy_loss(logp, *arrays[1:], **named, **entropy, **options)
        return loss_sum, (weight_sum, metrics)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(arrays[0]), entropy)


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


def test_terms_that_are_off_cost_nothing():
    arrays, named = case(BATCH, "ppo_dual_k3_entropy")[0]

    def program(**options):
        return str(jax.make_jaxpr(lambda arrays: policy_loss(*arrays, **options))(arrays))

    plain = program()
    assert program(entropy_NT=named["entropy_NT"], dual_clip=None, kl="k1", kl_coef=0, entropy_coef=0.0) == plain
    # A reference without a coefficient is a metric.
    (loss, (_, metrics)), (grad, _) = jax.jit(value_and_grad)(arrays, {"ref_logp_NT": named["ref_logp_NT"]})
    (plain_loss, (_, plain_metrics)), (plain_grad, _) = jax.jit(value_and_grad)(arrays)
    np.testing.assert_array_equal((loss, *np.ravel(grad)), (plain_loss, *np.ravel(plain_grad)))
    assert metrics.keys() - plain_metrics.keys() == {"kl_ref"}
    # A traced coefficient is on, whatever it holds.
    traced = jax.jit(lambda arrays, named, coef: value_and_grad(arrays, named, kl_coef=coef, entropy_coef=coef))
    (loss, _), _ = traced(*case(BATCH, "ppo_dual_k3_entropy")[0], jnp.float32(0))
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-6)


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


def test_rows_without_elements():
    for shape in ((0, 5), (3, 0)):
        batch = {key: x[: shape[0], : shape[1]] if x.ndim == 2 else x[: shape[0]] for key, x in BATCH.items()}
        for name in ("ppo_dual_k3_entropy", "gspo", "cispo_k2_entropy"):
            inputs, options = case(batch, name)
            loss, weight, _ = jax.jit(lambda a, n, o=options: policy_loss(*a, **n, **o))(*inputs)
            assert (float(loss), float(weight)) == (0, 0)


@CASES
def test_masked_and_short_batches(name):
    """Filler rows and columns, of garbage and masked out, change nothing; nor does the order of rows."""
    inputs, options = case(poison(BATCH | {"mask": np.zeros((12, 5), bool)}), name)
    run = jax.jit(lambda *inputs: value_and_grad(*inputs, **options))
    (loss, (weight, metrics)), grads = run(*inputs)  # nothing kept
    assert (loss, weight) == (0, 0)
    assert all(total == count == 0 for total, count in metrics.values())
    assert not any(np.any(g) for g in jax.tree.leaves(grads))
    inputs, _ = case(BATCH, name)
    (loss, (weight, metrics)), grads = run(*inputs)
    padded = {
        key: np.pad(x, ((0, 3), (0, 4))[: x.ndim], constant_values=0 if x.dtype == bool else np.nan)
        for key, x in BATCH.items()
    }
    order = np.random.default_rng(0).permutation(15)
    inputs, _ = case({key: x[order] for key, x in padded.items()}, name)
    (loss_2, (weight_2, metrics_2)), grads_2 = run(*inputs)
    np.testing.assert_allclose(loss_2, loss, rtol=1e-5)
    assert weight_2 == weight
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics_2, metrics)
    for a, b in zip(jax.tree.leaves(grads_2), jax.tree.leaves(grads), strict=True):
        a = np.asarray(a)[np.argsort(order)]
        np.testing.assert_allclose(a[:12, :5], b, rtol=1e-5, atol=1e-7)
        assert (np.count_nonzero(a[12:]), np.count_nonzero(a[:, 5:])) == (0, 0)


@pytest.mark.parametrize("name", ["ppo", "ppo_dual_k3_entropy", "gspo_token_k2", "cispo_k2_entropy", "ppo_sequence_k1"])
def test_extreme_differences_stay_finite(name):
    # Log-probs of -inf and differences of 1e30 in either direction, with zero and non-zero advantages.
    extreme = jnp.array([0.0, -1e30, -jnp.inf, -50.0])
    logp, old, behavior, advantages = (x.ravel() for x in jnp.meshgrid(extreme, extreme, extreme, jnp.arange(-1.0, 2)))
    both_infinite = (jnp.isinf(logp) & jnp.isinf(old)) | (jnp.isinf(old) & jnp.isinf(behavior))
    column = {"logp": logp, "old": old, "behavior": behavior, "ref": behavior, "mask": ~both_infinite}
    column["mask"] &= ~(jnp.isinf(logp) & jnp.isinf(behavior))
    batch = {key: x[:, None] for key, x in column.items()} | {"advantages": advantages}
    batch |= {"entropy": jnp.ones(batch["logp"].shape), "regularize": batch["mask"]}
    inputs, options = case(batch, name)
    (loss, (_, metrics)), grads = jax.jit(lambda *inputs: value_and_grad(*inputs, **options))(*inputs)
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert all(np.isfinite(total) for total, _ in metrics.values())


def test_only_logp_and_entropy_have_a_gradient():
    batch = {key: jnp.asarray(x) for key, x in BATCH.items()}

    def loss(arrays, named, options):
        logp, old, behavior, advantages = arrays
        return policy_loss(logp, old, behavior, advantages, batch["mask"], **named, **options)[0]

    for name in ("ppo_dual_k3_entropy", "gspo_token_k2", "cispo_k2_entropy"):
        (arrays, named), options = case(batch, name)
        options |= {key: named.pop(key) for key in ("regularize_mask_NT",) if key in named}
        grads, extra = jax.jit(jax.grad(lambda a, n, o=options: loss(a, n, o), argnums=(0, 1)))(arrays[:4], named)
        assert [bool(np.any(g)) for g in grads] == [True, False, False, False]
        assert {key: bool(np.any(g)) for key, g in extra.items()} == {key: key == "entropy_NT" for key in extra}
    # On-policy, logp serves as old_logp too: the ratio is 1 and the gradient is -A, for every loss.
    for name in ("ppo", "gspo", "cispo"):
        on_policy = jax.jit(
            jax.grad(lambda x, name=name: policy_loss(x, x, x, batch["advantages"], batch["mask"], loss=name)[0])
        )
        expected = np.where(batch["mask"], -np.asarray(batch["advantages"])[:, None], 0)
        np.testing.assert_allclose(on_policy(batch["logp"]), expected, rtol=1e-6)


def test_bfloat16_is_summed_in_float32():
    logp = jnp.zeros((1, 3000), jnp.bfloat16)
    loss, weight, _ = jax.jit(policy_loss)(logp, logp, logp, jnp.ones(1), jnp.ones(logp.shape, bool))
    assert (loss.dtype, float(loss), float(weight)) == (jnp.float32, -3000, 3000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregation": "mean"}, "'mean' is unknown; there are token_mean, sequence_mean, constant"),
        ({"aggregation": "constant"}, "constant_length belongs to"),
        ({"constant_length": 8}, "constant_length belongs to"),
        ({"aggregation": "constant", "constant_length": 0}, "above 0"),
        ({"loss": "gpso"}, r"loss 'gpso' is unknown; there are ppo, gspo, cispo; did you mean 'gspo'\?"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"dual_clip": 3.0, "loss": "cispo"}, "'cispo' has none"),
        ({"clip_low": -0.1}, "clip_low must be at least 0"),
        ({"clip_high": "wide"}, "clip_high must be a finite number"),
        ({"tis_cap": 0.0}, "tis_cap must be above 0"),
        ({"kl": "k4"}, "kl 'k4' is unknown; there are k1, k2, k3"),
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs ref_logp_NT"),
        ({"kl_coef": -0.1, "ref_logp_NT": BATCH["ref"]}, "kl_coef must be at least 0"),
        ({"entropy_coef": 0.1}, "entropy_coef=0.1 needs entropy_NT"),
        ({"entropy_coef": np.nan}, "entropy_coef must be a finite number"),
        ({"regularize_mask_NT": BATCH["mask"]}, "there is neither ref_logp_NT nor entropy_NT"),
        ({"ref_logp_NT": BATCH["ref"][1:]}, r"ref_logp_NT.*\(11, 5\)"),
        ({"entropy_NT": BATCH["entropy"][0]}, r"entropy_NT.*\(5,\)"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(*arguments(BATCH, {})[0], **options)


def test_wrong_shapes():
    logp, old, behavior, advantages, mask = arguments(BATCH, {})[0]
    with pytest.raises(ValueError, match=r"behavior_logp_NT.*\(11, 5\)"):
        policy_loss(logp, old, behavior[1:], advantages, mask)
    with pytest.raises(ValueError, match=r"advantages_N.*\(12, 4\)"):
        policy_loss(logp, old, behavior, logp[:, :4], mask)
