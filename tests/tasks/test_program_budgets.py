"""What programs may spend: every budget ends a run by its name, and always at the same place."""

import contextlib
import dataclasses

import pytest
from test_programs import refused, value_of

from dynrl.tasks.programs.budgets import Budgets
from dynrl.tasks.programs.interpreter import Ran, run_program


@pytest.mark.parametrize(
    ("program", "call", "reason"),
    [
        ("while True:\n    pass", "1", "too_many_steps"), ("def f():\n    return f()", "f()", "recursion_too_deep"),
        ("", "9**9**9", "too_large"), ("", "1 << 10**9", "too_large"), ("", "'a' * 10**9", "too_large"),
        ("", "1" * 200, "too_large"), ("", "[[0] * 10**6] * 10**6", "too_large"),
        ("", "sorted(range(10**9))", "too_many_steps"), ("", "int('9' * 2000)", "too_large"),
        ("", "[0 for a in range(99) for b in range(999)]", "too_large"),
        ("", "sum(x for x in range(10**9))", "too_many_steps"), ("x = 2\nwhile True:\n    x *= x", "x", "too_large"),
        ("x = 'a'\nwhile True:\n    x += x", "x", "too_large"),
        ("x = []\nwhile True:\n    x += [x]", "x", "too_large"),
        ("x = [1]\nfor y in x:\n    x.append(y)", "x", "too_large"), ("x = []\nx.append(x)", "x", "nested_too_deep"),
        ("x = []\nx.append(x)", "str(x)", "nested_too_deep"), ("x = []\nx.append(x)", "x == x", "nested_too_deep"),
        ("x = []\nx.append(x)", "x in x", "nested_too_deep"),
        ("x = {}\nx[1] = x", "sorted([x, x])", "nested_too_deep"),
        ("x = []\nx.append(x)\ny = (x,)", "{y: 1}", "nested_too_deep"),
        ("x = ()\nfor i in range(99):\n    x = (x, x)", "x == x", "nested_too_deep"),
        ("x = [0]\nfor i in range(25):\n    x = [x, x]", "repr(x)", "too_many_steps"),
        ("x = zip([1])\nfor i in range(99):\n    x = zip(x)", "list(x)", "nested_too_deep"),
        ("", "'a'.replace('', 'b' * 1000).replace('', 'c' * 1000)", "too_large"),
        ("", "'a'.center(10**9)", "too_large"), ("", "'a'.zfill(10**9)", "too_large"),
        ("", "('a' * 999).join(['b'] * 999)", "too_large"), ("", "{10**30: 1}", "too_large"),
        ("", "{(1, 10**30): 1}", "too_large"), ("d = {}\nfor i in range(10**9):\n    d[i] = i", "d", "too_large"),
        ("", "[0] * 2000 + [1]", "too_large"), ("", "str([10**150] * 99)", "too_large"),
        ("", "-(2**511) * 2 - 1", "too_large"), ("", "(" * 31 + "1" + ")" * 31, "nested_too_deep"),
        ("", "-" * 40 + "1", "nested_too_deep"), ("", "1+" * 40 + "1", "nested_too_deep"),
        ("", "-" * 1999 + "1", "nested_too_deep"), ("", "[" * 1000, "nested_too_deep"),
        ("", "1 if 1 else " * 40 + "1", "nested_too_deep"),
        ("if 1:\n  1\n" + "elif 1:\n  1\n" * 40, "1", "nested_too_deep"), ("", "1" * 2001, "too_long"),
        ("#" * 2001, "1", "too_long"),
        ("".join(" " * i + "for a in b:\n" for i in range(17)) + " " * 17 + "1", "1", "nested_too_deep"),
    ],
)  # fmt: skip
def test_every_budget_ends_a_run_by_its_name(program, call, reason):
    assert refused(call, program)[0] == reason


