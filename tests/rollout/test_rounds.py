"""The producer of rounds: dispatched groups in, events in ticket order out, exactly the kept ones stored."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from dynrl.config import from_mapping
from dynrl.models import sharding
from dynrl.models.tokenizer import CharTokenizer
from dynrl.rollout import producer as producer_module
from dynrl.rollout.buffer import RECORD, GroupBuffer
from dynrl.rollout.events import GroupsGenerated, GroupsJudged, Judgement
from dynrl.rollout.judge import Judge
from dynrl.rollout.ledger import Ticket
from dynrl.rollout.producer import Producer
from dynrl.rollout.records import STATUSES, Records, gather, records_of
from dynrl.rollout.turns import TurnPlayer
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Finish, Groups, Payload, Purpose, Reward, SamplingParams, Scores, Status, Task, Verdict

P, G, L, T = 4, 2, 3, 4
TOKENIZER = CharTokenizer("0123456789")
OK = Status.OK


def config(**groups):
    return from_mapping(
        {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": G,
            "sampler": {"num_slots": P * G, "max_completion_tokens": T, "temperature": 0.5},
            **groups,
        }
    )


class Store:
    """Task n asks for n."""

    def get(self, ids):
        return [Task(i, "count", f"{i}", f"{i}") for i in ids]


class ScriptedSampler:
    """Hands over the named tickets poll by poll; None is a chunk in which nothing finished.

    The completions of ticket t are `texts[t]`; None stands for a rollout that the sampler lost.
    """

    def __init__(self, mesh, polls, texts, finish=None):
        self._mesh, self._polls, self._texts, self._finish = mesh, list(polls), texts, finish or {}
        self.requests = []

    @property
    def num_in_flight(self):
        return sum(len(p or ()) for p in self._polls) if self.requests else 0

    def submit(self, requests):
        self.requests += requests

    def cancel(self, tickets): ...

    def update_weights(self, params, version): ...

    def groups_per_poll(self, num_samples):
        return P

    def poll(self, min_groups=1):
        tickets = self._polls.pop(0)
        if tickets is None:
            return None
        tokens, length = np.zeros((P, G, T), np.int32), np.zeros((P, G), np.int32)
        finish, tickets_P = np.zeros((P, G), np.int32), np.full(P, -1, np.int64)
        for i, ticket in enumerate(tickets):
            tickets_P[i] = ticket
            for g, text in enumerate(self._texts[ticket]):
                ids = TOKENIZER.encode(text or "")
                tokens[i, g, : len(ids)], length[i, g] = ids, len(ids)
                finish[i, g] = Finish.FAILED if text is None else self._finish.get((ticket, g), Finish.STOP)
        place = lambda x: sharding.place(x, sharding.rows(self._mesh))  # noqa: E731
        payload = Payload(
            place(np.zeros((P, L), np.int32)), place(np.ones(P, np.int32)), place(tokens),
            place(tokens.astype(np.float32)), place(np.arange(T) < length[..., None]), place(tokens), place(length),
            place(finish),
        )  # fmt: skip
        return Groups(payload, tickets_P, tickets_P >= 0, np.ones(P, bool), tokens, length, finish)


class ScriptedVerifiers:
    """Scores 1 for the task's answer; gives results back only when waited for, the last one first."""

    def __init__(self, broken=(), values=None):
        self._broken, self._values, self._done, self.seen = set(broken), values or {}, [], []

    @property
    def num_pending(self):
        return len(self._done)

    def submit(self, ticket, task, texts):
        self.seen.append((ticket, tuple(texts)))
        statuses = [Status.SAMPLER if t is None else Status.ERROR if ticket in self._broken else OK for t in texts]
        scores = [
            self._values.get(ticket, float(t == task.answer)) if s.live else float("nan")
            for t, s in zip(texts, statuses, strict=True)
        ]
        self._done.append(Scores(ticket, tuple(Reward(s, {"other": -s}) for s in scores), tuple(statuses)))

    def poll(self):
        return []

    def wait(self, timeout_secs):
        return [self._done.pop()]


