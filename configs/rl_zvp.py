"""RL-ZVP (arXiv:2509.21880) on the task of another configuration.

    python launch/train.py --config=configs/rl_zvp.py --workdir=DIR           # on quickstart
    python launch/train.py --config=configs/rl_zvp.py:gsm8k --workdir=DIR

Every group trains: one without signal by its tokens' entropies. So dynamic sampling is off; on would be an error.

Deviations from the paper:
- A group without signal counts as right when its rewards are above 0, so that graded rewards have a sign too.
- Entropies are those of the weights being trained, without a gradient; later updates of a batch see newer ones.
- The mean over tokens is the batch's; the paper takes one per group of completions, then their mean.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
- Batch, group size and learning rate are the task's.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = False
    c.loss.estimator = "rl_zvp"
    c.loss.estimator_kwargs = {"alpha": 0.1}
    c.loss.clip_low, c.loss.clip_high = 0.2, 0.28
    c.loss.aggregation = "token_mean"
    c.loss.tis_cap = 0.0
    return c
