"""Tokenizers: text to token ids and back. NumPy only: verifier workers decode without JAX."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_DROPPED = "\0"  # stands for pad and eos in arrays of characters; no alphabet may hold it


class Tokenizer(Protocol):
    """What sampling and verification need of a tokenizer.

    `fingerprint` identifies the mapping: equal fingerprints encode and decode alike.
    """

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def pad_id(self) -> int: ...  # noqa: D102

    @property
    def eos_id(self) -> int: ...  # noqa: D102

    @property
    def bos_id(self) -> int | None: ...  # noqa: D102

    @property
    def fingerprint(self) -> str: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Returns the ids of the text, without bos or eos. Raises ValueError for text it cannot represent."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without pad and eos."""
        ...

    def decode_batch(self, tokens_NT: np.ndarray, lengths_N: np.ndarray) -> list[str]:
        """Returns for each row the text of its first `lengths_N` tokens, as `decode` would."""
        ...


class CharTokenizer:
    """One token per character: 0 is padding, 1 ends a completion, then the characters in sorted order.

    Args:
      alphabet: the characters, in any order and number.
      multiple_of: rounds vocab_size up to a multiple, so that the vocabulary axis can be sharded; the ids beyond the
        characters are never encoded, and decode to U+FFFD.
    """

    pad_id = 0
    eos_id = 1
    bos_id = None

    def __init__(self, alphabet: Iterable[str], multiple_of: int = 1):
        characters = sorted(set(alphabet))
        wrong = [item for item in characters if len(item) != 1 or item == _DROPPED]
        if wrong or not characters:
            raise ValueError(f"alphabet must hold single characters other than NUL, got {wrong or 'none'}")
        if multiple_of < 1:
            raise ValueError(f"multiple_of must be at least 1, got {multiple_of}")
        first = self.eos_id + 1
        self._num_ids = first + len(characters)
        self._vocab_size = -(-self._num_ids // multiple_of) * multiple_of
        self._alphabet = "".join(characters)
        self._ids = {character: first + i for i, character in enumerate(characters)}
        self._characters = np.array([_DROPPED, _DROPPED, *characters, _UNKNOWN])  # the last for every id beyond

    @property
    def vocab_size(self) -> int:
        """Ids lie below it; a multiple of `multiple_of`."""
        return self._vocab_size

    @property
    def fingerprint(self) -> str:
        """A hash of the characters and the vocabulary's size."""
        content = json.dumps(["char", self._alphabet, self._vocab_size])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """Returns one id per character.

        Raises:
          ValueError: at a character outside the alphabet, naming it and its position.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"character {character!r} at position {text.index(character)} of {text[:80]!r} is not in the alphabet "
                f"{self._alphabet!r}"
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the characters of the ids, without pad and eos. Raises ValueError at a negative id."""
        return self.decode_batch(np.array([ids], dtype=np.int64).reshape(1, -1), np.array([len(ids)]))[0]

    def decode_batch(self, tokens_NT: np.ndarray, lengths_N: np.ndarray) -> list[str]:
        """Returns the texts of right-padded rows.

        Args:
          tokens_NT: int; what stands beyond a row's length is not read.
          lengths_N: int; tokens of each row to decode.

        Raises:
          ValueError: at shapes that do not fit, a length outside [0, T], or a negative id within a length.
        """
        tokens_NT, lengths_N = np.asarray(tokens_NT), np.asarray(lengths_N)
        _check_rows(tokens_NT, lengths_N)
        num_rows, width = tokens_NT.shape
        if not tokens_NT.size:
            return [""] * num_rows
        ids_NT = np.where(np.arange(width) < lengths_N[:, None], tokens_NT, self.pad_id)
        if ids_NT.min() < 0:
            raise ValueError(f"token ids are at least 0, got {ids_NT.min()} in row {int(ids_NT.min(axis=1).argmin())}")
        characters_NT = np.ascontiguousarray(self._characters[np.minimum(ids_NT, self._num_ids)])
        rows = characters_NT.view(f"U{width}").ravel().tolist()  # one string a row; trailing NULs fall away
        return [row.replace(_DROPPED, "") for row in rows]


class ByteTokenizer:
    """One token per byte of UTF-8: any text, without a vocabulary to train. 0 is padding, 1 ends a completion.

    Bytes that are not UTF-8, which a policy may well write, decode to U+FFFD. Lone surrogates cannot be encoded.
    """

    pad_id = 0
    eos_id = 1
    bos_id = None
    vocab_size = 258
    fingerprint = "bytes-258"

    def encode(self, text: str) -> list[int]:
        """Returns one id per byte. Raises ValueError for text with lone surrogates."""
        return [byte + 2 for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids, without pad and eos. Raises ValueError at an id outside [0, 258)."""
        return self.decode_batch(np.array([ids], dtype=np.int64).reshape(1, -1), np.array([len(ids)]))[0]

    def decode_batch(self, tokens_NT: np.ndarray, lengths_N: np.ndarray) -> list[str]:
        """Returns the texts of right-padded rows, as `CharTokenizer.decode_batch` does."""
        tokens_NT, lengths_N = np.asarray(tokens_NT), np.asarray(lengths_N)
        _check_rows(tokens_NT, lengths_N)
        ids_NT = np.where(np.arange(tokens_NT.shape[1]) < lengths_N[:, None], tokens_NT, self.pad_id)
        if ids_NT.size and not 0 <= ids_NT.min() <= ids_NT.max() < self.vocab_size:
            raise ValueError(f"token ids must lie in [0, 258), got {ids_NT.min()} to {ids_NT.max()}")
        bytes_NT = (ids_NT - 2).astype(np.uint8)
        rows = zip(bytes_NT, ids_NT > self.eos_id, strict=True)
        return [row[kept].tobytes().decode(errors="replace") for row, kept in rows]


def _check_rows(tokens_NT: np.ndarray, lengths_N: np.ndarray) -> None:
    if tokens_NT.ndim != 2 or lengths_N.shape != tokens_NT.shape[:1]:
        raise ValueError(f"expected tokens [N, T] and lengths [N], got {tokens_NT.shape} and {lengths_N.shape}")
    width = tokens_NT.shape[1]
    if tokens_NT.size and (lengths_N.min() < 0 or lengths_N.max() > width):
        raise ValueError(f"lengths must lie in [0, {width}], got {lengths_N.min()} to {lengths_N.max()}")
