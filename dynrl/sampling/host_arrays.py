"""What the host hands to the slot engine's programs: one int32 array each, since every array passed costs its time.

The layouts are read in `programs.py`. Rows of a shard are together, so that the array splits as slots do. A process
writes the rows of its own shards (`own`) only: those of others are not sent to its devices.
"""

import struct
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from dynrl.sampling.noise import identity
from dynrl.sampling.programs import ADMISSION_WIDTH
from dynrl.sampling.slots import Extension, Group, Prefill, Rollout
from dynrl.sampling.state import MAX_STOP_TOKENS


def plan_array(plan: Sequence[Iterable[Rollout]], own: Collection[int], per_shard: int, eos_id: int) -> np.ndarray:
    """For `programs.chunk`, [shards * per_shard, ADMISSION_WIDTH]: who is next, by shard."""
    host = np.zeros((len(plan) * per_shard, ADMISSION_WIDTH), np.int32)
    for shard in own:
        rows = [_admission(r, eos_id) for r in plan[shard]]
        if rows:
            at = shard * per_shard
            host[at : at + len(rows)] = np.array(rows, np.int64).astype(np.int32)  # those of 32 bits wrap
    return host


def _admission(rollout: Rollout, eos_id: int) -> tuple[int, ...]:
    group, request = rollout.group, rollout.group.request
    p, row = request.params, group.rows[rollout.sample]
    assert group.prefix_row is not None
    stop_ids = (*p.stop_tokens, *(() if p.ignore_eos else (eos_id,)))
    stop = stop_ids + (-1,) * (MAX_STOP_TOKENS - len(stop_ids))
    floats = struct.unpack("3i", struct.pack("3f", p.temperature, p.top_p, p.min_p))
    place = 1, request.multi_turn, group.prefix_row, row, request.prompt[-1], len(request.prompt) - 1, p.max_tokens
    return *place, *identity(request, rollout.sample), p.top_k, *floats, *stop


def prefill_array(
    planned: Sequence[Prefill], own: Collection[int], bucket: int, width: int, shards: int, num_prefix_rows: int
) -> np.ndarray:
    """For `programs.prefill`, [shards * width, bucket + 2]; filler goes to the row after the last, which is dropped."""
    host = np.zeros((shards, width, bucket + 2), np.int32)
    host[:, :, -1] = num_prefix_rows
    count = [0] * shards
    for group, prefix_row in planned:
        if group.shard not in own:
            continue
        tokens = group.request.prompt[:-1]  # the last one is fed by the first decode step
        row = host[group.shard, count[group.shard]]
        row[: len(tokens)], row[-2], row[-1] = tokens, len(tokens), prefix_row
        count[group.shard] += 1
    return host.reshape(shards * width, -1)


def extension_array(
    extensions: Sequence[Extension], own: Collection[int], bucket: int, width: int, shards: int, slots_per_shard: int
) -> np.ndarray:
    """For `programs.extend`, [shards * width, bucket + 3]; -1 is the slot of filler."""
    host = np.zeros((shards, width, bucket + 3), np.int32)
    host[:, :, -2] = -1
    count = [0] * shards
    for slot, tokens, limit in extensions:
        shard, index = divmod(slot, slots_per_shard)
        if shard not in own:
            continue
        row = host[shard, count[shard]]
        row[: len(tokens)], row[-3:] = tokens, (len(tokens), index, limit)
        count[shard] += 1
    return host.reshape(shards * width, -1)


def hand_over_array(
    groups: Sequence[Group], own: Collection[int], per_shard: int, shards: int, num_samples: int,
    max_prompt_tokens: int, pad_id: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """For `programs.hand_over`, [P, L + 1 + 3 * G]; tickets [P], -1 in filler; bool [P], no filler."""
    p, g, length = per_shard * shards, num_samples, max_prompt_tokens
    host = np.zeros((p, length + 1 + 3 * g), np.int32)
    host[:, :length], host[:, length] = pad_id, 1  # filler prompts hold one pad token
    tickets_P, valid_P = np.full(p, -1, np.int64), np.zeros(p, bool)
    count = [0] * shards
    for group in groups:
        i = group.shard * per_shard + count[group.shard]
        count[group.shard] += 1
        tickets_P[i], valid_P[i] = group.request.ticket, True
        if group.shard in own:
            prompt = group.request.prompt
            host[i, length - len(prompt) : length], host[i, length] = prompt, len(prompt)
            host[i, length + 1 :] = [*group.rows, *group.length, *group.finish]
    return host, tickets_P, valid_P
