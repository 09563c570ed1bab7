"""From logits to a token and its log-prob: temperature, top-k, top-p, min-p, greedy, each row with its own.

All of it is data. What no row asks for is skipped at run time, and a row's result does not depend on what its
neighbours ask for.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dynrl.sampling.noise import gumbel
from dynrl.types import Array


class Settings(NamedTuple):
    """How rows are sampled; [N] each."""

    temperature_N: Array  # float32; 0 is greedy
    top_k_N: Array  # int32; 0 keeps all
    top_p_N: Array  # float32; 1 keeps all
    min_p_N: Array  # float32; 0 keeps all

    @property
    def greedy_N(self) -> Array:
        """Bool."""
        return self.temperature_N == 0

    @property
    def truncated_N(self) -> Array:
        """Bool: rows that sample from less than the whole vocabulary."""
        return ~self.greedy_N & ((self.top_k_N > 0) | (self.top_p_N < 1) | (self.min_p_N > 0))


class Draw(NamedTuple):
    """One token per row; [N] each."""

    token_N: Array  # int32; 0 where a logit is not finite
    logp_N: Array  # float32, of the distribution that was sampled: after temperature and truncation
    full_logp_N: Array  # float32, after the temperature only: what training recomputes
    finite_N: Array  # bool


def sample(logits_NV: Array, keys_N2: Array, position_N: Array, settings: Settings) -> Draw:
    """Draws one token per row by the Gumbel-max trick; temperature 0 takes the arg max.

    Truncation is applied in the field's order: temperature, top-k, top-p over what that leaves, min-p. Tokens that
    tie with the last one kept are kept too. Greedy rows get both log-probs at temperature 1, without truncation.
    """
    V = logits_NV.shape[-1]
    greedy_N, truncated_N = settings.greedy_N, settings.truncated_N
    # Below the maximum before scaling: at a small temperature the quotients would lose their differences, or overflow.
    below_max_NV = logits_NV - jnp.max(logits_NV, axis=-1, keepdims=True)
    scaled_NV = below_max_NV / jnp.where(greedy_N, 1.0, settings.temperature_N)[:, None]
    exp_NV = jnp.exp(scaled_NV)
    full_sum_N = jnp.sum(exp_NV, axis=-1)
    # A NaN or a positive infinity spoils the sum; a negative infinity does not, and shows here. Two plain reductions.
    finite_N = jnp.isfinite(full_sum_N) & jnp.isfinite(jnp.max(jnp.abs(logits_NV), axis=-1))

    def truncate() -> tuple[Array, Array]:
        kept_NV = ~truncated_N[:, None] | _kept(scaled_NV, exp_NV, settings)
        kept_sum_N = jnp.sum(jnp.where(kept_NV, exp_NV, 0.0), axis=-1)
        return jnp.where(kept_NV, scaled_NV, -jnp.inf), jnp.where(truncated_N, kept_sum_N, full_sum_N)

    kept_NV, kept_sum_N = jax.lax.cond(jnp.any(truncated_N), truncate, lambda: (scaled_NV, full_sum_N))
    noisy_NV = jax.lax.cond(
        jnp.all(greedy_N),
        lambda: kept_NV,
        lambda: kept_NV + jnp.where(greedy_N[:, None], 0.0, gumbel(keys_N2, position_N, V)),
    )
    # The first of the largest, as two plain reductions: an arg max takes several times as long on a CPU.
    ids = jnp.arange(V, dtype=jnp.int32)[None]
    best_NV = noisy_NV == jnp.max(noisy_NV, axis=-1, keepdims=True)
    token_N = jnp.where(finite_N, jnp.min(jnp.where(best_NV, ids, V), axis=-1), 0)
    chosen_N = jnp.sum(jnp.where(ids == token_N[:, None], scaled_NV, 0.0), axis=-1)
    logp_N, full_logp_N = (jnp.where(finite_N, chosen_N - jnp.log(x), 0.0) for x in (kept_sum_N, full_sum_N))
    return Draw(token_N, logp_N, full_logp_N, finite_N)


_ALL = jnp.iinfo(jnp.int32).max


def _kept(scaled_NV: Array, exp_NV: Array, settings: Settings) -> Array:
    """Bool [N, V]: the tokens that are left.

    Found by how far below the maximum they may lie, as the bits of that distance: the bits of a non-negative float
    are ordered as the float is, so the k-th largest logit, and the fewest tokens that hold a share p, are found by
    bisection over 31 bits, without a sort.
    """
    bits_NV = jax.lax.bitcast_convert_type(jnp.abs(scaled_NV), jnp.int32)

    def count(limit_N: Array) -> Array:
        return jnp.sum(bits_NV <= limit_N[:, None], axis=-1)

    def mass(limit_N: Array) -> Array:
        return jnp.sum(jnp.where(bits_NV <= limit_N[:, None], exp_NV, 0.0), axis=-1)

    top_k_N = jnp.where(settings.top_k_N > 0, jnp.minimum(settings.top_k_N, scaled_NV.shape[-1]), scaled_NV.shape[-1])
    k_limit_N = _bisect(count, top_k_N)
    p_limit_N = _bisect(mass, settings.top_p_N * mass(k_limit_N))
    p_limit_N = jnp.where(settings.top_p_N < 1, p_limit_N, _ALL)
    min_p_bits_N = jax.lax.bitcast_convert_type(jnp.abs(jnp.log(settings.min_p_N)), jnp.int32)  # infinite at 0
    return bits_NV <= jnp.minimum(jnp.minimum(k_limit_N, p_limit_N), min_p_bits_N)[:, None]


def _bisect(measure: Callable[[Array], Array], target_N: Array) -> Array:
    """The least int32 x >= 0 with measure(x) >= target, by row; measure grows with x."""

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low_N, high_N = bounds
        middle_N = low_N + (high_N - low_N) // 2
        enough_N = measure(middle_N) >= target_N
        return jnp.where(enough_N, low_N, middle_N + 1), jnp.where(enough_N, middle_N, high_N)

    zeros = jnp.zeros(target_N.shape, jnp.int32)
    return jax.lax.fori_loop(0, 31, halve, (zeros, jnp.full_like(zeros, _ALL)))[0]
