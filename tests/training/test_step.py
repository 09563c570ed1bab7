"""The train step against a NumPy float64 update, and the promises about what trains and what does not.

The model is one layer of width 4, small enough that the reference takes its gradient by finite differences.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dynrl.compile_counter import CompileCounter
from dynrl.config import ConfigError, ModelConfig, RunConfig, TrainConfig, from_mapping, to_mapping
from dynrl.models import sharding
from dynrl.models.decoder import init_params
from dynrl.training.state import TrainState, init_state, learning_rate, make_optimizer, state_shardings
from dynrl.training.step import cut, jit_train_step, prepare
from dynrl.types import Finish, Payload, TrainBatch

VOCAB, B, G, L, T, STEPS = 8, 8, 3, 4, 3, 10
MODEL = {
    "num_layers": 1, "width": 4, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "mlp_width": 6,
    "activation": "relu", "gated_mlp": False,
}  # fmt: skip


@cache
def make_config(**overrides) -> RunConfig:
    """Overrides are dotted keys with __ for the dot. The default clips the norm and decays the weights.

    A large adam_eps keeps float32's noise out of the signs.
    """
    mapping = {
        "num_prompts_per_step": B, "num_generations_per_prompt": G, "num_steps": STEPS, "model": dict(MODEL),
        "sampler": {"max_completion_tokens": T, "temperature": 0.8, "num_slots": B * G},
        "train": {"learning_rate": 0.05, "adam_eps": 1e-2, "weight_decay": 0.3, "max_grad_norm": 0.1}, "loss": {},
    }  # fmt: skip
    for key, value in overrides.items():
        group, name = key.split("__")
        mapping[group][name] = value
    return from_mapping(mapping)


@cache
def compiled(mesh, config_key):
    config = make_config(**dict(config_key))
    optimizer = make_optimizer(config.train, config.num_steps)
    shardings = state_shardings(config.model, VOCAB, optimizer, mesh, config.loss.kl_coef > 0)
    params = start_params()
    opt_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(optimizer.init, params))
    reference = start_params(seed=1) if config.loss.kl_coef else {}
    fresh = TrainState(params, opt_state, np.zeros((), np.int32), reference)
    return fresh, shardings, jit_train_step(config, optimizer, mesh, shardings)


def start_params(seed=0):
    shapes = jax.eval_shape(partial(init_params, ModelConfig(**MODEL), VOCAB), jax.random.key(0))
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        return (float(path[-1].key == "scale") + 0.5 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def run(mesh, batches, params=None, **overrides):
    """Trains on the batches in turn. Returns the state and the metrics of each step, on the host."""
    fresh, shardings, step = compiled(mesh, tuple(overrides.items()))
    fresh = fresh if params is None else fresh._replace(params=params)
    state = jax.tree.map(sharding.place, fresh, shardings)
    rows, metrics = sharding.rows(mesh), []
    for batch in batches:
        state, row = step(state, jax.tree.map(lambda x: sharding.place(x, rows), batch))
        metrics.append({k: float(v) for k, v in row.items()})
    return jax.tree.map(np.asarray, state), metrics


def make_batch(seed=0, b=B, num_real=None):
    """Rollouts of all lengths, dead and truncated ones, and filler rows that hold garbage."""
    rng = np.random.default_rng(seed)
    length_BG = rng.integers(1, T + 1, (b, G)).astype(np.int32)
    finish_BG = np.where((length_BG == T) & (rng.random((b, G)) < 0.7), Finish.LENGTH, Finish.STOP).astype(np.int32)
    mask_BGT = np.arange(T) < length_BG[..., None]
    payload = Payload(
        prompt_PL=rng.integers(0, VOCAB, (b, L), dtype=np.int32),
        prompt_length_P=rng.integers(1, L + 1, b).astype(np.int32),
        tokens_PGT=rng.integers(0, VOCAB, (b, G, T), dtype=np.int32),
        logp_PGT=rng.normal(-2, 0.7, (b, G, T)).astype(np.float32),
        mask_PGT=mask_BGT,
        version_PGT=np.zeros((b, G, T), np.int32),
        length_PG=length_BG,
        finish_PG=finish_BG,
    )
    rewards_BG = rng.choice([0.0, 0.3, 1.0], (b, G)).astype(np.float32)
    rewards_BG[:, 0] = 1 - rewards_BG[:, 1]  # no group without signal unless a test makes it
    live_BG = np.ones((b, G), bool)
    live_BG[1, 2] = live_BG[5 % b, 2] = False
    real_B = np.arange(b) < (b if num_real is None else num_real)
    return TrainBatch(payload, rewards_BG, live_BG, real_B, np.zeros(b, np.int32))


def change(batch, where, **fields):
    """The batch with the given fields of the payload (or of itself) overwritten at the index `where`."""
    batch = jax.tree.map(np.copy, batch)
    for name, value in fields.items():
        target = getattr(batch.payload, name) if name in Payload._fields else getattr(batch, name)
        target[where] = value
    return batch


def assert_bitwise(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_moved_alike(got, want, tol, start=None):
    """Largest difference of the moves over the largest move."""
    start = start_params() if start is None else start
    for x, y, s in zip(*map(jax.tree.leaves, (got, want, start)), strict=True):
        assert np.abs(np.float64(x) - y).max() <= tol * np.abs(np.float64(y) - s).max() + 1e-7


# ---- The reference ----


def reference_logp(p, batch, temperature, groups=slice(None)):
    """Log-probs [groups, G, T] of the tokens, and the distributions' entropies.

    By a float64 decoder of one head, over rows [prompt | completion].
    """

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale["scale"]

    def rotate(x):
        angle = np.arange(L + T)[:, None] * 10_000.0 ** (-np.arange(2) / 2)
        a, b = x[..., :2], x[..., 2:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    n = np.repeat(batch.payload.prompt_length_P[groups], G)
    prompts = [row[L - k :] for row, k in zip(np.repeat(batch.payload.prompt_PL[groups], G, 0), n, strict=True)]
    completions = batch.payload.tokens_PGT[groups].reshape(-1, T)
    # Rows begin at their first token; what is padded behind them is seen by nothing before it.
    pairs = zip(prompts, completions, strict=True)
    rows = np.stack([np.pad(np.concatenate(pair), (0, L - len(pair[0]))) for pair in pairs])
    layer, embedding = p["layers_0"], p["embedding"]
    x = embedding[rows]
    y = norm(x, layer["attn_norm"])
    q, k, v = (y @ layer["attn"][name]["kernel"] for name in "qkv")
    scores = np.where(np.tri(L + T, dtype=bool), rotate(q) @ rotate(k).swapaxes(1, 2) / 2, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    x = x + weights / weights.sum(-1, keepdims=True) @ v @ layer["attn"]["o"]["kernel"]
    y = norm(x, layer["mlp_norm"])
    x = x + np.maximum(y @ layer["mlp"]["up"]["kernel"], 0) @ layer["mlp"]["down"]["kernel"]
    logits = norm(x, p["final_norm"]) @ embedding.T / temperature
    logits = logits[np.arange(len(n))[:, None], n[:, None] - 1 + np.arange(T)]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)
    return np.take_along_axis(logp, completions[..., None], 2).reshape(-1, G, T), entropy.reshape(-1, G, T)


def reference_advantages(batch, c):
    out, estimator = np.zeros(batch.rewards_BG.shape), c.loss.estimator
    if c.loss.overlong == "penalty":
        cache = c.loss.overlong_cache_tokens
        beyond = np.maximum(batch.payload.length_PG - (T - cache), 0)
        batch = batch._replace(rewards_BG=batch.rewards_BG - beyond / cache)
    for b in np.flatnonzero(batch.real_B):
        live = batch.live_BG[b]
        r = batch.rewards_BG[b, live].astype(np.float64)
        if len(r) < 2 or np.ptp(r) < 1e-6:
            continue
        centred = r - r.mean()
        scale = {"grpo": 1 / (r.std(ddof=1) + 1e-6), "dr_grpo": 1.0, "rloo": len(r) / (len(r) - 1)}[estimator]
        out[b, live] = centred * scale
    return out


def reference_terms(logp, ref, entropy, c):
    """KL and entropy of some tokens of a row, as they enter the loss."""
    kl = {"k1": logp - ref, "k2": (logp - ref) ** 2 / 2, "k3": np.exp(ref - logp) - 1 - (ref - logp)}[c.loss.kl]
    return c.loss.kl_coef * kl - c.loss.entropy_coef * entropy


def reference_loss(p, batch, rows, old, ref, advantages, c):
    """The update's loss over the groups `rows`, divided by its weight."""
    logp_of, entropy_of = (
        dict(zip(rows, x, strict=True)) for x in reference_logp(p, batch, c.sampler.temperature, rows)
    )
    total, weight = 0.0, 0.0
    for b in rows:
        for g in range(G):
            if not (batch.real_B[b] and batch.live_BG[b, g]):
                continue
            if c.loss.overlong == "mask" and batch.payload.finish_PG[b, g] == Finish.LENGTH:
                continue
            tokens = np.flatnonzero(batch.payload.mask_PGT[b, g])
            ratio = np.exp(logp_of[b][g, tokens] - old[b, g, tokens])
            drift = np.exp(old[b, g, tokens] - batch.payload.logp_PGT[b, g, tokens])
            tis = np.minimum(drift, c.loss.tis_cap) if c.loss.tis_cap else 1.0
            a = advantages[b, g]
            losses = -tis * np.minimum(ratio * a, np.clip(ratio, 1 - c.loss.clip_low, 1 + c.loss.clip_high) * a)
            if a != 0 or c.loss.regularize == "all":
                losses = losses + reference_terms(logp_of[b][g, tokens], ref[b, g, tokens], entropy_of[b][g, tokens], c)
            if c.loss.aggregation == "token_mean":
                total, weight = total + losses.sum(), weight + len(tokens)
            elif c.loss.aggregation == "sequence_mean":
                total, weight = total + losses.mean(), weight + 1
            else:
                total, weight = total + losses.sum() / (c.loss.constant_length or T), weight + 1
    if c.loss.short_step_scale == "nominal":
        weight *= len(batch.real_B) / batch.real_B.sum()
    return total / weight


