"""The source `mixture`: other sources, mixed by weight."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from functools import lru_cache
from typing import Any, Self

import numpy as np

from dynrl.tasks.base import Draws, TaskSource, kind_method, task_hash
from dynrl.tasks.selectors import counter_words
from dynrl.tasks.sources import make_source
from dynrl.types import Task

_KEYS = ("name", "weight", "kwargs")


class Mixture:
    """Sources in proportion to their weights, interleaved evenly: a task is a pure function of (seed, index).

    Which source has which index depends on the weights alone, so that every stretch of the mixture is in proportion,
    not only its average; selectors shuffle. Each source counts its own tasks: an endless one goes on with its next
    index, a finite one with the next task of an order shuffled by the seed.

    With an endless source among them the mixture is endless, and finite ones come round again, in another order each
    time. If all are finite, the mixture ends where the first of them would, with every task at most once. Without
    weights finite sources are weighted by their sizes, so that the mixture holds all tasks of all of them, and
    endless ones equally.

    Args:
      sources: for each source a mapping with its `name`, its `kwargs` (optional) and its `weight`, a positive number
        (all give one, or none does). Sources may repeat, and each has its own seed, derived from the mixture's.

    Raises:
      ValueError, TypeError: naming the position in `sources`; or two sources whose verifiers conflict.
    """

    name = "mixture"

    def __init__(self, sources: Sequence[Mapping[str, Any]]):
        if isinstance(sources, (str, Mapping)) or not sources:
            raise TypeError(f"mixture: sources must be a non-empty sequence of mappings, got {sources!r:.100}")
        entries = [_checked(source, f"mixture: sources[{i}]") for i, source in enumerate(sources)]
        self._names = [entry["name"] for entry in entries]
        self._given = [entry["weight"] for entry in entries]
        if None in self._given and any(weight is not None for weight in self._given):
            missing = self._given.index(None)
            raise ValueError(f"mixture: sources[{missing}] has no weight, while others have: give all weights, or none")
        self._take([_made(entry, f"mixture: sources[{i}]") for i, entry in enumerate(entries)])
        self._verifiers = self._merged_verifiers()

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        parts = zip(self._names, self._given, self._sources, strict=True)
        return {
            "sources": [
                {"name": name, "kwargs": dict(source.kwargs), **({} if weight is None else {"weight": weight})}
                for name, weight, source in parts
            ]
        }

    @property
    def levels(self) -> tuple[int, ...]:
        """Those of all sources; a level may mean another difficulty in each."""
        return tuple(sorted({level for source in self._sources for level in source.levels}))

    @property
    def alphabet(self) -> frozenset[str] | None:
        """The characters of all sources; None where one cannot say."""
        return _unless_none(lambda known: frozenset().union(*known), [source.alphabet for source in self._sources])

    @property
    def max_prompt_chars(self) -> int | None:
        """The largest of all; None where one cannot say."""
        return _unless_none(max, [source.max_prompt_chars for source in self._sources])

    @property
    def max_answer_chars(self) -> int | None:
        """The largest of all; None where one cannot say."""
        return _unless_none(max, [source.max_answer_chars for source in self._sources])

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are before the first finite source ends; None with an endless one."""
        return self._num_tasks

    @property
    def parts(self) -> list[tuple[TaskSource, float]]:
        """The sources, each with its share of the tasks; levels are chosen in each on its own (`GradedSource`)."""
        total = sum(self._weights)
        return [(source, weight / total) for source, weight in zip(self._sources, self._weights, strict=True)]

    @property
    def verifiers(self) -> dict[str, str]:
        """Those of all sources."""
        return dict(self._verifiers)

    def without(self, exclude: Set[str]) -> Self:
        """Returns the mixture of the sources without excluded tasks; ValueError where one has none left."""
        cleared = copy.copy(self)
        cleared._take([source.without(exclude) for source in self._sources])
        return cleared

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at (seed, index), with task_id -1, whose `task_hash` is not in `exclude`.

        In an endless mixture, a finite source gives its next task in place of an excluded one.

        Raises:
          IndexError: if the mixture is finite and has no such index.
          ValueError: if the source at the index finds no task that is not excluded.
        """
        which, source, seed, ordinal = self._located(seed, index)
        size = source.num_tasks
        if size is None:
            return source.task(seed, ordinal, exclude)
        time_round, position = divmod(ordinal, size)
        order = _order(seed, time_round, size)
        for step in range(size if self._num_tasks is None else 1):
            task = source.task(seed, int(order[(position + step) % size]))
            if not exclude or task_hash(task.prompt) not in exclude:
                return task
        raise ValueError(f"mixture: task {index}, of sources[{which}] ({source.name}), is among the excluded ones")

    def kind(self, seed: int, index: int) -> tuple[str, int] | None:
        """Returns source and level of the task at (seed, index), of a mixture `without` excluded tasks.

        None where the part that has the index cannot say; IndexError if the mixture has no such index.
        """
        _, source, seed, ordinal = self._located(seed, index)
        kind_of = kind_method(source)
        if source.num_tasks is None:
            return kind_of(seed, ordinal)
        time_round, position = divmod(ordinal, source.num_tasks)
        return kind_of(seed, int(_order(seed, time_round, source.num_tasks)[position]))

    def _located(self, seed: int, index: int) -> tuple[int, TaskSource, int, int]:
        """Returns which source has the index, the source, its seed, and which of its tasks in its order it is."""
        if index < 0 or (self._num_tasks is not None and index >= self._num_tasks):
            raise IndexError(f"mixture: there is no task {index}; there are {self._num_tasks or 'endlessly many'}")
        which, ordinal = self._place(index)
        return which, self._sources[which], _part_seed(seed, which), ordinal

    def _take(self, sources: list[TaskSource]) -> None:
        sizes = [source.num_tasks for source in sources]
        if 0 in sizes:
            where = sizes.index(0)
            raise ValueError(f"mixture: sources[{where}] ({sources[where].name}) has no tasks left")
        finite = [size for size in sizes if size is not None]
        self._sources = sources
        if None in self._given:
            self._weights = finite if len(finite) == len(sizes) else [1] * len(sizes)
        else:
            self._weights = _whole(self._given)
        self._num_tasks = self._longest(finite) if len(finite) == len(sizes) else None

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the source that has the index, and how many of the indices below it that source has."""
        rest = sum(self._weights)
        for which, weight in enumerate(self._weights):
            taken = (index * weight + rest // 2) // rest
            next_taken = ((index + 1) * weight + rest // 2) // rest
            if next_taken > taken:
                return which, taken
            index -= taken
            rest -= weight
        raise AssertionError("the last source takes what no other one does")

    def _longest(self, sizes: list[int]) -> int:
        """Returns the largest number of indices of which no source has more than its size, by bisection."""
        low, high = 0, sum(sizes)
        while low < high:
            middle = (low + high + 1) // 2
            left, rest, fits = middle, sum(self._weights), True
            for size, weight in zip(sizes, self._weights, strict=True):
                taken = (left * weight + rest // 2) // rest
                fits = fits and taken <= size
                left -= taken
                rest -= weight
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _merged_verifiers(self) -> dict[str, str]:
        merged: dict[str, str] = {}
        first: dict[str, int] = {}
        for i, source in enumerate(self._sources):
            for name, verifier in source.verifiers.items():
                if merged.setdefault(name, verifier) != verifier:
                    raise ValueError(
                        f"mixture: sources[{first[name]}] and sources[{i}] both have tasks of source {name!r}, but the "
                        f"one's verifier is {merged[name]!r} and the other's {verifier!r}: name their source apart"
                    )
                first.setdefault(name, i)
        return merged


def _checked(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise TypeError(f"{where} must be a mapping with a 'name', got {entry!r:.100}")
    if unknown := [key for key in entry if key not in _KEYS]:
        raise TypeError(f"{where} has unknown keys {unknown}; there are {', '.join(_KEYS)}")
    weight = entry.get("weight")
    if weight is not None and not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
        raise ValueError(f"{where}: weight must be a positive number, got {weight!r}")
    return {"name": entry["name"], "weight": weight, "kwargs": dict(entry.get("kwargs") or {})}


def _made(entry: Mapping[str, Any], where: str) -> TaskSource:
    try:
        return make_source(entry["name"], **entry["kwargs"])
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{where}: {error}") from error


def _whole(weights: Sequence[float]) -> list[int]:
    """Returns whole numbers in the same proportion, as the weights are written: 0.1 is a tenth."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


@lru_cache(maxsize=1024)
def _part_seed(seed: int, which: int) -> int:
    return Draws(seed, Mixture.name, which).below(2**63)


@lru_cache(maxsize=8)
def _order(seed: int, time_round: int, size: int) -> np.ndarray:
    return np.argsort(counter_words(seed, "mixture/order", size, index=time_round), kind="stable")


def _unless_none(combine: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    return None if None in values else combine(values)