def test_brackets_in_strings_and_comments_are_none():
    assert value_of("'((((((((((((((((((((((((((((((((((('  # [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[") == "(" * 35
    assert value_of("'''" + "[" * 35 + "'''") == "[" * 35
    assert value_of(r"'\'" + "[" * 35 + "'") == "'" + "[" * 35
    assert refused("')))'" + " + (" * 31)[0] == "nested_too_deep"
    assert value_of("1 if'f'else 2") == 1  # a word before a string is no prefix


def test_steps_are_counted():
    # Three expressions, and the value that is returned.
    assert run_program("", "1 + 2").num_steps == 4
    # A statement and its expression; a name; one item and its three characters, of the value.
    assert run_program("x = 'abc'", "x").num_steps == 2 + 1 + 4
    # 4 for the assignment and 1 for the loop; 3 tests; per round 3 for the statement, and the list's length for pop.
    assert run_program("x = [1, 2]\nwhile x:\n    x.pop()", "1").num_steps == 4 + 1 + 3 + (3 + 2) + (3 + 1) + 2
    # The product, the list with its two items, and 3; the 6 items that are made; the list and 6 items of the value.
    assert run_program("", "[1, 2] * 3").num_steps == 1 + 3 + 1 + 6 + 7


@pytest.mark.parametrize(
    ("call", "budget", "needed"),
    [
        ("1 + 2", "max_steps", 4), ("1 + 2", "max_depth", 2), ("'abc'", "max_length", 3),
        ("[1, 2] + [3]", "max_length", 3), ("255", "max_int_bits", 8), ("-255 - 1", "max_int_bits", 9),
        ("2 ** 8", "max_int_bits", 9), ("1 << 8", "max_int_bits", 9), ("12+34", "max_source_chars", 5),
        ("'a'.join('bc')", "max_length", 3), ("'aa'.replace('a', 'bc')", "max_length", 4),
    ],
)  # fmt: skip
def test_a_budget_is_enough_or_one_too_small(call, budget, needed):
    assert value_of(call, **{budget: needed}) == eval(call)
    assert refused(call, **{budget: needed - 1})[0] in ("too_many_steps", "recursion_too_deep", "too_large", "too_long")


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Budgets)])
def test_impossible_budgets(name):
    for value in (0, -1, 10**9):
        with pytest.raises(ValueError, match=rf"{name} must lie in 1 to \d+, got {value}"):
            Budgets(**{name: value})


RECURSIONS = [
    "abs(f(n - 1))", "any(1 for a in [1] if f(n - 1))", "sum(f(n - 1) for a in [1] for b in [1] for c in [1])",
    "[0 for a in [1] for b in [1] for c in f(n - 1)]", "[][f(n - 1):]", "{f(n - 1): 1 for a in [1]}",
    "[].count(f(n - 1))", "sorted([], reverse=f(n - 1))", "1 + (1 + (1 + (1 + (1 + f(n - 1)))))", "1 < f(n - 1) < 2",
    "f(n - 1) if n else 1",
]  # fmt: skip


@pytest.mark.parametrize("body", RECURSIONS)
def test_recursion_ends_by_the_count_and_not_by_pythons_limit(body):
    program = f"def f(n):\n    for i in [1]:\n        if n:\n            return {body}\n    return 1"
    outcomes = {refused("f(1000)", program), at_depth(250, program)}
    assert outcomes == {("recursion_too_deep", "more than 200 evaluations within one another")}


def at_depth(depth, program):
    return refused("f(1000)", program) if not depth else at_depth(depth - 1, program)


def test_near_pythons_own_limit_a_run_still_ends_by_name():
    def down():
        with contextlib.suppress(RecursionError):
            down()
            return
        ends.append(run_program("def f(n):\n    return 0 if n == 0 else f(n - 1)", "f(40)"))

    ends: list[Ran] = []
    down()
    assert {ran.refused for ran in ends} <= {"recursion_too_deep", "nested_too_deep"}
    assert ends


def test_forty_calls_within_one_another_are_possible():
    assert value_of("f(40)", "def f(n):\n    return 1 if n == 0 else f(n - 1) + 1") == 41
