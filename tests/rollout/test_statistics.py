"""The rollout metrics of a step, by numbers worked out by hand, over the populations of law 8."""

import json

import jax
import numpy as np
import pytest

from dynrl.core import group_stats
from dynrl.metrics import check_names
from dynrl.rollout.buffer import RECORD
from dynrl.rollout.judge import Judged
from dynrl.rollout.keep_rate import KeepRate
from dynrl.rollout.ledger import Ledger, Ticket
from dynrl.rollout.records import STATUSES, JudgedGroups, Records
from dynrl.rollout.statistics import RolloutStatistics
from dynrl.types import Finish, Status, Task, Verdict

TOTALS, RATES = Ledger().totals(), KeepRate(4, 0.9)


def group(
    number, scores, verdict, pattern, *, index=0, lengths=None, statuses=None, finish=None, metric=None, source="s"
):
    """One judged group, as the row of each array."""
    statuses = statuses or [Status.OK] * len(scores)
    metric = np.array([scores if metric is None else metric], np.float32)
    records = Records(
        score=np.array([scores], np.float32),
        metric=metric,
        status=np.array([[STATUSES.index(s) for s in statuses]], np.int32),
        length=np.array([lengths or [1] * len(scores)], np.int32),
        finish=np.array([finish or [Finish.STOP] * len(scores)], np.int32),
        host_keep=np.ones((1, 1), np.int32),
        components=np.zeros((1, 0), np.float32),
    )
    judged = Judged(
        np.array([verdict], object),
        np.array([pattern], object),
        np.zeros(1, bool),
        group_stats(records.metric, records.live),
    )
    return JudgedGroups([Ticket(number, number, 0, 0, 0, index)], [Task(-1, source, "p", "a")], judged, records)


def together(groups):
    """Several judged groups as one."""
    stack = lambda *x: np.concatenate(x)  # noqa: E731
    judged, records = (jax.tree.map(stack, *[getattr(g, name) for g in groups]) for name in ("judged", "records"))
    tickets, tasks = ([x for g in groups for x in getattr(g, name)] for name in ("tickets", "tasks"))
    return JudgedGroups(tickets, tasks, judged, records)


def stored(**columns):
    """Records of dtype RECORD, by column."""
    records = np.zeros(len(next(iter(columns.values()))), RECORD)
    for name, values in columns.items():
        records[name] = values
    return records


# A step of five groups of 4. The dead rollouts hold what must not count.
NAN = float("nan")
GROUPS = [
    group(0, [1, 0, 0, 1], Verdict.KEPT, "mixed", lengths=[2, 4, 6, 8], finish=[0, 1, 0, 0]),
    group(1, [1, 1, 1, 1], Verdict.FILTERED, "all_pass", lengths=[1, 1, 1, 1]),
    group(2, [0, 0, 0, 0], Verdict.FILTERED, "all_fail", lengths=[9, 9, 9, 9], finish=[1, 1, 1, 1],
          statuses=[Status.OK, Status.TIMEOUT, Status.UNPARSABLE, Status.OK]),
    group(3, [1, NAN, 0, 0], Verdict.FAILED, "mixed", lengths=[3, 5, 3, 3],
          statuses=[Status.OK, Status.CRASHED, Status.OK, Status.OK]),
    group(4, [0, 1, 1, 1], Verdict.KEPT, "mixed", index=1, lengths=[5, 5, 5, 5]),
]  # fmt: skip


