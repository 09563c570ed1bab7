import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath

from dynrl.config import CheckpointConfig
from dynrl.models import sharding
from dynrl.training.checkpoint import Checkpointer

DOCUMENT = {"step": 3, "name": "run", "rate": 0.1, "none": None, "list": [1, [2.5, "x"]], "deep": {"7": {"a": True}}}


def make_arrays(mesh, seed=0):
    """Weights, optimizer state and buffer rows as a run has them: sharded, of several dtypes, scalars among them."""
    rng = np.random.default_rng(seed)
    params = {"embedding": rng.normal(size=(12, 4)).astype(np.float32), "o": {"kernel": rng.normal(size=(8, 4))}}
    params = jax.tree.map(lambda x: x.astype(np.float32), params)
    opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = jax.tree.map(lambda x: np.asarray(x) + x.dtype.type(seed), opt.init(jax.tree.map(jnp.asarray, params)))
    tree = {"params": params, "opt_state": opt_state, "updates": np.int32(5 + seed)}
    placed = jax.tree.map(sharding.place, tree, sharding.param_shardings(tree, mesh))
    rows = {"live": rng.random((8, 3)) < 0.5, "tokens": rng.integers(0, 9, (8, 3)).astype(np.int32)}
    rows["logp"] = np.where(rows["live"], np.nan, -1.5).astype(np.float32)
    return placed | {"buffer": jax.tree.map(lambda x: sharding.place(x, sharding.rows(mesh)), rows)}


def save(directory, arrays, step=3, keep=2):
    checkpointer = Checkpointer(directory, CheckpointConfig(max_to_keep=keep))
    checkpointer.save(step, DOCUMENT | {"step": step}, arrays=arrays)
    checkpointer.close()


def assert_restored(got, want, like):
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert jax.tree.structure(got) == jax.tree.structure(like)  # optax's named tuples, not lists
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), got) == jax.tree.map(lambda x: (x.dtype, x.sharding), like)


@pytest.mark.parametrize("other", ["mesh222", "mesh8", "mesh1"])
def test_arrays_come_back_bitwise_on_any_mesh(other, mesh222, tmp_path, request):
    directory = epath.Path(tmp_path) / "checkpoints"
    arrays = make_arrays(mesh222)
    save(directory, arrays)
    checkpointer = Checkpointer(directory, CheckpointConfig())
    assert checkpointer.latest == 3
    assert checkpointer.restore_document(3) == DOCUMENT
    like = make_arrays(request.getfixturevalue(other), seed=1)
    assert_restored(checkpointer.restore_arrays(3, like), arrays, like)
    checkpointer.close()


def test_arrays_are_copied_before_save_returns(mesh1, tmp_path):
    # The next train step donates what was just saved.
    arrays = make_arrays(mesh1)
    want = jax.tree.map(lambda x: np.array(x), arrays)
    checkpointer = Checkpointer(epath.Path(tmp_path) / "checkpoints", CheckpointConfig())
    checkpointer.save(1, DOCUMENT, arrays=arrays)
    jax.tree.map(lambda x: x.delete(), arrays)
    checkpointer.close()
    checkpointer = Checkpointer(epath.Path(tmp_path) / "checkpoints", CheckpointConfig())
    like = make_arrays(mesh1, seed=1)
    assert_restored(checkpointer.restore_arrays(1, like), want, like)
    checkpointer.close()


def test_an_empty_directory_holds_nothing(tmp_path):
    checkpointer = Checkpointer(epath.Path(tmp_path) / "new" / "checkpoints", CheckpointConfig())
    assert checkpointer.latest is None
    checkpointer.close()


def test_what_a_killed_writer_left_is_ignored(mesh1, tmp_path):
    directory = epath.Path(tmp_path) / "checkpoints"
    arrays = make_arrays(mesh1)
    save(directory, arrays)
    # A writer that was killed before the rename: the finished checkpoint's files, half of them, under its name.
    half = directory / "7.orbax-checkpoint-tmp"
    shutil.copytree(directory / "3", half)
    (half / "document").rmtree()
    (directory / "7.orbax-checkpoint-tmp-1234" / "arrays").mkdir(parents=True)
    checkpointer = Checkpointer(directory, CheckpointConfig())
    assert checkpointer.latest == 3
    like = make_arrays(mesh1, seed=1)
    assert_restored(checkpointer.restore_arrays(3, like), arrays, like)
    checkpointer.save(7, DOCUMENT, arrays=make_arrays(mesh1, seed=2))  # its step can be written again
    checkpointer.close()
    checkpointer = Checkpointer(directory, CheckpointConfig())
    assert checkpointer.latest == 7
    assert_restored(checkpointer.restore_arrays(7, like), make_arrays(mesh1, seed=2), like)
    checkpointer.close()


def test_the_newest_stay(mesh1, tmp_path):
    directory = epath.Path(tmp_path) / "checkpoints"
    checkpointer = Checkpointer(directory, CheckpointConfig(max_to_keep=2))
    for step in (2, 4, 6):
        checkpointer.save(step, {"step": step}, arrays={"x": jnp.full(2, step)})
    checkpointer.close()
    assert sorted(p.name for p in directory.iterdir()) == ["4", "6"]
    checkpointer = Checkpointer(directory, CheckpointConfig(max_to_keep=2))
    assert [checkpointer.restore_document(s)["step"] for s in (4, 6)] == [4, 6]
    checkpointer.close()
