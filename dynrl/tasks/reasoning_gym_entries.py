"""The package reasoning-gym (extra `tasks`), as the source and the verifier `reasoning_gym` use it.

Its scorers give partial credit, some evaluate the answer as Python, and an entry can take seconds to make. So the
verifier binarises, refuses what could be code, and gets the entry with the task instead of making it again.
"""

import ast
import contextlib
import dataclasses
import hashlib
import json
import random
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from dynrl.tasks.base import near
from dynrl.tasks.extraction import MAX_TAIL_CHARS, tagged
from dynrl.tasks.rewards import Unparsable
from dynrl.types import Reward, Task

try:
    from reasoning_gym.coaching.base_curriculum import DefaultCurriculumContext, RangeAttributeMode
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS, create_curriculum, has_curriculum
except ImportError as error:
    raise ImportError("'reasoning_gym' needs more packages: pip install 'dynrl[tasks]'") from error

Difficulty = int | Mapping[str, int] | None

GENERATORS = frozenset(DATASETS) - {"composite"}  # that one mixes others, which is the source `mixture`'s business
# Draw from sets of strings, whose order changes with every start of Python unless PYTHONHASHSEED is set.
HASH_ORDERED = frozenset(
    {"codeio", "isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
_TABLE_SIZES = {"acre": 5, "gsm_symbolic": 1, "list_functions": 1}  # draw in their constructor, for this many items
_SEED_BITS = {"pool_matrix": 32}  # seeds NumPy's global generator
_one_at_a_time = threading.Lock()
_CONTEXT = DefaultCurriculumContext(mode=RangeAttributeMode.UPPER_BOUND)
_LITERALS = (str, int, float, complex, bool, type(None))

# Scorers that run the answer through eval, for partial credit: without a call, that does nothing.
_EVALUATING = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
# Scorers that run it through sympy's parse_expr, which evaluates too: only mathematics may pass.
_SYMBOLIC = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_MATHEMATICS = re.compile(r"[0-9A-Za-z+\-*/^().,=\s]*", re.ASCII)
_FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh", "tanh", "asinh", "acosh",
     "atanh", "exp", "log", "ln", "sqrt", "pi", "erf", "Abs"]
)  # fmt: skip


def reasoning_gym(task: Task, text: str, threshold: float = 1.0) -> Reward:
    """1 when reasoning-gym's own scorer gives the completion at least `threshold`; its score is component "partial".

    The scorer sees what stands in the last `<answer>...</answer>`, or else the whole text, stripped. A verifier of
    your own that calls this one with a lower threshold accepts partial credit; mind that wrong answers get some, such
    as 0.67 for -40 in place of -4. The scorers are reasoning-gym's, and some are lenient: puzzle24 takes any four
    numbers of the right size.

    Raises:
      Unparsable: the answer is too long, made the scorer raise, or could be code for a scorer that evaluates it.
      ValueError: the task does not carry an entry of reasoning-gym.
    """
    try:
        generator, config, difficulty, entry = (
            task.metadata[key] for key in ("generator", "config", "difficulty", "entry")
        )
        made = {"question": task.prompt, **_parsed(entry)}
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"task {task.task_id}: its metadata hold no entry of reasoning-gym: {error!r}") from error
    answer = tagged(text)
    answer = text.strip() if answer is None else answer
    if len(answer) > MAX_TAIL_CHARS:
        raise Unparsable(f"an answer of {len(answer)} characters")
    if (generator in _EVALUATING and "(" in answer) or (generator in _SYMBOLIC and not _is_mathematics(answer)):
        raise Unparsable(f"could be code: {answer[:80]!r}")
    dataset = _dataset(generator, json.dumps(config), json.dumps(difficulty))
    try:
        score = float(dataset.score_answer(answer, made))
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # reasoning-gym's scorers raise whatever they stumble over
        raise Unparsable(f"the scorer raised {error!r:.200}") from error
    return Reward(float(score >= threshold), {"partial": score})


def make_dataset(generator: str, config: Mapping[str, Any], difficulty: Difficulty) -> ProceduralDataset:
    """Returns the dataset of a generator, for `make_entry` and for scoring.

    Args:
      generator: one of GENERATORS.
      config: fields of its configuration, which have the last word; neither seed nor size.
      difficulty: level of its curriculum, or levels by attribute, where the others stay at their default; None is the
        generator's default configuration. A level means the curriculum's values at that level alone, not up to it.

    Raises:
      ValueError: an unknown generator, field, attribute or level, with near matches; or values that it refuses.
    """
    made = _configuration(generator, config, difficulty)
    with _alone(0), _refusals(generator, config, difficulty):
        return DATASETS[generator][0](config=made)


def _configuration(generator: str, config: Mapping[str, Any], difficulty: Difficulty) -> Any:
    where = f"reasoning_gym generator {generator!r}"
    if generator not in GENERATORS:
        raise ValueError(f"unknown {where}{near(generator, GENERATORS)}; there are {', '.join(sorted(GENERATORS))}")
    _, config_class = DATASETS[generator]
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.name not in ("seed", "size")}
    for key in config:
        if key not in fields:
            raise ValueError(f"{where} has no field {key!r}{near(key, fields)}; it has {', '.join(fields)}")
    with _refusals(generator, config, difficulty):
        values = {} if difficulty is None else _curriculum_values(generator, difficulty, fields)
        for key, value in config.items():
            as_tuple = isinstance(value, list) and isinstance(fields[key].default, tuple)  # JSON has no tuples
            values[key] = tuple(value) if as_tuple else value
        made = config_class(**values, seed=0, size=_TABLE_SIZES.get(generator, 1))
        getattr(made, "validate", lambda: None)()
        return made


