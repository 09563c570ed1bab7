"""Sources that write at a level of choice: their ladders, and that a level means the same everywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.calculator import CalculatorSums
from dynrl.tasks.countdown import Countdown
from dynrl.tasks.mixture import Mixture
from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.sources import make_source

SOURCES = [
    DigitSorting(),
    DigitSorting(3, 3, 2),
    Arithmetic(),
    Arithmetic(2, 3, "-*", 3, 4),
    CalculatorSums(),
    Countdown(),
    Countdown(2, 2, 8, 40, use_all=False),
]


@pytest.mark.parametrize("source", SOURCES, ids=repr)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_source_writes_at_every_level_that_it_reaches(source, data):
    levels = source.reachable_levels()
    assert set(source.levels) <= set(levels)
    assert len(set(levels)) == len(levels)
    level = data.draw(st.sampled_from(levels[:100]))
    at_level = source.at_level(level)
    assert at_level.levels == (level,)
    assert list(at_level.reachable_levels()) == list(levels)
    task = at_level.task(data.draw(st.integers(0, 2**42)), data.draw(st.integers(0, 2**40)))
    assert (task.level, task.source) == (level, source.name)
    assert len(task.prompt) <= at_level.max_prompt_chars
    assert len(task.answer) <= at_level.max_answer_chars
    assert set(task.prompt + task.answer) <= at_level.alphabet
    assert at_level.alphabet == source.alphabet
    assert make_source(source.name, **at_level.kwargs) == at_level
    if level in source.levels:
        assert at_level.max_prompt_chars <= source.max_prompt_chars


def test_the_order_of_the_ladders():
    assert DigitSorting().reachable_levels() == range(1, 1001)
    assert DigitSorting(2, 1_200).reachable_levels() == range(1, 1201)
    # A prompt of t terms of d digits has t * (d + 1) characters at most: 4, 6, 6, 8, 8, 9, 10, 10, 12.
    assert Arithmetic().reachable_levels()[:9] == [12, 13, 22, 14, 32, 23, 15, 42, 16]
    for source in (Arithmetic(), CalculatorSums()):
        levels = source.reachable_levels()
        longest = [source.at_level(level).max_prompt_chars for level in levels]
        assert longest == sorted(longest)
        assert levels[-1] == max(levels)
    assert len(Arithmetic().reachable_levels()) == 9 * 8
    assert len(Arithmetic(max_digits=11).reachable_levels()) == 11 * 8
    assert len(CalculatorSums().reachable_levels()) == 8 * 8
    assert Countdown().reachable_levels() == range(2, 6)  # of 20 each, a target of 100 has room for five
    assert Countdown(max_number=3).reachable_levels() == range(2, 13)


@pytest.mark.parametrize(
    ("source", "level", "message"),
    [
        (DigitSorting(), 0, r"digit_sorting cannot write at level 0; it can at 1, 2, 3, .*12, \.\.\., 1000"),
        (DigitSorting(), 1_001, "digit_sorting cannot write at level 1001"),
        (Arithmetic(), 11, r"arithmetic cannot write at level 11; it can at 12, 13, 22, 14, .*\.\.\., 99"),
        (CalculatorSums(), 92, r"calculator cannot write at level 92; it can at 12, .*\.\.\., 89"),
        (Countdown(), 6, "countdown cannot write at level 6; it can at 2, 3, 4, 5$"),
    ],
)
def test_a_level_out_of_reach_is_named_with_those_in_reach(source, level, message):
    with pytest.raises(ValueError, match=message):
        source.at_level(level)


def test_the_parts_of_a_mixture_have_levels_of_their_own():
    entries = [{"name": "digit_sorting", "weight": 0.75}, {"name": "countdown", "weight": 0.25}]
    mixture = Mixture(entries)
    assert mixture.parts == [(DigitSorting(), 0.75), (Countdown(), 0.25)]
    ((inner, share),) = Mixture([{"name": "mixture", "kwargs": {"sources": entries}}]).parts
    assert isinstance(inner, Mixture)
    assert (inner.parts, share) == (mixture.parts, 1.0)
