"""Metrics: their names, and where they go.

Every key is registered with its unit and meaning in one table; an unregistered key raises, so that a typing error
does not become a new metric. Populations (law 8): `all` finished groups judged in the step, `kept` groups,
`trained` groups (carried ones included), `first_attempt` groups (no replacement's bias).

What cannot be reproduced bit for bit is named time/*, memory/*, *_secs, *_per_sec or *mfu*.
"""

import fnmatch
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any, Protocol

from etils import epath

Row = dict[str, float | int | None]

REGISTRY: dict[str, str] = {
    "run/step": "optimizer steps made",
    "run/version": "optimizer updates that the weights have seen",
    "run/recompiles": "programs compiled since this process warmed up; anything but 0 is a fault",
    "run/generated_tokens": "completion tokens generated for training, generators and probes, run total",
    "reward/*/all/mean": "mean reward of live rollouts, groups judged in this step; proposals apart",
    "reward/*/kept/mean": "the same, groups kept in this step",
    "reward/*/trained/mean": "the same, groups in this step's batch",
    "reward/*/first_attempt/mean": "the same, groups judged in this step that replaced nothing",
    "reward/status/*": "rollouts judged in this step, by how their verification ended",
    "reward/*/base/mean": "the same, groups judged in this step that were drawn from the base distribution",
    "length/all/mean": "completion tokens, an environment's too, per live rollout, groups judged in this step",
    "length/kept/mean": "the same, groups kept in this step",
    "length/trained/mean": "the same, groups in this step's batch",
    "length/first_attempt/mean": "the same, groups judged in this step that replaced nothing",
    "length/base/mean": "the same, groups judged in this step that were drawn from the base distribution",
    "length/kept_over_all": "mean length of kept groups over that of all: drift of the filter",
    "length/truncated_frac": "share of live rollouts, judged in this step, that ran into max_completion_tokens",
    "group_filter/kept_frac": "share of the groups judged in this step that were kept",
    "group_filter/zero_variance_frac": "share of the groups judged in this step without signal",
    "group_filter/all_pass_frac": "share without signal, all rewards > 0",
    "group_filter/all_fail_frac": "share without signal, all rewards <= 0",
    "group_filter/other_frac": "share without signal, neither",
    "group_filter/keep_rate": "kept share of judged groups over closed dispatch cohorts, run total",
    "group_filter/keep_rate_posterior": "expected keep rate of what is dispatched next",
    "group_filter/pattern/pre/*": "groups judged in this step by positives among G, or by spread where not binary",
    "group_filter/pattern/post/*": "the same, kept groups only",
    "train_batch/groups": "real groups in the batch",
    "train_batch/tokens": "tokens trained on",
    "train_batch/zero_advantage_groups_frac": "share of real groups in the batch that train nothing (law 1: 0)",
    "train_batch/staleness/mean": "versions between a trained group's dispatch and its step",
    "train_batch/staleness/versions/*": "trained groups by the versions between their dispatch and their step",
    "backfill/num_rounds": "generation rounds of this step, those of tries that trained nothing included",
    "backfill/replaced_groups": "groups dispatched in this step in the place of filtered ones",
    "backfill/promoted_groups": "groups that this step borrowed from a later one, or a later one from another",
    "backfill/relaxed_groups": "groups that the filter refused and that filled the step all the same",
    "backfill/retried_groups": "attempts in this step after a failed one",
    "backfill/exhausted_slots": "slots that used up their replacements in this step",
    "backfill/short_steps": "1 where the step has fewer than B groups",
    "backfill/unfilled_steps": "tries to fill this step that trained nothing",
    "backfill/surplus_groups": "ready groups left over by this step; where a schedule works ahead, later ones' too",
    "backfill/carried_groups": "trained groups that an earlier step dispatched",
    "backfill/wasted_tokens": "tokens, an environment's too, of groups judged in this step that will not be trained",
    "rollout/long_prompts": "groups dropped in this step because their prompt is too long",
    "source/*/groups": "groups of one source judged in this step; where there are several sources",
    "source/*/kept_frac": "share of them that was kept",
    "source/*/keep_rate_posterior": "expected keep rate of what is dispatched next",
    "source/*/reward/mean": "mean configured metric of their live rollouts",
    "ledger/dispatched": "groups, run total",
    "ledger/trained": "groups, run total",
    "ledger/dropped": "groups, run total",
    "ledger/dropped/*": "groups dropped for this reason, run total",
    "ledger/failed": "groups, run total",
    "ledger/in_flight": "groups, level at the step's end",
    "ledger/judging": "groups, level at the step's end",
    "ledger/deferred": "groups that are judged by what becomes of others, level at the step's end",
    "ledger/ready": "groups, level at the step's end",
    "ledger/held": "groups that the filter refused and that may still be needed, level at the step's end",
    "ledger/training": "groups, level at the step's end",
    "self_propose/proposed": "texts that the policy proposed as tasks, of groups read in this step",
    "self_propose/admitted": "those that were new tasks",
    "self_propose/refused/*": "those that were none, by reason",
    "self_propose/learnable": "proposed tasks that the solver passed sometimes in this step",
    "self_propose/never_solved": "proposed tasks that nobody tried in time",
    "self_propose/waiting_groups": "groups of proposals that wait for their verdicts, level at the step's end",
    "tasks/size": "training tasks, those appended included",
    "tasks/appended": "tasks that were admitted after this step",
    "tasks/refused/*": "proposed tasks that were not admitted after this step, by reason",
    "generator/*/proposed": "tasks that the generator proposed",
    "generator/*/admitted": "those that were admitted",
    "generator/*/failures": "calls that failed: it raised, or gave nothing in time",
    "generator/*/tokens": "tokens that it spent elsewhere",
    "generator/*": "what a generator counts",
    "sampler/tokens": "completion tokens generated for this step",
    "sampler/tokens_per_sec": "the same per second of sampling",
    "sampler/slot_utilisation": "tokens made per row-step computed, this step",
    "train_step/learning_rate_over_keep_rate": "per group generated: a filter makes steps larger, over what it judges",
    "train_step/*": "see dynrl.training.step; means over the updates of the step",
    "time/*": "seconds",
    "eval/main/pass_at_1": "share of evaluation tasks solved by one completion",
    "eval/main/reward": "mean score of the evaluation completions",
    "eval/main/source/*": "pass_at_1 of the evaluation tasks of one source; where there are several",
    "eval/main/level/*": "pass_at_1 of the evaluation tasks of one difficulty level",
    "warm_start/*": "see dynrl.training.warm_start",
}


