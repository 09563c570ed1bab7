import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.models.tokenizer import ByteTokenizer, CharTokenizer
from dynrl.tasks.procedural import DigitSorting


def test_ids_are_pad_eos_and_the_sorted_characters():
    tokenizer = CharTokenizer("cab")
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 1, None, 5)
    assert tokenizer.encode("abcab") == [2, 3, 4, 2, 3]
    assert tokenizer.decode([0, 2, 0, 3, 4, 1, 0]) == "abc"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("") == []


@settings(deadline=None)
@given(st.data())
def test_round_trip(data):
    alphabet = data.draw(st.sets(st.characters(exclude_characters="\0\N{REPLACEMENT CHARACTER}"), min_size=1))
    tokenizer = CharTokenizer(alphabet, multiple_of=data.draw(st.integers(1, 9)))
    text = data.draw(st.text(st.sampled_from(sorted(alphabet))))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.data())
def test_decode_batch_equals_decode(data):
    tokenizer = CharTokenizer("0123\N{GRINNING FACE}", multiple_of=8)
    num_rows, width = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 5))
    rows = st.lists(st.integers(0, 9), min_size=width, max_size=width)
    tokens_NT = np.array(data.draw(st.lists(rows, min_size=num_rows, max_size=num_rows)), dtype=np.int32)
    tokens_NT = tokens_NT.reshape(num_rows, width)
    lengths_N = np.array(
        data.draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows)), dtype=np.int32
    )
    expected = [tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens_NT, lengths_N, strict=True)]
    assert tokenizer.decode_batch(tokens_NT, lengths_N) == expected
    assert tokenizer.decode_batch(np.asfortranarray(tokens_NT), lengths_N) == expected


def test_decode_batch_reads_nothing_beyond_the_length():
    tokenizer = CharTokenizer("ab")
    tokens_NT = np.array([[2, 3, 1, -7], [3, -7, -7, -7], [-7] * 4])
    assert tokenizer.decode_batch(tokens_NT, np.array([3, 1, 0])) == ["ab", "b", ""]
    with pytest.raises(ValueError, match="at least 0, got -7 in row 1"):
        tokenizer.decode_batch(tokens_NT, np.array([3, 2, 0]))


def test_the_vocabulary_is_rounded_up_and_ids_beyond_the_characters_show():
    tokenizer = CharTokenizer(DigitSorting().alphabet, multiple_of=8)
    assert tokenizer.vocab_size == 16  # 2 + 11 characters
    assert CharTokenizer("abcdef", multiple_of=8).vocab_size == 8
    assert tokenizer.decode([2, 12, 13, 15, 16, 99]) == "0>" + 4 * "\N{REPLACEMENT CHARACTER}"


def test_an_unknown_character_is_named_with_its_position():
    with pytest.raises(ValueError, match=r"character 'x' at position 2 of '12x4'.*'01234'"):
        CharTokenizer("01234").encode("12x4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alphabet": ""}, "got none"),
        ({"alphabet": ["a", "bc"]}, r"got \['bc'\]"),
        ({"alphabet": "a\0"}, "other than NUL"),
        ({"alphabet": "a", "multiple_of": 0}, "multiple_of must be at least 1"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(**arguments)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([2, 2], [2], r"got \(2,\) and \(1,\)"),
        ([[2, 2]], [1, 1], r"got \(1, 2\) and \(2,\)"),
        ([[2, 2]], [3], r"lie in \[0, 2\], got 3 to 3"),
        ([[2, 2]], [-1], r"got -1 to -1"),
    ],
)
def test_shapes_that_do_not_fit(tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer("a").decode_batch(np.array(tokens), np.array(lengths))


def test_the_fingerprint_names_the_mapping_in_every_process():
    tokenizer = CharTokenizer("ba")
    assert tokenizer.fingerprint == CharTokenizer({"a", "b"}).fingerprint
    others = [CharTokenizer("abc"), CharTokenizer("ab", multiple_of=8)]
    assert tokenizer.fingerprint not in [other.fingerprint for other in others]
    code = "from dynrl.models.tokenizer import *; print(CharTokenizer({'a', 'b'}).fingerprint)"
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == tokenizer.fingerprint


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_bytes_round_trip_any_text_that_utf8_can_hold(texts):
    tokenizer = ByteTokenizer()
    rows = [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(row) for row in rows] == texts
    width = max(map(len, rows), default=0)
    tokens_NT = np.array([row + [-9] * (width - len(row)) for row in rows], np.int64).reshape(len(rows), width)
    assert tokenizer.decode_batch(tokens_NT, np.array([len(row) for row in rows], int)) == texts


def test_bytes_that_are_no_text_show():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0, 2 + 0xE2, 2 + ord("a"), 1]) == "\N{REPLACEMENT CHARACTER}a"
    with pytest.raises(ValueError, match=r"must lie in \[0, 258\), got 2 to 258"):
        tokenizer.decode([2, 258])
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("\ud800")
