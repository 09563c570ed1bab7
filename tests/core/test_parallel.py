"""Every function under pmap and shard_map, in a process of its own: each check that passed is named there."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_on_eight_emulated_devices():
    script = Path(__file__).with_name("parallel_checks.py")
    result = subprocess.run([sys.executable, script], env=os.environ, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    defined = re.findall(r"^def (check_\w+)", script.read_text(), flags=re.MULTILINE)
    assert re.findall(r"passed (\w+)", result.stdout) == defined
