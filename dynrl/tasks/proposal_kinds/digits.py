"""Proposals of digits to sort: for models as small as the quickstart's."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynrl.tasks.base import Draws
from dynrl.tasks.programs.interpreter import run_program
from dynrl.tasks.proposal_kinds.base import Chosen, Proposal, Refusal
from dynrl.types import Task

_SORT = "def f(digits):\n    return ''.join(sorted(digits))"


@dataclass(frozen=True)
class Digits(Chosen):
    """The proposer writes `3142`; the solver's prompt is `3142>`, as in the source `digit_sorting`, its answer `1234`.

    The proposer's prompt is `>`, and `>907>` with one reference: earlier digits, each after a delimiter. It holds no
    character that sorting does not, and no sorting task is like it, since those begin with a digit. What is asked for
    is what a small model can do from the first step on: write digits, of any order, and stop.

    Attributes:
      min_length: fewest digits of a proposal.
      max_length: most digits of a proposal.
      num_symbols: digits 0 to num_symbols - 1 may occur.
      num_references: how many earlier proposals the proposer is shown at most.
    """

    min_length: int = 2
    max_length: int = 11
    num_symbols: int = 10
    num_references: int = 1

    name = "digits"
    task_source = "digit_sorting"
    verifier = "exact_match"

    def __post_init__(self):
        if not 1 <= self.min_length <= self.max_length <= 1_000:
            raise ValueError(f"digits needs 1 <= min_length <= max_length <= 1000, got {self}")
        if not 2 <= self.num_symbols <= 10:
            raise ValueError(f"digits needs 2 <= num_symbols <= 10, got {self}")
        if self.num_references < 0:
            raise ValueError(f"digits needs num_references >= 0, got {self}")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that make the kind again."""
        return dataclasses.asdict(self)

    @property
    def alphabet(self) -> frozenset[str]:
        """The digits and the delimiter."""
        return frozenset("0123456789"[: self.num_symbols] + ">")

    @property
    def max_prompt_chars(self) -> int:
        """Of the solver's prompt, or of the references with their delimiters."""
        return max(self.max_length + 1, 1 + self.num_references * (self.max_length + 1))

    @property
    def max_proposal_chars(self) -> int:
        """One for each digit."""
        return self.max_length

    @property
    def max_answer_chars(self) -> int:
        """As many as a proposal has digits."""
        return self.max_length

    def prompt(self, draws: Draws, references: Sequence[Task]) -> str:
        """Returns a delimiter, and each reference with another one."""
        return ">" + "".join(f"{digits}>" for digits in self.chosen(draws, references))

    def reference(self, task: Task) -> str:
        """Returns the digits of a sorting task."""
        return task.prompt.removesuffix(">")

    def read(self, text: str) -> Proposal | Refusal:
        """Sorts the digits; the level is how many there are."""
        digits = text.strip()
        if not re.fullmatch(f"[0-{self.num_symbols - 1}]{{{self.min_length},{self.max_length}}}", digits):
            return Refusal("bad_form", f"not {self.min_length} to {self.max_length} digits: {digits[:80]!a}")
        ran = run_program(_SORT, f"f('{digits}')")
        return Refusal(ran.refused, ran.detail) if ran.refused else Proposal(digits + ">", ran.value, len(digits))

    def example(self, draws: Draws) -> str:
        """Returns digits of any length, each as likely."""
        length = self.min_length + draws.below(self.max_length - self.min_length + 1)
        return "".join(str(draws.below(self.num_symbols)) for _ in range(length))
