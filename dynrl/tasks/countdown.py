"""Countdown: combine numbers to reach a target. The source, and the verifier that checks an expression."""

import ast
import re
import string
from collections import Counter
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Self

from dynrl.tasks.base import Draws, LeveledSource, Problem, checked_level
from dynrl.tasks.extraction import last_line, tagged
from dynrl.tasks.rewards import Unparsable
from dynrl.types import Reward, Task

MAX_NUMBERS = 12
MAX_EXPRESSION_CHARS = 500
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_SIGNS = str.maketrans("\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}\N{MINUS SIGN}\t", "*/- ")
_PLACEHOLDERS = {"numbers", "target"}


@dataclass(frozen=True)
class Countdown(LeveledSource):
    """Reach a target: the prompt `3,7,2=13:` has, among others, the answer `(3*2)+7`. The level is how many numbers.

    The target is made by combining the numbers at random, each once, so every task has a solution; so is the answer
    given, and every other expression of the numbers with the target's value is as right (verifier `countdown`).
    Intermediate values are positive integers.

    Attributes:
      min_numbers: fewest numbers of a task, at least 2.
      max_numbers: most numbers of a task.
      max_number: numbers lie in 1 to max_number.
      max_target: targets lie in 1 to max_target, which is at least max_numbers * max_number.
      operators: those that the target is made with: of `+-*/`, with `+`. The verifier accepts all four.
      use_all: whether an answer must use every number exactly once; else, at most once.
      prompt: text with {numbers}, which become `3,7,2`, and {target}.
    """

    min_numbers: int = 3
    max_numbers: int = 4
    max_number: int = 20
    max_target: int = 100
    operators: str = "+-*/"
    use_all: bool = True
    prompt: str = "{numbers}={target}:"

    name = "countdown"
    verifier = "countdown"
    cure = "raise min_numbers or max_number"

    def __post_init__(self):
        if not 2 <= self.min_numbers <= self.max_numbers <= MAX_NUMBERS:
            raise ValueError(f"countdown needs 2 <= min_numbers <= max_numbers <= {MAX_NUMBERS}, got {self}")
        if not 1 <= self.max_number <= self.max_target // self.max_numbers:
            raise ValueError(f"countdown needs 1 <= max_number <= max_target / max_numbers, got {self}")
        chosen = set(self.operators)
        if "+" not in chosen or chosen - set("+-*/") or len(chosen) < len(self.operators):
            raise ValueError(f"countdown needs operators from '+-*/', each at most once, with '+', got {self}")
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        except ValueError as error:
            raise ValueError(f"countdown: bad prompt {self.prompt!r}: {error}") from error
        if fields != _PLACEHOLDERS:
            raise ValueError(f"countdown: the prompt needs {{numbers}} and {{target}}, no others, got {self.prompt!r}")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        return asdict(self)

    @property
    def levels(self) -> tuple[int, ...]:
        """How many numbers."""
        return tuple(range(self.min_numbers, self.max_numbers + 1))

    @property
    def alphabet(self) -> frozenset[str]:
        """The prompt's own characters, the digits, and what expressions are made of."""
        return frozenset(self.prompt.format(numbers="", target="") + "0123456789,+-*/()")

    @property
    def max_prompt_chars(self) -> int:
        """With the most numbers, each as long as it can be."""
        numbers = ",".join([str(self.max_number)] * self.max_numbers)
        return len(self.prompt.format(numbers=numbers, target=self.max_target))

    @property
    def max_answer_chars(self) -> int:
        """Of the answers given: numbers, operators between them, and parentheses around all but the outermost."""
        return self.max_numbers * len(str(self.max_number)) + (self.max_numbers - 1) + 2 * (self.max_numbers - 2)

    def reachable_levels(self) -> range:
        """From two numbers to as many of size `max_number` as `max_target` has room for, at most 12."""
        return range(2, min(MAX_NUMBERS, self.max_target // self.max_number) + 1)

    def at_level(self, level: int) -> Self:
        """Returns the source of tasks with `level` numbers; ValueError where there cannot be so many."""
        return replace(self, min_numbers=checked_level(self, level), max_numbers=level)

    def problem(self, draws: Draws, level: int) -> Problem:
        """Returns `level` numbers, a target and one solution: terms are combined until one is left."""
        numbers = [1 + draws.below(self.max_number) for _ in range(level)]
        terms = [(number, str(number)) for number in numbers]
        while len(terms) > 1:
            left, left_text = terms.pop(draws.below(len(terms)))
            right, right_text = terms.pop(draws.below(len(terms)))
            # The terms' sum never exceeds max_target, so that "+" is always possible, and so no draw is a dead end.
            room = self.max_target - sum(value for value, _ in terms)
            possible = {"+": True, "-": left > right, "*": left * right <= room, "/": left % right == 0}
            operators = [operator for operator in self.operators if possible[operator]]
            operator = operators[draws.below(len(operators))]
            value = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
            terms.append((value, f"{_operand(left_text)}{operator}{_operand(right_text)}"))
        ((target, solution),) = terms
        prompt = self.prompt.format(numbers=",".join(map(str, numbers)), target=target)
        return Problem(prompt, solution, {"numbers": numbers, "target": target, "use_all": self.use_all})


def countdown(task: Task, text: str) -> Reward:
    """1 when the completion's expression makes the target out of the task's numbers.

    The expression is what stands in the last `<answer>...</answer>`, or else on the last line that is not blank;
    `= target` may follow it. It holds whole numbers, the signs + - * / (or × ÷ −) between them, and parentheses; it
    is evaluated exactly, as fractions, and never by Python. Each of the task's numbers may be used once, and must be
    with `use_all`. The task's metadata hold `numbers`, `target` and `use_all`. Dividing by zero is wrong.

    Raises:
      Unparsable: there is no such expression, or it has more than 500 characters.
      ValueError: the task's metadata are not those of a countdown task.
    """
    numbers, target, use_all = _problem(task)
    tree = _parsed(text, target)
    left_over = Counter(numbers)
    left_over.subtract(_number(node) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    if any(count < 0 or (use_all and count) for count in left_over.values()):
        return Reward(0.0)
    try:
        return Reward(float(_value(tree) == target))
    except ZeroDivisionError:
        return Reward(0.0)


def _operand(text: str) -> str:
    return text if text.isdigit() else f"({text})"


def _problem(task: Task) -> tuple[list[int], int, bool]:
    numbers, target, use_all = (task.metadata.get(key) for key in ("numbers", "target", "use_all"))
    if isinstance(numbers, list) and isinstance(target, int) and isinstance(use_all, bool):
        integers = [number for number in numbers if isinstance(number, int)]
        if len(integers) == len(numbers):
            return integers, target, use_all
    raise ValueError(f"task {task.task_id}: metadata must hold 'numbers', 'target' and 'use_all'")


def _parsed(text: str, target: int) -> ast.expr:
    answer = tagged(text)
    expression = (last_line(text) if answer is None else answer)[: MAX_EXPRESSION_CHARS + 1].translate(_SIGNS)
    before, equals, after = expression.rpartition("=")
    if equals and after.strip() == str(target):
        expression = before
    if len(expression) > MAX_EXPRESSION_CHARS or not _EXPRESSION.fullmatch(expression):
        raise Unparsable(f"no expression of at most {MAX_EXPRESSION_CHARS} characters: {expression[:80]!r}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:  # nesting too deep for Python's parser is a MemoryError
        raise Unparsable(f"not an expression: {expression[:80]!r}") from error
    for node in ast.walk(tree):
        if not isinstance(node, (ast.BinOp, ast.Constant, ast.Add, ast.Sub, ast.Mult, ast.Div)):
            raise Unparsable(f"{type(node).__name__} is not allowed: {expression[:80]!r}")
    return tree


def _number(node: ast.Constant) -> int:
    assert isinstance(node.value, int)  # the characters allow nothing else
    return node.value


def _value(node: ast.expr) -> Fraction:
    """Its depth is bounded by the expression's length, its numbers by the task's."""
    if isinstance(node, ast.Constant):
        return Fraction(_number(node))
    assert isinstance(node, ast.BinOp)
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    return left * right if isinstance(node.op, ast.Mult) else left / right
