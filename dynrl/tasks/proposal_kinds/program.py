"""Proposals of small programs whose output is to be predicted: Absolute Zero's deduction tasks."""

import ast
import dataclasses
import itertools
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.base import Draws
from dynrl.tasks.extraction import last_line, tagged
from dynrl.tasks.programs.budgets import Budgets, Stopped
from dynrl.tasks.programs.interpreter import run_program
from dynrl.tasks.programs.reading import is_literal, read_expression, read_program
from dynrl.tasks.proposal_kinds.base import MAX_PROPOSAL_CHARS, Chosen, Proposal, Refusal
from dynrl.tasks.rewards import Unparsable
from dynrl.types import Reward, Task

MAX_ANSWER_CHARS = 2_000  # of what a solver's answer may take up

_ASKED = """\
Write a Python function f and, on the last line, a call of it with literal arguments. What the call returns should take
some thought to work out by hand. Use whole numbers, booleans, strings, lists, tuples and dicts, loops, comprehensions
and functions of your own. Do not use imports, classes, lambda, floats, sets, formatted strings, annotations or print.
"""
_EXAMPLE = "For example:\n```python\n{}\n```\n"
_START = "Now write another one.\n```python\n"
_TASK = (
    "```python\n{}\n```\n"
    "What does {} return? Write the value as Python does, with nothing else, between <answer> and </answer>.\n"
)
_TASK_PARTS = re.compile(re.escape(_TASK).replace(r"\{\}", "(.*)"), re.DOTALL)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n")
_SEEDS = (
    "def f(xs):\n    return xs",
    "def f(xs):\n    return sorted(xs)[::-1]",
    "def f(xs):\n    total = 0\n    for x in xs:\n        total = 2 * total + x\n    return total",
    "def f(xs):\n    return [x * x for x in xs if x % 2 == 0]",
)


