"""The verifier pool: which rollout goes to which worker, and what the end of a worker means.

All of it runs in one thread of its own, so deadlines are kept while the main thread generates or compiles. Two
rules decide what happens when a worker has to be killed or dies: the rollout that was being judged is the suspect,
and whatever was not reported is judged again, each rollout alone, so that the guilty one is found.

Why not pebble's `ProcessPool` (5.2.3 was tried): starting with spawn or forkserver runs an unguarded `__main__`
again and breaks the pool, and fork is unsafe under JAX's threads; a deadline is per scheduled call, so a deadline per
rollout costs a message per rollout (27 ms of the main thread for 512 trivial ones); and workers busy in C code
outlive a parent that was killed.
"""

import contextlib
import os
import pickle
import selectors
import socket
import sys
import threading
import time
from collections import Counter, deque
from typing import Any

from dynrl.tasks.verifier_group import Group, Job, Unit, take_units
from dynrl.tasks.verifier_process import Worker
from dynrl.tasks.verifier_worker import OUT_OF_MEMORY, Setup, Verdict
from dynrl.types import Scores, Status

START_TIMEOUT_SECS = 60.0  # to import the verifiers; also for a worker that neither judges nor reports
MAX_ERRORS = 32
_TICK_SECS = 0.5


class Pool:
    """The thread that owns the workers. Public methods may be called from any thread."""

    def __init__(
        self, setup: Setup, *, num_workers: int, timeout_secs: float, max_attempts: int, max_consecutive_timeouts: int
    ) -> None:
        self.changed = threading.Condition()  # guards the next five
        self.finished: list[tuple[int, Scores]] = []
        self.failure = ""
        self.was_ready = False
        self.counts: Counter[str] = Counter()
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self._setup = setup
        self._num_workers = num_workers
        self._timeout_secs = timeout_secs
        self._max_attempts = max_attempts
        self._max_consecutive_timeouts = max_consecutive_timeouts
        self._timeouts_in_row = 0
        self._cwd = os.getcwd()
        self._paths = [path for path in sys.path if isinstance(path, str)]
        self._submitted: deque[Group] = deque()
        self._stopping = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._workers: list[Worker] = []
        self._killed: list[Worker] = []
        self._waiting: deque[Unit] = deque()
        self._num_jobs = 0
        self._num_barren = 0  # starts in a row that led to no judged rollout and cannot be blamed on one
        self._start_after = 0.0
        self._thread = threading.Thread(target=self._run, name="dynrl-verifiers", daemon=True)
        self._thread.start()

    def submit(self, group: Group) -> None:
        """Hands a group over; returns at once."""
        self._submitted.append(group)
        self._signal()

    def stop(self) -> None:
        """Kills the workers and ends the thread. Safe to call twice, and from a finalizer."""
        self._stopping = True
        self._signal()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _signal(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: there is nobody to wake
            self._wake.send(b"w")

    def _run(self) -> None:
        try:
            while not self._stopping and not self.failure:
                self._turn()
        except BaseException as error:
            self._fail(f"the verifier pool's thread failed: {type(error).__name__}: {error}")
            raise
        finally:
            for worker in self._workers:
                worker.kill()
            reap_until = time.monotonic() + 1.0
            self._killed += self._workers
            while self._killed and time.monotonic() < reap_until:
                self._killed = [worker for worker in self._killed if not worker.has_exited()]
                time.sleep(0.002)
            for resource in (self._selector, self._wake, self._woken):
                resource.close()

    def _turn(self) -> None:
        """One round: start, dispatch, wait for something to happen, take it in."""
        self._start_missing()
        self._dispatch()
        for key, _ in self._selector.select(self._patience()):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(1 << 16)
            elif key.data in self._workers:
                key.data.flush()
                self._hear(key.data)
        while self._submitted:
            self._admit(self._submitted.popleft())
        self._check_workers()

    def _admit(self, group: Group) -> None:
        for index, text in enumerate(group.texts):
            if text is None:
                self._settle(group, index, Verdict(index, Status.SAMPLER))
        if not group.finished:
            indices = tuple(index for index, text in enumerate(group.texts) if text is not None)
            self._waiting.append(Unit(group, indices))

    def _start_missing(self) -> None:
        while len(self._workers) < self._num_workers and time.monotonic() >= self._start_after and not self.failure:
            try:
                worker = Worker(self._setup, self._cwd, self._paths)
            except OSError as error:
                self._count_barren(f"could not start: {error}")
                continue
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.writing else 0)
        self._selector.modify(worker.socket, events, worker)

    def _dispatch(self) -> None:
        for worker in self._workers:
            while self._waiting and worker.ready and worker.job is None:
                # Several units while many wait, and never so many that other workers would have none.
                message = take_units(self._waiting, 1 + len(self._waiting) // (2 * self._num_workers))
                for unit, error in message.unpicklable:
                    for index in unit.indices:
                        verdict = Verdict(index, Status.ERROR, error=f"cannot pickle the task: {error}")
                        self._settle(unit.group, index, verdict)
                if message.units:
                    self._num_jobs += 1
                    worker.job = job = Job(self._num_jobs, message.units)
                    parts = [(unit.group.verifier, len(unit.indices)) for unit in message.units]
                    worker.send(pickle.dumps((job.job_id, parts)), *message.bodies)
                    self._watch(worker)

    def _patience(self) -> float:
        """Until the next deadline at the earliest; a tick at most."""
        now = time.monotonic()
        patience = _TICK_SECS
        for worker in self._workers:
            if worker.job is not None:
                running = worker.running(worker.job.job_id)
                patience = min(patience, (running[1] if running else now) + self._timeout_secs - now)
        if len(self._workers) < self._num_workers:
            patience = min(patience, self._start_after - now)
        return max(0.0, patience)

    def _hear(self, worker: Worker) -> None:
        """Takes in what the worker has sent, and its end if that has come."""
        for message in worker.receive():
            if worker not in self._workers:
                return
            if "failed" in message:
                worker.gone = "its verifiers could not be loaded"
                self._lose_unready(worker, message["failed"], hopeless=not self.was_ready)
            elif "ready" in message:
                worker.ready = True
                with self.changed:
                    self.was_ready = True
                    self.changed.notify_all()
            elif worker.job is not None and message["job"] == worker.job.job_id:
                self._take_verdicts(worker, worker.job, message)
        if worker in self._workers:
            self._lose(worker) if worker.gone else self._watch(worker)

    def _take_verdicts(self, worker: Worker, job: Job, message: dict[str, Any]) -> None:
        self._num_barren = 0
        for verdict in (Verdict(*entry) for entry in message["verdicts"]):
            group, index = job.rollouts[verdict.rollout]
            if verdict.status != OUT_OF_MEMORY:
                self._settle(group, index, verdict)
                continue
            # Memory may have been used up by others before: only alone in a fresh worker is the text to blame.
            group.attempts[index] += 1
            if (message["fresh"] and job.alone) or group.attempts[index] >= self._max_attempts:
                self._settle(group, index, verdict._replace(status=Status.UNPARSABLE, error=""))
        if message["done"]:
            worker.job = None
        elif not message["usable"]:
            self._discard(worker)
            self._requeue(job, message["verdicts"][-1][0])

    def _requeue(self, job: Job, suspect: int | None) -> None:
        self._waiting.extendleft(reversed(job.remainder(suspect)))

    def _check_workers(self) -> None:
        """Deadlines, and ends that the connection does not show."""
        now = time.monotonic()
        self._killed = [worker for worker in self._killed if not worker.has_exited()]
        for worker in tuple(self._workers):
            running = worker.running(worker.job.job_id) if worker.job is not None else None
            if running is not None:
                worker.heard_at = now
                if now - running[1] > self._timeout_secs:
                    self._expire(worker)
            elif (worker.job is not None or not worker.ready) and now - worker.heard_at > START_TIMEOUT_SECS:
                worker.gone = f"silent for {START_TIMEOUT_SECS:.0f} s"
                self._lose(worker)
            if worker in self._workers and worker.has_exited():
                worker.gone = worker.gone or "it ended"
                self._hear(worker)

    def _expire(self, worker: Worker) -> None:
        """Kills a worker whose rollout has missed its deadline, unless the verdict has just arrived."""
        self._hear(worker)
        job: Job | None = worker.job
        running = worker.running(job.job_id) if job is not None and worker in self._workers else None
        if job is None or running is None or time.monotonic() - running[1] <= self._timeout_secs:
            return
        self._discard(worker)
        self._num_barren = 0
        note = f"no verdict within {self._timeout_secs:g} s"
        self._settle(*job.rollouts[running[0]], Verdict(running[0], Status.TIMEOUT, info={"timeout": note}))
        self._requeue(job, running[0])

    def _lose(self, worker: Worker) -> None:
        """A worker has died: of the rollout that it was judging, if it was judging one."""
        job: Job | None = worker.job
        if not worker.ready:
            self._lose_unready(worker, worker.complaint())
        elif job is None:
            self._discard(worker)
            self._count_barren(f"died before it was given work: {worker.gone}")
        else:
            running = worker.running(job.job_id)
            reason = worker.complaint()
            self._discard(worker)
            if running or job.alone:  # else nobody is to blame yet: each goes alone next
                group, index = job.rollouts[running[0] if running else 0]
                group.attempts[index] += 1
                if group.attempts[index] >= self._max_attempts:
                    error = f"the worker died on every one of {self._max_attempts} attempts; the last time, {reason}"
                    self._settle(group, index, Verdict(index, Status.CRASHED, info={"error": "died"}, error=error))
            self._requeue(job, running[0] if running else None)

    def _lose_unready(self, worker: Worker, message: str, hopeless: bool = False) -> None:
        self._discard(worker, restart=False)
        self._count_barren(f"could not start: {worker.gone}\n{message}", hopeless)

    def _count_barren(self, message: str, hopeless: bool = False) -> None:
        """Starts that lead nowhere have a budget, and get slower."""
        self._num_barren += 1
        self._start_after = time.monotonic() + min(1.0, 0.1 * self._num_barren)
        if hopeless or self._num_barren >= self._max_attempts * self._num_workers:
            self._fail(f"{self._num_barren} verifier worker(s) in a row came to nothing; the last one {message}")

    def _discard(self, worker: Worker, restart: bool = True) -> None:
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        worker.kill()
        self._killed.append(worker)
        with self.changed:
            self.counts["restarts"] += restart

    def _settle(self, group: Group, index: int, verdict: Verdict) -> None:
        """Records the end of one rollout; with the last one, the group is finished. The first verdict counts."""
        if index in group.verdicts:
            return
        group.verdicts[index] = verdict
        self._timeouts_in_row = self._timeouts_in_row + 1 if verdict.status == Status.TIMEOUT else 0
        if self._timeouts_in_row > self._max_consecutive_timeouts:
            self._fail(
                f"verifier {group.verifier!r} gave no verdict within {self._timeout_secs:g} s "
                f"{self._timeouts_in_row} times in a row (at last on task {group.task.task_id}): mend it, or raise "
                "reward.timeout_secs or reward.max_consecutive_timeouts"
            )
        if verdict.error:
            where = f"verifier {group.verifier!r}, task {group.task.task_id}, rollout {index}"
            with self.changed:
                self.errors.append(f"{where}: {verdict.status}: {verdict.error}")
        if group.finished:
            scores = group.scores(self._setup.metrics)
            with self.changed:
                self.counts.update(status.value for status in scores.statuses)
                self.finished.append((group.order, scores))
                self.changed.notify_all()

    def _fail(self, message: str) -> None:
        with self.changed:
            self.failure = self.failure or message
            self.changed.notify_all()
