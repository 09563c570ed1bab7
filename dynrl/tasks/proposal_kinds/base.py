"""What a kind of proposal is.

One policy plays two parts (Absolute Zero, arXiv:2505.03335): the proposer writes a text, an executor turns it into a
task with an answer or refuses it, and the solver answers the task. A kind is named in a configuration by a built-in
name or by `package.module:Class`; it is made in the verifier workers too, where `verifier.py` asks it what a text is
worth.

A kind holds no state, and everything it does is a pure function of its arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynrl.tasks.base import Draws
from dynrl.tasks.programs.budgets import REFUSALS
from dynrl.tasks.sources import build_named
from dynrl.types import Task

# Why a text is no proposal; a kind of one's own may have further reasons.
REASONS = (
    *REFUSALS,  # what the executor says
    "bad_form",  # the text is not what the proposer is asked for
    "answer_too_long",
    "not_deterministic",  # run twice, the program gave two answers
)
MAX_PROPOSAL_CHARS = 6_000  # prompt and answer travel in a reward's `info`, of which 8,000 characters arrive


class Proposal(NamedTuple):
    """A task that the policy has proposed.

    Attributes:
      prompt: what the solver is shown.
      answer: computed by the executor.
      level: difficulty, as in `Task`.
    """

    prompt: str
    answer: str
    level: int


class Refusal(NamedTuple):
    """Why a text is no proposal: a reason to be counted by, and what it was, for people."""

    reason: str
    detail: str = ""


class ProposalKind(ABC):
    """What the proposer is shown, and what becomes of what it writes.

    Attributes:
      name: of the kind. The proposer's tasks have the source `self_propose/<name>`.
      task_source: `Task.source` of the tasks that are proposed; that of a built-in source where they are alike, so that
        one count of passes serves both.
      verifier: judges the solver's answers, and is named as verifiers are.
      num_references: how many earlier tasks the proposer is shown at most.
    """

    name: str
    task_source: str
    verifier: str
    num_references: int

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The JSON-able arguments that make the kind again; none."""
        return {}

    @property
    def alphabet(self) -> frozenset[str] | None:
        """The characters of all prompts, proposals and answers; None where it cannot say."""
        return None

    @property
    def max_prompt_chars(self) -> int | None:
        """Of the longest prompt, the proposer's and the solver's; None where it cannot say."""
        return None

    @property
    def max_answer_chars(self) -> int | None:
        """Of the longest proposal and the longest answer; None where it cannot say."""
        return None

    @abstractmethod
    def prompt(self, draws: Draws, references: Sequence[Task]) -> str:
        """What the proposer is shown.

        Args:
          draws: the only source of chance.
          references: earlier tasks whose source is `task_source`, of which `num_references` are chosen; may be none.
        """

    @abstractmethod
    def read(self, text: str) -> Proposal | Refusal:
        """Turns what the proposer wrote into a task. Whatever the text is, nothing is raised."""

    @abstractmethod
    def example(self, draws: Draws) -> str:
        """A text that `read` accepts: what a supervised warm start shows the proposer."""


class Chosen(ProposalKind):
    """Base of kinds that show references one after the other."""

    @property
    @abstractmethod
    def max_proposal_chars(self) -> int:
        """Of the longest proposal."""

    @abstractmethod
    def reference(self, task: Task) -> str:
        """The text that would propose this task."""

    def chosen(self, draws: Draws, references: Sequence[Task]) -> list[str]:
        """Returns the texts of up to `num_references` tasks that are no longer than a proposal, each at most once."""
        left = [text for text in map(self.reference, references) if len(text) <= self.max_proposal_chars]
        return [left.pop(draws.below(len(left))) for _ in range(min(self.num_references, len(left)))]


BUILT_IN_KINDS: Mapping[str, str] = {
    "digits": "dynrl.tasks.proposal_kinds.digits:Digits",
    "expression": "dynrl.tasks.proposal_kinds.expression:Expression",
    "program": "dynrl.tasks.proposal_kinds.program:Program",
}
_MEMBERS = (
    "name", "task_source", "verifier", "num_references", "kwargs", "alphabet", "max_prompt_chars", "max_answer_chars",
    "prompt", "read", "example",
)  # fmt: skip


def make_kind(name_or_path: str, **kwargs: Any) -> ProposalKind:
    """Returns a kind of proposal.

    Args:
      name_or_path: `digits`, `expression`, `program`, or `package.module:Class`.
      **kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches; and whatever the class finds wrong.
      TypeError: at an argument that the class does not take, or a class that is no `ProposalKind`.
    """
    return build_named("kind of proposal", name_or_path, BUILT_IN_KINDS, _MEMBERS, kwargs)
