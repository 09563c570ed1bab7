"""What a run leaves on disk, and how it goes on from there: metric rows, tasks, config.json, checkpoints.

A step's device metrics are fetched when the next step is on its way, so a row is pending for one step. A checkpoint
holds the pending row and the offset of the metrics file behind the rows before it; a restore cuts the file there. The
same holds of tasks.jsonl, with what was appended to the training tasks.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from dynrl.build import Parts
from dynrl.config import ConfigError, RunConfig, changed_keys, to_mapping
from dynrl.generation import Generation
from dynrl.metrics import JsonlWriter, MetricWriter, Row, TensorBoardWriter, check_names, read_rows
from dynrl.progress import Progress
from dynrl.rollout.controller import ControllerState
from dynrl.training.checkpoint import Checkpointer

# Keys that a resumed run may change: what is shown, and the budgets whose end says how to go on.
_FREE_TO_CHANGE = {
    "progress",
    *(f"dynamic_sampling.{key}" for key in ("max_num_gen_batches", "max_replacements_per_slot", "on_exhausted")),
    *(f"dynamic_sampling.{key}" for key in ("max_consecutive_unfilled_steps", "on_data_end")),
    *(f"rollout_failure.{key}" for key in ("max_infra_attempts_per_prompt", "max_data_attempts_per_prompt")),
    *(f"rollout_failure.{key}" for key in ("max_skipped_prompts", "max_consecutive_dropped_prompts")),
    *(f"rollout_failure.{key}" for key in ("group_deadline_secs", "stall_secs", "on_stall")),
    *(f"rollout_failure.{key}" for key in ("retry_backoff_secs", "max_retry_backoff_secs")),
    *(f"reward.{key}" for key in ("num_workers", "timeout_secs", "max_consecutive_timeouts", "memory_limit_mb")),
    *(f"generation.{key}" for key in ("max_consecutive_generator_failures", "on_generator_failures", "deadline_secs")),
    "train.max_nonfinite_updates",
}


class Bookkeeper:
    """Rows and checkpoints of one run.

    Args:
      parts: the run's parts; restored in place.
      controller: the controller's state; restored in place.
      workdir: see `dynrl.run`.
      callbacks: further writers.
    """

    def __init__(
        self, parts: Parts, controller: ControllerState, workdir: epath.Path, callbacks: Sequence[MetricWriter]
    ) -> None:
        self._parts, self._controller, self._workdir = parts, controller, workdir
        self._checkpointer = Checkpointer(workdir / "checkpoints", parts.config.checkpoint)
        self._pending: Row | None = None
        self._device_metrics: Mapping[str, jax.Array] = {}
        self.generated_tokens = 0
        self.nonfinite_updates = 0  # skipped, run total, as far as metrics were fetched
        self._generation: Generation | None = None
        self.sampler_counters: dict[str, int] = {}  # what they were when the last row was made
        first = jax.process_index() == 0
        parts.store.open_log(workdir / "tasks.jsonl", writes=first)
        document = self._restored = self._restore()
        self.resumed = document is not None
        self.grown = document is not None and document["config"]["num_steps"] != parts.config.num_steps
        offset = document["metrics"]["offset"] if document else 0
        self._jsonl = JsonlWriter(workdir / "metrics.jsonl", offset) if first else None
        self._writers: list[MetricWriter] = [self._jsonl, *callbacks] if self._jsonl else []
        if first and parts.config.tensorboard:
            self._writers.append(TensorBoardWriter(workdir / "tensorboard", controller.step))
        if first:
            (workdir / "config.json").write_text(json.dumps(to_mapping(parts.config), indent=2) + "\n")
        self.progress = Progress(parts.config.progress, parts.config.num_steps, controller.step)

    # ------------------------------------------------------------------------------------------------- rows

    def add_row(self, row: Row, device_metrics: Mapping[str, jax.Array] | None = None) -> None:
        """Takes a step's row. The row before it is completed and written: its numbers have long arrived."""
        self.flush()
        self._pending, self._device_metrics = row, device_metrics or {}

    def amend(self, more: Row) -> None:
        """Adds to the pending row what is only known after its step."""
        assert self._pending is not None
        self._pending |= more

    def pending(self) -> Row | None:
        """The row of the last step, completed by its device metrics."""
        if self._pending is not None and self._device_metrics:
            fetched = jax.tree.map(np.asarray, dict(self._device_metrics))
            self._pending |= {k: int(v) if v.dtype.kind in "iu" else float(v) for k, v in fetched.items()}
            self._device_metrics = {}
            rate, keep = self._pending["train_step/learning_rate"], self._pending["group_filter/keep_rate_posterior"]
            self._pending["train_step/learning_rate_over_keep_rate"] = rate / keep if rate and keep else None
            self.nonfinite_updates += int(self._pending["train_step/nonfinite"] or 0)
        return self._pending

    def flush(self) -> None:
        """Writes the pending row."""
        row = self.pending()
        if row is None:
            return
        self._pending = None
        row = dict(sorted(row.items()))
        check_names(row)
        for writer in self._writers:
            writer.write(int(row["run/step"] or 0), row)
        self.progress.step(row)

    def rows(self) -> list[Row]:
        """All rows written so far."""
        return read_rows(self._workdir / "metrics.jsonl")

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self) -> None:
        """Writes a checkpoint of everything, in the background."""
        if self._checkpointer.latest == self._controller.step:
            return  # the run ends where a checkpoint fell due
        if self._jsonl:
            self._jsonl.sync()
        p, pending = self._parts, self.pending()
        document = {
            "config": to_mapping(p.config),
            "controller": self._controller.state_dict(),
            "selection": p.selection.state_dict(),
            "visits": p.visits.state_dict(),
            "store": p.store.state_dict(),
            "buffer": p.buffer.state_dict(),
            "statistics": p.statistics.state_dict(),
            "nonfinite_updates": self.nonfinite_updates,
            "generated_tokens": self.generated_tokens,
            "metrics": {"offset": self._jsonl.offset if self._jsonl else 0, "pending": pending},
            "num_polls": p.producer.num_polls,
            "in_flight": None,
            "self_propose": p.self_propose and p.self_propose.state_dict(),
            "generation": self._generation and self._generation.state_dict(),
        }
        arrays: dict[str, Any] = {"arrays": {"state": p.state, "buffer": p.buffer.arrays}}
        if p.config.checkpoint.in_flight == "state" and not p.producer.idle:
            document["in_flight"] = {
                "sampler": p.sampler.state_dict(),
                "producer": p.producer.state_dict(),
                "counters": self.sampler_counters,
            }
            arrays["in_flight"] = {"sampler": p.sampler.arrays, "handed_over": p.producer.arrays}
        self._checkpointer.save(self._controller.step, document, **arrays)

    def _restore(self) -> dict[str, Any] | None:
        step = self._checkpointer.latest
        if step is None:
            return None
        p = self._parts
        document = self._checkpointer.restore_document(step)
        check_same_config(document["config"], p.config)
        if document["buffer"]["capacity"] != p.buffer.capacity:  # follows the mesh, which follows the devices
            raise ConfigError(
                f"config.mesh: the run's group buffer has {document['buffer']['capacity']} slots, on this mesh of "
                f"{dict(p.mesh.shape)} it would have {p.buffer.capacity}: resume on as many devices as before, with "
                "dynamic_sampling.on_exhausted = 'relax' if that was so before, and only then"
            )
        arrays = self._checkpointer.restore_arrays(step, {"state": p.state, "buffer": p.buffer.arrays})
        p.state = arrays["state"]
        p.buffer.load_state_dict(document["buffer"], arrays["buffer"])
        for part, name in ((p.selection, "selection"), (p.visits, "visits"), (p.store, "store")):
            part.load_state_dict(document[name])
        p.statistics.load_state_dict(document["statistics"])
        if p.self_propose is not None:
            p.self_propose.load_state_dict(document["self_propose"])
        self._controller.load_state_dict(document["controller"])
        self.generated_tokens = document["generated_tokens"]
        self.nonfinite_updates = document["nonfinite_updates"]
        self._pending = document["metrics"]["pending"]
        p.producer.num_polls = document["num_polls"]
        return document

    def keep(self, generation: Generation) -> None:
        """Saves it with everything else; restores it, in a resumed run."""
        self._generation = generation
        if self._restored is not None:
            generation.load_state_dict(self._restored["generation"])

    def restore_in_flight(self) -> bool:
        """Gives sampler and producer the work that was under way; once everything is compiled.

        Returns:
          Whether there was any in the checkpoint.
        """
        if self._restored is None or self._restored["in_flight"] is None:
            return False
        p, state = self._parts, self._restored["in_flight"]
        p.publish(self._controller.version)  # for the shapes of its weights
        like = p.sampler.arrays
        if state["sampler"]["pending_version"] is not None:
            like = like._replace(pending=like.params)
        payload = p.sampler.filler(p.config.num_generations_per_prompt).payload
        handed_over = [payload] * sum(len(state["producer"][name]) for name in ("handed_over", "deferred"))
        step = self._checkpointer.latest
        assert step is not None
        arrays = self._checkpointer.restore_arrays(step, {"sampler": like, "handed_over": handed_over}, "in_flight")
        p.sampler.load_state_dict(state["sampler"], arrays["sampler"])
        p.producer.load_state_dict(state["producer"], arrays["handed_over"])
        self.sampler_counters = dict(state["counters"])
        return True

    def close(self) -> None:
        """Waits for the checkpoint writer and closes the metric writers."""
        self.progress.close()
        self._checkpointer.close()
        for writer in self._writers:
            writer.close()


def _overlaid(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with what they lack from `defaults`, group by group."""
    both = {k: _overlaid(v, values[k]) for k, v in defaults.items() if isinstance(v, Mapping) and k in values}
    return {**defaults, **values, **both}


def check_same_config(old: Mapping[str, Any], config: RunConfig) -> None:
    """Raises ConfigError when a run would be resumed with another configuration; more steps and other budgets are fine.

    A key that the run's dynrl did not know yet counts as its default.
    """
    new = to_mapping(config)
    changed = [k for k in changed_keys(_overlaid(to_mapping(RunConfig()), old), new) if k not in _FREE_TO_CHANGE]
    if "num_steps" in changed and new["num_steps"] > old["num_steps"]:
        changed.remove("num_steps")
    if changed:
        raise ConfigError(
            f"config.{changed[0]}: this workdir's run was started with another configuration. Changed: "
            f"{', '.join(changed)}. Only num_steps may grow, and budgets change; start a changed run in a new workdir"
        )


def run_name(config: RunConfig) -> str:
    """Names a configuration, whatever its number of steps and what it shows."""
    mapping = {**to_mapping(config), "num_steps": None, "progress": None}
    return hashlib.sha256(json.dumps(mapping, sort_keys=True).encode()).hexdigest()[:16]
