"""TRL's side of bench_peers.py; runs in the peer's own environment, never in dynrl's.

GRPOTrainer as fast as its options make it here: no gradient checkpointing, no reference model, no logging, no
checkpoints, fused AdamW, generation and update in float32 on all cores.
"""
# pyright: reportMissingImports=false

import contextlib
import json
import sys
import tempfile
import time
from typing import Any

from bench_peers import Finished, Pacer


def make_tokenizer(alphabet: str) -> Any:
    """One token per character, with the ids of dynrl's CharTokenizer; the stop token lies behind the vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(["<pad>", "<unused>", *alphabet, "<eos>"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unused>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unused>", eos_token="<eos>", padding_side="left"
    )


def make_model(spec: dict[str, Any], vocab_size: int) -> Any:
    """The same architecture as dynrl's decoder, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=spec["width"],
        intermediate_size=spec["mlp_width"],
        num_hidden_layers=spec["num_layers"],
        num_attention_heads=spec["num_heads"],
        num_key_value_heads=spec["num_kv_heads"],
        head_dim=spec["head_dim"],
        hidden_act="silu",
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=vocab_size,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def prefix_fraction(given: str, expected: str) -> float:
    """The share of leading characters that are right, as dynrl's verifier of that name has it."""
    given, expected = given.strip(), expected.strip()
    pairs = enumerate(zip(given, expected))  # noqa: B905 - the shorter one counts
    num_right = next((i for i, (left, right) in pairs if left != right), min(len(given), len(expected)))
    return num_right / max(len(given), len(expected)) if given or expected else 1.0


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL's signature."""
    return [prefix_fraction(given, expected) for given, expected in zip(completions, answer)]  # noqa: B905


def make_trainer(spec: dict[str, Any], pacer: Pacer, output_dir: str) -> Any:
    """A GRPOTrainer whose phases are timed, and which pauses between blocks."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        """Times generation and reward; what follows them until the step's end is the update."""

        secs: dict[str, float] = {}  # noqa: RUF012
        num_tokens, update_since = 0, 0.0

        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            rewards = super()._calculate_rewards(*args, **kwargs)
            self.secs["reward"] = time.perf_counter() - begin
            return rewards

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begin = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            self.update_since = time.perf_counter()
            self.secs["generation"] = self.update_since - begin - self.secs["reward"]
            self.num_tokens = int(batch["completion_mask"].sum())
            return batch

    class StepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            secs = {**trainer.secs, "update": time.perf_counter() - trainer.update_since}
            pacer.step(secs, trainer.num_tokens)

    rows, m = spec["num_groups"] * spec["num_samples"], spec["num_microbatches"]
    config = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=rows // m,
        gradient_accumulation_steps=m,
        steps_per_generation=m,
        num_generations=spec["num_samples"],
        max_completion_length=spec["num_tokens"],
        temperature=1.0,
        num_iterations=1,
        beta=0.0,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        max_steps=1_000_000,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_completions=False,
    )
    tokenizer = make_tokenizer(spec["alphabet"])
    trainer = TimedTrainer(
        model=make_model(spec, len(tokenizer) - 1),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": spec["prompts"], "answer": spec["answers"]}),
        processing_class=tokenizer,
        callbacks=[StepEnd()],
    )
    return trainer


def main() -> None:
    """Takes the specification from the first line, then steps as asked."""
    pacer = Pacer()
    spec = json.loads(sys.stdin.readline())
    import torch
    import transformers
    import trl

    torch.set_num_threads(spec["num_threads"])
    with tempfile.TemporaryDirectory() as output_dir, contextlib.suppress(Finished):
        trainer = make_trainer(spec, pacer, output_dir)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        embedding = trainer.model.get_input_embeddings()
        num_params = sum(p.numel() for p in trainer.model.parameters())
        pacer.say({"num_params": num_params, "vocab_size": embedding.num_embeddings, "versions": versions})
        pacer.wait()
        trainer.train()


if __name__ == "__main__":
    main()
