"""The policy's own proposals in whole runs: deferred, solved, rewarded by what became of them, and resumable."""

from typing import Any

import jax
import numpy as np
import pytest
from run_helpers import quick_build, restart_from, rows_of

import dynrl
from dynrl.config import ConfigError
from dynrl.tasks.self_propose import FIRST_ID

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM_STEPS = 8
SCHEDULES = {
    "rounds": {"name": "rounds"},
    "in_order": {"name": "in_order", "max_lookahead_versions": 1},
    "ready_first": {"name": "ready_first", "max_staleness_versions": 3},
    "weight_fifo async": {"name": "weight_fifo", "max_staleness_versions": 6, "mode": "async", "chunks_per_update": 2},
    "windowed": {"name": "windowed", "max_staleness_versions": 6, "sample_freshest_first": False},
}


@pytest.fixture
def config_of(tiny_config):
    """Nearly every text of up to four symbols is a proposal, and a coin judges the answers."""

    def make(schedule="rounds", **overrides):
        chosen = {
            "num_steps": NUM_STEPS, "model__num_layers": 1, "warm_start__num_steps": 0, "tensorboard": False,
            "reward__verifier": "user_code:coin", "checkpoint__every_steps": 1, "checkpoint__max_to_keep": 20,
            "train__learning_rate": 0.003, "dynamic_sampling__oversample": 1.5,
            "self_propose__kind": "user_kinds:AnyText", "self_propose__groups_per_step": 2,
        }  # fmt: skip
        schedule = {f"schedule__{key}": value for key, value in SCHEDULES[schedule].items()}
        return tiny_config(**{**chosen, **schedule, **overrides})

    return make


class Spy:
    """Parts that note every verdict and every batch."""

    def __call__(self, config):
        self.parts = parts = quick_build(config)
        self.trained, self.proposers = [], {}
        take = parts.buffer.take

        def noted(tickets):
            self.trained += tickets
            batch = take(tickets)
            self.proposers.update(zip(tickets, np.asarray(batch.role_B).tolist(), strict=False))
            return batch

        parts.buffer.take = noted
        return parts


def run(config, workdir, spy=None):
    return dynrl.run(config, str(workdir), (), spy or Spy())


def total(rows, name):
    return sum(row.get(name) or 0 for row in rows)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_proposals_are_trained_by_what_became_of_their_tasks(config_of, tmp_path, schedule):
    spy = Spy()
    whole = run(config_of(schedule), tmp_path / "whole", spy)
    rows, store = rows_of(tmp_path / "whole"), spy.parts.store
    assert all(row["run/recompiles"] == 0 for row in rows[1:])
    assert all(row["train_batch/groups"] == 8 for row in rows[1:])
    assert all(row["train_batch/zero_advantage_groups_frac"] == 0 for row in rows[1:])
    assert len(spy.trained) == len(set(spy.trained)) == 8 * NUM_STEPS
    assert total(rows, "self_propose/admitted") == len(store) - 500 > 20
    assert total(rows, "self_propose/learnable") > 10
    roles = [spy.proposers[t] for t in spy.trained]
    assert 2 < sum(roles) < 4 * NUM_STEPS  # proposals that carry signal, beside those who solve
    for task in store.get(range(500, len(store))):
        assert task.source == "digit_sorting"
        assert all(parent < task.task_id for parent in task.parents)
        made: Any = store.provenance(task.task_id)
        assert made["generator"] == "self_propose/any_text"
    last = rows[-1]
    booked = sum(last[f"ledger/{name}"] for name in ("trained", "dropped", "failed"))
    phases = ("in_flight", "judging", "deferred", "ready", "held", "training")
    assert last["ledger/dispatched"] == booked + sum(last[f"ledger/{name}"] for name in phases)
    for step in (2, 5):
        target = tmp_path / f"from_{step}"
        restart_from(tmp_path / "whole", target, step)
        again_spy = Spy()
        again = run(config_of(schedule), target, again_spy)
        for got, want in zip(rows_of(target), rows, strict=True):
            assert got == want
        new = again_spy.parts.store
        assert new.get(range(500, len(new))) == store.get(range(500, len(store)))
        jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_without_the_samplers_work_what_was_deferred_is_cancelled(config_of, tmp_path):
    config = config_of("ready_first", checkpoint__in_flight="resubmit")
    run(config, tmp_path / "whole")
    target = tmp_path / "again"
    restart_from(tmp_path / "whole", target, 4)
    run(config, target)
    rows = rows_of(target)
    assert [row["run/step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert rows[-1]["ledger/trained"] == 8 * NUM_STEPS
    assert rows[-1]["ledger/dropped/cancelled"] == rows[4]["ledger/deferred"] > 0


def test_texts_that_are_no_new_tasks_are_punished_and_counted(config_of, tmp_path):
    spy = Spy()
    run(config_of(self_propose__kind="digits", self_propose__kind_kwargs={"max_length": 2}), tmp_path, spy)
    rows = rows_of(tmp_path)
    refused = {k.rpartition("/")[2]: total(rows, k) for k in rows[1] if k.startswith("self_propose/refused/")}
    assert refused["bad_form"] > 0  # of a policy that knows nothing
    for row in rows[1:]:  # the solver's rewards are 0 and 1; the proposer's are told by source alone
        assert all(0 <= row[f"reward/score/{name}/mean"] <= 1 for name in ("all", "first_attempt", "base"))
    assert min(row["source/self_propose/digits/reward/mean"] or 0 for row in rows[1:]) < 0
    assert sum(refused.values()) + total(rows, "self_propose/admitted") == total(rows, "self_propose/proposed")
    assert all(task.task_id < FIRST_ID for task in spy.parts.store.get(range(len(spy.parts.store))))


def test_batch_normalised_advantages_are_those_of_each_role(config_of, tmp_path):
    config = config_of(loss__estimator="reinforce_pp", dynamic_sampling__enable=True)
    run(config, tmp_path)
    assert len(rows_of(tmp_path)) == NUM_STEPS + 1


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"self_propose__kind": "digit"}, "self_propose.kind"),
        ({"self_propose__kind": ""}, "self_propose.groups_per_step"),
        ({"self_propose__groups_per_step": 8}, "self_propose.groups_per_step"),
        ({"self_propose__kind_kwargs": {"colour": 1}}, "self_propose.kind"),
        ({"self_propose__kind": "program"}, "tasks.max_prompt_tokens"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(config_of, tmp_path, overrides, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        run(config_of(**overrides), tmp_path)
