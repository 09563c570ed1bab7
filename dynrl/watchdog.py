"""Notices that a run makes no progress: says where it stands, and ends it if asked to."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Watchdog:
    """A thread that waits for `progress` not to be called.

    Args:
      stall_secs: without progress; 0 = never.
      ends: whether the run then ends: `stalled` becomes true for whoever looks, and a process that does not look within
        as many seconds again (it hangs in foreign code) is ended from here, with exit code 1.
      say: where to report, with the main thread's traceback.
    """

    def __init__(self, stall_secs: float, ends: bool, say: Callable[[str], None]) -> None:
        self._secs, self.ends, self._say = stall_secs, ends, say
        self._last, self._state = time.monotonic(), "nothing yet"
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynrl-watchdog", daemon=True)
        self.stalled = ""  # why, once it is

    def progress(self, state: str) -> None:
        """Something happened; `state` is what a report will say of it."""
        self._last, self._state, self.stalled = time.monotonic(), state, ""

    def _watch(self) -> None:
        reported = 0
        while not self._done.wait(min(self._secs / 4, 5.0)):
            stalls = int((time.monotonic() - self._last) / self._secs)
            if stalls == 0:
                reported = 0
            elif stalls > reported:
                reported = stalls
                report = self._report()
                if self.ends and stalls > 1:
                    print(report, file=sys.stderr, flush=True)  # also where `say` is silent, as on all but one process
                    os._exit(1)  # nothing else ends a thread that hangs outside of Python

    def _report(self) -> str:
        quiet = time.monotonic() - self._last
        frame = sys._current_frames().get(self._main)
        where = "".join(traceback.format_stack(frame)) if frame else "the main thread is gone\n"
        why = f"no progress for {quiet:.0f} s (rollout_failure.stall_secs = {self._secs:g}); last: {self._state}"
        if self.ends:
            self.stalled = why
        report = f"{why}. The main thread is at\n{where}"
        self._say(report)
        return report

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        if self._secs:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
