"""The verifier `math_verify`: mathematical equivalence by the package math-verify (extra `tasks`).

The package limits its own time by signals and reports that by a BaseException. Here its clocks are off: a verifier
worker has a deadline already, which also ends what signals cannot, and counts it as a timeout.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

from dynrl.tasks.extraction import last_boxed, plain_number, tagged
from dynrl.tasks.rewards import Unparsable
from dynrl.types import Reward, Task

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError("the verifier 'math_verify' needs more packages: pip install 'dynrl[tasks]'") from error

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every start that its clocks are off

MAX_ANSWER_CHARS = 2_000
MAX_DEPTH = 40  # of brackets and braces; the parser takes time that grows with it much faster than the text

# What follows a number that math-verify takes for another: it reads 1e3 as 1, and 50% as equal to 50.
_MISREAD = r"(?:[eE][+-]?[0-9]|\s?\\?%)"


def math_verify(task: Task, text: str) -> Reward:
    r"""1 when the completion's answer is equivalent to the reference.

    The answer is what stands in the last `\boxed{...}`, or in the last `<answer>...</answer>`, or else what math-verify
    finds in the last 2,000 characters. An answer in LaTeX needs a box or dollar signs.

    Where the reference is a plain number (`1,234`, `-0.5`, `1e3`) and the answer is one too, both are compared exactly
    and nothing else is asked: `1.0000001` is not 1. Nor is an answer right whose number goes on in exponent notation
    or with a per cent sign: math-verify reads `1e3` as 1 and takes `50%` for 50. All else is math-verify's judgement,
    which compares floats to six decimals.

    Raises:
      Unparsable: there is no answer that math-verify can read, or it is too long or nested too deeply to try.
      ValueError: the task's answer is one that it cannot read.
    """
    boxed = last_boxed(text)
    answer = tagged(text) if boxed is None else boxed
    reference = plain_number(task.answer)
    if reference is not None and (given := _number(text if answer is None else answer)) is not None:
        return Reward(float(given == reference))
    if not (expected := _expression(task.answer)):
        raise ValueError(f"task {task.task_id}: math-verify cannot read the answer {task.answer[:80]!r}")
    searched = text[-MAX_ANSWER_CHARS:] if answer is None else answer
    if len(searched) > MAX_ANSWER_CHARS or _depth(searched) > MAX_DEPTH:
        raise Unparsable(f"longer than {MAX_ANSWER_CHARS} characters, or nested deeper than {MAX_DEPTH}")
    if not (found := _parsed(searched if answer is None else _boxed(answer))):
        raise Unparsable(f"math-verify finds no answer in {text[-80:]!r}")
    equal = verify(expected, found, timeout_seconds=None)
    return Reward(float(equal and not (reference is not None and _is_misread(str(found[-1]), searched))))


def _number(answer: str) -> Fraction | None:
    return plain_number(answer.strip().strip("$").replace("\\!", "").replace("{,}", ","))


def _depth(text: str) -> int:
    steps = [1 if character in "([{" else -1 for character in text if character in "([{)]}"]
    return max(accumulate(steps), default=0)


def _is_misread(read: str, text: str) -> bool:
    """Whether the number that math-verify has read goes on, where it stands in the text for the last time."""
    stands = list(re.finditer(rf"(?<![0-9.,eE]){re.escape(read)}(?![0-9])(?P<goes_on>{_MISREAD})?", text))
    return "%" in read or bool(stands[-1]["goes_on"] if stands else re.search(rf"[0-9.]{_MISREAD}", text))


def _boxed(answer: str) -> str:
    return answer if "$" in answer else f"\\boxed{{{answer}}}"


@lru_cache(maxsize=64)
def _expression(reference: str) -> list[Any]:
    return _parsed(reference if "\\boxed" in reference else _boxed(reference))


def _parsed(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)  # type: ignore[arg-type]


# The parser's tables are built at its first use: before the first deadline runs.
verify(_expression(r"\frac{x^2 + 1}{2}"), _parsed("1 + 2/3"), timeout_seconds=None)
