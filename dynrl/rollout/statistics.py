"""The rollout side's metrics of one step, over the populations of law 8, as sums and counts."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynrl.metrics import Row, Sums
from dynrl.rollout.judge import Judged
from dynrl.rollout.keep_rate import KeepRate
from dynrl.rollout.ledger import Phase
from dynrl.rollout.records import STATUSES, JudgedGroups
from dynrl.tasks.self_propose import FIRST_ID
from dynrl.types import Finish, Verdict

POPULATIONS = ("all", "kept", "trained", "first_attempt", "base")
_SPREAD_EDGES = np.array([1e-6, 0.1, 0.2, 0.5, 1.0])
_SPREAD_NAMES = ("0", "0-0.1", "0.1-0.2", "0.2-0.5", "0.5-1", "over_1")


class RolloutStatistics:
    """Counts what was judged and trained since the last `row`.

    Args:
      metric: the configured reward metric; recorded beside the score when it is another.
      sources: of the tasks; several are counted apart too.
      holds: whether refused groups with signal are kept for a while.
    """

    def __init__(self, metric: str, sources: Sequence[str] = (), holds: bool = False) -> None:
        self._metric, self._holds = metric, holds
        self._sources = sources if len(sources) > 1 else ()
        self._sums = Sums()
        self._counts: dict[str, int] = {}
        self._clear()

    def _clear(self) -> None:
        self._sums = Sums()
        for name in ("kept", "zero_variance", "all_pass", "all_fail", "other"):
            self._sums.add(f"group_filter/{name}_frac", 0, 0)
        for population in POPULATIONS:
            for name in [*self._rewards(), f"length/{population}/mean"]:
                self._sums.add(name.format(population), 0, 0)
        for name in ("backfill/wasted_tokens", "rollout/long_prompts"):
            self._sums.count(name, 0)
        for source in self._sources:
            self._sums.count(f"source/{source}/groups", 0)
            for name in ("kept_frac", "reward/mean"):
                self._sums.add(f"source/{source}/{name}", 0, 0)

    def _rewards(self) -> list[str]:
        names = ["reward/score/{}/mean"]
        return names if self._metric == "score" else [*names, f"reward/{self._metric}/{{}}/mean"]

    def judged(self, groups: JudgedGroups) -> None:
        """Counts finished groups, all at once: they are many, and small."""
        r, verdict_N = groups.records, groups.judged.verdict_P
        kept_N, failed_N = verdict_N == Verdict.KEPT, verdict_N == Verdict.FAILED
        first_N = np.array([t.replacement_index == 0 for t in groups.tickets], bool)
        base_N = np.array([t.base for t in groups.tickets], bool)
        # The policy's own proposals have rewards of another kind; they are counted by their source alone.
        solver_N = np.array([t.task_id < FIRST_ID for t in groups.tickets], bool)
        live_NG = r.live
        count_N = live_NG.sum(1)
        sums_N = [np.where(live_NG, x, 0).sum(1, dtype=np.float64) for x in (r.score, r.metric, r.length)]
        for population, rows in (("all", True), ("kept", kept_N), ("first_attempt", first_N), ("base", base_N)):
            score, metric, length, num = (x[solver_N & rows].sum() for x in (*sums_N, count_N))
            self._add(population, score, metric, length, num)
        truncated_NG = live_NG & (r.finish == Finish.LENGTH)
        self._sums.add("length/truncated_frac", truncated_NG.sum(), count_N.sum())
        for status, count in enumerate(np.bincount(r.status.ravel()).tolist()):
            if count:
                self._sums.count(f"reward/status/{STATUSES[status]}", count)
        stored_N = kept_N | (groups.judged.refused_P & self._holds)  # counted when they are freed
        self._sums.count("backfill/wasted_tokens", r.length[~stored_N].sum())
        names_N = np.array(groups.sources)
        for name in sorted(set(groups.sources)) if self._sources else ():
            rows = names_N == name
            self._sums.count(f"source/{name}/groups", rows.sum())
            self._sums.add(f"source/{name}/kept_frac", kept_N[rows].sum(), (~failed_N[rows]).sum())
            self._sums.add(f"source/{name}/reward/mean", sums_N[1][rows].sum(), count_N[rows].sum())
        binary_N = (~live_NG | (r.metric == 0) | (r.metric == 1)).all(1)
        self._filter(groups.judged, kept_N, failed_N, np.where(binary_N, sums_N[1], -1))

    def retried(self, groups: JudgedGroups) -> None:
        """Counts attempts that failed and are made again."""
        self._sums.count("backfill/wasted_tokens", groups.records.length.sum())

    def _filter(self, judged: Judged, kept_N: np.ndarray, failed_N: np.ndarray, positives_N: np.ndarray) -> None:
        """What the filter saw, of groups that did not fail; `positives_N` is -1 where rewards are not 0 or 1."""
        patterns = judged.pattern_P[~failed_N].tolist()
        num = len(patterns)
        self._sums.add("group_filter/kept_frac", kept_N.sum(), num)
        self._sums.add("group_filter/zero_variance_frac", num - patterns.count("mixed"), num)
        self._sums.add("group_filter/all_pass_frac", patterns.count("all_pass"), num)
        self._sums.add("group_filter/all_fail_frac", patterns.count("all_fail"), num)
        self._sums.add("group_filter/other_frac", patterns.count("uniform"), num)
        bins = np.searchsorted(_SPREAD_EDGES, judged.stats.spread, side="left").tolist()
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

    def trained(self, records_N: np.ndarray, step: int, version: int) -> None:
        """Counts the groups of a batch, by the records (of dtype RECORD) that were stored with them."""
        r = records_N[records_N["role"] == 0]
        self._add("trained", r["score"].sum(), r["metric"].sum(), r["length"].sum(), r["live"].sum())
        r = records_N
        ages, counts = np.unique(version - r["version"], return_counts=True)
        self._sums.add("train_batch/staleness/mean", (ages * counts).sum(), len(r))
        for age, num in zip(ages.tolist(), counts.tolist(), strict=True):
            self._sums.count(f"train_batch/staleness/versions/{age}", num)
        self._sums.count("backfill/carried_groups", (r["step"] < step).sum())

    def skipped(self, num: int) -> None:
        """Counts groups that were dropped because their prompt is too long."""
        self._sums.count("rollout/long_prompts", num)

    def freed(self, records_N: np.ndarray) -> None:
        """Counts kept groups that will not be trained after all."""
        self._sums.count("backfill/wasted_tokens", records_N["tokens"].sum())

    def row(self, totals: Mapping[str, Any], counts: Mapping[str, int], rates: KeepRate, surplus: int) -> Row:
        """The metrics of the step, and a fresh start.

        Args:
          totals: the ledger's.
          counts: the controller's run totals.
          rates: the controller's.
          surplus: ready groups that its batch left over.
        """
        row = self._sums.row()
        self._clear()
        kept, generated = row["length/kept/mean"], row["length/all/mean"]
        row["length/kept_over_all"] = kept / generated if kept and generated else None
        row["group_filter/keep_rate"] = rates.mean
        row["group_filter/keep_rate_posterior"] = rates.expected
        row |= {f"source/{s}/keep_rate_posterior": r for s, r in rates.by_source.items() if s in self._sources}
        row |= {f"backfill/{name}": num - self._counts.get(name, 0) for name, num in counts.items()}
        self._counts = dict(counts)
        row["backfill/surplus_groups"] = surplus
        row["ledger/dropped"] = sum(totals["dropped"].values())
        row |= {f"ledger/dropped/{reason}": count for reason, count in totals["dropped"].items()}
        row |= {f"ledger/{name}": totals[name] for name in ("dispatched", "trained", "failed", *map(str, Phase))}
        return row

    def statuses(self) -> dict[str, int]:
        """Rollouts judged since the last `row`, by how their verification ended."""
        row, prefix = self._sums.row(), "reward/status/"
        return {k.removeprefix(prefix): int(v or 0) for k, v in row.items() if k.startswith(prefix)}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"sums": self._sums.state_dict(), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._sums.load_state_dict(state["sums"])
        self._counts = dict(state["counts"])
