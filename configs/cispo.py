"""CISPO (arXiv:2506.13585) on the task of another configuration.

    python launch/train.py --config=configs/cispo.py --workdir=DIR            # on quickstart
    python launch/train.py --config=configs/cispo.py:gsm8k --workdir=DIR

As in the paper: no lower bound of the ratio, no KL, DAPO's dynamic sampling and penalty for overlong completions.

Deviations from the paper:
- It tunes the ratio's upper bound and does not print it; 1 + 2 here.
- Four updates per batch instead of 16; batch, group size and learning rate are the task's.
- The mean over tokens is the batch's; the paper takes one per group of completions, then their mean.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
- The penalty spans the last fifth of the task's limit.
- Surplus groups are carried, as in configs/dapo.py.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = True
    c.loss.estimator = "grpo"
    c.loss.loss = "cispo"
    c.loss.clip_low, c.loss.clip_high = 1.0, 2.0
    c.loss.aggregation = "token_mean"
    c.loss.tis_cap = 0.0
    c.loss.overlong = "penalty"
    c.loss.overlong_cache_tokens = max(c.sampler.max_completion_tokens // 5, 1)
    c.train.num_minibatches, c.train.num_microbatches = 4, 1
    return c