def flatten(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)


def reference_train(params, batches, c):
    """All updates of all steps: finite differences, clip, AdamW; parameters as one vector."""
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([x.size for x in leaves])[:-1]
    decayed = np.concatenate([np.full(x.size, float(x.ndim > 1)) for x in leaves])

    def tree(theta):
        parts = np.split(theta, ends)
        return jax.tree.unflatten(structure, [v.reshape(x.shape) for v, x in zip(parts, leaves, strict=True)])

    theta, t, count = flatten(params), c.train, 0
    first, second, norms = np.zeros_like(theta), np.zeros_like(theta), []
    for batch in batches:
        old = reference_logp(tree(theta), batch, c.sampler.temperature)[0]
        ref = reference_logp(start_params(seed=1), batch, c.sampler.temperature)[0]
        advantages = reference_advantages(batch, c)
        for _ in range(t.num_epochs):
            for rows in np.split(np.arange(len(batch.real_B)), t.num_minibatches):
                grad = np.zeros_like(theta)
                for i in range(len(theta)):
                    up, down = (theta + h * np.eye(1, len(theta), i)[0] for h in (1e-6, -1e-6))
                    args = (batch, rows, old, ref, advantages, c)
                    grad[i] = (reference_loss(tree(up), *args) - reference_loss(tree(down), *args)) / 2e-6
                norms.append(np.linalg.norm(grad))
                grad *= min(1, t.max_grad_norm / norms[-1])
                count += 1
                first = t.adam_b1 * first + (1 - t.adam_b1) * grad
                second = t.adam_b2 * second + (1 - t.adam_b2) * grad**2
                step = first / (1 - t.adam_b1**count) / (np.sqrt(second / (1 - t.adam_b2**count)) + t.adam_eps)
                theta = theta - t.learning_rate * (step + t.weight_decay * decayed * theta)
    return tree(theta), norms


