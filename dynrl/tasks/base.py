"""What every task source is made of: the contract, names for contents, random numbers, and a base for generators.

Random numbers are counter-based: hashes of where they stand. So neighbouring seeds or indices share nothing (sources
that seed a generator with seed + index give neighbouring seeds almost the same tasks), and a task does not depend on
which tasks were made before it.

This module knows neither JAX nor the store: ids are given on admission, and tasks made here carry -1.
"""

import difflib
import functools
import hashlib
import struct
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol, Self, cast

from dynrl.types import Task

MAX_RETRIES = 1_000  # draws of one task that may collide with excluded ones
_NUM_SHOWN = 12  # levels that an error lists
_UNPACK_WORDS = struct.Struct("<8Q").unpack  # one BLAKE2b digest


def task_hash(prompt: str) -> str:
    """Names a prompt's content: equal for prompts that differ only in white space or Unicode form.

    Args:
      prompt: any text, lone surrogates included.

    Returns:
      32 hexadecimal digits: half of the SHA-256 of the text after NFKC, stripped, runs of white space made one space.
    """
    text = " ".join(unicodedata.normalize("NFKC", prompt).split())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def near(word: str, candidates: Iterable[str]) -> str:
    """Returns " (did you mean 'this' or 'that'?)" for an error's message; nothing where no candidate is close."""
    matches = difflib.get_close_matches(word, list(candidates), n=3)
    return f" (did you mean {' or '.join(map(repr, matches))}?)" if matches else ""


class Draws:
    """Draws of bounded integers from one counter-based sequence.

    The words are BLAKE2b digests of (stream, seed, index, salt, block), which costs a tenth of constructing a
    generator of `numpy.random`, and no version of NumPy changes them.
    """

    def __init__(self, seed: int, stream: str, index: int, salt: int = 0):
        self._where = f"{stream}:{seed}:{index}:{salt}"
        self._num_blocks = 0
        self._words: list[int] = []

    def below(self, bound: int) -> int:
        """Returns a uniform integer in [0, bound); the bias is below bound / 2**64."""
        if not self._words:
            digest = hashlib.blake2b(f"{self._where}:{self._num_blocks}".encode()).digest()
            self._words.extend(_UNPACK_WORDS(digest))
            self._num_blocks += 1
        return (self._words.pop() * bound) >> 64


def first_draw_below(bound: int, seed: int, stream: str, index: int) -> int:
    """Returns `Draws(seed, stream, index).below(bound)`, for those that need no more of the sequence, in half the time.

    What selectors look at are many tasks, of each the level alone.
    """
    digest = hashlib.blake2b(f"{stream}:{seed}:{index}:0:0".encode()).digest()
    return (int.from_bytes(digest[-8:], "little") * bound) >> 64


class TaskSource(Protocol):
    """Where tasks come from. Sources hold no state: `task` is a pure function, which any thread may call.

    `kwargs` are the JSON-able arguments that rebuild the source. They stand in a checkpoint, so where the contents lie
    in files they hold a hash of them. `alphabet` is the set of characters that its prompts and answers use, and the
    two maxima bound their lengths in characters; each is None where the source cannot say. `num_tasks` is how many
    tasks a finite source has, None for an endless one. `verifiers` gives, for each `Task.source` that its tasks may
    carry, the verifier that judges them by default.

    A source may also have `kind(seed, index)`, which returns the (source, level) of its task without writing it, or
    None where it cannot say. Selectors look at many more tasks than they draw.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def kwargs(self) -> Mapping[str, Any]: ...  # noqa: D102

    @property
    def levels(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def alphabet(self) -> frozenset[str] | None: ...  # noqa: D102

    @property
    def max_prompt_chars(self) -> int | None: ...  # noqa: D102

    @property
    def max_answer_chars(self) -> int | None: ...  # noqa: D102

    @property
    def num_tasks(self) -> int | None: ...  # noqa: D102

    @property
    def verifiers(self) -> Mapping[str, str]: ...  # noqa: D102

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at (seed, index), with task_id -1, whose `task_hash` is not in `exclude`.

        Raises ValueError, naming the source and what it tried, where it finds none; IndexError beyond `num_tasks`.
        """
        ...

    def without(self, exclude: Set[str]) -> "TaskSource":
        """Returns the source with excluded tasks left out, so that its `num_tasks` does not count them.

        Endless sources return themselves: their `task` draws again.
        """
        ...