@dataclass(frozen=True)
class Program(Chosen):
    """The proposer writes a function `f` and a call of it; the solver is shown both and asked for what it returns.

    As in Absolute Zero (arXiv:2505.03335, the deduction task): the answer is what the executor computes, the program is
    run twice and must return the same, and comments and docstrings, which could give the answer away, are dropped. The
    text may stand in a fence of three backticks. The proposer's prompt ends with an open fence, the solver's begins
    with a closed one. The level is the logarithm to base 2 of the steps that the program takes.

    Attributes:
      max_program_chars: of the definitions and the call, as `ast.unparse` writes them.
      max_output_chars: of the answer, as `repr` writes it.
      max_steps: see `dynrl.tasks.programs.budgets.Budgets`.
      num_references: how many earlier proposals the proposer is shown at most.
    """

    max_program_chars: int = 800
    max_output_chars: int = 100
    max_steps: int = 20_000
    num_references: int = 2

    name = "program"
    task_source = "program"
    verifier = "program_output"

    def __post_init__(self):
        most = MAX_PROPOSAL_CHARS - len(_TASK)
        if self.max_program_chars < 100 or self.max_output_chars < 1:
            raise ValueError(f"program needs max_program_chars >= 100 and max_output_chars >= 1, got {self}")
        if self.max_program_chars + self.max_output_chars > most or self.max_output_chars > MAX_ANSWER_CHARS:
            raise ValueError(
                f"program needs max_program_chars + max_output_chars <= {most} and max_output_chars <= "
                f"{MAX_ANSWER_CHARS}, got {self}"
            )
        if self.num_references < 0:
            raise ValueError(f"program needs num_references >= 0, got {self}")
        _ = self._budgets

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that make the kind again."""
        return dataclasses.asdict(self)

    @property
    def alphabet(self) -> frozenset[str]:
        """Printable ASCII and the line feed: the executor has no other strings."""
        return frozenset(string.digits + string.ascii_letters + string.punctuation + " \n")

    @property
    def max_proposal_chars(self) -> int:
        """Of the definitions and the call."""
        return self.max_program_chars

    @property
    def max_prompt_chars(self) -> int:
        """Of the solver's prompt, or of the proposer's with its references."""
        references = self.num_references * (len(_EXAMPLE.format("")) + self.max_program_chars)
        task = len(_TASK.format("", "")) + self.max_program_chars - len("\n")  # between the definitions and the call
        return max(task, len(_ASKED) + references + len(_START))

    @property
    def max_answer_chars(self) -> int:
        """Of a proposal or an answer with what stands around it."""
        return max(self.max_program_chars + len("\n```"), self.max_output_chars + len("<answer></answer>"))

    @property
    def _budgets(self) -> Budgets:
        return Budgets(max_steps=self.max_steps)

    def prompt(self, draws: Draws, references: Sequence[Task]) -> str:
        """Returns what is asked for, then the references."""
        return _ASKED + "".join(_EXAMPLE.format(text) for text in self.chosen(draws, references)) + _START

    def reference(self, task: Task) -> str:
        """Returns the program and the call of a task that was proposed."""
        parts = _TASK_PARTS.fullmatch(task.prompt)
        if parts is None:
            raise ValueError(f"task {task.task_id}: not a task of the kind 'program': {task.prompt[:80]!r}")
        return f"{parts[1]}\n{parts[2]}"

    def read(self, text: str) -> Proposal | Refusal:
        """Runs the program twice."""
        try:
            program, call = _parts(_unfenced(text), self._budgets.max_source_chars)
        except Stopped as stopped:
            return Refusal(stopped.refused, stopped.detail)
        if len(program) + len(call) + 1 > self.max_program_chars:
            return Refusal("too_long", f"{len(program) + len(call) + 1} characters")
        ran = run_program(program, call, self._budgets)
        if ran.refused:
            return Refusal(ran.refused, ran.detail)
        again = run_program(program, call, self._budgets)
        if repr(again) != repr(ran):
            return Refusal("not_deterministic", f"{ran!r:.80}, then {again!r:.80}")
        answer = repr(ran.value)
        if len(answer) > self.max_output_chars:
            return Refusal("answer_too_long", f"{len(answer)} characters")
        if _value(answer) != answer:  # a range
            return Refusal("bad_form", "a result that cannot be written out")
        return Proposal(_TASK.format(program, call), answer, ran.num_steps.bit_length())

    def example(self, draws: Draws) -> str:
        """Returns one of a few programs, called with a drawn list."""
        values = [draws.below(10) for _ in range(1 + draws.below(5))]
        return f"{_SEEDS[draws.below(len(_SEEDS))]}\nf({values})\n```"


def program_output(task: Task, text: str) -> Reward:
    """1 when the completion's value is the answer's, of the same type: `[1,2]` is `[1, 2]`, and `True` is not `1`.

    The value is what stands in the last `<answer>...</answer>`, or else on the last line that is not blank.

    Raises:
      Unparsable: it is no value that is written out: numbers, strings, lists and so on.
      ValueError: the task's answer is none.
    """
    expected = _value(task.answer)
    if expected is None:
        raise ValueError(f"task {task.task_id}: the answer {task.answer[:80]!r} is not a value")
    answer = tagged(text)
    given = _value(last_line(text) if answer is None else answer)
    if given is None:
        raise Unparsable(f"not a value: {text[-80:]!a}")
    return Reward(float(given == expected))


def _value(text: str) -> str | None:
    """A value that is written out, as Python writes it; None where it is no such value."""
    try:
        if not is_literal(read_expression(text, MAX_ANSWER_CHARS)):
            return None
    except Stopped:
        return None
    ran = run_program("", text)
    return None if ran.refused else repr(ran.value)


def _unfenced(text: str) -> str:
    """What stands in the first fence; without an opening one, what stands before the closing one."""
    opening = _FENCE.search(text)
    return text[opening.end() if opening else 0 :].partition("```")[0].strip()


def _parts(source: str, max_chars: int) -> tuple[str, str]:
    """The definitions and the call, without comments and docstrings. Raises Stopped where they are not these."""
    *definitions, last = read_program(source, max_chars).body or [ast.Pass()]
    functions = [node for node in definitions if isinstance(node, ast.FunctionDef)]
    if len(functions) < len(definitions) or "f" not in [node.name for node in functions]:
        raise Stopped("bad_form", "no definitions of functions, f among them, before a last line")
    if not (isinstance(last, ast.Expr) and _calls_f(last.value)):
        raise Stopped("bad_form", "the last line does not call f with literals")
    for node in functions:
        node.body = list(itertools.dropwhile(_is_constant, node.body)) or [ast.Pass()]
    return ast.unparse(ast.Module(definitions, [])), ast.unparse(last)


def _calls_f(node: ast.expr) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "f"):
        return False
    return len(node.args) > 0 and not node.keywords and all(map(is_literal, node.args))


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
