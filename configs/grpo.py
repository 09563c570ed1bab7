"""GRPO (arXiv:2402.03300) on the task of another configuration.

    python launch/train.py --config=configs/grpo.py --workdir=DIR             # on quickstart
    python launch/train.py --config=configs/grpo.py:gsm8k --workdir=DIR

Deviations from the paper:
- Rewards of outcomes only; no process supervision.
- The reference stays the policy that training begins with; the paper renews it in each outer iteration.
- The paper's std has no stated ddof and no eps: 1 and 1e-6 here, as in verl.
- One update per batch, as in the paper's experiments; batch, group size and learning rate are the task's.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = False
    c.loss.estimator = "grpo"
    c.loss.clip_low = c.loss.clip_high = 0.2
    c.loss.aggregation = "sequence_mean"
    c.loss.tis_cap = 0.0
    c.loss.kl, c.loss.kl_coef, c.loss.regularize = "k3", 0.04, "all"
    return c
