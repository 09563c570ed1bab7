"""A kind of proposal that the end-to-end runs are configured with."""

from typing import Any

from dynrl.tasks.proposal_kinds.base import Proposal, ProposalKind, Refusal


class AnyText(ProposalKind):
    """The digits of any text of up to four, which a coin of a verifier then judges."""

    name = "any_text"
    task_source = "digit_sorting"
    verifier = "exact_match"
    num_references = 1
    alphabet: Any = frozenset("0123456789>")
    max_prompt_chars: Any = 5
    max_answer_chars: Any = 4

    def prompt(self, draws, references):
        shown = [task.prompt[:3] for task in references if ">" not in task.prompt[:3]]
        return ">" + (shown[0] + ">" if shown else "")

    def read(self, text):
        digits = "".join(c for c in text if c.isdigit())[:4]
        return Proposal(digits + ">", "".join(sorted(digits)), len(digits)) if digits else Refusal("bad_form", text)

    def example(self, draws):
        return str(draws.below(1000))
