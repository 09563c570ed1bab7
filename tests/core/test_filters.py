import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.core import group_advantages, group_stats, make_filter
from dynrl.types import Array

REWARDS = np.array(
    [
        [1, 0, 0, 0],  # mixed
        [1, 1, 1, 1],
        [0, 0, 0, 0],
        [0.1, 0.1, 0.1, 0.1],  # constant partial credit
        [0.1, 0.7, 0.7, 0.7],  # all above 0, but different
        [-1, 0, -1, 0],  # none above 0, but different
        [1, 0, 0, np.nan],  # one dead by its value
        [1, 0, 0, 0],  # live: only the first
        [np.nan, np.inf, 0, 0],  # nothing live
    ],
    np.float32,
)
LIVE = np.ones(REWARDS.shape, bool)
LIVE[7] = [True, False, False, False]
LIVE[8] = [True, True, False, False]
HAS_SIGNAL = [True, False, False, False, True, True, True, False, False]


@pytest.fixture(autouse=True)
def user_module(monkeypatch):
    module = types.ModuleType("user_filters_for_tests")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def apply(group_filter, rewards: Array = REWARDS, live: Array = LIVE):
    """Runs a filter on NumPy and, unless it runs on the host, on JAX arrays eagerly and jitted; all must agree."""
    on_host = group_filter(group_stats(rewards, live), rewards, live)
    assert isinstance(on_host, np.ndarray)
    assert on_host.dtype == bool
    rewards, live = jnp.asarray(rewards), jnp.asarray(live)
    eager = group_filter(group_stats(rewards, live), rewards, live)
    np.testing.assert_array_equal(eager, on_host)
    if group_filter.on_host:
        assert isinstance(eager, np.ndarray)
    else:

        def keep(rewards, live):
            return group_filter(group_stats(rewards, live), rewards, live)

        jitted, mapped = jax.jit(lambda r, m: (keep(r, m), jax.vmap(keep)(r[None], m[None])))(rewards, live)
        np.testing.assert_array_equal(jitted, on_host)
        np.testing.assert_array_equal(mapped[0], on_host)
    return on_host.tolist()


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("has_signal", {}, HAS_SIGNAL),
        ("has_signal", {"atol": 0.65}, [True, False, False, False, False, True, True, False, False]),
        ("keep_all", {}, [True] * 9),
        ("mixed_sign", {}, [True, False, False, False, False, False, True, False, False]),
        # Means .25, 1, 0, .1, .55, -.5, 1/3, 1, 0; a strict interval, and signal.
        ("accuracy_band", {"low": 0.0, "high": 0.5}, [True, False, False, False, False, False, True, False, False]),
        ("accuracy_band", {"low": 0.25, "high": 1.0}, [False, False, False, False, True, False, True, False, False]),
        # Stds (ddof 1) .5, 0, 0, 0, .3, .577, .577, 0, 0.
        ("min_std", {"threshold": 0.5}, [True, False, False, False, False, True, True, False, False]),
        ("min_std", {"threshold": 0.0}, HAS_SIGNAL),
    ],
)
def test_built_ins(name, kwargs, expected):
    group_filter = make_filter(name, **kwargs)
    assert (group_filter.name, group_filter.on_host) == (name, False)
    assert apply(group_filter) == expected


def test_band_bounds_are_exact_in_float32():
    # 1/5 as a float32 mean equals float32(0.2): on the bound, so out.
    rewards = np.array([[1, 0, 0, 0, 0]], np.float32)
    assert apply(make_filter("accuracy_band", low=0.2, high=0.8), rewards, np.ones((1, 5), bool)) == [False]
    assert apply(make_filter("accuracy_band", low=0.19, high=0.8), rewards, np.ones((1, 5), bool)) == [True]


def test_singleton_by_shape():
    rewards, live = np.array([[1], [0], [np.nan]], np.float32), np.ones((3, 1), bool)
    assert apply(make_filter("mixed_sign"), rewards, live) == [True, True, False]
    assert apply(make_filter("has_signal"), rewards, live) == [False] * 3


