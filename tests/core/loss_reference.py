"""The losses in float64 NumPy, written from the papers' equations and not from dynrl's code.

Whatever an equation puts behind a stop-gradient is computed from `frozen`, so that a finite difference in `logp`
sees the same function that an automatic gradient does.
"""

import numpy as np

METRICS = ("clip_frac", "clip_low_frac", "clip_high_frac", "ratio", "tis_frac", "kl_sampler_trainer", "kl_old_new")

OPTIONS = {
    "ppo": {"clip_high": 0.28},
    "ppo_sequence_k1": {"aggregation": "sequence_mean", "kl": "k1", "kl_coef": 0.3, "tis_cap": None},
    "ppo_constant_dual": {"dual_clip": 1.3, "aggregation": "constant", "constant_length": 7, "tis_cap": 1.1},
    "ppo_dual_k3_entropy": {"dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.2, "regularize": True},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean", "clip_low": 0.05, "clip_high": 0.08},
    "gspo_token_k2": {"loss": "gspo", "kl": "k2", "kl_coef": 0.5, "clip_low": 0.1, "clip_high": 0.1},
    "gspo_constant_dual": {"loss": "gspo", "dual_clip": 1.1, "aggregation": "constant", "constant_length": 3},
    "cispo_k2_entropy": {"loss": "cispo", "kl": "k2", "kl_coef": 0.2, "entropy_coef": 0.1, "regularize": True},
    "cispo_no_lower_bound": {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.3, "aggregation": "sequence_mean"},
    "cispo_constant_k3": {"loss": "cispo", "aggregation": "constant", "constant_length": 5, "kl": "k3", "kl_coef": 1.0},
}  # fmt: skip


def make_batch(seed, shape, token_advantages=False):
    """Float64 inputs of shape [..., N, T], by name; about half of the rows have masked-out tokens, some only those."""
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=shape)
    batch = {
        "logp": old + 0.3 * rng.normal(size=shape),
        "old": old,
        "behavior": old + 0.5 * rng.normal(size=shape),
        "advantages": rng.normal(size=shape if token_advantages else shape[:-1]),
        "mask": rng.random(shape) < rng.choice([0.0, 0.5, 1.0], (*shape[:-1], 1)),
        "ref": old + 0.4 * rng.normal(size=shape),
        "entropy": rng.exponential(size=shape),
        "regularize": rng.random(shape) < 0.6,
    }
    batch["advantages"] *= rng.random(batch["advantages"].shape) < 0.8
    return batch


def poison(batch):
    """Fills everything masked out with garbage."""
    rng, mask = np.random.default_rng(1), batch["mask"]
    batch = {name: np.array(x) for name, x in batch.items()}
    for name in ("logp", "old", "behavior", "ref", "entropy"):
        batch[name][~mask] = rng.choice([np.nan, np.inf, -np.inf, 1e30, -1e30], (~mask).sum())
    dead = ~mask if batch["advantages"].ndim == mask.ndim else ~mask.any(-1)
    batch["advantages"][dead] = np.nan
    return batch


def arguments(batch, options):
    """(arrays, options) of `policy_loss` for a case of OPTIONS."""
    options = dict(options)
    use_mask = options.pop("regularize", False)
    arrays = [batch[name] for name in ("logp", "old", "behavior", "advantages", "mask")]
    if options.get("kl_coef"):
        options["ref_logp_NT"] = batch["ref"]
    if options.get("entropy_coef"):
        options["entropy_NT"] = batch["entropy"]
    if use_mask:
        options["regularize_mask_NT"] = batch["regularize"]
    return arrays, options


def total(x, mask, axis=(-2, -1)):
    return np.where(mask, x, 0.0).sum(axis)


def objective(x, ratio, kept, low, high, loss, dual_clip):
    """Per token: (objective, clipped low, clipped high, clipped by dual_clip)."""
    a = x["advantages"]
    if loss == "cispo":
        weight = np.minimum(np.maximum(kept, 1 - low), 1 + high)
        return weight * a * x["logp"], kept < 1 - low, kept > 1 + high, None
    value = np.where(a >= 0, np.minimum(ratio, 1 + high), np.maximum(ratio, 1 - low)) * a
    dual = np.zeros(a.shape, bool)
    if dual_clip is not None:
        dual = (a < 0) & (ratio > dual_clip)
        value = np.where(dual, dual_clip * a, value)
    return value, (a < 0) & (ratio < 1 - low), (a > 0) & (ratio > 1 + high), dual


def ratios(x, frozen, loss):
    """(ratio as a function of logp, its value where a stop-gradient stands)."""
    d, d0 = x["logp"] - x["old"], frozen - x["old"]
    if loss != "gspo":
        return np.exp(d), np.exp(d0)
    mean = total(d0, x["mask"], -1) / np.maximum(x["mask"].sum(-1), 1)
    s = np.broadcast_to(np.exp(mean)[..., None], d.shape)
    return s * np.exp(d - d0), s


def reference_loss(
    x, frozen=None, *, loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token_mean",
    constant_length=None, tis_cap=2.0, kl="k3", kl_coef=0.0, entropy_coef=0.0, regularize=False,
):  # fmt: skip
    """(loss_sum, weight_sum, {metric: (sum, count)}) of each batch; every array is 0 where masked out."""
    mask = x["mask"]
    x = {name: a[..., None] if a.ndim < mask.ndim else a for name, a in x.items()}
    x = {name: np.where(mask, a, 0.0) if a.dtype != bool else a for name, a in x.items()}
    frozen = x["logp"] if frozen is None else np.where(mask, frozen, 0.0)
    ratio, kept = ratios(x, frozen, loss)
    value, low, high, dual = objective(x, ratio, kept, clip_low, clip_high, loss, dual_clip)
    drift = x["old"] - x["behavior"]
    weight = np.ones(mask.shape) if tis_cap is None else np.minimum(np.exp(drift), tis_cap)
    token_loss, d = -weight * value, x["logp"] - x["old"]
    inside = mask & x["regularize"] if regularize else mask
    r = x["ref"] - x["logp"]
    kl_ref = {"k1": -r, "k2": r**2 / 2, "k3": np.exp(r) - 1 - r}[kl]
    token_loss = token_loss + np.where(inside, kl_coef * kl_ref - entropy_coef * x["entropy"], 0.0)

    per_row, num = total(token_loss, mask, -1), mask.sum(-1)
    rows = (num > 0).sum(-1)
    loss_sum, weight_sum = {
        "token_mean": lambda: (per_row.sum(-1), num.sum(-1)),
        "sequence_mean": lambda: ((per_row / np.maximum(num, 1)).sum(-1), rows),
        "constant": lambda: (per_row.sum(-1) / constant_length, rows),
    }[aggregation]()
    truncated = np.exp(drift) > (np.inf if tis_cap is None else tis_cap)
    values = (low | high, low, high, kept, truncated, np.exp(drift) - 1 - drift, np.exp(d) - 1 - d)
    metrics = {name: (total(v, mask), mask.sum((-2, -1))) for name, v in zip(METRICS, values, strict=True)}
    if dual_clip is not None:
        metrics["dual_clip_frac"] = (total(dual, mask), mask.sum((-2, -1)))
    if kl_coef:
        metrics["kl_ref"] = (total(kl_ref, inside), inside.sum((-2, -1)))
    return loss_sum, weight_sum, metrics
