"""The posterior of the keep rate: what it counts, and how many groups it wants."""

import json
import math
import random
from bisect import bisect_left
from statistics import fmean, stdev

import pytest
from scipy.stats import betabinom

from dynrl.rollout.keep_rate import EXACT, MAX_WEIGHT, PRIOR, KeepRate, _beta_binomial_below
from dynrl.rollout.ledger import Ticket
from dynrl.types import Verdict

KEPT, FILTERED, FAILED, STALE = Verdict.KEPT, Verdict.FILTERED, Verdict.FAILED, Verdict.STALE


def tickets(cohort, source, num):
    return [Ticket(i, 0, 0, 0, 0, 0, cohort=cohort, source=source) for i in range(num)]


def add(rate, kept, filtered, source="a", **others):
    """A cohort of one source from its dispatch to its end."""
    num = kept + filtered + sum(others.values())
    cohort = rate.dispatched([source] * num)
    for verdict, n in (("kept", kept), ("filtered", filtered), *others.items()):
        rate.ended(tickets(cohort, source, n), Verdict(verdict))
    return rate


def posterior(rate):
    return rate.state_dict()["posterior"]


def made(kept, filtered, batch_size=10**9, probability=0.9):
    """A posterior of exactly these counts beside the prior: with B this large nothing is forgotten."""
    return add(KeepRate(batch_size, probability), kept, filtered)


# ---- what is counted ----


def test_counts_are_added_to_the_prior():
    rate = made(6, 2)
    assert posterior(rate) == {"a": [pytest.approx(4 + 6), pytest.approx(4 + 2)]}
    assert rate.expected == pytest.approx(10 / 16)
    assert (rate.kept, rate.judged, rate.mean) == (6, 8, 0.75)


def test_before_anything_is_known_it_is_the_prior():
    rate = KeepRate(4, 0.9)
    assert rate.mean is None
    assert rate.expected == 0.5
    assert rate.by_source == {}
    assert PRIOR == (4.0, 4.0)


def test_a_cohort_counts_when_all_of_it_has_ended():
    rate = KeepRate(10**9, 0.9)
    cohort = rate.dispatched(["a"] * 3)
    rate.ended(tickets(cohort, "a", 2), KEPT)
    assert (rate.judged, posterior(rate)) == (0, {"a": [4.0, 4.0]})
    rate.ended(tickets(cohort, "a", 1), FILTERED)
    assert (rate.kept, rate.judged) == (2, 3)


def test_what_says_nothing_of_the_tasks_is_left_out():
    """Failed and stale groups close their cohort, and count for nothing."""
    rate = add(KeepRate(10**9, 0.9), 1, 1, failed=3, stale=2)
    assert (rate.kept, rate.judged) == (1, 2)
    assert rate.state_dict()["cohorts"] == []


def test_forgetting():
    """A batch of judged groups leaves 0.8 of the weight: (4, 4) -> (3.2, 3.2), and 8 kept of 8 are added."""
    rate = add(KeepRate(8, 0.9), 8, 0)
    assert posterior(rate) == {"a": [pytest.approx(3.2 + 8), pytest.approx(3.2)]}
    # Half a batch: 0.8^(1/2).
    add(rate, 0, 4)
    assert posterior(rate)["a"] == [pytest.approx(11.2 * 0.8**0.5), pytest.approx(3.2 * 0.8**0.5 + 4)]


def test_the_rate_is_followed():
    rate = KeepRate(8, 0.9)
    for _ in range(40):
        add(rate, 6, 2)
    assert rate.expected == pytest.approx(0.75, abs=1e-3)  # the prior is forgotten
    for _ in range(12):
        add(rate, 2, 6)
    assert rate.expected == pytest.approx(0.25 + 0.5 * 0.8**12, abs=1e-3)


def test_weight_is_bounded_from_both_sides():
    """From above since the rate moves; from below by the prior's, or forgetting would use it up."""
    assert sum(posterior(made(3000, 1000))["a"]) == pytest.approx(MAX_WEIGHT)
    assert made(3000, 1000).expected == pytest.approx(3004 / 4008)
    rate = KeepRate(1, 0.9)
    for _ in range(50):
        add(rate, 0, 1)
        # Forgetting leaves 0.8 * 8 + 1 = 7.4; it is scaled up to 8.
        assert sum(posterior(rate)["a"]) >= sum(PRIOR) - 1e-9
    assert 0 < rate.expected < 1e-3
    assert all(x > 0 for x in posterior(rate)["a"])


