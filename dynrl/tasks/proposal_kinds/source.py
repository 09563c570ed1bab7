"""The proposer's own tasks, as a source: what `self_propose` trains the policy to propose from."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from dynrl.tasks.base import Draws, LeveledSource, Problem
from dynrl.tasks.proposal_kinds.base import make_kind
from dynrl.types import Task


class ProposerTasks(LeveledSource):
    """Prompts that ask for a proposal; all of one level.

    A task's answer is an example of a proposal, for a supervised warm start; every other text that the kind accepts is
    as good to the verifier, `proposal`. Prompts of this source show no references, and may all be the same.

    Args:
      kind: `digits`, `expression`, `program`, or `package.module:Class`.
      kind_kwargs: the kind's arguments.

    Raises:
      ValueError, TypeError: saying what is wrong with the kind or its arguments.
    """

    name = "self_propose"
    verifier = "proposal"
    cure = "evaluate on another source"

    def __init__(self, kind: str = "digits", kind_kwargs: Mapping[str, Any] | None = None):
        self.proposal_kind = make_kind(kind, **(kind_kwargs or {}))
        self._kind_name = kind
        self.task_source = f"{self.name}/{self.proposal_kind.name}"

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        return {"kind": self._kind_name, "kind_kwargs": dict(self.proposal_kind.kwargs)}

    @property
    def levels(self) -> tuple[int, ...]:
        """The only one."""
        return (0,)

    @property
    def alphabet(self) -> frozenset[str] | None:
        """That of the kind: the proposer's and the solver's."""
        return self.proposal_kind.alphabet

    @property
    def max_prompt_chars(self) -> int | None:
        """Of the proposer's prompts, with references too, and of the solver's."""
        return self.proposal_kind.max_prompt_chars

    @property
    def max_answer_chars(self) -> int | None:
        """Of proposals, and of the solver's answers."""
        return self.proposal_kind.max_answer_chars

    @property
    def verifiers(self) -> dict[str, str]:
        """Those of the proposer's tasks and of the tasks that are proposed."""
        return {self.task_source: self.verifier, self.proposal_kind.task_source: self.proposal_kind.verifier}

    def kind(self, seed: int, index: int) -> tuple[str, int]:
        """Returns source and level of every task."""
        del seed, index
        return self.task_source, 0

    def problem(self, draws: Draws, level: int, references: Sequence[Task] = ()) -> Problem:
        """Returns a prompt, with references where some are given, and an example of a proposal."""
        del level
        prompt = self.proposal_kind.prompt(draws, references)
        return Problem(prompt, self.proposal_kind.example(draws), self.kwargs)

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at (seed, index), with task_id -1. Raises ValueError where its prompt is excluded."""
        return dataclasses.replace(super().task(seed, index, exclude), source=self.task_source)
