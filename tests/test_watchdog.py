"""A run that stands still is noticed, reported and, if asked, ended."""

import subprocess
import sys
import time

from dynrl.watchdog import Watchdog


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stall_is_reported_with_the_state_and_where_the_main_thread_is():
    said = []
    with Watchdog(0.2, False, said.append) as watchdog:
        watchdog.progress("step 3")
        wait_for(lambda: said)
    assert "no progress for 0 s (rollout_failure.stall_secs = 0.2); last: step 3" in said[0]
    assert "in wait_for" in said[0]
    assert not watchdog.stalled  # a report ends nothing


def test_progress_keeps_it_quiet_and_zero_turns_it_off():
    said = []
    for secs in (0.5, 0):
        with Watchdog(secs, True, said.append) as watchdog:
            for i in range(10):
                watchdog.progress(f"{i}")
                time.sleep(0.1)
    assert not said


def test_who_looks_is_told_that_it_stalled():
    with Watchdog(0.2, True, lambda message: None) as watchdog:
        wait_for(lambda: watchdog.stalled)
        assert "last: nothing yet" in watchdog.stalled
        watchdog.progress("going on")
        assert not watchdog.stalled


def test_a_process_that_does_not_look_is_ended():
    code = "import time; from dynrl.watchdog import Watchdog\nwith Watchdog(0.3, True, print): time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "no progress" in done.stdout
    assert "time.sleep(60)" in done.stdout or "<module>" in done.stdout