@pytest.fixture(scope="module")
def parts(mesh1):
    """A judge and a buffer, compiled once."""
    run = config()
    buffer = GroupBuffer(mesh1, capacity=8, batch_size=4, num_samples=G, max_prompt_tokens=L, max_completion_tokens=T)
    return Judge(run.dynamic_sampling, run.loss, G), buffer


def tickets(*numbers):
    return [Ticket(n, task_id=n, visit=3, version=0, step=1, replacement_index=0) for n in numbers]


def player(sampler: Any) -> TurnPlayer:
    """Of tasks none of which is an environment."""
    return TurnPlayer(sampler, None, TOKENIZER, {}, (), 0)


def make_producer(parts, sampler, verifiers, run=None) -> Producer:
    fakes: Any = (player(sampler), verifiers, *parts, TOKENIZER, Store())
    return Producer(run or config(), *fakes, in_rounds=True)


def run_round(parts, sampler, verifiers, numbers, run=None, judge=None):
    """Polls until the round is over. Returns the events and the producer."""
    default_judge, buffer = parts
    buffer.free(buffer.tickets)
    producer = make_producer((judge or default_judge, buffer), sampler, verifiers, run)
    assert producer.idle
    producer.dispatch(tickets(*numbers))
    assert not producer.idle
    events = []
    while not producer.idle:
        events += producer.poll()
    return events, producer


def judgements(events):
    """All of a round, which come as one event, the last."""
    assert [type(e) for e in events] == [GroupsGenerated] * (len(events) - 1) + [GroupsJudged]
    return [Judgement(*j[:3]) for j in events[-1].judgements]


def only_group(producer):
    """What was judged of a round of one group, or of the first one of several."""
    return producer.take_judged()[0]


def test_events_come_in_ticket_order_whatever_finished_first(mesh1, parts):
    texts = {5: ("5", "0"), 6: ("6", "6"), 7: ("0", "0"), 8: ("0", "8"), 9: ("9", "1")}
    sampler = ScriptedSampler(mesh1, [(9, 7), None, (5,), (8, 6)], texts)
    verifiers = ScriptedVerifiers()
    events, producer = run_round(parts, sampler, verifiers, range(5, 10))
    assert [e.tickets for e in events[:-1]] == [(9, 7), (5,), (8, 6)]  # as the sampler handed them over
    assert judgements(events) == [
        Judgement(5, Verdict.KEPT, "mixed"),
        Judgement(6, Verdict.FILTERED, "all_pass"),
        Judgement(7, Verdict.FILTERED, "all_fail"),
        Judgement(8, Verdict.KEPT, "mixed"),
        Judgement(9, Verdict.KEPT, "mixed"),
    ]
    assert [[t.ticket for t in j.tickets] for j in producer.take_judged()] == [[9, 7], [5], [8, 6]]
    assert producer.take_judged() == []
    assert verifiers.seen == [(t, texts[t]) for t in (9, 7, 5, 8, 6)]


def test_requests_carry_the_identity_of_the_draw(mesh1, parts):
    sampler = ScriptedSampler(mesh1, [(5, 6)], {5: ("5", "0"), 6: ("6", "6")})
    run_round(parts, sampler, ScriptedVerifiers(), (5, 6))
    request = sampler.requests[1]
    assert (request.ticket, request.task_id, request.visit, request.purpose) == (6, 6, 3, Purpose.TRAIN)
    assert list(request.prompt) == TOKENIZER.encode("6")
    assert (request.num_samples, request.params) == (G, SamplingParams(0.5, T))


