"""The lock-step sampler: whose tokens depend on the rollout's identity only, and what a caller may rely on.

Samplers are shared by the tests of this file, since each compiles its own programs; every test leaves them idle.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dynrl.compile_counter import CompileCounter
from dynrl.config import ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import init_params, stack_layers
from dynrl.models.policy import completion_logprobs
from dynrl.sampling.lockstep import LockstepSampler
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


def make_sampler(mesh, params, version=3, config=CONFIG, **overrides):
    options = {
        "num_groups": 4, "num_samples": G, "max_prompt_tokens": L, "max_completion_tokens": T, "eos_id": EOS,
        "pad_id": PAD, "vocab_size": VOCAB, "chunk_steps": 2, "seed": 7,
    }  # fmt: skip
    sampler = LockstepSampler(config, mesh, **(options | overrides))
    sampler.update_weights(place(params, mesh), version)
    return sampler


def place(params, mesh):
    return jax.tree.map(sharding.place, params, sharding.param_shardings(params, mesh))


@pytest.fixture(scope="module")
def sampler(mesh1, params):
    made = make_sampler(mesh1, params)
    made.warm_up()
    return made


@pytest.fixture(autouse=True)
def idle(sampler, mesh1, params):
    """Every test finds the shared sampler idle, with the same weights, and leaves it idle."""
    sampler.update_weights(place(params, mesh1), 3)
    yield
    assert sampler.num_in_flight == 0
    assert sampler.poll() is None


def request(ticket, task_id=None, temperature=1.0, max_tokens=T, visit=0, prompt=None):
    task_id = 1000 + ticket if task_id is None else task_id
    rng = np.random.default_rng(task_id % 2**32)
    prompt = rng.integers(2, VOCAB, rng.integers(1, L + 1)).tolist() if prompt is None else prompt
    return Request(ticket, task_id, visit, Purpose.TRAIN, prompt, G, SamplingParams(temperature, max_tokens))


def drain(sampler):
    """Polls until idle. Returns {ticket: its row of every payload array}, checking that none comes twice."""
    out = {}
    for _ in range(1000):
        if not sampler.num_in_flight:
            return out
        groups = sampler.poll()
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
    one = make_sampler(mesh1, params, chunk_steps=1)
    seen = run(one, requests)
    one._chunk_steps = sharding.place(np.int32(100), sharding.replicated(mesh1))  # traced: no second program
    for got in (seen, run(one, requests)):
        assert got.keys() == want.keys()
        for ticket in want:
            assert_same(got[ticket], want[ticket])


def test_slots_and_meshes_change_tokens_at_near_ties_at_most(sampler, mesh1, mesh8, mesh222, params):
    requests = [request(i, temperature=1.0 if i % 2 else 0.7) for i in range(32)]
    want = run(sampler, requests)
    for other in (
        make_sampler(mesh1, params, num_groups=1),
        make_sampler(mesh8, params, num_groups=8),
        make_sampler(mesh222, params, num_groups=4),
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
    # T = 1: the first token comes from the prompt's pass, and no decode step is ever made.
    one = make_sampler(mesh1, params, max_completion_tokens=1, num_groups=2)
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
    scanned = make_sampler(
        mesh1, stack_layers(params, 2), config=dataclasses.replace(CONFIG, scan_layers=True), num_groups=4
    )
    requests = [request(i) for i in range(4)]
    want, got = run(sampler, requests), run(scanned, requests)
    for ticket in want:
        assert_same(got[ticket], want[ticket])


# ---- The protocol: submit, poll, cancel, update_weights ----


def test_finished_groups_come_early_and_once(sampler):
    # Three groups of one token beside one of T: the short ones do not wait for it.
    slow = next(
        t for t in range(200, 400) if run(sampler, [request(0, t)])[0].length_PG.max() > 4
    )  # one that does not stop by itself
    sampler.submit([request(0, slow), *(request(i, max_tokens=1) for i in (1, 2, 3)), request(4)])
    assert sampler.num_in_flight == 5
    out, polls = {}, []
    while sampler.num_in_flight:
        groups = sampler.poll()
        if groups is not None:
            before = set(out)
            take(groups, out)
            polls.append(set(out) - before)
    assert polls[0] == {1, 2, 3}
    assert polls[1] == {0}
    assert polls[2] == {4}
    assert sampler.poll() is None  # idle: nothing to wait for


def test_groups_handed_over_stay_readable(sampler):
    # The decode state is donated to the next chunk: what was handed over must not lie in it.
    sampler.submit([request(0, max_tokens=1), request(1), request(2), request(3)])
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
    early = sampler.poll()  # the first chunk is over, the second runs: 0 to 3 are in flight or handed over
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
    for ticket, group in out.items():
        assert_same(group, want[ticket])  # the others do not notice


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
        ({"num_samples": G + 1}, "asks for 3 samples; this sampler makes 2"),
        ({"params": SamplingParams(1.0, 0)}, r"max_tokens 0 is not in \[1, 6\]"),
        ({"params": SamplingParams(1.0, T + 1)}, r"max_tokens 7 is not in \[1, 6\]"),
        ({"params": SamplingParams(float("nan"), T)}, "temperature nan"),
        ({"params": SamplingParams(float("inf"), T)}, "temperature inf"),
        ({"params": SamplingParams(-0.5, T)}, "temperature -0.5"),
    ],
)
def test_a_bad_request_is_named_and_takes_nothing_with_it(sampler, change, message):
    sampler.submit([request(1)])
    bad = dataclasses.replace(request(41, 9), **change)
    with pytest.raises(ValueError, match=rf"ticket 41 \(task 9\): .*{message}"):
        sampler.submit([request(2), bad, request(3)])
    assert sampler.num_in_flight == 1
    assert set(drain(sampler)) == {1}


@pytest.mark.parametrize("share", ["all", "some"])
def test_non_finite_logits_fail_the_rollout(sampler, mesh1, params, share):
    broken = jax.tree.map(np.copy, params)
    if share == "all":
        broken["final_norm"]["scale"][3] = np.nan
    else:
        broken["embedding"][5, 0] = np.nan  # tied: a NaN logit at every position, whatever the input
    sampler.update_weights(place(broken, mesh1), 4)
    before = sampler.counters["tokens"]
    out = run(sampler, [request(i) for i in range(5)])
    assert len(out) == 5
    for group in out.values():
        assert (group.finish_PG == Finish.FAILED).all()
        assert (group.length_PG == 0).all()
        assert not group.mask_PGT.any()
        assert (group.tokens_PGT == 0).all()
        assert (group.logp_PGT == 0).all()
        assert (group.version_PGT == -1).all()
    assert sampler.counters["tokens"] == before  # no token was made


def test_a_rollout_that_fails_midway_keeps_what_it_made(mesh1):
    # Untied, and looked up rather than multiplied: NaN embeddings spoil only what follows their tokens.
    vocab, first_broken = 520, 400
    config = dataclasses.replace(CONFIG, tie_embeddings=False, num_layers=1)
    clean = random_params(config, vocab)
    broken = jax.tree.map(np.copy, clean)
    broken["embedding"][first_broken:] = np.nan
    made = make_sampler(mesh1, clean, config=config, vocab_size=vocab)
    requests = [request(i, prompt=[2, 3]) for i in range(12)]
    want = run(made, requests)
    made.update_weights(place(broken, mesh1), 4)
    got = run(made, requests)
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


def test_weights_change_between_batches_only(sampler, mesh1, params):
    sampler.submit([request(0)])
    sampler.update_weights(place(params, mesh1), 5)  # nothing has started yet
    sampler.poll()
    if sampler.num_in_flight:
        with pytest.raises(RuntimeError, match="between batches"):
            sampler.update_weights(place(params, mesh1), 6)
    drain(sampler)
    sampler.update_weights(place(params, mesh1), 2**31 - 1)
    group = run(sampler, [request(1)])[1]
    np.testing.assert_array_equal(group.version_PGT, np.where(group.mask_PGT, 2**31 - 1, -1))


def test_new_weights_are_a_copy(sampler, mesh1, params):
    # The trainer donates its weights to the next step: the sampler must not be left with deleted buffers.
    want = run(sampler, [request(0)])[0]
    trained = place(params, mesh1)
    sampler.update_weights(trained, 3)
    jax.tree.map(lambda x: x.delete(), trained)
    assert_same(run(sampler, [request(0)])[0], want)


def test_a_sampler_needs_weights_and_divisible_groups(mesh1, mesh8):
    options = {
        "num_samples": G, "max_prompt_tokens": L, "max_completion_tokens": T, "eos_id": EOS, "pad_id": PAD,
        "vocab_size": VOCAB, "chunk_steps": 2, "seed": 7,
    }  # fmt: skip
    bare = LockstepSampler(CONFIG, mesh1, num_groups=2, **options)
    bare.submit([request(0)])
    with pytest.raises(RuntimeError, match="update_weights first"):
        bare.poll()
    with pytest.raises(ValueError, match=r"8 row shards .* use sampler\.num_slots = 32"):
        LockstepSampler(CONFIG, mesh8, num_groups=9, **options)


# ---- Law 3: fixed shapes ----


def test_nothing_compiles_after_warm_up(mesh1, params):
    made = make_sampler(mesh1, params)
    empty = made.warm_up()
    assert not empty.valid_P.any()
    assert (empty.tickets_P == -1).all()
    assert made.num_in_flight == 0
    counter = CompileCounter()
    rng = np.random.default_rng(0)
    out, submitted, cancelled, ticket = {}, set(), set(), 0
    for version in range(30):
        for _ in range(rng.integers(0, 4)):
            temperature, max_tokens = float(rng.choice([0.0, 0.7, 1.0, 1.3])), int(rng.integers(1, T + 1))
            made.submit([request(ticket, temperature=temperature, max_tokens=max_tokens)])
            submitted.add(ticket)
            ticket += 1
        if rng.random() < 0.2 and submitted - set(out):
            gone = int(rng.choice(sorted(submitted - set(out))))
            made.cancel([gone])
            cancelled.add(gone)
        if made._running is None:
            made.update_weights(made._params, version)  # as the loop does: placed like the trained weights
        groups = made.poll()
        if groups is not None:
            take(groups, out)
    out |= drain(made)
    assert set(out) == submitted - cancelled
    assert len(out) > 20
    assert counter.names == []


def test_counters_measure_utilisation(sampler):
    before = sampler.counters
    out = run(sampler, [request(i) for i in range(6)])  # a batch of 4, and one of 2 with 2 filler rows
    while sampler._running is not None:
        sampler.poll()
    tokens = sampler.counters["tokens"] - before["tokens"]
    steps = sampler.counters["slot_steps"] - before["slot_steps"]
    assert tokens == sum(g.length_PG.sum() for g in out.values())
    longest = [max(out[i].length_PG.max() for i in batch) for batch in (range(4), range(4, 6))]
    assert steps == 4 * G * sum(longest)  # every row is computed until the batch's longest ends
    # Keys and values, 2 layers, 2 heads of 4, 8 rows of 5 + 5 columns (the last token is never fed), float32.
    assert sampler.cache_bytes == 2 * 2 * 2 * 4 * (8 * (5 + 5)) * 4
    assert jnp.dtype(CONFIG.dtype).itemsize == 4
