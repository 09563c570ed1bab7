"""What the host hands to the slot engine's programs: one int32 array each, since every array passed costs its time.

The layouts are read in `programs.py`. Rows of a shard are together, so that the array splits as slots do.
"""

from collections.abc import Sequence

import numpy as np

from dynrl.sampling.noise import identity
from dynrl.sampling.programs import ADMISSION_WIDTH
from dynrl.sampling.slots import Admit, Extension, Group, Prefill
from dynrl.sampling.state import MAX_STOP_TOKENS
from dynrl.types import Request


def chunk_array(
    control: Sequence[int], admitted: Sequence[Admit], num_slots: int, shards: int, eos_id: int
) -> np.ndarray:
    """For `programs.chunk`, [1 + S, ADMISSION_WIDTH + 1]: a row of control, then what each slot begins, if it does.

    In the last column stand, for each shard, the slots that begin, first those, then others.
    """
    whole = np.zeros((1 + num_slots, ADMISSION_WIDTH + 1), np.int32)
    whole[0, : len(control)] = control
    host, local = whole[1:], num_slots // shards
    count = [0] * shards
    for slot, rollout, prefix_row in admitted:
        request, row = rollout.group.request, rollout.group.rows[rollout.sample]
        host[slot, :-1] = _admission(request, rollout.sample, prefix_row, row, eos_id)
        shard, index = divmod(slot, local)
        host[shard * local + count[shard], -1] = index
        count[shard] += 1
    return whole


def _admission(request: Request, sample: int, prefix_row: int, row: int, eos_id: int) -> np.ndarray:
    p = request.params
    floats = np.array([p.temperature, p.top_p, p.min_p], np.float32).view(np.int32)
    numbers = np.array(identity(request, sample), np.uint32).view(np.int32)
    stop_ids = [*p.stop_tokens, *([] if p.ignore_eos else [eos_id])]
    stop = stop_ids + [-1] * (MAX_STOP_TOKENS - len(stop_ids))
    scalars = [1, prefix_row, row, request.prompt[-1], len(request.prompt) - 1, p.max_tokens]
    return np.concatenate([scalars, numbers, [p.top_k], floats, stop], dtype=np.int32, casting="unsafe")


def prefill_array(planned: Sequence[Prefill], bucket: int, width: int, shards: int, num_prefix_rows: int) -> np.ndarray:
    """For `programs.prefill`, [shards * width, bucket + 2]; filler goes to the row after the last, which is dropped."""
    host = np.zeros((shards, width, bucket + 2), np.int32)
    host[:, :, -1] = num_prefix_rows
    count = [0] * shards
    for group, prefix_row in planned:
        tokens = group.request.prompt[:-1]  # the last one is fed by the first decode step
        row = host[group.shard, count[group.shard]]
        row[: len(tokens)], row[-2], row[-1] = tokens, len(tokens), prefix_row
        count[group.shard] += 1
    return host.reshape(shards * width, -1)


def extension_array(
    extensions: Sequence[Extension], bucket: int, width: int, shards: int, slots_per_shard: int
) -> np.ndarray:
    """For `programs.extend`, [shards * width, bucket + 3]; -1 is the slot of filler."""
    host = np.zeros((shards, width, bucket + 3), np.int32)
    host[:, :, -2] = -1
    count = [0] * shards
    for slot, tokens, limit in extensions:
        shard, index = divmod(slot, slots_per_shard)
        row = host[shard, count[shard]]
        row[: len(tokens)], row[-3:] = tokens, (len(tokens), index, limit)
        count[shard] += 1
    return host.reshape(shards * width, -1)


def hand_over_array(
    groups: Sequence[Group], per_shard: int, shards: int, num_samples: int, max_prompt_tokens: int, pad_id: int
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
        prompt = group.request.prompt
        host[i, length - len(prompt) : length], host[i, length] = prompt, len(prompt)
        host[i, length + 1 :] = [*group.rows, *group.length, *group.finish]
        tickets_P[i], valid_P[i] = group.request.ticket, True
    return host, tickets_P, valid_P
