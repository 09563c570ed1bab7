"""Kinds of proposals: what the proposer is shown, what is accepted, and what is refused by which name."""

import dataclasses
import json
import string
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.models.tokenizer import CharTokenizer
from dynrl.tasks.base import Draws, task_hash
from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.proposal_kinds import program as program_kind
from dynrl.tasks.proposal_kinds.base import (
    BUILT_IN_KINDS,
    MAX_PROPOSAL_CHARS,
    Proposal,
    ProposalKind,
    Refusal,
    make_kind,
)
from dynrl.tasks.proposal_kinds.digits import Digits
from dynrl.tasks.proposal_kinds.expression import Expression
from dynrl.tasks.proposal_kinds.program import Program, program_output
from dynrl.tasks.proposal_kinds.source import ProposerTasks
from dynrl.tasks.proposal_kinds.verifier import proposal
from dynrl.tasks.rewards import Unparsable, as_reward, resolve_verifier
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import FrozenTasks, TaskStore
from dynrl.types import Task

KINDS = [
    Digits(), Digits(1, 3, 2, 4), Expression(), Expression(9, 9, "+-*/%", True, 3),
    Expression(1, 2, "%", num_references=0), Program(), Program(200, 20, num_references=5),
]  # fmt: skip


def proposed(kind, text, task_id=-1):
    found = kind.read(text)
    assert isinstance(found, Proposal), found
    return Task(task_id, kind.task_source, found.prompt, found.answer, found.level)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**63), st.integers(0, 6))
def test_examples_are_accepted_and_everything_fits(kind, index, num_references):
    texts = [kind.example(Draws(0, kind.name, index, salt)) for salt in range(1, num_references + 2)]
    tasks = [proposed(kind, text) for text in texts]
    prompt = kind.prompt(Draws(0, kind.name, index), tasks[1:])
    assert prompt == kind.prompt(Draws(0, kind.name, index), tasks[1:])
    for text in (prompt, *texts, *(task.prompt for task in tasks), *(task.answer for task in tasks)):
        assert set(text) <= kind.alphabet
    assert all(len(shown) <= kind.max_prompt_chars for shown in (prompt, *(task.prompt for task in tasks)))
    assert all(len(text) <= kind.max_answer_chars for text in (*texts, *(task.answer for task in tasks)))
    for task in tasks:
        assert as_reward(resolve_verifier(kind.verifier)(task, task.answer), kind.verifier, 0).score == 1.0
        assert proposed(kind, kind.reference(task)) == task  # a reference is what would propose its task
    assert prompt not in {task.prompt for task in tasks}
    assert make_kind(kind.name, **json.loads(json.dumps(kind.kwargs))) == kind


def longest(kind):
    """A proposal as long as the kind allows."""
    if isinstance(kind, Digits):
        return "0" * kind.max_length
    if isinstance(kind, Program):
        text = "def f(x):\n    return '' == x\nf(1)"
        return text.replace("''", f"'{'a' * (kind.max_program_chars - len(text))}'")
    operator, num_others = "//" if "/" in kind.operators else kind.operators[0], kind.max_terms - 1
    term, opened, closed = "9" * kind.max_digits, "(" * kind.parentheses, ")" * kind.parentheses
    return opened * num_others + term + f"{operator}{term}{closed}" * num_others


@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_the_declared_lengths_are_reached(kind):
    text = longest(kind)
    assert len(text) == kind.max_proposal_chars
    task = proposed(kind, text)
    shown = max(kind.prompt(Draws(0, "x", 0), [task] * 9), task.prompt, key=len)
    assert len(shown) == kind.max_prompt_chars


@pytest.mark.parametrize("kind", [Digits(), Expression()], ids=repr)
def test_tasks_that_are_longer_than_proposals_are_no_references(kind):
    task = proposed(kind, longest(kind))
    longer = dataclasses.replace(task, prompt="1" + task.prompt)
    assert kind.prompt(Draws(0, "x", 0), [longer]) == kind.prompt(Draws(0, "x", 0), [])


