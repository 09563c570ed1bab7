"""Verifiers: the functions that judge a completion, how they are named, and what they may return.

A verifier is `fn(task, text) -> Reward | float | bool | dict`, pure and importable by name, because it runs in
worker processes. A class in its place is an environment, whose turns are judged (`environments.py`). This module knows
neither JAX nor the workers: they import it and start fast.
"""

import importlib
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from dynrl.tasks.base import near
from dynrl.tasks.environments import BUILT_IN_ENVIRONMENTS, Environment, TurnVerifier, as_float
from dynrl.types import Reward, Task

Verifier = Callable[[Task, str], Reward | float | bool | Mapping[str, float]]

MAX_INTEGER_DIGITS = 1_000  # below the interpreter's own limit, and above any sensible answer
MAX_COMPONENTS = 64
MAX_NAME_CHARS = 200

# What may travel as `info`: it is only shown to people, and a verifier may put anything into it.
MAX_INFO_ENTRIES = 256
MAX_INFO_DEPTH = 6
MAX_INFO_CHARS = 8_000

_INTEGER = re.compile(rf"[+-]?[0-9]{{1,{MAX_INTEGER_DIGITS}}}")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


class Unparsable(ValueError):
    """Raised by a verifier that cannot read the answer: a live rollout with score 0, counted."""


def exact_match(task: Task, text: str) -> Reward:
    """1 when the text equals the answer, white space around either aside."""
    return Reward(float(text.strip() == task.answer.strip()))


def integer_match(task: Task, text: str) -> Reward:
    """1 when the whole text is the answer's integer: an optional sign and ASCII digits, compared as integers.

    Raises:
      Unparsable: the text is not an integer, or has more than MAX_INTEGER_DIGITS digits.
      ValueError: the task's answer is not an integer.
    """
    if (expected := _integer(task.answer)) is None:
        raise ValueError(f"task {task.task_id}: the answer {_REPR.repr(task.answer)} is not an integer")
    if (given := _integer(text)) is None:
        raise Unparsable(f"not an integer of at most {MAX_INTEGER_DIGITS} digits: {_REPR.repr(text)}")
    return Reward(float(given == expected))


def prefix_fraction(task: Task, text: str) -> Reward:
    """Partial credit: the share of leading characters that are right, of the longer of text and answer.

    Only the answer itself scores 1; the component `exact` says whether it did.
    """
    given, expected = text.strip(), task.answer.strip()
    pairs = enumerate(zip(given, expected, strict=False))
    shorter = min(len(given), len(expected))
    num_right = next((i for i, (left, right) in pairs if left != right), shorter)
    share = num_right / max(len(given), len(expected)) if given or expected else 1.0
    return Reward(share, {"prefix": share, "exact": float(given == expected)})


# Paths, so that a verifier's libraries are imported where it is used.
BUILT_IN: dict[str, str] = {
    **BUILT_IN_ENVIRONMENTS,
    "countdown": "dynrl.tasks.countdown:countdown",
    "exact_match": "dynrl.tasks.rewards:exact_match",
    "gsm8k": "dynrl.tasks.gsm8k:gsm8k",
    "integer_match": "dynrl.tasks.rewards:integer_match",
    "math_verify": "dynrl.tasks.math_answers:math_verify",
    "prefix_fraction": "dynrl.tasks.rewards:prefix_fraction",
    "program_output": "dynrl.tasks.proposal_kinds.program:program_output",
    "proposal": "dynrl.tasks.proposal_kinds.verifier:proposal",
    "reasoning_gym": "dynrl.tasks.reasoning_gym_entries:reasoning_gym",
}