def test_sources_have_rates_of_their_own_and_count_as_they_are_drawn():
    rate = KeepRate(10**9, 0.9)
    add(rate, 36, 0, "easy")  # (40, 4)
    add(rate, 0, 36, "hard")  # (4, 40)
    assert rate.by_source == {"easy": pytest.approx(40 / 44), "hard": pytest.approx(4 / 44)}
    assert rate.expected == pytest.approx(0.5)
    add(rate, 0, 0, "easy", failed=72)  # drawn, and nothing learned: three quarters are easy now
    assert rate.expected == pytest.approx((3 * 40 / 44 + 4 / 44) / 4)


def test_draws_of_long_ago_do_not_matter():
    rate = KeepRate(8, 0.9)
    add(rate, 0, 8, "hard")
    for _ in range(60):
        add(rate, 8, 0, "easy")
    assert rate.expected == pytest.approx(rate.by_source["easy"], abs=1e-4)


def test_a_mixtures_variance_is_that_of_the_mean_of_its_sources():
    rate = KeepRate(10**9, 0.9)
    add(rate, 16, 4, "a")  # (20, 8)
    add(rate, 4, 56, "b")  # (8, 60)
    a, b = rate._mixture()
    shares = {20 / 28: 0.25, 8 / 68: 0.75}  # 20 and 60 were drawn
    weights = {20 / 28: 28, 8 / 68: 68}
    mean = sum(share * p for p, share in shares.items())
    variance = sum(share**2 * p * (1 - p) / (weights[p] + 1) for p, share in shares.items())
    assert a / (a + b) == pytest.approx(mean)
    assert a * b / ((a + b) ** 2 * (a + b + 1)) == pytest.approx(variance)


# ---- groups to dispatch ----


@pytest.mark.parametrize(("a", "b"), [(4.0, 4.0), (1e-3, 8.0), (390.0, 10.0), (30.0, 370.0), (0.5, 0.5)])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 30), (3, 4), (8, 20), (48, 60), (48, 900), (7, 3)])
def test_tail_of_the_beta_binomial_against_scipy(a, b, k, n):
    assert _beta_binomial_below(k, n, a, b) == pytest.approx(betabinom.cdf(k - 1, n, a, b), rel=1e-8, abs=1e-12)


def by_scipy(k, a, b, probability, limit):
    """The smallest n of which k are kept with this probability; scipy's sf(k - 1) = P(K >= k)."""
    return bisect_left(range(limit), True, lo=k, key=lambda n: betabinom.sf(k - 1, n, a, b) >= probability)


@pytest.mark.parametrize("kept", [12, 60, 240, 380])
@pytest.mark.parametrize("k", [1, 2, 5, 20, EXACT])
def test_it_is_the_smallest_number_that_is_enough(kept, k):
    rate = made(kept, 392 - kept)
    assert rate.groups_for(k, 5000) == by_scipy(k, 4 + kept, 396 - kept, 0.9, 5000)


@pytest.mark.parametrize("kept", [100, 240, 380])
@pytest.mark.parametrize("k", [EXACT + 1, 64, 256, 4096])
def test_the_approximation_for_many_is_within_two_percent(kept, k):
    n, right = made(kept, 392 - kept).groups_for(k, 50_000), by_scipy(k, 4 + kept, 396 - kept, 0.9, 50_000)
    assert abs(n - right) <= 0.02 * right
    assert betabinom.sf(k - 1, n, 4 + kept, 396 - kept) >= 0.88


def test_hand_derived_numbers():
    # Beta(4, 4), one of n = 2 kept: 1 - (4 * 5) / (8 * 9) = 0.72; of 4: 1 - (4*5*6*7) / (8*9*10*11) = 0.894; of 5: .929
    assert KeepRate(4, 0.72).groups_for(1, 99) == 2
    assert KeepRate(4, 0.89).groups_for(1, 99) == 4
    assert KeepRate(4, 0.90).groups_for(1, 99) == 5


def test_limits():
    rate = KeepRate(4, 0.9)
    assert rate.groups_for(0, 10) == rate.groups_for(-3, 10) == 0
    assert rate.groups_for(4, 4) == 4
    assert rate.groups_for(4, 2) == 4  # never fewer than are missing
    assert made(0, 392).groups_for(4, 16) == 16
    assert made(390, 2).groups_for(1, 99) == 1
    for ks in (range(1, EXACT + 1), range(EXACT + 1, 200)):  # more take more
        numbers = [rate.groups_for(k, 10**6) for k in ks]
        assert numbers == sorted(numbers)


