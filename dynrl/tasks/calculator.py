"""Sums with a calculator: an environment that a small model can learn, and its tasks."""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Self

from dynrl.tasks.base import Draws, LeveledSource, Problem, checked_level
from dynrl.tasks.environments import Environment, Step
from dynrl.tasks.procedural import levels_of_sums
from dynrl.types import Task

MAX_DIGITS = 9  # of a number that the calculator takes
_CALL = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})\+([0-9]{{1,{MAX_DIGITS}}})")
_REFUSED = "?;"


class Calculator(Environment):
    """Answers `[47+86]` with `133;`, and ends with the answer to the task.

    A turn with a `]` is a call. The calculator reads from the last `[` before the first `]`: two whole numbers of at
    most 9 ASCII digits with a `+` between them. To anything else it says `?;`. Any other turn is the answer, and all
    of it: reward 1 if it is the task's, as text, white space around it aside.
    """

    stop_strings = ("]",)
    max_observation_chars = MAX_DIGITS + 2  # a digit more than the longer term, and the semicolon

    def reset(self, task: Task) -> str:
        """Begins with nothing to see."""
        self._answer = task.answer.strip()
        return ""

    def step(self, text: str) -> Step:
        """Adds two numbers, or judges the answer."""
        before, bracket, _ = text.partition("]")
        if not bracket:
            return Step("", float(text.strip() == self._answer), True)
        _, opened, expression = before.rpartition("[")
        call = _CALL.fullmatch(expression) if opened else None
        return Step(f"{int(call[1]) + int(call[2])};" if call else _REFUSED, 0.0, False)


@dataclass(frozen=True)
class CalculatorSums(LeveledSource):
    """Sums for the environment `calculator`: the prompt `47+86+19=` has the answer `152`.

    The level is 10 * digits + terms: at level 23 there are three terms, the longest of exactly two digits. A task's
    metadata holds a `demonstration` for a supervised warm start, which adds up from the left: `[47+86]`, `[133+19]`,
    `152` with the calculator's words between them. Some demonstrations answer at once instead, so that the policy
    begins with both habits, and reinforcement can prefer the one that pays.

    Attributes:
      min_digits: fewest digits of a prompt's longest term.
      max_digits: most digits of a term.
      min_terms: fewest terms of a prompt, at least 2.
      max_terms: most terms of a prompt, at most 9.
      calculator_frac: the share of demonstrations that use the calculator.
    """

    min_digits: int = 1
    max_digits: int = 2
    min_terms: int = 2
    max_terms: int = 4
    calculator_frac: float = 0.5

    name = "calculator"
    verifier = "calculator"
    cure = "raise min_digits or min_terms"

    def __post_init__(self):
        if not 1 <= self.min_digits <= self.max_digits < MAX_DIGITS:
            raise ValueError(f"calculator needs 1 <= min_digits <= max_digits < {MAX_DIGITS}, got {self}")
        if not 2 <= self.min_terms <= self.max_terms <= 9:
            raise ValueError(f"calculator needs 2 <= min_terms <= max_terms <= 9, got {self}")
        if not 0 <= self.calculator_frac <= 1:
            raise ValueError(f"calculator needs 0 <= calculator_frac <= 1, got {self}")

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
        """Of prompts, calls and the calculator's words."""
        return frozenset("0123456789+=[];?")

    @property
    def max_prompt_chars(self) -> int:
        """Terms, signs between them, and the equals sign."""
        return self.max_terms * (self.max_digits + 1)

    @property
    def max_answer_chars(self) -> int:
        """Of a whole completion: every call, the calculator's words and the answer, each as long as it can be."""
        terms = [10**self.max_digits - 1] * self.max_terms
        return sum(len(text) for text, _ in _demonstration(terms))

    def reachable_levels(self) -> list[int]:
        """Every combination of 1 to 8 digits and 2 to 9 terms, in the order of `levels_of_sums`."""
        return levels_of_sums(MAX_DIGITS - 1)

    def at_level(self, level: int) -> Self:
        """Returns the source of this level's sums; ValueError where it is no such combination."""
        digits, terms = divmod(checked_level(self, level), 10)
        return dataclasses.replace(self, min_digits=digits, max_digits=digits, min_terms=terms, max_terms=terms)

    def problem(self, draws: Draws, level: int) -> Problem:
        """Returns a sum of the level with its equals sign, its value, and a demonstration."""
        digits, num_terms = divmod(level, 10)
        terms = [draws.below(10**digits) for _ in range(num_terms)]
        smallest = 10 ** (digits - 1) if digits > 1 else 0
        terms[draws.below(num_terms)] = smallest + draws.below(10**digits - smallest)
        answer = str(sum(terms))
        calculates = draws.below(2**32) < self.calculator_frac * 2**32
        shown = _demonstration(terms) if calculates else [[answer, True]]
        return Problem("+".join(map(str, terms)) + "=", answer, {"demonstration": shown})


def _demonstration(terms: list[int]) -> list[list[Any]]:
    """Texts in order, each with whether the policy writes it; what it does not is the calculator's."""
    segments: list[list[Any]] = []
    total = terms[0]
    for term in terms[1:]:
        segments.append([f"[{total}+{term}]", True])
        total += term
        segments.append([f"{total};", False])
    return [*segments, [str(total), True]]
