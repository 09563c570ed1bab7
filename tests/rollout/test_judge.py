"""Verdicts: every filter, dead rollouts, and law 2 (a kept group has something to train on)."""

import functools
import json
import sys

import numpy as np
import pytest

from dynrl.config import DynamicSamplingConfig, LossConfig
from dynrl.rollout.judge import Judge
from dynrl.types import Verdict

K, D, X = Verdict.KEPT, Verdict.FILTERED, Verdict.FAILED

# Rows: mixed, all right, all wrong, equal and non-dyadic, partial credit, negative, mixed sign.
REWARDS = np.array(
    [
        [1, 0, 0, 1],
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [0.1, 0.1, 0.1, 0.1],
        [0.7, 0.6, 0.7, 0.7],
        [-1, -2, -1, -1],
        [0.5, -0.5, 0.5, 0.5],
    ],
    np.float32,
)
ALL = np.ones(REWARDS.shape, bool)

USER_FILTERS = """
import jax.numpy as jnp

SEEN = []

def at_most(stats, rewards_PG, live_PG, *, most):
    return stats.mean <= most

def two_values(metric_vals, *, distinct=2):
    SEEN.append(metric_vals)
    return len(set(metric_vals)) == distinct

def breaks(metric_vals):
    raise KeyError("inside")

def breaks_when_traced(stats, rewards_PG, live_PG):
    raise KeyError("inside")

def neither(rewards):
    return True
"""


