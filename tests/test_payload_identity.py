"""What is trained is what was judged, bit for bit: also for groups that were carried, and after a restart."""

import numpy as np
import pytest
from run_helpers import quick_build, row_hashes, wrap

import dynrl

pytestmark = pytest.mark.usefixtures("quick_compiles")


class Witness:
    """Hashes each group's payload when it is judged and when it is trained."""

    def __init__(self, num_devices):
        self.num_devices = num_devices
        self.judged, self.trained = {}, {}
        self.last_taken = ()

    def __call__(self, config):
        parts = quick_build(config, self.num_devices)
        wrap(parts.buffer, "put", self._put)
        wrap(parts.buffer, "take", self._take)
        wrap(parts, "train_step", self._train_step)
        return parts

    def _put(self, original):
        def put(groups, rewards_PG, live_PG, keep_P, records):
            hashes = row_hashes(groups.payload, rewards_PG, live_PG)
            for i in np.flatnonzero(keep_P):
                assert int(groups.tickets_P[i]) not in self.judged
                self.judged[int(groups.tickets_P[i])] = hashes[i]
                # What verifiers read is the payload too.
                np.testing.assert_array_equal(groups.host_tokens_PGT[i], np.asarray(groups.payload.tokens_PGT)[i])
                np.testing.assert_array_equal(groups.host_length_PG[i], np.asarray(groups.payload.length_PG)[i])
            original(groups, rewards_PG, live_PG, keep_P, records)

        return put

    def _take(self, original):
        def take(tickets):
            self.last_taken = tuple(tickets)
            return original(tickets)

        return take

    def _train_step(self, original):
        def train_step(state, batch):
            if self.last_taken:
                assert np.asarray(batch.real_B).tolist() == [i < len(self.last_taken) for i in range(8)]
                hashes = row_hashes(batch.payload, batch.rewards_BG, batch.live_BG)
                for ticket, value in zip(self.last_taken, hashes, strict=False):
                    assert ticket not in self.trained
                    self.trained[ticket] = value
            return original(state, batch)

        return train_step


ROUNDS = {"dynamic_sampling__refill": "full"}
IN_ORDER = {"schedule__name": "in_order", "schedule__max_lookahead_versions": 2, "reward__verifier": "user_code:rare"}
FRESH = {"schedule__name": "windowed", "schedule__max_staleness_versions": 3, "schedule__mode": "async"}
FIRST = {"schedule__name": "ready_first", "schedule__max_staleness_versions": 2, "schedule__mode": "async"}


@pytest.mark.parametrize(
    ("num_devices", "schedule"), [(1, ROUNDS), (8, ROUNDS), (1, IN_ORDER), (8, IN_ORDER), (1, FRESH), (8, FIRST)]
)
def test_what_is_trained_is_what_was_judged(tiny_config, tmp_path, num_devices, schedule):
    """Also what was promoted, carried, or kept over a restart, with work under way or without."""

    def config(num_steps):
        return tiny_config(**{
            "num_steps": num_steps, "tensorboard": False, "model__num_layers": 1, "warm_start__num_steps": 0,
            "reward__verifier": "user_code:coin", "dynamic_sampling__oversample": 1.5, **schedule,
        })  # fmt: skip

    first, second = Witness(num_devices), Witness(num_devices)
    dynrl.run(config(4), str(tmp_path), (), first)
    dynrl.run(config(8), str(tmp_path), (), second)
    judged = first.judged | second.judged
    assert not first.judged.keys() & second.judged.keys()
    assert len(first.trained) == len(second.trained) == 4 * 8
    for ticket, value in {**first.trained, **second.trained}.items():
        assert judged[ticket] == value
    if schedule is not FRESH:
        assert second.trained.keys() & first.judged.keys(), "nothing was carried over the restart"
    assert len(set(judged.values())) == len(judged)
