"""Run by test_parallel.py in a process with 8 emulated devices; prints the name of each check that passed.

Many cases share a program, because compiling is what takes the time. Eager calls are compared in the other tests.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_reference import OPTIONS, arguments
from loss_reference import make_batch as make_loss_batch

from dynrl.core import (
    ESTIMATORS,
    group_advantages,
    group_stats,
    make_filter,
    policy_loss,
    scatter_kept,
    soft_overlong_penalty,
    token_logprobs,
)

D = 8
CASES = ("ppo", "ppo_sequence_k1", "ppo_dual_k3_entropy", "gspo_constant_dual", "gspo_token_k2", "cispo_k2_entropy")
mesh = jax.make_mesh((D,), ("data",), axis_types=(AxisType.Auto,))


def split(tree):
    """A leading axis of devices."""
    return jax.tree.map(lambda x: x.reshape(D, -1, *x.shape[1:]), tree)


def pmap(function, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.pmap(function, axis_name="data", **options)


def assert_close(actual, expected):
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


def make_batch():
    """16 rows, two a device; device 3 has no token, and what is masked out is garbage."""
    batch = make_loss_batch(0, (16, 6))
    batch["mask"][6:8] = False
    outside = ~batch["mask"]
    for name in ("logp", "entropy"):  # finite: the parameter they are multiplied by has a gradient outside of the loss
        batch[name][outside] = 1e6
    for name in ("old", "behavior", "ref"):
        batch[name][outside] = np.nan
    return {name: x.astype(np.float32) if x.dtype != bool else x for name, x in batch.items()}


def losses(scale, batch, axis_name=None):
    """The global mean loss of every case, under a policy with one replicated parameter; and its ingredients."""
    batch = batch | {"logp": batch["logp"] * scale, "entropy": batch["entropy"] * scale}
    means, parts = {}, {}
    for name in CASES:
        arrays, options = arguments(batch, OPTIONS[name])
        loss_sum, weight_sum, metrics = policy_loss(*arrays, axis_name=axis_name, **options)
        means[name], parts[name] = loss_sum / weight_sum, (loss_sum, weight_sum, metrics)
    return means, parts


def value_and_grads(scale, batch, axis_name=None):
    """((means, parts), d means / d scale), each by case; one backward pass per case."""
    means, pullback, parts = jax.vjp(lambda scale: losses(scale, batch, axis_name), scale, has_aux=True)
    zeros = jax.tree.map(jnp.zeros_like, means)
    grads = {name: pullback(zeros | {name: jnp.ones_like(mean)})[0] for name, mean in means.items()}
    return (means, parts), grads


def check_policy_loss():
    batch, scale = make_batch(), jnp.float32(1.1)
    expected, expected_grads = jax.jit(value_and_grads)(scale, batch)
    shard_map = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    sharded = functools.partial(losses, axis_name="data")
    # The gradient may be taken outside of shard_map or inside: a replicated parameter's gradient is summed.
    outside = jax.jit(jax.jacrev(shard_map(lambda scale, batch: sharded(scale, batch)[0])))
    assert_close(outside(scale, batch), expected_grads)
    inside = jax.jit(shard_map(functools.partial(value_and_grads, axis_name="data")))
    assert_close(inside(scale, batch), (expected, expected_grads))

    def grad_step(scale, batch):
        # pmap does not track what is replicated: the psum's gradient is a psum again, 8 times the local gradient.
        result, grads = value_and_grads(scale, batch, axis_name="data")
        return result, jax.lax.pmean(grads, "data")

    actual = pmap(grad_step, in_axes=(None, 0))(scale, split(batch))
    for device in (0, 3, 7):
        assert_close(jax.tree.map(lambda x, device=device: x[device], actual), (expected, expected_grads))
    mapped = jax.jit(jax.vmap(sharded, in_axes=(None, 0), axis_name="data"))(scale, split(batch))
    assert_close(jax.tree.map(lambda x: x[5], mapped), expected)


def make_groups():
    """Rewards of 32 groups of 4, four groups a device, with dead rollouts; device 3 has none alive."""
    rng = np.random.default_rng(0)
    rewards = rng.choice(np.array([0, 0.1, 1], np.float32), (32, 4))
    rewards[::5] = 0.1
    live = rng.random((32, 4)) < 0.8
    live[12:16] = False
    entropy, mask = rng.exponential(size=(32, 4, 3)).astype(np.float32), rng.random((32, 4, 3)) < 0.7
    return {"rewards": rewards, "live": live, "entropy": entropy, "mask": mask, "length": rng.integers(0, 30, (32, 4))}


def every_group_function(groups, axis_name=None):
    """Statistics, filters, the penalty, and every estimator."""
    rewards, live = groups["rewards"], groups["live"]
    stats = group_stats(rewards, live)
    band = {"name": "accuracy_band", "low": 0.2, "high": 0.9}
    filters = [make_filter("any_of", filters=["mixed_sign", band]), make_filter("min_std", threshold=0.3)]
    keep = [jnp.asarray(f(stats, rewards, live), int) for f in filters]
    penalty = soft_overlong_penalty(groups["length"], max_tokens=20, cache_tokens=8)
    advantages = {}
    for name, declared in ESTIMATORS.items():
        options = {"k": 2} if name == "pass_at_k" else {}
        if declared.per_token:
            options = {"entropy_PGT": groups["entropy"], "mask_PGT": groups["mask"]}
        shaped = jnp.stack([rewards, penalty], axis=-1) if declared.per_component else rewards
        advantages[name] = group_advantages(shaped, live, estimator=name, axis_name=axis_name, **options)
    return stats._asdict(), keep, penalty, advantages


def check_groups_everywhere():
    groups = jax.tree.map(jnp.asarray, make_groups())
    expected = jax.jit(every_group_function)(groups)
    over_data = functools.partial(every_group_function, axis_name="data")
    sharded = jax.shard_map(over_data, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert_close(jax.jit(sharded)(groups), expected)
    for mapped in (pmap(over_data), jax.jit(jax.vmap(over_data, axis_name="data"))):
        assert_close(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped(split(groups))), expected)


def make_tokens():
    rng = np.random.default_rng(0)
    hidden, unembed = rng.normal(size=(16, 6, 8)).astype(np.float32), rng.normal(size=(8, 32)).astype(np.float32)
    return hidden, unembed, rng.integers(0, 32, (16, 6)), rng.normal(size=(16, 6)).astype(np.float32)


def weighted_logp(hidden, unembed, temperature, targets, weights, chunk_size, entropy_gradient=False):
    options = {"temperature": temperature, "chunk_size": chunk_size, "entropy_gradient": entropy_gradient}
    logp, entropy = token_logprobs(hidden, unembed, targets, **options)
    return (logp * weights).sum() + 0.3 * (entropy * weights).sum()


def check_token_logprobs_shard_map():
    hidden, unembed, targets, weights = make_tokens()
    arguments = (hidden, unembed, jnp.float32(0.8), targets, weights)
    specs = (P("data"), P(), P(), P("data"), P("data"))
    for chunk_size, entropy_gradient in ((None, False), (5, True)):
        loss = functools.partial(weighted_logp, chunk_size=chunk_size, entropy_gradient=entropy_gradient)
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
