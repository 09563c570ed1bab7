import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import soft_overlong_penalty

LENGTHS = np.array([[0, 1, 16, 17], [18, 20, 21, 1000]], np.int32)
# At most 20 tokens, the last 4 of them punished: 16 and below 0, 17 -1/4, 18 -1/2, 20 and beyond -1.
EXPECTED = [[0, 0, 0, -0.25], [-0.5, -1, -1, -1]]


def test_by_hand():
    on_host = soft_overlong_penalty(LENGTHS, max_tokens=20, cache_tokens=4)
    assert isinstance(on_host, np.ndarray)
    assert on_host.dtype == np.float32
    np.testing.assert_array_equal(on_host, EXPECTED)
    assert not np.signbit(on_host[0, :3]).any()  # 0, not -0
    on_device = soft_overlong_penalty(jnp.asarray(LENGTHS), max_tokens=20, cache_tokens=4)
    assert isinstance(on_device, jax.Array)
    assert on_device.dtype == jnp.float32
    np.testing.assert_array_equal(on_device, EXPECTED)
    jitted = jax.jit(lambda n: soft_overlong_penalty(n, max_tokens=20, cache_tokens=4))
    np.testing.assert_array_equal(jitted(LENGTHS), EXPECTED)
    np.testing.assert_array_equal(jax.vmap(jitted)(LENGTHS), EXPECTED)


def test_the_whole_length_may_be_the_cache():
    got = soft_overlong_penalty(np.arange(6), max_tokens=4, cache_tokens=4)
    np.testing.assert_array_equal(got, [0, -0.25, -0.5, -0.75, -1, -1])
    unsigned = soft_overlong_penalty(np.arange(6, dtype=np.uint32), max_tokens=4, cache_tokens=4)
    np.testing.assert_array_equal(unsigned, got)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0, "cache_tokens": 1}, "max_tokens must be at least 1"),
        ({"max_tokens": 8, "cache_tokens": 0}, "cache_tokens must be at least 1"),
        ({"max_tokens": 8, "cache_tokens": 9}, "at most max_tokens, got 9 and 8"),
        ({"max_tokens": 8.0, "cache_tokens": 1}, "max_tokens must be an integer"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        soft_overlong_penalty(LENGTHS, **options)
