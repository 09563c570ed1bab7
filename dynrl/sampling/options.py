"""Sizes and behaviour of the slot engine."""

from dataclasses import dataclass
from typing import Literal

from dynrl.config import ModelConfig
from dynrl.sampling.memory import CacheShape


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and behaviour of a slot engine.

    Attributes:
      num_slots: S, rollouts decoded together; a multiple of the mesh's row shards.
      max_prompt_tokens: L.
      max_completion_tokens: T, the most that a request may ask for, given tokens included.
      group_sizes: what requests may ask for as `num_samples`; each compiles one small program.
      chunk_steps: decode steps between two looks of the host, at most.
      refill_slots: a chunk ends sooner when so many slots came free whose next rollouts the device was not told of, and
        there are some; 0 = S / 16.
      prefill_tokens: tokens that one prefill runs at most, prompts of one length bucket.
      kv_dtype: of the cache; "auto" is the model's.
      weight_update: whether rollouts in flight finish on the weights they began with ("drain"), or go on with the new
        ones over the keys and values of the old ("in_flight"); each token's version is recorded.
      max_extend_tokens: given tokens that one `extend` takes; 0 = requests have one turn.
      full_logprobs: whether log-probs before truncation are kept too.
    """

    num_slots: int
    max_prompt_tokens: int
    max_completion_tokens: int
    group_sizes: tuple[int, ...] = (1,)
    chunk_steps: int = 16
    refill_slots: int = 0
    prefill_tokens: int = 512
    kv_dtype: Literal["auto", "float32", "bfloat16", "int8"] = "auto"
    weight_update: Literal["drain", "in_flight"] = "drain"
    max_extend_tokens: int = 0
    full_logprobs: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, naming the option."""
        least = {"chunk_steps": 1, "refill_slots": 0, "prefill_tokens": 1, "max_extend_tokens": 0}
        least |= {"max_prompt_tokens": 1, "max_completion_tokens": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least {value}")
        if not self.group_sizes or min(self.group_sizes) < 1:
            raise ValueError(f"group_sizes = {self.group_sizes} must hold positive numbers, at least one")


def buckets(longest: int, smallest: int = 16) -> list[int]:
    """Lengths that sequences of up to `longest` tokens are padded to: it, its half and its quarter."""
    sizes = {-(-longest // part) for part in (1, 2, 4)}
    return sorted(s for s in sizes if s >= smallest or s == longest)


def num_prefix_rows(options: EngineOptions) -> int:
    """Prompts per shard that may wait for slots: what one prefill runs, while those of the one before still begin."""
    return 2 * max(1, options.prefill_tokens // buckets(max(options.max_prompt_tokens - 1, 1))[0])


def cache_shape(config: ModelConfig, options: EngineOptions, shards: int) -> CacheShape:
    """Sizes of the arrays of an engine with these options on a mesh of so many row shards."""
    o = options
    return CacheShape(
        model=config,
        kv_dtype=config.dtype if o.kv_dtype == "auto" else o.kv_dtype,
        columns=o.max_prompt_tokens + o.max_completion_tokens - 1,  # the last completion token is never fed
        max_prompt_tokens=max(o.max_prompt_tokens - 1, 1),
        max_completion_tokens=o.max_completion_tokens,
        num_prefix_rows=num_prefix_rows(o) * shards,
        largest_group=max(o.group_sizes),
        shards=shards,
        full_logprobs=o.full_logprobs,
    )
