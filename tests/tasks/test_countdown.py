"""Countdown: every task can be solved, and expressions are checked, never evaluated by Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.countdown import Countdown, countdown
from dynrl.tasks.rewards import Unparsable
from dynrl.tasks.sources import make_source
from dynrl.types import Task

SOURCES = [Countdown(), Countdown(2, 6, 99, 999), Countdown(operators="+"), Countdown(12, 12, 1, 12), Countdown(2, 2)]


def task(numbers=(2, 3, 4), target=10, use_all=True, **metadata):
    return Task(7, "countdown", "p", "a", metadata={"numbers": list(numbers), "target": target, "use_all": use_all,
                                                    **metadata})  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=repr)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**63))
def test_tasks_are_pure_solvable_and_within_the_declared_bounds(source, seed, index):
    made = source.task(seed, index)
    assert made == source.task(seed, index)
    assert made.level == len(made.metadata["numbers"])
    assert made.level in source.levels
    assert set(made.prompt + made.answer) <= source.alphabet
    assert len(made.prompt) <= source.max_prompt_chars
    assert len(made.answer) <= source.max_answer_chars
    assert all(1 <= number <= source.max_number for number in made.metadata["numbers"])
    assert 1 <= made.metadata["target"] <= source.max_target
    assert eval(made.answer) == made.metadata["target"]
    assert countdown(made, made.answer).score == 1.0


def test_tasks_are_pinned_and_kwargs_rebuild_the_source():
    source = make_source("countdown")
    assert [source.task(0, i).prompt for i in range(3)] == ["2,19,20,19=39:", "16,11,17=10:", "12,2,2=28:"]
    sentence = make_source("countdown", prompt="Make {target} of {numbers}.\n", use_all=False, max_numbers=3)
    assert make_source("countdown", **sentence.kwargs) == sentence
    assert sentence.task(0, 0).prompt == "Make 10 of 16,11,17.\n" or sentence.task(0, 0).prompt.startswith("Make ")
    assert sentence.task(0, 0).metadata["use_all"] is False


def test_all_operators_occur_and_levels_are_uniform():
    tasks = [Countdown(2, 4, 30, 300).task(0, index) for index in range(600)]
    for operator in "+-*/":
        assert sum(operator in each.answer for each in tasks) > 20
    assert all(150 < sum(each.level == level for each in tasks) < 250 for level in (2, 3, 4))


@pytest.mark.parametrize(
    "text",
    ["2*3+4", "(2*3)+4", "4 + 3*2", "4+3*2 = 10", "<answer>4+2*3</answer>", "I try 2+3.\nSo:\n4+2*3\n\n",
     "<answer>1</answer> no <answer> 4 + 2 * 3 = 10 </answer> done", "4+3\N{MULTIPLICATION SIGN}2", "((((4)))+(2*3))"],
)  # fmt: skip
def test_right_expressions(text):
    assert countdown(task(), text).score == 1.0


@pytest.mark.parametrize(
    "text",
    ["2+3+4", "2*3*4", "2*3", "2*3+4+4", "10", "5*2", "4+6", "2*3+4-(2-2)", "2/(3-3)+4", "(4-2)*5", "23+4", "4*3-2=11"],
)
def test_wrong_expressions(text):
    try:
        assert countdown(task(), text).score == 0.0
    except Unparsable:
        assert "=" in text


@pytest.mark.parametrize(
    "text",
    ["", "no", "x", "2*3+4=11", "2**3", "7//2", "-(2)*3", "2 3", "2*(3+4", "2*3)+4", "2,3,4", "(2,3)", "2*3+4#",
     "2.0*3+4", "2e1", "0x2", "02*3", "[2]", "2 if 3 else 4", "2<3", "2*3+4;", "__import__('os')", "2*3+4==10",
     "٢*3+4", "2_3", "(" * 400 + "2" + ")" * 400, "1+" * 400 + "1", "(" * 240 + "2" + ")" * 240, "lambda: 2",
     "2*3+4\0", "2(3)+4"],
)  # fmt: skip
def test_what_is_no_expression(text):
    with pytest.raises(Unparsable):
        countdown(task(), text)


def test_fractions_are_exact_and_division_by_zero_is_wrong():
    assert countdown(task((3, 3, 7, 7), 24), "(3+3/7)*7").score == 1.0
    assert countdown(task((1, 3, 4, 6), 24), "6/(1-3/4)").score == 1.0
    assert countdown(task((2, 3, 3), 1), "2/(3-3)").score == 0.0


def test_each_number_at_most_once_when_not_all_must_be_used():
    optional = task((2, 3, 4, 10), 10, use_all=False)
    assert countdown(optional, "10").score == 1.0
    assert countdown(optional, "2*3+4").score == 1.0
    assert countdown(optional, "2+2+2+4").score == 0.0
    assert countdown(task((2, 2, 3), 7), "2*2+3").score == 1.0


@pytest.mark.parametrize("metadata", [{}, {"numbers": 3}, {"numbers": ["2"], "target": 1, "use_all": True},
                                      {"numbers": [2], "target": "2", "use_all": True}])  # fmt: skip
def test_a_task_of_another_kind_is_an_error_that_names_it(metadata):
    with pytest.raises(ValueError, match="task 7: metadata must hold") as caught:
        countdown(Task(7, "s", "p", "a", metadata=metadata), "2")
    assert not isinstance(caught.value, Unparsable)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_numbers": 1}, "2 <= min_numbers"),
        ({"max_numbers": 13}, "max_numbers <= 12"),
        ({"max_number": 0}, "1 <= max_number"),
        ({"max_number": 50}, "max_target / max_numbers"),
        ({"operators": "-*"}, r"with '\+'"),
        ({"operators": "+%"}, "operators from"),
        ({"operators": "++"}, "each at most once"),
        ({"prompt": "{numbers}"}, "needs {numbers} and {target}"),
        ({"prompt": "{numbers} {target} {x}"}, "no others"),
        ({"prompt": "{numbers} {target"}, "bad prompt"),
    ],
)
def test_impossible_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**kwargs)
