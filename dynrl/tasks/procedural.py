"""Procedural task sources of short, exactly checkable problems: first experiments, tests and benchmarks."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from dynrl.tasks.base import Draws, LeveledSource, Problem, checked_level

_MAX_LENGTH = 1_000  # of digits to sort, when levels are chosen
_MAX_DIGITS = 9  # of terms, likewise


@dataclass(frozen=True)
class DigitSorting(LeveledSource):
    """Sort digits: the prompt `3142>` has the answer `1234`. The level is the number of digits.

    Attributes:
      min_length: fewest digits of a prompt.
      max_length: most digits of a prompt.
      num_symbols: digits 0 to num_symbols - 1 occur, with repetition.
    """

    min_length: int = 2
    max_length: int = 11
    num_symbols: int = 10

    name = "digit_sorting"
    verifier = "exact_match"
    cure = "raise min_length or num_symbols"

    def __post_init__(self):
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"digit_sorting needs 1 <= min_length <= max_length, got {self}")
        if not 2 <= self.num_symbols <= 10:
            raise ValueError(f"digit_sorting needs 2 <= num_symbols <= 10, got {self}")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        return dataclasses.asdict(self)

    @property
    def levels(self) -> tuple[int, ...]:
        """The lengths."""
        return tuple(range(self.min_length, self.max_length + 1))

    @property
    def alphabet(self) -> frozenset[str]:
        """The digits and the delimiter."""
        return frozenset("0123456789"[: self.num_symbols] + ">")

    @property
    def max_prompt_chars(self) -> int:
        """The delimiter included."""
        return self.max_length + 1

    @property
    def max_answer_chars(self) -> int:
        """As many as the prompt has digits."""
        return self.max_length

    def reachable_levels(self) -> Sequence[int]:
        """The lengths from 1 to 1,000."""
        return range(1, max(self.max_length, _MAX_LENGTH) + 1)

    def at_level(self, level: int) -> Self:
        """Returns the source of prompts of `level` digits; ValueError where that is no length."""
        return dataclasses.replace(self, min_length=checked_level(self, level), max_length=level)

    def problem(self, draws: Draws, level: int) -> Problem:
        """Returns `level` digits with the delimiter, and the digits in ascending order."""
        digits = [draws.below(self.num_symbols) for _ in range(level)]
        return Problem("".join(map(str, digits)) + ">", "".join(map(str, sorted(digits))))


@dataclass(frozen=True)
class Arithmetic(LeveledSource):
    """Integer expressions: the prompt `12+7=` has the answer `19`, and `3-10=` has `-7`.

    Multiplication binds more tightly than addition and subtraction. The level is 10 * digits + terms: at level 23
    there are three terms, the longest of exactly two digits.

    Attributes:
      min_digits: fewest digits of a prompt's longest term.
      max_digits: most digits of a term.
      operators: those that occur, each once: of `+-*`.
      min_terms: fewest terms of a prompt, at least 2.
      max_terms: most terms of a prompt, at most 9.
    """

    min_digits: int = 1
    max_digits: int = 2
    operators: str = "+-*"
    min_terms: int = 2
    max_terms: int = 2

    name = "arithmetic"
    verifier = "integer_match"
    cure = "raise min_digits or min_terms"

    def __post_init__(self):
        if not 1 <= self.min_digits <= self.max_digits:
            raise ValueError(f"arithmetic needs 1 <= min_digits <= max_digits, got {self}")
        if not 2 <= self.min_terms <= self.max_terms <= 9:
            raise ValueError(f"arithmetic needs 2 <= min_terms <= max_terms <= 9, got {self}")
        if sorted(self.operators) not in [sorted(op) for op in ("+", "-", "*", "+-", "+*", "-*", "+-*")]:
            raise ValueError(f"arithmetic needs operators from '+-*', each at most once, got {self}")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        return dataclasses.asdict(self)

    @property
    def levels(self) -> tuple[int, ...]:
        """10 * digits + terms, for every combination."""
        return tuple(
            10 * digits + terms
            for digits in range(self.min_digits, self.max_digits + 1)
            for terms in range(self.min_terms, self.max_terms + 1)
        )

    @property
    def alphabet(self) -> frozenset[str]:
        """The digits, the operators and the equals sign."""
        return frozenset("0123456789=" + self.operators)

    @property
    def max_prompt_chars(self) -> int:
        """Terms, operators between them, and the equals sign."""
        return self.max_terms * (self.max_digits + 1)

    @property
    def max_answer_chars(self) -> int:
        """The longest answer, its sign included."""
        term, terms = 10**self.max_digits - 1, self.max_terms
        product, total = "*" in self.operators, "+" in self.operators
        largest = term**terms if product else term * terms if total else term
        most_negative = term ** (terms - 1) if product else term * (terms - 1)
        return max(len(str(largest)), len(str(-most_negative)) if "-" in self.operators else 0)

    def reachable_levels(self) -> list[int]:
        """Every combination of 1 to 9 digits and 2 to 9 terms, in the order of `levels_of_sums`."""
        return levels_of_sums(max(self.max_digits, _MAX_DIGITS))

    def at_level(self, level: int) -> Self:
        """Returns the source of this level's expressions; ValueError where it is no such combination."""
        digits, terms = divmod(checked_level(self, level), 10)
        return dataclasses.replace(self, min_digits=digits, max_digits=digits, min_terms=terms, max_terms=terms)

    def problem(self, draws: Draws, level: int) -> Problem:
        """Returns an expression of the level with its equals sign, and its value."""
        digits, num_terms = divmod(level, 10)
        terms = [draws.below(10**digits) for _ in range(num_terms)]
        smallest = 10 ** (digits - 1) if digits > 1 else 0
        terms[draws.below(num_terms)] = smallest + draws.below(10**digits - smallest)
        operators = [self.operators[draws.below(len(self.operators))] for _ in range(num_terms - 1)]
        prompt = str(terms[0]) + "".join(op + str(term) for op, term in zip(operators, terms[1:], strict=True)) + "="
        return Problem(prompt, str(_value(terms, operators)))


def levels_of_sums(max_digits: int) -> list[int]:
    """Returns the levels 10 * digits + terms, of up to `max_digits` digits and 2 to 9 terms, by difficulty.

    Difficulty has two dimensions there. What orders it is the length of the longest prompt, and between equals the
    digits: 12, 13, 22, 14, 32, 23 are the easiest six. So the levels that fit a prompt length come first.
    """
    levels = [10 * digits + terms for digits in range(1, max_digits + 1) for terms in range(2, 10)]
    return sorted(levels, key=lambda level: (level % 10 * (level // 10 + 1), level))


def _value(terms: list[int], operators: list[str]) -> int:
    total, product, sign = 0, terms[0], 1
    for operator, term in zip(operators, terms[1:], strict=True):
        if operator == "*":
            product *= term
        else:
            total += sign * product
            product, sign = term, 1 if operator == "+" else -1
    return total + sign * product
