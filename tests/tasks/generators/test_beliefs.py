"""Pass rates by level, and how tasks are shared out over levels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.generators.beliefs import Evidence, level_shares, levels_in_play, pass_rates


def evidence(seen, worth=None):
    """From {position: (passes, failures)}."""
    counts = np.array(list(seen.values()), np.float64).reshape(-1, 2)
    worth = np.ones(len(seen)) if worth is None else np.array(worth)
    return Evidence(np.array(list(seen), np.int64), counts[:, 0], counts[:, 1], worth)


def logistic(x):
    return 1 / (1 + np.exp(-x))


EVIDENCE = st.dictionaries(st.integers(0, 19), st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=8)


def test_without_evidence_the_rate_falls_around_the_centre():
    rates = pass_rates(np.arange(7), evidence({}), 3.0)
    np.testing.assert_allclose(rates, logistic(3.0 - np.arange(7)), rtol=1e-12)


def test_evidence_updates_the_curve_that_goes_through_all_of_it():
    # 16 of 32 passed at level 4: the half point is there, and (8 * .5 + 16) / (8 + 32) is one half again.
    np.testing.assert_allclose(pass_rates(np.array([4]), evidence({4: (16, 16)}), 4.0), 0.5)
    # The same with 1,600 of 3,200, which count as 32; and with a quarter of the worth: (8 * .5 + 4) / (8 + 8).
    np.testing.assert_allclose(pass_rates(np.array([4]), evidence({4: (1600, 1600)}), 4.0), 0.5)
    np.testing.assert_allclose(pass_rates(np.array([4]), evidence({4: (16, 16)}, [0.25]), 4.0), 0.5)
    # Level 5 was never tried: it is believed to be what the curve says of it, of the width that was taken first.
    np.testing.assert_allclose(pass_rates(np.array([5]), evidence({4: (16, 16)}), 4.0), logistic(-1.0))
    # An easy level in the middle of hard ones: mostly its own evidence counts, 32 of 40.
    out_of_order = pass_rates(np.arange(5), evidence({2: (0, 32), 3: (32, 0), 4: (0, 32)}), 2.0)
    assert out_of_order[3] > 0.8 > 0.2 > max(out_of_order[2], out_of_order[4])


def test_old_evidence_gives_way():
    new, old = {5: (30.0, 2.0)}, {5: (2.0, 30.0)}
    assert pass_rates(np.array([5]), evidence(new), 5.0) > 0.8
    assert pass_rates(np.array([5]), evidence(old), 5.0) < 0.2
    faded = [pass_rates(np.array([5]), evidence(old, [worth]), 5.0).item() for worth in (1, 0.5, 0.25, 0.0)]
    assert faded == sorted(faded)
    assert faded[-1] == pytest.approx(0.5)  # what is believed without evidence


def test_which_levels_are_in_play():
    def play(seen, own=(2, 3, 4), num_levels=20):
        return levels_in_play(own, evidence(seen), num_levels, 0.5)[0].tolist()

    assert play({}) == [1, 2, 3, 4, 5]
    assert play({2: (0, 99), 3: (0, 99), 4: (0, 99)}) == [1, 2, 3, 4]  # nothing harder while all fail
    assert play({2: (99, 0), 3: (99, 0), 4: (99, 0)}) == [2, 3, 4, 5]  # nothing easier while all pass
    assert play({2: (99, 0), 3: (99, 0), 4: (99, 0)}, num_levels=5) == [2, 3, 4]
    assert play({9: (50, 50)}, own=(8,)) == [7, 8, 9, 10]
    assert play({3: (0, 50), 9: (50, 0)}) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # a level seen stays, and all on the way
    assert play({0: (50, 50)}, own=(0,), num_levels=1) == [0]


@settings(deadline=None, max_examples=80)
@given(seen=EVIDENCE, own=st.sets(st.integers(0, 19), min_size=1), target=st.floats(0.01, 0.99))
def test_rates_are_rates_and_no_level_is_left_out(seen, own, target):
    at, rates = levels_in_play(sorted(own), evidence(seen), 20, target)
    assert own | set(seen) <= set(at.tolist()) <= set(range(20))
    assert (np.diff(at) == 1).all()
    assert ((rates > 0) & (rates < 1)).all()
    shares = level_shares(rates, target, 0.1)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0.1 / len(at) * (1 - 1e-9)).all()


def test_shares_follow_learnability():
    # 4p(1-p) of .5, .9 and .1 is 1, .36 and .36.
    np.testing.assert_allclose(level_shares(np.array([0.5, 0.9, 0.1]), 0.5, 0.0), np.array([1, 0.36, 0.36]) / 1.72)
    np.testing.assert_allclose(
        level_shares(np.array([0.5, 0.9, 0.1]), 0.5, 0.3), 0.7 * np.array([1, 0.36, 0.36]) / 1.72 + 0.1
    )
    rates = np.linspace(0.05, 0.95, 19)
    for target in (0.25, 0.5, 0.8):
        assert rates[np.argmax(level_shares(rates, target, 0.1))] == pytest.approx(target)
    assert len(level_shares(np.zeros(0), 0.5, 0.1)) == 0
