"""The slot engine: whose tokens depend on the rollout's identity only, and what a caller may rely on.

Samplers are shared by the tests of this file, since each compiles its own programs; every test leaves them idle.
"""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from dynrl.compile_counter import CompileCounter
from dynrl.config import ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import init_params, stack_layers
from dynrl.models.policy import completion_logprobs
from dynrl.sampling.engine import SlotEngine
from dynrl.sampling.options import EngineOptions
from dynrl.types import Finish, Payload, Purpose, Request, SamplingParams

EOS, PAD, VOCAB, G, L, T = 1, 0, 12, 2, 5, 6
CONFIG = ModelConfig(num_layers=2, width=16, num_heads=4, num_kv_heads=2, head_dim=4, mlp_width=16)


def random_params(config, vocab):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(partial(init_params, config, vocab), jax.random.key(0))

    def fill(path, leaf):
        return (float(path[-1].key == "scale") + 0.3 * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, shapes)


@pytest.fixture(scope="module")
def params():
    tree = random_params(CONFIG, VOCAB)
    tree["embedding"][EOS] += 0.15 * np.sign(tree["final_norm"]["scale"])  # rollouts of all lengths
    return tree


def make_engine(mesh, params, version=3, config=CONFIG, vocab_size=VOCAB, decode=None, **overrides):
    options = {
        "num_slots": 8, "max_prompt_tokens": L, "max_completion_tokens": T, "group_sizes": (1, G), "chunk_steps": 2,
        "prefill_tokens": 16,
    }  # fmt: skip
    engine = SlotEngine(
        config, mesh, EngineOptions(**(options | overrides)), eos_id=EOS, pad_id=PAD, vocab_size=vocab_size, seed=7,
        decode=decode,
    )  # fmt: skip
    engine.update_weights(place(params, mesh), version)
    return engine


def place(params, mesh):
    return jax.tree.map(sharding.place, params, sharding.param_shardings(params, mesh))


@pytest.fixture(scope="module")
def sampler(mesh1, params):
    made = make_engine(mesh1, params)
    made.warm_up()
    return made


@pytest.fixture(autouse=True)
def idle(sampler, mesh1, params):
    """Every test finds the shared sampler idle, with the same weights, and leaves it idle."""
    sampler.update_weights(place(params, mesh1), 3)
    yield
    assert sampler.num_in_flight == 0
    assert sampler.poll() is None


def request(ticket, task_id=None, temperature=1.0, max_tokens=T, visit=0, prompt=None, num_samples=G, **params):
    task_id = 1000 + ticket if task_id is None else task_id
    rng = np.random.default_rng(task_id % 2**32)
    prompt = rng.integers(2, VOCAB, rng.integers(1, L + 1)).tolist() if prompt is None else prompt
    params = SamplingParams(temperature, max_tokens, **params)
    return Request(ticket, task_id, visit, Purpose.TRAIN, prompt, num_samples, params)


def drain(sampler, min_groups=1):
    """Polls until idle. Returns {ticket: its row of every payload array}, checking that none comes twice."""
    out = {}
    for _ in range(1000):
        if not sampler.num_in_flight:
            return out
        groups = sampler.poll(min_groups)
        if groups is not None:
            take(groups, out)
    raise AssertionError("the sampler never became idle")


def take(groups, out):
    payload = jax.tree.map(np.asarray, groups.payload)
    assert groups.valid_P.any()  # a poll without a finished group returns None
    assert (groups.tickets_P[~groups.valid_P] == -1).all()
    np.testing.assert_array_equal(groups.host_tokens_PGT, payload.tokens_PGT)
    np.testing.assert_array_equal(groups.host_length_PG, payload.length_PG)
    np.testing.assert_array_equal(groups.host_finish_PG, payload.finish_PG)
    for i in np.flatnonzero(groups.valid_P):
        ticket = int(groups.tickets_P[i])
        assert ticket not in out
        out[ticket] = Payload(*(x[i] for x in payload))


def run(sampler, requests):
    sampler.submit(requests)
    return drain(sampler)


def assert_same(got, want):
    """Bitwise equal groups by task, whatever their tickets."""
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


# ---- Law 6: noise and tokens belong to the rollout ----


def test_tokens_do_not_depend_on_neighbours_order_or_position(sampler):
    alone = {task: run(sampler, [request(0, task)])[0] for task in range(50, 56)}
    assert len({g.tokens_PGT.tobytes() for g in alone.values()}) == 6
    for order in ([50, 51, 52, 53, 54, 55], [55, 53, 51, 50, 52, 54]):
        crowd = run(sampler, [request(i, task) for i, task in enumerate(order)])
        for i, task in enumerate(order):
            assert_same(crowd[i], alone[task])
    # Neighbours that are short, cold, greedy, or the same task at another visit.
    others = [request(1, 60, max_tokens=1), request(2, 61, temperature=0.0), request(3, 50, visit=1)]
    mixed = run(sampler, [*others, request(0, 50)])
    assert_same(mixed[0], alone[50])
    assert (mixed[3].tokens_PGT != alone[50].tokens_PGT).any()  # a visit has its own noise


def test_rollouts_of_a_group_differ(sampler):
    out = run(sampler, [request(i) for i in range(12)])
    assert sum((g.tokens_PGT[0] != g.tokens_PGT[1]).any() for g in out.values()) >= 11


def test_tokens_do_not_depend_on_the_chunk(sampler, mesh1, params):
    requests = [request(i, temperature=0.7) for i in range(7)]
    want = run(sampler, requests)
    for steps, refill in ((1, 0), (7, 3), (T, 8)):
        got = run(make_engine(mesh1, params, chunk_steps=steps, refill_slots=refill), requests)
        assert got.keys() == want.keys()
        for ticket in want:
            assert_same(got[ticket], want[ticket])


def test_slots_and_meshes_change_tokens_at_near_ties_at_most(sampler, mesh1, mesh8, mesh222, params):
    requests = [request(i, temperature=1.0 if i % 2 else 0.7) for i in range(32)]
    want = run(sampler, requests)
    for other in (
        make_engine(mesh1, params, num_slots=1),  # fewer slots than a group has rollouts
        make_engine(mesh1, params, num_slots=13),
        make_engine(mesh8, params, num_slots=16),
        make_engine(mesh222, params, num_slots=8),
    ):
        got = run(other, requests)
        changed = 0
        for ticket, group in want.items():
            for g in range(G):
                # The last bits of logits differ, so a draw may only where two tokens lie within them: at most 1
                # rollout in 10,000, none expected in 64. Everything before such a token must agree.
                if (group.tokens_PGT[g] != got[ticket].tokens_PGT[g]).any():
                    changed += 1
                    continue
                np.testing.assert_allclose(got[ticket].logp_PGT[g], group.logp_PGT[g], atol=2e-5)
                assert got[ticket].length_PG[g] == group.length_PG[g]
        assert changed <= 1


