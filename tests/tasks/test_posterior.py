"""Posteriors of pass rates, and the two selectors that weigh candidates by nothing else."""

from collections import Counter

import numpy as np
import pytest

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import LearnabilitySelector, PassRates, ThompsonSelector
from dynrl.tasks.selectors.randomness import distinct_ids, generator, uniforms, weighted_order
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict


def store_of(*kinds):
    return TaskStore.from_tasks([Task(-1, source, f"{i}", "1", level) for i, (source, level) in enumerate(kinds)])


def observe(selector, task_id, kind, positive, live=8):
    selector.observe(Outcome(task_id, 0, Verdict.FILTERED, live, positive, 0.5, 1, *kind))


def test_an_unseen_task_borrows_from_its_kind_and_that_from_its_source():
    rates = PassRates(prior_strength=4.0, decay=1.0, kind_decay=1.0)
    store = store_of(("a", 1), ("a", 2), ("b", 1), ("a", 1))
    assert np.array(rates.posterior(np.arange(4), store)).tolist() == [[1, 1, 1, 1], [1, 1, 1, 1]]  # all flat
    observe(rates, 0, ("a", 1), positive=6)
    passes, failures = rates.posterior(np.arange(4), store)
    # The source's (6, 2) count as two rollouts, (1.5, 0.5): with the flat (1, 1) kind 2 has (2.5, 1.5). Kind 1 adds its
    # own (6, 2), and (8.5, 3.5) is borrowed at strength 4: (2.8333, 1.1667). Task 0 adds its own (6, 2), task 3 none.
    np.testing.assert_allclose(passes, [2.833333 + 6, 2.5, 1, 2.833333], rtol=1e-6)
    np.testing.assert_allclose(failures, [1.166667 + 2, 1.5, 1, 1.166667], rtol=1e-6)
    np.testing.assert_allclose(rates.mean(np.array([2, 1]), store), [0.5, 0.625])


def test_what_is_borrowed_weighs_no_more_than_what_is_known():
    rates = PassRates(prior_strength=100.0, decay=1.0, kind_decay=1.0)
    store = store_of(("a", 1), ("a", 1), ("a", 2))
    observe(rates, 0, ("a", 1), positive=1, live=1)
    passes, failures = rates.posterior(np.array([1, 2]), store)
    assert (passes.tolist(), failures.tolist()) == ([3.0, 2.0], [1.0, 1.0])  # flat, the source's, the kind's


def test_a_new_level_of_a_solved_source_is_open():
    rates = PassRates(prior_strength=8.0, decay=1.0, kind_decay=1.0)
    store = store_of(("a", 1), ("a", 2))
    for _ in range(100):
        observe(rates, 0, ("a", 1), positive=8)
    assert rates.mean(np.array([0, 1]), store).tolist() == pytest.approx([1, 0.75], abs=0.001)


def test_posteriors_forget():
    rates = PassRates(prior_strength=2.0, decay=0.5, kind_decay=1.0)
    store = store_of(("a", 1))
    for positive in (8, 8, 0, 0, 0, 0):
        observe(rates, 0, ("a", 1), positive)
    # attempts 8 * (1 + 1/2 + ... + 1/32) = 15.75, passes 8 * (1/16 + 1/32) = 0.75
    passes, failures = rates.posterior(np.array([0]), store)
    # The source has a third of passes, as two rollouts with the flat prior (1.6667, 2.3333); the kind has 16 of 48.
    prior = 2.0 * (1 + 2 / 3 + 16) / (4 + 48)
    np.testing.assert_allclose(passes, [prior + 0.75])
    np.testing.assert_allclose(passes + failures, [2 + 15.75])


def levels_drawn(selector, store, num_draws=20, n=100):
    counts = Counter()
    for _ in range(num_draws):
        counts.update(level for _, level in store.kinds(selector.draw(n, store)))
    return np.array([counts[level] for level in range(2, 12)]) / (num_draws * n)


def teach(selector, rate_of_level):
    """Groups of tasks that are not in the store: only kinds are known."""
    for i in range(40):
        for level in range(2, 12):
            observe(selector, 10**6 + i, ("digit_sorting", level), round(8 * rate_of_level(level)))


