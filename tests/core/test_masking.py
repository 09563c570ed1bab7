import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import completion_mask, masked_sum_count, safe_divide


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_masked_sum_count_ignores_what_is_masked_out(wrap):
    x = jnp.array([[1.0, jnp.nan, 2.0], [jnp.inf, 4.0, -jnp.inf]])
    mask = jnp.array([[True, False, True], [False, True, False]])
    total, count = wrap(masked_sum_count)(x, mask)
    assert (float(total), float(count)) == (7.0, 3.0)  # 1 + 2 + 4
    rows = wrap(lambda x, mask: masked_sum_count(x, mask, axis=1))(x, mask)
    np.testing.assert_array_equal(rows[0], [3, 4])
    np.testing.assert_array_equal(rows[1], [2, 1])


def test_masked_sum_gradient_is_the_mask():
    x, mask = jnp.array([1.0, jnp.nan, jnp.inf]), jnp.array([True, False, False])
    np.testing.assert_array_equal(jax.grad(lambda x: masked_sum_count(x, mask)[0])(x), [1, 0, 0])


def test_masked_sum_accumulates_in_float32():
    # 3,000 ones: bfloat16 counts no further than 256.
    total, count = masked_sum_count(jnp.ones(3000, jnp.bfloat16), jnp.ones(3000, bool))
    assert (total.dtype, float(total), float(count)) == (jnp.float32, 3000.0, 3000.0)
    assert masked_sum_count(jnp.array([True, True, False]), jnp.array([True, True, True]))[0] == 2.0


def test_masked_sum_count_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3,\)"):
        masked_sum_count(jnp.ones((2, 3)), jnp.ones(3, bool))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_safe_divide_and_its_gradients(wrap):
    numerator, denominator = jnp.array([6.0, 5.0, 0.0]), jnp.array([4.0, 0.0, 0.0])
    np.testing.assert_array_equal(wrap(safe_divide)(numerator, denominator), [1.5, 0, 0])
    grads = wrap(jax.grad(lambda n, d: safe_divide(n, d).sum(), argnums=(0, 1)))(numerator, denominator)
    # d(n/d)/dn = 1/4, d(n/d)/dd = -6/16
    np.testing.assert_allclose(grads, [[0.25, 0, 0], [-0.375, 0, 0]])


def test_completion_mask():
    length = jnp.array([[0, 2], [3, 5]])
    expected = [[[0, 0, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]]
    np.testing.assert_array_equal(completion_mask(length, 3), np.array(expected, bool))
    np.testing.assert_array_equal(jax.vmap(lambda n: completion_mask(n, 3))(length), np.array(expected, bool))
    assert completion_mask(jnp.array([-1]), 2).tolist() == [[False, False]]