# ---- What is recorded is what training needs ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_are_the_trainer_s(sampler, params, temperature):
    out = run(sampler, [request(i, temperature=temperature) for i in range(8)])
    batch = Payload(*(np.stack(x) for x in zip(*out.values(), strict=True)))
    logp, _ = jax.jit(partial(completion_logprobs, config=CONFIG, temperature=temperature))(params, batch)
    error = np.abs(np.where(batch.mask_PGT, logp - batch.logp_PGT, 0))
    assert error.max() < 1e-5
    assert batch.mask_PGT.sum() > 40
    assert (batch.logp_PGT[batch.mask_PGT] < 0).all()


def test_payload_layout(sampler):
    requests = [request(i) for i in range(24)]
    out = run(sampler, requests)
    finishes = set()
    for r in requests:
        group = out[r.ticket]
        n = len(r.prompt)
        assert group.prompt_length_P == n
        assert group.prompt_PL.tolist() == [PAD] * (L - n) + list(r.prompt)
        for g in range(G):
            tokens, length, finish = group.tokens_PGT[g], group.length_PG[g], Finish(group.finish_PG[g])
            made = np.arange(T) < length
            finishes.add(finish)
            # The stop token ends a completion, and belongs to it: it is trained and counts in the length.
            assert (EOS in tokens[:length]) == (finish is Finish.STOP)
            if finish is Finish.STOP:
                assert tokens[:length].tolist().index(EOS) == length - 1
            else:
                assert length == T
            np.testing.assert_array_equal(group.mask_PGT[g], made)
            np.testing.assert_array_equal(group.version_PGT[g], np.where(made, 3, -1))
            assert (tokens[~made] == 0).all()
            assert (group.logp_PGT[g][~made] == 0).all()
    assert finishes == {Finish.STOP, Finish.LENGTH}
    lengths = np.concatenate([g.length_PG for g in out.values()])
    assert len(set(lengths.tolist())) >= 5  # the test saw completions of many lengths


def test_max_tokens_is_per_request(sampler):
    full = run(sampler, [request(i, 70) for i in range(1)])[0]
    out = run(sampler, [request(n, 70, max_tokens=n) for n in range(1, T + 1)])
    for n, group in out.items():
        for g in range(G):
            # A cut rollout is the beginning of the whole one; a stop token at the limit is a stop.
            length = min(n, full.length_PG[g])
            assert group.length_PG[g] == length
            assert group.tokens_PGT[g][:length].tolist() == full.tokens_PGT[g][:length].tolist()
            stopped = full.finish_PG[g] == Finish.STOP and full.length_PG[g] <= n
            assert group.finish_PG[g] == (Finish.STOP if stopped else Finish.LENGTH)


def test_one_token_completions(mesh1, params):
    one = make_engine(mesh1, params, max_completion_tokens=1, num_slots=4)
    out = run(one, [request(i, max_tokens=1) for i in range(5)])
    assert len(out) == 5
    for group in out.values():
        assert group.length_PG.tolist() == [1, 1]
        want = [Finish.STOP if t == EOS else Finish.LENGTH for t in group.tokens_PGT[:, 0]]
        assert group.finish_PG.tolist() == want


def test_greedy_rollouts_are_the_arg_max(sampler, params):
    group = run(sampler, [request(0, temperature=0.0)])[0]
    assert_same([group.tokens_PGT[0]], [group.tokens_PGT[1]])
    batch = Payload(*(x[None] for x in group))
    logp = jax.jit(partial(completion_logprobs, config=CONFIG))(params, batch)[0][0]
    np.testing.assert_allclose(np.where(group.mask_PGT, logp, 0), group.logp_PGT, atol=1e-5)


def test_scanned_weights_are_served(sampler, mesh1, params):
    scanned = make_engine(mesh1, stack_layers(params, 2), config=dataclasses.replace(CONFIG, scan_layers=True))
    requests = [request(i) for i in range(4)]
    want, got = run(sampler, requests), run(scanned, requests)
    for ticket in want:
        assert_same(got[ticket], want[ticket])


# ---- The protocol: submit, poll, cancel, update_weights ----


def test_finished_groups_come_early_and_once(sampler):
    # Three groups of one token beside one of T: the short ones do not wait for it, and the next takes their slots at
    # once, in the same chunk.
    slow = next(
        t for t in range(200, 400) if run(sampler, [request(0, t)])[0].length_PG.min() == T
    )  # one that does not stop by itself
    sampler.submit([request(0, slow), *(request(i, max_tokens=1) for i in (1, 2, 3)), request(4, max_tokens=1)])
    assert sampler.num_in_flight == 5
    polls = []
    while sampler.num_in_flight:
        out = {}
        groups = sampler.poll()
        if groups is not None:
            take(groups, out)
        polls.append(set(out))
    assert [p for p in polls if p] == [{1, 2, 3, 4}, {0}]
    assert sampler.poll() is None  # idle: nothing to wait for


def test_a_caller_may_wait_for_more_groups_at_once(sampler):
    sampler.submit([request(i) for i in range(10)])
    sizes = []
    while sampler.num_in_flight:
        groups = sampler.poll(4)
        if groups is not None:
            sizes.append(int(groups.valid_P.sum()))
    assert sizes[:-1] == [4] * (len(sizes) - 1)  # P = 8 slots / G: never more than one payload holds
    assert sum(sizes) == 10


def test_groups_of_several_sizes(sampler):
    requests = [request(i, num_samples=1 if i % 3 else G) for i in range(12)]
    sampler.submit(requests)
    seen = {}
    while sampler.num_in_flight:
        groups = sampler.poll()
        if groups is not None:
            shape = groups.payload.tokens_PGT.shape
            assert shape[0] == sampler.groups_per_poll(shape[1])
            seen |= {int(t): shape[1] for t in groups.tickets_P[groups.valid_P]}
    assert seen == {r.ticket: r.num_samples for r in requests}
    alone = run(sampler, [request(1, num_samples=G)])[1]
    single = run(sampler, [request(1, num_samples=1)])[1]
    np.testing.assert_array_equal(single.tokens_PGT[0], alone.tokens_PGT[0])  # sample 0 is the same rollout


