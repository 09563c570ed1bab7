import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.core import scatter_kept, scatter_rows

jitted_rows, jitted_kept = jax.jit(scatter_rows), jax.jit(scatter_kept)
FEW = settings(deadline=None, max_examples=40)
SIZES = st.sampled_from([(1, 1), (3, 5), (8, 4), (6, 6)])  # (capacity, groups): few shapes, so few compilations


def make(capacity, groups):
    """A buffer full of -1 and rows that name themselves."""
    buffer = {"tokens": jnp.full((capacity, 2, 3), -1), "length": (jnp.full(capacity, -1.0),)}
    index = jnp.arange(groups)
    rows = {"tokens": jnp.broadcast_to(index[:, None, None], (groups, 2, 3)), "length": (index.astype(jnp.float32),)}
    return buffer, rows


def contents(buffer):
    """The row that lies in each slot; every leaf must agree."""
    tokens, length = np.asarray(buffer["tokens"]), np.asarray(buffer["length"][0])
    np.testing.assert_array_equal(tokens, np.broadcast_to(length[:, None, None], tokens.shape))
    return length.tolist()


@FEW
@given(st.data(), SIZES)
def test_scatter_kept_is_an_append(data, sizes):
    capacity, groups = sizes
    taken = data.draw(st.integers(0, capacity), label="count")
    keep = data.draw(st.lists(st.booleans(), min_size=groups, max_size=groups), label="keep")
    buffer, rows = make(capacity, groups)
    kept = [i for i in range(groups) if keep[i]]
    expected = ([-1.0] * taken + kept)[:capacity]
    for function in (scatter_kept, jitted_kept) if sizes == (3, 5) else (jitted_kept,):
        result, count, overflow = function(buffer, jnp.int32(taken), rows, np.array(keep))
        assert contents(result) == expected + [-1.0] * (capacity - len(expected))
        assert (int(count), int(overflow)) == (len(expected), taken + len(kept) - len(expected))
        assert count.dtype == overflow.dtype == jnp.int32


@FEW
@given(st.data(), SIZES)
def test_two_appends_equal_one(data, sizes):
    capacity, groups = sizes
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=groups, max_size=groups)))
    split = np.arange(groups) < data.draw(st.integers(0, groups))
    buffer, rows = make(capacity, groups)
    whole, count, overflow = jitted_kept(buffer, jnp.int32(0), rows, keep)
    half, first_count, first_overflow = jitted_kept(buffer, jnp.int32(0), rows, keep & split)
    half, last_count, last_overflow = jitted_kept(half, first_count, rows, keep & ~split)
    assert contents(half) == contents(whole)
    assert (last_count, first_overflow + last_overflow) == (count, overflow)


@FEW
@given(st.data(), SIZES)
def test_scatter_rows(data, sizes):
    capacity, groups = sizes
    slots = data.draw(
        st.lists(
            st.integers(-3, capacity + 3),
            min_size=groups,
            max_size=groups,
            unique_by=lambda s: s if 0 <= s < capacity else object(),
        )
    )
    buffer, rows = make(capacity, groups)
    expected = [-1.0] * capacity
    for row, slot in enumerate(slots):
        if 0 <= slot < capacity:
            expected[slot] = float(row)
    for function in (scatter_rows, jitted_rows) if sizes == (3, 5) else (jitted_rows,):
        assert contents(function(buffer, np.array(slots, np.int32), rows)) == expected


def test_everything_dropped_leaves_the_buffer():
    buffer, rows = make(3, 5)
    result, count, overflow = jitted_kept(buffer, jnp.int32(2), rows, np.zeros(5, bool))
    assert (contents(result), int(count), int(overflow)) == ([-1.0] * 3, 2, 0)


def test_dropped_rows_may_hold_anything():
    buffer, rows = jnp.zeros(2), jnp.array([jnp.nan, 1.0, jnp.inf])
    result, _, _ = jitted_kept(buffer, jnp.int32(0), rows, np.array([False, True, False]))
    assert result.tolist() == [1.0, 0.0]


def test_donated_buffer_is_updated_in_place():
    buffer, rows = jnp.zeros((8, 1024)), jnp.ones((4, 1024))
    compiled = jax.jit(scatter_kept, donate_argnums=0).lower(buffer, jnp.int32(0), rows, jnp.ones(4, bool)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= buffer.nbytes
    assert memory.temp_size_in_bytes < rows.nbytes  # neither the buffer nor the rows are copied


def test_vmap():
    buffer, rows = make(3, 5)
    keeps = np.array([[True, False, True, False, False], [True] * 5])
    result, count, overflow = jax.vmap(scatter_kept, in_axes=(None, None, None, 0))(buffer, jnp.int32(0), rows, keeps)
    assert [contents(jax.tree.map(lambda x, i=i: x[i], result)) for i in (0, 1)] == [[0, 2, -1], [0, 1, 2]]
    assert (count.tolist(), overflow.tolist()) == ([2, 3], [0, 2])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a": jnp.zeros((2, 3))}, "structure"),
        ({"a": jnp.zeros((2, 4)), "b": jnp.zeros(2)}, r"rows\['a'\] is float32\[2, 4\]; for 2 rows .* float32\[2, 3\]"),
        ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(2, int)}, r"rows\['b'\] is int32\[2\]"),
        ({"a": jnp.zeros((3, 3)), "b": jnp.zeros(3)}, r"rows\['a'\]"),
    ],
)
def test_rows_that_do_not_fit(rows, message):
    buffer = {"a": jnp.zeros((4, 3)), "b": jnp.zeros(4)}
    with pytest.raises(ValueError, match=message):
        scatter_kept(buffer, jnp.int32(0), rows, jnp.ones(2, bool))
    with pytest.raises(ValueError, match=message):
        scatter_rows(buffer, jnp.arange(2), rows)


def test_wrong_axes():
    with pytest.raises(ValueError, match="common leading axis"):
        scatter_rows({"a": jnp.zeros(3), "b": jnp.zeros(4)}, jnp.arange(1), {"a": jnp.zeros(1), "b": jnp.zeros(1)})
    with pytest.raises(ValueError, match="keep_P must have one axis"):
        scatter_kept(jnp.zeros(3), jnp.int32(0), jnp.zeros(2), jnp.ones((2, 1), bool))
    with pytest.raises(ValueError, match="slot_P must have one axis"):
        scatter_rows(jnp.zeros(3), jnp.int32(0), jnp.zeros(2))
