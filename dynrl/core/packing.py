"""Writing selected groups into a buffer of fixed capacity, without a shape that depends on the data.

Donate the buffer when jitting: the scatter then updates it in place, at the cost of the rows it writes. For a
buffer sharded over devices, call these inside shard_map, one buffer per shard: a global scatter would gather all
rows onto every device.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dynrl.types import Array


def _check_rows(buffer: Any, rows: Any, num_rows: int) -> int:
    """Raises a ValueError that names the leaf unless every row fits; returns the capacity."""
    buffer_leaves, treedef = jax.tree_util.tree_flatten_with_path(buffer)
    if jax.tree.structure(rows) != treedef:
        raise ValueError(f"rows have the structure {jax.tree.structure(rows)}, the buffer has {treedef}")
    capacities = {leaf.shape[0] for _, leaf in buffer_leaves if leaf.ndim}
    if len(capacities) != 1 or not all(leaf.ndim for _, leaf in buffer_leaves):
        raise ValueError(f"the buffer's arrays need one common leading axis [C, ...]; found {sorted(capacities)}")
    for (path, leaf), row in zip(buffer_leaves, jax.tree.leaves(rows), strict=True):
        if row.shape != (num_rows, *leaf.shape[1:]) or row.dtype != leaf.dtype:
            raise ValueError(
                f"rows{jax.tree_util.keystr(path)} is {row.dtype}{list(row.shape)}; for {num_rows} rows the buffer "
                f"takes {leaf.dtype}{[num_rows, *leaf.shape[1:]]}"
            )
    return capacities.pop()


def scatter_rows(buffer: Any, slot_P: Array, rows: Any) -> Any:
    """Writes rows[i] to buffer[slot_P[i]], and drops the rows whose slot is outside of the buffer.

    Args:
      buffer: pytree of arrays [C, ...].
      slot_P: int; a slot below 0 or from C on drops its row. Slots inside must differ, or any of them may win.
      rows: pytree like `buffer`, of arrays [P, ...] with the same dtypes.

    Returns:
      The buffer with the rows written.

    Raises:
      ValueError: at trace time, when structures, shapes or dtypes do not fit; names the leaf.
    """
    slot_P = jnp.asarray(slot_P)
    if slot_P.ndim != 1:
        raise ValueError(f"slot_P must have one axis, got shape {slot_P.shape}")
    capacity = _check_rows(buffer, rows, slot_P.shape[0])
    inside_P = (slot_P >= 0) & (slot_P < capacity)
    # Every dropped row gets its own slot outside, which keeps the promise that slots are unique, and none is
    # negative, which would count from the end.
    slot_P = jnp.where(inside_P, slot_P, capacity + jnp.arange(slot_P.shape[0], dtype=slot_P.dtype))
    return jax.tree.map(
        lambda leaf, row: jnp.asarray(leaf).at[slot_P].set(row, mode="drop", unique_indices=True), buffer, rows
    )


def scatter_kept(buffer: Any, count: Array, rows: Any, keep_P: Array) -> tuple[Any, Array, Array]:
    """Appends the kept groups to the buffer, in order.

    Args:
      buffer: pytree of arrays [C, ...]; the first `count` entries are taken, the others may hold anything.
      count: int32 scalar, entries taken, from 0 to C.
      rows: pytree like `buffer`, of arrays [P, ...] with the same dtypes; anything where not kept.
      keep_P: bool, the groups to append.

    Returns:
      (buffer, count, overflow): the buffer, its new count (int32), and how many kept groups did not fit (int32):
      the last True entries of `keep_P`. Entries from the new count on are as they were.

    Raises:
      ValueError: at trace time, when structures, shapes or dtypes do not fit; names the leaf.
    """
    keep_P, count = jnp.asarray(keep_P, bool), jnp.asarray(count, jnp.int32)
    if keep_P.ndim != 1 or count.ndim != 0:
        raise ValueError(f"keep_P must have one axis and count none, got {keep_P.shape} and {count.shape}")
    capacity = _check_rows(buffer, rows, keep_P.shape[0])
    slot_P = count + jnp.cumsum(keep_P, dtype=jnp.int32) - 1
    wanted = count + keep_P.sum(dtype=jnp.int32)
    buffer = scatter_rows(buffer, jnp.where(keep_P, slot_P, capacity), rows)
    return buffer, jnp.minimum(wanted, capacity), jnp.maximum(wanted - capacity, 0)
