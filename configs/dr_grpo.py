"""Dr. GRPO (arXiv:2503.20783) on the task of another configuration.

    python launch/train.py --config=configs/dr_grpo.py --workdir=DIR          # on quickstart
    python launch/train.py --config=configs/dr_grpo.py:gsm8k --workdir=DIR

Deviations from the paper:
- The constant that replaces a completion's length is sampler.max_completion_tokens, as in the paper's code; the paper's
  text leaves it open.
- One update per batch; batch, group size and learning rate are the task's.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = False
    c.loss.estimator = "dr_grpo"
    c.loss.clip_low = c.loss.clip_high = 0.2
    c.loss.aggregation = "constant"
    c.loss.tis_cap = 0.0
    return c
