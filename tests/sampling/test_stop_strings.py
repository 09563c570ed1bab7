import numpy as np
import pytest

from dynrl.models.tokenizer import ByteTokenizer, CharTokenizer
from dynrl.sampling.stop_strings import first_stop

CHARS = CharTokenizer("abcdST.\n")
BYTES = ByteTokenizer()
PIECES = ["a", "b", "ab", "ba", "aa", "\n", " ", "→", "STOP", "xSTOPy", "ST", "OP", "\n\n"]  # as of a BPE vocabulary


def decode_pieces(ids):
    return "".join(PIECES[i] for i in ids)


def cut_of(tokens, strings, decode):
    """Brute force: how many tokens the completion keeps, or None."""
    for n in range(1, len(tokens) + 1):
        if any(string in decode(tokens[:n]) for string in strings):
            return n
    return None


def feed(tokens, sizes, strings, decode):
    """How many tokens are kept when they come in chunks of these sizes, as from the engine."""
    fed = 0
    for size in sizes:
        size = min(size, len(tokens) - fed)
        fed += size
        extra = first_stop(tokens[:fed], size, strings, decode)
        if extra is not None:
            assert 0 <= extra < size
            return fed - extra
    assert fed == len(tokens)
    return None


def all_ways(tokens, strings, decode):
    """The cut, which is the same in one chunk, token by token, and with empty chunks between."""
    n = max(len(tokens), 1)
    ways = [[n], [1] * n, [0, 2, 0, 0] * n, [3, 1] * n]
    cuts = {feed(tokens, sizes, strings, decode) for sizes in ways}
    assert len(cuts) == 1
    return cuts.pop()


def test_the_token_that_completes_a_stop_string_is_the_last():
    tokens = CHARS.encode("abSTcd")
    assert first_stop(tokens, 6, ["ST"], CHARS.decode) == 2  # c and d came after it
    assert first_stop(tokens[:4], 4, ["ST"], CHARS.decode) == 0
    assert first_stop(tokens[:4], 1, ["ST"], CHARS.decode) == 0  # S came with an earlier call
    assert first_stop(tokens[:3], 3, ["ST"], CHARS.decode) is None


@pytest.mark.parametrize(
    ("text", "strings", "kept"),
    [
        ("STab", ["ST"], 2),  # at the very beginning
        ("S", ["S"], 1),
        ("abST", ["ST"], 4),  # at the very end
        ("abcd", ["ST"], None),
        ("abS", ["ST"], None),
        ("TSab", ["ST"], None),  # both letters, in the other order
        ("aST.ST", ["ST"], 3),  # the first one counts
        ("abcd", ["abcd", "bc"], 3),  # the one that is complete first counts, not the one that begins first
        ("abcd", ["bc", "abcd"], 3),
        ("abcd", ["d", "c", "abcd"], 3),
        ("abab", ["bab", "aba"], 3),
        ("aab", ["aaa", "aab"], 3),  # a false start of one is the start of another
        ("aaab", ["aab"], 4),  # and of itself
        ("aaa", ["aa"], 2),  # overlaps with itself
        ("a\n\nb", ["\n\n"], 3),
        ("", ["ST"], None),
    ],
)
def test_places_and_several_strings(text, strings, kept):
    assert all_ways(CHARS.encode(text), strings, CHARS.decode) == kept
    assert all_ways(BYTES.encode(text), strings, BYTES.decode) == kept


def test_nothing_new_is_nothing_found():
    # Even where a stop string is there: an earlier call has reported it.
    assert first_stop(CHARS.encode("ST"), 0, ["ST"], CHARS.decode) is None
    assert first_stop([], 0, ["ST"], CHARS.decode) is None


def test_a_character_of_several_bytes_is_complete_with_its_last_byte():
    # e acute has 2 bytes, the arrow 3, the smiley 4.
    for text, stop, kept in [
        ("aéb", "é", 3),
        ("a→b", "→", 4),
        ("🙂", "🙂", 4),
        ("ab🙂→é.", "🙂→é", 11),
        ("é🙂é", "🙂é", 8),
        ("→→a", "→a", 7),
        ("→←", "←", 6),  # the first two of three bytes are the same
    ]:
        assert all_ways(BYTES.encode(text), [stop], BYTES.decode) == kept
    # The byte before the last one decodes to U+FFFD, which is not the character.
    assert first_stop(BYTES.encode("a🙂")[:-1], 4, ["🙂"], BYTES.decode) is None