def test_groups_handed_over_stay_readable(sampler):
    # The decode state is donated to the next chunk: what was handed over must not lie in it.
    sampler.submit([request(0, max_tokens=1), request(1), request(2), request(3)])
    assert sampler.poll() is None
    first = sampler.poll()
    assert first is not None
    before = jax.tree.map(lambda x: np.array(x), first.payload)
    drain(sampler)
    run(sampler, [request(4), request(5)])
    for x, y in zip(first.payload, before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_cancel(sampler):
    want = run(sampler, [request(i) for i in range(7)])
    sampler.submit([request(i) for i in range(7)])
    sampler.cancel([5, 77])  # queued, and unknown
    assert sampler.num_in_flight == 6
    assert sampler.poll() is None  # the first chunk runs
    early = sampler.poll()  # it is over, and the second runs: 0 to 3 are in flight or handed over
    out = {}
    if early is not None:
        take(early, out)
    left = [t for t in range(4) if t not in out]
    assert left
    sampler.cancel(left[:1])
    sampler.cancel(left[:1])  # twice is once
    assert sampler.num_in_flight == 6 - len(out) - 1
    out |= drain(sampler)
    assert set(out) == {0, 1, 2, 3, 4, 6} - {left[0]}
    assert all(r is None for r in sampler._table.slots)
    for ticket, group in out.items():
        assert_same(group, want[ticket])  # the others do not notice


def test_an_interrupt_while_a_poll_waits_loses_nothing(sampler):
    class Interrupting:
        def __array__(self, *_, **__):
            raise KeyboardInterrupt

    want = run(sampler, [request(i) for i in range(6)])
    sampler.submit([request(i) for i in range(6)])
    out = {}
    while sampler.num_in_flight:
        groups = sampler.poll()
        if groups is not None:
            take(groups, out)
        if sampler._running is not None:
            running, sampler._running = sampler._running, (Interrupting(), sampler._running[1])
            with pytest.raises(KeyboardInterrupt):
                sampler.poll()
            assert sampler._running is not None
            sampler._running = running
    for ticket, group in want.items():
        assert_same(out[ticket], group)


def test_cancelling_everything_leaves_the_sampler_usable(sampler):
    sampler.submit([request(i) for i in range(6)])
    sampler.poll()
    sampler.cancel(range(6))
    assert sampler.num_in_flight == 0
    while sampler._running is not None:  # the chunk in progress ends
        assert sampler.poll() is None
    assert set(run(sampler, [request(0)])) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [2] * (L + 1)}, "has 6 tokens, more than max_prompt_tokens = 5"),
        ({"prompt": [2, VOCAB]}, r"not in \[0, 12\)"),
        ({"prompt": [-1]}, r"not in \[0, 12\)"),
        ({"num_samples": G + 1}, "asks for 3 samples; there are: 1, 2"),
        ({"params": SamplingParams(1.0, 0)}, r"max_tokens 0 is not in \[1, 6\]"),
        ({"params": SamplingParams(1.0, T + 1)}, r"max_tokens 7 is not in \[1, 6\]"),
        ({"params": SamplingParams(float("nan"), T)}, "temperature nan"),
        ({"params": SamplingParams(float("inf"), T)}, "temperature inf"),
        ({"params": SamplingParams(-0.5, T)}, "temperature -0.5"),
        ({"params": SamplingParams(1.0, T, top_k=-1)}, "top_k -1 is not in"),
        ({"params": SamplingParams(1.0, T, top_p=0.0)}, r"top_p 0.0 is not in \(0, 1\]"),
        ({"params": SamplingParams(1.0, T, min_p=1.5)}, r"min_p 1.5 is not in \[0, 1\]"),
        ({"params": SamplingParams(1.0, T, min_p=float("nan"))}, "min_p nan"),
        ({"params": SamplingParams(1.0, T, stop_tokens=(VOCAB,))}, r"token id 12 is not in \[0, 12\)"),
        ({"params": SamplingParams(1.0, T, stop_tokens=tuple(range(2, 10)))}, "9 stop tokens, more than 8"),
        (
            {"params": SamplingParams(1.0, T, stop_strings=("a",))},
            "stop strings need an engine that was given `decode`",
        ),
        ({"params": SamplingParams(1.0, T, top_k=2**32 + 1)}, r"top_k 4294967297 is not in \[0, 2\*\*31\)"),
        ({"visit": 2**32}, r"visit 4294967296 is not in \[0, 2\*\*32\)"),
        ({"visit": -1}, "visit -1 is not in"),
        ({"multi_turn": True}, "multi_turn needs an engine with max_extend_tokens"),
    ],
)
def test_a_bad_request_is_named_and_the_others_go_on(sampler, change, message):
    sampler.submit([request(1)])
    bad = dataclasses.replace(request(41, 9), **change)
    with pytest.raises(ValueError, match=rf"ticket 41 \(task 9\): .*{message}"):
        sampler.submit([request(2), bad, request(3)])
    assert sampler.num_in_flight == 3
    assert set(drain(sampler)) == {1, 2, 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": [None, 3]}, "no integer"),
        ({"prompt": "ab"}, "no integer"),
        ({"prompt": [2.7, 3]}, "no integer"),
        ({"num_samples": 1.0}, "no integer"),
        ({"params": SamplingParams(1.0, 2.5)}, "no integer"),  # pyright: ignore[reportArgumentType]
        ({"ticket": 2**63}, "ticket has more than 64 bits"),
        ({"task_id": 2**63}, "id has more than 64 bits"),
    ],
)
def test_numbers_that_are_none(sampler, change, message):
    bad = dataclasses.replace(request(41, 9), **change)
    with pytest.raises(ValueError, match=message):
        sampler.submit([bad, request(2)])
    assert set(drain(sampler)) == {2}
    numpy = dataclasses.replace(request(3), ticket=np.int64(3), prompt=np.array([2, 3]))
    sampler.submit([numpy])
    json.dumps(sampler.state_dict())
    assert set(drain(sampler)) == {3}


@pytest.mark.parametrize(
    "options",
    [{"chunk_steps": 0}, {"refill_slots": -1}, {"prefill_tokens": 0}, {"group_sizes": ()}, {"group_sizes": (0,)},
     {"max_extend_tokens": -1}, {"max_prompt_tokens": 0}, {"max_completion_tokens": 0}],
)  # fmt: skip
def test_options_that_cannot_work_are_named(mesh1, params, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} = "):
        make_engine(mesh1, params, **options)


