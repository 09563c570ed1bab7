"""DAPO's soft punishment of completions that come near the length limit."""

import numpy as np

from dynrl.core.checks import check_number
from dynrl.core.group_stats import array_namespace
from dynrl.types import Array


def soft_overlong_penalty(length: Array, *, max_tokens: int, cache_tokens: int) -> Array:
    """Computes the penalty to add to a completion's reward: arXiv:2503.14476, equation 13.

    0 up to max_tokens - cache_tokens, from there linear to -1 at max_tokens, and -1 beyond. It shapes the reward that
    advantages are made from; filters see the raw metric, or all-wrong groups would pass them.

    Args:
      length: int, tokens of each completion; any shape. NumPy gives NumPy, anything else JAX.
      max_tokens: tokens where the penalty is -1 (Lmax).
      cache_tokens: tokens before it over which the penalty grows (Lcache).

    Returns:
      float32, the shape of `length`.

    Raises:
      ValueError: at trace time, unless 1 <= cache_tokens <= max_tokens.
    """
    check_number("max_tokens", max_tokens, at_least=1, integer=True)
    check_number("cache_tokens", cache_tokens, at_least=1, integer=True)
    if cache_tokens > max_tokens:
        raise ValueError(f"cache_tokens must be at most max_tokens, got {cache_tokens} and {max_tokens}")
    xp = array_namespace(length)
    free_tokens = max_tokens - cache_tokens
    clipped = xp.clip(xp.asarray(length), free_tokens, max_tokens).astype(xp.float32)
    return (np.float32(free_tokens) - clipped) / np.float32(cache_tokens)


def shaped_rewards(rewards: Array, length: Array, *, overlong: str, max_tokens: int, cache_tokens: int) -> Array:
    """What group estimators take: the rewards themselves, or with the penalty where `overlong` is "penalty".

    Args:
      rewards: float32, of any shape; that of `length` for a penalty.
      length: int, tokens of each completion.
      overlong: "keep", "mask" or "penalty".
      max_tokens: as in `soft_overlong_penalty`.
      cache_tokens: as there.
    """
    if overlong != "penalty":
        return rewards
    return rewards + soft_overlong_penalty(length, max_tokens=max_tokens, cache_tokens=cache_tokens)
