import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.base import Draws, task_hash
from dynrl.tasks.procedural import Arithmetic, DigitSorting

SOURCES = [DigitSorting(), Arithmetic(), Arithmetic(max_digits=3, max_terms=4), Arithmetic(operators="-")]


def prompts(source, seed, num_tasks):
    return [source.task(seed, index).prompt for index in range(num_tasks)]


def test_tasks_are_pinned_across_processes_and_versions():
    assert prompts(DigitSorting(), 0, 4) == ["991289>", "896>", "660849124>", "42>"]
    assert prompts(Arithmetic(), 0, 4) == ["25*81=", "2*9=", "35*46=", "7-2="]


def test_another_process_makes_the_same_tasks_without_importing_jax():
    code = (
        "import sys, dynrl.tasks.store, dynrl.tasks.selectors, dynrl.models.tokenizer\n"
        "from dynrl.tasks.base import task_hash\n"
        "from dynrl.tasks.procedural import DigitSorting\n"
        "assert 'jax' not in sys.modules\n"
        "print(*[DigitSorting().task(7, i).prompt for i in range(50)], task_hash('x  y'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {" ".join([*prompts(DigitSorting(), 7, 50), task_hash("x y")]) + "\n"}


@pytest.mark.parametrize("source", SOURCES, ids=repr)
@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**63))
def test_a_task_is_pure_correct_and_within_the_declared_bounds(source, seed, index):
    task = source.task(seed, index)
    assert task == source.task(seed, index)
    assert task.task_id == -1
    assert task.source == source.name
    assert task.level in source.levels
    assert set(task.prompt + task.answer) <= source.alphabet
    assert len(task.prompt) <= source.max_prompt_chars
    assert len(task.answer) <= source.max_answer_chars
    if isinstance(source, DigitSorting):
        assert task.prompt[-1] == ">"
        assert list(task.answer) == sorted(task.prompt[:-1])
        assert len(task.answer) == task.level
    else:
        assert task.prompt[-1] == "="
        expression = task.prompt[:-1]
        assert task.answer == str(eval(expression))
        terms = expression.replace("+", " ").replace("-", " ").replace("*", " ").split()
        assert task.level == 10 * max(map(len, terms)) + len(terms)


def test_answer_bounds_are_reached():
    # 9*9*9 = 729; 0-9-9 = -18; 9+9 = 18; 9-0 = 9 against 0-9 = -9; 0-9*9 = -81, as long as 729.
    for operators, terms, longest in (("*", 3, 3), ("-", 3, 3), ("+", 2, 2), ("-", 2, 2), ("-*", 3, 3)):
        source = Arithmetic(max_digits=1, operators=operators, min_terms=terms, max_terms=terms)
        assert source.max_answer_chars == longest
        assert max(len(source.task(0, i).answer) for i in range(2_000)) == longest


def test_levels_are_uniform():
    source = DigitSorting()
    levels = [source.task(3, index).level for index in range(5_000)]
    # 500 expected of each, standard deviation 21.
    assert all(400 < levels.count(level) < 600 for level in source.levels)


@pytest.mark.parametrize("seed", [0, 1, 41, 2**32])
def test_neighbouring_seeds_share_no_more_tasks_than_chance(seed):
    # At 8 to 11 digits, 1,000 against 1,000 tasks are expected to share 10**6 / 16 * 10**-8 = 0.0006.
    source = DigitSorting(min_length=8)
    assert not set(prompts(source, seed, 1_000)) & set(prompts(source, seed + 1, 1_000))
    # At 4 digits only, a prompt of one seed is among the other's 1,000 with probability 1 - .9999**1000 = .095.
    source = DigitSorting(min_length=4, max_length=4)
    ours, theirs = prompts(source, seed, 1_000), set(prompts(source, seed + 1, 1_000))
    assert 50 < sum(prompt in theirs for prompt in ours) < 140


def test_excluded_prompts_are_avoided_at_the_same_level():
    source = DigitSorting(min_length=2, max_length=3)
    plain = [source.task(5, index) for index in range(300)]
    exclude = frozenset(task_hash(task.prompt) for task in plain[:50])
    clear = [source.task(5, index, exclude) for index in range(300)]
    assert not exclude & {task_hash(task.prompt) for task in clear}
    assert [task.level for task in clear] == [task.level for task in plain]
    untouched = [i for i, task in enumerate(plain) if task_hash(task.prompt) not in exclude]
    assert [clear[i] for i in untouched] == [plain[i] for i in untouched]


def test_an_exhausted_level_is_an_error_that_says_what_to_change():
    source = DigitSorting(min_length=1, max_length=1, num_symbols=2)
    exclude = frozenset({task_hash("0>"), task_hash("1>")})
    with pytest.raises(ValueError, match=r"digit_sorting.*level 1 .*fewer evaluation tasks, or raise min_length"):
        source.task(0, 0, exclude)


def test_task_hash_ignores_white_space_and_unicode_form():
    assert task_hash("a b") == task_hash("  a \n\t b ") == task_hash("a\N{NO-BREAK SPACE}b")
    assert task_hash("\N{FULLWIDTH DIGIT ONE}") == task_hash("1")
    assert task_hash("ab") != task_hash("a b")
    assert len(task_hash("\ud800")) == 32


def test_draws_are_uniform_and_go_on_past_one_block():
    draws = Draws(0, "test", 0)
    values = [draws.below(3) for _ in range(3_000)]
    assert all(900 < values.count(value) < 1_100 for value in range(3))  # 1,000 expected, standard deviation 26
    assert values != [draws.below(3) for _ in range(3_000)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DigitSorting(min_length=0), "1 <= min_length"),
        (lambda: DigitSorting(min_length=3, max_length=2), "min_length <= max_length"),
        (lambda: DigitSorting(num_symbols=11), "num_symbols <= 10"),
        (lambda: Arithmetic(min_digits=2, max_digits=1), "min_digits <= max_digits"),
        (lambda: Arithmetic(max_terms=10), "max_terms <= 9"),
        (lambda: Arithmetic(operators="/"), "operators"),
        (lambda: Arithmetic(operators=""), "operators"),
        (lambda: Arithmetic(operators="++"), "operators"),
    ],
)
def test_impossible_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
