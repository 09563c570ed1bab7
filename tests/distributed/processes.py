"""Several processes on this machine: started together, and ended together whatever happens to one of them."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
from run_helpers import ROOT, child_environment

DEADLINE_SECS = 400


def work(
    worker: Path, folder: Path, cache: Path, spec: dict[str, Any], num_processes: int, num_devices: int
) -> list[Any]:
    """Runs `python WORKER SPEC.json PROCESS_ID` in all processes, and returns what each wrote as RESULT_<id>.json."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    spec = {**spec, "num_processes": num_processes, "num_devices": num_devices, "port": port}
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = child_environment(num_devices // num_processes, cache)
    logs = [(folder / f"log_{i}").open("w+") for i in range(num_processes)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(folder / "spec.json"), str(i)], cwd=ROOT, env=environment,
            stdout=log, stderr=subprocess.STDOUT,
        )
        for i, log in enumerate(logs)
    ]  # fmt: skip
    deadline = time.monotonic() + DEADLINE_SECS
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if any(p.poll() for p in processes):
                deadline = min(deadline, time.monotonic() + 5)  # the others would wait for it in vain
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [(folder / f"log_{i}").read_text()[-6000:] for i in range(num_processes)]
    for log in logs:
        log.close()
    assert [p.returncode for p in processes] == [0] * num_processes, "\n---\n".join(texts)
    return [json.loads((folder / f"RESULT_{i}.json").read_text()) for i in range(num_processes)]


def join(spec: dict[str, Any], process: int) -> None:
    """What a worker does first."""
    if spec["num_processes"] > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{spec['port']}", spec["num_processes"], process, initialization_timeout=60,
            heartbeat_timeout_seconds=30, shutdown_timeout_seconds=30,
        )  # fmt: skip
    assert jax.device_count() == spec["num_devices"]
