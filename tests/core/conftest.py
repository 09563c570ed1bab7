"""Random groups of every kind that breaks a naive implementation; implicit rank promotion is an error."""

import jax
import numpy as np
import pytest

GROUP_SIZES = (1, 2, 3, 5, 8, 21, 64)


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def make_groups(num_groups: int, group_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 rewards and bool live, both [num_groups, group_size]."""
    rng = np.random.default_rng([seed, group_size])
    shape = (num_groups, group_size)
    binary = rng.integers(0, 2, shape)
    equal = np.broadcast_to(rng.choice([0.1, 0.7, 1 / 3, 0.0, 1.0, -1.0], (num_groups, 1)), shape)
    graded = rng.random(shape)
    signed = rng.normal(size=shape)
    offset = 1e6 + rng.integers(0, 200, shape) / 16  # exact in float32, whose spacing is 1/16 there
    kinds = np.stack([binary, equal, graded, signed, offset, -offset])
    rewards = np.take_along_axis(kinds, rng.integers(0, len(kinds), (1, num_groups, 1)), axis=0)[0]
    rewards = rewards.astype(np.float32)
    live = rng.random(shape) < rng.choice([0.0, 0.3, 0.9, 1.0], (num_groups, 1), p=[0.05, 0.25, 0.3, 0.4])
    bad = rng.random(shape) < rng.choice([0.0, 0.2], (num_groups, 1), p=[0.7, 0.3])
    rewards[bad] = rng.choice([np.nan, np.inf, -np.inf], bad.sum())
    return rewards, live


@pytest.fixture(scope="session")
def random_groups() -> list[tuple[np.ndarray, np.ndarray]]:
    """2,800 groups of sizes 1 to 64, by size."""
    return [make_groups(400, size, seed=0) for size in GROUP_SIZES]
