"""The verifier of GSM8K (arXiv:2110.14168), whose reference answers end in a line such as `#### 1,234`."""

from fractions import Fraction

from dynrl.tasks.extraction import MAX_TAIL_CHARS, first_number, last_number
from dynrl.tasks.rewards import Unparsable
from dynrl.types import Reward, Task


def gsm8k(task: Task, text: str) -> Reward:
    """1 when the completion's number equals the reference's, as exact numbers.

    The number is the first one after the last `####`, or the last one of the text where no digit follows a `####`. Of
    the completion, only the last 20,000 characters are looked at. Commas between thousands, a currency sign and what
    follows the number (units, a per cent sign, a period) do not matter; `#### 12/3` is not 12, but unreadable.

    Raises:
      Unparsable: the completion holds no number of at most 1,000 digits there.
      ValueError: the task's answer holds none.
    """
    if (expected := _answer(task.answer)) is None:
        raise ValueError(f"task {task.task_id}: there is no number in the answer {task.answer[-80:]!r}")
    if (given := _answer(text)) is None:
        raise Unparsable(f"no number in {text[-80:]!r}")
    return Reward(float(given == expected))


def _answer(text: str) -> Fraction | None:
    tail = text[-MAX_TAIL_CHARS:]
    _, mark, after = tail.rpartition("####")
    has_digit = any("0" <= character <= "9" for character in after)
    return first_number(after) if mark and has_digit else last_number(tail)
