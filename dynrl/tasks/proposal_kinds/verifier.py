"""Judges proposals: the verifier `proposal`, which runs in the killable workers."""

import functools
import json
from typing import Any

from dynrl.tasks.proposal_kinds.base import MAX_PROPOSAL_CHARS, Proposal, ProposalKind, Refusal, make_kind
from dynrl.types import Reward, Task

_MAX_DETAIL_CHARS = 200


def proposal(task: Task, text: str) -> Reward:
    """1 when the completion is a proposal of the task's kind.

    The task's metadata hold `kind` and `kind_kwargs`, as the source `self_propose` writes them.

    Returns:
      The score, and as `info` either the proposed task (`source`, `prompt`, `answer`, `level`), or why there is none
      (`refused`, one of `base.REASONS` or of the kind's own; `detail`, for people).

    Raises:
      ValueError, TypeError: the task names no kind, or the kind does not keep to its contract.
    """
    kind = _kind(task)
    found = kind.read(text)
    where = f"kind {task.metadata['kind']!r}"
    if isinstance(found, Proposal):
        _check(found, where)
        if len(found.prompt) + len(found.answer) <= MAX_PROPOSAL_CHARS:
            return Reward(1.0, {}, {"source": kind.task_source, **found._asdict()})
        found = Refusal("too_long", f"prompt and answer have more than {MAX_PROPOSAL_CHARS} characters")
    if not isinstance(found, Refusal):
        raise TypeError(f"{where}: read returned {type(found).__name__}, neither a Proposal nor a Refusal")
    return Reward(0.0, {}, {"refused": found.reason, "detail": found.detail[:_MAX_DETAIL_CHARS]})


def _check(found: Proposal, where: str) -> None:
    if not (isinstance(found.prompt, str) and isinstance(found.answer, str) and isinstance(found.level, int)):
        raise TypeError(f"{where}: a Proposal must hold two strings and an int, got {found!r:.200}")
    if not found.prompt:
        raise ValueError(f"{where}: a Proposal's prompt is empty")


def _kind(task: Task) -> ProposalKind:
    name, kwargs = task.metadata.get("kind"), task.metadata.get("kind_kwargs")
    if not isinstance(name, str) or not isinstance(kwargs, dict):
        raise ValueError(f"task {task.task_id}: metadata must hold 'kind' and 'kind_kwargs'")
    return _made(name, json.dumps(kwargs))


@functools.lru_cache(maxsize=64)
def _made(name: str, kwargs: str) -> ProposalKind:
    arguments: dict[str, Any] = json.loads(kwargs)
    return make_kind(name, **arguments)
