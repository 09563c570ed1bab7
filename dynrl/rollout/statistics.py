"""The rollout side's metrics of one step, over the populations of law 8, as sums and counts."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dynrl.metrics import Row, Sums
from dynrl.rollout.ledger import Phase
from dynrl.rollout.rounds import STATUSES, JudgedGroup
from dynrl.types import Finish, Verdict

POPULATIONS = ("all", "kept", "trained", "first_attempt")
_SPREAD_EDGES = np.array([1e-6, 0.1, 0.2, 0.5, 1.0])
_SPREAD_NAMES = ("0", "0-0.1", "0.1-0.2", "0.2-0.5", "0.5-1", "over_1")


class RolloutStatistics:
    """Counts what was judged and trained since the last `row`.

    Args:
      metric: the configured reward metric; recorded beside the score when it is another.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._sums = Sums()
        self._clear()

    def _clear(self) -> None:
        self._sums = Sums()
        for name in ("kept", "zero_variance", "all_pass", "all_fail"):
            self._sums.add(f"group_filter/{name}_frac", 0, 0)
        for population in POPULATIONS:
            for name in [*self._rewards(), f"length/{population}/mean"]:
                self._sums.add(name.format(population), 0, 0)
        self._sums.count("backfill/wasted_tokens", 0)

    def _rewards(self) -> list[str]:
        names = ["reward/score/{}/mean"]
        return names if self._metric == "score" else [*names, f"reward/{self._metric}/{{}}/mean"]

    def judged(self, groups: Iterable[JudgedGroup]) -> None:
        """Counts finished groups."""
        for j in groups:
            populations = ["all"]
            if j.verdict is Verdict.KEPT:
                populations.append("kept")
            if j.ticket.replacement_index == 0:
                populations.append("first_attempt")
            live, num = j.live, int(j.live.sum())
            for population in populations:
                self._add(population, j.score[live].sum(), j.metric[live].sum(), j.length[live].sum(), num)
            self._sums.add("length/truncated_frac", (j.finish[live] == Finish.LENGTH).sum(), num)
            for status, count in zip(*np.unique(j.status, return_counts=True), strict=True):
                self._sums.count(f"reward/status/{STATUSES[status]}", int(count))
            if j.verdict is not Verdict.KEPT:
                self._sums.count("backfill/wasted_tokens", int(j.length.sum()))
            if j.verdict is not Verdict.FAILED:
                self._filter(j, live)

    def _filter(self, j: JudgedGroup, live: np.ndarray) -> None:
        s = self._sums
        s.add("group_filter/kept_frac", j.verdict is Verdict.KEPT, 1)
        s.add("group_filter/zero_variance_frac", j.pattern != "mixed", 1)
        s.add("group_filter/all_pass_frac", j.pattern == "all_pass", 1)
        s.add("group_filter/all_fail_frac", j.pattern == "all_fail", 1)
        values = j.metric[live]
        if np.isin(values, (0.0, 1.0)).all():
            name = str(int(values.sum()))
        else:
            name = "spread_" + _SPREAD_NAMES[int(np.searchsorted(_SPREAD_EDGES, j.spread, side="left"))]
        s.count(f"group_filter/pattern/pre/{name}", 1)
        if j.verdict is Verdict.KEPT:
            s.count(f"group_filter/pattern/post/{name}", 1)

    def _add(self, population: str, score: float, metric: float, length: float, num: int) -> None:
        for name, value in zip(self._rewards(), (score, metric), strict=False):
            self._sums.add(name.format(population), value, num)
        self._sums.add(f"length/{population}/mean", length, num)

    def trained(self, records: Iterable[Mapping[str, Any]], step: int, version: int) -> None:
        """Counts the groups of a batch, by the records that were stored with them."""
        for r in records:
            self._add("trained", r["score"], r["metric"], r["length"], r["live"])
            self._sums.add("train_batch/staleness/mean", version - r["version"], 1)
            self._sums.count("backfill/carried_groups", int(r["step"] < step))

    def freed(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Counts kept groups that will not be trained after all."""
        for r in records:
            self._sums.count("backfill/wasted_tokens", r["tokens"])

    def row(self, totals: Mapping[str, Any], num_rounds: int, surplus: int) -> Row:
        """The metrics of the step, and a fresh start.

        Args:
          totals: the ledger's.
          num_rounds: rounds that filled the step.
          surplus: ready groups that its batch left over.
        """
        row = self._sums.row()
        self._clear()
        row["backfill/num_rounds"] = num_rounds
        row["backfill/surplus_groups"] = surplus
        row["ledger/dropped"] = sum(totals["dropped"].values())
        row |= {f"ledger/dropped/{reason}": count for reason, count in totals["dropped"].items()}
        row |= {f"ledger/{name}": totals[name] for name in ("dispatched", "trained", "failed", *map(str, Phase))}
        return row

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return self._sums.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._sums.load_state_dict(state)
