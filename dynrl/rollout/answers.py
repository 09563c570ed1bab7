"""What an environment said to a turn, and how all processes hear of it (law 4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynrl.types import Status

_STATUSES = tuple(Status)
_ROWS = 64  # answers that are gathered at once


@dataclass
class Answer:
    """An environment's answer.

    Attributes:
      status: how its judgement ended.
      done: whether the rollout is over.
      rewards: so far, by the names that are wanted.
      tokens: the observation.
    """

    status: Status
    done: bool
    rewards: list[float]
    tokens: list[int]


def exchange(
    own: Sequence[Answer | None], num: int, num_rewards: int, max_tokens: int, problem: Exception | None
) -> list[Answer]:
    """Every process's answers, on every process. Each is taken from the process that has it: the sum of bits is exact.

    Args:
      own: this process's, None where another has it; empty where there is a problem.
      num: of answers, the same on every process.
      num_rewards: of each.
      max_tokens: of each.
      problem: of this process; it is raised here, and a RuntimeError on the others.
    """
    from jax.experimental import multihost_utils

    out: list[Answer] = []
    for first in range(0, max(num, 1), _ROWS):
        rows = np.zeros((_ROWS + 1, 3 + num_rewards + max_tokens), np.int32)  # one shape: nothing compiles (law 3)
        rows[-1] = problem is not None
        for i, answer in enumerate(own[first : first + _ROWS]):
            if answer is not None:
                bits = np.array(answer.rewards, np.float32).view(np.int32)
                head = [_STATUSES.index(answer.status), answer.done, len(answer.tokens), *bits, *answer.tokens]
                rows[i, : len(head)] = head
        total = np.asarray(multihost_utils.process_allgather(rows)).sum(axis=0, dtype=np.int32)
        if problem is not None:
            raise problem
        if total[-1, 0]:
            raise RuntimeError("the environments' workers failed on another process; its log says how")
        for row in total[: min(num - first, _ROWS)]:
            rewards = np.ascontiguousarray(row[3 : 3 + num_rewards]).view(np.float32).tolist()
            tokens = row[3 + num_rewards : 3 + num_rewards + row[2]].tolist()
            out.append(Answer(_STATUSES[row[0]], bool(row[1]), rewards, tokens))
    return out