def resolve_verifier(name_or_path: str) -> Verifier:
    """Finds a verifier by its built-in name or by 'package.module:function'; of an environment, its `TurnVerifier`.

    Raises:
      TypeError: the argument is not a string, what it names is not callable, or it is a class but no environment.
      ValueError: no such name, module or attribute; the message lists names and near matches.
    """
    if not isinstance(name_or_path, str):
        raise TypeError(f"a verifier is named by a string, not by {_REPR.repr(name_or_path)}")
    given, name_or_path = name_or_path, BUILT_IN.get(name_or_path, name_or_path)
    if ":" not in name_or_path:
        raise ValueError(
            f"no verifier {name_or_path!r}{near(name_or_path, BUILT_IN)}; built in: {', '.join(sorted(BUILT_IN))}; "
            "your own is named 'package.module:function'"
        )
    module_name, _, attribute = name_or_path.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"verifier {name_or_path!r}: expected 'package.module:function'")
    found = _import(module_name, name_or_path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = near(part, [name for name in dir(found) if not name.startswith("__")])
            raise ValueError(f"verifier {name_or_path!r}: {module_name!r} has no attribute {attribute!r}{close}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"verifier {name_or_path!r} is not callable: {_REPR.repr(found)}")
    return TurnVerifier(given, found) if inspect.isclass(found) else cast(Verifier, found)


def find_environment(name_or_path: str) -> type[Environment] | None:
    """Returns the environment that a verifier's name stands for, or None where it is a function.

    Of the built-in names only environments are imported; 'package.module:attribute' is always imported, in this
    process.

    Raises:
      TypeError, ValueError: as `resolve_verifier`.
    """
    if name_or_path in BUILT_IN and name_or_path not in BUILT_IN_ENVIRONMENTS:
        return None
    verifier = resolve_verifier(name_or_path)
    return verifier.environment if isinstance(verifier, TurnVerifier) else None


def as_reward(value: Any, verifier_name: str, task_id: int) -> Reward:
    """Turns what a verifier returned into a `Reward` of plain floats.

    A bool becomes 0 or 1; of a mapping, "score" is the score and the other entries are components. NaN and
    infinity pass: whoever asks decides what they mean. `info` is cut to a bounded size.

    Raises:
      TypeError: a value is not numeric.
      ValueError: a mapping without "score", a number beyond float range, or too many or misnamed components.
    """
    where = f"verifier {verifier_name!r}, task {task_id}"
    if isinstance(value, Reward):
        score, components, info = value
    elif isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"{where}: the returned mapping has no 'score': {_REPR.repr(value)}")
        score, info = value["score"], {}
        components = {name: number for name, number in value.items() if name != "score"}
    else:
        score, components, info = value, {}, {}
    if not isinstance(components, Mapping) or not isinstance(info, Mapping):
        raise TypeError(f"{where}: components and info must be mappings, got {_REPR.repr(value)}")
    if len(components) > MAX_COMPONENTS:
        raise ValueError(f"{where}: {len(components)} components, at most {MAX_COMPONENTS} allowed")
    for name in components:
        if not isinstance(name, str) or name == "score" or len(name) > MAX_NAME_CHARS:
            raise ValueError(f"{where}: a component cannot be named {_REPR.repr(name)}")
    return Reward(
        as_float(score, "score", where),
        {str(name): as_float(number, f"component {name!r}", where) for name, number in components.items()},
        cut_info(info) if info else {},
    )


def metric_value(reward: Reward, metric: str = "score") -> float:
    """The value of the configured metric: the score, or the component of that name.

    Raises:
      ValueError: the reward has no such component.
    """
    if metric == "score":
        return reward.score
    if metric not in reward.components:
        raise ValueError(f"no component {metric!r} in the reward; there are: {', '.join(reward.components) or 'none'}")
    return reward.components[metric]


def cut_info(info: Mapping[Any, Any]) -> dict[str, Any]:
    """A JSON-able copy of `info` of bounded size; the entry "cut" says when something was left out."""
    cutter = _InfoCutter()
    result = cutter.copy(info, 0)
    if cutter.lost:
        result["cut"] = f"{cutter.lost} of the verifier's info entries were shortened, replaced or left out"
    return result


class _InfoCutter:
    """Copies nested values until the budgets for entries and characters are spent."""

    def __init__(self) -> None:
        self.entries = MAX_INFO_ENTRIES
        self.chars = MAX_INFO_CHARS
        self.lost = 0

    def copy(self, value: Any, depth: int) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int) and value.bit_length() <= 64:
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if isinstance(value, (Mapping, list, tuple)) and depth < MAX_INFO_DEPTH:
            return self._container(value, depth)
        self.lost += 1
        return f"<{type(value).__name__[:100]}>"

    def _text(self, text: str) -> str:
        kept = text[: self.chars]
        self.lost += len(kept) < len(text)
        self.chars -= len(kept)
        return kept

    def _container(self, value: Any, depth: int) -> Any:
        mapping = isinstance(value, Mapping)
        names, items = {}, []
        for num_taken, entry in enumerate(value.items() if mapping else value):
            if self.entries == 0:
                self.lost += len(value) - num_taken
                break
            self.entries -= 1
            if mapping:
                name = entry[0] if isinstance(entry[0], (str, int, float)) else f"<{type(entry[0]).__name__[:100]}>"
                names[self._text(name if isinstance(name, str) else _REPR.repr(name))] = self.copy(entry[1], depth + 1)
            else:
                items.append(self.copy(entry, depth + 1))
        return names if mapping else items


def _integer(text: str) -> int | None:
    text = text.strip()
    return int(text) if _INTEGER.fullmatch(text) else None


def _import(module_name: str, path: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(missing + "."):
            raise ValueError(f"verifier {path!r}: importing {module_name!r} failed: {error}") from error
        raise ValueError(
            f"verifier {path!r}: there is no module {missing!r} on sys.path (install it, or add its folder)"
        ) from error
    except Exception as error:
        message = f"verifier {path!r}: importing {module_name!r} raised {type(error).__name__}: {error}"
        raise ValueError(message) from error
