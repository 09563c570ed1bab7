"""What the tests of the losses share: the gradient of `policy_loss` with everything it returns."""

import jax
import jax.numpy as jnp

from dynrl.core import policy_loss


def value_and_grad(arrays, named=None, **options):
    """((loss, (weight, metrics)), gradients of loss_sum by logp and, if there is one, by entropy)."""
    named = dict(named or {})
    entropy = {key: named.pop(key) for key in ("entropy_NT",) if key in named}

    def loss(logp, entropy):
        loss_sum, weight_sum, metrics = policy_loss(logp, *arrays[1:], **named, **entropy, **options)
        return loss_sum, (weight_sum, metrics)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(jnp.asarray(arrays[0]), entropy)
