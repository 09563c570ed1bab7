"""RLOO (arXiv:2402.14740) on the task of another configuration.

    python launch/train.py --config=configs/rloo.py --workdir=DIR             # on quickstart
    python launch/train.py --config=configs/rloo.py:gsm8k --workdir=DIR

A completion is one action: its loss is the sum over its tokens, and with one update per batch the clipped surrogate's
gradient is REINFORCE's.

Deviations from the paper:
- KL to the reference is a term of the loss (k2, whose on-policy gradient is that of KL) and not of the reward, so that
  it stays out of the leave-one-out baseline.
- Rewards come from a verifier and not from a reward model; batch, group size and learning rate are the task's.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = False
    c.loss.estimator = "rloo"
    c.loss.aggregation = "constant"
    c.loss.constant_length = 1
    c.loss.tis_cap = 0.0
    c.loss.kl, c.loss.kl_coef, c.loss.regularize = "k2", 0.03, "all"
    c.train.num_minibatches = c.train.num_epochs = 1
    return c
