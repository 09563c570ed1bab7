"""The policy proposes its own tasks (Absolute Zero, arXiv:2505.03335): one policy is proposer and solver, on one loop.

    proposer's prompt -> G texts -> executor -> new tasks -> solver's groups -> learnability -> the proposer's rewards

A group of proposals is generated and read like any other. Its reward is what becomes of the tasks it proposed, so its
verdict is deferred until these have been solved, or not; meanwhile other groups take its place in the step. The tasks
are appended to the store, are drawn next, and stay.

A proposal's reward (equation 4 there): 1 - pass rate where the solver passes sometimes, and nothing where it passes
always or never; texts that are no task, or none that is new, are punished.

This module knows neither JAX nor I/O. Every process calls it with the same arguments in the same order (law 4).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynrl.tasks.base import Draws
from dynrl.tasks.proposal_kinds.base import REASONS
from dynrl.tasks.proposal_kinds.source import ProposerTasks
from dynrl.tasks.proposals import Proposals, Refused
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Task

FIRST_ID = 1 << 40  # of the proposer's prompts, which are in no store
_CANDIDATES = 4  # tasks looked at for each reference


@dataclass(frozen=True)
class Rewards:
    """What a proposal is worth beside 1 - pass rate."""

    invalid: float
    uniform: float


class Read(NamedTuple):
    """What the executor made of one text.

    Attributes:
      live: whether there is a text at all: the sampler, or the worker, may have failed.
      info: of the verifier `proposal`: prompt, answer and level, or why it was refused.
    """

    live: bool
    info: Mapping[str, Any]


class Scored(NamedTuple):
    """The rewards of one group of proposals; None for a dead rollout."""

    ticket: int
    scores: list[float | None]


@dataclass
class _Waiting:
    """A group of proposals whose tasks are being solved."""

    step: int
    tasks: list[int | None]  # by rollout: the task that it proposed
    scores: list[float | None]  # by rollout, as far as known; a dead one has neither


class SelfPropose:
    """Draws proposer's prompts, and turns what becomes of the proposals into rewards.

    Args:
      source: writes the proposer's prompts.
      seed: of the prompts.
      store: takes the tasks.
      proposals: reads what is proposed.
      groups_per_step: groups of proposals that are drawn for a step; twice as many may wait for their verdicts.
      rewards: of proposals that have no pass rate between 0 and 1.
      max_wait_steps: steps after which tasks that nobody solved count as unsolved.
    """

    def __init__(
        self, source: ProposerTasks, seed: int, store: TaskStore, proposals: Proposals, *, groups_per_step: int,
        rewards: Rewards, max_wait_steps: int,
    ) -> None:  # fmt: skip
        self._source, self._kind, self._seed = source, source.proposal_kind, seed
        self._store, self._proposals = store, proposals
        self._groups_per_step, self._rewards, self._max_wait_steps = groups_per_step, rewards, max_wait_steps
        self._next = 0  # prompt
        self._drawn = (-1, 0)  # the step that tasks were last drawn for, and how many prompts
        self._references: dict[int, tuple[int, ...]] = {}  # tasks that each open prompt shows
        self._waiting: dict[int, _Waiting] = {}  # by ticket
        self._proposed_by: dict[int, tuple[int, int]] = {}  # task -> ticket and rollout
        self._counts: Counter[str] = Counter()  # since `row`

    @property
    def max_deferred(self) -> int:
        """Groups that wait for their verdicts at once, at most."""
        return 2 * self._groups_per_step

    def example(self, seed: int, index: int) -> Task:
        """A prompt and a proposal that answers it, for a warm start: a pure function."""
        return self._source.task(seed, index)

    @property
    def identity(self) -> dict[str, Any]:
        """JSON-able; what its examples depend on."""
        return {"kwargs": dict(self._source.kwargs), "groups_per_step": self._groups_per_step}

    # ---- Prompts ----

    def draw(self, num: int, step: int) -> list[int]:
        """Returns ids of up to `num` fresh prompts for the step; none, once it has its share."""
        before = self._drawn[1] if self._drawn[0] == step else 0
        num = max(min(num, self._groups_per_step - before, self.max_deferred - len(self._references)), 0)
        ids = [FIRST_ID + self._next + i for i in range(num)]
        for i in ids:
            self._references[i] = self._choose_references(i)
        self._next += num
        self._drawn = step, before + num
        return ids

    def _choose_references(self, task_id: int) -> tuple[int, ...]:
        wanted, size = self._kind.num_references, len(self._store)
        if not wanted or not size:
            return ()
        draws = Draws(self._seed, "self_propose/references", task_id - FIRST_ID)
        found = {draws.below(size): None for _ in range(_CANDIDATES * wanted)}
        tasks = self._store.get(list(found))
        return tuple(t.task_id for t in tasks if t.source == self._kind.task_source)[:wanted]

    def get(self, ids: Sequence[int]) -> list[Task]:
        """The tasks with these ids: open prompts, and those of the store."""
        return [self._prompt(i) if i >= FIRST_ID else self._store.get([i])[0] for i in ids]

    def _prompt(self, task_id: int) -> Task:
        references = self._references[task_id]
        draws = Draws(self._seed, "self_propose/prompt", task_id - FIRST_ID)
        prompt, _, metadata = self._source.problem(draws, 0, self._store.get(references))
        return Task(task_id, self._source.task_source, prompt, "", 0, references, metadata)

    # ---- Proposals ----

    def proposed(self, ticket: int, task_id: int, reads: Sequence[Read], step: int, version: int) -> None:
        """Takes a group's proposals: what is fit is appended to the store, and waits to be solved."""
        parents = self._references.get(task_id, ())
        rows: list[dict[str, Any] | None] = []
        for read in reads:
            fit = read.live and "refused" not in read.info
            task = {key: read.info[key] for key in ("prompt", "answer", "level")} if fit else None
            rows.append(task and {"source": self._kind.task_source, **task, "parents": parents, "metadata": {}})
        tasks: list[int | None] = [None] * len(reads)
        scores: list[float | None] = [None] * len(reads)
        results = self._proposals.read(rows, len(rows))
        new = [result for result in results if isinstance(result, Task)]
        ids = iter(self._store.append(new, step=step, version=version, generator=self._source.task_source))
        for i, (read, result) in enumerate(zip(reads, results, strict=True)):
            if isinstance(result, Task):
                tasks[i] = new_id = next(ids)
                self._proposed_by[new_id] = ticket, i
            elif read.live:
                scores[i] = self._rewards.invalid
                self._counts[f"refused/{read.info.get('refused', result)}"] += 1
        self._counts["proposed"] += sum(read.live for read in reads)
        self._counts["admitted"] += sum(task is not None for task in tasks)
        self._waiting[ticket] = _Waiting(step, tasks, scores)

    def observe(self, outcome: Outcome) -> None:
        """Learns what became of a solver's group, if its task was proposed and not yet judged."""
        where = self._proposed_by.pop(outcome.task_id, None)
        if where is None:
            return
        ticket, rollout = where
        learnable = outcome.signal and outcome.num_live > 0
        reward = 1 - outcome.num_positive / outcome.num_live if learnable else self._rewards.uniform
        self._waiting[ticket].scores[rollout] = reward
        self._counts["learnable"] += learnable

    def take_scored(self) -> list[Scored]:
        """The groups whose proposals have all been judged since the last call, or have waited for too long."""
        scored = []
        for ticket, w in sorted(self._waiting.items()):
            late = self._drawn[0] - w.step > self._max_wait_steps
            open_tasks = [(i, t) for i, t in enumerate(w.tasks) if t is not None and w.scores[i] is None]
            if open_tasks and not late:
                continue
            for i, task in open_tasks:
                w.scores[i] = self._rewards.uniform
                self._proposed_by.pop(task, None)
                self._counts["never_solved"] += 1
            scored.append(Scored(ticket, w.scores))
        for ticket, _ in scored:
            del self._waiting[ticket]
        return scored

    def keep(self, open_ids: Iterable[int]) -> None:
        """Forgets the prompts of groups that have ended; these ids are open."""
        still = set(open_ids)
        self._references = {i: r for i, r in self._references.items() if i in still}

    def drop(self, tickets: Iterable[int] | None = None) -> None:
        """These groups are gone, or all: nobody waits for their rewards."""
        gone = self._waiting.keys() & set(self._waiting if tickets is None else tickets)
        self._proposed_by = {t: where for t, where in self._proposed_by.items() if where[0] not in gone}
        for ticket in gone:
            del self._waiting[ticket]

    def row(self) -> dict[str, float | int | None]:
        """Metrics since the last call, by name."""
        counts, self._counts = self._counts, Counter()
        row: dict[str, float | int | None] = {f"self_propose/refused/{reason}": 0 for reason in (*REASONS, *Refused)}
        row |= {f"self_propose/{name}": 0 for name in ("proposed", "admitted", "learnable", "never_solved")}
        row |= {f"self_propose/{name}": count for name, count in counts.items()}
        return {**row, "self_propose/waiting_groups": len(self._waiting), "tasks/size": len(self._store)}

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; bounded by what is open."""
        return {
            "next": self._next,
            "drawn": list(self._drawn),
            "references": [[i, list(r)] for i, r in self._references.items()],
            "waiting": [[t, w.step, list(w.tasks), list(w.scores)] for t, w in self._waiting.items()],
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._next = state["next"]
        self._drawn = (state["drawn"][0], state["drawn"][1])
        self._references = {i: tuple(r) for i, r in state["references"]}
        self._waiting = {t: _Waiting(step, list(tasks), list(scores)) for t, step, tasks, scores in state["waiting"]}
        self._proposed_by = {
            task: (ticket, i)
            for ticket, w in self._waiting.items()
            for i, task in enumerate(w.tasks)
            if task is not None and w.scores[i] is None
        }
        self._counts = Counter(state["counts"])
