"""The words and records that every part of dynrl shares.

Array axes, as name suffixes:

    P  groups in one unit of generation work     B  groups in one optimizer step
    G  rollouts (completions) of one group       N  rows: groups times rollouts, flattened
    L  prompt length in tokens, left-padded      T  completion length in tokens, right-padded
    S  decode slots (rows of the sampler)        V  vocabulary
    K  named reward components                   C  capacity of the group buffer, in groups
    D  model width                               H  attention heads

This module knows neither JAX nor configs: the controller and the verifier workers import it. Arrays are typed
`Array`, which is a NumPy or a JAX array.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

Array = Any  # numpy.ndarray or jax.Array


class Verdict(enum.StrEnum):
    """What became of a finished group."""

    KEPT = "kept"
    FILTERED = "filtered"  # a data decision: the group succeeded, but carries no signal
    FAILED = "failed"  # infrastructure or verifier
    STALE = "stale"  # too old for the step that would train it


class Purpose(enum.IntEnum):
    """Why a rollout is made. Part of its noise identity (law 6): never renumber."""

    TRAIN = 0
    EVAL = 1
    PROBE = 2
    PROPOSE = 3


class Finish(enum.IntEnum):
    """How a rollout ended."""

    STOP = 0  # emitted a stop token, or completed a stop string
    LENGTH = 1  # ran into max_completion_tokens
    FAILED = 2  # the sampler met non-finite logits


class Status(enum.StrEnum):
    """How the verification of one rollout ended."""

    OK = "ok"
    UNPARSABLE = "unparsable"  # live, score 0: the verifier could not read the answer
    TIMEOUT = "timeout"  # live, score 0: the answer made the verifier miss its deadline
    NONFINITE = "nonfinite"  # dead: the verifier returned NaN or infinity
    ERROR = "error"  # dead: the verifier raised
    CRASHED = "crashed"  # dead: the verifier's worker died, on every attempt
    SAMPLER = "sampler"  # dead: the sampler failed; nothing was verified

    @property
    def live(self) -> bool:
        """Whether the rollout counts in its group."""
        return self in (Status.OK, Status.UNPARSABLE, Status.TIMEOUT)


@dataclass(frozen=True)
class Task:
    """A prompt with what its verifier needs.

    Attributes:
      task_id: given by the store; stable, never reused. -1 before admission.
      source: the name of the source, which also names its verifier.
      prompt: the text shown to the policy.
      answer: the reference answer, as text.
      level: difficulty, ordered within the source.
      parents: ids of the tasks this one was made from.
      metadata: JSON-able extras for the verifier.
    """

    task_id: int
    source: str
    prompt: str
    answer: str
    level: int = 0
    parents: tuple[int, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Reward(NamedTuple):
    """A verifier's judgement of one completion.

    `score` is the metric that filters and group estimators use unless configured otherwise; `components` are
    further named rewards; `info` is JSON-able and only shown to people.
    """

    score: float
    components: Mapping[str, float] = {}
    info: Mapping[str, Any] = {}


class Scores(NamedTuple):
    """The verified rewards of one group, aligned with its rollouts; a dead rollout's Reward is NaN."""

    ticket: int
    rewards: tuple[Reward, ...]
    statuses: tuple[Status, ...]


