"""What a request may ask of the slot engine."""

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dynrl.sampling.state import MAX_STOP_TOKENS
from dynrl.types import Request


class RequestLimits(NamedTuple):
    """What the engine was built for."""

    max_prompt_tokens: int
    max_completion_tokens: int
    vocab_size: int
    group_sizes: tuple[int, ...]
    has_text: bool  # ids can be turned to text
    multi_turn: bool

    def ids_problem(self, ids: Sequence[int]) -> str | None:
        """The first id that is none."""
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        return None if wrong is None else f"token id {wrong} is not in [0, {self.vocab_size})"

    def given_tokens_problem(self, tokens: Sequence[int], longest: int) -> str | None:
        """Why given tokens cannot be taken."""
        if not 1 <= len(tokens) <= longest:
            return f"{len(tokens)} given tokens are not between 1 and max_extend_tokens = {longest}"
        return self.ids_problem(tokens)


def checked_request(request: Request, limits: RequestLimits) -> Request:
    """The request with plain integers, whatever kinds of them it came with.

    Raises:
      ValueError: saying why it cannot be served.
    """
    try:
        p = request.params
        params = replace(
            p,
            max_tokens=operator.index(p.max_tokens),
            top_k=operator.index(p.top_k),
            stop_tokens=tuple(operator.index(i) for i in p.stop_tokens),
        )
        numbers = (operator.index(getattr(request, name)) for name in ("ticket", "task_id", "visit", "num_samples"))
        ticket, task_id, visit, num_samples = numbers
        prompt = [operator.index(i) for i in request.prompt]
    except TypeError as error:
        raise ValueError(f"a number of it is no integer: {error}") from error
    request = replace(
        request, ticket=ticket, task_id=task_id, visit=visit, num_samples=num_samples, prompt=prompt, params=params
    )
    problem = _problem(request, limits)
    if problem:
        raise ValueError(problem)
    return request


def _problem(request: Request, limits: RequestLimits) -> str | None:
    prompt, params = request.prompt, request.params
    sizes = ", ".join(map(str, limits.group_sizes))
    stop_ids = len(params.stop_tokens) + (not params.ignore_eos)
    rules = [
        (0 <= request.visit < 2**32, f"visit {request.visit} is not in [0, 2**32)"),
        (-(2**63) <= request.task_id < 2**63, "the task's id has more than 64 bits"),
        (-(2**63) <= request.ticket < 2**63, "the ticket has more than 64 bits"),
        (len(prompt) > 0, "the prompt is empty"),
        (
            len(prompt) <= limits.max_prompt_tokens,
            f"the prompt has {len(prompt)} tokens, more than max_prompt_tokens = {limits.max_prompt_tokens}",
        ),
        (request.num_samples in limits.group_sizes, f"asks for {request.num_samples} samples; there are: {sizes}"),
        (
            1 <= params.max_tokens <= limits.max_completion_tokens,
            f"max_tokens {params.max_tokens} is not in [1, {limits.max_completion_tokens}]",
        ),
        (
            0 <= params.temperature < math.inf,
            f"temperature {params.temperature} is neither positive and finite nor 0 (greedy)",
        ),
        (0 <= params.top_k < 2**31, f"top_k {params.top_k} is not in [0, 2**31); 0 keeps all"),
        (0 < params.top_p <= 1, f"top_p {params.top_p} is not in (0, 1]"),
        (0 <= params.min_p <= 1, f"min_p {params.min_p} is not in [0, 1]"),
        (stop_ids <= MAX_STOP_TOKENS, f"{stop_ids} stop tokens, more than {MAX_STOP_TOKENS}"),
        (all(params.stop_strings), "a stop string is empty"),
        (limits.has_text or not params.stop_strings, "stop strings need an engine that was given `decode`"),
        (limits.multi_turn or not request.multi_turn, "multi_turn needs an engine with max_extend_tokens above 0"),
    ]
    problem = next((why for ok, why in rules if not ok), None)
    return problem or limits.ids_problem([*prompt, *params.stop_tokens])
