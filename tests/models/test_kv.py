"""The cache of keys and values against NumPy, and the ways to fill it against single decode steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.config import ModelConfig
from dynrl.models.decoder import Decoder, init_params
from dynrl.models.kv import KV, quantise
from dynrl.models.policy import append, decode_step, logits_of, prompt_kv

R, H, LENGTH, E = 3, 2, 7, 4  # rows, key heads, columns, head_dim


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def float_cache(dtype="float32"):
    return KV(jnp.asarray(normal(R, H, LENGTH, E, seed=1), dtype), jnp.asarray(normal(R, H, LENGTH, E, seed=2), dtype))


def int8_cache():
    rng = np.random.default_rng(3)
    values = rng.integers(-127, 128, (2, R, H, LENGTH, E)).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, (2, R, H, LENGTH)).astype(np.float32)
    return KV(*map(jnp.asarray, (*values, *scales)))


def plain(cache) -> Any:
    """Keys and values as float64 arrays."""
    k, v = (np.asarray(x, np.float64) for x in cache[:2])
    if cache.k_scale is None:
        return k, v
    return k * np.asarray(cache.k_scale, np.float64)[..., None], v * np.asarray(cache.v_scale, np.float64)[..., None]


CACHES = {"float32": float_cache(), "bfloat16": float_cache("bfloat16"), "int8": int8_cache()}


# ---- Reading ----


@pytest.mark.parametrize("kind", CACHES)
def test_scores_are_dot_products_with_all_keys(kind):
    q, (k, _) = normal(R, H, 5, E), plain(CACHES[kind])
    scores = CACHES[kind].scores(jnp.asarray(q))
    assert scores.dtype == jnp.float32
    want = [[q[r, h] @ k[r, h].T for h in range(H)] for r in range(R)]
    np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CACHES)
def test_averages_are_weighted_sums_of_values(kind):
    weights, (_, v) = np.abs(normal(R, H, 5, LENGTH)), plain(CACHES[kind])
    average = CACHES[kind].average(jnp.asarray(weights), jnp.dtype("float32"))
    assert average.dtype == jnp.float32
    want = [[weights[r, h] @ v[r, h] for h in range(H)] for r in range(R)]
    np.testing.assert_allclose(average, want, rtol=1e-5, atol=1e-5)


def test_reading_in_bfloat16_sums_scores_in_float32():
    q = jnp.asarray(normal(R, H, 5, E), jnp.bfloat16)
    for kind in ("bfloat16", "int8"):
        scores = CACHES[kind].scores(q)
        assert scores.dtype == jnp.float32
        # Inputs are rounded already, and integers up to 127 are exact: products and sums lose nothing that shows.
        k = plain(CACHES[kind])[0]
        np.testing.assert_allclose(
            scores, np.einsum("rhqe,rhke->rhqk", np.asarray(q, np.float64), k), rtol=1e-4, atol=1e-5
        )
        average = CACHES[kind].average(jnp.ones((R, H, 5, LENGTH)), jnp.dtype("bfloat16"))
        assert average.dtype == jnp.bfloat16


# ---- Writing ----


def new_tokens(t, seed=5):
    return KV(jnp.asarray(normal(R, H, t, E, seed=seed)), jnp.asarray(normal(R, H, t, E, seed=seed + 1)))


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("kind", CACHES)
def test_each_row_is_written_from_its_own_start(kind, t):
    # Row 2 begins at the last column: with 3 tokens, two lie beyond the cache and are dropped.
    cache, new, start = CACHES[kind], new_tokens(t), [0, 2, LENGTH - 1]
    got = cache.write(new, jnp.array(start))
    assert (got.k_scale is None) == (got.v_scale is None) == (kind != "int8")
    for old, values, out in zip(*map(jax.tree.leaves, (cache, cache.stored(new), got)), strict=True):
        want = np.array(old)
        for r in range(R):
            for i in range(t):
                if start[r] + i < LENGTH:
                    want[r, :, start[r] + i] = values[r, :, i]
        assert out.dtype == old.dtype
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("kind", CACHES)
def test_a_row_that_begins_beyond_the_cache_is_left_alone(kind):
    cache = CACHES[kind]
    got = cache.write(new_tokens(3), jnp.array([LENGTH, LENGTH + 5, 10**6]))
    for old, out in zip(cache, got, strict=True):
        np.testing.assert_array_equal(out, old)


def test_tokens_are_stored_as_the_cache_holds_them():
    new = new_tokens(3)
    for kind in ("float32", "bfloat16"):
        stored = CACHES[kind].stored(new)
        assert stored.k_scale is None
        assert stored.v_scale is None
        np.testing.assert_array_equal(stored.k, new.k.astype(kind))
        np.testing.assert_array_equal(stored.v, new.v.astype(kind))
    stored = CACHES["int8"].stored(new)
    for x, (values, scale) in ((new.k, (stored.k, stored.k_scale)), (new.v, (stored.v, stored.v_scale))):
        np.testing.assert_array_equal(values, quantise(x)[0])
        np.testing.assert_array_equal(scale, quantise(x)[1])


def test_what_is_written_is_read():
    # Over an int8 cache of other tokens: each number within half a step of its vector's scale.
    cache, new = CACHES["int8"], new_tokens(LENGTH)
    got = jax.jit(KV.write)(cache, new, jnp.zeros(R, jnp.int32))
    for values, x, scale in zip(plain(got), (new.k, new.v), (got.k_scale, got.v_scale), strict=True):
        assert (np.abs(values - np.asarray(x)) <= 0.5001 * np.asarray(scale)[..., None]).all()
    # A score sums E products: it is off by at most half a step times the query's absolute sum.
    q = normal(R, H, 2, E)
    off = np.asarray(got.scores(jnp.asarray(q))) - np.einsum("rhqe,rhke->rhqk", q, new.k)
    bound = 0.5001 * np.abs(q).sum(-1)[..., None] * np.asarray(got.k_scale)[:, :, None] + 1e-6
    assert (np.abs(off) <= bound).all()


# ---- Quantising ----


def test_quantised_numbers_by_hand():
    values, scale = quantise(jnp.array([[254.0, -254.0, 3.0, -1.1], [0.0, 0.0, 0.0, 0.0], [-0.5, 0.26, 0.0, 0.001]]))
    # Steps of 2: 3 is halfway and goes to the even 2, -1.1 to -1. Steps of 1/254: 0.26 is 66.04, 0.001 0.25.
    assert values.tolist() == [[127, -127, 2, -1], [0, 0, 0, 0], [-127, 66, 0, 0]]
    np.testing.assert_allclose(scale, [2.0, 0.0, 1 / 254], rtol=1e-6)
    assert values.dtype == jnp.int8
    assert scale.dtype == jnp.float32


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_a_quantised_number_is_off_by_half_a_step_at_most(size):
    x = normal(200, 3, 16, seed=11)
    x[:50] **= 3  # some vectors with a few large numbers
    x *= np.float32(size)
    x[5] = 0
    x[6, :, 1:] = 0
    values, scale = (np.asarray(a, np.float64) for a in quantise(jnp.asarray(x)))
    assert np.abs(values).max() == 127
    assert (np.abs(values * scale[..., None] - x) <= scale[..., None] * (0.5 + 1e-4)).all()
    largest = np.abs(x).max(-1)
    found = np.take_along_axis(np.abs(values), np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    normal_scale = largest > 1e-35  # smaller ones have no scale in float32
    assert (found[normal_scale] == 127).all()  # all of the range is used
    assert (values[x == 0] == 0).all()
    assert (scale[5] == 0).all()


def test_quantising_takes_bfloat16():
    x = jnp.asarray(normal(4, 8), jnp.bfloat16)
    for got, want in zip(quantise(x), quantise(x.astype(jnp.float32)), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_keys_stay_visible(bad):
    # int8 holds no NaN, but the scale does: the sampler must notice a rollout that broke.
    new = new_tokens(2)
    got = CACHES["int8"].write(new._replace(k=new.k.at[1, 0, 1, 2].set(bad)), jnp.array([0, 0, 0]))
    scores = np.asarray(got.scores(jnp.ones((R, H, 1, E))))
    assert np.argwhere(~np.isfinite(scores)).tolist() == [[1, 0, 0, 1]]


# ---- Filling by the policy ----

VOCAB = 11
CONFIG = ModelConfig(
    num_layers=2, width=12, num_heads=4, num_kv_heads=2, head_dim=4, mlp_width=20, qkv_bias=True, qk_norm=True
)
P, COLUMNS = 5, 9
STEP = jax.jit(partial(decode_step, config=CONFIG))
APPEND = jax.jit(partial(append, config=CONFIG))
PROMPT = jax.jit(partial(prompt_kv, config=CONFIG))


@pytest.fixture(scope="module")
def params():
    """Weights large enough that attention is far from uniform and a wrong position shows."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(init_params, CONFIG, VOCAB), jax.random.key(0))

    def fill(path, leaf):
        return (float(path[-1].key == "scale") + 0.35 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def old_cache(kind="float32"):
    """What earlier rollouts left in the columns: nobody may see it."""
    size = (2, 2, P, CONFIG.num_kv_heads, COLUMNS, CONFIG.head_dim)  # layers, keys and values
    layers = [KV(*map(jnp.asarray, kv)) for kv in 3 * normal(*size, seed=20)]
    if kind == "int8":
        pairs = [(quantise(k), quantise(v)) for k, v, *_ in layers]
        layers = [KV(k, v, k_scale, v_scale) for (k, k_scale), (v, v_scale) in pairs]
    return tuple(layers)


def steps(params, tokens_PE, position_P, layers):
    """E decode steps; the last one's logits, too."""
    logits = None
    for i in range(tokens_PE.shape[1]):
        logits, layers = STEP(params, tokens_PE[:, i], position_P + i, layers)
    return logits, layers


TOKENS = np.random.default_rng(4).integers(0, VOCAB, (P, COLUMNS)).astype(np.int32)


def assert_close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def begun(params, position_P, kind="float32"):
    """Caches that hold a row's first tokens, by decode steps that leave a row alone from its position on."""
    layers = old_cache(kind)
    for i in range(max(position_P)):
        _, layers = STEP(params, TOKENS[:, i], np.where(i < position_P, i, COLUMNS), layers)
    return layers


def test_appending_equals_single_steps(params):
    # Rows at positions of their own; the last tokens of row 3 lie beyond the cache, row 4 is left alone.
    position_P = np.array([0, 2, 5, 7, COLUMNS])
    layers = begun(params, position_P)
    tokens = np.random.default_rng(6).integers(0, VOCAB, (P, 4)).astype(np.int32)
    _, want = steps(params, tokens, position_P, layers)
    got = APPEND(params, tokens, position_P, layers)
    assert_close(got, want)
    for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(layers), strict=True):
        assert new.shape == old.shape
        np.testing.assert_array_equal(new[4], old[4])
        for r, at in enumerate(position_P[:4]):  # other columns, before and after, are as they were
            written = (np.arange(COLUMNS) >= at) & (np.arange(COLUMNS) < at + 4)
            np.testing.assert_array_equal(new[r][:, ~written], old[r][:, ~written])
            assert not (np.asarray(new[r][:, written]) == np.asarray(old[r][:, written])).any()


