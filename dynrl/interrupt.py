"""Ctrl-C: during set-up it ends a run at once; then the first one ends it at its next step, the second one at once."""

import os
import signal
import threading
from typing import Any, Self


class Interrupt:
    """Within this context every SIGINT is noted in `requested`.

    It raises KeyboardInterrupt, too, until `defer` is called; from then on the first one only asks for an end, and the
    next one acts as it did before. Python calls signal handlers in its main thread: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises KeyboardInterrupt if one was asked for: what is raised within a finaliser or a callback is lost."""
        if self.requested:
            raise KeyboardInterrupt

    def defer(self) -> None:
        """Set-up is done: from now on steps are finished. Raises KeyboardInterrupt if one was asked for before."""
        self._deferred = True
        self.check()

    def _handle(self, signum: int, frame: Any) -> None:
        self.requested = True
        if not self._deferred:
            raise KeyboardInterrupt
        os.write(2, b"\ninterrupted: finishing the step; Ctrl-C again stops at once\n")  # print is not reentrant
        signal.signal(signal.SIGINT, self._previous)
