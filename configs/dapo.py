"""DAPO (arXiv:2503.14476) on the task of another configuration.

    python launch/train.py --config=configs/dapo.py --workdir=DIR             # on quickstart
    python launch/train.py --config=configs/dapo.py:gsm8k --workdir=DIR

Deviations from the paper:
- A group is kept when the spread of its raw rewards is above a tolerance, which for right-or-wrong rewards is the
  paper's 0 < correct < G.
- Groups with signal that a step leaves over are carried into the next ones instead of being thrown away
  (dynamic_sampling.surplus = "drop" is the published behaviour), and rounds have a budget, after which the run ends
  with an error.
- One update per batch instead of 16 (train.num_minibatches); batch, group size and learning rate are the task's.
- The penalty for overlong completions spans the last fifth of the task's limit (the paper: 4,096 of 20,480 tokens).
- The mean over tokens is the batch's; the paper takes one per group of completions, then their mean.
- Gradients are clipped by their global norm, and Adam's betas are the task's.
- The sampler's and the trainer's log-probs are one model's here: the truncated importance weight is off, as published.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    c = base(arg)
    c.dynamic_sampling.enable = True
    c.loss.estimator = "grpo"
    c.loss.clip_low, c.loss.clip_high = 0.2, 0.28
    c.loss.aggregation = "token_mean"
    c.loss.tis_cap = 0.0
    c.loss.overlong = "penalty"
    c.loss.overlong_cache_tokens = max(c.sampler.max_completion_tokens // 5, 1)
    return c
