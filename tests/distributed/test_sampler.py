"""The slot engine over two processes: each feeds its own devices' slots, and nothing else differs from one process."""

from pathlib import Path

import pytest
from processes import work

WORKER = Path(__file__).with_name("sampler_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 1, "fsdp": 2, "tensor": 2}, {"data": 1, "tensor": 4}])
def test_each_process_feeds_its_own_slots(mesh, tmp_path):
    spec = {"mesh": mesh}
    (whole,) = work(WORKER, tmp_path / "one", tmp_path, spec, 1, 4)
    parts = work(WORKER, tmp_path / "two", tmp_path, spec, 2, 4)
    assert len(whole["groups"]) > 50
    assert parts[0]["groups"].keys().isdisjoint(parts[1]["groups"])
    groups = {**parts[0]["groups"], **parts[1]["groups"]}
    assert groups.keys() == whole["groups"].keys()
    for ticket, (rest, logp) in whole["groups"].items():
        assert groups[ticket][0] == rest
        if mesh.get("tensor") == 4:  # sums over both processes, in another order
            assert groups[ticket][1] == pytest.approx(logp, abs=1e-5)
        else:
            assert groups[ticket][1] == logp
    for part in parts:
        assert part["counters"] == whole["counters"]
        assert part["compiled"] == []
        assert part["fed"][1] == whole["fed"][1] == 0
    if mesh.get("tensor") == 4:  # each process has devices of the only shard, and one of them owns its groups
        assert [p["fed"][0] for p in parts] == [whole["fed"][0]] * 2
    else:
        assert all(p["groups"] and p["fed"][0] for p in parts)
        assert sum(p["fed"][0] for p in parts) == whole["fed"][0]
