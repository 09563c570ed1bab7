"""Ctrl-C: during set-up it ends a run at once; then the first one ends it at its next step, the second one at once."""

import os
import signal
import threading
from typing import Any, Self


class Interrupt:
    """Within this context every SIGINT is noted in `requested`.

    It acts as it did before, too, until `defer` is called; from then on the first one only asks for an end, and the
    next one acts. Where SIGINT is ignored, as in a script's background, it stays so. Python calls signal handlers in
    its main thread: elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False
        self._previous: Any = None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def defer(self) -> None:
        """Set-up is done: from now on steps are finished."""
        self._deferred = True

    def restore(self) -> None:
        """The steps are done: SIGINT acts as it did before."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _handle(self, signum: int, frame: Any) -> None:
        self.requested = True
        if not self._deferred:
            self._previous(signum, frame)  # if what it raises is lost, in a finaliser or a callback, `requested` stays
            return
        os.write(2, b"\ninterrupted: finishing the step; Ctrl-C again stops at once\n")  # print is not reentrant
        self.restore()
