import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import token_logprobs


def make_inputs(seed=0, shape=(3, 5), width=4, vocab=11):
    rng = np.random.default_rng(seed)
    hidden, unembed = rng.normal(size=(*shape, width)), rng.normal(size=(width, vocab))
    return hidden.astype(np.float32), unembed.astype(np.float32), rng.integers(0, vocab, shape)


def reference(hidden, unembed, targets, temperature):
    """Float64: log-probs, entropies, and the gradients of sum(weights * logp)."""
    hidden, unembed = hidden.astype(np.float64), unembed.astype(np.float64)
    logits = hidden @ unembed / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)

    def grads(weights):
        d_logits = weights[..., None] * (np.eye(unembed.shape[1])[targets] - np.exp(logp))
        d_product = d_logits / temperature
        d_unembed = np.einsum("ntd,ntv->dv", hidden, d_product)
        return d_product @ unembed.T, d_unembed, -(d_logits * logits).sum() / temperature

    return np.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy, grads


def grad_function(chunk_size, targets, weights, **options):
    def loss(hidden, unembed, temperature):
        logp, entropy = token_logprobs(
            hidden, unembed, targets, temperature=temperature, chunk_size=chunk_size, **options
        )
        return (logp * weights).sum() + entropy.sum()  # the entropy must add nothing to the gradient

    return jax.grad(loss, argnums=(0, 1, 2))