def test_an_answer_is_known_only_until_the_posterior_changes():
    rate = KeepRate(8, 0.9)
    first = rate.groups_for(8, 999)
    add(rate, 64, 0)
    assert rate.groups_for(8, 999) < first


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("kept", "k"), [(6, 3), (40, 8), (40, 40), (120, 64), (260, 500)])
def test_it_fills_with_at_least_the_wanted_probability(probability, kept, k):
    """Rates are drawn from the posterior, and groups from the rates. 2 % for the approximation, 3 deviations."""
    rate, rng, runs = made(kept, 200, probability=probability), random.Random(k), 1500
    n = rate.groups_for(k, 10**6)
    a, b = posterior(rate)["a"]
    filled = 0
    for _ in range(runs):
        p = rng.betavariate(a, b)
        deviation = math.sqrt(n * p * (1 - p))
        num = round(rng.gauss(n * p, deviation)) if n > 400 else sum(rng.random() < p for _ in range(n))
        filled += num >= k
    slack = (0.02 if k > EXACT else 0) + 3 * math.sqrt(probability * (1 - probability) / runs)
    assert filled / runs >= probability - slack


# ---- checkpoints ----


def test_state_round_trip_in_the_middle_of_a_cohort():
    rate = KeepRate(8, 0.9)
    add(rate, 5, 3, "a")
    cohort = rate.dispatched(["a", "b", "b"])
    rate.ended(tickets(cohort, "b", 1), KEPT)
    again = KeepRate(8, 0.9)
    again.load_state_dict(json.loads(json.dumps(rate.state_dict())))
    assert again.state_dict() == rate.state_dict()
    for each in (rate, again):
        each.ended(tickets(cohort, "b", 1), FILTERED)
        each.ended(tickets(cohort, "a", 1), KEPT)
        add(each, 3, 1, "b")
    assert again.state_dict() == rate.state_dict()
    assert (again.expected, again.groups_for(5, 99)) == (rate.expected, rate.groups_for(5, 99))
    assert (again.kept, again.judged) == (10, 15)


def test_state_is_bounded():
    rate = KeepRate(8, 0.9)
    sizes = [len(json.dumps(add(rate, 5, 3).state_dict())) for _ in range(300)]
    assert max(sizes[200:]) <= max(sizes[:50]) + 60  # digits
    assert rate.state_dict()["cohorts"] == []


# ---- why only closed cohorts count ----


def test_stopping_when_full_biases_the_naive_ratio():
    """With independent draws of rate p, drawn until the k-th is kept after n draws: E[(k - 1) / (n - 1)] = p, k >= 2.

    The naive k / n is too high, since the last draw is always a kept one. At k = 2, p = 0.5 it is
    sum_n (n - 1) 2 / n / 2^n = 2 (1 - ln 2) = 0.614. Cohorts that are closed, of a size fixed in advance, are not
    biased: their rate agrees with the oracle in the mean.
    """
    p, k, runs, rng = 0.5, 2, 20_000, random.Random(0)
    naive, oracle, closed = [], [], []
    for _ in range(runs):
        kept, drawn = 0, []
        while kept < k:
            drawn.append(rng.random() < p)
            kept += drawn[-1]
        n = len(drawn)
        naive.append(k / n)
        oracle.append((k - 1) / (n - 1))
        rate = KeepRate(k, 0.9)
        cohort = rate.dispatched(["a"] * 4)  # goes on to its end, whether the step is full or not
        for _ in range(4):
            rate.ended(tickets(cohort, "a", 1), KEPT if rng.random() < p else FILTERED)
        closed.append(rate.mean)
    error = lambda values: 4 * stdev(values) / math.sqrt(runs)  # noqa: E731
    assert abs(fmean(naive) - 2 * (1 - math.log(2))) < error(naive)
    assert abs(fmean(oracle) - p) < error(oracle)
    assert abs(fmean(closed) - fmean(oracle)) < math.hypot(error(closed), error(oracle))
    assert fmean(naive) > p + 0.1


@pytest.mark.parametrize("verdict", [FAILED, STALE])
def test_groups_without_a_judgement_of_the_tasks_do_not_move_the_posterior(verdict):
    rate = KeepRate(8, 0.9)
    cohort = rate.dispatched(["a"] * 8)
    rate.ended(tickets(cohort, "a", 8), verdict)
    assert posterior(rate) == {"a": [4.0, 4.0]}
    assert rate.mean is None
