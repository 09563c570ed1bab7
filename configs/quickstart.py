"""Digit sorting over mixed lengths, from a short supervised warm start.

    python launch/train.py --config=configs/quickstart.py --workdir=runs/quickstart            # dapo
    python launch/train.py --config=configs/quickstart.py:grpo --workdir=runs/quickstart_grpo

On two CPU cores: 79 s with empty caches, warm start and compilation included. Expected, mean of seeds 0 to 2
(tests/benchmarks/bench_quickstart.py): accuracy 0.21 -> 0.56 with dapo, 0.21 -> 0.52 with grpo, in 150 steps.

Argument: `dapo` (dynamic sampling: groups without signal are replaced) or `grpo` (every group is trained).
"""

from ml_collections import ConfigDict

from dynrl.config import config_dict

ALGORITHMS = ("dapo", "grpo")


def get_config(arg: str = "") -> ConfigDict:
    algorithm = arg or "dapo"
    if algorithm not in ALGORITHMS:
        raise ValueError(f"configs/quickstart.py takes one of {', '.join(ALGORITHMS)}, got {arg!r}")
    c = config_dict()
    c.num_steps = 150
    c.num_prompts_per_step = 64
    c.num_generations_per_prompt = 8

    c.model.num_layers = 2
    c.model.width = 64
    c.model.num_heads = 4
    c.model.num_kv_heads = 1
    c.model.head_dim = 16
    c.model.mlp_width = 256

    c.tasks.source = "digit_sorting"
    c.tasks.source_kwargs = {"min_length": 3, "max_length": 11}
    c.tasks.max_prompt_tokens = 12
    c.sampler.max_completion_tokens = 12
    c.sampler.num_slots = 512  # a whole round at once
    c.evaluation.num_tasks = 1024
    c.evaluation.every_steps = 10
    c.evaluation.temperature = 1.0  # as in training: what the rewards improve
    c.warm_start.num_steps = 120
    c.warm_start.learning_rate = 2e-3

    c.dynamic_sampling.enable = algorithm == "dapo"
    c.dynamic_sampling.refill = "full"  # the decoder's rows would be idle otherwise; what is left over is carried
    c.train.learning_rate = 6e-4
    c.train.lr_schedule = "linear"
    c.train.warmup_steps = 10
    c.train.num_microbatches = 4  # activations that fit the caches of a CPU
    return c