def test_default_filter_and_advantages_agree(random_groups):
    for estimator in ("grpo", "dr_grpo", "rloo"):
        advantages = jax.jit(functools.partial(group_advantages, estimator=estimator))
        for rewards, live in random_groups[::3]:
            keep_P = make_filter("has_signal")(group_stats(rewards, live), rewards, live)
            np.testing.assert_array_equal(np.any(np.asarray(advantages(rewards, live)) != 0, axis=1), keep_P)


def test_composites():
    band = {"name": "accuracy_band", "low": 0.2, "high": 0.8}
    both = make_filter("all_of", filters=["mixed_sign", band])
    assert both.name == "all_of(mixed_sign, accuracy_band)"
    assert apply(both) == [True, False, False, False, False, False, True, False, False]
    nested = {"name": "any_of", "kwargs": {"filters": [{"name": "min_std", "kwargs": {"threshold": 0.55}}, both]}}
    assert apply(make_filter("all_of", filters=(nested,))) == [
        True,
        False,
        False,
        False,
        False,
        True,
        True,
        False,
        False,
    ]


def test_composite_with_a_host_filter_runs_on_the_host(user_module):
    user_module.any_high = lambda metric_vals: max(metric_vals) > 0.5
    user_module.spread = lambda stats, rewards_PG, live_PG: jnp.asarray(stats.spread) > 0.65
    host = make_filter("user_filters_for_tests:any_high")
    both = make_filter("all_of", filters=["has_signal", host, "user_filters_for_tests:spread"])
    assert both.on_host
    assert apply(both) == [True, False, False, False, False, False, True, False, False]
    either = make_filter("any_of", filters=[host, "has_signal"])
    assert apply(either) == [True, True, False, False, True, True, True, True, False]
    with pytest.raises(TypeError, match=r"all_of\(has_signal, .*cannot be traced"):
        jax.jit(lambda r: both(group_stats(r), r))(jnp.asarray(REWARDS))


def test_vectorised_user_filter(user_module):
    def at_least(stats, rewards_PG, live_PG, minimum=1):
        assert isinstance(rewards_PG, jax.Array | np.ndarray)
        return (stats.positives >= minimum) & ~(rewards_PG < 0).any(axis=1) & (live_PG.sum(axis=1) == stats.count)

    user_module.at_least = at_least
    group_filter = make_filter("user_filters_for_tests:at_least", minimum=1)
    assert not group_filter.on_host
    assert apply(group_filter) == [True, True, False, True, True, False, True, True, False]


def test_host_user_filter_sees_live_floats_only(user_module):
    seen = []

    def record(metric_vals, *, keep):
        seen.append(metric_vals)
        return np.bool_(keep)

    user_module.record = record
    group_filter = make_filter("user_filters_for_tests:record", keep=True)
    assert (group_filter.on_host, group_filter.name) == (True, "user_filters_for_tests:record")
    keep_P = group_filter(group_stats(REWARDS, LIVE), REWARDS, LIVE)
    assert keep_P.tolist() == [True] * 8 + [False]  # nobody asks about a group without live rollouts
    assert seen[6:] == [[1.0, 0.0, 0.0], [1.0]]
    assert all(type(value) is float for values in seen for value in values)


def test_host_filter_refuses_tracers(user_module):
    user_module.host = lambda metric_vals: True
    group_filter = make_filter("user_filters_for_tests:host")
    with pytest.raises(TypeError, match="runs on the host and cannot be traced"):
        jax.jit(lambda r: group_filter(group_stats(r), r))(jnp.asarray(REWARDS))


