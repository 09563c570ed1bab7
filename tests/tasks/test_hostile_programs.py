"""Hostile programs: none hangs, crashes, takes memory or leaves anything behind, alone and through the verifiers."""

import json
import os
import subprocess
import sys
import time

from hostile_programs import hostile_texts

from dynrl.tasks.proposal_kinds.base import BUILT_IN_KINDS, REASONS
from dynrl.tasks.sources import make_source
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Status

NUM_TEXTS = 10_000
GROUP = 8
MEMORY_LIMIT_MB = 128  # beyond what Python has when it starts

# Every text as a program, as an expression and as a proposal of each kind.
ALONE = f"""
import json, resource, sys, time
from hostile_programs import hostile_texts
from dynrl.tasks.programs.budgets import Budgets
from dynrl.tasks.programs.interpreter import run_program
from dynrl.tasks.proposal_kinds.base import BUILT_IN_KINDS, REASONS, Proposal, make_kind

texts = hostile_texts({NUM_TEXTS}, 0, sys.argv[1])
kinds = [make_kind(name, **({{"max_steps": 3_000}} if name == "program" else {{}})) for name in BUILT_IN_KINDS]
budgets = Budgets(max_steps=3_000)
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = in_use + ({MEMORY_LIMIT_MB} << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ended, slowest = {{}}, 0.0
for text in texts:
    start = time.process_time()
    reasons = [run_program(text, "1", budgets).refused, run_program("", text, budgets).refused]
    for kind in kinds:
        found = kind.read(text)
        reasons.append("" if isinstance(found, Proposal) else found.reason)
    slowest = max(slowest, time.process_time() - start)
    for reason in reasons:
        assert not reason or reason in REASONS, (text, reason)
        ended[reason] = ended.get(reason, 0) + 1
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({{"ended": ended, "slowest": slowest, "grown_kib": grown}}))
"""


def test_ten_thousand_texts_end_by_name_in_little_time_and_memory(tmp_path):
    folder = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "touched")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    found = json.loads(done.stdout)
    assert sum(found["ended"].values()) == NUM_TEXTS * (2 + len(BUILT_IN_KINDS))
    assert set(found["ended"]) >= {"", *REASONS} - {"not_deterministic"}  # all but what nothing in the language can be
    assert found["slowest"] < 2.0  # seconds, of five runs
    assert found["grown_kib"] < 64_000
    assert os.listdir(tmp_path) == []


def test_hostile_proposals_through_the_verifiers(tmp_path):
    texts = hostile_texts(400, 1, str(tmp_path / "touched"))
    kinds = sorted(BUILT_IN_KINDS)
    tasks = [make_source("self_propose", kind=kind).task(0, 0) for kind in kinds]
    sources = {task.source: "proposal" for task in tasks}
    reasons = set()
    with Verifiers(sources, num_workers=2, timeout_secs=10.0, memory_limit_mb=256) as verifiers:
        groups = [texts[start : start + GROUP] for start in range(0, len(texts), GROUP)]
        for ticket, group in enumerate(groups):
            verifiers.submit(ticket, tasks[ticket % len(tasks)], group)
        for ticket, task in enumerate(tasks, len(groups)):
            verifiers.submit(ticket, task, [task.answer])
        deadline = time.monotonic() + 120
        while verifiers.num_pending:
            assert time.monotonic() < deadline, verifiers.counts()
            for scores in verifiers.wait(1.0):
                assert set(scores.statuses) == {Status.OK}, verifiers.errors()
                for reward in scores.rewards:
                    reasons.add(reward.info.get("refused", ""))
                    assert reward.score == float("refused" not in reward.info)
                    assert scores.ticket < len(groups) or reward.score == 1.0
                    assert "cut" not in reward.info
        assert verifiers.counts()["restarts"] == 0
    assert reasons <= {"", *REASONS}
    assert not (tmp_path / "touched").exists()