def test_the_buffer_holds_exactly_the_kept_groups(mesh1, parts):
    texts = {5: ("5", "0"), 6: ("6", "6"), 7: ("123", "7"), 8: ("0", "0")}
    sampler = ScriptedSampler(mesh1, [(8, 7), (6, 5)], texts)
    run_round(parts, sampler, ScriptedVerifiers(), range(5, 9))
    buffer = parts[1]
    assert sorted(buffer.tickets) == [5, 7]
    batch = buffer.take([7, 5])
    assert np.asarray(batch.rewards_BG).tolist() == [[0, 1], [1, 0], [0, 0], [0, 0]]
    assert np.asarray(batch.live_BG)[:2].all()
    assert np.asarray(batch.payload.tokens_PGT)[0, 0].tolist() == [*TOKENIZER.encode("123"), 0]
    assert np.asarray(batch.real_B).tolist() == [True, True, False, False]
    assert RECORD.names == ("score", "metric", "length", "live", "tokens", "step", "version", "role")
    assert buffer.records([7]).tolist() == [(1, 1, 4, 2, 4, 1, 0, 0)]


def test_a_rollout_that_the_sampler_lost_is_dead(mesh1, parts):
    texts = {5: ("5", None), 6: ("6", "0")}
    verifiers = ScriptedVerifiers()
    events, producer = run_round(parts, ScriptedSampler(mesh1, [(5, 6)], texts), verifiers, (5, 6))
    assert verifiers.seen[0] == (5, ("5", None))
    assert judgements(events) == [Judgement(5, Verdict.FAILED, "all_pass"), Judgement(6, Verdict.KEPT, "mixed")]
    lost = only_group(producer).records
    assert lost.live[0].tolist() == [True, False]
    assert lost.status[0].tolist() == [STATUSES.index(OK), STATUSES.index(Status.SAMPLER)]
    assert parts[1].tickets == [6]


def test_the_controller_is_told_causes_spreads_and_what_was_refused(mesh1, parts):
    run = config(dynamic_sampling={"filter": "accuracy_band", "filter_kwargs": {"low": 0.6, "high": 0.9}})
    judge = Judge(run.dynamic_sampling, run.loss, G)
    texts = {5: ("5", "0"), 6: (None, "6"), 7: ("7", "7"), 8: ("8", "8")}
    sampler = ScriptedSampler(mesh1, [(5, 6, 7, 8)], texts)
    events, _ = run_round(parts, sampler, ScriptedVerifiers(broken=[8]), (5, 6, 7, 8), judge=judge)
    told = [(j.verdict, j.cause, j.spread, j.signal) for j in events[-1].judgements]
    assert told == [
        (Verdict.FILTERED, "", 1.0, True),  # half right: there is signal, but not as much as the filter wants
        (Verdict.FAILED, "infra", 0.0, False),
        (Verdict.FILTERED, "", 0.0, False),
        (Verdict.FAILED, "data", 0.0, False),
    ]


def test_a_group_without_live_rollouts_fails_whatever_is_allowed(mesh1, parts):
    judge = Judge(config().dynamic_sampling, config().loss, 1)
    sampler = ScriptedSampler(mesh1, [(5, 6)], {5: ("5", "0"), 6: ("6", None)})
    events, _ = run_round(parts, sampler, ScriptedVerifiers(broken=[5]), (5, 6), judge=judge)
    # One live rollout has no signal.
    assert judgements(events) == [Judgement(5, Verdict.FAILED, "all_fail"), Judgement(6, Verdict.FILTERED, "all_pass")]


def test_a_verifier_that_raises_fails_the_group(mesh1, parts):
    texts = {5: ("5", "0"), 6: ("6", "0")}
    events, producer = run_round(parts, ScriptedSampler(mesh1, [(5, 6)], texts), ScriptedVerifiers(broken=[5]), (5, 6))
    assert [j.verdict for j in judgements(events)] == [Verdict.FAILED, Verdict.KEPT]
    assert not only_group(producer).records.live[0].any()


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_a_reward_beyond_float32_is_dead_and_counted(mesh1, parts, value):
    """The verifier's float64 was finite; in float32, in which everything is computed, it is not."""
    texts = {5: ("5", "0")}
    events, producer = run_round(
        parts, ScriptedSampler(mesh1, [(5,)], texts), ScriptedVerifiers(values={5: value}), (5,)
    )
    assert judgements(events)[0].verdict is Verdict.FAILED
    records = only_group(producer).records
    assert not records.live.any()
    assert records.status.tolist() == [[STATUSES.index(Status.NONFINITE)] * G]