def test_digits():
    kind = Digits(2, 5, 5, num_references=2)
    assert kind.read("3142\n") == Proposal("3142>", "1234", 4)
    assert kind.read("00") == Proposal("00>", "00", 2)
    for text in (
        "",
        "1",
        "123401",
        "125",
        "1 2",
        "12>",
        "-12",
        "1_2",
        "\N{ARABIC-INDIC DIGIT ONE}2",
        "12\0",
        "x" * 10**6,
    ):
        found = kind.read(text)
        assert isinstance(found, Refusal)
        assert found.reason == "bad_form"
        assert "not 2 to 5 digits" in found.detail
    references = [Task(0, "digit_sorting", f"{digits}>", "", 0) for digits in ("31", "402", "11")]
    assert kind.prompt(Draws(0, "x", 0), []) == ">"
    assert kind.prompt(Draws(0, "x", 0), references[:1]) == ">31>"
    shown = {kind.prompt(Draws(0, "x", index), references) for index in range(200)}
    assert shown == {f">{a}>{b}>" for a in ("31", "402", "11") for b in ("31", "402", "11") if a != b}


def test_proposals_of_digits_are_like_the_sources_own_tasks():
    source = DigitSorting()
    tokenizer = CharTokenizer(source.alphabet)
    for index in range(50):
        task = source.task(0, index)
        assert proposed(Digits(), task.prompt[:-1]) == task
        assert tokenizer.encode(Digits().prompt(Draws(0, "x", index), [task]))


def test_expression():
    kind = Expression()
    # 7 * 3 = 21; three terms, the longest of two digits.
    assert kind.read(" 12+7*3") == Proposal("12+7*3=", "33", 23)
    assert kind.read("0-9") == Proposal("0-9=", "-9", 12)
    division = Expression(operators="/%+", parentheses=True)
    assert division.read("(7+8)//4%3") == Proposal("(7+8)//4%3=", "0", 14)  # 15 // 4 = 3
    earlier = Task(0, "arithmetic", "12+7=", "19", 22)
    assert kind.prompt(Draws(0, "x", 0), []) == "="
    assert kind.prompt(Draws(0, "x", 0), [earlier]) == "=12+7="


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "bad_form"), ("12", "bad_form"), ("123+4", "bad_form"), ("1+2+3+4+5", "bad_form"), ("1 + 2", "bad_form"),
        ("1+x", "bad_form"), ("1+2=", "syntax_error"), ("1=2", "syntax_error"), ("1+", "bad_form"),
        ("1++", "bad_form"), ("1+2+", "syntax_error"), ("1/2", "not_allowed"), ("1**2", "not_allowed"),
        ("1--2", "not_allowed"), ("-1+2", "not_allowed"), ("1==2", "not_allowed"), ("(1)(2)", "not_allowed"),
        ("1//0", "raised"), ("1%0", "raised"), ("01+2", "syntax_error"), ("1_0+2", "bad_form"),
        ("((((((((((1+2))))))))))", "bad_form"), ("1e2+1", "bad_form"), ("9" * 10**6, "bad_form"),
        ("1+\ud8002", "bad_form"), ("\N{ARABIC-INDIC DIGIT ONE}+2+3", "bad_form"), ("1+2\0", "bad_form"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_by_name(text, reason):
    found = Expression(operators="+-*/%", parentheses=True).read(text)
    assert isinstance(found, Refusal)
    assert found.reason == reason


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="0123456789+-*/%()", max_size=20))
def test_expressions_have_the_value_that_python_gives(text):
    kind = Expression(operators="+-*/%", parentheses=True)
    found = kind.read(text)
    if isinstance(found, Proposal):
        assert found.prompt == text + "="
        assert found.answer == str(eval(text))
        assert len(found.answer) <= kind.max_answer_chars


def test_proposals_of_expressions_are_like_the_sources_own_tasks():
    source = Arithmetic(max_terms=4)
    for index in range(100):
        task = source.task(0, index)
        assert proposed(Expression(), task.prompt[:-1]) == task


DOUBLE = "def f(xs):\n    return xs * 2\nf([1, 2])"


