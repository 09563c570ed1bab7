import importlib
import subprocess
import sys

import pytest

from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.rewards import BUILT_IN, as_reward, resolve_verifier
from dynrl.tasks.sources import BUILT_IN_SOURCES, make_source


class NoSource:
    name = "none"


def test_built_in_sources_and_paths():
    assert make_source("digit_sorting", max_length=4) == DigitSorting(max_length=4)
    assert make_source("arithmetic", operators="+") == Arithmetic(operators="+")
    assert make_source("dynrl.tasks.procedural:DigitSorting", min_length=3) == DigitSorting(min_length=3)


def test_kwargs_rebuild_the_source():
    for source in (DigitSorting(3, 5, 7), Arithmetic(2, 3, "-*", 3, 4)):
        assert make_source(source.name, **source.kwargs) == source


def test_every_built_in_source_and_verifier_is_there():
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    pytest.importorskip("pyarrow")
    for name, path in BUILT_IN_SOURCES.items():
        module, _, attribute = path.partition(":")
        assert getattr(importlib.import_module(module), attribute).name == name
    for name in BUILT_IN:
        assert callable(resolve_verifier(name))


def test_sources_name_verifiers_that_exist():
    for name in ("arithmetic", "countdown", "digit_sorting"):
        source = make_source(name)
        assert source.verifiers.keys() == {source.task(0, 0).source}
        for verifier in source.verifiers.values():
            task = source.task(0, 0)
            assert as_reward(resolve_verifier(verifier)(task, task.answer), verifier, 0).score == 1.0


def test_importing_the_look_up_imports_no_optional_package():
    code = (
        "import sys\nfrom dynrl.tasks.sources import make_source\nfrom dynrl.tasks.verifiers import Verifiers\n"
        "make_source('mixture', sources=[{'name': 'digit_sorting'}])\n"
        "assert not {'reasoning_gym', 'math_verify', 'sympy', 'pyarrow', 'jax'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        (
            "digit_sort",
            {},
            ValueError,
            "did you mean 'digit_sorting'.*arithmetic, calculator, countdown.*package.module:Class",
        ),
        ("arithmetic", {"max_digit": 3}, TypeError, "'max_digit' .did you mean 'max_digits'.*min_terms, max_terms"),
        ("no.such.module:Class", {}, ValueError, "cannot import 'no.such.module'"),
        ("dynrl.tasks.procedural:DigitSort", {}, ValueError, "no class 'DigitSort'.*did you mean 'DigitSorting'"),
        (f"{__name__}:NoSource", {}, TypeError, "lacks kwargs, levels, .*num_tasks, verifiers, task, without"),
        ("dynrl.models.tokenizer:CharTokenizer", {}, TypeError, "missing a required argument: 'alphabet'"),
        (":Class", {}, ValueError, "cannot import ''"),
    ],
)
def test_errors_name_what_is_wrong(name, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_source(name, **kwargs)
