"""Generators: new tasks from what succeeded and what failed."""

from collections.abc import Mapping
from typing import Any

from dynrl.tasks.generators.base import TaskGenerator
from dynrl.tasks.sources import build_named

BUILT_IN_GENERATORS: Mapping[str, str] = {
    "mutate_hardest": "dynrl.tasks.generators.mutate_hardest:MutateHardest",
    "procedural_curriculum": "dynrl.tasks.generators.curriculum:ProceduralCurriculum",
    "reappend": "dynrl.tasks.generators.reappend:Reappend",
}


def make_generator(name_or_path: str, **kwargs: Any) -> TaskGenerator:
    """Returns a task generator.

    Args:
      name_or_path: `mutate_hardest`, `procedural_curriculum`, `reappend`, or `package.module:Class`.
      **kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches; and whatever the class finds wrong.
      TypeError: at an argument that the class does not take, or a class that is no `TaskGenerator`.
    """
    made = build_named("task generator", name_or_path, BUILT_IN_GENERATORS, (), kwargs)
    if not isinstance(made, TaskGenerator):
        raise TypeError(f"task generator {name_or_path!r} is no dynrl.tasks.generators.base.TaskGenerator: derive it")
    return made