@contextlib.contextmanager
def _refusals(generator: str, config: Mapping[str, Any], difficulty: Difficulty) -> Iterator[None]:
    try:
        yield
    except (AssertionError, TypeError, ValueError) as error:
        where = f"reasoning_gym generator {generator!r}"
        raise ValueError(f"{where}, config {dict(config)}, difficulty {difficulty}: {error}") from error


def curriculum_size(generator: str) -> int:
    """Returns how many global levels the generator's curriculum has; 0 without one."""
    attributes = create_curriculum(generator).attributes if has_curriculum(generator) else {}
    return max((len(attribute.levels) for attribute in attributes.values()), default=0)


def curriculum_levels(generator: str, config: Mapping[str, Any]) -> list[int]:
    """Returns the global levels, in ascending order; some curricula have levels that their generator refuses."""
    levels = []
    for level in range(curriculum_size(generator)):
        with contextlib.suppress(ValueError):
            _configuration(generator, config, level)
            levels.append(level)
    return levels


def make_entry(generator: str, dataset: ProceduralDataset, number: int) -> dict[str, Any]:
    """Returns the entry with this number: a pure function of it and the dataset's configuration.

    reasoning-gym seeds an item with seed + index, so this one sum is all that tells items apart. Threads wait for each
    other here.

    Raises:
      Exception: whatever the generator raises where it finds no item.
    """
    if generator in _SEED_BITS:
        digest = hashlib.blake2b(str(number).encode()).digest()
        number = int.from_bytes(digest[: _SEED_BITS[generator] // 8], "little")
    with _alone(number):
        if generator in _TABLE_SIZES:
            return type(dataset)(config=dataclasses.replace(dataset.config, seed=number))[0]
        dataset.seed = dataset.config.seed = number  # survo reads the one, the others the other
        dataset.size = 1  # word_ladder lowers it where it finds no item
        return dataset[0]


def entry_text(entry: Mapping[str, Any]) -> str:
    """Returns a Python literal of the entry, all that can stand in one, for the task's metadata.

    The question is left out, which is the task's prompt. JSON would turn tuples to lists and keys to strings.
    """
    metadata = {}
    for key, value in entry["metadata"].items():
        with contextlib.suppress(TypeError):
            metadata[key] = _literal(value)
    return repr({"answer": entry["answer"], "metadata": metadata})


def _curriculum_values(generator: str, difficulty: int | Mapping[str, int], fields: Iterable[str]) -> dict[str, Any]:
    if not has_curriculum(generator):
        raise ValueError("it has no curriculum")
    curriculum = create_curriculum(generator)
    if isinstance(difficulty, Mapping):
        for name, level in difficulty.items():
            if name not in curriculum.attributes:
                close = near(name, curriculum.attributes)
                raise ValueError(f"no attribute {name!r}{close}; there are {', '.join(curriculum.attributes)}")
            curriculum.set_attr_level(name, level)
    else:
        num_levels = curriculum_size(generator)
        if not 0 <= difficulty < num_levels:
            raise ValueError(f"no level {difficulty}; its curriculum has 0 to {num_levels - 1}")
        curriculum.set_global_level(difficulty)
    made = curriculum.generate_configuration(context=_CONTEXT)
    return {name: getattr(made, name) for name in fields}


@lru_cache(maxsize=16)
def _parsed(entry: str) -> dict[str, Any]:
    return ast.literal_eval(entry)


@cache
def _dataset(generator: str, config: str, difficulty: str) -> ProceduralDataset:
    return make_dataset(generator, json.loads(config), json.loads(difficulty))


@contextlib.contextmanager
def _alone(seed: int) -> Iterator[None]:
    """Some generators draw from the interpreter's global generators, or seed them: theirs must be theirs alone.

    They are for one thread at a time. What this thread prints is dropped.
    """
    with _one_at_a_time, contextlib.redirect_stdout(_OthersOnly()):  # pyright: ignore[reportArgumentType]
        python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


class _OthersOnly:
    """Stdout without what this thread writes: other threads go on printing."""

    def __init__(self):
        self._stdout, self._silent = sys.stdout, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._silent else self._stdout.write(text)


def _literal(value: Any) -> Any:
    """Returns the value in the types that a literal has; TypeError where it cannot."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in (list, tuple, set):
        return type(value)(_literal(item) for item in value)
    if type(value) is dict:
        return {_literal(key): _literal(item) for key, item in value.items()}
    if type(value) not in _LITERALS or value != value or value in (float("inf"), float("-inf")):
        raise TypeError(f"no literal: {type(value).__name__}")
    return value


def _is_mathematics(answer: str) -> bool:
    names = re.findall("[A-Za-z][A-Za-z0-9]*", answer)
    return bool(_MATHEMATICS.fullmatch(answer)) and all(len(name) == 1 or name in _FUNCTIONS for name in names)
