import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import EpochSelector, UniformSelector, VisitCounter, counter_words, make_selector
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict

# Selectors read only the store's length, so that range(n) stands for a store of n tasks.
SCRIPTS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), max_size=20)  # (draws, then appended tasks)


BUILT_IN = {"epoch": EpochSelector, "uniform": UniformSelector}


def through_json(state):
    return json.loads(json.dumps(state))


def test_every_epoch_is_another_permutation():
    selector = EpochSelector(seed=0)
    epochs = [selector.draw(100, range(100)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, EpochSelector(seed=1).draw(100, range(100))]}) == 4
    assert EpochSelector(seed=0).draw(300, range(100)) == [i for epoch in epochs for i in epoch]


def test_orders_are_pinned_across_processes_and_versions():
    assert EpochSelector(seed=0).draw(8, range(8)) == [5, 1, 7, 4, 2, 3, 6, 0]
    assert UniformSelector(seed=0).draw(8, range(8)) == [6, 4, 2, 3, 5, 2, 3, 7]


def test_permutations_are_uniform():
    orders = Counter(tuple(EpochSelector(seed).draw(3, range(3))) for seed in range(1_200))
    assert len(orders) == 6
    assert all(140 < count < 260 for count in orders.values())  # 200 expected, standard deviation 13


@settings(deadline=None, max_examples=100)
@given(start=st.integers(1, 6), script=SCRIPTS)
def test_an_epoch_draws_its_base_once_and_at_most_as_many_joined(start, script):
    selector, length = EpochSelector(seed=5), start
    epochs = []  # (tasks in the store at the first draw, ids drawn)
    for n, appended in script:
        for _ in range(n):
            (task_id,) = selector.draw(1, range(length))
            if selector.state_dict()["epoch"] == len(epochs):
                epochs.append((length, []))
            epochs[-1][1].append(task_id)
        length += appended
    for i, (num_base, drawn) in enumerate(epochs):
        assert len(drawn) == len(set(drawn))
        assert max(drawn) < 2 * num_base
        if i < len(epochs) - 1:  # over
            assert set(range(num_base)) <= set(drawn)


def test_appended_tasks_join_the_rest_of_the_epoch_at_the_very_next_draws():
    selector = EpochSelector(seed=2)
    store = TaskStore(DigitSorting(), 0, 10)
    first = selector.draw(7, store)
    new = store.append([Task(-1, "made", f"{i}", "1") for i in range(4)])
    rest = selector.draw(7, store)
    assert sorted(first + rest) == list(range(14))
    assert set(new) <= set(rest)
    assert sorted(selector.draw(14, store)) == list(range(14))
    # With 4 of 7 left being new, some seed takes a new one at once with probability 4/7 each.
    at_once = 0
    for seed in range(700):
        other = EpochSelector(seed)
        other.draw(7, range(10))
        at_once += other.draw(1, range(14))[0] >= 10
    assert 340 < at_once < 460  # 400 expected, standard deviation 13


def test_constant_appending_cannot_keep_an_epoch_open():
    selector, length = EpochSelector(seed=0), 8
    drawn = []
    while selector.state_dict()["epoch"] == 0:
        drawn += selector.draw(1, range(length))
        length += 3
    assert sorted(drawn[:-1]) == list(range(16))  # 2 * 8 draws; the last belongs to the next epoch
    assert selector.state_dict()["start_length"] == length - 3


def test_the_data_end_after_the_last_epoch_and_stay_ended():
    selector = EpochSelector(seed=0, num_epochs=2)
    assert len(selector.draw(15, range(10))) == 15
    assert len(selector.draw(15, range(10))) == 5
    assert selector.draw(15, range(10)) == []
    assert selector.draw(15, range(20)) == []
    restored = EpochSelector(seed=0, num_epochs=2)
    restored.load_state_dict(through_json(selector.state_dict()))
    assert restored.draw(1, range(20)) == []


@pytest.mark.parametrize("selector", [EpochSelector(0), UniformSelector(0)], ids=["epoch", "uniform"])
def test_an_empty_store_gives_nothing_until_tasks_come(selector):
    assert selector.draw(3, []) == []
    assert selector.draw(2, range(1)) == [0, 0]
    assert selector.draw(0, range(1)) == []


@pytest.mark.parametrize("name", ["epoch", "uniform"])
@settings(deadline=None, max_examples=50)
@given(start=st.integers(0, 6), script=SCRIPTS)
def test_resume_at_every_draw_gives_the_same_sequence(name, start, script):
    selector, length, states, draws = BUILT_IN[name](seed=9), start, [], []
    for n, appended in script:
        states.append(through_json(selector.state_dict()))
        draws.append((n, length, selector.draw(n, range(length))))
        length += appended
    for i, state in enumerate(states):
        resumed = BUILT_IN[name](seed=9)
        resumed.load_state_dict(state)
        assert [resumed.draw(n, range(length)) for n, length, _ in draws[i:]] == [ids for _, _, ids in draws[i:]]