def test_versions_are_not_negative(sampler, mesh1, params):
    with pytest.raises(ValueError, match="version -1 is negative"):
        sampler.update_weights(place(params, mesh1), -1)


def test_a_ticket_is_in_flight_once(sampler):
    sampler.submit([request(1)])
    with pytest.raises(ValueError, match=r"ticket 1 .*in flight already; .*ticket 2 .*in flight already"):
        sampler.submit([request(1), request(2), request(2)])
    assert set(drain(sampler)) == {1, 2}


@pytest.mark.parametrize("share", ["all", "some"])
def test_non_finite_logits_fail_the_rollout(sampler, mesh1, params, share):
    broken = jax.tree.map(np.copy, params)
    if share == "all":
        broken["final_norm"]["scale"][3] = np.nan
    else:
        broken["embedding"][5, 0] = np.nan  # tied: a NaN logit at every position, whatever the input
    sampler.update_weights(place(broken, mesh1), 4)
    before = sampler.counters
    out = run(sampler, [request(i) for i in range(5)])
    assert len(out) == 5
    for group in out.values():
        assert (group.finish_PG == Finish.FAILED).all()
        assert (group.length_PG == 0).all()
        assert not group.mask_PGT.any()
        assert (group.tokens_PGT == 0).all()
        assert (group.logp_PGT == 0).all()
        assert (group.version_PGT == -1).all()
    assert sampler.counters["tokens"] == before["tokens"]  # no token was made
    assert sampler.counters["failed_rollouts"] == before["failed_rollouts"] + 5 * G
    # The slots held non-finite keys and values: the next rollouts must not meet them.
    sampler.update_weights(place(params, mesh1), 5)
    again = run(sampler, [request(i) for i in range(5)])
    assert all((g.finish_PG != Finish.FAILED).all() for g in again.values())


def test_a_rollout_that_fails_midway_keeps_what_it_made(mesh1):
    # Untied, and looked up rather than multiplied: NaN embeddings spoil only what follows their tokens.
    vocab, first_broken = 520, 400
    config = dataclasses.replace(CONFIG, tie_embeddings=False, num_layers=1)
    clean = random_params(config, vocab)
    broken = jax.tree.map(np.copy, clean)
    broken["embedding"][first_broken:] = np.nan
    made = make_engine(mesh1, clean, config=config, vocab_size=vocab)
    requests = [request(i, prompt=[2, 3]) for i in range(12)]
    want = run(made, requests)
    made.update_weights(place(broken, mesh1), 4)
    # Prompts with a broken token in the same prefills and slots: their padding and leftovers must not spread.
    spoiled = [request(100 + i, prompt=[2, 500, 3, 4]) for i in range(6)]
    got = run(made, [r for pair in zip(spoiled, requests[:6], strict=True) for r in pair] + requests[6:])
    for r in spoiled:
        assert (got.pop(r.ticket).finish_PG == Finish.FAILED).all()
    failed = 0
    for ticket, group in got.items():
        for g in range(G):
            whole = want[ticket].tokens_PGT[g][: want[ticket].length_PG[g]].tolist()
            spoiled = [i for i, token in enumerate(whole[:-1]) if token >= first_broken]
            if spoiled:
                failed += 1
                n = spoiled[0] + 1
                assert group.finish_PG[g] == Finish.FAILED
                assert group.length_PG[g] == n
                assert group.tokens_PGT[g].tolist() == whole[:n] + [0] * (T - n)
            else:
                assert group.finish_PG[g] == want[ticket].finish_PG[g]
                assert group.tokens_PGT[g].tolist() == want[ticket].tokens_PGT[g].tolist()
    assert 2 <= failed <= 22


def test_drained_weights_change_when_nothing_is_in_flight(sampler, mesh1, params):
    other = jax.tree.map(lambda x: x * 1.5, params)
    want = run(sampler, [request(i) for i in range(8)])
    sampler.submit([request(i) for i in range(8)])
    sampler.poll()
    sampler.update_weights(place(other, mesh1), 4)
    out = drain(sampler)
    versions = {t: set(g.version_PGT[g.mask_PGT].tolist()) for t, g in out.items()}
    begun = [t for t, v in versions.items() if v == {3}]
    assert set(map(frozenset, versions.values())) == {frozenset([3]), frozenset([4])}  # no group has both
    assert sorted(begun) == [*range(len(begun))]
    assert 4 <= len(begun) < 8  # 4 groups fit into 8 slots; others begin in the chunk that is under way
    for ticket, version in versions.items():
        if version == {3}:
            assert_same(out[ticket], want[ticket])  # begun on the old weights, finished on them
    sampler.update_weights(place(other, mesh1), 4)
    new = run(sampler, [request(t) for t, v in versions.items() if v == {4}])
    for ticket, group in new.items():
        assert_same(out[ticket], group)


def test_in_flight_weights_change_at_the_next_chunk(mesh1, params):
    engine = make_engine(mesh1, params, weight_update="in_flight")
    requests = [request(i, temperature=0.8) for i in range(6)]
    want = run(engine, requests)
    engine.submit(requests)
    out = {}
    for version in range(4, 9):  # five updates that change nothing but the version
        groups = engine.poll()
        if groups is not None:
            take(groups, out)
        engine.update_weights(place(params, mesh1), version)
    out |= drain(engine)
    mixed = 0
    for ticket, group in want.items():
        got = out[ticket]
        np.testing.assert_array_equal(got.tokens_PGT, group.tokens_PGT)
        np.testing.assert_array_equal(got.logp_PGT, group.logp_PGT)
        for g in range(G):
            versions = got.version_PGT[g][got.mask_PGT[g]]
            assert (np.diff(versions) >= 0).all()
            mixed += len(set(versions.tolist())) > 1
            assert (got.version_PGT[g][~got.mask_PGT[g]] == -1).all()
    assert mixed > 4
    # A token's log-prob is that of the weights that sampled it: here the second chunk's, over the first's cache.
    other = jax.tree.map(lambda x: x * 1.3, params)
    engine.submit([request(0, task_id=1000)])
    engine.poll()
    engine.update_weights(place(other, mesh1), 20)
    group = drain(engine)[0]
    batch = Payload(*(x[None] for x in group))
    old = np.asarray(jax.jit(partial(completion_logprobs, config=CONFIG))(params, batch)[0])[0]
    first = (group.version_PGT == 8) & group.mask_PGT
    later = group.version_PGT == 20
    assert first.sum() == 2 * G
    assert later.any()
    np.testing.assert_allclose(group.logp_PGT[first], old[first], atol=1e-5)
    assert np.abs(group.logp_PGT[later] - old[later]).max() > 1e-3


