"""The run's folder: made, writable, and of one run at a time."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

from etils import epath

try:
    import fcntl
except ImportError:  # not on Windows, which goes without the lock
    fcntl = None


class WorkdirError(RuntimeError):
    """A folder that a run cannot have."""


@contextmanager
def open_workdir(workdir: str, writes: bool) -> Iterator[epath.Path]:
    """The folder, made where it is missing, and kept from other runs until the end; a killed run frees it too.

    Args:
      workdir: a local path, or gs://, where nothing keeps others away.
      writes: whether this process writes there: of several, the first one takes the lock.

    Raises:
      WorkdirError: when nothing can be written there, or another run is at work.
    """
    path = epath.Path(workdir).expanduser().resolve()
    with contextlib.ExitStack() as stack:
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".probe-{os.getpid()}"
            probe.write_text("")
            probe.unlink()
            if writes and fcntl is not None and "://" not in str(path):
                lock = stack.enter_context(open(path / ".lock", "w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    why = f"another run is at work in {path}: wait for it, or take another workdir"
                    raise WorkdirError(why) from None
        except OSError as error:
            raise WorkdirError(f"the workdir {path} cannot be written: {error}") from error
        yield path
