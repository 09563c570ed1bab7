"""Programs that are run: they give what Python gives, or are refused by name."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_programs import Writer

from dynrl.tasks.programs import expressions, reading
from dynrl.tasks.programs.budgets import REFUSALS, Budgets, Stopped
from dynrl.tasks.programs.functions import CONSUMERS, FUNCTIONS
from dynrl.tasks.programs.interpreter import Ran, run_program


def value_of(call, program="", **budgets):
    ran = run_program(program, call, Budgets(**budgets))
    assert not ran.refused, ran
    return ran.value


def refused(call, program="", **budgets):
    ran = run_program(program, call, Budgets(**budgets))
    assert ran.refused in REFUSALS, ran
    assert ran.value is None
    return ran.refused, ran.detail


def in_python(program, call):
    """What Python makes of it: the value as text, or the name of the error."""
    names = {}
    try:
        exec(program, names)
        return repr(eval(call, names)), ""
    except Exception as error:
        return "None", type(error).__name__


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of Python's own compiler
@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=True))
def test_random_programs_give_what_python_gives(rng):
    writer = Writer(rng)
    program, call = writer.program(), writer.call()
    ran = run_program(program, call)
    if ran.refused in ("", "raised"):
        assert (repr(ran.value), ran.detail) == in_python(program, call)
    elif ran.refused == "syntax_error":
        with pytest.raises(SyntaxError):
            compile(program, "program", "exec")
    else:
        assert ran.refused in REFUSALS
    assert run_program(program, call) == ran


PROGRAMS = [
    # Names: a function's own are its own from the first line on, a comprehension's do not leak.
    ("x = 1\ndef f():\n    y = x\n    x = 2\n    return y", "f()"),
    ("x = 1\ndef f():\n    return [x for x in [5]] + [x]", "f()"),
    ("def f(a):\n    a = a + 1\n    return a\na = 1", "f(5) + a"),
    ("def f(n):\n    return n if n < 1 else g(n - 1)\ndef g(n):\n    return -n if n < 1 else f(n - 1)", "f(7)"),
    ("def f(sum):\n    sum += 1\n    return sum", "f(1)"), ("sum = 3", "sum([1])"),
    ("", "[y for x in [1] for y in [y]]"), ("", "{x: y for x, y in zip('ab', [1, 2]) if y > 1}"),
    ("def f():\n    pass", "f()"), ("def f(a):\n    return a", "f()"),
    ("def f(a):\n    return a\ndef f(b):\n    return -b", "f(1)"),
    # Loops.
    ("n = 0\nfor i in range(9):\n    if i == 2:\n        continue\n    if i == 5:\n        break\n    n += i", "n"),
    ("n = 0\nwhile n < 3:\n    n += 1\nelse:\n    n = -n", "n"),
    ("n = 0\nfor i in [1]:\n    break\nelse:\n    n = 5", "n"),
    ("for i in [3]:\n    for j in [4]:\n        break\n    else:\n        i = 9", "i, j"),
    ("a = [1, 2]\nfor x in a:\n    if x < 4:\n        a.append(x + 2)", "a"),
    ("d = {1: 2}\nfor k in d:\n    d[k + 1] = 3", "d"), ("a = [1, 2, 3]\nfor x in reversed(a):\n    a.pop()", "a"),
    ("a = [1]\nfor i, x in enumerate(a):\n    if i < 3:\n        a += [i]", "a"),
    # Assignments.
    ("a = b = [1]\na += [2]", "b"), ("a = b = [1]\na = a + [2]", "b"), ("a = b = {1: 1}\na |= {2: 2}", "b"),
    ("a = b = [1]\na *= 2", "b"), ("a = [1]\na += 'xy'", "a"), ("a = [1]\na += 5", "a"),
    ("a, (b, c) = 1, 'xy'", "c, b, a"), ("a, b = b, a = 1, 2", "a, b"), ("[a, b] = {3: 4, 5: 6}", "a, b"),
    ("a, b = 1, 2, 3", "a"), ("a, b = zip([1], [2])", "a"), ("a = [1, 2, 3, 4]\na[1:3] = 'xyz'\na[::3] = [0, 0]", "a"),
    ("a = [1, 2]\na[::2] = [1, 2, 3]", "a"), ("a = [[0]] * 2\na[0][0] += 5", "a"),
    ("i = 0\na = [1, 2]\ni, a[i] = 1, 9", "a"), ("t = (1,)\nt[0] = 2", "t"),
    # Operators.
    ("", "1 < 2 < 3 != 3"), ("", "0 or [] or 'x' and ()"), ("", "not 0 == 1"), ("", "-7 // 2, -7 % 3, 7 // -2"),
    ("", "True + True, -True, ~False, True & False, True << 2"), ("", "2 ** 3 ** 2, (-2) ** 3, 0 ** 0, 0 ** -1"),
    ("", "1 >> 10 ** 9, -1 >> 10 ** 9, 0 << 10 ** 9, 1 ** 10 ** 9"), ("", "1 << -1"), ("", "'a' < 'b', [1] < [1, 0]"),
    ("", "1 == True, [1] == [True], (1,) == [1], {1: 2} == {True: 2}"), ("", "'a' < 1"), ("", "{} < {}"),
    ("", "'' * 10 ** 30"), ("", "[] * -1, 2 * (1,), 'ab' * True"), ("", "[1] + (2,)"), ("", "1 + '1'"), ("", "-'a'"),
    ("", "1 in range(0, 9, 2), 'a' in range(5), 10 ** 30 in range(10 ** 40)"), ("", "1 in 'a'"), ("", "1 in 5"),
    ("", "(1, 2) in {1: 2}.items(), 1 in {1: 2}.values(), [] in [[]], [] in {}"),
    ("", "None is None, False is not None"), ("", "{1: 'a', True: 'b'}"), ("", "{[]: 1}"), ("", "{(1, [2]): 1}"),
    # Subscripts.
    ("", "[1, 2, 3][::-1], 'abc'[-2:], (1, 2)[True], range(9)[2:8:3], range(9)[-1]"), ("", "[1][10 ** 30]"),
    ("", "[1]['a']"), ("", "[1]['a':]"), ("", "[1][::0]"), ("", "5[0]"), ("", "{}[0]"),
    # Functions: laziness shows in what is not evaluated, and in what is left.
    ("", "any(1 // x for x in [1, 0]), all(1 // x for x in [2, 0])"), ("", "max((x for x in []), default=0)"),
    ("a = [1, 2, 3]\nz = zip(a, a)\nfor p in z:\n    break", "list(z), list(z)"),
    ("a = [1]\nz = enumerate(a)\na.append(2)", "list(z)"), ("z = zip([1, 2], [3])", "dict(z)"),
    ("", "sum([[1], [2]], []), sum([], 5), sum([True, 2])"), ("", "sum(['a'], 'b')"), ("", "sum('ab')"),
    ("", "min(3, 1, 2), max('ab', 'b'), min([(1, 2), (1, 1)])"), ("", "max()"), ("", "max([])"),
    ("", "max(1, 2, default=3)"), ("", "int(' 1_0 '), int('-7'), int('ff', 16), int(True), int()"), ("", "int('x')"),
    ("", "int(None)"), ("", "int(5, 2)"),
    ("", "str([1, 'a', (None, True)]), str({'k': {}}), repr('a'), str(range(3))"), ("", "chr(65), ord('a')"),
    ("", "chr(-1)"), ("", "divmod(-7, 2), pow(2, 10), pow(2, 10, 7), pow(3, -1, 7)"), ("", "pow('a', 2)"),
    ("", "divmod('a', 2)"), ("", "list(range(5, 0, -2)), tuple('ab'), list({1: 2}), list(reversed({1: 2, 3: 4}))"),
    ("", "range('a')"), ("", "len(range(10 ** 30))"), ("", "len(zip())"), ("", "reversed(zip())"),
    ("", "bool(zip()), bool({}.items())"), ("", "dict([(1, 2), 'ab']), dict({1: 2})"), ("", "dict([1])"),
    ("", "dict([(1, 2, 3)])"), ("", "sorted([1, 'a'])"), ("", "sorted('hello', reverse=True), sorted([True, 0])"),
    ("", "len(1, 2)"), ("", "len()"), ("", "f(1)"), ("", "list(enumerate('ab', 5)), list(enumerate(zip('ab', 'cd')))"),
    ("", "abs(-3), abs(True)"), ("", "abs('a')"),
    # Methods.
    ("a = [3, 1]\nb = a.sort()", "a, b"), ("a = [1, 2, 3]\nb = a.pop(0), a.pop()", "a, b"), ("", "[].pop()"),
    ("a = [1, 2, 1]\na.remove(1)\na.insert(-1, 5)\na.reverse()", "a, a.index(1), a.count(7)"), ("", "[1].index(2)"),
    ("d = {1: 2}\nx = d.get(5), d.pop(1), d.setdefault(3, []), d.pop(9, 0)\nd.update([(4, 4)])", "d, x"),
    ("", "{}.pop(1)"), ("", "'a,b'.split(','), ' a  b '.split(), 'abc'.split('b', 0), 'a\\nb'.splitlines()"),
    ("", "'a'.split('')"), ("", "'-'.join('abc'), ''.join(['a']), ','.join(str(x) for x in (1, 2))"),
    ("", "','.join([1])"), ("", "'aaa'.replace('a', 'bb'), 'abc'.replace('', '-'), 'aaa'.replace('a', '', 2)"),
    ("", "'a'.replace(1, 2)"), ("", "'7'.zfill(3), 'a'.center(4, '*'), 'a'.ljust(3) + 'b'.rjust(3)"),
    ("", "'a'.center(3, 'xx')"), ("", "'a'.zfill('b')"),
    ("", "'abcabc'.find('c', 3), 'abc'.startswith(('x', 'a')), 'Ab'.swapcase(), 'x1'.isalnum()"),
    ("", "'a'.index('b')"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(("program", "call"), PROGRAMS)
def test_programs_give_what_python_gives(program, call):
    ran = run_program(program, call)
    assert (repr(ran.value), ran.detail) == in_python(program, call)
    assert ran.refused == ("raised" if ran.detail else "")


@pytest.mark.parametrize(
    ("call", "detail"),
    [
        ("eval('1')", "the name eval"), ("__import__('os')", "the name __import__"), ("open('x')", "the name open"),
        ("print(1)", "the name print"), ("set()", "the name set"), ("float(1)", "the name float"),
        ("input()", "the name input"), ("[].__class__", "the attribute __class__"), ("(1).real", "the attribute real"),
        ("f.__globals__", "the attribute __glob"), ("''.format(1)", "the method format of str"),
        ("[].__len__()", "the method __len__ of list"), ("(1).to_bytes()", "of int"),
        ("''.encode()", "the method encode"), ("''.translate({})", "the method translate"),
        ("''.expandtabs(9)", "expandtabs"), ("zip().send()", "the method send of iterator"),
        ("{}.items().mapping", "the attribute mapping"), ("'%99d' % 1", "formatting a string"),
        ("f'{1:9}'", "a formatted string"), ("rF'{1}'", "a formatted string"), ("lambda: 1", "Lambda"),
        ("[x := 1]", "NamedExpr"), ("{1, 2}", "Set"), ("{x for x in []}", "SetComp"), ("1 / 2", "Div"),
        ("1.5", "a float"), ("1j", "a complex"), ("b'a'", "a bytes"), ("...", "a ellipsis"),
        ("'\\u00e9'", "a string beyond ASCII"), ("'\\ud800'", "a string beyond ASCII"),
        ("chr(233)", "a string beyond ASCII"), ("2 ** -1", "a negative power"),
        ("(x for x in [])", "GeneratorExp here"), ("zip(x for x in [])", "GeneratorExp here"),
        ("[].extend(x for x in [])", "Gener"), ("sum((x for x in []), f())", "a generator beside"), ("[1:2, 3]", ""),
        ("[][1:2, 3]", "Slice here"), ("[*[1]]", "Starred"), ("max(*[1])", "Starred"),
        ("dict(**{})", "the keyword **"), ("sorted([], key=len)", "the keyword key"), ("{**{}}", "**"),
        ("len", "the function len as a value"), ("[len]", "the function len"), ("1 is 1", "is, other than"),
        ("(1)(2)(3)", "a call of"), ("(len)(x for x in [])", "GeneratorExp here"),
        ("[1 async for x in y]", "asynchronous"), ("await f()", "Await"), ("(yield)", "Yield"),
        ("{}.keys() & {}.keys()", "BitAnd of dict_keys"), ("str({}.keys())", "the contents of dict_keys"),
        ("zip() == zip()", "the contents of iterator"), ("[zip()]", "the contents of iterator"),
        ("{zip(): 1}", "contents of iter"), ("{range(3): 1}", "a range as a key"),
        ("[x for a in b for b in c for c in d for d in e]", "a comprehension with more"),
    ],
)  # fmt: skip
def test_what_is_not_in_the_language_is_refused_by_name(call, detail):
    reason, found = refused(call)
    if not detail:
        assert reason == "syntax_error"
    else:
        assert reason == "not_allowed"
        assert detail in found


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os", "Import"), ("from os import path", "ImportFrom"), ("class A: pass", "ClassDef"),
        ("global x", "Global"), ("def f():\n    nonlocal x", "Nonlocal"), ("try:\n    1\nexcept E:\n    1", "Try"),
        ("raise E", "Raise"), ("with a: pass", "With"), ("assert 0", "Assert"), ("del a", "Del"),
        ("match 1:\n    case 1: pass", "atch"), ("async def f(): pass", "AsyncFunctionDef"),
        ("x: int = 1", "AnnAssign"), ("def f(a: int): pass", "an annotation"),
        ("def f() -> int: pass", "an annotation"), ("def f(a=1): pass", "parameters"),
        ("def f(*a): pass", "parameters"), ("def f(a, /): pass", "parameters"), ("@f\ndef f(): pass", "a decorator"),
        ("a, *b = 1, 2", "Starred"), ("if 1:\n    def f(): pass", "within a statement"),
        ("def f():\n    def g(): pass", "within a statement"), ("def f(): pass\nx = f", "the function f as a value"),
        ("len += 1", "the function len as a value"), ("def f(a): pass\nf(default=1)", "keywords of a function"),
        ("x = []\nx.y = 1", "an assignment to an attribute"), ("x = []\nx.y += 1", "an assignment to an attribute"),
        ("def __f(): pass", "the name __f"), ("__x = 1", "the name __x"), ("def f(__a): pass", "the name __a"),
        ("def f(a): pass\nf(x for x in [])", "GeneratorExp here"),
    ],
)  # fmt: skip
def test_statements_that_are_not_in_the_language_are_refused_by_name(program, detail):
    reason, found = refused("1", program)
    assert reason == "not_allowed"
    assert detail in found


@pytest.mark.parametrize(
    "program",
    [
        "(", "1 +", "return 1", "break", "for x in y: pass\ncontinue", "while 1:\n    pass\nelse:\n    break",
        "def f(a, a): pass", "if 1:\nx", " x = 1", "x = '", "f() = 1", "if 1:\n\tx = 1\n        y = 1", "'\\N{NOPE}'",
    ],
)  # fmt: skip
def test_what_python_does_not_compile_is_a_syntax_error(program):
    with pytest.raises(SyntaxError):
        compile(program, "program", "exec")
    assert refused("1", program)[0] == "syntax_error"


@pytest.mark.parametrize(
    ("text", "character"), [("a\0", "\\x00"), ("\ud800", "ud800"), ("\N{FULLWIDTH LATIN SMALL LETTER A}", "uff41"),
                            ("'\N{PILE OF POO}'", "1f4a9"), ("a\r\n", "\\r"), ("\x0c", "x0c"), ("\u202e1", "202e")]
)  # fmt: skip
def test_characters_other_than_printable_ascii_are_refused(text, character):
    reason, detail = refused(text)
    assert reason == "bad_characters"
    assert character in detail
    assert refused("1", text) == (reason, detail)


def test_every_node_that_is_read_can_be_run():
    nodes = {node for node in reading._NODES if node.__mro__[1].__name__ == "expr"}
    assert nodes == set(expressions._EXPRESSIONS)
    assert set(FUNCTIONS) >= CONSUMERS


def test_a_slice_is_no_key_whatever_the_version_of_python():
    assert refused("{1: 2}[1:2]") == refused("d", "d = {}\nd[1:2] = 3") == ("raised", "TypeError")


def test_nothing_of_a_run_is_left_for_the_next():
    assert value_of("x", "x = [1]\nx.append(2)") == [1, 2]
    assert refused("x") == ("raised", "NameError")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60), st.text(alphabet="()[]{}'\"\\:,.=+-*/%<>!~^&|@#\n \tabf019_", max_size=60))
@example("\0", "\\")
@example("'''", '"""')
def test_no_text_raises(program, call):
    for ran in (run_program(program, call), run_program(call, program), run_program("", call)):
        assert isinstance(ran, Ran)


def test_the_reader_raises_nothing_but_stopped():
    for text in ("x" * 5_000, "\0", "(", "import os", "(" * 100):
        with pytest.raises(Stopped):
            reading.read_program(text, 2_000)
        with pytest.raises(Stopped):
            reading.read_expression(text, 2_000)


def test_hash_seeds_change_nothing():
    code = (
        "import random, sys\n"
        "from random_programs import Writer\n"
        "from dynrl.tasks.programs.interpreter import run_program\n"
        "writers = [Writer(random.Random(seed)) for seed in range(60)]\n"
        "print([run_program(writer.program(), writer.call()) for writer in writers])\n"
        "assert 'jax' not in sys.modules"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "error::SyntaxWarning", "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