def test_rollouts_that_begin_after_an_update_see_nothing_of_the_old_weights(mesh1, params):
    engine = make_engine(mesh1, params, weight_update="in_flight", num_slots=2, group_sizes=(4,))
    other = jax.tree.map(lambda x: x * 1.3, params)
    engine.submit([request(0, num_samples=4, ignore_eos=True)])
    engine.poll()  # samples 0 and 1 have begun; the prompt waits for 2 and 3
    engine.update_weights(place(other, mesh1), 4)
    group = drain(engine)[0]
    assert (group.version_PGT[2:] == 4).all()
    batch = Payload(*(x[None] for x in group))
    new = np.asarray(jax.jit(partial(completion_logprobs, config=CONFIG))(other, batch)[0])[0]
    np.testing.assert_allclose(group.logp_PGT[2:], new[2:], atol=1e-5)
    assert np.abs(group.logp_PGT[:2, 2:] - new[:2, 2:]).max() > 1e-3  # those that had begun do


def test_who_begins_has_a_token_of_the_weights_of_then(mesh1, params):
    # The slot comes free with the chunk's last step: who is next begins with the next chunk, on the new weights.
    engine = make_engine(
        mesh1, params, weight_update="in_flight", num_slots=1, group_sizes=(1,), chunk_steps=1, prefill_tokens=8
    )
    other = jax.tree.map(lambda x: x * 1.3, params)
    engine.submit([request(0, num_samples=1, max_tokens=1), request(1, num_samples=1, ignore_eos=True)])
    engine.poll()
    engine.update_weights(place(other, mesh1), 5)
    group = drain(engine)[1]
    assert (group.version_PGT[group.mask_PGT] == 5).all()
    batch = Payload(*(x[None] for x in group))
    new = np.asarray(jax.jit(partial(completion_logprobs, config=CONFIG))(other, batch)[0])[0]
    np.testing.assert_allclose(group.logp_PGT, new, atol=1e-5)


def test_new_weights_are_a_copy(sampler, mesh1, params):
    # The trainer donates its weights to the next step: the sampler must not be left with deleted buffers.
    want = run(sampler, [request(0)])[0]
    trained = place(params, mesh1)
    sampler.update_weights(trained, 3)
    jax.tree.map(lambda x: x.delete(), trained)
    assert_same(run(sampler, [request(0)])[0], want)


def test_an_engine_needs_weights_and_slots(mesh1, mesh8, params):
    bare = make_engine(mesh1, params)
    bare._params = None
    bare.submit([request(0)])
    with pytest.raises(RuntimeError, match="update_weights first"):
        bare.poll()
    with pytest.raises(ValueError, match=r"9 slots .* 8 row shards .* use 16"):
        make_engine(mesh8, params, num_slots=9)
    with pytest.raises(ValueError, match=r"0 slots are not a positive"):
        make_engine(mesh1, params, num_slots=0)


# ---- Law 3: fixed shapes ----


def test_nothing_compiles_after_warm_up(mesh1, params):
    made = make_engine(mesh1, params, decode=as_text, max_extend_tokens=3, weight_update="in_flight")
    made.warm_up()
    empty = made.filler(G)
    assert not empty.valid_P.any()
    assert (empty.tickets_P == -1).all()
    assert made.num_in_flight == 0
    counter = CompileCounter()
    rng = np.random.default_rng(0)
    out, submitted, cancelled, extended, ticket = set(), set(), set(), 0, 0
    for version in range(320):
        for _ in range(rng.integers(0, 5)):
            params_ = {
                "temperature": float(rng.choice([0.0, 0.7, 1.0, 1.3])), "max_tokens": int(rng.integers(1, T + 1)),
                "top_k": int(rng.choice([0, 3])), "top_p": float(rng.choice([1.0, 0.8])),
                "min_p": float(rng.choice([0.0, 0.1])), "stop_strings": [(), ("c", "de")][rng.integers(2)],
                "stop_tokens": [(), (5,)][rng.integers(2)], "ignore_eos": bool(rng.integers(2)),
            }  # fmt: skip
            r = request(ticket, num_samples=int(rng.choice([1, G])), **params_)
            made.submit([dataclasses.replace(r, multi_turn=bool(rng.integers(2)))])
            submitted.add(ticket)
            ticket += 1
        if rng.random() < 0.2 and submitted - out - cancelled:
            gone = int(rng.choice(sorted(submitted - out - cancelled)))
            made.cancel([gone])
            cancelled.add(gone)
        if rng.random() < 0.3:
            made.update_weights(made._params, version)  # as the loop does: placed like the trained weights
        groups = made.poll()
        extended += answer_turns(made, rng)
        if groups is not None:
            out |= set(groups.tickets_P[groups.valid_P].tolist())
    while made.num_in_flight:
        groups = made.poll()
        extended += answer_turns(made, rng)
        if groups is not None:
            out |= set(groups.tickets_P[groups.valid_P].tolist())
    assert out == submitted - cancelled
    assert len(submitted) >= 500
    assert extended > 30
    assert counter.names == []


def answer_turns(engine, rng):
    """Extends or finishes every turn at random. Returns how many were extended."""
    extended = 0
    for turn in engine.take_turns():
        room = turn.room - 1
        if room >= 1 and rng.random() < 0.7:
            engine.extend(turn.ticket, turn.sample, rng.integers(2, VOCAB, rng.integers(1, min(room, 3) + 1)).tolist())
            extended += 1
        else:
            engine.finish(turn.ticket, turn.sample)
    return extended


def test_counters_measure_utilisation(sampler):
    before = sampler.counters
    out = run(sampler, [request(i) for i in range(6)])
    after = {k: v - before[k] for k, v in sampler.counters.items()}
    assert after["tokens"] == sum(g.length_PG.sum() for g in out.values())
    assert after["slot_steps"] % 8 == 0
    assert after["tokens"] <= after["slot_steps"] <= 8 * T * 2  # two batches, if the slots were not refilled
    # Prompts of up to 5 tokens, the last one not prefilled: one bucket of 4, and 4 = 16 // 4 rows a program.
    assert after["prefill_tokens"] == 2 * 4 * 4
    # Keys and values, 2 layers, 2 heads of 4, float32; 5 + 6 columns, of which the last token needs none.
    assert sampler.shape.token_bytes == 2 * 2 * 2 * 4 * 4
    assert sampler.shape.columns == 10
    leaves = jax.tree.leaves(sampler.arrays.state.layers)
    assert sum(x.nbytes for x in leaves) == 8 * 10 * sampler.shape.token_bytes
    assert sum(x.nbytes for x in jax.tree.leaves(sampler.arrays.state.prefix)) == sampler.shape.prefix_bytes