@pytest.fixture
def user_filters(tmp_path, monkeypatch):
    """The module above, importable by a name of its own."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_filters_of_judge.py").write_text(USER_FILTERS)
    monkeypatch.delitem(sys.modules, "my_filters_of_judge", raising=False)
    yield "my_filters_of_judge"
    monkeypatch.delitem(sys.modules, "my_filters_of_judge", raising=False)


@functools.cache
def make_judge(config, loss, min_live):
    return Judge(DynamicSamplingConfig(**json.loads(config)), LossConfig(**json.loads(loss)), min_live)


def judge(rewards, live=None, trainable=None, *, shaped=None, loss=None, min_live=None, **config):
    """The verdicts of one process that owns every row. Padded to 8 groups: a new shape compiles.

    `shaped` is the estimator's input where that is not the metric itself.
    """
    num, size = np.shape(rewards)
    rewards_PG = np.zeros((8, size), np.float32)
    live_PG, trainable_PG = np.ones((2, 8, size), bool)
    rewards_PG[:num] = rewards
    live_PG[:num] = True if live is None else live
    trainable_PG[:num] = True if trainable is None else trainable
    judge = make_judge(json.dumps(config), json.dumps(loss or {}), min_live or size)
    shaped_P = rewards_PG
    if shaped is not None:
        shaped_P = np.zeros((8, *np.shape(shaped)[1:]), np.float32)
        shaped_P[:num] = shaped
    host_P = judge.host_mask(rewards_PG, shaped_P, live_PG, np.arange(8) < num)
    judged = judge(rewards_PG, shaped_P, live_PG, trainable_PG, host_P)
    return judged.rows(np.arange(len(judged.verdict_P)) < num)


@pytest.mark.parametrize(
    ("config", "verdicts"),
    [
        ({}, [K, D, D, D, K, K, K]),  # has_signal
        ({"filter": "mixed_sign"}, [K, D, D, D, D, D, K]),
        # Means: 0.5, 1, 0, 0.1, 0.675, -1.25, 0.25; constant partial credit in the band is no signal.
        ({"filter": "accuracy_band", "filter_kwargs": {"low": 0.05, "high": 0.6}}, [K, D, D, D, D, D, K]),
        # Stds (ddof 1): 0.577, 0, 0, 0, 0.05, 0.5, 0.5.
        ({"filter": "min_std", "filter_kwargs": {"threshold": 0.1}}, [K, D, D, D, D, K, K]),
        (
            {"filter": "all_of", "filter_kwargs": {"filters": ["mixed_sign", {"name": "min_std", "threshold": 0.55}]}},
            [K, D, D, D, D, D, D],
        ),
        (
            {"filter": "any_of", "filter_kwargs": {"filters": ["mixed_sign", {"name": "min_std", "threshold": 0.1}]}},
            [K, D, D, D, D, K, K],
        ),
        ({"filter": "keep_all"}, [K, D, D, D, K, K, K]),  # law 2: a group without advantages teaches nothing
        ({"enable": False}, [K] * 7),  # plain GRPO trains on every group
        ({"enable": False, "filter": "mixed_sign"}, [K] * 7),
    ],
)
def test_built_in_filters(config, verdicts):
    assert judge(REWARDS, **config).verdict_P.tolist() == verdicts


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo"])
def test_the_estimator_does_not_change_what_has_signal(estimator):
    assert judge(REWARDS, loss={"estimator": estimator}).verdict_P.tolist() == judge(REWARDS).verdict_P.tolist()


def test_patterns_name_what_groups_look_like():
    assert judge(REWARDS).pattern_P.tolist() == ["mixed", "all_pass", "all_fail", "all_pass", "mixed", "mixed", "mixed"]
    # Not all pass and not all fail, yet no signal: the spread is below the tolerance.
    assert judge([[-1e-9, 1e-9, 0, 0]]).pattern_P.tolist() == ["uniform"]


@pytest.mark.parametrize("size", [2, 8, 21])
def test_equal_rewards_have_no_signal_whatever_rounding_says(size):
    """Eight times 0.1 has a standard deviation above 0 in float32."""
    values = np.array([0.1, 1 / 3, 0.7, -0.1, 1e-30, 1e30])
    assert judge(np.repeat(values[:, None], size, 1)).verdict_P.tolist() == [D] * 6


def test_dead_rollouts_fail_a_group_below_min_live_and_else_do_not_count():
    rewards = [[1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 1, 1], [9, 1, 1, 1]]
    live = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 1]], bool)
    assert judge(rewards, live).verdict_P.tolist() == [K, X, X, X]  # the default asks for all
    assert judge(rewards, live, min_live=3).verdict_P.tolist() == [K, X, X, D]  # the 9 is dead: the rest is equal
    assert judge(rewards, live, min_live=2).verdict_P.tolist() == [K, K, X, D]
    assert judge(rewards, live, min_live=1).verdict_P.tolist() == [K, K, D, D]  # one live rollout has no signal
    assert judge(rewards, live, enable=False).verdict_P.tolist() == [K, X, X, X]  # off keeps all but the failed
    assert judge(rewards, live, min_live=1, enable=False).verdict_P.tolist() == [K] * 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_dead(bad):
    assert judge([[1, 0, 1, bad]]).verdict_P.tolist() == [X]
    judged = judge([[1, 0, bad, bad], [1, 1, bad, bad]], min_live=2)
    assert judged.verdict_P.tolist() == [K, D]
    assert judged.stats.count.tolist() == [2, 2]


def test_kept_needs_a_trainable_rollout_with_an_advantage():
    """Overlong rollouts are masked after the advantages: the group's signal can lie all in what is masked."""
    rewards = [[1, 0, 0, 0], [2, 1, 1, 0], [2, 1, 1, 0]]
    trainable = np.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]], bool)
    # Second group: mean 1, so the two that train have advantage 0. Third: the last has -1.
    assert judge(rewards, trainable=trainable).verdict_P.tolist() == [D, D, K]
    assert (
        judge(rewards, trainable=trainable).pattern_P.tolist() == ["mixed"] * 3
    )  # the filter's statistics are unmoved
    assert judge(rewards, trainable=trainable, enable=False).verdict_P.tolist() == [K] * 3
    # The only advantage on a dead rollout does not count either.
    live = np.array([[0, 1, 1, 1]], bool)
    assert judge([[1, 0, 0, 0]], live, min_live=1).verdict_P.tolist() == [D]


def test_user_filter_of_arrays(user_filters):
    config = {"filter": f"{user_filters}:at_most", "filter_kwargs": {"most": 0.5}}
    assert judge(REWARDS, **config).verdict_P.tolist() == [K, D, D, D, D, K, K]


def test_user_filter_of_one_group(user_filters):
    path = f"{user_filters}:two_values"
    live = ALL.copy()
    live[0, 0] = False
    judged = judge(REWARDS, live, min_live=2, filter=path)
    assert judged.verdict_P.tolist() == [K, D, D, D, K, K, K]
    assert sys.modules[user_filters].SEEN[0] == [0.0, 0.0, 1.0]  # live values only, plain floats
    assert (
        judge(REWARDS, filter=path, filter_kwargs={"distinct": 1}).verdict_P.tolist() == [D] * 7
    )  # law 2 stands above it
    both = {"filters": [path, "mixed_sign"]}
    assert judge(REWARDS, filter="all_of", filter_kwargs=both).verdict_P.tolist() == [K, D, D, D, D, D, K]