def test_the_configured_metric_decides(mesh1, parts):
    run = config(dynamic_sampling={"metric": "other"})
    events, producer = run_round(parts, ScriptedSampler(mesh1, [(5,)], {5: ("5", "0")}), ScriptedVerifiers(), (5,), run)
    assert judgements(events)[0].verdict is Verdict.KEPT
    records = only_group(producer).records
    assert (records.score.tolist(), records.metric.tolist()) == ([[1, 0]], [[-1, 0]])
    assert np.asarray(parts[1].take([5]).rewards_BG)[0].tolist() == [-1, 0]


@pytest.mark.parametrize(("overlong", "verdict"), [("keep", Verdict.KEPT), ("mask", Verdict.FILTERED)])
def test_overlong_groups_under_masking_train_nothing(mesh1, parts, overlong, verdict):
    """Every rollout ran into the limit: masked, none is left to train on (law 2)."""
    run = config(loss={"overlong": overlong})
    finish = {(5, g): Finish.LENGTH for g in range(G)}
    sampler = ScriptedSampler(mesh1, [(5,)], {5: ("5", "1234")}, finish)
    events, _ = run_round(parts, sampler, ScriptedVerifiers(), (5,), run)
    assert judgements(events) == [Judgement(5, verdict, "mixed")]


def test_rounds_follow_each_other(mesh1, parts):
    """Nothing of a round is left for the next one; what is stored stays stored."""
    texts = {t: (f"{t}", "0") for t in range(1, 9)}
    sampler = ScriptedSampler(mesh1, [(1, 2), (4, 3)], texts)
    producer = make_producer(parts, sampler, ScriptedVerifiers())
    parts[1].free(parts[1].tickets)
    for numbers in ((1, 2), (3, 4)):
        sampler._polls = [numbers[::-1]]
        producer.dispatch(tickets(*numbers))
        events = []
        while not producer.idle:
            events += producer.poll()
        assert [j.ticket for j in judgements(events)] == list(numbers)
    assert sorted(parts[1].tickets) == [1, 2, 3, 4]
    secs = producer.take_secs()
    assert set(secs) == {"sampler", "reward", "backfill"}
    assert all(value > 0 for value in secs.values())
    assert producer.take_secs() == dict.fromkeys(secs, 0.0)


def test_a_refused_prompt_names_ticket_and_task(mesh1, parts):
    class Refuses(ScriptedSampler):
        def submit(self, requests):
            raise ValueError(f"request of ticket {requests[0].ticket} (task {requests[0].task_id}): too long")

    producer = make_producer(parts, Refuses(mesh1, [], {}), ScriptedVerifiers())
    with pytest.raises(ValueError, match=r"ticket 5 \(task 5\)"):
        producer.dispatch(tickets(5))
    assert producer.idle


@pytest.mark.parametrize("numbers", [(5, 123456, 6), (123456, 1234567)])
def test_a_prompt_that_is_too_long_is_dropped_where_it_may_be_skipped(mesh1, parts, numbers):
    run = config(tasks={"max_prompt_tokens": 5, "long_prompts": "skip"})
    short = tuple(n for n in numbers if n < 10)
    sampler = ScriptedSampler(mesh1, [short] if short else [], {n: (f"{n}", "0") for n in numbers})
    events, producer = run_round(parts, sampler, ScriptedVerifiers(), numbers, run)
    assert [r.ticket for r in sampler.requests] == list(short)
    assert judgements(events) == [
        Judgement(n, Verdict.KEPT, "mixed") if n in short else Judgement(n, Verdict.FILTERED, "too_long")
        for n in sorted(numbers)
    ]
    assert [t.ticket for j in producer.take_judged() for t in j.tickets] == list(short)
    assert [outcome.task_id for outcome in producer.take_skipped()] == [n for n in numbers if n not in short]
    assert producer.take_skipped() == []