# ---- Text, turns, checkpoints ----


def as_text(ids):
    return "".join(chr(ord("a") + i - 2) for i in ids if i >= 2)


@pytest.fixture(scope="module")
def texter(mesh1, params):
    made = make_engine(mesh1, params, decode=as_text, max_extend_tokens=4, full_logprobs=True)
    made.warm_up()
    return made


def test_stop_strings_cut_at_the_token(texter):
    whole = run(texter, [request(i) for i in range(20)])
    strings = ("c", "de", "jj")
    cut = run(texter, [request(i, stop_strings=strings) for i in range(20)])
    stopped = 0
    for ticket, group in whole.items():
        got = cut[ticket]
        for g in range(G):
            tokens = group.tokens_PGT[g][: group.length_PG[g]].tolist()
            ends = [n for n in range(1, len(tokens) + 1) if any(s in as_text(tokens[:n]) for s in strings)]
            n = ends[0] if ends else len(tokens)
            stopped += bool(ends)
            assert got.length_PG[g] == n
            assert got.tokens_PGT[g].tolist() == tokens[:n] + [0] * (T - n)
            assert got.finish_PG[g] == (Finish.STOP if ends else group.finish_PG[g])
            np.testing.assert_array_equal(got.logp_PGT[g][:n], group.logp_PGT[g][:n])
            assert (got.logp_PGT[g][n:] == 0).all()
    assert 10 < stopped < 40


def test_a_decode_that_fails_is_reported_and_nothing_is_lost(texter):
    requests = [request(i, stop_strings=("c", "de")) for i in range(12)]
    want = run(texter, requests)
    calls, follow_up = [], texter._follow_up
    decode = follow_up._decode

    def fails_once(ids):
        calls.append(ids)
        if len(calls) == 3:
            raise KeyError("no such token")
        return decode(ids)

    follow_up._decode = fails_once
    texter.submit(requests)
    out, problems = {}, []
    while texter.num_in_flight:
        try:
            groups = texter.poll()
        except RuntimeError as problem:
            problems.append(str(problem))
            continue
        if groups is not None:
            take(groups, out)
    follow_up._decode = decode
    assert problems == ["stop strings: decoding tokens to text failed: KeyError('no such token')"]
    assert set(out) == set(want)
    differ = [t for t, group in want.items() if group.tokens_PGT.tolist() != out[t].tokens_PGT.tolist()]
    assert len(differ) <= 1  # the stop string that was not looked for, at most


def test_an_interrupted_booking_is_refused_until_a_checkpoint_is_loaded(texter):
    def interrupts(ids):
        raise KeyboardInterrupt

    requests = [request(i, stop_strings=("c", "de")) for i in range(3)]
    want = run(texter, requests)
    state, arrays = texter.state_dict(), jax.tree.map(jax.numpy.copy, texter.arrays)
    follow_up = texter._follow_up
    decode, follow_up._decode = follow_up._decode, interrupts
    texter.submit(requests)
    texter.poll()
    with pytest.raises(KeyboardInterrupt):
        texter.poll()
    follow_up._decode = decode
    with pytest.raises(RuntimeError, match="interrupted while it booked"):
        texter.poll()
    texter.load_state_dict(state, arrays)
    for ticket, group in run(texter, requests).items():
        assert_same(group, want[ticket])


def test_stop_tokens_and_ignored_eos(texter):
    whole = run(texter, [request(i, ignore_eos=True) for i in range(12)])
    assert all((g.length_PG == T).all() for g in whole.values())
    cut = run(texter, [request(i, ignore_eos=True, stop_tokens=(5, 7)) for i in range(12)])
    for ticket, group in whole.items():
        for g in range(G):
            tokens = group.tokens_PGT[g].tolist()
            n = next((i + 1 for i, t in enumerate(tokens) if t in (5, 7)), T)
            assert cut[ticket].tokens_PGT[g].tolist() == tokens[:n] + [0] * (T - n)
            last_stops = tokens[n - 1] in (5, 7)
            assert cut[ticket].finish_PG[g] == (Finish.STOP if last_stops else Finish.LENGTH)


def test_truncated_and_full_log_probs(texter, params):
    requests = [request(i, temperature=0.7, top_k=3) for i in range(8)]
    texter.submit(requests)
    out, full = {}, {}
    while texter.num_in_flight:
        groups = texter.poll()
        if groups is not None:
            take(groups, out)
            full |= {
                int(groups.tickets_P[i]): np.asarray(groups.full_logp_PGT)[i] for i in np.flatnonzero(groups.valid_P)
            }
    batch = Payload(*(np.stack([out[r.ticket][i] for r in requests]) for i in range(len(Payload._fields))))
    want, _ = jax.jit(partial(completion_logprobs, config=CONFIG, temperature=0.7))(params, batch)
    full_logp = np.stack([full[r.ticket] for r in requests])
    assert np.abs(np.where(batch.mask_PGT, want - full_logp, 0)).max() < 1e-5  # what the trainer recomputes
    assert (batch.logp_PGT[batch.mask_PGT] > full_logp[batch.mask_PGT] - 1e-6).all()  # of fewer tokens
    assert (full_logp[~batch.mask_PGT] == 0).all()