def test_appending_to_an_int8_cache_equals_single_steps(params):
    position_P = np.array([0, 2, 5, 7, COLUMNS])
    layers = begun(params, position_P, "int8")
    tokens = np.random.default_rng(6).integers(0, VOCAB, (P, 4)).astype(np.int32)
    _, want = steps(params, tokens, position_P, layers)
    got = APPEND(params, tokens, position_P, layers)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if x.dtype == jnp.int8:  # a number that is halfway may go either way
            off = np.abs(np.asarray(x, int) - np.asarray(y, int))
            assert off.max() <= 1
            assert off.sum() <= 5
        else:
            np.testing.assert_allclose(x, y, rtol=1e-4)


def test_what_was_appended_is_what_decoding_sees(params):
    # Prompt, given tokens, and one step: the logits are those of one pass over the whole row.
    position_P = np.array([0, 1, 2, 3, 4])
    given = TOKENS[np.arange(P)[:, None], position_P[:, None] + np.arange(3)]
    layers = APPEND(params, given, position_P, begun(params, position_P))
    at = position_P + 3
    logits, _ = STEP(params, TOKENS[np.arange(P), at], at, layers)
    columns = np.arange(COLUMNS)
    causal = (columns[:, None] >= columns[None])[None]
    positions = np.broadcast_to(columns, TOKENS.shape)
    hidden, _ = jax.jit(Decoder(CONFIG, VOCAB).apply)({"params": params}, TOKENS, positions, causal)  # type: ignore[misc]
    np.testing.assert_allclose(logits, logits_of(hidden, params, CONFIG)[np.arange(P), at], rtol=1e-4, atol=1e-5)