@pytest.mark.parametrize(
    "text",
    [
        DOUBLE, f"Here it is:\n```python\n{DOUBLE}\n```\nIt doubles.", f"{DOUBLE}\n```", f"```\n{DOUBLE}",
        f"  {DOUBLE}\n\n",
        "def f(xs):\n    '''Gives [1, 2, 1, 2].'''\n    '''And that.'''\n    return xs*2  # [1, 2, 1, 2]\nf( [1,2], )",
    ],
)  # fmt: skip
def test_a_program_is_shown_without_what_could_give_the_answer_away(text):
    found = Program().read(text)
    assert isinstance(found, Proposal)
    assert found.prompt.startswith("```python\ndef f(xs):\n    return xs * 2\n```\nWhat does f([1, 2]) return?")
    assert found.answer == "[1, 2, 1, 2]"
    # The definition, the call, its list of two; the return, a product of two, four items; five of the value.
    assert found.level == (1 + 1 + 3 + 1 + 3 + 4 + 5).bit_length()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "bad_form"), ("f(1)", "bad_form"), ("def f(x):\n    return x", "bad_form"),
        ("def g(x):\n    return x\ng(1)", "bad_form"), ("def f(x):\n    return x\nf()", "bad_form"),
        ("def f(x):\n    return x\nf(f(1))", "bad_form"), ("def f(x):\n    return x\nf(1) + 1", "bad_form"),
        ("def f(x):\n    return x\nx = f(1)", "bad_form"), ("def f(x):\n    return x\nf(1).y", "bad_form"),
        ("y = 1\ndef f(x):\n    return x\nf(1)", "bad_form"), ("def f(x):\n    return x\nf(default=1)", "bad_form"),
        ("def f(x):\n    return x\nf(y)", "bad_form"), ("def f(x):\n    return range(x)\nf(1)", "bad_form"),
        ("def f(x):\n    return [range(x)]\nf(1)", "bad_form"),
        ("def f(x):\n    return 'a' * x\nf(99)", "answer_too_long"),
        ("def f(x):\n    return x +\nf(1)", "syntax_error"),
        (f"def f(x):\n    return {'x + ' * 20}x\nf(1)", "too_long"),
        (f"def f(x):\n    return x\nf('{'a' * 200}')", "too_long"),
        ("import os\ndef f(x):\n    return x\nf(1)", "not_allowed"),
        ("def f(x):\n    return zip(x)\nf([1])", "not_allowed"),
        ("def f(x):\n    while x:\n        pass\nf(1)", "too_many_steps"),
        ("def f(x):\n    return f(x)\nf(1)", "recursion_too_deep"), ("def f(x):\n    return x // 0\nf(1)", "raised"),
        ("def f(x):\n    return x ** 999\nf(2)", "too_large"), ("\N{SNOWMAN}", "bad_characters"),
        ("x" * 10**6, "too_long"), ("Sure!\ndef f(x):\n    return x\nf(1)", "syntax_error"),
    ],
)  # fmt: skip
def test_what_is_no_program_is_refused_by_name(text, reason):
    found = Program(max_program_chars=100, max_output_chars=50).read(text)
    assert isinstance(found, Refusal)
    assert found.reason == reason


def test_text_in_a_docstring_cannot_pass_for_the_question():
    assert isinstance(Program().read("def f(x):\n    '''x\n```\nWhat does f(2) return?'''\nf(1)"), Refusal)
    found = Program().read('def f(x):\n    """x\n\\x60\\x60\\x60\nWhat does f(2) return?"""\nf(1)')
    assert isinstance(found, Proposal)
    assert found.prompt.startswith("```python\ndef f(x):\n    pass\n```\nWhat does f(1) return?")


def test_a_program_that_gives_two_answers_is_refused(monkeypatch):
    answers = iter([1, 2])
    run = program_kind.run_program
    monkeypatch.setattr(program_kind, "run_program", lambda *args: run(*args)._replace(value=next(answers)))
    found = Program().read(DOUBLE)
    assert isinstance(found, Refusal)
    assert found.reason == "not_deterministic"
    assert "1, refused=''" in found.detail


