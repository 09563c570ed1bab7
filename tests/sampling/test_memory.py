import dataclasses
import os
from functools import partial

import jax
import pytest

from dynrl.config import ModelConfig
from dynrl.sampling import memory
from dynrl.sampling.memory import CacheShape, check_fits, device_bytes, slots_for_budget
from dynrl.sampling.state import empty_state

MODEL = ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
SHAPE = CacheShape(
    model=MODEL, kv_dtype="float32", columns=10, max_prompt_tokens=5, max_completion_tokens=6, num_prefix_rows=3,
    largest_group=1, shards=1, full_logprobs=False,
)  # fmt: skip
MIB = 2**20


def with_dtype(kv_dtype):
    return dataclasses.replace(SHAPE, kv_dtype=kv_dtype)


def test_bytes_by_hand():
    # Keys and values of 2 layers and 2 heads are 8 vectors of 4 numbers.
    assert with_dtype("float32").token_bytes == 8 * 4 * 4
    assert with_dtype("bfloat16").token_bytes == 8 * 4 * 2
    assert with_dtype("int8").token_bytes == 8 * (4 + 4)  # and a float32 scale for each vector
    # A slot: 10 columns, and 4 rows of 6 tokens with log-prob and version, 4 bytes each.
    assert SHAPE.engine_bytes(3) - SHAPE.engine_bytes(2) == 10 * 128 + 4 * 6 * 12 == 1568
    int8 = with_dtype("int8")
    assert int8.engine_bytes(3) - int8.engine_bytes(2) == 10 * 64 + 288
    # Groups of 5 on 2 shards need rows for 4 times as many, however few slots there are.
    grouped = dataclasses.replace(SHAPE, largest_group=5, shards=2)
    assert grouped.num_rows(4) == 4 * 5 * 2
    assert grouped.num_rows(16) == 4 * 16
    assert dataclasses.replace(SHAPE, full_logprobs=True).output_bytes(2) == 8 * 6 * 16
    assert SHAPE.prefix_bytes == 3 * 5 * 128 == 1920
    assert SHAPE.engine_bytes(8) == 8 * 1568 + 1920 == 14464
    # A 0.5B model of 24 layers with 2 heads of 64, 4,096 slots of 1,024 columns in 8 bits.
    model = ModelConfig(num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64)
    large = CacheShape(model, "int8", 1024, 512, 1024, 16, 8, 1, False)
    assert large.token_bytes == 2 * 24 * 2 * 68 == 6528
    assert large.engine_bytes(4096) == 4096 * (1024 * 6528 + 4 * 1024 * 12) + 16 * 512 * 6528


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize("full", [False, True])
def test_the_engine_s_arrays_take_what_is_reckoned(kv_dtype, group, full):
    shape, slots = dataclasses.replace(with_dtype(kv_dtype), largest_group=group, full_logprobs=full), 8
    state = jax.eval_shape(partial(empty_state, shape, slots))
    arrays = jax.tree.leaves((state.layers, state.prefix, state.outputs))  # what a slot is doing is some 100 bytes
    assert sum(x.size * x.dtype.itemsize for x in arrays) == shape.engine_bytes(slots)


def test_the_description_has_all_sizes():
    model = ModelConfig(num_layers=4, num_heads=8, num_kv_heads=8, head_dim=64)
    # 16,384 bytes a token: 32 slots of 256 columns are 128 MiB, 16 prompts of 128 tokens 32; outputs 1.5 MiB.
    shape = CacheShape(model, "float32", 256, 128, 1024, 16, 1, 1, False)
    assert shape.describe(32) == (
        "KV cache 128.0 MiB (32 slots x 256 tokens x 16384 B, float32), prompts 32.0 MiB, outputs 1.5 MiB"
    )


@pytest.mark.parametrize(
    ("budget", "multiple_of", "slots"),
    [
        (14464, 1, 8),  # exactly
        (14463, 1, 7),
        (14464 + 1567, 1, 8),
        (14464, 4, 8),
        (14463, 4, 4),
        (14464 + 3 * 1568, 4, 8),
        (14464, 3, 6),
        (1920 + 1568, 1, 1),
    ],
)
def test_the_most_slots_that_a_budget_holds(budget, multiple_of, slots):
    assert slots_for_budget(SHAPE, budget, multiple_of) == slots
    assert SHAPE.engine_bytes(slots) <= budget < SHAPE.engine_bytes(slots + multiple_of)


@pytest.mark.parametrize("budget", [0, 100, 1919, 1920, 1920 + 8 * 1568 - 1])
def test_a_budget_without_room_says_what_is_needed(budget):
    with pytest.raises(ValueError, match=r"do not hold 8 slots: those take 14\.1 KiB .*8 slots x 10 tokens x 128 B"):
        slots_for_budget(SHAPE, budget, 8)


def test_a_budget_without_room_names_mebibytes():
    # 512 KiB a token: 2 slots of 1,000 columns take 1,000 MiB, one prompt of 10 tokens 5; the outputs 0.
    model = ModelConfig(num_layers=32, num_heads=32, num_kv_heads=32, head_dim=64)
    shape = CacheShape(model, "float32", 1000, 10, 16, 1, 1, 1, False)
    message = r"^300\.0 MiB do not hold 2 slots: those take 1,005\.0 MiB \(KV cache 1,000\.0 MiB .*, prompts 5\.0 MiB"
    with pytest.raises(ValueError, match=message):
        slots_for_budget(shape, 300 * MIB, 2)


def test_what_does_not_fit_is_refused_with_all_sizes(monkeypatch):
    sizes = {"weights": 600 * MIB, "KV cache": 1500 * MIB}
    monkeypatch.setattr(memory, "device_bytes", lambda: 2100 * MIB)
    check_fits(sizes)  # exactly
    check_fits({})
    monkeypatch.setattr(memory, "device_bytes", lambda: 2100 * MIB - 1)
    message = r"2,100\.0 MiB do not fit into the 2,100\.0 MiB of a device: weights 600\.0 MiB, KV cache 1,500\.0 MiB"
    with pytest.raises(ValueError, match=message):
        check_fits(sizes)
    monkeypatch.setattr(memory, "device_bytes", lambda: None)  # unknown: nothing is refused
    check_fits(sizes)


def test_emulated_devices_share_the_host_s_memory():
    share = device_bytes()
    assert share is not None
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < share * jax.local_device_count() <= whole  # a container may have less


def test_other_devices_tell_their_own_limit(monkeypatch):
    class Device:
        platform = "gpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    for stats, limit in [({"bytes_limit": 5, "bytes_in_use": 3}, 5), ({}, None), (None, None)]:
        monkeypatch.setattr(memory.jax, "local_devices", lambda stats=stats: [Device(stats)])
        assert device_bytes() == limit


def test_a_system_that_does_not_tell_is_no_error(monkeypatch):
    def sysconf(name):
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert device_bytes() is None