class GradedSource(TaskSource, Protocol):
    """A source that can write at a difficulty of choice, also beyond its own `levels`. Curricula need this part.

    A level means the same wherever it stands: in `Task.level`, in `levels` and here. All its tasks carry one
    `Task.source`, the only key of `verifiers`. A source at another level may exceed the maxima of this one.
    """

    def reachable_levels(self) -> Sequence[int]:
        """Returns every level that it can write at, from the easiest to the hardest; its own `levels` are among them.

        Raises ValueError, saying why and what to change, where it cannot choose.
        """
        ...

    def at_level(self, level: int) -> TaskSource:
        """Returns the source of tasks at this level alone. Raises ValueError, naming what is possible."""
        ...


def checked_level(source: GradedSource, level: int) -> int:
    """Returns the level; raises ValueError, with the source's reachable levels, where it is none of them."""
    levels = source.reachable_levels()
    if level not in levels:
        shown = [str(each) for each in levels[:_NUM_SHOWN]]
        if len(levels) > _NUM_SHOWN:
            shown += ["...", str(levels[-1])]
        (name,) = source.verifiers
        raise ValueError(f"{name} cannot write at level {level}; it can at {', '.join(shown)}")
    return level


def kind_method(source: TaskSource) -> Callable[[int, int], tuple[str, int] | None]:
    """Returns a source's own `kind`, or else one that cannot say."""
    method = getattr(source, "kind", None)
    return cast(Callable[[int, int], tuple[str, int] | None], method) if callable(method) else lambda seed, index: None


class Problem(NamedTuple):
    """What a `LeveledSource` writes; the metadata is for the verifier."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = {}


class LeveledSource(ABC):
    """Base of sources that write a problem for a level: uniform over levels, and clear of excluded prompts."""

    name: str
    verifier: str  # the default one
    cure: str  # what makes the easiest level larger, for the error
    num_tasks = None

    @property
    @abstractmethod
    def levels(self) -> tuple[int, ...]:
        """The difficulties, in ascending order."""

    @property
    def verifiers(self) -> dict[str, str]:
        """The default verifier of its tasks."""
        return {self.name: self.verifier}

    def without(self, exclude: Set[str]) -> Self:
        """Returns itself: `task` draws again where a prompt is excluded."""
        del exclude
        return self

    @abstractmethod
    def problem(self, draws: Draws, level: int) -> Problem:
        """Returns a problem of this level; `draws` is its only source of chance."""

    def kind(self, seed: int, index: int) -> tuple[str, int]:
        """Returns source and level of the task at (seed, index), whatever is excluded."""
        levels = self._levels
        return self.name, levels[first_draw_below(len(levels), seed, self.name, index)]

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at (seed, index), with task_id -1, whose `task_hash` is not in `exclude`.

        The level is drawn once and kept over the retries, so excluding tasks does not shift the mix of levels.

        Raises:
          ValueError: if `MAX_RETRIES` further draws at the level all lie in `exclude`.
        """
        draws = Draws(seed, self.name, index)
        level = self._levels[draws.below(len(self._levels))]
        for salt in range(1, MAX_RETRIES + 2):
            prompt, answer, metadata = self.problem(draws, level)
            if not exclude or task_hash(prompt) not in exclude:
                return Task(-1, self.name, prompt, answer, level, metadata=metadata)
            draws = Draws(seed, self.name, index, salt)
        raise ValueError(
            f"{self.name}: all {MAX_RETRIES + 1} draws at level {level} (seed {seed}, index {index}) are among the "
            f"{len(exclude)} excluded tasks; use fewer evaluation tasks, or {self.cure}"
        )

    @functools.cached_property
    def _levels(self) -> tuple[int, ...]:
        return self.levels
