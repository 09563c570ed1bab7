"""What runs inside one verifier worker process.

A plain interpreter is started, not a `multiprocessing` child, so the user's `__main__` never runs again. The pool
sends pickled frames over a socket (tasks and texts), and gets JSON back (what verifiers made of the texts, which may
be hostile). While a rollout is judged, its index and start time stand in shared memory: the pool can keep a deadline
per rollout at the cost of one message per group. This module knows neither JAX nor groups.
"""

import json
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from dynrl.tasks.rewards import Unparsable, Verifier, as_reward, resolve_verifier
from dynrl.types import Status, Task

IN_WORKER = "DYNRL_VERIFIER_WORKER"  # environment variable: set inside a worker
OUT_OF_MEMORY = "memory"  # not a Status: the pool decides, after a try alone in a fresh worker
MAX_ERROR_CHARS = 4_000
MAX_NOTE_CHARS = 500

_FLUSH_SECS = 0.02  # a slow group reports in parts, so that a kill loses little
LENGTH = struct.Struct("!Q")
RUNNING = struct.Struct("=qqd")  # job, index, start on the monotonic clock (0: between rollouts)
_START = struct.Struct("=d")
_START_OFFSET = 16


class Setup(NamedTuple):
    """What a worker must know before its first job."""

    verifiers: tuple[str, ...]
    metrics: tuple[str, ...]
    memory_limit_mb: int | None


class Verdict(NamedTuple):
    """How one rollout was judged, as it travels. `error` is for people, and empty where nothing went wrong."""

    rollout: int  # its number in the job
    status: str
    score: float = 0.0
    components: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}
    error: str = ""


def main() -> None:
    """Runs the worker until the pool closes its end. Arguments: socket, shared memory, the parent's process id."""
    socket_fd, running_fd, parent_pid = (int(argument) for argument in sys.argv[1:4])
    del sys.argv[1:]
    _die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for fd in (socket_fd, running_fd):
        os.set_inheritable(fd, False)
    connection = socket.socket(fileno=socket_fd)
    frames = connection.makefile("rb")
    running = mmap.mmap(running_fd, RUNNING.size)
    setup: Setup = pickle.loads(_read_frame(frames))
    try:
        verifiers = {name: resolve_verifier(name) for name in setup.verifiers}
        if setup.memory_limit_mb is not None:
            _limit_memory(setup.memory_limit_mb)
    except BaseException:
        _send(connection, {"failed": traceback.format_exc(limit=-20)[-MAX_ERROR_CHARS:]})
        return
    with open(os.devnull, "wb") as devnull:
        os.dup2(devnull.fileno(), 2)  # start-up problems were worth keeping; a verifier's chatter is not
    _send(connection, {"ready": True})
    bench = _Bench(connection, running, verifiers, setup.metrics)
    while bench.usable and (header := _read_frame(frames)):
        bench.serve(header, frames)