# Several updates with the old log-probs, where the ratio leaves the clip's interval.
UPDATES = {
    "train__num_minibatches": 2, "train__num_epochs": 2, "loss__aggregation": "sequence_mean",
    "loss__estimator": "dr_grpo", "loss__clip_low": 0.05, "loss__clip_high": 0.05, "train__max_grad_norm": 1.0,
}  # fmt: skip
# Masked truncations, nominal denominators, and the remaining estimator and aggregation.
SHORT = {
    "loss__aggregation": "constant", "loss__constant_length": 5, "loss__short_step_scale": "nominal",
    "loss__overlong": "mask", "loss__estimator": "rloo", "loss__tis_cap": 0.0,
}  # fmt: skip
# KL, entropy and the penalty for length; a group without signal, which KL and entropy leave alone or not.
TERMS = {
    "loss__kl": "k3", "loss__kl_coef": 0.3, "loss__entropy_coef": 0.2, "loss__overlong": "penalty",
    "loss__overlong_cache_tokens": 2,
}  # fmt: skip
TERMS_ALL = {"loss__kl": "k2", "loss__kl_coef": 0.3, "loss__entropy_coef": 0.2, "loss__regularize": "all"}
REFERENCES = {
    "on_policy": ({}, [B]), "updates": (UPDATES, [B]), "short": (SHORT, [5, B]), "terms": (TERMS, [B]),
    "terms_all": (TERMS_ALL, [6]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_updates_match_the_reference(name, mesh1):
    overrides, reals = REFERENCES[name]
    batches = [make_batch(seed, num_real=n) for seed, n in enumerate(reals)]
    if name.startswith("terms"):
        batches = [change(b, 2, rewards_BG=0.1, length_PG=1) for b in batches]  # no signal, with or without penalty
    config = make_config(**overrides)
    want, norms = reference_train(start_params(), batches, config)
    state, metrics = run(mesh1, batches, **overrides)
    assert_moved_alike(state.params, want, 2e-3)
    np.testing.assert_allclose(np.mean([m["train_step/grad_norm"] for m in metrics]), np.mean(norms), rtol=1e-3)
    assert state.updates == len(norms)
    if name == "updates":
        assert metrics[0]["train_step/clip_frac"] > 0.02  # the clip was at work


# ---- What trains ----


def test_microbatches_are_one_batch(mesh1):
    batches = [make_batch(0), make_batch(1, num_real=5)]
    want, metrics = run(mesh1, batches)
    got, micro_metrics = run(mesh1, batches, train__num_microbatches=4)
    assert_moved_alike(got.params, want.params, 1e-5)
    for a, b in zip(micro_metrics, metrics, strict=True):
        for key in a:
            np.testing.assert_allclose(a[key], b[key], rtol=1e-5, atol=1e-6, err_msg=key)


def test_each_minibatch_is_an_update(mesh1):
    state, metrics = run(mesh1, [make_batch(0), make_batch(1)], **UPDATES)
    assert state.updates == 8
    counts = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == np.int32]
    assert counts
    assert all(x == 8 for x in counts)
    assert all(m["train_step/ratio"] != 1 for m in metrics)
    single, metrics = run(mesh1, [make_batch(0), make_batch(1)])
    assert single.updates == 2
    assert all(m["train_step/ratio"] == 1 for m in metrics)  # on-policy: the old weights are the current ones


@pytest.mark.parametrize("overrides", [{}, UPDATES], ids=["one_update", "four_updates"])
def test_an_empty_batch_changes_nothing(overrides, mesh1):
    # Neither at the start nor later, when Adam's moments and the decay would go on moving the weights.
    empty = make_batch(3, num_real=0)
    start, metrics = run(mesh1, [empty], **overrides)
    assert_bitwise(start.params, start_params())
    assert start.updates == 0
    assert all(not np.any(x) for x in jax.tree.leaves(start.opt_state))
    once, _ = run(mesh1, [make_batch(0)], **overrides)
    again, more = run(mesh1, [make_batch(0), empty], **overrides)
    assert_bitwise(again, once)
    for row in (metrics[0], more[1]):
        assert all(np.isfinite(v) for v in row.values())
        assert row["train_step/nonfinite"] == row["train_batch/groups"] == row["train_batch/tokens"] == 0


def test_filler_rows_change_nothing(mesh1):
    short, garbage = make_batch(0, num_real=4), make_batch(9)
    fill = slice(4, None)
    other = change(short, fill, **{k: getattr(garbage.payload, k)[fill] for k in Payload._fields})
    other = change(other, fill, rewards_BG=np.nan, live_BG=True, logp_PGT=np.nan, prompt_length_P=L)
    state, metrics = run(mesh1, [short])
    assert_bitwise(run(mesh1, [other])[0], state)
    assert metrics[0]["train_batch/groups"] == 4
    # 'real': as if the batch had been of that size, that is, of the same mean as the groups twice over. 'nominal': a
    # gradient of B_real / B = 1/2 of that.
    twice = jax.tree.map(lambda x: np.concatenate([x[:4], x[:4]]), short)
    full, full_metrics = run(mesh1, [twice])
    assert_moved_alike(state.params, full.params, 1e-5)
    np.testing.assert_allclose(metrics[0]["train_step/grad_norm"], full_metrics[0]["train_step/grad_norm"], rtol=1e-5)
    norms = [run(mesh1, [b], **SHORT)[1][0]["train_step/grad_norm"] for b in (short, twice)]
    np.testing.assert_allclose(norms[0], norms[1] / 2, rtol=1e-5)


def test_nominal_denominators_are_those_of_the_minibatch(mesh1):
    # Of two minibatches of 4 rows the second has one real group: 1/4 of its mean's gradient, and all of the first's.
    still = {"train__num_minibatches": 2, "train__learning_rate": 1e-9}

    def norm(num_real, **scale):  # the mean over the updates that had a row
        return run(mesh1, [make_batch(0, num_real=num_real)], **still, **scale)[1][0]["train_step/grad_norm"]

    first = norm(4)
    second = 2 * norm(5) - first
    nominal = norm(5, loss__short_step_scale="nominal")
    np.testing.assert_allclose(nominal, (first + second / 4) / 2, rtol=1e-5)


def test_dead_rollouts_train_nothing_and_count_nowhere(mesh1):
    batch = make_batch(0)
    where = (1, 2)
    assert not batch.live_BG[where]
    other = change(batch, where, rewards_BG=7.0, tokens_PGT=3, logp_PGT=np.nan, finish_PG=Finish.FAILED)
    assert_bitwise(run(mesh1, [other])[0], run(mesh1, [batch])[0])
    revived = change(batch, where, live_BG=True)
    assert (run(mesh1, [revived])[0].params["embedding"] != run(mesh1, [batch])[0].params["embedding"]).any()


def test_masked_truncations_still_set_the_baseline(mesh1):
    # Masking before the group's statistics would shift the advantages of the others.
    batch = make_batch(0)
    b, g = next(i for i in np.argwhere(batch.payload.finish_PG == Finish.LENGTH) if batch.live_BG[i[0]].all())
    other_tokens = change(batch, (b, g), tokens_PGT=(batch.payload.tokens_PGT[b, g] + 1) % VOCAB)
    other_reward = change(batch, (b, g), rewards_BG=batch.rewards_BG[b, g] + 0.5)
    masked, metrics = run(mesh1, [batch], **SHORT)
    assert_bitwise(run(mesh1, [other_tokens], **SHORT)[0], masked)
    assert (run(mesh1, [other_reward], **SHORT)[0].params["embedding"] != masked.params["embedding"]).any()
    kept = run(mesh1, [batch])
    assert (run(mesh1, [other_tokens])[0].params["embedding"] != kept[0].params["embedding"]).any()
    long = (batch.payload.finish_PG == Finish.LENGTH) & batch.live_BG
    lost = (batch.payload.mask_PGT & long[..., None]).sum()
    assert kept[1][0]["train_batch/tokens"] - metrics[0]["train_batch/tokens"] == lost > 0


def test_groups_without_advantage_are_counted(mesh1):
    """A filter that never fires shows here (NeMo-RL#4588)."""
    batch = make_batch(0, num_real=6)
    uniform = change(batch, 0, rewards_BG=0.1)  # equal, and not a binary fraction
    uniform = change(uniform, 2, live_BG=[True, False, False])  # one live rollout has no baseline
    uniform = change(uniform, 3, finish_PG=Finish.LENGTH)  # a signal, all of it masked
    rows = [run(mesh1, [b], **o)[1][0] for b, o in ((batch, {}), (uniform, {}), (uniform, SHORT))]
    assert [r["train_batch/groups"] for r in rows] == [6, 6, 6]
    fracs = [r["train_batch/zero_advantage_groups_frac"] for r in rows]
    # Under 'mask', further groups may have lost every rollout with an advantage to truncation: none of batch 0 did.
    np.testing.assert_allclose(fracs, [0, 2 / 6, 3 / 6], rtol=1e-6)


@pytest.mark.parametrize(("overrides", "count"), [({}, 1), (UPDATES, 4)], ids=["one_update", "four_updates"])
def test_a_non_finite_gradient_is_skipped_and_counted(overrides, count, mesh1):
    params = start_params()
    params["embedding"][2, 1] = np.inf
    state, metrics = run(mesh1, [make_batch(0)], params, **overrides)
    assert_bitwise(state.params, params)
    assert state.updates == count
    assert all(not np.any(x) for x in jax.tree.leaves(without_schedule(state.opt_state)))
    assert metrics[0]["train_step/nonfinite"] == count


def is_schedule(x):
    return isinstance(x, optax.ScaleByScheduleState)


def without_schedule(opt_state):
    return jax.tree.map(lambda x: None if is_schedule(x) else x, opt_state, is_leaf=is_schedule)


def test_schedules_count_steps_whatever_updates_are_skipped(mesh1):
    """Generation is not training (verl#991)."""
    # Two minibatches of 4 rows: a batch of 3 groups leaves the second without a row.
    batches = [make_batch(0, num_real=3), make_batch(1), make_batch(2, num_real=0)]
    state, _ = run(mesh1, batches, train__num_minibatches=2)
    assert state.updates == 2 + 2  # the version counts skipped updates too, an empty batch has none
    (schedule,) = filter(is_schedule, jax.tree.leaves(state.opt_state, is_leaf=is_schedule))
    assert schedule.count == 2 * 2  # the learning rate is the step's own again


def test_metrics_of_a_step_are_token_means_over_its_updates(mesh1):
    """Sampler and trainer drift apart unseen elsewhere (marin#1745, marin#1879)."""
    # The second minibatch of this short step has no tokens: as a mean of means, every metric would be halved.
    batch = make_batch(0, num_real=4)
    # The KL between sampler and the weights of the step's start is the same in every update.
    state, metrics = run(mesh1, [batch], **UPDATES)
    assert state.updates == 4
    _, single = run(mesh1, [batch])
    key = "train_step/kl_sampler_trainer"
    np.testing.assert_allclose(metrics[0][key], single[0][key], rtol=1e-5)
    assert 0.9 < metrics[0]["train_step/ratio"] < 1.1


# ---- Meshes, precision, programs ----


@pytest.mark.parametrize("mesh", ["mesh8", "mesh222"])
def test_a_sharded_step_equals_one_device(mesh, mesh1, request):
    batches = [make_batch(0), make_batch(1, num_real=5)]
    want, metrics = run(mesh1, batches)
    overrides = {"train__num_microbatches": 2} if mesh == "mesh222" else {}
    got, sharded_metrics = run(request.getfixturevalue(mesh), batches, **overrides)
    assert_moved_alike(got.params, want.params, 1e-4)
    for a, b in zip(sharded_metrics, metrics, strict=True):
        for key in a:
            np.testing.assert_allclose(a[key], b[key], rtol=1e-4, atol=1e-5, err_msg=key)


def test_a_batch_that_the_shards_cannot_cut_is_an_error(mesh8):
    # 8 groups on 8 row shards: one each, which two microbatches cannot share.
    config = make_config(train__num_microbatches=2)
    optimizer = make_optimizer(config.train, STEPS)
    shardings = state_shardings(config.model, VOCAB, optimizer, mesh8)
    with pytest.raises(ConfigError, match=r"config\.num_prompts_per_step: 8 .* 16"):
        jit_train_step(config, optimizer, mesh8, shardings)


def test_a_cut_takes_the_same_share_of_every_shard():
    rows = np.arange(24).reshape(12, 2)
    parts = [np.asarray(cut({"x": rows}, 3, i, shards=2)["x"]) for i in range(3)]
    # Shard 0 holds rows 0 to 5, shard 1 rows 6 to 11; each gives two rows to each part.
    assert [p[:, 0].tolist() for p in parts] == [[0, 2, 12, 14], [4, 6, 16, 18], [8, 10, 20, 22]]


def test_bfloat16_trains_float32_weights(mesh1):
    want, _ = run(mesh1, [make_batch(0)])
    got, metrics = run(mesh1, [make_batch(0)], model__dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(got.params)} == {np.dtype("float32")}
    assert_moved_alike(got.params, want.params, 0.3)
    assert np.isfinite(metrics[0]["train_step/grad_norm"])


def test_one_program_serves_all_batches(mesh1):
    """Batches of varying size recompile elsewhere (AReaL#450, prime-rl#3463)."""
    fresh, shardings, step = compiled(mesh1, ())
    rows = sharding.rows(mesh1)
    batches = [
        jax.tree.map(lambda x: sharding.place(x, rows), make_batch(seed, num_real=n))
        for seed, n in enumerate([8, 0, 3])
    ]
    state, metrics = step(jax.tree.map(sharding.place, fresh, shardings), batches[0])
    counter, kept = CompileCounter(), [metrics]
    for batch in [*batches, *batches]:
        old = state
        state, metrics = step(state, batch)  # the state is donated; batches and earlier metrics stay readable
        kept.append(metrics)
        assert old.params["embedding"].is_deleted()
    assert counter.names == []
    assert [int(m["train_batch/groups"]) for m in kept] == [8, 8, 0, 3, 8, 0, 3]
    assert int(state.updates) == 5
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    again = step(jax.tree.map(sharding.place, fresh, shardings), batches[0])
    assert_bitwise(again[1], kept[0])


def test_the_initial_weights_are_the_same_on_every_mesh(mesh1, mesh222):
    optimizer = make_optimizer(TrainConfig(), STEPS)
    model = ModelConfig(**MODEL)
    one, other = (init_state(model, VOCAB, optimizer, mesh, 5) for mesh in (mesh1, mesh222))
    assert_bitwise(other.params, one.params)
    for embedding in (other.params["embedding"], other.opt_state[1][0].mu["embedding"]):
        assert tuple(embedding.sharding.spec) == ("tensor", "fsdp")
    different = init_state(model, VOCAB, optimizer, mesh1, 6)
    assert (np.asarray(different.params["embedding"]) != np.asarray(one.params["embedding"])).any()


# ---- The optimizer ----


def lrs(num_steps, **overrides):
    schedule = learning_rate(TrainConfig(learning_rate=1.0, **overrides), num_steps)
    return [round(float(np.asarray(schedule(i))), 6) for i in range(num_steps)]


def test_learning_rates():
    assert lrs(4) == [1, 1, 1, 1]
    assert lrs(4, lr_schedule="linear") == [1, 0.75, 0.5, 0.25]
    # cos(pi / 2 * i / 2) squared: 1/2 (1 + cos(pi i / 4))
    assert lrs(4, lr_schedule="cosine") == [1, 0.853553, 0.5, 0.146447]
    # Warm-up over 3 steps: the first step learns, and step 3 is the peak.
    assert lrs(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1]
    assert lrs(7, warmup_steps=3, lr_schedule="linear") == [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]
    assert lrs(7, warmup_steps=3, lr_schedule="cosine") == [0.25, 0.5, 0.75, 1, 0.853553, 0.5, 0.146447]
    assert lrs(3, warmup_steps=3) == [0.25, 0.5, 0.75]


def toy_updates(config, params, grads, num_steps=4, num_updates=1):
    """The optimizer's moves for the same gradient, update after update."""
    optimizer = make_optimizer(config, num_steps)
    state, moves = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(num_updates):
        move, state = update(grads, state, params)
        moves.append(jax.tree.map(np.asarray, move))
    return moves


def test_updates_of_a_step_share_its_learning_rate():
    # 2 epochs of 3 minibatches: 6 updates a step. Without momentum, every update of a constant gradient is -lr.
    config = TrainConfig(
        learning_rate=1.0, lr_schedule="linear", num_epochs=2, num_minibatches=3, adam_b1=0.0, adam_eps=1e-12
    )
    moves = toy_updates(config, {"w": jnp.ones((1, 1))}, {"w": jnp.full((1, 1), 0.5)}, 4, 24)
    got = [-float(m["w"][0, 0]) for m in moves]
    np.testing.assert_allclose(got, np.repeat([1, 0.75, 0.5, 0.25], 6), rtol=1e-5)


def test_the_gradient_s_norm_is_clipped():
    # With a huge adam_eps, Adam is a plain step of lr / eps: the move shows the clipped gradient.
    config = TrainConfig(learning_rate=1e6, adam_eps=1e6, adam_b1=0.0, adam_b2=0.0, max_grad_norm=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    for grads, want in (((3.0, 4.0), (0.6, 0.8)), ((0.3, 0.4), (0.3, 0.4))):
        move = toy_updates(config, params, {"a": jnp.full(1, grads[0]), "b": jnp.full(1, grads[1])})[0]
        np.testing.assert_allclose([-move["a"][0], -move["b"][0]], want, rtol=1e-4)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_weight_decay_spares_norms_and_biases(scan):
    # Under scan_layers they are matrices, of layers times features.
    model = dataclasses.replace(ModelConfig(**MODEL), qkv_bias=True, qk_norm=True, scan_layers=scan)
    shapes = jax.eval_shape(partial(init_params, model, VOCAB), jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.ones(x.shape), shapes)
    config = TrainConfig(learning_rate=0.5, weight_decay=0.2)
    move = toy_updates(config, params, jax.tree.map(jnp.zeros_like, params))[0]
    seen = set()
    for path, x in jax.tree_util.tree_leaves_with_path(move):
        name = path[-1].key
        seen.add(name)
        np.testing.assert_allclose(x, 0.0 if name in ("scale", "bias") else -0.1, rtol=1e-6, err_msg=str(path))
    assert seen == {"scale", "bias", "kernel", "embedding"}


def test_proposer_and_solver_are_normalised_apart():
    """Each role's advantages are those of a batch of it alone: whiten(r) of another scale moves nothing."""
    loss = {"loss__estimator": "reinforce_pp"}
    mapping = to_mapping(make_config(**loss))
    mapping["self_propose"]["kind"] = "digits"
    config = from_mapping(mapping)
    batch = make_batch()
    role_B = np.arange(B) % 3 == 0
    scaled = batch._replace(rewards_BG=np.where(role_B[:, None], 100 - 7 * batch.rewards_BG, batch.rewards_BG))
    scaled = scaled._replace(role_B=role_B.astype(np.int32))

    def advantages(one, config):
        part, _ = prepare(None, jax.tree.map(jnp.asarray, one), config, on_policy=True)  # pyright: ignore
        return np.asarray(part.advantages_BG)

    got = advantages(scaled, config)
    for role in (False, True):
        rows_B = role_B == role
        alone = scaled._replace(real_B=batch.real_B & rows_B)
        np.testing.assert_allclose(got[rows_B], advantages(alone, make_config(**loss))[rows_B], rtol=1e-5, atol=1e-6)
    together = advantages(scaled, make_config(**loss))
    assert np.abs(together - got).max() > 0.1