def test_a_prompt_in_one_run_equals_single_steps(params):
    length_P = np.array([0, 1, 4, 6, 5])
    got = PROMPT(params, TOKENS[:, :6], length_P)
    _, want = steps(params, TOKENS[:, :6], np.zeros(P, int), old_cache())
    valid = np.arange(6) < length_P[:, None]
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == (P, CONFIG.num_kv_heads, 6, CONFIG.head_dim)
        mask = valid[:, None, :, None]
        np.testing.assert_allclose(x, np.where(mask, np.asarray(y)[:, :, :6], 0.0), rtol=1e-5, atol=1e-5)
        assert (np.asarray(x)[np.broadcast_to(~mask, x.shape)] == 0).all()
        assert (np.asarray(x)[np.broadcast_to(mask, x.shape)] != 0).all()


def test_what_stands_beyond_a_prompt_is_not_read(params):
    length_P = np.array([0, 1, 4, 6, 5])
    other = np.where(np.arange(6) < length_P[:, None], TOKENS[:, :6], (TOKENS[:, :6] + 3) % VOCAB)
    assert (other != TOKENS[:, :6]).sum() == 6 + 5 + 2 + 0 + 1
    want, got = PROMPT(params, TOKENS[:, :6], length_P), PROMPT(params, other, length_P)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_step_does_not_see_later_columns(params):
    position_P = np.array([0, 2, 5, 7, 8])
    want, _ = STEP(params, TOKENS[:, 0], position_P, begun(params, position_P))
    layers = begun(params, position_P)
    later = (np.arange(COLUMNS) > position_P[:, None])[:, None, :, None]
    layers = jax.tree.map(lambda x: jnp.where(later, -2 * x + 1, x), layers)
    got, _ = STEP(params, TOKENS[:, 0], position_P, layers)
    np.testing.assert_array_equal(got, want)
