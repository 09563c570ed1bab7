"""The peers' side of bench_sampler.py: runs in the peer's own virtual environment, without dynrl.

python peer_sampler.py transformers WEIGHTS.npz SPEC    # one pass of all prompts for each line on stdin
python peer_sampler.py tunix WEIGHTS.npz SPEC           # the same; samples with log-probs, as its trainer does
python peer_sampler.py tunix_greedy WEIGHTS.npz SPEC    # the same; its fastest mode, without log-probs
python peer_sampler.py greedy WEIGHTS.npz < SPEC              # prints the greedy tokens of each prompt
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from typing import Any

import numpy as np


def batches(prompts: np.ndarray, counts: np.ndarray, slots: int) -> list[tuple[np.ndarray, int]]:
    """Rounds of S rows, each to its longest; the last one is filled up, so that no other shape compiles."""
    out = []
    for i in range(0, len(prompts), slots):
        rows = prompts[i : i + slots]
        rows = np.concatenate([rows, np.repeat(rows[:1], slots - len(rows), 0)])
        out.append((rows, int(counts[i : i + slots].max())))
    return out


# ---- transformers ----


def llama(weights: Any, spec: dict[str, Any]) -> Any:
    """The same architecture and weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec["vocab"], hidden_size=spec["width"], intermediate_size=spec["mlp_width"],
        num_hidden_layers=spec["num_layers"], num_attention_heads=spec["num_heads"],
        num_key_value_heads=spec["num_kv_heads"], head_dim=spec["head_dim"], hidden_act="silu",
        max_position_embeddings=4096, tie_word_embeddings=True, rms_norm_eps=spec["norm_eps"], pad_token_id=0,
        bos_token_id=None, eos_token_id=None, rope_theta=spec["rope_base"], attn_implementation="sdpa",
    )  # fmt: skip
    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm/scale"]}
    for i in range(spec["num_layers"]):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        state |= {f"{theirs}.self_attn.{n}_proj.weight": weights[f"{ours}/attn/{n}/kernel"].T for n in "qkvo"}
        state |= {f"{theirs}.mlp.{n}_proj.weight": weights[f"{ours}/mlp/{n}/kernel"].T for n in ("gate", "up", "down")}
        state[f"{theirs}.input_layernorm.weight"] = weights[f"{ours}/attn_norm/scale"]
        state[f"{theirs}.post_attention_layernorm.weight"] = weights[f"{ours}/mlp_norm/scale"]
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict({k: torch.tensor(v) for k, v in state.items()}, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    return model


def transformers_pass(weights: Any, spec: dict[str, Any]) -> Any:
    """A function that makes all completions."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    model = llama(weights, spec)
    work = batches(weights["__prompts"], weights["__counts"], spec["slots"])

    def run() -> None:
        with torch.inference_mode():
            for rows, n in work:
                ids = torch.tensor(rows)
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                    max_new_tokens=n, min_new_tokens=n,
                )  # fmt: skip
                assert out.shape[1] == rows.shape[1] + n

    return run


def greedy(weights: Any, spec: dict[str, Any]) -> list[list[int]]:
    """Each prompt alone, without padding."""
    import torch

    model = llama(weights, spec)
    out = []
    with torch.inference_mode():
        for prompt in spec["prompts"]:
            ids, n = torch.tensor([prompt]), spec["new"]
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, min_new_tokens=n
            )
            out.append(made[0, len(prompt) :].tolist())
    return out


# ---- Tunix ----


class NumberTokenizer:
    """Prompts and completions as numbers; the stop token lies outside of the vocabulary."""

    def __init__(self, vocab: int) -> None:
        self._eos = vocab

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of "3 1 4"."""
        return [int(x) for x in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        """The inverse."""
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        """None."""
        return 0

    def eos_id(self) -> int:
        """Never drawn."""
        return self._eos

    def pad_id(self) -> int:
        """Fills on the left."""
        return 0


def tunix_pass(weights: Any, spec: dict[str, Any], greedy: bool) -> Any:
    """A function that makes all completions."""
    import jax
    from flax import nnx
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.llama3 import model as llama3

    d, h, e = spec["width"], spec["num_heads"], spec["head_dim"]
    config = llama3.ModelConfig(
        num_layers=spec["num_layers"], vocab_size=spec["vocab"], embed_dim=d, hidden_dim=spec["mlp_width"],
        num_heads=h, head_dim=e, num_kv_heads=spec["num_kv_heads"], rope_theta=int(spec["rope_base"]),
        norm_eps=spec["norm_eps"], weight_tying=True,
    )  # fmt: skip
    with jax.set_mesh(jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        model = llama3.Llama3(config, rngs=nnx.Rngs(0))
        model.embedder.input_embedding.value = jax.numpy.asarray(weights["embedding"])
        model.final_norm.w.value = jax.numpy.asarray(weights["final_norm/scale"])
        for i, layer in enumerate(model.layers):
            ours = {k: jax.numpy.asarray(weights[f"layers_{i}/{k}"]) for k in LAYER_WEIGHTS}
            for n, proj in (("q", layer.attn.q_proj), ("k", layer.attn.k_proj), ("v", layer.attn.v_proj)):
                proj.w.value = ours[f"attn/{n}/kernel"].reshape(d, -1, e)
            layer.attn.o_proj.w.value = ours["attn/o/kernel"].reshape(h, e, d)
            for n in ("gate", "up", "down"):
                getattr(layer.mlp, f"{n}_proj").kernel.value = ours[f"mlp/{n}/kernel"]
            layer.input_layernorm.w.value = ours["attn_norm/scale"]
            layer.post_attention_layernorm.w.value = ours["mlp_norm/scale"]
    work = batches(weights["__prompts"], weights["__counts"], spec["slots"])
    width = work[0][0].shape[1]
    cache = CacheConfig(width + max(n for _, n in work), spec["num_layers"], spec["num_kv_heads"], e)
    sampler = Sampler(model, NumberTokenizer(spec["vocab"]), cache)
    how = {} if greedy else {"temperature": 1.0, "top_p": 1.0, "return_logprobs": True}

    def run() -> None:
        for rows, n in work:
            texts = [" ".join(map(str, row)) for row in rows.tolist()]
            out = sampler(texts, max_generation_steps=n, max_prompt_length=width, seed=0, **how)
            assert all(len(tokens) == n for tokens in out.tokens)

    return run


LAYER_WEIGHTS = [f"attn/{n}/kernel" for n in "qkvo"] + [f"mlp/{n}/kernel" for n in ("gate", "up", "down")]
LAYER_WEIGHTS += ["attn_norm/scale", "mlp_norm/scale"]


if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    kind, path = sys.argv[1:3]
    arrays = dict(np.load(path))
    if kind == "greedy":
        print(json.dumps(greedy(arrays, json.loads(sys.stdin.read()))), file=lines, flush=True)
    else:
        settings = json.loads(sys.argv[3])
        tunix = kind.startswith("tunix")
        step = tunix_pass(arrays, settings, kind == "tunix_greedy") if tunix else transformers_pass(arrays, settings)
        for _ in sys.stdin:
            begin = time.perf_counter()
            step()
            print(time.perf_counter() - begin, file=lines, flush=True)
