"""Mixtures: proportions, purity, finite and endless sources together."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.base import task_hash
from dynrl.tasks.mixture import Mixture
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore, make_frozen

SORTING = {"name": "digit_sorting", "kwargs": {"min_length": 6}}
SUMS = {"name": "arithmetic", "kwargs": {"max_digits": 4}}
COUNTDOWN = {"name": "countdown"}


@pytest.fixture
def rows(tmp_path):
    """Makes a finite source of n rows; their prompts are its letter and a number."""

    def make(letter, n, **entry):
        path = tmp_path / f"{letter}.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{letter}{i}", "answer": str(i)}) + "\n" for i in range(n)))
        return {"name": "jsonl", "kwargs": {"path": str(path), "source": letter}, **entry}

    return make


def weighted(entry, weight):
    return {**entry, "weight": weight}


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.integers(1, 60) | st.sampled_from([0.1, 0.25, 0.7]), min_size=1, max_size=6))
def test_every_prefix_is_in_proportion_and_ordinals_are_consecutive(weights):
    mixture = Mixture([weighted(SORTING, weight) for weight in weights])
    counts = Counter()
    for index in range(200):
        which, ordinal = mixture._place(index)
        assert ordinal == counts[which]
        counts[which] += 1
        for i, weight in enumerate(weights):
            # Each source rounds what the ones before it left, by half a task at most.
            assert abs(counts[i] - (index + 1) * weight / sum(weights)) <= 0.5 + len(weights) / 2


def test_shares_are_exact_over_a_period():
    mixture = make_source("mixture", sources=[weighted(SORTING, 0.7), weighted(SUMS, 0.2), weighted(COUNTDOWN, 0.1)])
    tasks = [mixture.task(0, index) for index in range(50)]
    assert Counter(task.source for task in tasks) == {"digit_sorting": 35, "arithmetic": 10, "countdown": 5}
    assert mixture.num_tasks is None
    assert mixture.verifiers == {
        "digit_sorting": "exact_match", "arithmetic": "integer_match", "countdown": "countdown"
    }  # fmt: skip


def test_tasks_are_pure_and_sources_of_one_kind_differ():
    mixture = make_source("mixture", sources=[SORTING, SORTING])
    tasks = [mixture.task(3, index) for index in range(100)]
    assert [mixture.task(3, index) for index in reversed(range(100))] == tasks[::-1]
    assert len({task.prompt for task in tasks}) == 100  # the same source twice: each has its own seed
    assert not {task.prompt for task in tasks} & {mixture.task(4, index).prompt for index in range(100)}


def test_what_a_mixture_says_of_itself_is_the_union():
    mixture = make_source("mixture", sources=[SORTING, SUMS])
    sorting, sums = (make_source(entry["name"], **entry["kwargs"]) for entry in (SORTING, SUMS))
    assert mixture.alphabet == (sorting.alphabet or set()) | (sums.alphabet or set())
    assert mixture.max_prompt_chars == max(sorting.max_prompt_chars or 0, sums.max_prompt_chars or 0)
    assert mixture.max_answer_chars == max(sorting.max_answer_chars or 0, sums.max_answer_chars or 0)
    assert mixture.levels == tuple(sorted({*sorting.levels, *sums.levels}))
    again = make_source("mixture", **json.loads(json.dumps(mixture.kwargs)))
    assert [again.task(1, i) for i in range(20)] == [mixture.task(1, i) for i in range(20)]


def test_finite_sources_without_weights_give_every_task_once(rows):
    mixture = make_source("mixture", sources=[rows("a", 30), rows("b", 10)])
    assert mixture.num_tasks == 40
    prompts = [mixture.task(0, index).prompt for index in range(40)]
    assert sorted(prompts) == sorted([f"a{i}" for i in range(30)] + [f"b{i}" for i in range(10)])
    assert 2 <= sum(prompt[0] == "b" for prompt in prompts[:10]) <= 3  # interleaved from the start
    assert prompts != [mixture.task(1, index).prompt for index in range(40)]  # another seed, another order
    with pytest.raises(IndexError, match="there is no task 40; there are 40"):
        mixture.task(0, 40)


def test_finite_sources_with_weights_end_with_the_first_that_ends(rows):
    mixture = make_source("mixture", sources=[rows("a", 30, weight=1), rows("b", 10, weight=1)])
    assert mixture.num_tasks in (20, 21)  # b would be asked for an 11th task
    prompts = [mixture.task(0, index).prompt for index in range(mixture.num_tasks)]
    assert len(set(prompts)) == len(prompts)
    assert sum(prompt[0] == "b" for prompt in prompts) == 10


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5), data=st.data())
def test_a_finite_mixture_never_asks_a_source_for_more_than_it_has(sizes, data):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    mixture = Mixture([weighted(SORTING, weight) for weight in weights])
    longest = mixture._longest(sizes)
    counts = Counter(mixture._place(index)[0] for index in range(longest))
    assert all(counts[i] <= size for i, size in enumerate(sizes))
    counts[mixture._place(longest)[0]] += 1
    assert any(counts[i] > size for i, size in enumerate(sizes))


def test_a_finite_source_comes_round_again_in_an_endless_mixture(rows):
    mixture = make_source("mixture", sources=[rows("a", 7, weight=1), weighted(SORTING, 1)])
    assert mixture.num_tasks is None
    prompts = [task.prompt for task in (mixture.task(0, i) for i in range(42)) if task.source == "a"]
    rounds = [prompts[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(each) == [f"a{i}" for i in range(7)] for each in rounds)
    assert len({tuple(each) for each in rounds}) == 3
    assert mixture.task(0, 10**9) == mixture.task(0, 10**9)


def test_excluded_prompts_leave_finite_sources_and_are_redrawn_by_endless_ones(rows):
    finite = make_source("mixture", sources=[rows("a", 6), rows("b", 4)])
    exclude = frozenset({task_hash("a0"), task_hash("b3")})
    store = TaskStore(finite, 0, None, exclude)
    assert (len(store), store.num_excluded) == (8, 2)
    assert {task.prompt for task in store.get(range(8))} == {"a1", "a2", "a3", "a4", "a5", "b0", "b1", "b2"}
    endless = make_source("mixture", sources=[rows("a", 6, weight=1), weighted(SORTING, 1)])
    evaluation = make_frozen(endless, 1, 8)  # four rows of a among them
    store = TaskStore(endless, 1, 100, evaluation.hashes)
    tasks = store.get(range(100))
    assert not evaluation.hashes & {task_hash(task.prompt) for task in tasks}
    assert Counter(task.source for task in tasks) == {"a": 50, "digit_sorting": 50}
    assert len({task.prompt for task in tasks if task.source == "a"}) == 2
    with pytest.raises(ValueError, match=r"sources\[0\] \(jsonl\) has no tasks left"):
        TaskStore(endless, 1, 100, frozenset(task_hash(f"a{i}") for i in range(6)))
    with pytest.raises(ValueError, match=r"gave 13 distinct tasks of 20: mixture: task 13.*\(jsonl\).*excluded"):
        make_frozen(make_source("mixture", sources=[weighted(SORTING, 1), rows("a", 6, weight=1)]), 1, 20)


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], TypeError, "non-empty sequence of mappings"),
        ("digit_sorting", TypeError, "non-empty sequence of mappings"),
        (["digit_sorting"], TypeError, r"sources\[0\] must be a mapping with a 'name'"),
        ([{"kwargs": {}}], TypeError, r"sources\[0\] must be a mapping with a 'name'"),
        (
            [{"name": "digit_sorting", "wait": 1}],
            TypeError,
            r"sources\[0\] has unknown keys \['wait'\]; there are name",
        ),
        ([{"name": "digit_sortin"}], ValueError, r"sources\[0\]: unknown task source.*did you mean 'digit_sorting'"),
        ([SUMS, {"name": "digit_sorting", "kwargs": {"x": 1}}], TypeError, r"sources\[1\]: .*no argument 'x'"),
        ([SUMS, {"name": "digit_sorting", "kwargs": {"min_length": 0}}], ValueError, r"sources\[1\]: digit_sorting"),
        ([weighted(SUMS, 0)], ValueError, r"sources\[0\]: weight must be a positive number, got 0"),
        ([weighted(SUMS, "1")], ValueError, r"sources\[0\]: weight must be a positive number, got '1'"),
        ([weighted(SUMS, float("nan"))], ValueError, "weight must be a positive number"),
        ([weighted(SUMS, 1), SORTING], ValueError, r"sources\[1\] has no weight, while others have"),
    ],
)
def test_wrong_sources_are_named(sources, error, message):
    with pytest.raises(error, match=message):
        make_source("mixture", sources=sources)


def test_conflicting_verifiers_are_named(rows):
    clash = rows("b", 2)
    clash["kwargs"] = {**clash["kwargs"], "source": "a", "verifier": "gsm8k"}
    with pytest.raises(ValueError, match=r"sources\[0\] and sources\[1\] both .*'a'.*'exact_match'.*'gsm8k'"):
        make_source("mixture", sources=[rows("a", 2), clash])
