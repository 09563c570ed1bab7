"""Proposals of integer expressions."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.base import Draws
from dynrl.tasks.programs.budgets import Stopped
from dynrl.tasks.programs.interpreter import run_program
from dynrl.tasks.programs.reading import read_expression
from dynrl.tasks.proposal_kinds.base import Chosen, Proposal, Refusal
from dynrl.types import Task

_OPERATORS = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.FloorDiv, "%": ast.Mod}


@dataclass(frozen=True)
class Expression(Chosen):
    """The proposer writes `12+7*3`; the solver's prompt is `12+7*3=`, as in the source `arithmetic`, its answer `33`.

    The proposer's prompt is `=`, and `=12+7*3=` with one reference. No expression begins with `=`, so it cannot be
    taken for a task. The level is 10 * digits + terms, as in `arithmetic`.

    Attributes:
      max_digits: most digits of a term.
      max_terms: most terms of an expression, at most 9; it has at least two.
      operators: those that may occur: of `+-*/%`, where `/` is written `//` and rounds down.
      parentheses: whether they may occur.
      num_references: how many earlier proposals the proposer is shown at most.
    """

    max_digits: int = 2
    max_terms: int = 4
    operators: str = "+-*"
    parentheses: bool = False
    num_references: int = 1

    name = "expression"
    task_source = "arithmetic"
    verifier = "integer_match"

    def __post_init__(self):
        if not (1 <= self.max_digits <= 9 and 2 <= self.max_terms <= 9):
            raise ValueError(f"expression needs 1 <= max_digits <= 9 and 2 <= max_terms <= 9, got {self}")
        if not self.operators or len(set(self.operators) & set(_OPERATORS)) < len(self.operators):
            raise ValueError(f"expression needs operators from '+-*/%', each at most once, got {self}")
        if self.num_references < 0:
            raise ValueError(f"expression needs num_references >= 0, got {self}")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that make the kind again."""
        return dataclasses.asdict(self)

    @property
    def alphabet(self) -> frozenset[str]:
        """The digits, the operators, the equals sign and the signs of answers."""
        return frozenset("0123456789=" + self.operators + "()" * self.parentheses)

    @property
    def max_proposal_chars(self) -> int:
        """Terms, operators between them, and a pair of parentheses for each operator."""
        operator = 1 + ("/" in self.operators) + 2 * self.parentheses
        return self.max_terms * self.max_digits + (self.max_terms - 1) * operator

    @property
    def max_prompt_chars(self) -> int:
        """Of the solver's prompt, or of the references with their equals signs."""
        return max(self.max_proposal_chars + 1, 1 + self.num_references * (self.max_proposal_chars + 1))

    @property
    def max_answer_chars(self) -> int:
        """Of the longest proposal, which no answer exceeds."""
        return self.max_proposal_chars

    def prompt(self, draws: Draws, references: Sequence[Task]) -> str:
        """Returns an equals sign, and each reference with another one."""
        return "=" + "".join(f"{expression}=" for expression in self.chosen(draws, references))

    def reference(self, task: Task) -> str:
        """Returns the expression of an arithmetic task."""
        return task.prompt.removesuffix("=")

    def read(self, text: str) -> Proposal | Refusal:
        """Evaluates the expression."""
        expression = text.strip()
        if len(expression) > self.max_proposal_chars or set(expression) - self.alphabet:
            return Refusal("bad_form", f"not an expression of these characters: {expression[:80]!a}")
        terms = re.findall("[0-9]+", expression)
        if not 2 <= len(terms) <= self.max_terms or max(map(len, terms)) > self.max_digits:
            return Refusal("bad_form", f"not 2 to {self.max_terms} terms of at most {self.max_digits} digits")
        try:
            tree = read_expression(expression, self.max_proposal_chars)
        except Stopped as stopped:
            return Refusal(stopped.refused, stopped.detail)
        known = (ast.BinOp, ast.Constant, *(_OPERATORS[operator] for operator in self.operators))
        for node in ast.walk(tree):
            if not isinstance(node, known):
                return Refusal("not_allowed", type(node).__name__)
        ran = run_program("", expression)
        if ran.refused:
            return Refusal(ran.refused, ran.detail)
        return Proposal(expression + "=", str(ran.value), 10 * max(map(len, terms)) + len(terms))

    def example(self, draws: Draws) -> str:
        """Returns an expression of any number of terms; nothing is divided by zero, and nothing stands in brackets."""
        num_terms = 2 + draws.below(self.max_terms - 1)
        text = str(draws.below(10**self.max_digits))
        for _ in range(num_terms - 1):
            operator = self.operators[draws.below(len(self.operators))]
            text += "//" if operator == "/" else operator
            text += str(1 + draws.below(10**self.max_digits - 1))
        return text
