"""Task sources by name, and the look-up that every part named in a configuration shares."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dynrl.tasks.base import TaskSource, near

BUILT_IN_SOURCES: Mapping[str, str] = {
    "arithmetic": "dynrl.tasks.procedural:Arithmetic",
    "calculator": "dynrl.tasks.calculator:CalculatorSums",
    "countdown": "dynrl.tasks.countdown:Countdown",
    "digit_sorting": "dynrl.tasks.procedural:DigitSorting",
    "jsonl": "dynrl.tasks.files:Jsonl",
    "mixture": "dynrl.tasks.mixture:Mixture",
    "parquet": "dynrl.tasks.parquet:Parquet",
    "reasoning_gym": "dynrl.tasks.reasoning_gym:ReasoningGym",
    "self_propose": "dynrl.tasks.proposal_kinds.source:ProposerTasks",
}
_SOURCE_MEMBERS = (
    "name", "kwargs", "levels", "alphabet", "max_prompt_chars", "max_answer_chars", "num_tasks", "verifiers", "task",
    "without",
)  # fmt: skip

_ABSENT = object()


def make_source(name_or_path: str, **kwargs: Any) -> TaskSource:
    """Returns a task source.

    Args:
      name_or_path: a built-in source's name, or `package.module:Class`.
      **kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches; and whatever the class finds wrong.
      TypeError: at an argument that the class does not take, or a class that is no `TaskSource`.
    """
    return build_named("task source", name_or_path, BUILT_IN_SOURCES, _SOURCE_MEMBERS, kwargs)


def build_named(
    kind: str,
    name_or_path: str,
    built_in: Mapping[str, str],
    members: Iterable[str],
    kwargs: Mapping[str, Any],
) -> Any:
    """Builds what a configuration names.

    Args:
      kind: what is built, for the messages.
      name_or_path: one of `built_in`, or `package.module:Class`.
      built_in: paths of classes, `package.module:Class`, by name; imported when they are asked for.
      members: attributes that the result must have.
      kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches.
      TypeError: at an argument that the class does not take or misses, or a result without one of `members`.
    """
    if ":" not in name_or_path and name_or_path not in built_in:
        raise ValueError(
            f"unknown {kind} {name_or_path!r}{near(name_or_path, built_in)}; "
            f"built in are {', '.join(sorted(built_in))}, and 'package.module:Class' names another"
        )
    factory = _imported(kind, built_in.get(name_or_path, name_or_path))
    _check_kwargs(f"{kind} {name_or_path!r}", factory, kwargs)
    made = factory(**kwargs)
    # Statically: the value of a property may take its time.
    missing = [member for member in members if inspect.getattr_static(made, member, _ABSENT) is _ABSENT]
    if missing:
        raise TypeError(f"{kind} {name_or_path!r} lacks {', '.join(missing)}")
    return made


def _imported(kind: str, path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{kind} {path!r}: cannot import {module_name!r}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        close = near(attribute, [name for name, value in vars(module).items() if inspect.isclass(value)])
        raise ValueError(f"{kind} {path!r}: module {module_name!r} has no class {attribute!r}{close}")
    return factory


def _check_kwargs(what: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(factory)
    parameters = signature.parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [] if open_ended else [key for key in kwargs if key not in accepted]
    if unknown:
        named = ", ".join(f"{key!r}{near(key, accepted)}" for key in unknown)
        raise TypeError(f"{what} takes no argument {named}; it takes {', '.join(accepted) or 'none'}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise TypeError(f"{what}: {error}; it takes {', '.join(accepted) or 'none'}") from error