def check_names(row: Mapping[str, Any]) -> None:
    """Raises KeyError for a name that is not in the table."""
    for name in row:
        if name not in REGISTRY and not any(fnmatch.fnmatchcase(name, p) for p in REGISTRY if "*" in p):
            raise KeyError(f"metric {name!r} is not registered in dynrl.metrics.REGISTRY")


class Sums:
    """Sums and counts by name; a mean is taken once, at the end (never a mean of means)."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Adds to a mean's sum and count."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        entry[0] += float(total)
        entry[1] += float(count)

    def count(self, name: str, number: float) -> None:
        """Adds to a plain count."""
        self.add("=" + name, number, 1)

    def row(self) -> Row:
        """Means (None where nothing was counted) and counts."""
        row: Row = {}
        for name, (total, count) in self._sums.items():
            row[name.removeprefix("=")] = total if name[0] == "=" else total / count if count else None
        return row

    def state_dict(self) -> dict[str, list[float]]:
        """JSON-able."""
        return {k: list(v) for k, v in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """The inverse."""
        self._sums = {k: list(v) for k, v in state.items()}


class MetricWriter(Protocol):
    """Where rows go. A user's own (W&B, MLflow, ...) is passed to `dynrl.run` as a callback with these methods."""

    def write(self, step: int, row: Row) -> None:
        """Takes the row of one optimizer step."""
        ...

    def close(self) -> None:
        """The run ends."""
        ...


class JsonlWriter:
    """One JSON object per line, flushed at once. Not-a-numbers and infinities become null.

    Args:
      path: the file; created, or cut to `offset`.
      offset: bytes to keep. A killed run leaves rows, or half a row, that its checkpoint does not know.

    Raises:
      ValueError: when the file is shorter than `offset`.
    """

    def __init__(self, path: epath.Path, offset: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.exists() else b""
        if len(content) < offset:
            raise ValueError(f"{path} holds {len(content)} bytes, its checkpoint {offset}: the file was changed")
        if len(content) != offset or not path.exists():
            cut = path.with_name(path.name + ".cut")  # a kill in between leaves either file whole
            cut.write_bytes(content[:offset])
            cut.replace(path)
        self.path, self.offset = path, offset

    def write(self, step: int, row: Row) -> None:
        """Appends a row."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps(clean) + "\n").encode()
        with self.path.open("ab") as file:
            file.write(line)
        self.offset += len(line)

    def sync(self) -> None:
        """Has the system put a local file onto its disk: a checkpoint is about to count on these bytes."""
        if "://" not in str(self.path) and self.path.exists():
            with open(self.path, "ab") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Nothing is held open."""


def read_rows(path: epath.Path, limit: int | None = None) -> list[Row]:
    """The rows of a metrics file, its first `limit` bytes."""
    text = path.read_bytes()[:limit].decode() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


class TensorBoardWriter:
    """Scalars for TensorBoard. A restart purges the steps that are made again.

    Args:
      directory: of the event files.
      first_step: rows from this step on come again.
    """

    def __init__(self, directory: epath.Path, first_step: int = 0) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        restarted = any(directory.iterdir())
        self._event, self._summary = Event, Summary
        self._file = EventFileWriter(str(directory))
        if restarted:
            log = SessionLog(status=SessionLog.START)
            self._file.add_event(Event(wall_time=time.time(), step=first_step, session_log=log))

    def write(self, step: int, row: Row) -> None:
        """Writes every number of the row as a scalar."""
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in row.items() if v is not None]
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Flushes."""
        self._file.close()