def test_references_of_programs_must_be_programs():
    with pytest.raises(ValueError, match=r"task 7: not a task of the kind 'program': '1\+1='"):
        Program().prompt(Draws(0, "x", 0), [Task(7, "program", "1+1=", "2")])


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("[1, 2]", "[1,2]", 1.0), ("[1, 2]", "I think so.\n<answer> [ 1, 2 ] </answer>", 1.0),
        ("[1, 2]", "(1, 2)", 0.0), ("True", "1", 0.0), ("'a'", '"a"', 1.0), ("{1: 2, 3: 4}", "{3: 4, 1: 2}", 0.0),
        ("-1", "\n-1\n\n", 1.0), ("None", "None", 1.0),
    ],
)  # fmt: skip
def test_program_output(answer, text, score):
    assert program_output(Task(1, "program", "p", answer), text).score == score


@pytest.mark.parametrize(
    "text", ["", "x", "1 + 1", "[1", "f(1)", "[" * 5_000, "9" * 5_000, "set()", "1.5", "\ud800", "<answer></answer>"]
)
def test_an_output_that_is_no_value_is_unparsable(text):
    with pytest.raises(Unparsable):
        program_output(Task(1, "program", "p", "1"), text)
    with pytest.raises(ValueError, match=r"task 1: the answer .* is not a value"):
        program_output(Task(1, "program", "p", text), "1")


class Parity(ProposalKind):
    """A kind of one's own."""

    name = "parity"
    task_source = "parity"
    verifier = "exact_match"
    num_references = 0

    def __init__(self, result: Any = None):
        self.result = result

    @property
    def kwargs(self):
        return {"result": self.result}

    def prompt(self, draws, references):
        return "a number:"

    def read(self, text) -> Any:
        if self.result:
            return {"wrong": (text, 0), "empty": Proposal("", "", 0), "typed": Proposal(text, "", cast(int, self))}[
                self.result
            ]
        if not text.isdigit():
            return Refusal("no_number")
        return Proposal(f"is {text} even?", "no" if text[-1] in "13579" else "yes", 0)

    def example(self, draws):
        return str(draws.below(100))


PARITY = f"{__name__}:Parity"


def test_the_verifier_hands_over_the_task_or_the_reason():
    task = make_source("self_propose", kind="digits").task(0, 0)
    reward = as_reward(proposal(task, "3142"), "proposal", 0)
    assert reward == (1.0, {}, {"source": "digit_sorting", "prompt": "3142>", "answer": "1234", "level": 4})
    reward = as_reward(proposal(task, "x" * 10_000), "proposal", 0)
    assert reward.score == 0.0
    assert reward.info["refused"] == "bad_form"
    assert len(reward.info["detail"]) <= 200


def test_kinds_of_ones_own():
    source = make_source("self_propose", kind=PARITY)
    task = source.task(0, 0)
    assert task.source == "self_propose/parity"
    assert source.verifiers == {"self_propose/parity": "proposal", "parity": "exact_match"}
    assert proposal(task, "7").info == {"source": "parity", "prompt": "is 7 even?", "answer": "no", "level": 0}
    assert proposal(task, "x").info == {"refused": "no_number", "detail": ""}
    room = MAX_PROPOSAL_CHARS - len("is  even?no")
    assert proposal(task, "9" * (room + 1)).info["refused"] == "too_long"
    whole = as_reward(proposal(task, "9" * room), "proposal", 0)
    assert whole.info == {"source": "parity", "prompt": f"is {'9' * room} even?", "answer": "no", "level": 0}


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ("wrong", TypeError, "Parity': read returned tuple, neither a Proposal nor a Refusal"),
        ("empty", ValueError, "Parity': a Proposal's prompt is empty"),
        ("typed", TypeError, "Parity': a Proposal must hold two strings and an int, got .*level="),
    ],
)
def test_a_kind_that_does_not_keep_to_its_contract_is_named(result, error, message):
    task = Task(3, "self_propose/parity", "p", "", metadata={"kind": PARITY, "kind_kwargs": {"result": result}})
    with pytest.raises(error, match=message):
        proposal(task, "7")


