"""GSM8K (arXiv:2110.14168): questions from JSON Lines files, for pretrained models.

    python launch/train.py --config=configs/gsm8k.py:DATA --workdir=DIR

DATA is a folder with the data set's train.jsonl and test.jsonl (fields `question` and `answer`); data/gsm8k if empty.

The model below is a tiny random one, to try the path on a CPU: it earns nothing, and the run ends within a minute with
an error that says that every group was all wrong. Training rows that are evaluation questions too are left out.
"""

from typing import Any

from dynrl.config import config_dict


def get_config(arg: str = "") -> Any:
    folder = (arg or "data/gsm8k").rstrip("/")
    c = config_dict()
    c.num_steps = 100
    c.num_prompts_per_step = 8
    c.num_generations_per_prompt = 8

    c.tasks.source = "jsonl"
    fields = {
        "prompt": "Question: {question}\nAnswer:",
        "answer": "answer",
        "source": "gsm8k",
        "verifier": "gsm8k",
    }
    c.tasks.source_kwargs = {"path": f"{folder}/train.jsonl", **fields}
    c.tasks.max_prompt_tokens = 640
    c.tasks.long_prompts = "skip"
    c.evaluation.source = "jsonl"
    c.evaluation.source_kwargs = {"path": f"{folder}/test.jsonl", **fields}
    c.evaluation.num_tasks = 128
    c.evaluation.every_steps = 20
    c.model.tokenizer = "byte"

    c.sampler.max_completion_tokens = 64
    c.sampler.num_slots = 64
    c.dynamic_sampling.max_num_gen_batches = 5
    c.loss.overlong = "penalty"
    c.loss.overlong_cache_tokens = 12
    c.train.learning_rate = 1e-5
    c.train.num_microbatches = 2
    return c
