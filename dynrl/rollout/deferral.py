"""Groups whose verdict waits for those of others: the policy's own proposals, until their tasks have been solved.

The verifiers have read them, and their payloads stay where the sampler left them. Every process learns of all
proposals (law 4).
"""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dynrl.models.sharding import bytes_of_all
from dynrl.rollout.ledger import Ticket
from dynrl.tasks.self_propose import FIRST_ID, Read, SelfPropose
from dynrl.types import Groups, Payload, Reward, Scores, Status


class Deferral:
    """Holds deferred groups.

    Args:
      self_propose: knows what becomes of their tasks.
      metrics: components that a reward must have.
    """

    def __init__(self, self_propose: SelfPropose, metrics: Sequence[str]) -> None:
        self._self_propose, self._metrics = self_propose, metrics
        self._held: list[Groups] = []  # valid where deferred

    @property
    def tickets(self) -> set[int]:
        """Of the groups that are deferred."""
        return {t for groups in self._held for t in groups.tickets_P[groups.valid_P].tolist()}

    def take(
        self, groups: Groups, tickets: Mapping[int, Ticket], scores: Mapping[int, Scores], problem: Exception | None
    ) -> tuple[Groups, list[int]]:  # fmt: skip
        """Takes the proposals among groups that have been read.

        Args:
          groups: with their scores, as far as this process owns them.
          tickets: of what is under way.
          scores: of the verifiers.
          problem: of this process, which cannot say what was proposed: raised here, and a RuntimeError on the others.

        Returns:
          The groups without them, and the tickets that were taken.
        """
        proposals = [t for t in groups.tickets_P[groups.valid_P].tolist() if tickets[t].task_id >= FIRST_ID]
        if not proposals:
            return groups, []
        ours_P = groups.valid_P & np.isin(groups.tickets_P, proposals)
        mine = [] if problem else groups.tickets_P[ours_P & groups.owned_P].tolist()
        own = [[t, [[s.live, dict(r.info)] for r, s in zip(*scores[t][1:], strict=True)]] for t in mine]
        everyones = [json.loads(data) for data in bytes_of_all(json.dumps(None if problem else own).encode())]
        if problem is not None:
            raise problem
        if None in everyones:
            raise RuntimeError("filter or verifiers failed on another process; its log says how")
        reads = {t: [Read(*read) for read in rows] for theirs in everyones for t, rows in theirs}
        for number in sorted(reads):
            t = tickets[number]
            self._self_propose.proposed(number, t.task_id, reads[number], t.step, t.version)
        self._held.append(dataclasses.replace(groups, valid_P=ours_P))
        return dataclasses.replace(groups, valid_P=groups.valid_P & ~ours_P), sorted(proposals)

    def due(self) -> tuple[list[Groups], dict[int, Scores]]:
        """The groups whose tasks have been solved, or not, since the last call; and their scores."""
        scored = {s.ticket: self._scores(s.ticket, s.scores) for s in self._self_propose.take_scored()}
        if not scored:
            return [], {}
        numbers, due, held = list(scored), [], []
        for groups in self._held:
            due_P = groups.valid_P & np.isin(groups.tickets_P, numbers)
            if due_P.any():
                due.append(dataclasses.replace(groups, valid_P=due_P))
            if (groups.valid_P & ~due_P).any():
                held.append(dataclasses.replace(groups, valid_P=groups.valid_P & ~due_P))
        self._held = held
        return due, scored

    def _scores(self, ticket: int, scores: Sequence[float | None]) -> Scores:
        values = [float("nan") if score is None else score for score in scores]
        rewards = tuple(Reward(value, dict.fromkeys(self._metrics, value)) for value in values)
        return Scores(ticket, rewards, tuple(Status.SAMPLER if score is None else Status.OK for score in scores))

    def cancel(self, numbers: Collection[int]) -> None:
        """Nobody waits for these groups any more."""
        self._self_propose.drop(numbers)
        gone = list(numbers)
        held = [dataclasses.replace(g, valid_P=g.valid_P & ~np.isin(g.tickets_P, gone)) for g in self._held]
        self._held = [groups for groups in held if groups.valid_P.any()]

    @property
    def arrays(self) -> list[Payload]:
        """Payloads that are held."""
        return [groups.payload for groups in self._held]

    def state_dict(self) -> list[Any]:
        """JSON-able: an entry for each payload; `arrays` are apart."""
        return [[groups.tickets_P.tolist(), groups.valid_P.tolist()] for groups in self._held]

    def load_state_dict(self, groups: Sequence[Groups]) -> None:
        """Takes over restored groups."""
        self._held = list(groups)
