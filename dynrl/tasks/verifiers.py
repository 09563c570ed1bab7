"""Verifies completions in killable worker processes, while the main thread generates.

    with Verifiers({"sums": "integer_match", "code": "my_project.checks:run_tests"}) as verifiers:
        verifiers.submit(ticket, task, texts)
        ...
        for scores in verifiers.poll():
            ...

How a rollout can end, and what it then counts for, is `dynrl.types.Status`: content that breaks its verifier (a
missed deadline, memory or recursion that runs out, an unreadable answer) is live with score 0, or outputs that hang
the verifier would escape punishment; what infrastructure or a faulty verifier lost is dead, with score NaN.

Verifiers are loaded before the first deadline runs: import heavy libraries at the top of their module. What they
print is discarded, child processes that they start die with their worker, and JAX there sees the CPU only. This module
does not know JAX.
"""

import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from dynrl.tasks.rewards import BUILT_IN, resolve_verifier
from dynrl.tasks.verifier_group import Group
from dynrl.tasks.verifier_pool import START_TIMEOUT_SECS, Pool
from dynrl.tasks.verifier_worker import IN_WORKER, Setup
from dynrl.types import Scores, Status, Task


class VerifierPoolError(RuntimeError):
    """The pool cannot go on: its workers do not start, or its thread has failed."""