@pytest.mark.parametrize(
    ("wrap", "chunk_size"),
    [(lambda f: f, None), *((jax.jit, size) for size in (None, 1, 4, 7, 100))],
)
def test_against_float64(wrap, chunk_size):
    hidden, unembed, targets = make_inputs()
    expected_logp, expected_entropy, expected_grads = reference(hidden, unembed, targets, 0.7)
    logprobs = wrap(functools.partial(token_logprobs, chunk_size=chunk_size))
    logp, entropy = logprobs(hidden, unembed, targets, temperature=0.7)  # traced under jit
    np.testing.assert_allclose(logp, expected_logp, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    weights = np.random.default_rng(1).normal(size=targets.shape).astype(np.float32)
    actual = wrap(grad_function(chunk_size, targets, weights))(hidden, unembed, 0.7)
    for a, b in zip(actual, expected_grads(weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_hand_derived():
    # One token, logits (log 3, 0) / T. T = 1: probabilities 3/4 and 1/4. T = .5: 9/10 and 1/10.
    hidden, unembed = jnp.ones((1, 1, 1)), jnp.array([[np.log(3.0), 0.0]])
    for temperature, p in ((1.0, 0.75), (0.5, 0.9)):
        logp, entropy = token_logprobs(hidden, unembed, jnp.zeros((1, 1), int), temperature=temperature)
        np.testing.assert_allclose(logp[0, 0], np.log(p), rtol=1e-6)
        np.testing.assert_allclose(entropy[0, 0], -p * np.log(p) - (1 - p) * np.log(1 - p), rtol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_entropy_gradient_against_its_formula(chunk_size):
    # dH / dlogit_j = -p_j (log p_j + H) / temperature; beside it, the log-prob's gradient is what it was.
    hidden, unembed, targets = make_inputs()
    weights, entropy_weights = np.random.default_rng(1).normal(size=(2, *targets.shape)).astype(np.float32)

    def loss(hidden, weights, entropy_weights, **options):
        logp, entropy = token_logprobs(hidden, unembed, targets, temperature=0.7, chunk_size=chunk_size, **options)
        return (logp * weights).sum() + (entropy * entropy_weights).sum()

    grad = jax.jit(jax.grad(loss), static_argnames="entropy_gradient")
    with_entropy = grad(hidden, weights, entropy_weights, entropy_gradient=True)
    logits = (hidden @ unembed).astype(np.float64) / 0.7
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1, keepdims=True)
    d_logits = -np.exp(logp) * (logp + entropy) * entropy_weights[..., None] / 0.7
    without = grad(hidden, weights, entropy_weights)
    np.testing.assert_allclose(with_entropy - without, d_logits @ unembed.T, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(without, grad(hidden, weights, 0 * entropy_weights))


def test_entropy_gradient_by_hand():
    # Probabilities 3/4 and 1/4, H = log 4 - 3/4 log 3: dH / dlogit_0 = -3/4 (log 3/4 + H) = -3/16 log 3, and the
    # opposite for logit_1. The hidden state of 1 gets log 3 * dH / dlogit_0.
    def entropy(hidden, unembed):
        return token_logprobs(hidden, unembed, jnp.zeros((1, 1), int), entropy_gradient=True)[1].sum()

    grads = jax.jit(jax.grad(entropy, argnums=(0, 1)))(jnp.ones((1, 1, 1)), jnp.array([[np.log(3.0), 0.0]]))
    slope = -3 / 16 * np.log(3)
    np.testing.assert_allclose(grads[1], [[slope, -slope]], rtol=1e-5)
    np.testing.assert_allclose(grads[0][0, 0], [slope * np.log(3)], rtol=1e-5)


@pytest.mark.parametrize(("temperature", "gap"), [(1e-3, 2.0**-10), (1e-6, 2.0**-20)])
def test_tiny_temperatures_keep_small_differences(temperature, gap):
    # Logits 8 and 8 + gap, exact in float32: p_1 = 1 / (1 + exp(-gap / T)), where 8 / T alone is off by up to 0.5.
    hidden, unembed = jnp.ones((1, 1, 1)), jnp.array([[8.0, 8.0 + gap]], jnp.float32)

    def logp(unembed):
        return token_logprobs(hidden, unembed, jnp.zeros((1, 1), int), temperature=temperature)[0].sum()

    value, grad = jax.jit(jax.value_and_grad(logp))(unembed)
    p = 1 / (1 + np.exp(-gap / temperature))
    np.testing.assert_allclose(value, np.log(1 - p), rtol=1e-6)
    np.testing.assert_allclose(grad * temperature, [[p, -p]], rtol=1e-6)


def test_chunks_agree_with_the_whole():
    hidden, unembed, targets = make_inputs(shape=(2, 32), vocab=50)
    whole = jax.jit(token_logprobs)(hidden, unembed, targets)
    chunked = jax.jit(functools.partial(token_logprobs, chunk_size=24))(hidden, unembed, targets)  # 64 = 3 * 22 - 2
    for a, b in zip(chunked, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _temp_bytes(chunk_size, rows, length, width, vocab):
    targets = jnp.zeros((rows, length), jnp.int32)
    weights = jnp.ones((rows, length))
    arguments = (jnp.ones((rows, length, width)), jnp.ones((width, vocab)), jnp.float32(1))
    compiled = jax.jit(grad_function(chunk_size, targets, weights)).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_memory_is_bounded_by_the_chunk():
    rows, length, width, vocab, chunk_size = 4, 256, 16, 2048, 64
    all_logits = rows * length * vocab * 4  # 8 MiB
    assert _temp_bytes(None, rows, length, width, vocab) >= all_logits
    # A few arrays of one chunk's logits (1/16 each), and copies of the hidden states (1/128 each).
    bounded = _temp_bytes(chunk_size, rows, length, width, vocab)
    assert bounded < all_logits / 3
    # Twice the tokens at the same chunk: only arrays of the size of the hidden states may grow.
    grown = _temp_bytes(chunk_size, 2 * rows, length, width, vocab)
    assert grown - bounded <= 6 * rows * length * width * 4


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_gradient_has_no_scatter_or_gather(chunk_size):
    hidden, unembed, targets = make_inputs()
    jaxpr = jax.make_jaxpr(grad_function(chunk_size, targets, np.ones(targets.shape, np.float32)))(hidden, unembed, 1.0)
    text = str(jaxpr)
    assert "dot_general" in text
    assert "scatter" not in text
    assert "gather" not in text
    assert ("scan[" in text) == (chunk_size is not None)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_bfloat16_accumulates_in_float32(chunk_size):
    hidden, unembed, targets = make_inputs(width=256)
    hidden, unembed = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(unembed / 16, jnp.bfloat16)
    expected, _, expected_grads = reference(np.asarray(hidden, np.float32), np.asarray(unembed, np.float32), targets, 1)
    logp, entropy = token_logprobs(hidden, unembed, targets, chunk_size=chunk_size)
    assert logp.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logp, expected, rtol=1e-4, atol=1e-4)
    weights = np.ones(targets.shape, np.float32)
    grads = grad_function(chunk_size, targets, weights)(hidden, unembed, 1.0)
    assert [g.dtype for g in grads[:2]] == [jnp.bfloat16] * 2
    for actual, exact in zip(grads[:2], expected_grads(weights), strict=False):
        np.testing.assert_allclose(actual.astype(jnp.float32), exact, rtol=0.03, atol=0.02)
    # Rounding the logits to bfloat16 is a choice, and it shows.
    rounded, _ = token_logprobs(hidden, unembed, targets, chunk_size=chunk_size, logits_dtype=jnp.bfloat16)
    assert 1e-4 < abs(rounded - expected).max() < 0.05


def test_large_logits_and_targets_outside_of_the_vocabulary():
    hidden, unembed, targets = make_inputs()
    targets[0, :2] = [-1, 11]
    function = grad_function(4, targets, (targets >= 0).astype(np.float32))
    for scale in (1, 1e4):
        logp, entropy = token_logprobs(hidden * scale, unembed, targets, chunk_size=4)
        assert np.isfinite(logp).all()
        assert np.isfinite(entropy).all()
        assert (entropy >= 0).all()
        assert all(np.isfinite(g).all() for g in function(hidden * scale, unembed, 1.0))


def test_vmap_and_empty():
    hidden, unembed, targets = make_inputs()
    whole, _ = token_logprobs(hidden, unembed, targets)
    mapped, _ = jax.vmap(lambda h, t: token_logprobs(h[None], unembed, t[None], chunk_size=2))(hidden, targets)
    np.testing.assert_allclose(mapped[:, 0], whole, rtol=1e-5)
    assert token_logprobs(hidden[:0], unembed, targets[:0], chunk_size=2)[0].shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_NTD": np.ones((15, 4))}, "do not fit"),
        ({"unembed_DV": np.ones((5, 11))}, "do not fit"),
        ({"targets_NT": np.ones((3, 4), int)}, "targets have shape"),
        ({"chunk_size": 0}, "at least 1 token"),
    ],
)
def test_wrong_arguments(change, message):
    hidden, unembed, targets = make_inputs()
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{"hidden_NTD": hidden, "unembed_DV": unembed, "targets_NT": targets} | change)
