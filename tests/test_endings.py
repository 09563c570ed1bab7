"""However a run goes wrong, it ends as its policy says, in time, and its message names the cause."""

import time

import pytest
from run_helpers import quick_build, wrap

import dynrl
from dynrl.loop import RunError

pytestmark = pytest.mark.usefixtures("quick_compiles")

SCHEDULES = {
    "rounds": {},
    "in_order": {"schedule__name": "in_order", "schedule__max_lookahead_versions": 1},
    "ready_first async": {
        "schedule__name": "ready_first", "schedule__max_staleness_versions": 2, "schedule__mode": "async",
    },
}  # fmt: skip


@pytest.fixture(params=SCHEDULES)
def run(request, tiny_config, tmp_path):
    """Runs under each schedule."""

    def go(build_parts=quick_build, **overrides):
        chosen = {
            "num_steps": 4, "model__num_layers": 1, "warm_start__num_steps": 0, "tensorboard": False,
            "reward__verifier": "user_code:coin", "evaluation__num_tasks": 8,
        }  # fmt: skip
        config = tiny_config(**{**chosen, **SCHEDULES[request.param], **overrides})
        return dynrl.run(config, str(tmp_path), (), build_parts).metrics

    return go


def test_a_filter_that_drops_everything(run):
    with pytest.raises(RunError, match=r"max_replacements_per_slot = 3|max_num_gen_batches = 10") as error:
        run(dynamic_sampling__filter="min_std", dynamic_sampling__filter_kwargs={"threshold": 9.0},
            dynamic_sampling__max_replacements_per_slot=3)  # fmt: skip
    assert "drop rate 100%" in str(error.value)


def test_a_filter_that_drops_everything_and_short_steps(run):
    with pytest.raises(RunError, match=r"max_consecutive_unfilled_steps = 1"):
        run(dynamic_sampling__filter="min_std", dynamic_sampling__filter_kwargs={"threshold": 9.0},
            dynamic_sampling__max_replacements_per_slot=1, dynamic_sampling__max_num_gen_batches=2,
            dynamic_sampling__on_exhausted="short", dynamic_sampling__max_consecutive_unfilled_steps=1)  # fmt: skip


def test_a_filter_that_drops_too_much_is_relaxed(run):
    """Refused groups that carry signal fill the step, those of the largest spread."""
    rows = run(dynamic_sampling__filter="min_std", dynamic_sampling__filter_kwargs={"threshold": 9.0},
               dynamic_sampling__max_replacements_per_slot=1, dynamic_sampling__max_num_gen_batches=2,
               dynamic_sampling__on_exhausted="relax")  # fmt: skip
    assert [r["run/step"] for r in rows] == list(range(5))
    assert sum(r["backfill/relaxed_groups"] for r in rows[1:]) == 4 * 8
    assert all(r["train_batch/zero_advantage_groups_frac"] == 0 for r in rows[1:])
    assert rows[-1]["ledger/trained"] == 4 * 8


def test_a_filter_that_keeps_everything(run):
    rows = run(dynamic_sampling__enable=False)
    assert rows[-1]["ledger/trained"] == 4 * 8
    assert rows[-1]["ledger/dropped"] == 0


def test_failed_groups_are_replaced_and_spend_their_own_budget(run):
    rows = run(reward__verifier="user_code:stumbles")
    assert [r["run/step"] for r in rows] == list(range(5))
    assert rows[-1]["ledger/failed"] > 0
    assert rows[-1]["ledger/trained"] == 4 * 8


def test_too_many_failed_groups_end_the_run(run):
    with pytest.raises(RunError, match=r"groups failed, more than rollout_failure.max_skipped_prompts = 0") as error:
        run(reward__verifier="user_code:stumbles", rollout_failure__max_skipped_prompts=0)
    assert "the judge is out" in str(error.value)


def test_a_verifier_that_hangs_at_times_costs_its_deadline(run):
    begin = time.monotonic()
    rows = run(reward__verifier="user_code:hangs", reward__timeout_secs=0.3, num_steps=2)
    assert rows[-1]["ledger/trained"] == 2 * 8
    assert sum(r.get("reward/status/timeout") or 0 for r in rows) > 0  # live, with score 0
    assert time.monotonic() - begin < 60


def test_a_verifier_that_always_hangs_ends_the_run(run):
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"hangs_always"):
        run(reward__verifier="user_code:hangs_always", reward__timeout_secs=0.2, reward__max_consecutive_timeouts=5)
    assert time.monotonic() - begin < 60


def test_a_sampler_that_dies_is_raised_with_its_cause(run):
    def build_parts(config):
        parts = quick_build(config)
        wrap(parts.player, "poll", lambda original: dies_after(9, original))
        return parts

    with pytest.raises(OSError, match="the device is gone"):
        run(build_parts)


def dies_after(num, original):
    left = iter(range(num))

    def poll(*args):
        if next(left, None) is None:
            raise OSError("the device is gone")
        return original(*args)

    return poll
