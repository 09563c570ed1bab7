"""Stop strings: found in the text, cut at the token."""

from collections.abc import Callable, Sequence


def first_stop(
    tokens: Sequence[int], num_new: int, strings: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Looks for the first token with which a completion's text holds a stop string.

    Args:
      tokens: the completion so far; before its last `num_new` tokens no stop string ends.
      num_new: tokens that were not looked at yet.
      strings: the stop strings, none of them empty.
      decode: ids to text.

    Returns:
      How many tokens came after that one; None when no stop string is there.
    """

    def holds(text: str) -> bool:
        return any(string in text for string in strings)

    # A stop string that ends in the new tokens may begin so many characters before them. A character may take four
    # tokens (bytes), and a token may be none (padding that was sampled), which the length of their text shows; it
    # counts each byte of a broken character, up to three at either end.
    old = len(tokens) - num_new
    longest = max(map(len, strings))
    start = max(0, old - 4 * longest)
    while start > 0 and len(decode(tokens[start:old])) < longest + 6:
        start = max(0, old - 2 * (old - start))
    tail = list(tokens[start:])
    if not num_new or not holds(decode(tail)):
        return None
    for extra in range(num_new - 1, 0, -1):
        if holds(decode(tail[:-extra])):
            return extra
    return 0
