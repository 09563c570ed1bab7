"""The generator `MutateHardest`: a language model writes variations of the hardest tasks that were ever solved."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynrl.tasks.base import near
from dynrl.tasks.generators.base import GeneratorContext
from dynrl.tasks.generators.llm import LLMGenerator, check_number, count
from dynrl.tasks.generators.replies import Proposal, elected, parse_proposal
from dynrl.types import Task

VARIATION_PROMPT = """\
Below are a task and its answer.

Task:
{prompt}

Answer:
{answer}

Write one new task of the same kind, in the same form and about as difficult, but with other contents, so that its \
answer must be worked out anew. It must be complete in itself and have exactly one right answer. This is variation \
{number}: let it differ from the obvious ones. Work out the answer with care, and give it in the form of the answer \
above.

Reply with one JSON object and nothing else:
{{"prompt": "the text of the new task", "answer": "its answer"}}"""

VOTE_PROMPT = """\
An example of a task:
{parent_prompt}

Its answer:
{parent_answer}

Now solve this task:
{prompt}

Reply with the answer alone, in the form of the example's answer, without any explanation."""


@dataclass(kw_only=True, eq=False)
class MutateHardest(LLMGenerator):
    """Asks a language model for variations of the hardest solvable tasks.

    Parents are the tasks of lowest posterior pass rate among those that were solved at least once, which proves that
    they can be; ties are broken at random. A variation has its parent's source, and so its verifier, and its level.
    One whose answer is not confirmed is not returned: `context.spent` counts replies that are no proposal
    (`malformed`) and variations whose answer the votes do not confirm (`refused_vote`), besides what `LLMGenerator.ask`
    counts.

    A local vLLM server (`vllm serve Qwen/Qwen2.5-7B-Instruct`) is asked with

        generation.generator_kwargs = {
            "base_url": "http://localhost:8000/v1",
            "model": "Qwen/Qwen2.5-7B-Instruct",
            "max_requests": 5_000,
            "max_tokens": 5_000_000,
            "num_parents": 8,
            "num_variations": 4,
        }

    Attributes:
      num_parents: tasks to vary at a call, at most.
      num_variations: of each parent. With fewer than all allowed (by `max_tasks`, or the budget), each parent has its
        first variation before any has its second.
      min_attempts: rollouts of a task before its pass rate says enough; older ones count less, as in `Counts`.
      max_pass_rate: posterior pass rate (with one pass and one failure more than were seen) of a parent, at most.
      sources: parents come from these only; none named takes all.
      inherit_metadata: keys of a task's metadata that hold for its variations too, and are copied, such as a language
        or a unit. A task with any other key is no parent: its verifier may need what only its author could give a
        variation, as countdown's numbers.
      answers: `vote` asks the model `num_votes` times for the answer alone. The majority, as `normalized` compares,
        must have at least `min_vote_share` of all votes asked for, and equal the proposal's own answer where it gave
        one. `ask` takes the proposal's answer as it is.
      num_votes: of each variation.
      min_vote_share: above one half, at most 1.
      variation_prompt: template with the fields {prompt} and {answer}, of the parent, and {number}, of the variation,
        from 1; `{{` is a brace. It must ask for what `VARIATION_PROMPT` asks for.
      vote_prompt: template with the fields {prompt}, of the variation, {parent_prompt} and {parent_answer}.

    Raises:
      ImportError, ValueError: as `LLMGenerator`.
    """

    num_parents: int = 4
    num_variations: int = 2
    min_attempts: float = 4
    max_pass_rate: float = 0.5
    sources: Sequence[str] = ()
    inherit_metadata: Sequence[str] = ()
    answers: str = "vote"
    num_votes: int = 4
    min_vote_share: float = 0.75
    variation_prompt: str = VARIATION_PROMPT
    vote_prompt: str = VOTE_PROMPT

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_parents", "num_variations", "num_votes"):
            check_number(name, getattr(self, name), int, 1)
        check_number("min_attempts", self.min_attempts, float, 0)
        check_number("max_pass_rate", self.max_pass_rate, float, 0, 1)
        check_number("min_vote_share", self.min_vote_share, float, 0.5, 1)
        if self.min_vote_share == 0.5:
            raise ValueError("min_vote_share must be above 0.5: half of the votes are no majority")
        if self.answers not in ("ask", "vote"):
            raise ValueError(f"answers must be 'ask' or 'vote', got {self.answers!r}")
        for name, names in (("sources", self.sources), ("inherit_metadata", self.inherit_metadata)):
            if not isinstance(names, (list, tuple)) or not all(isinstance(each, str) for each in names):
                raise ValueError(f"{name} must be a sequence of names, got {names!r}")
        _check_template("variation_prompt", self.variation_prompt, ("prompt", "answer", "number"))
        _check_template("vote_prompt", self.vote_prompt, ("prompt", "parent_prompt", "parent_answer"))
        if self.max_requests < self._requests_each:
            raise ValueError(
                f"max_requests={self.max_requests} does not allow one variation, which takes {self._requests_each} "
                f"requests with answers={self.answers!r} and num_votes={self.num_votes}"
            )

    def propose(self, context: GeneratorContext) -> list[Task]:
        """Variations of the hardest solvable tasks, with confirmed answers; their order is that of the requests.

        Raises:
          Cancelled: nobody waits any more.
          RuntimeError: as `LLMGenerator.ask`.
          ValueError: `sources` names one that there is not, or only the metadata keep every hard task from being a
            parent.
        """
        context.check()
        self._check_sources(context)
        affordable = self.num_affordable(self._requests_each)
        num_tasks = min(self.num_parents * self.num_variations, context.max_tasks, affordable)
        parents = self._parents(context, min(self.num_parents, num_tasks))
        numbers = range(1, self.num_variations + 1)
        places = [(parent, number) for number in numbers for parent in parents][:num_tasks]
        keys = {f"task {parent.task_id}, variation {number}": (parent, number) for parent, number in places}
        prompts = {
            key: self.variation_prompt.format(prompt=parent.prompt, answer=parent.answer, number=number)
            for key, (parent, number) in keys.items()
        }
        proposals: dict[str, Proposal] = {}
        for key, reply in self.ask(context, prompts).items():
            if reply.text is not None:
                try:
                    proposals[key] = parse_proposal(reply.text, needs_answer=self.answers == "ask")
                except ValueError:
                    count(context, "malformed", 1)
        parent_of = {key: keys[key][0] for key in proposals}
        if self.answers == "vote":
            proposals = self._confirmed(context, proposals, parent_of)
        return [self._task(parent_of[key], proposal) for key, proposal in proposals.items()]

    @property
    def _requests_each(self) -> int:
        return 1 + (self.num_votes if self.answers == "vote" else 0)

    def _check_sources(self, context: GeneratorContext) -> None:
        known = context.source.verifiers  # empty where it cannot say
        unknown = [name for name in self.sources if known and name not in known]
        if unknown:
            raise ValueError(
                f"sources names {unknown[0]!r}{near(unknown[0], known)}, but the tasks come from {', '.join(known)}"
            )

    def _parents(self, context: GeneratorContext, num_parents: int) -> list[Task]:
        counts, ids = context.outcomes.by_task, np.arange(len(context.store))
        rates = counts.mean(ids)
        fits = (counts.successes(ids) > 0) & (counts.attempts(ids) >= self.min_attempts) & (rates <= self.max_pass_rate)
        order = np.lexsort((context.rng.random(int(fits.sum())), rates[fits]))
        parents: list[Task] = []
        unfit: dict[str, list[str]] = {}
        for task_id in ids[fits][order].tolist():
            if len(parents) == num_parents:
                break
            context.check()
            (task,) = context.store.get([task_id])
            if self.sources and task.source not in self.sources:
                continue
            if own := sorted(set(task.metadata) - set(self.inherit_metadata)):
                unfit[task.source] = own
            else:
                parents.append(task)
        if unfit and not parents and num_parents:
            source, own = next(iter(unfit.items()))
            raise ValueError(
                f"no hard task can be a parent: those of source {source!r} carry metadata {own} for the verifier, and "
                "a variation would need its own; name in inherit_metadata what holds for variations too, or use sources"
            )
        return parents

    def _confirmed(
        self, context: GeneratorContext, proposals: Mapping[str, Proposal], parent_of: Mapping[str, Task]
    ) -> dict[str, Proposal]:
        """The proposals whose answer the votes confirm, with their answer."""
        keys = {key: [f"{key}, vote {number}" for number in range(1, self.num_votes + 1)] for key in proposals}
        prompts = {
            vote_key: self.vote_prompt.format(
                prompt=proposal.prompt, parent_prompt=parent_of[key].prompt, parent_answer=parent_of[key].answer
            )
            for key, proposal in proposals.items()
            for vote_key in keys[key]
        }
        replies = self.ask(context, prompts)
        confirmed: dict[str, Proposal] = {}
        for key, proposal in proposals.items():
            heard = [replies[vote_key].text for vote_key in keys[key] if vote_key in replies]
            votes = [text for text in heard if text is not None]
            answer = elected(votes, self.num_votes, self.min_vote_share, proposal.answer)
            if answer is None:
                count(context, "refused_vote", 1)
            else:
                confirmed[key] = Proposal(proposal.prompt, answer)
        return confirmed

    def _task(self, parent: Task, proposal: Proposal) -> Task:
        assert proposal.answer is not None  # parsed so, or elected
        parents, metadata = (parent.task_id,), dict(parent.metadata)  # of keys to inherit only: else it were no parent
        return Task(-1, parent.source, proposal.prompt, proposal.answer, parent.level, parents, metadata)


def _check_template(name: str, template: Any, fields: Sequence[str]) -> None:
    try:
        parts = list(string.Formatter().parse(template))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} is no template: {error}; a brace is written {{{{ or }}}}") from None
    named = [field for _, field, _, _ in parts if field is not None]
    if unknown := [field for field in named if field not in fields]:
        raise ValueError(
            f"{name} has the field {{{unknown[0]}}}{near(unknown[0], fields)}; there are {', '.join(fields)}; "
            "a brace is written {{ or }}"
        )
    if "prompt" not in named:
        raise ValueError(f"{name} must have the field {{prompt}}")