@pytest.mark.parametrize("num_given", [1, 3, 4])
def test_extended_rollouts_are_as_if_run_at_once(texter, params, num_given):
    # Whatever was sampled and given, the trainer's log-probs of it are the recorded ones: nothing cached is stale,
    # and nothing is cached twice.
    rng = np.random.default_rng(num_given)
    requests = [dataclasses.replace(request(i, stop_tokens=(5, 6, 7)), multi_turn=True) for i in range(14)]
    texter.submit(requests)
    out, given, turns = {}, {}, {}
    for _ in range(200):
        if not texter.num_in_flight:
            break
        groups = texter.poll()
        if groups is not None:
            take(groups, out)
        for turn in texter.take_turns():
            key = turn.ticket, turn.sample
            turns.setdefault(key, []).append(turn)
            if num_given < turn.room:
                tokens = rng.integers(2, VOCAB, num_given).tolist()
                given.setdefault(key, []).append((turn.length, tokens))
                texter.extend(*key, tokens)
            else:
                texter.finish(*key)
    assert len(out) == 14
    assert len(given) > 5
    batch = Payload(*(np.stack([out[r.ticket][i] for r in requests]) for i in range(len(Payload._fields))))
    want, _ = jax.jit(partial(completion_logprobs, config=CONFIG))(params, batch)
    np.testing.assert_allclose(np.where(batch.mask_PGT, want, 0), batch.logp_PGT, atol=1e-5)
    for (ticket, sample), parts in given.items():
        group = out[ticket]
        is_given = np.zeros(T, bool)
        for start, tokens in parts:
            assert group.tokens_PGT[sample][start : start + num_given].tolist() == tokens
            is_given[start : start + num_given] = True
        made = np.arange(T) < group.length_PG[sample]
        np.testing.assert_array_equal(group.mask_PGT[sample], made & ~is_given)
        np.testing.assert_array_equal(group.version_PGT[sample], np.where(made & ~is_given, 3, -1))
        sampled = [t for turn in turns[ticket, sample] for t in turn.tokens]
        assert group.tokens_PGT[sample][made & ~is_given].tolist() == sampled


def test_extensions_do_not_depend_on_who_else_extends(mesh1, params):
    # Given tokens of two length buckets: a short one runs as if alone, though a long one waits beside it.
    engine = make_engine(
        mesh1, params, max_completion_tokens=48, max_extend_tokens=40, prefill_tokens=80, chunk_steps=4
    )  # fmt: skip

    def extended(long_neighbour):
        requests = [dataclasses.replace(request(i, max_tokens=48, stop_tokens=tuple(range(2, 9))), multi_turn=True)
                    for i in range(3)]  # fmt: skip
        engine.submit(requests)
        out, turns = {}, []
        while engine.num_in_flight:
            groups = engine.poll()
            if groups is not None:
                take(groups, out)
            turns += engine.take_turns()
            first = [t for t in turns if len(t.tokens) == t.length]
            if len(first) == 6:  # all wait
                for t in sorted(first, key=lambda t: -t.ticket):
                    given = [3] * 30 if long_neighbour and t.ticket == 2 else [4, 5, 6]
                    engine.extend(t.ticket, t.sample, given, max_tokens=6)
                turns = []
            elif all(len(t.tokens) < t.length for t in turns):
                for t in turns:
                    engine.finish(t.ticket, t.sample)
                turns = []
        return out

    alone, beside = extended(False), extended(True)
    for ticket in (0, 1):
        assert_same(beside[ticket], alone[ticket])


def test_random_use_changes_no_rollout(mesh1, params):
    # Slots change hands within a chunk, prompts wait for rows, groups are cancelled, weights renewed: whoever comes
    # out is what comes out alone.
    engine = make_engine(
        mesh1, params, num_slots=4, chunk_steps=5, prefill_tokens=8, decode=as_text, max_extend_tokens=3
    )
    engine.warm_up()
    rng = np.random.default_rng(5)
    kinds = []
    for i in range(60):
        multi_turn, stop_strings = bool(i % 3 == 0), [(), ("c", "de")][rng.integers(2)]
        kind = request(
            0, task_id=i, num_samples=int(rng.choice([1, G])), ignore_eos=bool(rng.integers(2)),
            prompt=rng.integers(2, VOCAB, rng.integers(1, L + 1)).tolist(),
            max_tokens=T if multi_turn else int(rng.integers(1, T + 1)),
            stop_strings=("c", "e", "h") if multi_turn else stop_strings,
        )  # fmt: skip
        kinds.append(dataclasses.replace(kind, multi_turn=multi_turn))

    def answer():
        for turn in engine.take_turns():
            if turn.length <= 3 and turn.room >= 3:
                engine.extend(turn.ticket, turn.sample, [2 + turn.length, 3])
                answered.append(turn.ticket)
            else:
                engine.finish(turn.ticket, turn.sample)

    def poll(out):
        groups = engine.poll()
        if groups is not None:
            take(groups, out)
        answer()

    answered, alone = [], []
    for kind in kinds:
        out = {}
        engine.submit([kind])
        while engine.num_in_flight:
            poll(out)
        alone.append(out[0])
    assert len(answered) >= 5
    number, kind_of, out, gone = 0, {}, {}, set()
    before = engine.counters
    for version in range(250):
        for _ in range(rng.integers(0, 5) if version < 200 else 0):
            kind_of[number] = int(rng.integers(len(kinds)))
            engine.submit([dataclasses.replace(kinds[kind_of[number]], ticket=number)])
            number += 1
        open_ = sorted(set(kind_of) - set(out) - gone)
        if rng.random() < 0.2 and open_:
            gone.add(int(rng.choice(open_)))
            engine.cancel([*gone])
        if rng.random() < 0.1:
            engine.update_weights(place(params, mesh1), version)  # the same ones, of another version
        poll(out)
    while engine.num_in_flight:
        poll(out)
    assert set(out) == set(kind_of) - gone
    assert len(out) > 300
    assert len(gone) > 20
    for ticket, group in out.items():
        want = alone[kind_of[ticket]]
        for name in ("tokens_PGT", "logp_PGT", "mask_PGT", "length_PG", "finish_PG"):
            np.testing.assert_array_equal(getattr(group, name), getattr(want, name))
        assert len(set(group.version_PGT[group.mask_PGT].tolist())) <= 1  # drained: one version
    busy = {k: v - before[k] for k, v in engine.counters.items()}
    assert busy["tokens"] / busy["slot_steps"] > 0.5


def test_what_cannot_be_extended(texter):
    r = dataclasses.replace(request(0, max_tokens=4, stop_tokens=tuple(range(2, 9))), multi_turn=True)
    texter.submit([r])
    with pytest.raises(ValueError, match="ticket 0, sample 1 does not wait"):
        texter.extend(0, 1, [2])
    turns = []
    while len(turns) < G:
        assert texter.poll() is None
        turns += texter.take_turns()
    with pytest.raises(ValueError, match=r"sample 0: 5 given tokens .* max_extend_tokens = 4"):
        texter.extend(0, 0, [2] * 5)
    with pytest.raises(ValueError, match=r"token id 99 is not in \[0, 12\)"):
        texter.extend(0, 0, [99])
    with pytest.raises(ValueError, match="1 tokens and 3 given ones leave none of the 4"):
        texter.extend(0, 0, [2, 2, 2])
    texter.finish(0, 0)
    with pytest.raises(ValueError, match="ticket 0, sample 0 does not wait"):
        texter.finish(0, 0)
    texter.cancel([0])  # one finished, one waiting
    assert texter.num_in_flight == 0
    assert set(run(texter, [request(1)])) == {1}
    assert all(r is None for r in texter._table.slots)