def test_a_host_filter_is_asked_about_owned_rows_only(user_filters):
    owned = np.array([0, 1, 0, 0, 1, 0, 0], bool)
    part = Judge(DynamicSamplingConfig(filter=f"{user_filters}:two_values"), LossConfig(), 4)
    mask = part.host_mask(REWARDS, REWARDS, ALL, owned)
    assert mask.tolist() == [False, False, False, False, True, False, False]
    assert [REWARDS[1].tolist(), REWARDS[4].tolist()] == sys.modules[user_filters].SEEN
    assert part.host_mask(REWARDS, REWARDS, ALL, np.zeros(7, bool)).tolist() == [False] * 7
    assert len(sys.modules[user_filters].SEEN) == 2
    # The gathered mask of all processes then decides.
    assert part(REWARDS, REWARDS, ALL, ALL, np.arange(7) != 0).verdict_P.tolist() == [D, D, D, D, K, K, K]


def test_without_a_host_filter_the_mask_says_nothing(user_filters):
    for config in ({}, {"filter": f"{user_filters}:at_most", "filter_kwargs": {"most": 1}}):
        mask = Judge(DynamicSamplingConfig(**config), LossConfig(), 4).host_mask(
            REWARDS, REWARDS, ALL, np.ones(7, bool)
        )
        assert mask.all()


def test_errors_name_the_filter(user_filters):
    with pytest.raises(RuntimeError, match=f"filter '{user_filters}:breaks' raised KeyError in group 0: 'inside'"):
        judge(REWARDS, filter=f"{user_filters}:breaks")
    with pytest.raises(RuntimeError, match=f"filter '{user_filters}:breaks_when_traced' raised KeyError: 'inside'"):
        judge(REWARDS, filter=f"{user_filters}:breaks_when_traced")
    with pytest.raises(TypeError, match=rf"(?s){user_filters}:neither.*metric_vals: list\[float\]"):
        judge(REWARDS, filter=f"{user_filters}:neither")
    with pytest.raises(ValueError, match="'has_signals' is unknown; did you mean 'has_signal'"):
        judge(REWARDS, filter="has_signals")
    with pytest.raises(TypeError, match="'min_std' takes"):
        judge(REWARDS, filter="min_std")


def test_off_ignores_the_filter_and_its_arguments():
    """What is off need not be importable."""
    assert judge(REWARDS, enable=False, filter="no_such.module:f", filter_kwargs={"a": 1}).verdict_P.tolist() == [K] * 7


def test_the_filter_sees_the_raw_metric_and_the_advantages_the_shaped_one():
    """verl-recipe#125: a penalty for length gives all-wrong groups a spread, and must not let them pass.

    The third group has signal, but its one right rollout loses all of it to the penalty: nothing is left to learn.
    """
    rewards = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]
    shaped = [[0, 0, 0, -1], [0.5, 0, 0, 0], [0, 0, 0, 0]]
    assert judge(rewards, shaped=shaped).verdict_P.tolist() == [D, K, D]


def test_several_rewards_pass_the_filter_with_any_of_them():
    # Per component: uniform and uniform, uniform and mixed, mixed and uniform, and two that cancel out.
    shaped = np.array([
        [[1, 0], [1, 0], [1, 0], [1, 0]],
        [[0, 1], [0, 0], [0, 0], [0, 0]],
        [[1, 1], [0, 1], [0, 1], [0, 1]],
        [[1, 0], [1, 0], [0, 1], [0, 1]],
    ])  # fmt: skip
    loss = {"estimator": "gdpo", "rewards": ["score", "style"]}
    judged = judge(shaped[..., 0], shaped=shaped, loss=loss)
    assert judged.verdict_P.tolist() == [D, K, K, D]
    assert judged.pattern_P.tolist() == ["all_pass", "all_fail", "mixed", "mixed"]  # of the metric


def test_an_estimator_of_the_whole_batch_learns_from_any_group():
    loss = {"estimator": "reinforce_pp"}
    assert judge([[1, 1, 1, 1], [0, 1, 0, 0]], loss=loss, filter="keep_all").verdict_P.tolist() == [K, K]
    assert judge([[1, 1, 1, 1], [0, 1, 0, 0]], loss=loss).verdict_P.tolist() == [D, K]
