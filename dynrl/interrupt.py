"""Ctrl-C: the first one ends a run at its next step, or at the next stage of its set-up; the second one at once."""

import os
import signal
import threading
from typing import Any, Self


class Interrupt:
    """Within this context the first SIGINT only sets `requested`; the next one acts as it did before.

    It raises nothing: a KeyboardInterrupt in the middle of a library's set-up is lost in a finaliser or a collector's
    callback, or leaves things half made. Where SIGINT is ignored, as in a script's background, it stays so. Python
    calls signal handlers in its main thread: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Nothing asks any more: SIGINT acts as it did before."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _handle(self, signum: int, frame: Any) -> None:
        self.requested = True
        os.write(2, b"\ninterrupted: ending at the next step; Ctrl-C again stops at once\n")  # print is not reentrant
        self.restore()
