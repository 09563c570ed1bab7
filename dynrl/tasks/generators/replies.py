"""What a language model says, read strictly: proposals of tasks as JSON, and votes on their answers."""

import json
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from dynrl.tasks.extraction import last_boxed, plain_number, tagged

_QUOTES = "\"'`*_$"  # at both ends of an answer, they are no part of it


class Proposal(NamedTuple):
    """A task that a model wrote; `answer` is None where it gave none."""

    prompt: str
    answer: str | None


def parse_proposal(text: str, needs_answer: bool) -> Proposal:
    """Reads a JSON object with the texts `prompt` and `answer`, in a Markdown code fence or not.

    Numbers are taken as they are written.

    Args:
      text: the model's reply.
      needs_answer: whether the answer may not be left out, or null.

    Raises:
      ValueError: the text is anything else; says what.
    """
    try:
        record = json.loads(unfenced(text), parse_int=str, parse_float=str, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    if not isinstance(record, dict) or not {"prompt"} <= record.keys() <= {"prompt", "answer"}:
        raise ValueError(f"expected a JSON object of 'prompt' and 'answer', got {text[:80]!r}")
    prompt, answer = record["prompt"], record.get("answer")
    if not _is_filled(prompt) or not (_is_filled(answer) or (answer is None and not needs_answer)):
        raise ValueError(f"'prompt' and 'answer' must be texts and not blank, got {text[:80]!r}")
    return Proposal(prompt, answer)


def elected(votes: Sequence[str], num_votes: int, min_share: float, given: str | None) -> str | None:
    """The answer that a majority of replies agree on, as they write it; the given one, as that does.

    Args:
      votes: the replies.
      num_votes: how many were asked for; those that did not come agree with none.
      min_share: of `num_votes`, above one half, that must agree (as `normalized` compares).
      given: the proposal's own answer, with which they must agree too; None where it gave none.

    Returns:
      The answer; None where there is no such majority, or it contradicts the given answer.
    """
    answers = [answer for answer in map(bare, votes) if _is_filled(answer)]
    ballots = Counter(map(normalized, answers))
    if not ballots:
        return None
    winner, count = ballots.most_common(1)[0]
    if count / num_votes < min_share or (given is not None and normalized(bare(given)) != winner):
        return None
    return given if given is not None else next(answer for answer in answers if normalized(answer) == winner)


def bare(text: str) -> str:
    r"""An answer without what is put around it: a code fence, tags, `\boxed{}`, a solution before `####`, quotes."""
    text = unfenced(text).rpartition("####")[2]
    for inside in (tagged, last_boxed):
        found = inside(text)
        text = (text if found is None else found).strip()
    while len(text) > 2 and text[0] == text[-1] and text[0] in _QUOTES:
        text = text[1:-1].strip()
    return text


def normalized(answer: str) -> object:
    """What two bare answers have in common that mean the same: the exact number, or else the text.

    Texts are compared after NFKC, with white space collapsed and without a final period; case counts, since it does
    for most verifiers.
    """
    text = " ".join(unicodedata.normalize("NFKC", answer).split())
    number = plain_number(text)
    return text.removesuffix(".") if number is None else number


def unfenced(text: str) -> str:
    """The text inside of a Markdown code fence, where that is all there is; else the text itself, stripped."""
    text = text.strip()
    if len(text) < 6 or not (text.startswith("```") and text.endswith("```")):
        return text
    first, newline, rest = text[3:-3].partition("\n")
    return (rest if newline else first.removeprefix("json")).strip()


def _is_filled(value: Any) -> TypeGuard[str]:
    """Whether it is a text, neither blank nor with a lone surrogate in it."""
    if not isinstance(value, str) or not value.strip():
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> None:
    raise ValueError(f"JSON knows no {name}")
