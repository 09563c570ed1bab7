import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_helpers import value_and_grad
from loss_reference import OPTIONS, arguments, make_batch, poison

from dynrl.core import policy_loss

CASES = pytest.mark.parametrize(
    "name", ["ppo", "ppo_sequence_k1", "ppo_dual_k3_entropy", "gspo_constant_dual", "gspo_token_k2", "cispo_k2_entropy"]
)
BATCH = {key: x.astype(np.float32) if x.dtype != bool else x for key, x in make_batch(0, (12, 5)).items()}


def case(batch, name):
    """(arrays and arrays by name, the other options) of a case."""
    arrays, options = arguments(batch, OPTIONS[name])
    named = {key: options.pop(key) for key in list(options) if key.endswith("_NT")}
    return (arrays, named), options


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
