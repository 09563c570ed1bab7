"""Where the answer stands in a completion: tags, boxes, lines and numbers. Linear in the text, whatever it holds."""

import re
from fractions import Fraction

MAX_TAIL_CHARS = 20_000  # an answer is looked for at the end of a text: so much of it
MAX_DIGITS = 1_000  # of a number; the interpreter's own limit is 4,300
_MAX_EXPONENT = 999

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_CURRENCY = r"(?:\\?\$\s?)?"
_OPERATOR = "[/*^\N{MULTIPLICATION SIGN}\N{DIVISION SIGN}]"
# Atomic: nothing may match a part of a number, the "1" of "12/3" or of "1e3" included.
_NUMBER = re.compile(
    rf"{_CURRENCY}(?P<sign>(?<![\w).])[+-])?{_CURRENCY}"
    rf"(?P<digits>(?>(?:{_DIGITS})(?:[eE][+-]?[0-9]+)?))(?!\s?{_OPERATOR})"
)


def tagged(text: str) -> str | None:
    """Returns what stands in the last `<answer>...</answer>`, stripped; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def last_line(text: str) -> str:
    """Returns the last line that is not blank, stripped; the empty string without one."""
    return text.rstrip()[-MAX_TAIL_CHARS:].rpartition("\n")[2].strip()


def last_boxed(text: str) -> str | None:
    r"""Returns what stands in the last `\boxed{...}` of the text's tail, braces balanced; None without one."""
    tail = text[-MAX_TAIL_CHARS:]
    opened = tail.rfind("\\boxed{")
    if opened < 0:
        return None
    start, depth = opened + len("\\boxed{"), 1
    for position in range(start, len(tail)):
        depth += (tail[position] == "{") - (tail[position] == "}")
        if not depth:
            return tail[start:position].strip()
    return None


def plain_number(text: str) -> Fraction | None:
    """Returns the exact value of a text that is one number and nothing else, a currency sign and final period aside.

    Thousands may be set apart by commas, and `1e3` is a thousand. None for everything else: a percent sign changes
    what a number means, and numbers of more than MAX_DIGITS digits are none that anybody asked for.
    """
    match = _NUMBER.fullmatch(text.strip().removesuffix("."))
    return None if match is None else _value(match)


def first_number(text: str) -> Fraction | None:
    """Returns the exact value of the number that the text's first digit belongs to; None without one."""
    digit, match = re.search("[0-9]", text), _NUMBER.search(text)
    return _value(match) if digit and match and match.start() <= digit.start() < match.end() else None


def last_number(text: str) -> Fraction | None:
    """Returns the exact value of the last number in the text's tail; None without one, or at one beyond bounds."""
    match = None
    for found in _NUMBER.finditer(text[-MAX_TAIL_CHARS:]):
        match = found
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    digits = match["digits"].replace(",", "")
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > _MAX_EXPONENT:
        return None
    value = Fraction(digits)
    return -value if match["sign"] == "-" else value
