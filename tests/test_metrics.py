"""Metric names, sums, and the files that rows go to, also after a kill."""

import json
import math

import pytest
from etils import epath

from dynrl.metrics import REGISTRY, JsonlWriter, Sums, TensorBoardWriter, check_names, read_rows


@pytest.fixture
def path(tmp_path):
    return epath.Path(tmp_path) / "run" / "metrics.jsonl"


def test_unregistered_names_raise():
    check_names({name: 0 for name in REGISTRY if "*" not in name})
    check_names(dict.fromkeys(["reward/style/kept/mean", "group_filter/pattern/pre/3", "time/step_secs"], 0))
    for name in ("run/stepp", "reward/score/all", "group_filter/pattern/3", "backfill/rounds"):
        with pytest.raises(KeyError, match=f"metric '{name}' is not registered"):
            check_names({"run/step": 1, name: 1})


def test_sums_take_one_mean_at_the_end():
    sums = Sums()
    sums.add("length/all/mean", 10, 4)
    sums.add("length/all/mean", 2, 1)
    sums.add("length/kept/mean", 0, 0)
    sums.count("backfill/wasted_tokens", 3)
    sums.count("backfill/wasted_tokens", 4)
    again = Sums()
    again.load_state_dict(json.loads(json.dumps(sums.state_dict())))
    for each in (sums, again):
        # (10 + 2) / (4 + 1), where the mean of means would be (2.5 + 2) / 2
        assert each.row() == {"length/all/mean": 2.4, "length/kept/mean": None, "backfill/wasted_tokens": 7}
    again.add("length/all/mean", 100, 1)
    assert sums.row()["length/all/mean"] == 2.4  # the copy shares nothing


def test_jsonl_rows_are_there_at_once_and_are_strict_json(path):
    writer = JsonlWriter(path)
    writer.write(0, {"run/step": 0, "a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 0.1})
    assert writer.offset == len(path.read_bytes())
    line = path.read_text().splitlines()[0]
    assert json.loads(line, parse_constant=pytest.fail) == {
        "run/step": 0, "a": None, "b": None, "c": None, "d": None, "e": 0.1,
    }  # fmt: skip
    writer.write(1, {"run/step": 1})
    assert [r["run/step"] for r in read_rows(path)] == [0, 1]
    writer.close()


def test_a_restart_cuts_rows_and_torn_lines_behind_the_checkpoint(path):
    writer = JsonlWriter(path)
    writer.write(0, {"run/step": 0})
    writer.write(1, {"run/step": 1})
    offset = writer.offset
    writer.write(2, {"run/step": 2})
    path.write_bytes(path.read_bytes() + b'{"run/step": 3, "los')
    again = JsonlWriter(path, offset)
    assert [r["run/step"] for r in read_rows(path)] == [0, 1]
    again.write(2, {"run/step": 2, "again": True})
    assert read_rows(path)[2] == {"run/step": 2, "again": True}
    assert again.offset == len(path.read_bytes())
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_run_killed_before_its_first_checkpoint_starts_over(path):
    """There is no checkpoint, so no row is known: offset 0."""
    JsonlWriter(path).write(0, {"run/step": 0})
    again = JsonlWriter(path, 0)
    assert path.read_bytes() == b""
    again.write(0, {"run/step": 0})
    assert len(read_rows(path)) == 1
    assert again.offset == len(path.read_bytes())


def test_a_whole_file_stays_as_it_is(path):
    writer = JsonlWriter(path)
    writer.write(0, {"run/step": 0})
    content = path.read_bytes()
    JsonlWriter(path, writer.offset)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [None, b"", b'{"run/step": 0}\n'])
def test_a_file_shorter_than_its_checkpoint_is_an_error(path, content):
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds \d+ bytes, its checkpoint 100: the file was changed"):
        JsonlWriter(path, 100)
    assert path.exists() == (content is not None)  # nothing is touched
    assert content is None or path.read_bytes() == content


def test_read_rows(path):
    assert read_rows(path) == []
    writer = JsonlWriter(path)
    writer.write(0, {"run/step": 0})
    limit = writer.offset
    writer.write(1, {"run/step": 1})
    assert read_rows(path, limit) == [{"run/step": 0}]


def events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path):
    directory = epath.Path(tmp_path) / "tensorboard"
    writer = TensorBoardWriter(directory)
    writer.write(0, {"run/step": 0, "eval/main/pass_at_1": 0.25})
    writer.write(1, {"run/step": 1, "eval/main/pass_at_1": None})
    writer.close()
    assert events(directory) == {"run/step": [(0, 0.0), (1, 1.0)], "eval/main/pass_at_1": [(0, 0.25)]}


def test_tensorboard_forgets_the_steps_that_are_made_again(tmp_path):
    """Killed after step 3, resumed from the checkpoint of step 2, whose row was not yet written."""
    directory = epath.Path(tmp_path)
    writer = TensorBoardWriter(directory)
    for step in range(4):
        writer.write(step, {"run/step": step, "train_step/loss": 1.0})
    writer.close()
    writer = TensorBoardWriter(directory, first_step=2)
    for step in (2, 3, 4):
        writer.write(step, {"run/step": step, "train_step/loss": 2.0})
    writer.close()
    assert events(directory)["train_step/loss"] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_of_an_empty_directory_purges_nothing(tmp_path):
    directory = epath.Path(tmp_path)
    writer = TensorBoardWriter(directory, first_step=5)
    writer.write(3, {"run/step": 3})
    writer.close()
    assert events(directory) == {"run/step": [(3, 3.0)]}
