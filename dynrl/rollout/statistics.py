"""The rollout side's metrics of one step, over the populations of law 8, as sums and counts."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

    def judged(self, groups: Sequence[JudgedGroup]) -> None:
        """Counts finished groups, all at once: they are many, and small."""
        if not groups:
            return
        kept_N = np.array([j.verdict is Verdict.KEPT for j in groups])
        failed_N = np.array([j.verdict is Verdict.FAILED for j in groups])
        first_N = np.array([j.ticket.replacement_index == 0 for j in groups])
        live_NG, length_NG = np.stack([j.live for j in groups]), np.stack([j.length for j in groups])
        metric_NG = np.stack([j.metric for j in groups])
        score_NG = metric_NG if self._metric == "score" else np.stack([j.score for j in groups])
        count_N = live_NG.sum(1)
        sums_N = [np.where(live_NG, x, 0).sum(1) for x in (score_NG, metric_NG, length_NG)]
        for population, rows in (("all", slice(None)), ("kept", kept_N), ("first_attempt", first_N)):
            score, metric, length = (x[rows].sum(dtype=np.float64) for x in sums_N)
            self._add(population, score, metric, length, count_N[rows].sum())
        truncated_NG = live_NG & (np.stack([j.finish for j in groups]) == Finish.LENGTH)
        self._sums.add("length/truncated_frac", truncated_NG.sum(), count_N.sum())
        for status, count in enumerate(np.bincount(np.stack([j.status for j in groups]).ravel()).tolist()):
            if count:
                self._sums.count(f"reward/status/{STATUSES[status]}", count)
        self._sums.count("backfill/wasted_tokens", length_NG[~kept_N].sum())
        binary_N = (~live_NG | (metric_NG == 0) | (metric_NG == 1)).all(1)
        self._filter(groups, kept_N, failed_N, np.where(binary_N, sums_N[1], -1))

    def _filter(
        self, groups: Sequence[JudgedGroup], kept_N: np.ndarray, failed_N: np.ndarray, positives_N: np.ndarray
    ) -> None:
        """What the filter saw, of groups that did not fail; `positives_N` is -1 where rewards are not 0 or 1."""
        patterns = [j.pattern for j, failed in zip(groups, failed_N.tolist(), strict=True) if not failed]
        num = len(patterns)
        self._sums.add("group_filter/kept_frac", kept_N.sum(), num)
        self._sums.add("group_filter/zero_variance_frac", num - patterns.count("mixed"), num)
        self._sums.add("group_filter/all_pass_frac", patterns.count("all_pass"), num)
        self._sums.add("group_filter/all_fail_frac", patterns.count("all_fail"), num)
        bins = np.searchsorted(_SPREAD_EDGES, [j.spread for j in groups], side="left").tolist()
        names = [
            f"spread_{_SPREAD_NAMES[spread]}" if positives < 0 else str(int(positives))
            for positives, spread in zip(positives_N.tolist(), bins, strict=True)
        ]
        for stage, rows in (("pre", ~failed_N), ("post", kept_N)):
            for name, count in Counter(itertools.compress(names, rows.tolist())).items():
                self._sums.count(f"group_filter/pattern/{stage}/{name}", count)

    def _add(self, population: str, score: float, metric: float, length: float, num: int) -> None:
        for name, value in zip(self._rewards(), (score, metric), strict=False):
            self._sums.add(name.format(population), value, num)
        self._sums.add(f"length/{population}/mean", length, num)

    def trained(self, records: Iterable[Mapping[str, Any]], step: int, version: int) -> None:
        """Counts the groups of a batch, by the records that were stored with them."""
        records = list(records)
        totals = {name: sum(r[name] for r in records) for name in ("score", "metric", "length", "live", "version")}
        self._add("trained", totals["score"], totals["metric"], totals["length"], totals["live"])
        self._sums.add("train_batch/staleness/mean", version * len(records) - totals["version"], len(records))
        self._sums.count("backfill/carried_groups", sum(r["step"] < step for r in records))

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
