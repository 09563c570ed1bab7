"""Counter-based random numbers for selectors: pure functions of a seed and of where they stand."""

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_WORDS_PER_COUNTER = 4  # Philox4x64 yields four words for one value of its counter


def counter_words(seed: int, stream: str, count: int, *, index: int = 0, start: int = 0) -> np.ndarray:
    """Returns random words as a pure function of where they stand.

    Philox is keyed by the seed and the stream; only its raw words are used, which no version of NumPy changes.

    Args:
      seed: 0 <= seed < 2**64.
      stream: names the use, so that two uses of one seed share nothing.
      count: words to return.
      index: which of the stream's sequences.
      start: position of the first word in its sequence; any position costs the same.

    Returns:
      uint64 [count], uniform.
    """
    block, offset = divmod(start, _WORDS_PER_COUNTER)
    return _philox(seed, stream, index, block).random_raw(offset + count)[offset:]


def uniforms(seed: int, stream: str, count: int, *, index: int = 0, start: int = 0) -> np.ndarray:
    """Returns float64 [count] in [0, 1), from `counter_words`; times an integer they never round up to it."""
    words = counter_words(seed, stream, count, index=index, start=start)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def generator(seed: int, stream: str, index: int) -> np.random.Generator:
    """Returns NumPy's generator on one of the stream's sequences, for distributions that take more than one word.

    Its draws are as stable as NumPy's: the same for one version.
    """
    return np.random.Generator(_philox(seed, stream, index, 0))


def distinct_ids(seed: int, stream: str, count: int, length: int, *, index: int) -> np.ndarray:
    """Returns int64 [count] distinct ids below the length in random order, every such sequence as likely.

    What it costs depends on the count alone. The count is at most the length.
    """
    if 2 * count >= length:
        return np.argsort(counter_words(seed, stream, length, index=index), kind="stable")[:count]
    num_words = count + count // 8 + 8
    while True:
        drawn = (uniforms(seed, stream, num_words, index=index) * length).astype(np.int64)
        first = np.sort(np.unique(drawn, return_index=True)[1])
        if len(first) >= count:
            return drawn[first[:count]]
        num_words *= 2


def weighted_order(weights: np.ndarray, unit: np.ndarray, count: int) -> np.ndarray:
    """Returns positions sampled one after the other without replacement, each in proportion to its weight.

    The order of arrival of exponential clocks that run at these rates (Efraimidis and Spirakis, 2006).

    Args:
      weights: float64, at least 0; what has no weight is never sampled.
      unit: as many uniforms in [0, 1).
      count: how many to sample; fewer are returned where fewer have a weight.

    Returns:
      int64, in the order in which they were sampled.
    """
    positions = np.flatnonzero(weights > 0)
    arrivals = -np.log1p(-unit[positions]) / weights[positions]
    if count < len(positions):
        nearest = np.argpartition(arrivals, count)[:count]
        positions, arrivals = positions[nearest], arrivals[nearest]
    return positions[np.argsort(arrivals, kind="stable")]


def checked_seed(seed: int) -> int:
    """Returns the seed as an int; ValueError where it does not lie in [0, 2**64)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    return int(seed)


def refuse_other_seed(state: Mapping[str, Any], seed: int) -> None:
    """Raises ValueError for the state of a selector with another seed."""
    if state["seed"] != seed:
        raise ValueError(f"the saved selector has seed {state['seed']}, this one {seed}")


@functools.cache
def _stream_key(stream: str) -> int:
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def _philox(seed: int, stream: str, index: int, block: int) -> np.random.Philox:
    key = np.array([seed, _stream_key(stream)], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([block, index, 0, 0], dtype=np.uint64))
