"""Verifiers as functions: what they accept, how they are found, and what they may return."""

import fractions
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks import rewards
from dynrl.tasks.rewards import Unparsable, as_reward, cut_info, metric_value, resolve_verifier
from dynrl.types import Reward, Task


def task(answer: str) -> Task:
    return Task(task_id=7, source="s", prompt="p", answer=answer)


def test_exact_match_ignores_white_space_around():
    assert rewards.exact_match(task("1 2"), " 1 2\n").score == 1.0
    assert rewards.exact_match(task("1 2"), "12").score == 0.0


@pytest.mark.parametrize("text", ["12", "+12", " 12\n", "0012"])
def test_integer_match_compares_integers(text):
    assert rewards.integer_match(task("12"), text).score == 1.0


@pytest.mark.parametrize("text", ["", "-", "1 2", "1.0", "1e3", "50%", "1_000", "١٢", "0x1", "12.", "9" * 1_001])
def test_integer_match_refuses_what_is_not_an_integer(text):
    with pytest.raises(Unparsable):
        rewards.integer_match(task("12"), text)


def test_integer_match_signs_and_size():
    assert rewards.integer_match(task("-4"), "4").score == 0.0
    assert rewards.integer_match(task("-0"), "0").score == 1.0
    assert rewards.integer_match(task("9" * 1_000), "9" * 1_000).score == 1.0


def test_integer_match_names_a_task_whose_answer_is_no_integer():
    with pytest.raises(ValueError, match=r"task 7.*'x'") as caught:
        rewards.integer_match(task("x"), "1")
    assert not isinstance(caught.value, Unparsable)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("1234", 1.0),
        ("12", 0.5),  # 2 of 4
        ("1299", 0.5),
        ("12345678", 0.5),  # 4 of 8: going on after the answer costs
        ("9234", 0.0),
        ("", 0.0),
    ],
)
def test_prefix_fraction(text, share):
    reward = rewards.prefix_fraction(task("1234"), text)
    assert reward == Reward(share, {"prefix": share, "exact": float(share == 1.0)})


def test_prefix_fraction_of_nothing_is_right():
    assert rewards.prefix_fraction(task(""), " ").score == 1.0


@settings(max_examples=30, deadline=None)
@given(st.text(), st.text())
def test_built_in_verifiers_return_shares(answer, text):
    for verifier in (rewards.exact_match, rewards.prefix_fraction):
        assert 0.0 <= verifier(task(answer), text).score <= 1.0


def test_resolve_built_in_and_path():
    assert resolve_verifier("exact_match") is rewards.exact_match
    assert resolve_verifier("dynrl.tasks.rewards:integer_match") is rewards.integer_match


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exact_mach",
            "did you mean 'exact_match'.*built in: calculator, countdown, .*gsm8k, .*reasoning_gym; your own",
        ),
        ("no_such_pkg_9.x:f", "no module 'no_such_pkg_9' on sys.path"),
        ("dynrl.tasks.no_such:f", "no module 'dynrl.tasks.no_such' on sys.path"),
        ("dynrl.tasks.rewards:exact_mach", "no attribute 'exact_mach'.*did you mean 'exact_match'"),
        ("dynrl.tasks.rewards:", "expected 'package.module:function'"),
        (":f", "expected 'package.module:function'"),
    ],
)
def test_resolve_says_what_is_wrong(name, message):
    with pytest.raises(ValueError, match=message):
        resolve_verifier(name)


def test_resolve_refuses_what_is_not_callable():
    with pytest.raises(TypeError, match="not callable"):
        resolve_verifier("dynrl.tasks.rewards:MAX_COMPONENTS")


def test_resolve_tells_a_missing_module_from_one_that_breaks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_on_import.py").write_text("raise KeyError('inside')")
    (tmp_path / "imports_missing.py").write_text("import no_such_pkg_9")
    with pytest.raises(ValueError, match=r"importing 'breaks_on_import' raised KeyError.*inside"):
        resolve_verifier("breaks_on_import:f")
    with pytest.raises(ValueError, match=r"importing 'imports_missing' failed.*no_such_pkg_9"):
        resolve_verifier("imports_missing:f")


@pytest.mark.parametrize("value", [True, np.True_, 1, 1.0, np.float32(1), np.int64(1), fractions.Fraction(1)])
def test_as_reward_takes_numbers(value):
    reward = as_reward(value, "v", 1)
    assert reward == Reward(1.0)
    assert type(reward.score) is float


def test_as_reward_takes_mappings_and_rewards():
    assert as_reward({"score": True, "style": 2}, "v", 1) == Reward(1.0, {"style": 2.0})
    assert as_reward(Reward(1, {"a": True}, {"why": "x"}), "v", 1) == Reward(1.0, {"a": 1.0}, {"why": "x"})
    assert math.isnan(as_reward(float("nan"), "v", 1).score)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "1.0",
        [1.0],
        (1.0, {}, {}),
        1j,
        np.ones(1),
        Reward("1"),  # type: ignore[arg-type]
        Reward(1.0, {"a": None}),  # type: ignore[dict-item]
        Reward(1.0, []),  # type: ignore[arg-type]
    ],
)
def test_as_reward_refuses_other_types(value):
    with pytest.raises(TypeError, match="verifier 'my:v', task 31"):
        as_reward(value, "my:v", 31)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"reward": 1.0},
        10**400,
        {"score": 1, 3: 1.0},
        {"score": 1, "n" * 201: 1.0},
        {"score": 1.0, **{f"c{i}": 0.0 for i in range(65)}},
        Reward(1.0, {"score": 2.0}),
    ],
)
def test_as_reward_refuses_wrong_keys_and_values(value):
    with pytest.raises(ValueError, match="verifier 'my:v', task 31"):
        as_reward(value, "my:v", 31)


def test_metric_value():
    reward = Reward(0.5, {"exact": 1.0})
    assert metric_value(reward) == 0.5
    assert metric_value(reward, "exact") == 1.0
    with pytest.raises(ValueError, match=r"no component 'exakt'.*exact"):
        metric_value(reward, "exakt")


def test_cut_info_keeps_what_is_small():
    info = {"a": [1, 2.5, None, True, "x"], "b": {"c": (1, 2)}, "n": np.int64(3)}
    assert cut_info(info) == {"a": [1, 2.5, None, True, "x"], "b": {"c": [1, 2]}, "n": 3}


def test_cut_info_bounds_everything_and_says_so():
    endless: dict = {}
    endless["self"] = endless
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for info in (
        {"text": "x" * 10_000_000},
        dict.fromkeys(range(100_000), 1),
        {"list": [["y" * 100] * 1000] * 1000},
        {"k" * 1_000_000: 1},
        {"big": 10**5000, "object": object(), b"bytes": b"v", "nan": float("nan")},
        endless,
        {"deep": deep},
    ):
        cut = cut_info(info)
        assert len(json.dumps(cut)) < 60_000
        assert "entries were" in cut["cut"]


SHORT = st.text(alphabet="aé\ud800", max_size=3)
LEAVES = st.none() | st.floats() | st.integers() | st.binary(max_size=3) | SHORT


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(SHORT | st.integers(), st.recursive(LEAVES, st.lists, max_leaves=8), max_size=4))
def test_cut_info_is_json(info):
    assert isinstance(json.loads(json.dumps(cut_info(info), allow_nan=False)), dict)
