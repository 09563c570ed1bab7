"""The losses and log-probs against torch's autograd, in float64; skipped where torch is not installed.

Torch's side is written from the papers in torch's own words (detach, clamp, log_softmax), with stop-gradients where
they have them. To run it, an environment needs both: `pip install torch jax`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_reference import OPTIONS, arguments, make_batch, poison

from dynrl.core import policy_loss, token_logprobs

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def objective(logp, old, advantages, mask, loss, clip_low, clip_high, dual_clip):
    if loss == "gspo":
        mean = ((logp.detach() - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        ratio = mean.exp() * torch.exp(logp - logp.detach())
    else:
        ratio = torch.exp(logp - old)
    if loss == "cispo":
        return torch.clamp(ratio, 1 - clip_low, 1 + clip_high).detach() * advantages * logp
    value = torch.minimum(ratio * advantages, torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is None:
        return value
    return torch.where(advantages < 0, torch.maximum(value, dual_clip * advantages), value)


def torch_loss(
    x, logp, entropy, *, loss="ppo", clip_low=0.2, clip_high=0.2, dual_clip=None, aggregation="token_mean",
    constant_length=None, tis_cap=2.0, kl="k3", kl_coef=0.0, entropy_coef=0.0, regularize=False,
):  # fmt: skip
    mask = x["mask"]
    advantages = x["advantages"] if x["advantages"].ndim == 2 else x["advantages"][:, None].expand(mask.shape)
    token_loss = -objective(logp, x["old"], advantages, mask, loss, clip_low, clip_high, dual_clip)
    if tis_cap is not None:
        token_loss = token_loss * torch.exp(x["old"] - x["behavior"]).clamp(max=tis_cap)
    log_r = x["ref"] - logp
    divergence = {"k1": -log_r, "k2": log_r.pow(2) / 2, "k3": log_r.exp() - 1 - log_r}[kl]
    inside = mask & x["regularize"] if regularize else mask
    token_loss = token_loss + (kl_coef * divergence - entropy_coef * entropy) * inside
    rows = (token_loss * mask).sum(1)
    if aggregation == "sequence_mean":
        rows = rows / mask.sum(1).clamp(min=1)
    return rows.sum() / (constant_length if aggregation == "constant" else 1)


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients(name):
    batch = make_batch(5, (30, 7), token_advantages="token" in name)
    x = {key: torch.tensor(value) for key, value in batch.items()}
    logp, entropy = x["logp"].requires_grad_(), x["entropy"].requires_grad_()
    expected = torch_loss(x, logp, entropy, **OPTIONS[name])
    expected.backward()
    arrays, options = arguments(poison(batch), OPTIONS[name])
    entropy_NT = options.pop("entropy_NT", None)

    def loss(logp, entropy):
        extra = {} if entropy is None else {"entropy_NT": entropy}
        return policy_loss(logp, *arrays[1:], **options, **extra)[0]

    value, (grad, entropy_grad) = jax.value_and_grad(loss, argnums=(0, 1))(jnp.asarray(arrays[0]), entropy_NT)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-12)
    np.testing.assert_allclose(grad, logp.grad, rtol=1e-10, atol=1e-14)
    if entropy_grad is not None:
        np.testing.assert_allclose(entropy_grad, entropy.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_log_probs_entropy_and_gradients(chunk_size):
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(4, 6, 8)), rng.normal(size=(8, 33)), np.float64(0.7)]
    targets = rng.integers(0, 33, (4, 6))
    weights = rng.normal(size=(2, 4, 6))
    leaves = [torch.tensor(x, requires_grad=True) for x in inputs]
    all_logp = torch.log_softmax(leaves[0] @ leaves[1] / leaves[2], dim=-1)
    logp = all_logp.gather(-1, torch.tensor(targets)[..., None])[..., 0]
    entropy = torch.distributions.Categorical(logits=all_logp).entropy()
    (logp * torch.tensor(weights[0]) + entropy * torch.tensor(weights[1])).sum().backward()

    def loss(hidden, unembed, temperature):
        options = {"chunk_size": chunk_size, "logits_dtype": jnp.float64, "entropy_gradient": True}
        got = token_logprobs(hidden, unembed, targets, temperature=temperature, **options)
        return (got[0] * weights[0] + got[1] * weights[1]).sum(), got

    grads, got = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
    np.testing.assert_allclose(got[0], logp.detach(), rtol=1e-12)
    np.testing.assert_allclose(got[1], entropy.detach(), rtol=1e-12)
    for actual, leaf in zip(grads, leaves, strict=True):
        np.testing.assert_allclose(actual, leaf.grad, rtol=1e-10, atol=1e-13)
