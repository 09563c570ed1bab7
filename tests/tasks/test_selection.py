"""What a run draws by: the floor's share, new tasks first, which draws are of the base distribution, and restarts."""

import json
from collections import Counter
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.procedural import DigitSorting
from dynrl.tasks.selectors import (
    DifficultyPoolsSelector,
    EpochSelector,
    GresoSelector,
    Selection,
    ThompsonSelector,
    UniformSelector,
    make_selector,
)
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task, Verdict


class Counting:
    """Draws the last task of the store, as often as it is asked, up to a bound; a user's own, with nothing more."""

    def __init__(self, seed=0, bound=10**9):
        self.left, self.heard = bound, []

    def draw(self, n, store) -> Any:
        n = min(n, self.left)
        self.left -= n
        return np.full(n, len(store) - 1) if len(store) else []

    def observe(self, outcome):
        self.heard.append(outcome)

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def make_store(num_base=20, num_appended=0):
    store = TaskStore(DigitSorting(), 0, num_base)
    store.append(new_tasks(num_appended))
    return store


def new_tasks(count):
    return [Task(-1, "made", f"{i}", "1") for i in range(count)]


def selection(selector: Any = None, floor_share=0.25, new_first=False, seed=0):
    return Selection(selector or Counting(), seed, floor_share=floor_share, new_first=new_first)


SHARES = st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.99, 1.0])
CUTS = st.lists(st.integers(0, 9), max_size=12)


@settings(deadline=None, max_examples=100)
@given(share=SHARES, cuts=CUTS, start=st.integers(0, 40))
def test_the_floor_has_its_share_of_every_stretch_however_it_is_cut(share, cuts, start):
    store = make_store()
    made = selection(floor_share=share)
    made.draw(start, store)
    draws = [draw for n in cuts for draw in made.draw(n, store)]
    assert len(draws) == sum(cuts)
    exact = len(draws) * Fraction(str(share))
    num_floor = sum(draw.base for draw in draws)
    assert floor(exact) <= num_floor <= ceil(exact)
    if not start:
        assert num_floor == floor(exact)
    for stretch in range(len(draws) - 10):  # its draws lie evenly among the others
        in_ten = sum(draw.base for draw in draws[stretch : stretch + 10])
        assert floor(10 * Fraction(str(share))) <= in_ten <= ceil(10 * Fraction(str(share)))
    whole = selection(floor_share=share)
    whole.draw(start, store)
    assert whole.draw(sum(cuts), store) == draws


def test_the_share_is_exact_in_the_long_run_for_single_draws():
    store = make_store()
    made = selection(floor_share=0.1)
    assert sum(made.draw(1, store)[0].base for _ in range(1_000)) == 100


def test_the_floor_is_an_epoch_over_the_base_alone():
    store = make_store(20, num_appended=30)
    draws = selection(floor_share=0.5, seed=7).draw(120, store)
    of_floor = [draw.task_id for draw in draws if draw.base]
    assert all(sorted(of_floor[start : start + 20]) == list(range(20)) for start in (0, 20, 40))
    assert of_floor[:20] != of_floor[20:40]
    assert {draw.task_id for draw in draws if not draw.base} == {49}


def test_the_floor_and_a_selector_of_the_same_seed_draw_apart():
    store = make_store(1_000)
    draws = selection(GresoSelector(3), floor_share=0.5, seed=3).draw(100, store)
    assert len({draw.task_id for draw in draws}) > 90  # 2.5 of 50 expected in both, standard deviation 1.5


def test_without_a_base_the_floor_is_over_all():
    store = make_store(0)
    made = selection(floor_share=0.5)
    assert made.draw(4, store) == []
    store.append(new_tasks(10))
    draws = made.draw(20, store)
    assert sorted(draw.task_id for draw in draws if draw.base) == list(range(10))
    store.append(new_tasks(3))
    assert {draw.task_id for draw in made.draw(60, store) if draw.base} == set(range(13))


@pytest.mark.parametrize("selector", [EpochSelector(0), UniformSelector(0)], ids=["epoch", "uniform"])
def test_a_selector_that_is_the_base_distribution_needs_no_floor(selector):
    store = make_store(20, num_appended=20)
    draws = selection(selector, floor_share=0.0).draw(200, store)
    assert all(draw.base == (draw.task_id < 20) for draw in draws)
    assert {draw.base for draw in draws} == {True, False}
    with pytest.raises(
        ValueError, match=rf"floor_share = 0.1 has no meaning for {type(selector).__name__}.*set it to 0"
    ):
        selection(selector, floor_share=0.1)


def test_no_other_selector_is_the_base_distribution():
    store = make_store(20)
    for name in ("difficulty_pools", "greso", "learnability", "thompson"):
        assert not any(draw.base for draw in selection(make_selector(name, seed=0), 0.0).draw(50, store))
    assert not any(draw.base for draw in selection(Counting(), 0.0).draw(50, store))


def test_new_tasks_come_first_in_order_in_the_part_that_is_not_the_floors():
    store = make_store(20, num_appended=3)
    made = selection(floor_share=0.25, new_first=True)
    draws = made.draw(8, store)
    assert [draw.task_id for draw in draws if not draw.base] == [20, 21, 22, 22, 22, 22]  # 22 is the last of the store
    assert sum(draw.base for draw in draws) == 2
    store.append(new_tasks(5))
    assert [draw.task_id for draw in made.draw(4, store) if not draw.base] == [23, 24, 25]
    store.append(new_tasks(1))
    assert [draw.task_id for draw in made.draw(4, store) if not draw.base] == [26, 27, 28]
    assert [draw.task_id for draw in made.draw(4, store) if not draw.base] == [28, 28, 28]
    later = selection(floor_share=0.25, new_first=False)
    assert [draw.task_id for draw in later.draw(4, store) if not draw.base] == [28, 28, 28]