@pytest.mark.parametrize("name", ["epoch", "uniform"])
@settings(deadline=None, max_examples=50)
@given(chunks=st.lists(st.integers(0, 9), max_size=10))
def test_the_sequence_does_not_depend_on_how_it_is_cut_into_draws(name, chunks):
    cut, whole = BUILT_IN[name](seed=4), BUILT_IN[name](seed=4)
    cut.draw(3, range(7))
    whole.draw(3, range(7))
    assert [i for n in chunks for i in cut.draw(n, range(9))] == whole.draw(sum(chunks), range(9))


def test_uniform_draws_with_replacement_up_to_max_draws():
    selector = UniformSelector(seed=0, max_draws=10_000)
    ids = selector.draw(9_000, range(10))
    counts = Counter(ids)
    assert sorted(counts) == list(range(10))
    assert all(800 < count < 1_000 for count in counts.values())  # 900 expected, standard deviation 28
    assert len(selector.draw(4_096, range(10))) == 1_000
    assert selector.draw(1, range(10)) == []
    assert max(UniformSelector(seed=0).draw(200, range(1_000))) >= 10


def test_outcomes_change_nothing():
    for name in ("epoch", "uniform"):
        selector = make_selector(name, seed=0)
        before = selector.state_dict()
        selector.observe(Outcome(0, 0, Verdict.KEPT, 8, 4, 0.5, 1))
        assert selector.state_dict() == before


@pytest.mark.parametrize("name", ["epoch", "uniform"])
def test_another_seeds_state_is_refused(name):
    with pytest.raises(ValueError, match="has seed 1, this one 2"):
        make_selector(name, seed=2).load_state_dict(make_selector(name, seed=1).state_dict())


def test_errors_name_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"unknown selector 'epochs' .did you mean 'epoch'.*difficulty_pools, epoch, greso"
    ):
        make_selector("epochs", seed=0)
    with pytest.raises(TypeError, match=r"'num_epoch' \(did you mean 'num_epochs'"):
        make_selector("epoch", seed=0, num_epoch=1)
    with pytest.raises(TypeError, match="missing a required argument: 'seed'; it takes seed, max_draws"):
        make_selector("uniform")
    with pytest.raises(TypeError, match="lacks draw, observe"):
        make_selector("dynrl.tasks.selectors:VisitCounter")
    with pytest.raises(ValueError, match="num_epochs must be at least 0"):
        EpochSelector(0, num_epochs=-1)
    with pytest.raises(ValueError, match="max_draws must be at least 0"):
        UniformSelector(0, max_draws=-1)
    with pytest.raises(ValueError, match="seed must lie in"):
        UniformSelector(-1)
    selector = EpochSelector(0)
    selector.draw(1, range(5))
    with pytest.raises(ValueError, match="store has 4 tasks, fewer than the 5"):
        selector.draw(1, range(4))


def test_counter_words_depend_on_their_position_only():
    whole = counter_words(3, "s", 20, index=1).tolist()
    assert [counter_words(3, "s", 1, index=1, start=i)[0] for i in range(20)] == whole
    others = [
        counter_words(4, "s", 20, index=1),
        counter_words(3, "t", 20, index=1),
        counter_words(3, "s", 20, index=2),
    ]
    assert len({*whole, *(word for words in others for word in words.tolist())}) == 80


@settings(deadline=None, max_examples=100)
@given(calls=st.lists(st.lists(st.integers(0, 40), max_size=8), max_size=8))
def test_visits_count_earlier_draws_and_survive_a_restart(calls):
    counter, seen = VisitCounter(), Counter()
    for ids in calls:
        expected = []
        for task_id in ids:
            expected.append(seen[task_id])
            seen[task_id] += 1
        assert counter.next_visits(ids) == expected
        state = through_json(counter.state_dict())
        counter = VisitCounter()
        counter.load_state_dict(state)
        assert counter.state_dict() == state


def test_visits_of_whole_epochs_take_one_run():
    counter = VisitCounter()
    assert counter.next_visits([1, 1, 0]) == [0, 1, 0]
    assert counter.next_visits([0]) == [1]
    assert counter.state_dict() == {"values": [2], "run_lengths": [2]}
    with pytest.raises(ValueError, match="at least 0, got -1"):
        counter.next_visits([3, -1])
