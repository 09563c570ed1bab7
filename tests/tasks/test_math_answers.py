"""Mathematical equivalence: what math-verify decides, and what is decided before it."""

import sys

import pytest

from dynrl.tasks.rewards import Unparsable
from dynrl.types import Task

pytest.importorskip("math_verify")
from dynrl.tasks.math_answers import math_verify


def score(reference, text):
    return math_verify(Task(7, "math", "p", reference), text).score


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "42"),
        ("42", r"So it is \boxed{42}."),
        ("42", r"\boxed{6 \cdot 7}"),
        ("42", "<answer>42.0</answer>"),
        ("42", "The answer is 42."),
        ("42", "$42$"),
        ("1,234", r"\boxed{1{,}234}"),
        ("1000", r"\boxed{1e3}"),
        ("-0.5", r"\boxed{-\frac{1}{2}}"),
        (r"\frac12", "0.5"),
        (r"\frac{1}{2}", r"The answer is $\frac{2}{4}$."),
        ("1/2", r"\boxed{\frac{1}{2}}"),
        ("x^2+1", "$1+x^2$"),
        ("x+y", r"\boxed{y+x}"),
        ("(1,2)", r"\boxed{(1, 2)}"),
        (r"\{1,2\}", r"\boxed{\{2,1\}}"),
        (r"\boxed{7}", r"\boxed{7}"),
        (r"\text{Monday}", r"\boxed{\text{Monday}}"),
        ("2", r"\boxed{x=2}"),
        ("10", "20% of 50 is 10"),
        ("10", "10% of 100 is 10."),
        ("5", r"\boxed{5 \text{ dollars}}"),
        (r"50\%", r"\boxed{50\%}"),
        ("0.333333", r"\boxed{\frac{1}{3}}"),  # floats to six decimals: math-verify's judgement
    ],
)
def test_equivalent(reference, text):
    assert score(reference, text) == 1.0


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("42", "43"),
        ("42", r"\boxed{42x}"),
        ("42", r"\boxed{\text{forty-two}}"),
        ("1", "1e3"),  # math-verify reads 1
        ("1", "The answer is 1e3."),
        ("1", "The answer is 1e1"),
        ("1", r"\boxed{1e31}"),
        ("1", "$1e3$"),
        ("50", "50%"),  # math-verify takes them for equal
        ("50", r"\boxed{50\%}"),
        ("50", "It is 50 %."),
        ("1", "1.0000001"),  # math-verify rounds to six decimals
        ("3", r"\boxed{3} or \boxed{4}"),
        ("3", "3 and 4"),
        ("3", "$3$, $4$ and $5$"),
        ("(1,2)", r"\boxed{(2,1)}"),
        (r"\frac12", r"\boxed{\frac13}"),
    ],
)
def test_not_equivalent(reference, text):
    assert score(reference, text) == 0.0


@pytest.mark.parametrize("text", ["", "nothing", "٣", "???", "\0", "\ud800"])
def test_without_an_answer_it_is_unparsable(text):
    with pytest.raises(Unparsable):
        score("3", text)


def test_a_reference_that_cannot_be_read_names_the_task():
    with pytest.raises(ValueError, match="task 7: math-verify cannot read the answer") as caught:
        score("", "3")
    assert not isinstance(caught.value, Unparsable)


def test_without_the_package_the_error_has_the_install_line(monkeypatch):
    from dynrl.tasks.rewards import resolve_verifier

    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, "dynrl.tasks.math_answers")
    with pytest.raises(ValueError, match=r"pip install 'dynrl\[tasks\]'"):
        resolve_verifier("math_verify")
