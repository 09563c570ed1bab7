"""Sums with a calculator: rollouts of several turns, between which an environment answers.

    python launch/train.py --config=configs/calculator.py --workdir=runs/calculator            # dapo
    python launch/train.py --config=configs/calculator.py:grpo --workdir=runs/calculator_grpo

The policy may write `[47+86]`, reads `133;`, and goes on; it is rewarded for the right sum at the end. The warm start
shows it both habits: to call the calculator, and to answer at once.

On two CPU cores: 2.5 minutes with empty caches, the warm start included. Seed 0, accuracy in 100 steps: 0.28 -> 0.58
with dapo (1.47 million generated tokens), 0.28 -> 0.54 with grpo (0.76 million).

Argument: `dapo` (dynamic sampling: groups without signal are replaced) or `grpo` (every group is trained).
"""

from ml_collections import ConfigDict

from dynrl.config import config_dict

ALGORITHMS = ("dapo", "grpo")


def get_config(arg: str = "") -> ConfigDict:
    algorithm = arg or "dapo"
    if algorithm not in ALGORITHMS:
        raise ValueError(f"configs/calculator.py takes one of {', '.join(ALGORITHMS)}, got {arg!r}")
    c = config_dict()
    c.num_steps = 100
    c.num_prompts_per_step = 32
    c.num_generations_per_prompt = 8

    c.model.num_layers = 2
    c.model.width = 64
    c.model.num_heads = 4
    c.model.num_kv_heads = 4
    c.model.head_dim = 16
    c.model.mlp_width = 256

    c.tasks.source = "calculator"
    c.tasks.max_prompt_tokens = 12
    c.sampler.max_completion_tokens = 40
    c.sampler.num_slots = 256
    c.evaluation.num_tasks = 512
    c.evaluation.every_steps = 10
    c.evaluation.temperature = 1.0
    c.warm_start.num_steps = 220
    c.warm_start.learning_rate = 3e-3

    c.dynamic_sampling.enable = algorithm == "dapo"
    c.schedule.name = "in_order"
    c.schedule.max_lookahead_versions = 1
    c.train.learning_rate = 4e-4
    c.train.lr_schedule = "linear"
    c.train.warmup_steps = 5
    c.train.num_microbatches = 4
    return c
