"""Task generators in whole runs: what is proposed is admitted, drawn and trained, and survives restarts and faults."""

from typing import Any

import jax
import numpy as np
import pytest
from run_helpers import quick_build, restart_from, rows_of

import dynrl
from dynrl.config import ConfigError, from_mapping, to_mapping
from dynrl.results import RunError
from dynrl.tasks.base import task_hash

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM_STEPS = 7


@pytest.fixture
def config_of(tiny_config):
    def make(generator, **overrides):
        chosen = {
            "num_steps": NUM_STEPS, "model__num_layers": 1, "warm_start__num_steps": 0, "tensorboard": False,
            "reward__verifier": "user_code:coin", "checkpoint__every_steps": 1, "checkpoint__max_to_keep": 20,
            "train__learning_rate": 0.003, "generation__generator": f"user_generators:{generator}",
            "generation__self_check": False, "tasks__new_first": True,
        }  # fmt: skip
        return tiny_config(**{**chosen, **overrides})

    return make


class Spy:
    """Parts that note every draw, and the store as it was at the end."""

    def __init__(self, num_devices=1):
        self.drawn, self.num_devices = [], num_devices
        self.parts: Any = None

    def __call__(self, config):
        self.parts = parts = quick_build(config, self.num_devices)
        draw = parts.selection.draw

        def noted(n, store):
            draws = draw(n, store)
            self.drawn.append((len(store), [d.task_id for d in draws]))
            return draws

        parts.selection.draw = noted
        return parts


def run(config, workdir, spy=None):
    return dynrl.run(config, str(workdir), (), spy or Spy())


def total(rows, name):
    return sum(row.get(name) or 0 for row in rows)


def test_an_appended_task_is_drawn_at_the_very_next_step(config_of, tmp_path):
    spy = Spy()
    run(config_of("Random", generation__admit_after_steps=0), tmp_path, spy)
    rows, store = rows_of(tmp_path), spy.parts.store
    assert len(store) == 500 + total(rows, "tasks/appended") == rows[-1]["tasks/size"]
    assert total(rows, "tasks/appended") == total(rows, "generator/Random/admitted") >= NUM_STEPS
    assert all(row["run/recompiles"] == 0 for row in rows[1:])
    seen = 500
    for length, ids in spy.drawn:  # by the first draw after it was appended, in order of id
        new = list(range(seen, length))
        assert [i for i in ids if i >= seen] == new
        seen = length
    for i in range(500, seen):
        made: Any = store.provenance(i)
        assert made["generator"] == "Random"
        assert made["step"] == made["version"] >= 1
        assert store.get([i])[0].parents


def test_what_may_not_be_trained_on_is_refused_by_reason(config_of, tmp_path):
    spy = Spy()
    config = config_of("Wrong", generation__self_check=True, reward__verifier="user_code:sorts", num_steps=2)
    run(config, tmp_path, spy)
    last = rows_of(tmp_path)[-1]  # of the second step: what was asked after the first
    refused = {k.removeprefix("tasks/refused/"): v for k, v in last.items() if k.startswith("tasks/refused/") and v}
    assert spy.parts.eval_tasks.hashes
    want = {"schema": 3, "source": 1, "unencodable": 1, "too_long": 1, "answer": 1, "duplicate": 1}
    assert {k: refused.get(k) for k in want} == want
    assert last["generator/Wrong/proposed"] == 10
    assert last["generator/Wrong/admitted"] == 10 - sum(refused.values())


def test_the_evaluation_tasks_never_change_nor_enter_training(config_of, tmp_path):
    spy = Spy()
    config = config_of("Random", generation__generator_kwargs={"num": 40})
    run(config, tmp_path, spy)
    frozen, store = spy.parts.eval_tasks, spy.parts.store
    assert frozen.fingerprint == quick_build(config).eval_tasks.fingerprint
    appended = store.get(range(500, len(store)))
    assert len(appended) > 100
    assert not frozen.hashes & {task_hash(task.prompt) for task in appended}


