"""Which proposed tasks may be trained on, as far as reading them shows: every refusal has a reason, which is counted.

What needs a verifier or the policy (does the reference answer pass, is the task neither solved nor hopeless) is asked
afterwards, of those that are left: `dynrl/generation.py`.
"""

import enum
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from dynrl.tasks.admission import admitted, from_row, row_of
from dynrl.tasks.base import task_hash
from dynrl.tasks.store import TaskStore
from dynrl.types import Task


class Refused(enum.StrEnum):
    """Why a proposed task was not admitted."""

    SCHEMA = "schema"  # no Task, or one with wrong fields or unknown parents
    SOURCE = "source"  # no verifier judges tasks of its source
    UNENCODABLE = "unencodable"  # the tokenizer cannot write it
    TOO_LONG = "too_long"  # in tokens
    EVALUATION = "evaluation"  # an evaluation task
    DUPLICATE = "duplicate"  # a training task, or another proposal
    BUDGET = "budget"  # more than may be admitted now
    ANSWER = "answer"  # its own reference answer does not pass its verifier
    PROBE = "probe"  # the policy solved all probes, or none


class Proposals:
    """Reads proposals.

    Args:
      store: the training tasks.
      sources: those that a verifier judges.
      num_tokens: of a prompt; ValueError for one that cannot be encoded.
      max_prompt_tokens: longer prompts are refused.
      deduplicate: against which training tasks: those appended, all (each base task is made once for it), or none.
      evaluation: hashes of the evaluation tasks.
    """

    def __init__(
        self, store: TaskStore, sources: Collection[str], num_tokens: Callable[[str], int], max_prompt_tokens: int,
        deduplicate: Literal["appended", "all", "none"], evaluation: Collection[str],
    ) -> None:  # fmt: skip
        self._store, self._sources = store, sources
        self._num_tokens, self._max_prompt_tokens = num_tokens, max_prompt_tokens
        self._deduplicate, self._evaluation = deduplicate, evaluation
        self._known: set[int] = set()
        self._num_known = 0 if deduplicate == "all" else store.num_base  # tasks of the store that are in it

    def read(self, rows: Sequence[Mapping[str, Any] | None], room: int) -> list[Task | Refused]:
        """Returns for each proposal the task that may be admitted, or why there is none.

        Args:
          rows: of `rows_of`.
          room: how many may be admitted.
        """
        self._catch_up()
        results: list[Task | Refused] = []
        new: set[int] = set()
        for row in rows:
            task = from_row(row, -1) if row is not None and room > 0 else None
            if task is None:
                results.append(Refused.BUDGET if room <= 0 else Refused.SCHEMA)
                continue
            reason = self._reason(task, new)
            results.append(reason or task)
            room -= reason is None
        return results

    def _reason(self, task: Task, new: set[int]) -> Refused | None:
        if any(not 0 <= parent < len(self._store) for parent in task.parents):
            return Refused.SCHEMA
        if task.source not in self._sources:
            return Refused.SOURCE
        try:
            if self._num_tokens(task.prompt) > self._max_prompt_tokens:
                return Refused.TOO_LONG
        except ValueError:
            return Refused.UNENCODABLE
        name = task_hash(task.prompt)
        if name in self._evaluation:
            return Refused.EVALUATION
        if self._deduplicate != "none":
            if _short(name) in self._known or _short(name) in new:
                return Refused.DUPLICATE
            new.add(_short(name))
        return None

    def _catch_up(self) -> None:
        """Learns of the tasks that were appended since."""
        if self._deduplicate == "none":
            return
        while self._num_known < len(self._store):
            ids = range(self._num_known, min(self._num_known + 1024, len(self._store)))
            self._known.update(_short(task_hash(task.prompt)) for task in self._store.get(ids))
            self._num_known = ids.stop


def rows_of(proposed: Any) -> list[dict[str, Any] | None]:
    """Returns what a generator returned as rows of JSON, None for what is no task: plain data, whatever it was.

    Raises:
      TypeError: it is no sequence at all.
    """
    if not isinstance(proposed, Sequence) or isinstance(proposed, str | bytes):
        raise TypeError(f"propose must return a sequence of tasks, got {type(proposed).__name__}")
    rows: list[dict[str, Any] | None] = []
    for task in proposed:
        try:
            rows.append(json.loads(json.dumps(row_of(admitted(task, -1, "")))))
        except (TypeError, ValueError):
            rows.append(None)
    return rows


def _short(name: str) -> int:
    """Half of a `task_hash`: a set of a million takes 60 MB, and holds two equal ones with a chance of 3e-8."""
    return int(name[:16], 16)
