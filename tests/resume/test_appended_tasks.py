"""A run whose training tasks grow: from any checkpoint it goes on with the same tasks, and so as the same run."""

import shutil

import jax
import numpy as np
import pytest
from run_helpers import quick_build, rows_of, wrap

import dynrl

pytestmark = pytest.mark.usefixtures("quick_compiles")

NUM_STEPS = 3


def growing(config):
    """Parts whose store gets three tasks more at every draw; the selector may draw them at once."""
    parts = quick_build(config)

    def draw_of(draw):
        def append_and_draw(n, store):
            first = len(store)
            new = [parts.source.task(99, first + i, parts.eval_tasks.hashes) for i in range(3)]
            store.append(new, step=first, version=0, generator="test")
            return draw(n, store)

        return append_and_draw

    wrap(parts.selection, "draw", draw_of)
    return parts


def run(config, workdir):
    return dynrl.run(config, str(workdir), (), growing)


def test_appended_tasks_are_there_again_after_a_kill(tiny_config, tmp_path):
    config = tiny_config(
        num_steps=NUM_STEPS, model__num_layers=1, warm_start__num_steps=0, tensorboard=False, tasks__num_tasks=20,
        reward__verifier="user_code:rare", checkpoint__every_steps=1, checkpoint__max_to_keep=20,
        train__learning_rate=0.003,
    )  # fmt: skip
    whole = run(config, tmp_path / "whole")
    log = (tmp_path / "whole" / "tasks.jsonl").read_bytes()
    assert log.count(b'"prompt"') > 3 * NUM_STEPS
    target = tmp_path / "again"
    shutil.copytree(tmp_path / "whole" / "checkpoints" / "1", target / "checkpoints" / "1")
    shutil.copy(tmp_path / "whole" / "metrics.jsonl", target)
    (target / "tasks.jsonl").write_bytes(log[:-40])  # the run was killed while it wrote
    again = run(config, target)
    assert rows_of(target) == rows_of(tmp_path / "whole")
    assert (target / "tasks.jsonl").read_bytes() == log
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    (target / "tasks.jsonl").write_bytes(log.replace(b"1", b"2", 1))
    with pytest.raises(ValueError, match=r"tasks\.jsonl, line 1: it is not as it was"):
        run(config, target)
