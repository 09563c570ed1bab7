"""GSPO (arXiv:2507.18071) on the task of another configuration.

    python launch/train.py --config=configs/gspo.py --workdir=DIR             # on quickstart
    python launch/train.py --config=configs/gspo.py:gsm8k --workdir=DIR

Four updates per batch, as in the paper's experiments: with one, every ratio is 1 and the clip idle.

Deviations from the paper:
- The gradient takes the paper's token form (GSPO-token, equation 14), which equals GSPO for one advantage per row.
- Batch, group size and learning rate are the task's.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = False
    c.loss.estimator = "grpo"
    c.loss.loss = "gspo"
    c.loss.clip_low, c.loss.clip_high = 3e-4, 4e-4
    c.loss.aggregation = "sequence_mean"
    c.loss.tis_cap = 0.0
    c.train.num_minibatches, c.train.num_microbatches = 4, 1
    return c
