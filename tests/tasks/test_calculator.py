"""The calculator: what it adds and what it refuses, its tasks, and that a demonstration earns the reward."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.base import task_hash
from dynrl.tasks.calculator import Calculator, CalculatorSums
from dynrl.tasks.environments import Step
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import make_frozen
from dynrl.types import Task

SOURCES = [CalculatorSums(), CalculatorSums(2, 3, 3, 5, 1.0), CalculatorSums(8, 8, 9, 9, 1.0), CalculatorSums(1, 1)]


def said(text, answer="152"):
    environment = Calculator()
    assert environment.reset(Task(7, "calculator", "47+86+19=", answer)) == ""
    return environment.step(text)


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("[47+86]", "133;"),
        ("[0+0]", "0;"),
        ("[007+1]", "8;"),
        ("so [1+2]", "3;"),
        ("[9+[1+2]", "3;"),  # the last bracket counts
        ("[1+2]] 5", "3;"),  # a token may bring more than the stop string
        ("[999999999+999999999]", "1999999998;"),  # the largest: 11 characters
    ],
)
def test_calls(text, observation):
    assert said(text) == Step(observation, 0.0, False)


@pytest.mark.parametrize(
    "text",
    ["]", "[]", "[+]", "[1]", "[1+]", "[+1]", "[1+2+3]", "[1-2]", "[1*2]", "[ 1+2]", "[1+2 ]", "[1 + 2]", "1+2]",
     "[1.5+2]", "[-1+2]", "[1e9+1]", "[0x1+1]", "[1_0+1]", "[1+2\n]", "[1+2[]", "]1+2[", "[(1)+2]", "[1+\0002]",
     "[\N{ARABIC-INDIC DIGIT FIVE}+1]", "[\N{SUPERSCRIPT TWO}+1]", "[\N{FULLWIDTH DIGIT SEVEN}+1]",
     "[1\N{FULLWIDTH PLUS SIGN}1]", "[1+\ud800]", "[__import__('os')]", "[9**9**9]", "[" + "9" * 10 + "+1]",
     "[1+" + "9" * 10_000 + "]", "[" + "1" * 1_000_000 + "+]", "[" + "1+" * 50_000 + "1]", "[" * 50_000 + "]",
     "]" * 50_000],
)  # fmt: skip
def test_what_is_no_call_is_refused_and_costs_nothing(text):
    begin = time.monotonic()
    assert said(text) == Step("?;", 0.0, False)
    assert time.monotonic() - begin < 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("152", 1.0), (" 152\n", 1.0), ("", 0.0), ("15", 0.0), ("1522", 0.0), ("0152", 0.0), ("+152", 0.0),
        ("152;", 0.0), ("133;152", 0.0), ("15 2", 0.0), ("[152", 0.0), ("[133+19", 0.0), ("=152", 0.0), ("152.0", 0.0),
        ("\N{FULLWIDTH DIGIT ONE}52", 0.0), ("152\0", 0.0), ("\ud800", 0.0), ("9" * 1_000_000, 0.0),
    ],
)  # fmt: skip
def test_the_answer_is_the_whole_last_turn(text, reward):
    assert said(text) == Step("", reward, True)


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789+=[];? \N{ARABIC-INDIC DIGIT FIVE}", max_size=40))
def test_any_text_gets_an_answer(text):
    step = said(text)
    assert step.done == ("]" not in text)
    assert set(step.observation) <= CalculatorSums().alphabet
    assert len(step.observation) <= Calculator.max_observation_chars == 11
    assert step.reward in ((0.0, 1.0) if step.done else (0.0,))


def test_tasks_and_demonstrations_are_pinned():
    source = make_source("calculator", min_terms=3, max_terms=3, min_digits=2, calculator_frac=1.0)
    made = source.task(0, 0)
    first, second, third = map(int, made.prompt.removesuffix("=").split("+"))
    assert made.level == 23
    assert made.answer == str(first + second + third)
    assert made.metadata["demonstration"] == [
        [f"[{first}+{second}]", True],
        [f"{first + second};", False],
        [f"[{first + second}+{third}]", True],
        [f"{made.answer};", False],
        [made.answer, True],
    ]
    direct = make_source("calculator", calculator_frac=0.0).task(0, 0)
    assert direct.metadata["demonstration"] == [[direct.answer, True]]


@pytest.mark.parametrize("source", SOURCES, ids=repr)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**63))
def test_tasks_are_pure_and_their_demonstrations_earn_the_reward(source, seed, index):
    made = source.task(seed, index)
    assert made == source.task(seed, index)
    assert make_source("calculator", **source.kwargs) == source
    terms = made.prompt.removesuffix("=").split("+")
    assert made.level == 10 * max(map(len, terms)) + len(terms)
    assert made.level in source.levels
    assert made.answer == str(sum(map(int, terms)))
    shown = made.metadata["demonstration"]
    whole = "".join(text for text, _ in shown)
    assert set(made.prompt + whole) <= source.alphabet
    assert len(made.prompt) <= source.max_prompt_chars
    assert len(whole) <= source.max_answer_chars
    environment = Calculator()
    environment.reset(made)
    steps = [environment.step(text) for text, trained in shown if trained]
    assert [step.observation for step in steps if not step.done] == [text for text, trained in shown if not trained]
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].reward == 1.0


def test_the_longest_completion_is_bounded_exactly():
    # [99+99] 198; [198+99] 297; [297+99] 396; 396 has 7 + 4 + 8 + 4 + 8 + 4 + 3 characters.
    assert CalculatorSums().max_answer_chars == 38
    assert CalculatorSums().max_prompt_chars == len("99+99+99+99=")


def test_both_habits_and_all_levels_occur():
    tasks = [CalculatorSums(calculator_frac=0.75).task(0, index) for index in range(600)]
    calling = sum(len(each.metadata["demonstration"]) > 1 for each in tasks)
    assert 405 < calling < 495  # of 450 expected; the standard deviation is 10.6
    assert all(60 < sum(each.level == level for each in tasks) < 140 for level in CalculatorSums().levels)


def test_evaluation_tasks_are_distinct_and_training_avoids_them():
    source = make_source("calculator", max_digits=1, min_digits=1, max_terms=3)
    frozen = make_frozen(source, 3, 60)
    assert len(frozen.hashes) == 60
    for index in range(200):
        assert task_hash(source.task(0, index, frozen.hashes).prompt) not in frozen.hashes


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_digits": 0}, "1 <= min_digits"),
        ({"min_digits": 3}, "min_digits <= max_digits"),
        ({"max_digits": 9}, "max_digits < 9"),
        ({"min_terms": 1}, "2 <= min_terms"),
        ({"max_terms": 10}, "max_terms <= 9"),
        ({"calculator_frac": 1.5}, "calculator_frac <= 1"),
    ],
)
def test_impossible_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CalculatorSums(**kwargs)