def test_populations_patterns_and_waste():
    """The filtered reward alone misleads (prime-rl#1205, NeMo-RL#4588): every population has its own."""
    statistics = RolloutStatistics("score")
    statistics.judged(together(GROUPS[:3]))
    statistics.judged(together(GROUPS[3:]))  # over several rounds
    records = stored(score=[2, 3], metric=[2, 3], length=[20, 8], live=[4, 3], step=[0, 1], version=[3, 5])
    statistics.trained(records, step=1, version=5)
    statistics.freed(stored(tokens=[60, 40]))
    row = statistics.row(TOTALS, {"num_rounds": 2}, RATES, surplus=7)
    check_names(row)
    expected = {
        # 19 live rollouts: 2 + 4 + 0 + 1 + 3 of them right
        "reward/score/all/mean": 10 / 19,
        "reward/score/kept/mean": 5 / 8,
        "reward/score/first_attempt/mean": 7 / 15,  # without the last group, a replacement
        "reward/score/trained/mean": 5 / 7,
        "length/all/mean": (20 + 4 + 36 + 9 + 20) / 19,
        "length/kept/mean": 40 / 8,
        "length/first_attempt/mean": 69 / 15,
        "length/trained/mean": 28 / 7,
        "length/truncated_frac": 5 / 19,
        "length/kept_over_all": (40 / 8) / (89 / 19),
        # 4 groups did not fail
        "group_filter/kept_frac": 2 / 4,
        "group_filter/zero_variance_frac": 2 / 4,
        "group_filter/all_pass_frac": 1 / 4,
        "group_filter/all_fail_frac": 1 / 4,
        "group_filter/other_frac": 0,
        "group_filter/pattern/pre/0": 1,
        "group_filter/pattern/pre/2": 1,
        "group_filter/pattern/pre/3": 1,
        "group_filter/pattern/pre/4": 1,
        "group_filter/pattern/post/2": 1,
        "group_filter/pattern/post/3": 1,
        "reward/status/ok": 17,
        "reward/status/timeout": 1,
        "reward/status/unparsable": 1,
        "reward/status/crashed": 1,
        "backfill/wasted_tokens": 4 + 36 + 14 + 100,  # the dead rollout's 5 too: they were generated
        "backfill/carried_groups": 1,
        "backfill/num_rounds": 2,
        "backfill/surplus_groups": 7,
        "train_batch/staleness/mean": 1.0,  # (2 + 0) / 2
        "train_batch/staleness/versions/0": 1,
        "train_batch/staleness/versions/2": 1,
    }
    assert {k: row.get(k) for k in expected} == pytest.approx(expected)
    assert [k for k in row if "pattern" in k and k not in expected] == []
    assert [k for k in row if "status" in k and k not in expected] == []


def test_nothing_judged_is_null_not_zero():
    row = RolloutStatistics("score").row(TOTALS, {}, RATES, 0)
    check_names(row)
    for population in ("all", "kept", "trained", "first_attempt"):
        assert row[f"reward/score/{population}/mean"] is None
        assert row[f"length/{population}/mean"] is None
    for share in ("kept", "zero_variance", "all_pass", "all_fail", "other"):
        assert row[f"group_filter/{share}_frac"] is None
    assert row["backfill/wasted_tokens"] == 0


def test_a_row_starts_afresh():
    statistics = RolloutStatistics("score")
    statistics.judged(together(GROUPS))
    first = statistics.row(TOTALS, {}, RATES, 0)
    statistics.judged(together(GROUPS))
    assert statistics.row(TOTALS, {}, RATES, 0) == first


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ([0.5, 0.5], "spread_0"),
        ([0.5, 0.5 + 1e-7], "spread_0"),
        ([0.25, 0.3], "spread_0-0.1"),
        ([0.25, 0.4], "spread_0.1-0.2"),
        ([0, 0.25], "spread_0.2-0.5"),
        ([-1, 0], "spread_0.5-1"),
        ([-1, 1], "spread_over_1"),
        ([0, 1], "1"),
        ([1, 1], "2"),
        ([-0.0, 0.0], "0"),
    ],
)
def test_patterns_of_graded_rewards_are_spread_bins(metric, name):
    statistics = RolloutStatistics("score")
    statistics.judged(group(0, metric, Verdict.KEPT, "mixed"))
    row = statistics.row(TOTALS, {}, RATES, 0)
    check_names(row)
    assert {k: v for k, v in row.items() if "pattern" in k} == {
        f"group_filter/pattern/pre/{name}": 1,
        f"group_filter/pattern/post/{name}": 1,
    }


def test_another_metric_is_recorded_beside_the_score():
    statistics = RolloutStatistics("style")
    statistics.judged(group(0, [1, 0], Verdict.KEPT, "mixed", metric=[0.25, 0.5]))
    statistics.trained(stored(score=[1.0], metric=[0.75], length=[2], live=[2]), 0, 0)
    row = statistics.row(TOTALS, {}, RATES, 0)
    check_names(row)
    for population in ("all", "kept", "trained", "first_attempt"):
        assert row[f"reward/score/{population}/mean"] == 0.5
        assert row[f"reward/style/{population}/mean"] == 0.375


