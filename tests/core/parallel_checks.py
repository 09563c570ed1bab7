"""Run by test_parallel.py in a process with 8 emulated devices; prints the name of each check that passed."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dynrl.core import group_advantages, group_stats, make_filter, policy_loss, scatter_kept, token_logprobs

D = 8
AGGREGATIONS = ({}, {"aggregation": "sequence_mean"}, {"aggregation": "constant", "constant_length": 5})
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Auto,))


def make_batch():
    """16 rows, two a device; device 3 has no token, and what is masked out is garbage."""
    rng = np.random.default_rng(0)
    logp, old, behavior = (rng.normal(size=(16, 6)).astype(np.float32) * 0.3 - 1 for _ in range(3))
    mask = rng.random((16, 6)) < 0.6
    mask[6:8] = False
    logp[~mask] = 1e6  # finite: the parameter it is multiplied by has a gradient outside of policy_loss
    old[~mask] = behavior[~mask] = np.nan
    return logp, old, behavior, rng.normal(size=16).astype(np.float32), mask


def mean_loss(scale, batch, options, axis_name=None):
    """The global mean loss of a policy with one replicated parameter; also the loss_sum's ingredients."""
    loss_sum, weight_sum, metrics = policy_loss(batch[0] * scale, *batch[1:], axis_name=axis_name, **options)
    return loss_sum / weight_sum, (loss_sum, weight_sum, metrics)


def whole_batch(scale, batch, options):
    """What one device computes: ((loss, parts), gradient)."""
    return jax.jit(jax.value_and_grad(functools.partial(mean_loss, options=options), has_aux=True))(scale, batch)


def assert_close(actual, expected):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


def check_policy_loss_shard_map():
    batch, scale = make_batch(), jnp.float32(1.1)
    for options in AGGREGATIONS:
        expected = whole_batch(scale, batch, options)
        sharded = functools.partial(mean_loss, options=options, axis_name="data")
        shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        # The gradient may be taken outside of shard_map or inside: a replicated parameter's gradient is summed.
        outside = jax.jit(jax.value_and_grad(shard_map(sharded), has_aux=True))
        assert_close(outside(scale, batch), expected)
        inside = jax.jit(shard_map(jax.value_and_grad(sharded, has_aux=True)))
        assert_close(inside(scale, batch), expected)


def check_policy_loss_pmap():
    batch, scale = make_batch(), jnp.float32(1.1)
    split = [x.reshape(D, -1, *x.shape[1:]) for x in batch]
    for options in AGGREGATIONS[:2]:
        expected, grad = whole_batch(scale, batch, options)

        def step(scale, batch, options=options):
            return mean_loss(scale, batch, options, axis_name="data")

        def grad_step(scale, batch, options=options):
            # pmap does not track what is replicated: the psum's gradient is a psum again, 8 times the local gradient.
            grad = jax.grad(lambda scale: mean_loss(scale, batch, options, axis_name="data")[0])(scale)
            return jax.lax.pmean(grad, "data")

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            actual = jax.pmap(step, axis_name="data", in_axes=(None, 0))(scale, split)
            actual_grad = jax.pmap(grad_step, axis_name="data", in_axes=(None, 0))(scale, split)
        for device in range(D):
            assert_close(jax.tree.map(lambda x, device=device: x[device], actual), expected)
            assert_close(actual_grad[device], grad)


def check_policy_loss_vmap_axis():
    batch = make_batch()
    split = [x.reshape(D, -1, *x.shape[1:]) for x in batch]
    actual = jax.jit(jax.vmap(lambda *batch: policy_loss(*batch, axis_name="data")[0], axis_name="data"))(*split)
    assert_close(actual, np.full(D, jax.jit(policy_loss)(*batch)[0]))


def make_tokens():
    rng = np.random.default_rng(0)
    hidden, unembed = rng.normal(size=(16, 6, 8)).astype(np.float32), rng.normal(size=(8, 32)).astype(np.float32)
    return hidden, unembed, rng.integers(0, 32, (16, 6)), rng.normal(size=(16, 6)).astype(np.float32)


def weighted_logp(hidden, unembed, temperature, targets, weights, chunk_size):
    return (token_logprobs(hidden, unembed, targets, temperature=temperature, chunk_size=chunk_size)[0] * weights).sum()


def check_token_logprobs_shard_map():
    hidden, unembed, targets, weights = make_tokens()
    arguments = (hidden, unembed, jnp.float32(0.8), targets, weights)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    for chunk_size in (None, 5):
        loss = functools.partial(weighted_logp, chunk_size=chunk_size)
        expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arguments)

        def total(*arguments, loss=loss):
            return jax.lax.psum(loss(*arguments), "data")

        outside = jax.value_and_grad(jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P()), argnums=(0, 1, 2))
        assert_close(jax.jit(outside)(*arguments), expected)
        inside = jax.shard_map(
            jax.value_and_grad(total, argnums=(0, 1, 2)),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), (P("data"), P(), P())),
        )
        assert_close(jax.jit(inside)(*arguments), expected)


def check_token_logprobs_jit_moves_no_tokens():
    """Under jit with rows sharded over the data axis, chunks must not gather the hidden states."""
    hidden, unembed, targets, weights = make_tokens()
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    grad = jax.grad(functools.partial(weighted_logp, chunk_size=48), argnums=(0, 1))
    shardings = {"in_shardings": (rows, whole, whole, rows, rows), "out_shardings": (rows, whole)}
    arguments = (hidden, unembed, jnp.float32(0.8), targets, weights)
    jitted = jax.jit(grad, **shardings)
    assert_close(jitted(*arguments), jax.jit(grad)(*arguments))
    text = jitted.lower(*arguments).compile().as_text()
    assert text is not None
    collectives = re.findall(r"= \S+ (all-gather|all-to-all|collective-permute|all-reduce)\(", text)
    assert set(collectives) == {"all-reduce"}, collectives


def check_groups_shard_map():
    """Filter, advantages and backfill, each shard for itself: bitwise as one shard after the other."""
    rng = np.random.default_rng(0)
    rewards, live = rng.integers(0, 2, (32, 4)).astype(np.float32), rng.random((32, 4)) < 0.8
    buffer = np.full((16, 4), -1, np.float32)

    def shard(rewards, live, buffer):
        keep = make_filter("has_signal")(group_stats(rewards, live), rewards, live)
        advantages = group_advantages(rewards, live, estimator="rloo")
        buffer, count, overflow = scatter_kept(buffer, 0, advantages, keep)
        return advantages, buffer, count[None], overflow[None]

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    actual = jax.jit(sharded)(rewards, live, buffer)
    parts = [jax.jit(shard)(*(x.reshape(D, -1, 4)[i] for x in (rewards, live, buffer))) for i in range(D)]
    for a, b in zip(actual, zip(*parts, strict=True), strict=True):
        np.testing.assert_array_equal(a, np.concatenate([np.asarray(x) for x in b]))


if __name__ == "__main__":
    assert jax.device_count() == D
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print("passed", name, flush=True)
