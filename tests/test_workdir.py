"""The run's folder, and Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

from dynrl.interrupt import Interrupt
from dynrl.workdir import WorkdirError, open_workdir


def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    with open_workdir(str(tmp_path / "a" / "b"), writes=True) as path:
        assert path.is_dir()
        with pytest.raises(WorkdirError, match=f"another run is at work in {path}"), open_workdir(str(path), True):
            pass
        with open_workdir(str(path), writes=False) as again:  # a further process of the same run
            assert again == path
    with open_workdir(str(path), writes=True):
        pass


def test_a_killed_run_frees_its_folder(tmp_path):
    code = (
        "import sys, time; from dynrl.workdir import open_workdir\n"
        "with open_workdir(sys.argv[1], True): print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        with pytest.raises(WorkdirError, match="another run"), open_workdir(str(tmp_path), True):
            pass
        child.kill()
    with open_workdir(str(tmp_path), writes=True):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"the workdir .*/file cannot be written"):
        open_workdir(str(tmp_path / "file"), True).__enter__()


def test_the_first_interrupt_is_noted_and_the_second_one_acts():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:  # noqa: PT012
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_whoever_handled_or_ignored_interrupts_still_does():
    seen = []
    before = signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert (len(seen), interrupt.requested) == (0, True)
            os.kill(os.getpid(), signal.SIGINT)
            assert len(seen) == 1
        with Interrupt() as interrupt:
            interrupt.restore()
            os.kill(os.getpid(), signal.SIGINT)
            assert (len(seen), interrupt.requested) == (2, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupt.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