def test_a_task_without_a_kind_is_named():
    for metadata in ({}, {"kind": "digits"}, {"kind": 1, "kind_kwargs": {}}):
        with pytest.raises(ValueError, match="task 5: metadata must hold 'kind' and 'kind_kwargs'"):
            proposal(Task(5, "s", "p", "", metadata=metadata), "12")


@pytest.mark.parametrize("name", sorted(BUILT_IN_KINDS))
def test_the_source_writes_tasks_that_its_verifiers_judge(name):
    source = make_source("self_propose", kind=name)
    assert isinstance(source, ProposerTasks)
    kind = make_kind(name)
    tasks = [source.task(4, index) for index in range(20)]
    assert tasks == [make_source(source.name, **source.kwargs).task(4, index) for index in range(20)]
    assert len({task.answer for task in tasks}) > 10
    assert source.verifiers == {f"self_propose/{name}": "proposal", kind.task_source: kind.verifier}
    for task in tasks:
        assert (task.source, task.level, source.levels, source.num_tasks) == (f"self_propose/{name}", 0, (0,), None)
        assert task.prompt == kind.prompt(Draws(0, "x", 0), [])
        assert proposal(task, task.answer).score == 1.0
    reward = proposal(tasks[0], tasks[0].answer)
    made = Task(-1, str(reward.info["source"]), str(reward.info["prompt"]), str(reward.info["answer"]), 1)
    assert source.problem(Draws(0, "x", 0), 0, [made]).prompt == kind.prompt(Draws(0, "x", 0), [made])
    store = TaskStore(source, 0, 100)
    assert len(store) == 100
    assert store.get([99])[0].metadata == {"kind": name, "kind_kwargs": dict(kind.kwargs)}
    store.append([made])
    with pytest.raises(ValueError, match=r"self_propose.*evaluate on another source"):
        source.task(0, 0, FrozenTasks(tasks[:1]).hashes)
    assert source.alphabet == kind.alphabet
    assert (source.max_prompt_chars, source.max_answer_chars) == (kind.max_prompt_chars, kind.max_answer_chars)
    assert source.without({task_hash("x")}) is source
    assert (source.alphabet or set()) <= set(string.printable) - set("\t\r\x0b\x0c")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Digits(3, 2), ValueError, "digits needs 1 <= min_length <= max_length"),
        (lambda: Digits(num_symbols=1), ValueError, "digits needs 2 <= num_symbols <= 10"),
        (lambda: Digits(num_references=-1), ValueError, "digits needs num_references >= 0"),
        (lambda: Expression(max_digits=10), ValueError, "expression needs 1 <= max_digits <= 9"),
        (lambda: Expression(max_terms=1), ValueError, "2 <= max_terms <= 9"),
        (lambda: Expression(operators=""), ValueError, r"operators from '\+-\*/%', each at most once"),
        (lambda: Expression(operators="++"), ValueError, r"operators from '\+-\*/%', each at most once"),
        (lambda: Expression(operators="+^"), ValueError, r"operators from '\+-\*/%', each at most once"),
        (lambda: Expression(num_references=-1), ValueError, "expression needs num_references >= 0"),
        (lambda: Program(max_program_chars=99), ValueError, "program needs max_program_chars >= 100"),
        (lambda: Program(max_program_chars=5_990), ValueError, r"max_program_chars \+ max_output_chars <= \d+"),
        (lambda: Program(max_output_chars=2_001), ValueError, "max_output_chars <= 2000"),
        (lambda: Program(max_steps=0), ValueError, "max_steps must lie in 1 to"),
        (lambda: Program(num_references=-1), ValueError, "program needs num_references >= 0"),
        (lambda: make_kind("digit"), ValueError, "unknown kind of proposal 'digit' .did you mean 'digits'"),
        (lambda: make_kind("digits", max_len=3), TypeError, "takes no argument 'max_len' .did you mean 'max_length'"),
        (lambda: make_kind(f"{__name__}:Task"), TypeError, "missing a required argument"),
        (lambda: make_source("self_propose", kind="programm"), ValueError, "did you mean 'program'"),
    ],
)  # fmt: skip
def test_impossible_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()