def held_turn(engine, ticket=0, **params):
    """A rollout that waits after its only token."""
    r = dataclasses.replace(request(ticket, max_tokens=1, num_samples=1, **params), multi_turn=True)
    engine.submit([r])
    turns = []
    while not turns:
        assert engine.poll() is None
        turns = engine.take_turns()
    assert type(turns[0].finish) is Finish
    return turns[0]


def test_older_pending_weights_do_not_come_back(texter, mesh1, params):
    held_turn(texter)
    texter.update_weights(place(params, mesh1), 4)  # waits for the rollout
    texter.finish(0, 0)
    texter.update_weights(place(params, mesh1), 5)  # at once: nothing is in flight
    drain(texter)
    group = run(texter, [request(1)])[1]
    np.testing.assert_array_equal(group.version_PGT, np.where(group.mask_PGT, 5, -1))
    texter.update_weights(place(params, mesh1), 3)


def test_turns_of_cancelled_groups_are_gone(texter):
    held_turn(texter)
    texter.submit([request(1)])
    texter.poll()  # a chunk runs
    texter.cancel([0])
    with pytest.raises(ValueError, match="ticket 0, sample 0 does not wait"):
        texter.finish(0, 0)
    assert set(drain(texter)) == {1}
    r = dataclasses.replace(request(0, max_tokens=1, num_samples=1), multi_turn=True)
    texter.submit([r])
    while texter._table.num_active or not texter._follow_up.turns:
        texter.poll()
    texter.cancel([0])  # its turn was not taken yet
    texter.submit([request(0)])
    assert texter.take_turns() == []
    assert set(drain(texter)) == {0}


def test_what_follows_a_stop_string_may_be_broken(mesh1):
    # The weights spoil what follows some tokens; a rollout cut before that by its stop string goes on soundly.
    vocab, first_broken = 520, 300
    config = dataclasses.replace(CONFIG, tie_embeddings=False, num_layers=1)
    broken = random_params(config, vocab)
    broken["embedding"][first_broken:] = np.nan
    engine = make_engine(
        mesh1, broken, config=config, vocab_size=vocab, max_extend_tokens=2, chunk_steps=4,
        decode=lambda ids: "".join("!" if i >= first_broken else "." for i in ids),
    )  # fmt: skip
    requests = [dataclasses.replace(request(i, prompt=[2, 3], stop_strings=("!",)), multi_turn=True) for i in range(20)]
    engine.submit(requests)
    out, extended = {}, 0
    while engine.num_in_flight:
        groups = engine.poll()
        if groups is not None:
            take(groups, out)
        for turn in engine.take_turns():
            if turn.tokens[-1] >= first_broken and turn.room > 2:
                engine.extend(turn.ticket, turn.sample, [5, 6])  # the broken token is fed first: this must fail
                extended += 1
            else:
                engine.finish(turn.ticket, turn.sample)
    assert extended > 10
    failed = sum(int((g.finish_PG == Finish.FAILED).sum()) for g in out.values())
    assert failed == extended
    engine.update_weights(place(random_params(config, vocab), mesh1), 4)
    again = run(engine, [request(i, prompt=[2, 3, 4, 5]) for i in range(20)])
    assert all((g.finish_PG != Finish.FAILED).all() for g in again.values())


def test_a_checkpoint_in_mid_decode_goes_on_bitwise(mesh1, params, tmp_path):
    options = {"decode": as_text, "max_extend_tokens": 2, "weight_update": "drain"}
    requests = [
        dataclasses.replace(request(i, stop_strings=("de",) if i % 2 else ()), multi_turn=i % 5 == 0) for i in range(12)
    ]
    engine = make_engine(mesh1, params, **options)
    engine.submit(requests)
    other = jax.tree.map(lambda x: x * 1.2, params)

    def go_on(engine, num_polls=1000):
        out = {}
        for _ in range(num_polls):
            groups = engine.poll()
            if groups is not None:
                take(groups, out)
            for turn in engine.take_turns():
                if turn.room > 1 and turn.sample == 0:
                    engine.extend(turn.ticket, turn.sample, [2 + turn.length])
                else:
                    engine.finish(turn.ticket, turn.sample)
            if not engine.num_in_flight:
                break
        return out

    go_on(engine, 3)
    engine.update_weights(place(other, mesh1), 4)  # waits for what is in flight
    state, arrays = json.loads(json.dumps(engine.state_dict())), jax.tree.map(np.asarray, engine.arrays)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "engine", engine.arrays)
    checkpointer.wait_until_finished()
    want = go_on(engine)
    assert want
    fresh = make_engine(mesh1, params, **options)
    like = jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y.sharding),
        arrays,
        engine.arrays._replace(pending=engine.arrays.params),
    )
    fresh.load_state_dict(state, checkpointer.restore(tmp_path / "engine", like))
    assert fresh.num_in_flight == len(want) > 0
    got = go_on(fresh)
    assert got.keys() == want.keys()
    for ticket in want:
        assert_same(got[ticket], want[ticket])


def test_an_int8_cache_is_close(mesh1, params):
    wide = dataclasses.replace(CONFIG, head_dim=16)
    weights = random_params(wide, VOCAB)
    requests = [request(i) for i in range(16)]
    exact = run(make_engine(mesh1, weights, config=wide), requests)
    engine = make_engine(mesh1, weights, config=wide, kv_dtype="int8")
    assert engine.shape.token_bytes == 2 * 2 * 2 * (16 + 4)
    small = run(engine, requests)
    errors = []
    for ticket, group in exact.items():
        for g in range(G):
            same = int((np.cumsum(group.tokens_PGT[g] != small[ticket].tokens_PGT[g]) == 0).sum())
            n = min(same, int(group.length_PG[g]))
            errors += np.abs(group.logp_PGT[g][:n] - small[ticket].logp_PGT[g][:n]).tolist()
    assert len(errors) > 60
    assert max(errors) < 0.05
    assert np.mean(errors) > 0  # it is in fact quantised