class Outcome(NamedTuple):
    """What a selector learns from one judged group, kept or not."""

    task_id: int
    visit: int
    verdict: Verdict
    num_live: int
    num_positive: int  # live rollouts with metric > 0
    mean: float  # mean metric of the live rollouts; NaN when there are none
    version: int
    source: str = ""  # of the task, as its level
    level: int = 0
    signal: bool = False  # whether the metric's spread is one (law 2), whatever the filter said


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one request. All of it is data: a new value never recompiles.

    Truncation acts in the field's order: temperature, top_k, top_p over what that leaves, min_p.

    Attributes:
      temperature: 0 is greedy.
      max_tokens: completion tokens at most, stop tokens and given ones (`extend`) included.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the fewest most likely tokens whose probabilities sum to it; 1 keeps all.
      min_p: keeps tokens at least this share of the most likely one's probability; 0 keeps all.
      stop_tokens: end a completion as the tokenizer's own stop token does, and belong to it.
      stop_strings: a completion ends with the first token that completes one in its text.
      ignore_eos: whether the tokenizer's own stop token is one like any other.
    """

    temperature: float = 1.0
    max_tokens: int = 16
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt with `num_samples` completions to make. Its identity fixes its noise (law 6).

    With `multi_turn`, a rollout that ends keeps its slot until the caller extends or finishes it.
    """

    ticket: int
    task_id: int
    visit: int
    purpose: Purpose
    prompt: Sequence[int]
    num_samples: int
    params: SamplingParams
    multi_turn: bool = False


class Payload(NamedTuple):
    """Everything that training needs of P groups, as device arrays with a leading group axis.

    Prompts are left-padded and completions right-padded; padding holds the pad id, log-prob 0 and mask False.
    """

    prompt_PL: Array  # int32
    prompt_length_P: Array  # int32
    tokens_PGT: Array  # int32
    logp_PGT: Array  # float32: log-probs of the distribution that was sampled from (behavior)
    mask_PGT: Array  # bool: tokens to train on (environment tokens are False)
    version_PGT: Array  # int32: policy version that sampled the token, -1 where it was given and in the padding
    length_PG: Array  # int32: completion tokens, the stop token included
    finish_PG: Array  # int32: Finish


@dataclass(frozen=True)
class Groups:
    """What a sampler's poll returns: finished groups at a fixed shape.

    `valid_P` says which rows are groups that this poll hands over; the others are filler or unfinished and must
    not be read; `tickets_P` is -1 there. `owned_P` says which rows this process verifies. All but `payload` are
    NumPy arrays; `host_*` is the part of the payload that verifiers and ledger read, copied from the device once,
    zeros in the rows of other processes.
    """

    payload: Payload
    tickets_P: np.ndarray
    valid_P: np.ndarray
    owned_P: np.ndarray
    host_tokens_PGT: np.ndarray
    host_length_PG: np.ndarray
    host_finish_PG: np.ndarray
    full_logp_PGT: Array | None = None  # float32: before truncation, after the temperature; where the sampler keeps it


class TrainBatch(NamedTuple):
    """Exactly B groups; the only thing a train step accepts, and only `GroupBuffer.take` builds it (law 1).

    `real_B` is False in the filler rows of a short step; their contents are zeros.
    """

    payload: Payload  # leading axis B
    rewards_BG: Array  # float32: the configured metric, raw; [B, G, K] where an estimator takes several rewards
    live_BG: Array  # bool
    real_B: Array  # bool
    role_B: Array  # int32: 1 where the policy proposed tasks, 0 where it solved one


class Sampler(Protocol):
    """Turns requests into finished groups. One interface for training, evaluation, generators and notebooks."""

    @property
    def num_in_flight(self) -> int:
        """Groups submitted and not yet returned or cancelled."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests. Raises ValueError, naming the ticket, for those that cannot be served; the others go on."""
        ...

    def poll(self, min_groups: int = 1) -> Groups | None:
        """Runs at most one chunk of decoding; returns finished groups of one size, or None.

        As long as anything is left to decode, none come before `min_groups` are finished.
        """
        ...

    def groups_per_poll(self, num_samples: int) -> int:
        """P of the groups that a poll returns, for requests of so many samples."""
        ...

    def cancel(self, tickets: Sequence[int]) -> None:
        """Drops the named groups, queued or in flight; unknown tickets are ignored."""
        ...

    def update_weights(self, params: Any, version: int) -> None:
        """Uses `params` for every group that starts after the call, or for every token, as configured."""
        ...