def test_new_tasks_come_first_with_a_base_distribution_too():
    store = make_store(20)
    made = selection(EpochSelector(0), floor_share=0.0, new_first=True)
    made.draw(5, store)
    store.append(new_tasks(4))
    draws = made.draw(6, store)
    assert [tuple(draw) for draw in draws[:4]] == [(i, False) for i in range(20, 24)]
    assert len(draws) == 6


@settings(deadline=None, max_examples=100)
@given(
    script=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=15),
    num_base=st.sampled_from([0, 5]),
    share=SHARES,
)
def test_each_new_task_is_drawn_before_the_selector_draws_any_other(script, num_base, share):
    store = make_store(num_base)
    made = selection(floor_share=share, new_first=True)
    drawn = set()
    for n, num_appended in script:
        store.append(new_tasks(num_appended))
        draws = made.draw(n, store)
        of_floor = [draw.task_id for draw in draws if draw.base]
        rest = [draw.task_id for draw in draws if not draw.base]
        # The floor is drawn first; what it took is not new any more.
        waiting = [i for i in range(num_base, len(store)) if i not in drawn and i not in of_floor]
        assert rest[: len(waiting)] == waiting[: len(rest)]
        assert set(rest[len(waiting) :]) <= {len(store) - 1}
        drawn |= {*of_floor, *rest}
        assert len(made.state_dict()["drawn_ahead"]) <= len(store)
    if share < 1:
        made.draw(200, store)
        assert made.state_dict()["drawn_ahead"] == []


def test_fewer_draws_mean_that_the_data_ended():
    store = make_store()
    made = selection(Counting(bound=6), floor_share=0.25)
    draws = [made.draw(5, store), made.draw(5, store), made.draw(5, store)]
    assert [[draw.base for draw in part] for part in draws] == [
        [False, False, False, True, False],
        [False, False, True],  # 6 of the selector, and of 8 draws 2
        [],
    ]
    ended = selection(EpochSelector(0, num_epochs=1), floor_share=0.0)
    assert [len(ended.draw(15, store)), len(ended.draw(15, store)), len(ended.draw(15, store))] == [15, 5, 0]
    empty = make_store(0)
    assert selection(floor_share=0.0).draw(3, empty) == selection(floor_share=1.0).draw(3, empty) == []


def test_the_selector_hears_of_every_group():
    made = selection(floor_share=0.5)
    outcome = Outcome(3, 0, Verdict.FILTERED, 8, 8, 1.0, 2, "digit_sorting", 4)
    made.observe(outcome)
    assert made.selector.heard == [outcome]  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_left_to_select_from_is_the_selectors_word():
    store = make_store(20)
    for selector in (GresoSelector(0), DifficultyPoolsSelector(0)):
        assert selection(selector).num_selectable(store) == 20
    for selector in (
        ThompsonSelector(0),
        Counting(),
        make_selector("weighted", seed=0, weights=[{"level": 2, "weight": 1}]),
    ):
        assert selection(selector).num_selectable(store) is None
    assert selection(EpochSelector(0), 0.0).num_selectable(store) is None


@pytest.mark.parametrize("name", ["epoch", "greso", "thompson"])
@settings(deadline=None, max_examples=30)
@given(
    script=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=8),
    num_base=st.sampled_from([0, 6]),
    share=st.sampled_from([0.3, 0.5]),
)
def test_resume_at_every_draw_gives_the_same_draws(name, script, num_base, share):
    def make():
        return selection(make_selector(name, seed=3), 0.0 if name == "epoch" else share, new_first=True)

    def step(made, store, n, num_appended):
        draws = made.draw(n, store)
        for task in store.get([draw.task_id for draw in draws]):
            made.observe(Outcome(task.task_id, 1, Verdict.KEPT, 8, task.task_id % 9, 0.5, 1, task.source, task.level))
        store.append(new_tasks(num_appended))
        return draws

    whole, store, states, recorded = make(), make_store(num_base), [], []
    for n, num_appended in script:
        states.append(json.loads(json.dumps(whole.state_dict())))
        recorded.append(step(whole, store, n, num_appended))
    for i, state in enumerate(states):
        resumed, store = make(), make_store(num_base, sum(appended for _, appended in script[:i]))
        resumed.load_state_dict(state)
        assert [step(resumed, store, *part) for part in script[i:]] == recorded[i:]


def test_wrong_arguments_and_states_are_named():
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"floor_share must lie in 0 to 1, got {share}"):
            selection(floor_share=share)
    with pytest.raises(ValueError, match=r"has floor_share 1/4, this one 1/2"):
        selection(floor_share=0.5).load_state_dict(selection(floor_share=0.25).state_dict())
    with pytest.raises(ValueError, match="has seed 1, this one 2"):
        selection(seed=2).load_state_dict(selection(seed=1).state_dict())
    with pytest.raises(ValueError, match="seed must lie in"):
        selection(seed=-1)


def test_a_selection_of_one_named_by_its_path():
    store = make_store()
    made = selection(make_selector("test_selection:Counting", seed=0), floor_share=0.5)
    draws = made.draw(10, store)
    assert Counter(draw.base for draw in draws) == {True: 5, False: 5}
    assert all(type(draw.task_id) is int for draw in draws)