class Verifiers:
    """A pool of verifier workers. One thread submits and polls; a thread of the pool does the rest.

    Contents are independent of scheduling: the same texts get the same Scores in whatever order groups finish,
    provided that the verifiers are deterministic and stay clear of their deadline.
    """

    def __init__(
        self,
        verifier_for_source: Mapping[str, str],
        *,
        num_workers: int = 1,
        timeout_secs: float = 5.0,
        max_attempts: int = 3,
        max_consecutive_timeouts: int = 32,
        memory_limit_mb: int | None = None,
        metrics: Sequence[str] = ("score",),
    ) -> None:
        """Starts the workers, and returns when the first one has loaded its verifiers.

        Args:
          verifier_for_source: for each task source, a built-in verifier's name or 'package.module:function'; or an
            environment's (`environments.py`), whose texts are the turns of a rollout so far.
          num_workers: processes; groups, not rollouts, are spread over them.
          timeout_secs: wall time for one rollout, after which its worker is killed.
          max_attempts: how often a rollout is tried whose worker dies, and how often in a row (per worker) a start
            may come to nothing.
          max_consecutive_timeouts: rollouts in a row that may miss the deadline: more are the verifier's fault, and the
            pool fails.
          memory_limit_mb: what a worker may allocate beyond its state after loading (Linux only). Without it, the
            system may kill a worker that uses too much, which counts as a crash.
          metrics: what every verifier must return: "score", or names of components.

        Raises:
          ValueError: an argument is out of range, or names no verifier.
          VerifierPoolError: a worker could not start; the message holds the worker's own.
        """
        _check(verifier_for_source, num_workers, timeout_secs, max_attempts, memory_limit_mb)
        self._verifier_for_source = dict(verifier_for_source)
        self._pending: set[int] = set()
        self._num_submitted = 0
        self._closed = False
        names = tuple(sorted(set(verifier_for_source.values())))
        self._pool = Pool(
            Setup(names, tuple(metrics), memory_limit_mb),
            num_workers=num_workers,
            timeout_secs=timeout_secs,
            max_attempts=max_attempts,
            max_consecutive_timeouts=max_consecutive_timeouts,
        )
        self._stop = weakref.finalize(self, self._pool.stop)  # also when forgotten, and at the interpreter's exit
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise

    def submit(self, ticket: int, task: Task, texts: Sequence[str | None]) -> None:
        """Queues one group and returns at once.

        Args:
          ticket: names the group in `Scores`; not pending yet.
          task: its source decides the verifier.
          texts: the completions, or for an environment the `turns_text` of each rollout; None where the sampler failed
            (dead, not verified).

        Raises:
          ValueError: the ticket is pending, the source has no verifier, or the group is empty.
          TypeError: a text is neither a string nor None.
          VerifierPoolError: the pool has failed or is closed.
        """
        self._check_usable()
        if ticket in self._pending:
            raise ValueError(f"ticket {ticket} is pending already")
        if task.source not in self._verifier_for_source:
            known = ", ".join(sorted(self._verifier_for_source))
            raise ValueError(f"task {task.task_id}: no verifier for source {task.source!r}; there are: {known}")
        if isinstance(texts, str) or not texts:
            raise ValueError(f"ticket {ticket}: expected a non-empty sequence of texts, got {texts!r:.100}")
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise TypeError(f"ticket {ticket}: a text must be a string or None, got {type(text).__name__}")
        verifier = self._verifier_for_source[task.source]
        self._num_submitted += 1
        self._pending.add(ticket)
        self._pool.submit(Group(self._num_submitted, ticket, task, verifier, tuple(texts)))

    def poll(self) -> list[Scores]:
        """The groups that have finished since the last call, in the order of submission. Never blocks.

        Raises:
          VerifierPoolError: the pool has failed or is closed.
        """
        self._check_usable()
        return self._take()

    def wait(self, timeout_secs: float) -> list[Scores]:
        """As `poll`, but blocks until a group has finished, nothing is pending, or the time has run out."""
        self._check_usable()
        pool = self._pool
        with pool.changed:
            pool.changed.wait_for(lambda: pool.finished or pool.failure or not self._pending, timeout_secs)
        self._check_usable()
        return self._take()

    @property
    def num_pending(self) -> int:
        """Groups submitted and not yet returned."""
        return len(self._pending)

    def counts(self) -> dict[str, int]:
        """Running totals over finished groups: rollouts per `Status`; and restarts of workers."""
        with self._pool.changed:
            return {name: self._pool.counts[name] for name in (*(status.value for status in Status), "restarts")}

    def errors(self) -> list[str]:
        """The most recent errors, oldest first, bounded in number and length; each names verifier and task."""
        with self._pool.changed:
            return list(self._pool.errors)

    def close(self) -> None:
        """Kills the workers, also those that hang. What is pending is lost. May be called again."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _take(self) -> list[Scores]:
        with self._pool.changed:
            finished, self._pool.finished = self._pool.finished, []
        taken = [scores for _, scores in sorted(finished, key=lambda entry: entry[0])]
        self._pending.difference_update(scores.ticket for scores in taken)
        return taken

    def _check_usable(self) -> None:
        if self._pool.failure:
            raise VerifierPoolError(self._pool.failure)
        if self._closed:
            raise VerifierPoolError("the verifiers are closed")

    def _await_start(self) -> None:
        pool = self._pool
        deadline = time.monotonic() + START_TIMEOUT_SECS
        with pool.changed:
            pool.changed.wait_for(lambda: pool.was_ready or pool.failure, deadline - time.monotonic())
        self._check_usable()
        if not pool.was_ready:
            raise VerifierPoolError(f"no verifier worker was ready within {START_TIMEOUT_SECS:.0f} s")


def _check(
    verifier_for_source: Mapping[str, str],
    num_workers: int,
    timeout_secs: float,
    max_attempts: int,
    memory_limit_mb: int | None,
) -> None:
    if os.environ.get(IN_WORKER):
        raise RuntimeError(
            "a verifier worker was about to start verifiers of its own: the module that holds the verifier starts "
            'them when it is imported; guard that with `if __name__ == "__main__":`, or move the verifier elsewhere'
        )
    if not verifier_for_source:
        raise ValueError("verifier_for_source is empty")
    for source, name in verifier_for_source.items():
        if str(name).startswith("__main__:"):
            raise ValueError(f"source {source!r}: {name!r} cannot be imported by a worker; put it into a module")
        if ":" not in str(name) and name not in BUILT_IN:
            resolve_verifier(name)  # says which names there are
    if num_workers < 1 or max_attempts < 1:
        raise ValueError(f"num_workers and max_attempts must be at least 1, got {num_workers} and {max_attempts}")
    if not (timeout_secs > 0 and math.isfinite(timeout_secs)):
        raise ValueError(f"timeout_secs must be positive and finite, got {timeout_secs}")
    if memory_limit_mb is not None and memory_limit_mb < 1:
        raise ValueError(f"memory_limit_mb must be at least 1, got {memory_limit_mb}")
    if memory_limit_mb is not None and sys.platform != "linux":
        raise ValueError("memory_limit_mb needs Linux")