def test_a_stop_string_of_long_characters_is_found_byte_by_byte_after_a_long_text():
    # 5 characters of 4 bytes: all that a call with one new token looks at. What comes before is cut in mid-character.
    text = "→" * 100 + "🙂🙃🙂🙂🙃" + "→"
    tokens = BYTES.encode(text)
    assert feed(tokens, [1] * len(tokens), ["🙂🙃🙂🙂🙃"], BYTES.decode) == 320
    assert feed(tokens, [len(tokens)], ["🙂🙃🙂🙂🙃"], BYTES.decode) == 320


def test_bytes_that_are_not_text_do_not_disturb():
    tokens = [257, *BYTES.encode("é"), BYTES.encode("🙂")[0], *BYTES.encode("ST"), 200]
    assert all_ways(tokens, ["ST"], BYTES.decode) == 6
    assert all_ways(tokens, ["é"], BYTES.decode) == 3


def test_a_token_may_hold_more_than_the_stop_string():
    # The cut is at the token: what it holds beyond the stop string belongs to the completion.
    x_stop_y, a, st, op = PIECES.index("xSTOPy"), 0, PIECES.index("ST"), PIECES.index("OP")
    assert all_ways([a, x_stop_y, a], ["STOP"], decode_pieces) == 2
    assert all_ways([a, st, op, a], ["STOP"], decode_pieces) == 3
    assert all_ways([st, x_stop_y], ["STxS"], decode_pieces) == 2
    assert all_ways([st, op, st], ["P"], decode_pieces) == 2


def test_the_work_does_not_grow_with_the_completion():
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return CHARS.decode(ids)

    tokens = CHARS.encode("abcd" * 1000)
    assert first_stop(tokens, 3, ["ST", "abS"], decode) is None
    assert sum(seen) < 100  # the new tokens, and as many bytes as the longest stop string may have
    assert len(tokens) == 4000  # and the caller's tokens stay what they are


@pytest.mark.parametrize("kind", ["characters", "bytes", "pieces"])
def test_chunks_of_any_size_find_what_brute_force_finds(kind):
    rng = np.random.default_rng(len(kind))
    found = 0
    for _ in range(300):
        length = int(rng.integers(1, 40))
        if kind == "characters":
            tokens, decode = rng.integers(2, 5, length).tolist(), CHARS.decode  # newline, full stop, S
            strings = ["".join(rng.choice([*"\n.S"], rng.integers(1, 6))) for _ in range(rng.integers(1, 4))]
        elif kind == "bytes":
            letters = [*"aéè→←🙂🙃"]
            tokens, decode = BYTES.encode("".join(rng.choice(letters, length))), BYTES.decode
            if rng.random() < 0.5:  # broken characters
                tokens = [t for t in tokens if rng.random() < 0.9] or [2]
            strings = ["".join(rng.choice(letters, rng.integers(1, 3))) for _ in range(rng.integers(1, 4))]
        else:
            tokens, decode = rng.integers(0, len(PIECES), length).tolist(), decode_pieces
            strings = list(rng.choice(["ba", "aaa", "\n", "\n\n\n", "STOP", "OPa", "a→b", "yx", "TOPS"], 2))
        want = cut_of(tokens, strings, decode)
        found += want is not None
        for _ in range(4):
            sizes = rng.integers(0, rng.integers(2, 12), 400).tolist()
            assert feed(tokens, sizes, strings, decode) == want, (tokens, sizes, strings)
    assert 60 < found < 290  # both outcomes were tried


def test_ids_without_text_hide_no_stop_string():
    # Padding and the tokenizer's own stop token may be sampled, and decode to nothing.
    tokenizer = CharTokenizer("abST")
    tokens = [*tokenizer.encode("aS"), *[tokenizer.pad_id] * 9, *tokenizer.encode("Tb")]
    assert first_stop(tokens, len(tokens), ["ST"], tokenizer.decode) == 1
    assert first_stop(tokens[:-1], 1, ["ST"], tokenizer.decode) == 0
    assert first_stop(tokens[:-1], 5, ["ST"], tokenizer.decode) == 0