class _Bench:
    """Judges job after job, and reports."""

    def __init__(
        self, connection: socket.socket, running: mmap.mmap, verifiers: Mapping[str, Verifier], metrics: Sequence[str]
    ) -> None:
        self.connection = connection
        self.running = running
        self.verifiers = verifiers
        self.metrics = metrics
        self.job = 0
        self.verdicts: list[Verdict] = []  # not reported yet
        self.reported_at = 0.0
        self.num_judged = 0
        self.usable = True

    def serve(self, header: bytes, frames: BinaryIO) -> None:
        """Judges one job: for each verifier named in the header, a frame with a task and its texts."""
        self.job, parts = pickle.loads(header)
        self.reported_at = time.monotonic()
        first = 0
        for number, (name, num_rollouts) in enumerate(parts, 1):
            self._judge_texts(name, _read_frame(frames), range(first, first + num_rollouts))
            self._report(done=self.usable and number == len(parts))  # others must not wait for the next unit's hangs
            if not self.usable:
                return
            first += num_rollouts

    def _judge_texts(self, name: str, body: bytes, numbers: range) -> None:
        try:
            task, texts = pickle.loads(body)
        except BaseException as error:
            status = OUT_OF_MEMORY if isinstance(error, MemoryError) else Status.ERROR
            self.verdicts += [Verdict(number, status, error=_describe(error)) for number in numbers]
            self.usable = status != OUT_OF_MEMORY
            return
        for number, text in zip(numbers, texts, strict=True):
            now = time.monotonic()
            if self.verdicts and now - self.reported_at > _FLUSH_SECS:
                self._report(done=False)
                now = time.monotonic()
            RUNNING.pack_into(self.running, 0, self.job, number, 0.0)
            _START.pack_into(self.running, _START_OFFSET, now)
            self.verdicts.append(judge(self.verifiers[name], name, task, number, text, self.metrics))
            _START.pack_into(self.running, _START_OFFSET, 0.0)
            signal.alarm(0)  # one that a verifier left behind must not hit the next rollout
            self.usable = self.verdicts[-1].status != OUT_OF_MEMORY
            if not self.usable:
                return
            self.num_judged += 1

    def _report(self, done: bool) -> None:
        message = {"job": self.job, "done": done, "usable": self.usable, "fresh": self.num_judged == 0}
        _send(self.connection, {**message, "verdicts": self.verdicts})
        self.verdicts, self.reported_at = [], time.monotonic()


def judge(verifier: Verifier, name: str, task: Task, number: int, text: str, metrics: Sequence[str]) -> Verdict:
    """Runs the verifier on one text, and turns whatever happens into a verdict.

    Memory and recursion that run out are the text's doing, as a missed deadline is. Everything else that is raised,
    `BaseException` included (some libraries raise their timeouts so), is the verifier's error.
    """
    try:
        reward = as_reward(verifier(task, text), name, task.task_id)
        missing = [metric for metric in metrics if metric != "score" and metric not in reward.components]
        if missing:
            raise ValueError(f"verifier {name!r}, task {task.task_id}: metric {missing[0]!r} is missing")
        bad = [key for key, value in (("score", reward.score), *reward.components.items()) if not math.isfinite(value)]
        if bad:
            return Verdict(number, Status.NONFINITE, error=f"not finite: {', '.join(bad)[:MAX_NOTE_CHARS]}")
        return Verdict(number, Status.OK, *reward)
    except Unparsable as error:
        return Verdict(number, Status.UNPARSABLE, info={"unparsable": _note(error)})
    except MemoryError as error:
        return Verdict(number, OUT_OF_MEMORY, info={"unparsable": _note(error)})
    except RecursionError as error:
        return Verdict(number, Status.UNPARSABLE, info={"unparsable": _note(error)})
    except BaseException as error:
        return Verdict(number, Status.ERROR, info={"error": _note(error)}, error=_describe(error))


def _note(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MAX_NOTE_CHARS]
    except BaseException:
        return type(error).__name__


def _describe(error: BaseException) -> str:
    """The traceback below the worker's own frame, bounded."""
    try:
        below = error.__traceback__.tb_next if error.__traceback__ else None
        lines = traceback.format_exception(type(error), error, below or error.__traceback__, limit=-20)
        text = "".join(lines)
        half = MAX_ERROR_CHARS // 2
        return text if len(text) <= MAX_ERROR_CHARS else f"{text[:half]}\n[...]\n{text[-half:]}"
    except BaseException:
        return _note(error)


def _die_with(parent_pid: int) -> None:
    """Ties this process to its parent, also when the parent is killed, also inside a loop that holds the GIL."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:

        def watch() -> None:
            while os.getppid() == parent_pid:
                time.sleep(0.5)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
    if os.getppid() != parent_pid:
        os._exit(1)


def _limit_memory(megabytes: int) -> None:
    """Caps the address space at what the started worker uses, plus the limit."""
    with open("/proc/self/statm") as statm:
        in_use = int(statm.read().split()[0]) * mmap.PAGESIZE
    limit = in_use + (megabytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read_frame(frames: BinaryIO) -> bytes:
    """The next frame, or b"" when the pool has closed its end."""
    header = frames.read(LENGTH.size)
    return frames.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else b""


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)
