"""Generators by name, and the one that only copies."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dynrl.tasks.generators import BUILT_IN_GENERATORS, make_generator
from dynrl.tasks.generators.base import GeneratorContext, TaskGenerator
from dynrl.tasks.generators.curriculum import ProceduralCurriculum
from dynrl.tasks.generators.reappend import Reappend
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.store import TaskStore


class NoGenerator:
    def propose(self, context):
        return []


def asked(store, max_tasks=100):
    unused: Any = None
    rng = np.random.default_rng(0)
    return GeneratorContext(
        1, 1, rng, TaskOutcomes(), store.view(len(store)), DigitSorting(), max_tasks, unused, unused
    )


def test_generators_by_name_and_by_path():
    assert isinstance(make_generator("reappend", num_copies=3), Reappend)
    assert isinstance(make_generator("procedural_curriculum"), ProceduralCurriculum)
    assert isinstance(make_generator("dynrl.tasks.generators.reappend:Reappend"), TaskGenerator)
    assert {"mutate_hardest", "procedural_curriculum", "reappend"} <= set(BUILT_IN_GENERATORS)


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        ("reapend", {}, ValueError, r"unknown task generator 'reapend' \(did you mean 'reappend'"),
        ("reappend", {"copies": 2}, TypeError, r"'copies' \(did you mean 'num_copies'\?\); it takes num_copies"),
        ("reappend", {"num_copies": 0}, ValueError, "reappend: num_copies must be at least 1, got 0"),
        (f"{__name__}:NoGenerator", {}, TypeError, r"NoGenerator' is no dynrl\.tasks\.generators\.base\.TaskGenerator"),
    ],
)
def test_wrong_names_and_arguments_are_named(name, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_generator(name, **kwargs)


def test_the_first_task_comes_again():
    store = TaskStore(DigitSorting(), 0, 5)
    (first,) = store.get([0])
    copies = Reappend(3).propose(asked(store))
    assert copies == [dataclasses.replace(first, task_id=-1, parents=(0,))] * 3
    assert store.append(copies) == range(5, 8)
    assert len(Reappend(3).propose(asked(store, max_tasks=2))) == 2
    assert Reappend().propose(asked(TaskStore(DigitSorting(), 0, 0))) == []
