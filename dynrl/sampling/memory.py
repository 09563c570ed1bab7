"""What the slot engine takes on a device, before it takes it."""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from etils import epath

from dynrl.config import ModelConfig

ROWS_PER_SLOT = 4


@dataclass(frozen=True)
class CacheShape:
    """Sizes of the engine's arrays, over all devices.

    Attributes:
      model: the architecture.
      kv_dtype: of the cache: float32, bfloat16 or int8.
      columns: tokens that a slot's cache holds.
      max_prompt_tokens: tokens that a row of the prefix holds.
      max_completion_tokens: tokens that a row of outputs holds.
      num_prefix_rows: prompts that wait for slots.
      largest_group: completions of one request at most.
      shards: row shards.
      full_logprobs: whether outputs hold log-probs before truncation too.
    """

    model: ModelConfig
    kv_dtype: str
    columns: int
    max_prompt_tokens: int
    max_completion_tokens: int
    num_prefix_rows: int
    largest_group: int
    shards: int
    full_logprobs: bool

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values in all layers."""
        scale = 4 if self.kv_dtype == "int8" else 0
        per_head = self.model.head_dim * jnp.dtype(self.kv_dtype).itemsize + scale
        return 2 * self.model.num_layers * self.model.num_kv_heads * per_head

    def num_rows(self, num_slots: int) -> int:
        """Rows of outputs: a group's finished rollouts wait there for its longest one, while their slots go on."""
        return ROWS_PER_SLOT * max(num_slots, self.largest_group * self.shards)

    def output_bytes(self, num_slots: int) -> int:
        """Of the outputs: token, log-probs and version."""
        return self.num_rows(num_slots) * self.max_completion_tokens * (16 if self.full_logprobs else 12)

    @property
    def prefix_bytes(self) -> int:
        """Of the prompts that wait for slots."""
        return self.num_prefix_rows * self.max_prompt_tokens * self.token_bytes

    def engine_bytes(self, num_slots: int) -> int:
        """Of the whole engine, without weights."""
        return num_slots * self.columns * self.token_bytes + self.prefix_bytes + self.output_bytes(num_slots)

    def describe(self, num_slots: int) -> str:
        """One line for people."""
        return (
            f"KV cache {_size(num_slots * self.columns * self.token_bytes)} ({num_slots} slots x {self.columns} tokens "
            f"x {self.token_bytes} B, {self.kv_dtype}), prompts {_size(self.prefix_bytes)}, outputs "
            f"{_size(self.output_bytes(num_slots))}"
        )


def slots_for_budget(shape: CacheShape, budget_bytes: int, multiple_of: int) -> int:
    """The most slots, a multiple of `multiple_of`, that fit into a budget over all devices.

    Raises:
      ValueError: when not even `multiple_of` slots fit.
    """
    slots = max(0, budget_bytes // (shape.columns * shape.token_bytes)) // multiple_of * multiple_of
    while slots and shape.engine_bytes(slots) > budget_bytes:
        slots -= multiple_of
    if not slots:
        raise ValueError(
            f"{_size(budget_bytes)} do not hold {multiple_of} slots: those take "
            f"{_size(shape.engine_bytes(multiple_of))} ({shape.describe(multiple_of)})"
        )
    return slots


def check_fits(what: dict[str, int]) -> None:
    """Checks bytes per device, by what takes them, against what a device has.

    Raises:
      ValueError: with all the sizes.
    """
    limit, used = device_bytes(), sum(what.values())
    if limit is not None and used > limit:
        parts = ", ".join(f"{name} {_size(size)}" for name, size in what.items())
        raise ValueError(f"{_size(used)} do not fit into the {_size(limit)} of a device: {parts}")


def device_bytes() -> int | None:
    """What a device of this process has: its own memory, or an equal share of the host's; None where unknown."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        return None
    container = epath.Path("/sys/fs/cgroup/memory.max")
    limit = container.read_text().strip() if container.exists() else "max"
    return (min(host, int(limit)) if limit.isdigit() else host) // jax.local_device_count()


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