@pytest.mark.parametrize("schedule", ["rounds", "ready_first"])
@pytest.mark.parametrize("generator", ["Random", "Asking", "Stumbling", "Paying"])
def test_from_any_checkpoint_the_run_goes_on_bitwise(config_of, tmp_path, generator, schedule):
    spy = Spy()
    lag = 1 if generator == "Stumbling" else 2
    config = config_of(
        generator, schedule__name=schedule, generation__admit_after_steps=lag, generation__probe_samples=4
    )
    whole = run(config, tmp_path / "whole", spy)
    rows, tasks = rows_of(tmp_path / "whole"), spy.parts.store.get(range(500, len(spy.parts.store)))
    assert total(rows, "tasks/appended") == len(tasks) >= 1
    assert all(row["run/recompiles"] == 0 for row in rows[1:])
    for step in (2, 3, 5):
        target = tmp_path / f"from_{step}"
        restart_from(tmp_path / "whole", target, step)
        again_spy = Spy()
        again = run(config, target, again_spy)
        for got, want in zip(rows_of(target), rows, strict=True):
            assert got == want
        store = again_spy.parts.store
        assert store.get(range(500, len(store))) == tasks
        jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def test_a_generator_that_raises_is_reported_and_asked_again_later(config_of, tmp_path, capfd):
    config = config_of("Stumbling", progress="plain", num_steps=9, generation__admit_after_steps=0)
    run(config, tmp_path)
    rows, said = rows_of(tmp_path), capfd.readouterr().out
    # Asked at 1 (fails), 2 (fails: two steps of rest), 4, 5 (fails), 6 (fails), 8.
    failed = [row["run/step"] for row in rows[1:] if row["generator/Stumbling/failures"]]
    assert failed == [1, 2, 5, 6]
    assert [row["run/step"] for row in rows[1:] if row["tasks/appended"]] == [4, 8]
    assert "generator Stumbling, asked at step 1: RuntimeError: the well is dry (" in said
    assert "user_generators.py:" in said


def test_a_generator_that_fails_too_often_ends_the_run_where_that_is_wanted(config_of, tmp_path, capfd):
    config = config_of("Broken", progress="plain", generation__max_consecutive_generator_failures=2, num_steps=9)
    run(config, tmp_path / "warn")
    assert "warning: generator Broken" in capfd.readouterr().out
    mapping = to_mapping(config)
    mapping["generation"]["on_generator_failures"] = "raise"
    with pytest.raises(
        RunError, match=r"generator Broken, asked at step .*must return a sequence.*2 failures in a row"
    ):
        run(from_mapping(mapping), tmp_path / "raise")


def test_a_generator_that_hangs_is_given_up_at_its_deadline(config_of, tmp_path, capfd):
    config = config_of("Hanging", progress="plain", num_steps=3, generation__deadline_secs=0.2)
    run(config, tmp_path)
    rows, said = rows_of(tmp_path), capfd.readouterr().out
    assert total(rows, "generator/Hanging/failures") == 1
    assert "generator Hanging, asked at step 1: gave nothing within generation.deadline_secs = 0.2" in said
    assert len(rows) == 4


def test_probes_keep_what_is_solved_sometimes(config_of, tmp_path):
    spy = Spy()
    config = config_of("Random", generation__probe_samples=4, generation__generator_kwargs={"num": 20})
    run(config, tmp_path, spy)
    rows = rows_of(tmp_path)
    refused, appended = total(rows, "tasks/refused/probe"), total(rows, "tasks/appended")
    # By a fair coin, one of 8 groups of 4 is uniform.
    assert refused > 0
    assert appended > 2 * refused


def test_budgets_of_a_call_and_of_a_run(config_of, tmp_path):
    config = config_of(
        "Random", generation__max_tasks_per_call=4, generation__max_tasks=6, generation__generator_kwargs={"num": 9}
    )
    run(config, tmp_path)
    rows = rows_of(tmp_path)
    assert [row["tasks/appended"] for row in rows[2:]] == [4, 2, 0, 0, 0, 0]
    assert total(rows, "tasks/refused/budget") > 0
    assert [row["generator/Random/proposed"] for row in rows[2:]] == [9, 9, 0, 0, 0, 0]  # then nobody asks


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"generation__every_steps": 0}, "generation.every_steps"),
        ({"generation__probe_samples": 1}, "generation.probe_samples"),
        ({"generation__generator": "", "tasks__new_first": False}, "generation.self_check"),
        ({"generation__generator": "curriculum"}, "generation.generator"),
        ({"generation__generator": "user_generators:Rando"}, "generation.generator"),
        ({"generation__generator_kwargs": {"nom": 3}}, "generation.generator"),
        ({"generation__generator": "user_code:coin"}, "generation.generator"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(config_of, tmp_path, overrides, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        run(config_of("Random", **overrides), tmp_path)


def test_it_is_asked_when_few_groups_are_kept(config_of, tmp_path):
    often = config_of("Random", generation__every_steps=0, generation__keep_rate_below=1.0)
    run(often, tmp_path / "often")
    never = config_of("Random", generation__every_steps=0, generation__keep_rate_below=0.001)
    run(never, tmp_path / "never")
    assert total(rows_of(tmp_path / "often"), "generator/Random/proposed") > 0
    assert total(rows_of(tmp_path / "never"), "generator/Random/proposed") == 0