def test_a_prompt_that_cannot_be_encoded_names_task_and_source(mesh1, parts):
    producer = make_producer(parts, ScriptedSampler(mesh1, [], {}), ScriptedVerifiers())
    with pytest.raises(ValueError, match=r"task -5 of source count: character '-' at position 0"):
        producer.dispatch(tickets(-5))


def test_a_host_filter_that_raises_is_raised_where_all_processes_hear_of_it(mesh1, parts, monkeypatch):
    gathered, real = [], producer_module.gather
    seen = lambda *args: gathered.append(args) or real(*args)  # noqa: E731
    monkeypatch.setattr(producer_module, "gather", seen)
    run = config(dynamic_sampling={"filter": "user_code:raises"})
    judge = Judge(run.dynamic_sampling, run.loss, G)
    texts = {5: ("5", "0"), 6: ("6", "0")}
    with pytest.raises(RuntimeError, match=r"filter 'user_code:raises' raised .* in group 0"):
        run_round(parts, ScriptedSampler(mesh1, [(5, 6)], texts), ScriptedVerifiers(), (5, 6), run, judge)
    assert "raised" in str(gathered[0][2])


@pytest.mark.parametrize("mine", [True, False])
def test_a_problem_of_one_process_ends_all(monkeypatch, mine):
    """The process that has it gathers before it goes, and the others do not go on."""
    problem = ValueError("the pool is gone")
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def allgather(own):
        assert (own[-1] == mine).all()
        other = own * 0
        other[-1] = not mine
        return np.stack([own, other])

    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    floats, zeros = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.int32)
    records = Records(floats, floats, zeros, zeros, zeros, np.ones((2, 1), np.int32), np.zeros((2, 0), np.float32))
    expected = (ValueError, "pool is gone") if mine else (RuntimeError, "on another process; its log says how")
    with pytest.raises(expected[0], match=expected[1]):
        gather(records, np.ones(2, bool), problem if mine else None)


def test_several_rewards_travel_to_the_batch(mesh1):
    run = config(loss={"estimator": "gdpo", "rewards": ("score", "other")})
    buffer = GroupBuffer(
        mesh1, capacity=8, batch_size=4, num_samples=G, max_prompt_tokens=L, max_completion_tokens=T, num_rewards=2
    )
    sampler = ScriptedSampler(mesh1, [(5, 6)], {5: ("5", "0"), 6: ("6", "6")})
    events, _ = run_round((Judge(run.dynamic_sampling, run.loss, G), buffer), sampler, ScriptedVerifiers(), (5, 6), run)
    # "other" is minus the score: equal weights cancel out, and nothing is left to learn.
    assert [j.verdict for j in judgements(events)] == [Verdict.FILTERED] * 2
    run = config(loss={"estimator": "gdpo", "rewards": ("score", "other"), "estimator_kwargs": {"weights": (1, 0.5)}})
    sampler = ScriptedSampler(mesh1, [(5, 6)], {5: ("5", "0"), 6: ("6", "6")})
    events, _ = run_round((Judge(run.dynamic_sampling, run.loss, G), buffer), sampler, ScriptedVerifiers(), (5, 6), run)
    assert [j.verdict for j in judgements(events)] == [Verdict.KEPT, Verdict.FILTERED]
    assert np.asarray(buffer.take([5]).rewards_BG)[0].tolist() == [[1, -1], [0, 0]]