def test_several_sources_are_counted_apart():
    """One number for all data sets hides the starved one (verl#7579)."""
    statistics = RolloutStatistics("score", ["gcd", "lcm", "rare"])
    names = ("gcd", "lcm", "gcd", "lcm", "lcm")
    verdicts = (Verdict.KEPT, Verdict.FILTERED, Verdict.FAILED, Verdict.KEPT, Verdict.FILTERED)
    rewards = ([1, 0], [1, 1], [0, 1], [1, 0], [0, 0])
    columns = zip(rewards, verdicts, names, strict=True)
    statistics.judged(together([group(i, r, v, "mixed", source=n) for i, (r, v, n) in enumerate(columns)]))
    row = statistics.row(TOTALS, {}, RATES, 0)
    check_names(row)
    assert {k: v for k, v in row.items() if k.startswith("source/")} == {
        "source/gcd/groups": 2, "source/gcd/kept_frac": 1.0, "source/gcd/reward/mean": 0.5,  # one failed: not judged
        "source/lcm/groups": 3, "source/lcm/kept_frac": 1 / 3, "source/lcm/reward/mean": 0.5,
        "source/rare/groups": 0, "source/rare/kept_frac": None, "source/rare/reward/mean": None,
    }  # fmt: skip
    assert not any(k.startswith("source/") for k in RolloutStatistics("score", ["one"]).row(TOTALS, {}, RATES, 0))


def test_the_ledger_is_shown():
    ledger = Ledger()
    for i in range(3):
        ledger.dispatch(i, 0, 0, 0, 0)
    ledger.end([0], failed=True)
    row = RolloutStatistics("score").row(ledger.totals(), {}, RATES, 0)
    shown = {k.removeprefix("ledger/"): v for k, v in row.items() if k.startswith("ledger/")}
    assert shown == {
        "dispatched": 3, "trained": 0, "failed": 1, "dropped": 0, "in_flight": 2, "judging": 0, "deferred": 0,
        "ready": 0, "held": 0, "training": 0,
        "dropped/filtered": 0, "dropped/stale": 0, "dropped/evicted": 0, "dropped/cancelled": 0, "dropped/surplus": 0,
    }  # fmt: skip


def test_counts_survive_a_restart_in_the_middle_of_a_step():
    whole, before = RolloutStatistics("score"), RolloutStatistics("score")
    whole.judged(together(GROUPS))
    before.judged(together(GROUPS[:2]))
    after = RolloutStatistics("score")
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    after.judged(together(GROUPS[2:]))
    assert after.row(TOTALS, {}, RATES, 0) == whole.row(TOTALS, {}, RATES, 0)


def test_a_group_is_tried_again_for_the_sampler_but_not_for_a_crash_that_was():
    """The verifiers' pool makes its attempts itself, with the completions that there are."""
    for status, cause in ((Status.SAMPLER, "infra"), (Status.CRASHED, ""), (Status.ERROR, "data")):
        failed = group(3, [1, NAN], Verdict.FAILED, "mixed", statuses=[Status.OK, status])
        assert [j.cause for j in failed.judgements()] == [cause]
    both = group(3, [NAN, NAN], Verdict.FAILED, "mixed", statuses=[Status.SAMPLER, Status.CRASHED])
    assert [j.cause for j in both.judgements()] == ["infra"]


def test_outcomes_have_signal_by_the_metrics_spread_whatever_the_filter_said():
    refused = group(0, [0, 1, 1, 1], Verdict.FILTERED, "mixed")
    partial_credit = group(1, [0.1, 0.1, 0.1, 0.1], Verdict.FILTERED, "all_pass")
    outcomes = [outcome for x in (refused, partial_credit) for outcome in x.outcomes()]
    assert [(o.signal, o.num_positive) for o in outcomes] == [(True, 3), (False, 4)]


def test_an_attempt_that_is_made_again_counts_as_waste_alone():
    statistics = RolloutStatistics("score")
    statistics.retried(group(3, [1, NAN], Verdict.FAILED, "mixed", lengths=[3, 4], statuses=[Status.OK, Status.ERROR]))
    row = statistics.row(TOTALS, {}, RATES, surplus=0)
    assert row["backfill/wasted_tokens"] == 7
    assert row["reward/score/all/mean"] is None
