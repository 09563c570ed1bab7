"""Gradients in float64: of the losses against finite differences of a NumPy reference, and of the log-probs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import OPTIONS, arguments, make_batch, poison, reference_loss

from dynrl.core import AGGREGATIONS, KL_ESTIMATORS, LOSSES, policy_loss, token_logprobs

STEP = 1e-6


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def numeric_gradient(function, x, where):
    """Central differences of a scalar function at the positions in `where`, 0 elsewhere."""
    grad = np.zeros(x.shape)
    for index in map(tuple, np.argwhere(where)):
        step = np.zeros(x.shape)
        step[index] = STEP
        grad[index] = (function(x + step) - function(x - step)) / (2 * STEP)
    return grad


@pytest.mark.parametrize("name", OPTIONS)
def test_loss(name):
    batch = make_batch(1, (4, 5), token_advantages="token" in name)
    arrays, options = arguments(poison(batch), OPTIONS[name])
    named = {key: options.pop(key) for key in list(options) if key.endswith("_NT")}
    entropy = named.pop("entropy_NT", None)

    @jax.jit
    def value_and_grads(logp, entropy, arrays, named):
        def loss(logp, entropy):
            extra = {} if entropy is None else {"entropy_NT": entropy}
            return policy_loss(logp, *arrays, **named, **extra, **options)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(logp, entropy)

    value, (grad, entropy_grad) = value_and_grads(arrays[0], entropy, arrays[1:], named)

    def reference(**changes):
        return reference_loss(batch | changes, batch["logp"], **OPTIONS[name])[0]

    np.testing.assert_allclose(value, reference(), rtol=1e-12)
    assert grad.dtype == np.float64
    expected = numeric_gradient(lambda logp: reference(logp=logp), batch["logp"], batch["mask"])
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_array_equal(np.asarray(grad)[~batch["mask"]], 0)
    if entropy is not None:
        expected = numeric_gradient(lambda x: reference(entropy=x), batch["entropy"], batch["mask"])
        np.testing.assert_allclose(entropy_grad, expected, rtol=1e-6, atol=1e-8)
        outside = ~(batch["mask"] & batch["regularize"])
        np.testing.assert_array_equal(np.asarray(entropy_grad)[outside], 0)


def test_the_cases_cover_every_choice():
    cases = list(OPTIONS.values())
    assert {c.get("loss", "ppo") for c in cases} == set(LOSSES)
    assert {c.get("kl", "k3") for c in cases if c.get("kl_coef")} == set(KL_ESTIMATORS)
    pairs = {(c.get("loss", "ppo"), c.get("aggregation", "token_mean")) for c in cases}
    assert pairs == {(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS}


def test_gspo_is_the_gradient_of_the_sequence_ratio():
    """With one advantage a row and no drift, the token form's gradient is that of sum_i min(s_i A_i, clip(s_i) A_i)."""
    batch = make_batch(2, (6, 5))
    batch["behavior"] = batch["old"]

    def sequence_loss(logp):
        mask = batch["mask"]
        mean = np.where(mask, logp - batch["old"], 0).sum(1) / np.maximum(mask.sum(1), 1)
        s, a = np.exp(mean), batch["advantages"]
        return -np.where(mask.any(1), np.minimum(s * a, np.clip(s, 0.95, 1.08) * a), 0).sum()

    arrays, options = arguments(batch, OPTIONS["gspo"])
    value, grad = jax.jit(jax.value_and_grad(lambda logp: policy_loss(logp, *arrays[1:], **options)[0]))(arrays[0])
    np.testing.assert_allclose(value, sequence_loss(batch["logp"]), rtol=1e-12)
    expected = numeric_gradient(sequence_loss, batch["logp"], batch["mask"])
    np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_log_probs_and_entropy(chunk_size):
    rng = np.random.default_rng(0)
    hidden, unembed, temperature = rng.normal(size=(3, 5, 4)), rng.normal(size=(4, 11)), np.float64(1.3)
    targets = rng.integers(0, 11, (3, 5))
    targets[0, :2] = [-1, 11]  # outside of the vocabulary: minus the log-normaliser, of a logit of 0
    weights, entropy_weights = rng.normal(size=(2, 3, 5))

    def loss(hidden, unembed, temperature):
        options = {"chunk_size": chunk_size, "logits_dtype": jnp.float64, "entropy_gradient": True}
        logp, entropy = token_logprobs(hidden, unembed, targets, temperature=temperature, **options)
        return (logp * weights).sum() + (entropy * entropy_weights).sum()

    def reference(hidden, unembed, temperature):
        scaled = hidden @ unembed / temperature
        norm = np.log(np.exp(scaled).sum(-1))
        inside = (targets >= 0) & (targets < 11)
        target = np.take_along_axis(scaled, np.where(inside, targets, 0)[..., None], -1)[..., 0]
        logp, all_logp = np.where(inside, target, 0) - norm, scaled - norm[..., None]
        entropy = -(np.exp(all_logp) * all_logp).sum(-1)
        return (logp * weights).sum() + (entropy * entropy_weights).sum()

    at = [hidden, unembed, temperature]
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*at)
    np.testing.assert_allclose(value, reference(*at), rtol=1e-12)
    for index, grad in enumerate(grads):
        assert grad.dtype == jnp.float64

        def moved(x, index=index):
            return reference(*(x if i == index else a for i, a in enumerate(at)))

        where = np.ones(np.shape(at[index]), bool)
        expected = numeric_gradient(functools.partial(moved), np.asarray(at[index]), where)
        np.testing.assert_allclose(grad, expected, rtol=1e-5, atol=1e-7)
