"""Ctrl-C: the first one ends a run at its next step, the second one at once."""

import os
import signal
import threading
from typing import Any, Self


class Interrupt:
    """Within this context the first SIGINT only sets `requested`; the next one acts as it did before.

    Python calls signal handlers in its main thread: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: Any) -> None:
        self.requested = True
        os.write(2, b"\ninterrupted: finishing the step; Ctrl-C again stops at once\n")  # print is not reentrant
        signal.signal(signal.SIGINT, self._previous)