def test_a_penalty_for_length_decides_what_there_is_to_learn_but_not_the_filter(mesh1, parts):
    """NeMo-RL#2431. The all-wrong group gets a spread from the penalty; the mixed one loses its signal to it."""
    run = config(loss={"overlong": "penalty", "overlong_cache_tokens": 3})
    texts = {5: ("0", "1234"), 6: ("0", "0006"), 7: ("7", "0")}
    verifiers = ScriptedVerifiers()
    verifiers.submit = lambda ticket, task, texts: verifiers._done.append(
        Scores(ticket, tuple(Reward(float(int(x) == ticket)) for x in texts), (OK,) * G)
    )
    judge = Judge(run.dynamic_sampling, run.loss, G)
    events, _ = run_round(parts, ScriptedSampler(mesh1, [(5, 6, 7)], texts), verifiers, (5, 6, 7), run, judge)
    assert judgements(events) == [
        Judgement(5, Verdict.FILTERED, "all_fail"),
        Judgement(6, Verdict.FILTERED, "mixed"),  # 0, and 1 - 1
        Judgement(7, Verdict.KEPT, "mixed"),
    ]
    assert np.asarray(parts[1].take([7]).rewards_BG)[0].tolist() == [1, 0]  # stored raw


def test_with_real_verifier_workers(mesh1, parts):
    texts = {t: (f"{t}", "x" if t % 2 else f"{t}") for t in (11, 12, 13)}
    texts = {t: tuple(v.replace("x", "0") for v in pair) for t, pair in texts.items()}
    with Verifiers({"count": "integer_match"}) as verifiers:
        events, _ = run_round(parts, ScriptedSampler(mesh1, [(13,), (12, 11)], texts), verifiers, (11, 12, 13))
    assert [j[:2] for j in judgements(events)] == [(11, Verdict.KEPT), (12, Verdict.FILTERED), (13, Verdict.KEPT)]


# ------------------------------------------------------------------------------------------------- two processes


def random_records(seed):
    rng = np.random.default_rng(seed)
    odd = np.array([0x7FC12345, 0xFFC00001, 0x80000000, 1, 0x7F800000], np.uint32).view(np.float32)
    status, length, finish = rng.integers(0, 5, (3, P, G), dtype=np.int32)
    keep = rng.integers(0, 2, (P, 1), dtype=np.int32)
    return Records(
        rng.choice(odd, (P, G)), rng.choice(odd, (P, G)), status, length, finish, keep, rng.choice(odd, (P, 2 * G))
    )


def test_gather_takes_each_row_from_its_owner_bit_for_bit(monkeypatch):
    """Two processes that own alternate rows, each with rubbish in the other's rows; NaN bits survive."""
    of_process = [random_records(0), random_records(1)]
    owned = [np.array([True, False, True, False]), np.array([False, True, False, True])]
    sent = []

    def record_and_stop(tree, tiled=False):
        sent.append(tree)
        raise InterruptedError

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", record_and_stop)
    for records, owned_P in zip(of_process, owned, strict=True):
        with pytest.raises(InterruptedError):
            gather(records, owned_P)
    both = jax.tree.map(lambda *x: np.stack(x), *sent)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda tree, tiled=False: both)
    results = [gather(records, owned_P) for records, owned_P in zip(of_process, owned, strict=True)]
    expected = [
        np.where(owned[0][:, None], a.view(np.int32), b.view(np.int32)) for a, b in zip(*of_process, strict=True)
    ]
    for result in results:
        for name, got, bits in zip(Records._fields, result, expected, strict=True):
            assert got.view(np.int32).tolist() == bits.tolist(), name
            assert got.dtype == getattr(of_process[0], name).dtype, name
            assert got.shape == getattr(of_process[0], name).shape, name


def test_one_process_gathers_nothing():
    records = random_records(0)
    assert gather(records, np.zeros(P, bool)) is records


def test_records_are_filled_where_owned(mesh1):
    sampler = ScriptedSampler(mesh1, [(5, 6)], {5: ("5", "12"), 6: ("6", "0")})
    groups = sampler.poll()
    assert groups is not None
    groups.owned_P[1] = False
    records = records_of(groups, {5: Scores(5, (Reward(0.5), Reward(-1.0)), (OK, Status.TIMEOUT))}, "score")
    assert records.score[0].tolist() == [0.5, -1.0]
    assert records.live.tolist() == [[True, True], *[[False, False]] * 3]
    assert records.length[0].tolist() == [1, 2]
    assert [r.dtype for r in records] == [np.float32, np.float32, *[np.int32] * 4, np.float32]
    assert records.components.shape == (P, 0)
