"""Where an answer stands, and what number it is. Exact, and linear in the text."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrl.tasks.extraction import first_number, last_boxed, last_line, last_number, plain_number, tagged


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 4 </answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>.", "4"),
        ("<answer>3 <answer>4</answer>", "4"),
        ("<answer>\n1\n2\n</answer>", "1\n2"),
        ("<answer></answer>", ""),
        ("<answer>4", None),
        ("4</answer>", None),
        ("</answer>4<answer>", None),
        ("", None),
    ],
)
def test_tagged(text, answer):
    assert tagged(text) == answer


def test_last_line():
    assert last_line("a\n b \n\n \t\n") == "b"
    assert last_line("one") == "one"
    assert last_line(" \n\n") == last_line("") == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} or \boxed{ 4 }", "4"),
        (r"\boxed{3", None),
        (r"\boxed{3} and \boxed{4", None),  # cut off: the box before it was not the last word
        ("3", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        (" -12.\n", -12),
        ("+7", 7),
        ("007", 7),
        ("1,234,567", 1_234_567),
        ("$1,234.50", Fraction(2469, 2)),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$ 5", 5),
        (".5", Fraction(1, 2)),
        ("0.1", Fraction(1, 10)),
        ("1e3", 1_000),
        ("2.5E-1", Fraction(1, 4)),
        ("9" * 1_000, 10**1_000 - 1),
    ],
)
def test_numbers_are_exact(text, value):
    assert plain_number(text) == value
    assert last_number(f"It is {text.strip()}") == value


@pytest.mark.parametrize(
    "text",
    ["", "-", ".", "1 2", "1/2", "2^3", "5%", "12,34", "1,2345", "1_000", "0x1", "1e", "1e1000", "1e99999999999", "5x",
     "٣", "\N{FULLWIDTH DIGIT ONE}", "\N{VULGAR FRACTION ONE HALF}", "inf", "nan", "1.2.3", "--5", "9" * 1_001],
)  # fmt: skip
def test_what_is_not_one_number(text):
    assert plain_number(text) is None


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("5 + 3 = 8", 5, 8),
        ("12-5", 12, 5),  # a minus between numbers is no sign
        ("x = -5", -5, -5),
        ("12/3", None, 3),
        ("52/2", None, 2),
        ("2 * 3", None, 3),
        ("1,234 and 5,678.", 1_234, 5_678),
        ("costs $70.", 70, 70),
        ("72 apples", 72, 72),
        ("no digits", None, None),
        ("1e3", 1_000, 1_000),
        (".5 of it", Fraction(1, 2), Fraction(1, 2)),
    ],
)
def test_first_and_last_number(text, first, last):
    assert first_number(text) == first
    assert last_number(text) == last


@given(st.integers(-(10**30), 10**30))
def test_any_integer_is_read_with_and_without_commas(number):
    for text in (str(number), f"{number:,}", f"so {number}", f"{number:,}."):
        assert last_number(text) == number


@given(st.text())
def test_no_text_breaks_the_readers(text):
    for reader in (tagged, last_boxed):
        assert (found := reader(text)) is None or found in text
    assert last_line(text) in text
    for reader in (plain_number, first_number, last_number):
        assert reader(text) is None or any(c.isdigit() for c in text)


@pytest.mark.parametrize(
    "piece",
    ["9", "1,234", ",123", " ", "$ ", "-", "1/", "1      ", "1e", ".", "1.", "<answer>", "</answer>", "\\boxed{", "{",
     "\\$", "+1", "e9", "\n", "1,1"],
)  # fmt: skip
def test_megabytes_take_no_time(piece):
    text = piece * (2_000_000 // len(piece))
    start = time.perf_counter()
    for reader in (tagged, last_line, last_boxed, plain_number, last_number):
        reader(text)
    assert time.perf_counter() - start < 3