@pytest.mark.parametrize("make", [ThompsonSelector, LearnabilitySelector])
def test_endless_data_are_chosen_by_kind(make):
    store = TaskStore(DigitSorting(), 0, 100_000)
    selector = make(0)
    before = levels_drawn(selector, store)
    np.testing.assert_allclose(before, 0.1, atol=0.03)  # nothing is known: all alike
    teach(selector, lambda level: {4: 0.25, 5: 0.5, 6: 0.5}.get(level, float(level < 4)))
    after = levels_drawn(selector, store)
    assert after[3] + after[4] > 0.5  # levels 5 and 6
    assert after[2] > 2 * after[8]
    if make is LearnabilitySelector:
        assert after.min() > 0.002  # none is out of reach


def test_thompson_takes_the_candidates_whose_sampled_rates_are_nearest_the_target():
    store = TaskStore(DigitSorting(), 0, 1_000)
    selector = ThompsonSelector(3, target=0.8, candidates_per_task=5, prior_strength=2.0)
    teach(selector, lambda level: level / 12)
    drawn = selector.draw(20, store)
    ids = distinct_ids(3, "thompson/candidates", 100, 1_000, index=0)
    rates = generator(3, "thompson/rates", 0).beta(*selector.pass_rates.posterior(ids, store))
    chosen = np.isin(ids, drawn)
    assert drawn == ids[chosen].tolist()
    assert np.abs(rates[chosen] - 0.8).max() < np.abs(rates[~chosen] - 0.8).min()


def test_thompson_comes_back_to_tasks_that_it_knows_little_of():
    store = store_of(*[("a", 1)] * 40)
    selector = ThompsonSelector(0)
    for _ in range(10):
        for task_id in range(20):
            observe(selector, task_id, ("a", 1), 8 if task_id < 10 else 4)
    counts = Counter(i for _ in range(50) for i in selector.draw(5, store))
    solved, half, unseen = (sum(counts[i] for i in ids) for ids in (range(10), range(10, 20), range(20, 40)))
    assert half > 120  # of 250: well known to be mixed
    assert 20 < unseen < 120
    assert solved < 5


def test_learnability_draws_in_proportion():
    store = TaskStore(DigitSorting(), 0, 100_000)
    selector = LearnabilitySelector(0, candidates_per_task=64, prior_strength=1e6)
    teach(selector, lambda level: 1.0 if level < 7 else 0.5)
    rates = selector.pass_rates.mean(np.arange(1_000), store)
    levels = np.array([level for _, level in store.kinds(range(1_000))])
    weights = [(rates * (1 - rates) + 0.01)[levels == level][0] for level in range(2, 12)]
    np.testing.assert_allclose(levels_drawn(selector, store, 100, 100), np.array(weights) / sum(weights), atol=0.012)


def test_weighted_order_samples_without_replacement_in_proportion():
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    orders = Counter(tuple(weighted_order(weights, uniforms(0, "t", 4, index=i), 2).tolist()) for i in range(4_000))
    # P(3 then 2) = 5/8 * 2/3, P(3, 0) = 5/8 * 1/3, P(2, 3) = 2/8 * 5/6, P(2, 0) = 2/8 * 1/6, P(0, 3) = 1/8 * 5/7, ...
    expected = {(3, 2): 5 / 12, (3, 0): 5 / 24, (2, 3): 5 / 24, (2, 0): 1 / 24, (0, 3): 5 / 56, (0, 2): 2 / 56}
    assert orders.keys() == expected.keys()
    for order, probability in expected.items():
        assert abs(orders[order] / 4_000 - probability) < 0.03  # 4 standard deviations at most
    assert sorted(weighted_order(weights, uniforms(0, "t", 4), 9).tolist()) == [0, 2, 3]


@pytest.mark.parametrize(("count", "length"), [(0, 5), (1, 1), (3, 7), (4, 7), (7, 7), (40, 1_000), (1, 10**12)])
def test_distinct_ids(count, length):
    for index in range(20):
        ids = distinct_ids(0, "t", count, length, index=index)
        assert len(ids) == len(set(ids.tolist())) == count
        assert all(0 <= i < length for i in ids.tolist())


def test_distinct_ids_are_uniform():
    pairs = Counter(tuple(distinct_ids(0, "t", 2, 5, index=i).tolist()) for i in range(4_000))
    assert len(pairs) == 20
    assert all(130 < pair < 270 for pair in pairs.values())  # 200 expected, standard deviation 14


def test_bad_arguments_are_named():
    for target in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=f"target must lie between 0 and 1, got {target}"):
            ThompsonSelector(0, target=target)
    with pytest.raises(ValueError, match=r"min_weight must be above 0, got 0\.0"):
        LearnabilitySelector(0, min_weight=0.0)