def test_errors_of_user_filters_name_filter_and_group(user_module):
    user_module.divides = lambda metric_vals: 1 / sum(metric_vals) > 0
    with pytest.raises(RuntimeError, match=r"'user_filters_for_tests:divides' raised ZeroDivisionError in group 2"):
        make_filter("user_filters_for_tests:divides")(group_stats(REWARDS, LIVE), REWARDS, LIVE)
    user_module.key = lambda stats, rewards_PG, live_PG: {}["x"]
    with pytest.raises(RuntimeError, match=r"'user_filters_for_tests:key' raised KeyError") as error:
        make_filter("user_filters_for_tests:key")(group_stats(REWARDS), REWARDS)
    assert isinstance(error.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda metric_vals: 1, r"must return a bool, got int 1 in group 0"),
        (lambda metric_vals: None, r"must return a bool, got NoneType"),
        (lambda metric_vals: np.array([True]), r"must return a bool, got ndarray"),
        (lambda stats, rewards_PG, live_PG: stats.spread, r"bool array of shape \[9\], got float32\[9\]"),
        (lambda stats, rewards_PG, live_PG: live_PG, r"bool array of shape \[9\], got bool\[9, 4\]"),
        (lambda stats, rewards_PG, live_PG: True, r"bool array of shape \[9\], got a bool"),
    ],
)
def test_wrong_results(user_module, function, message):
    user_module.wrong = function
    with pytest.raises(TypeError, match=rf"'user_filters_for_tests:wrong' {message}|{message}"):
        make_filter("user_filters_for_tests:wrong")(group_stats(REWARDS, LIVE), REWARDS, LIVE)


@pytest.mark.parametrize(
    "function", [lambda values: True, lambda: True, lambda stats: True, lambda *metric_vals: True, dict]
)
def test_other_signatures_show_both(user_module, function):
    user_module.other = function
    with pytest.raises(TypeError, match=r"(?s)neither kind.*stats, rewards_PG, live_PG.*metric_vals"):
        make_filter("user_filters_for_tests:other")


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        ("hassignal", {}, ValueError, r"'hassignal' is unknown; did you mean 'has_signal'\?.*keep_all"),
        ("mixed.sign", {}, ValueError, r"'package.module:function'"),
        ("accuracy_band", {"low": 0.1}, TypeError, "missing a required argument: 'high'"),
        ("accuracy_band", {"low": 0.1, "hihg": 1}, TypeError, r"hihg.*did you mean 'high'|'high'"),
        ("accuracy_band", {"low": 0.8, "high": 0.2}, ValueError, "low < high"),
        ("accuracy_band", {"low": "a", "high": 0.2}, ValueError, "low must be a finite number"),
        ("min_std", {"threshold": -1}, ValueError, "threshold must be at least 0"),
        ("has_signal", {"eps": 1}, TypeError, "unexpected keyword argument 'eps'"),
        ("keep_all", {"x": 1}, TypeError, "unexpected keyword argument 'x'"),
        ("all_of", {"filters": []}, TypeError, "non-empty list"),
        ("all_of", {"filters": "has_signal"}, TypeError, "non-empty list"),
        ("any_of", {"filters": [3]}, TypeError, "a name, a mapping"),
        ("any_of", {"filters": [{"name": "min_std"}]}, TypeError, "missing a required argument: 'threshold'"),
        ("no_such_module:f", {}, ValueError, "no module 'no_such_module'"),
        ("dynrl.core.nothing:f", {}, ValueError, "no module 'dynrl.core.nothing'"),
        ("dynrl.core:make_filtre", {}, ValueError, "no 'make_filtre'; did you mean 'make_filter'"),
        ("dynrl.core:__all__", {}, TypeError, "is a list, not a function"),
        (":f", {}, ValueError, "not of the form"),
        ("user_filters_for_tests:host", {"keap": 1}, TypeError, r"keap.*did you mean 'keep'"),
        ("user_filters_for_tests:vector", {"other": 1}, TypeError, "unexpected keyword argument 'other'"),
    ],
)
def test_errors_when_made(user_module, name, kwargs, error, message):
    user_module.host = lambda metric_vals, keep=1: True
    user_module.vector = lambda stats, rewards_PG, live_PG: stats.count > 0
    with pytest.raises(error, match=message):
        make_filter(name, **kwargs)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="live_PG has shape"):
        make_filter("has_signal")(group_stats(REWARDS), REWARDS, LIVE[:, :2])
