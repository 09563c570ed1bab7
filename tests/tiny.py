"""A run of seconds, for the tests that need a whole one."""

from dynrl.config import RunConfig, to_mapping


def tiny_mapping(**overrides):
    """A run of seconds: the quickstart's task, shrunk. Overrides are dotted keys with __ for the dot."""
    mapping = to_mapping(RunConfig())
    mapping |= {"num_steps": 3, "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "progress": "none"}
    mapping["model"] |= {"width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 32}
    mapping["tasks"] |= {
        "source_kwargs": {"min_length": 2, "max_length": 4, "num_symbols": 10},
        "num_tasks": 500,
        "max_prompt_tokens": 5,
    }
    mapping["sampler"] |= {"num_slots": 32, "max_completion_tokens": 6, "chunk_steps": 3}
    mapping["evaluation"] |= {"num_tasks": 40, "every_steps": 0}
    mapping["warm_start"] |= {"num_steps": 60, "batch_size": 64}
    mapping["checkpoint"] |= {"every_steps": 2}
    for key, value in overrides.items():
        group = mapping
        *parents, leaf = key.split("__")
        for name in parents:
            group = group[name]
        assert leaf in group, key
        group[leaf] = value
    return mapping
