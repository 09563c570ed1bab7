import pytest

from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.sources import make_source


class NoSource:
    name = "none"


def test_built_in_sources_and_paths():
    assert make_source("digit_sorting", max_length=4) == DigitSorting(max_length=4)
    assert make_source("arithmetic", operators="+") == Arithmetic(operators="+")
    assert make_source("dynrl.tasks.procedural:DigitSorting", min_length=3) == DigitSorting(min_length=3)


def test_kwargs_rebuild_the_source():
    for source in (DigitSorting(3, 5, 7), Arithmetic(2, 3, "-*", 3, 4)):
        assert make_source(source.name, **source.kwargs) == source


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "message"),
    [
        ("digit_sort", {}, ValueError, "did you mean 'digit_sorting'.*arithmetic, digit_sorting.*package.module:Class"),
        ("arithmetic", {"max_digit": 3}, TypeError, "'max_digit' .did you mean 'max_digits'.*min_terms, max_terms"),
        ("no.such.module:Class", {}, ValueError, "cannot import 'no.such.module'"),
        ("dynrl.tasks.procedural:DigitSort", {}, ValueError, "no class 'DigitSort'.*did you mean 'DigitSorting'"),
        (f"{__name__}:NoSource", {}, TypeError, "lacks kwargs, levels, alphabet, .*task"),
        ("dynrl.models.tokenizer:CharTokenizer", {}, TypeError, "missing a required argument: 'alphabet'"),
        (":Class", {}, ValueError, "cannot import ''"),
    ],
)
def test_errors_name_what_is_wrong(name, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_source(name, **kwargs)
