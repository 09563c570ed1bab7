"""The source `reasoning_gym`: any generator of the package reasoning-gym (extra `tasks`) by name."""

import os
from collections.abc import Mapping, Sequence, Set
from typing import Any, Self

from dynrl.tasks.admission import json_copy
from dynrl.tasks.base import MAX_RETRIES, Draws, checked_level, task_hash
from dynrl.types import Task

MAX_INDEX = 2**32
_MAX_FAILURES = 10  # of a generator that finds no item; some take seconds


class ReasoningGym:
    """Tasks of one generator of reasoning-gym, 105 to choose from; `Task.source` is `reasoning_gym/<generator>`.

    reasoning-gym seeds an item with seed + index, so that neighbouring seeds share almost all items. Here that sum is
    2**42 * seed + 2**32 * draw + index: no two seeds ever share one, nor do two draws for one task. (pool_matrix takes
    32 bits only, and gets a hash of them.) The few generators that read global random state are given their own.

    The verifier `reasoning_gym` scores with the package's own scorer, also where the package knows no answer: the
    answers of boxnet, graph_color, propositional_logic, rubiks_cube and rush_hour are empty. codeio,
    isomorphic_strings, knight_swap, polynomial_multiplication, ransom_note and word_ladder need PYTHONHASHSEED to be
    set.

    Args:
      generator: the generator's name.
      config: fields of its configuration, which have the last word over `difficulty`.
      difficulty: a level of its curriculum, or a sequence of levels, of which each task draws one; or a mapping from
        attributes of the curriculum to levels. A level means the curriculum's values there alone, not up to there.
        A task's level is its curriculum level (of a mapping, the highest), or else the difficulty that the package
        states as a whole number, or 0.

    Raises:
      ImportError: the package is not installed.
      ValueError: no such generator, field, attribute or level, with near matches; or values that it refuses.
    """

    name = "reasoning_gym"
    alphabet = None
    max_prompt_chars = None
    max_answer_chars = None
    num_tasks = None

    def __init__(
        self,
        generator: str,
        config: Mapping[str, Any] | None = None,
        difficulty: int | Sequence[int] | Mapping[str, int] | None = None,
    ):
        # Imported here: it takes seconds, and most runs do without it.
        from dynrl.tasks import reasoning_gym_entries as entries

        self._entries = entries
        self._generator = generator
        self._config = json_copy(_listed(config or {}))
        self._difficulty = json_copy(_listed(difficulty))
        settings = self._difficulty if isinstance(self._difficulty, list) else [self._difficulty]
        if not settings:
            raise ValueError("reasoning_gym: difficulty is an empty sequence")
        self._settings = [(setting, entries.make_dataset(generator, self._config, setting)) for setting in settings]
        self._reachable: list[int] | None = None  # found when they are asked for: some generators take their time
        if generator in entries.HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise ValueError(
                f"reasoning_gym generator {generator!r} draws from sets of strings, whose order changes with every "
                "start of Python, and so would its tasks: set the environment variable PYTHONHASHSEED=0"
            )

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments that rebuild the source."""
        return {"generator": self._generator, "config": self._config, "difficulty": self._difficulty}

    @property
    def levels(self) -> tuple[int, ...]:
        """Those of the settings; without a difficulty, that of the first task."""
        if self._difficulty is None:
            return (self.task(0, 0).level,)
        return tuple(sorted({_level(setting, {}) for setting, _ in self._settings}))

    @property
    def verifiers(self) -> dict[str, str]:
        """The verifier that uses the package's own scorers."""
        return {self._source: "reasoning_gym"}

    def reachable_levels(self) -> list[int]:
        """Returns the levels of the generator's curriculum, without those that the generator refuses.

        Raises:
          ValueError: if the generator has no curriculum, or the difficulty is not a level of it nor a sequence of them.
        """
        if self._reachable is None:
            if not self._entries.curriculum_size(self._generator):
                raise ValueError(f"{self._source} has no curriculum: its difficulty cannot be chosen")
            if not all(isinstance(setting, int) for setting, _ in self._settings):
                raise ValueError(
                    f"{self._source}: with difficulty {self._difficulty!r} the levels of its tasks are not those of "
                    "its curriculum: choose a difficulty such as 0 or (0, 1)"
                )
            self._reachable = self._entries.curriculum_levels(self._generator, self._config)
        return self._reachable

    def at_level(self, level: int) -> "ReasoningGym":
        """Returns the source of tasks at this curriculum level; ValueError where it is not reachable."""
        return ReasoningGym(self._generator, self._config, checked_level(self, level))

    def without(self, exclude: Set[str]) -> Self:
        """Returns itself: `task` draws again where a prompt is excluded."""
        del exclude
        return self

    def task(self, seed: int, index: int, exclude: Set[str] = frozenset()) -> Task:
        """Returns the task at (seed, index), with task_id -1, whose `task_hash` is not in `exclude`.

        Raises:
          IndexError: if the index is not below 2**32.
          ValueError: if `MAX_RETRIES` further draws all lie in `exclude`, or ten raised an error.
        """
        if not 0 <= index < MAX_INDEX:
            raise IndexError(f"{self._source}: the index must lie in [0, {MAX_INDEX}), got {index}")
        setting, dataset = self._setting(seed, index)
        num_failed = 0
        for draw in range(MAX_RETRIES + 1):
            try:
                number = (seed * 2**10 + draw) * MAX_INDEX + index
                entry = self._entries.make_entry(self._generator, dataset, number)
            except Exception as error:  # a generator that finds no item raises whatever it likes
                num_failed += 1
                if num_failed < _MAX_FAILURES:
                    continue
                raise ValueError(f"{self._source}: {num_failed} draws failed, the last with {error!r}") from error
            if entry["question"] and (not exclude or task_hash(entry["question"]) not in exclude):
                return self._made(entry, setting)
        raise ValueError(
            f"{self._source}: all {MAX_RETRIES + 1} draws at difficulty {setting} (seed {seed}, index {index}) are "
            f"among the {len(exclude)} excluded tasks; use fewer evaluation tasks, or a config with more of them"
        )

    def kind(self, seed: int, index: int) -> tuple[str, int] | None:
        """Returns source and level of the task at (seed, index); None without a difficulty: only the task says then."""
        setting, _ = self._setting(seed, index)
        return None if setting is None else (self._source, _level(setting, {}))

    def _setting(self, seed: int, index: int) -> tuple[Any, Any]:
        return self._settings[Draws(seed, self.name, index).below(len(self._settings))]

    @property
    def _source(self) -> str:
        return f"{self.name}/{self._generator}"

    def _made(self, entry: Mapping[str, Any], setting: Any) -> Task:
        metadata = {
            "generator": self._generator,
            "config": self._config,
            "difficulty": setting,
            "entry": self._entries.entry_text(entry),
        }
        level = _level(setting, entry["metadata"])
        return Task(-1, self._source, entry["question"], entry["answer"] or "", level, metadata=metadata)


def _level(setting: int | Mapping[str, int] | None, metadata: Mapping[str, Any]) -> int:
    if isinstance(setting, Mapping):
        return max(setting.values(), default=0)
    if setting is not None:
        return setting
    stated = metadata.get("difficulty")
    if isinstance(stated, Mapping):
        stated = stated.get("difficulty")
    return int(stated) if isinstance(stated, (int, float)) and stated == int(stated) else 0


def _listed(value: Any) -> Any:
    """Returns the value with tuples, which configurations hold and JSON does not, as lists."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value
