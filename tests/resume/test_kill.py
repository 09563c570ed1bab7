"""A run that is killed, interrupted or finds a damaged checkpoint, against one that was left alone (law 7)."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from run_helpers import ROOT, child_environment, quick_build, reproducible, write_config_file

import dynrl

NUM_STEPS = 60
NUM_KILLS = 20
DEADLINE_SECS = 240


@pytest.fixture(scope="module")
def config(tiny_config):
    """Surplus in nearly every step, carried, and new tasks after it; checkpoints in the background at every second."""
    return tiny_config(
        num_steps=NUM_STEPS, progress="plain", tensorboard=False, model__num_layers=1, train__learning_rate=0.003,
        reward__verifier="user_code:coin", warm_start__num_steps=4, warm_start__batch_size=16,
        dynamic_sampling__oversample=1.5, dynamic_sampling__refill="full", evaluation__every_steps=6,
        checkpoint__every_steps=2, generation__generator="user_generators:Random", generation__admit_after_steps=2,
        generation__self_check=False, generation__probe_samples=4, tasks__new_first=True,
    )  # fmt: skip


class Run:
    """launch/train.py in a process group of its own."""

    def __init__(self, config_file: Path, workdir: Path, cache: Path, log: Path) -> None:
        self.log = log
        command = [sys.executable, "launch/train.py", f"--config={config_file}", f"--workdir={workdir}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=child_environment(1, cache), stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    def steps_shown(self) -> int:
        return sum(line.startswith("step ") for line in self.log.read_text().splitlines())

    def wait_for_steps(self, num: int) -> None:
        """Returns when so many rows were made in this life, or the process has ended."""
        self.wait(lambda: self.steps_shown() >= num)

    def end(self) -> int:
        self.wait(lambda: False)
        return self.process.wait()

    def wait(self, reached) -> None:
        deadline = time.monotonic() + DEADLINE_SECS
        while self.process.poll() is None and not reached():
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"nothing for {DEADLINE_SECS} s:\n{self.log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def place(config, tmp_path_factory):
    """A folder with the config file, the shared cache, and the uninterrupted run in `whole`."""
    folder = tmp_path_factory.mktemp("kill")
    write_config_file(folder / "tiny.py", config)
    run = start(folder, "whole")
    assert run.end() == 0, run.log.read_text()
    return folder


def start(folder: Path, name: str, life: int = 0) -> Run:
    return Run(folder / "tiny.py", folder / name, folder / "cache", folder / f"{name}_{life}.log")


def finished_steps(workdir: Path) -> list[int]:
    folder = workdir / "checkpoints"
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) if folder.exists() else []


def document(workdir: Path, step: int):
    (path,) = (workdir / "checkpoints" / str(step) / "document").glob("*metadata*")
    return json.loads(path.read_text())


def weights(workdir: Path, step: int = NUM_STEPS):
    """The train state of a checkpoint, on the host."""
    with ocp.PyTreeCheckpointer() as reader:
        path = workdir / "checkpoints" / str(step) / "arrays"
        tree = reader.metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(path, restore_args=args)["state"]


def rows(workdir: Path):
    return [reproducible(json.loads(line)) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def check_same(folder: Path, name: str) -> None:
    got, expected = rows(folder / name), rows(folder / "whole")
    assert [r["run/step"] for r in got] == list(range(NUM_STEPS + 1))
    for a, b in zip(got, expected, strict=True):
        assert a == b
    whole = weights(folder / "whole")
    assert jax.tree.leaves(whole)
    jax.tree.map(np.testing.assert_array_equal, weights(folder / name), whole)
    log = (folder / "whole" / "tasks.jsonl").read_bytes()
    assert log.count(b'"prompt"') > NUM_STEPS // 2  # tasks that were generated on the way, with their ids
    assert (folder / name / "tasks.jsonl").read_bytes() == log


@pytest.mark.slow
def test_a_run_killed_twenty_times_is_the_run_that_was_not(place):
    """A machine that is quick enough reaches the end before the last kill: the kills left then fall on another run."""
    rng = random.Random(5)
    kills, lives, carried, progress, names = 0, 0, 0, [], ["killed"]
    while kills < NUM_KILLS:
        run = start(place, names[-1], lives)
        lives += 1
        try:
            if kills in (0, 4):  # anywhere between the start of the process and its first steps
                time.sleep(rng.uniform(0.5, 8.0))
            else:
                run.wait_for_steps(rng.randint(1, 6))
                time.sleep(rng.uniform(0.0, 0.3))
        finally:
            alive = run.process.poll() is None
            run.kill() if alive else None
        if not alive:
            assert run.process.returncode == 0, run.log.read_text()
            names.append(f"killed_{len(names)}")
            continue
        kills += 1
        steps = finished_steps(place / names[-1])
        progress.append(steps[-1] if steps else 0)
        carried += bool(steps) and bool(document(place / names[-1], steps[-1])["buffer"]["groups"])
    run = start(place, names[-1], lives)
    assert run.end() == 0, run.log.read_text()
    assert carried > 0
    assert len(set(progress)) >= 4, progress
    for name in names:
        check_same(place, name)


@pytest.mark.slow
def test_ctrl_c_ends_at_a_step_with_a_checkpoint_and_the_run_goes_on(place):
    run = start(place, "interrupted", 0)
    try:
        run.wait_for_steps(5)
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: the verifier workers get it too
        status = run.end()
    finally:
        run.kill() if run.process.poll() is None else None
    text = run.log.read_text()
    assert status == 0, text
    assert "ended: interrupted" in text
    assert "Traceback" not in text
    made = rows(place / "interrupted")
    assert 4 <= made[-1]["run/step"] < NUM_STEPS
    assert finished_steps(place / "interrupted")[-1] == made[-1]["run/step"]
    assert made == rows(place / "whole")[: len(made)]
    run = start(place, "interrupted", 1)
    assert run.end() == 0, run.log.read_text()
    check_same(place, "interrupted")


@pytest.mark.slow
def test_ctrl_c_before_the_first_step_ends_quietly(place):
    run = start(place, "early")
    try:
        run.wait(lambda: "evaluation tasks" in run.log.read_text())
        os.killpg(run.process.pid, signal.SIGINT)
        status = run.end()
    finally:
        run.kill() if run.process.poll() is None else None
    text = run.log.read_text()
    assert status == 130, text
    assert "interrupted" in text
    assert "Traceback" not in text
    assert finished_steps(place / "early") == []


@pytest.fixture(scope="module")
def quick(tiny_config):
    """Six short steps in this process, a checkpoint of each."""
    config = tiny_config(
        num_steps=6, tensorboard=False, model__num_layers=1, reward__verifier="user_code:coin",
        warm_start__num_steps=0, dynamic_sampling__oversample=1.5, dynamic_sampling__refill="full",
        checkpoint__every_steps=1, checkpoint__max_to_keep=3,
    )  # fmt: skip
    return lambda workdir: dynrl.run(config, str(workdir), (), quick_build)


def test_a_half_written_checkpoint_is_passed_over(quick, tmp_path):
    whole = quick(tmp_path)
    folder = tmp_path / "checkpoints"
    (folder / "6").rename(folder / "6.orbax-checkpoint-tmp")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"run/step": 7, "torn')
    again = quick(tmp_path)
    assert list(map(reproducible, again.metrics)) == list(map(reproducible, whole.metrics))
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


@pytest.mark.parametrize("lost", ["document", "arrays"])
def test_a_damaged_checkpoint_is_named(quick, tmp_path, lost):
    quick(tmp_path)
    for path in (tmp_path / "checkpoints" / "6" / lost).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(RuntimeError) as error:
        quick(tmp_path)
    assert str(tmp_path / "checkpoints" / "6") in str(error.value)
    assert "from step 5" in str(error.value)
