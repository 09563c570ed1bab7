"""The handle by which the pool holds one verifier worker process: start it, talk to it without blocking, kill it.

What runs inside is `verifier_worker.py`; who gets which job is the pool's business.
"""

import contextlib
import itertools
import json
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from dynrl.tasks.verifier_worker import IN_WORKER, LENGTH, MAX_ERROR_CHARS, RUNNING, Setup

_MAX_REPLY_BYTES = 1 << 28
_MAX_BUFFERS = 64
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from dynrl.tasks.verifier_worker import main; main()"
)


class Worker:
    """The handle of one worker process. Nothing here blocks.

    `gone` says why the worker is lost, once it is; `ready` is whether its verifiers are loaded. `job` belongs to
    the pool.
    """

    def __init__(self, setup: Setup, cwd: str, paths: Sequence[str]) -> None:
        """Starts the process. Raises OSError when the system refuses."""
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        with theirs, tempfile.TemporaryFile() as shared:
            shared.truncate(RUNNING.size)
            self._running = mmap.mmap(shared.fileno(), RUNNING.size)
            fds = (theirs.fileno(), shared.fileno())
            command = [sys.executable, "-c", _BOOT, *map(str, fds), str(os.getpid()), json.dumps(paths)]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    pass_fds=fds,
                    cwd=cwd,
                    env={"OPENBLAS_NUM_THREADS": "1", **os.environ, "JAX_PLATFORMS": "cpu", IN_WORKER: "1"},
                    start_new_session=True,  # a group of its own: killed with its children, spared by Ctrl-C
                )
            except BaseException:
                self._close_files()
                raise
        self.started_at = self.heard_at = time.monotonic()
        self.ready = False
        self.gone = ""
        self.job: Any = None
        self._inbox = bytearray()
        self._outbox: deque[memoryview] = deque()
        self.send(pickle.dumps(setup))

    @property
    def writing(self) -> bool:
        """Whether bytes wait to be sent."""
        return bool(self._outbox)

    def send(self, *frames: bytes) -> None:
        """Queues frames, and writes what fits now."""
        for frame in frames:
            self._outbox += (memoryview(LENGTH.pack(len(frame))), memoryview(frame))
        self.heard_at = time.monotonic()
        self.flush()

    def flush(self) -> None:
        """Writes what fits, in few calls: each of them wakes the worker."""
        try:
            while self._outbox:
                sent = self.socket.sendmsg(tuple(itertools.islice(self._outbox, _MAX_BUFFERS)))
                while self._outbox and sent >= len(self._outbox[0]):
                    sent -= len(self._outbox.popleft())
                if sent:
                    self._outbox[0] = self._outbox[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()  # the end of the process is noticed where it is read

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived. Sets `gone` at the end of the stream, or when it makes no sense."""
        try:
            while len(self._inbox) <= _MAX_REPLY_BYTES:
                if not (data := self.socket.recv(1 << 20)):
                    self.gone = self.gone or "it closed its connection"
                    break
                self._inbox += data
        except BlockingIOError:
            pass
        except OSError as error:
            self.gone = self.gone or str(error)
        messages = []
        try:
            while len(self._inbox) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._inbox)[0]
                if end > _MAX_REPLY_BYTES:
                    raise ValueError(f"a reply of {end} bytes")
                if len(self._inbox) < end:
                    break
                messages.append(json.loads(self._inbox[LENGTH.size : end]))
                del self._inbox[:end]
        except ValueError as error:
            self.gone = self.gone or f"it broke the protocol: {error}"
        if messages:
            self.heard_at = time.monotonic()
        return messages

    def running(self, job_id: int) -> tuple[int, float] | None:
        """The index and the start time of the rollout that is being judged in this job, if one is."""
        job, index, start = RUNNING.unpack_from(self._running)
        return (index, start) if job == job_id and start else None

    def has_exited(self) -> bool:
        """Whether the process has ended, even if children of it hold its connection open."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Ends the process and its children, and releases what the handle holds. Reaping is left to `has_exited`."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._close_files()

    def complaint(self) -> str:
        """What an ended process wrote on stderr while it started, and how it ended. To be called before `kill`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - MAX_ERROR_CHARS))
        written = self._stderr.read().decode(errors="replace")
        return f"{self.gone or 'it ended'} (exit status {self._process.returncode})\n{written}".rstrip()

    def _close_files(self) -> None:
        for resource_ in (self.socket, self._running, self._stderr):
            resource_.close()
