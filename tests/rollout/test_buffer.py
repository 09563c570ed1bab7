"""The group buffer: what was judged is what is trained, bit for bit, from whatever shard and after any carry."""

import functools
import hashlib
import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.compile_counter import CompileCounter
from dynrl.models import sharding
from dynrl.rollout.buffer import RECORD, GroupBuffer, Stored
from dynrl.types import Groups, Payload

G, L, T = 3, 4, 5
# Bit patterns that arithmetic would not preserve: -0.0, denormals, infinities, a NaN with a payload.
ODD_FLOATS = np.array([0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC12345], np.uint32).view(np.float32)


@pytest.fixture(params=["mesh1", "mesh8", "mesh222"], scope="module")
def mesh(request):
    return request.getfixturevalue(request.param)


@functools.cache
def new_buffer(mesh, capacity, batch_size, number):
    return GroupBuffer(
        mesh, capacity=capacity, batch_size=batch_size, num_samples=G, max_prompt_tokens=L, max_completion_tokens=T
    )


def make_buffer(mesh, capacity=24, batch_size=8, number=0):
    """An empty buffer. Compiling takes most of these tests' time, so that buffers are emptied and used again."""
    buffer = new_buffer(mesh, capacity, batch_size, number)
    buffer.free(buffer.tickets)
    return buffer


def host_groups(tickets, num_rows):
    """The payload of some tickets in the first rows, and noise in the others, with rewards and live."""
    rows = []
    for i in range(num_rows):
        rng = np.random.default_rng([7, tickets[i]] if i < len(tickets) else [8, i])
        floats = np.concatenate([ODD_FLOATS, rng.normal(size=50).astype(np.float32)])
        payload = Payload(
            prompt_PL=rng.integers(-(2**31), 2**31, L, dtype=np.int32),
            prompt_length_P=rng.integers(1, L + 1, dtype=np.int32),
            tokens_PGT=rng.integers(-(2**31), 2**31, (G, T), dtype=np.int32),
            logp_PGT=rng.choice(floats, (G, T)),
            mask_PGT=rng.random((G, T)) < 0.5,
            version_PGT=rng.integers(-1, 9, (G, T), dtype=np.int32),
            length_PG=rng.integers(0, T + 1, G, dtype=np.int32),
            finish_PG=rng.integers(0, 3, G, dtype=np.int32),
        )
        rows.append(Stored(payload, rng.choice(floats, G), rng.random(G) < 0.8))
    return jax.tree.map(lambda *x: np.stack([np.asarray(e) for e in x]), *rows)


def digest(stored, row):
    """A hash of every bit of one group."""
    leaves = [np.ascontiguousarray(np.asarray(leaf)[row]) for leaf in jax.tree.leaves(stored)]
    return hashlib.sha256(b"".join(leaf.tobytes() + str(leaf.dtype).encode() for leaf in leaves)).hexdigest()


def digest_of_ticket(ticket):
    return digest(host_groups([ticket], 1), 0)


def put(buffer, mesh, tickets, keep, num_rows=16):
    """Puts the kept ones of `tickets`, which lie in the first rows."""
    host = host_groups(tickets, num_rows)
    tickets_P = np.full(num_rows, -1, np.int64)
    tickets_P[: len(tickets)] = tickets
    keep_P = np.zeros(num_rows, bool)
    keep_P[: len(tickets)] = keep
    payload = jax.tree.map(lambda x: sharding.place(x, sharding.rows(mesh)), host.payload)
    groups = Groups(payload, tickets_P, tickets_P >= 0, np.ones(num_rows, bool), *[np.zeros(0)] * 3)
    records = np.zeros(num_rows, RECORD)
    records["step"] = tickets_P
    buffer.put(groups, host.rewards, host.live, keep_P, records)


def check_batch(batch, tickets, batch_size=8):
    """The batch holds these tickets, in this order, and zeros behind them."""
    stored = Stored(batch.payload, batch.rewards_BG, batch.live_BG)
    assert [digest(stored, i) for i in range(len(tickets))] == [digest_of_ticket(t) for t in tickets]
    assert np.asarray(batch.real_B).tolist() == [True] * len(tickets) + [False] * (batch_size - len(tickets))
    for leaf in jax.tree.leaves(stored):
        assert leaf.shape[0] == batch_size
        assert not np.ascontiguousarray(np.asarray(leaf)[len(tickets) :]).view(np.uint8).any()


def test_batch_size_must_be_a_multiple_of_the_shards(mesh):
    shards = sharding.num_row_shards(mesh)
    if shards == 1:
        make_buffer(mesh, batch_size=5)
        return
    with pytest.raises(
        ValueError, match=rf"9 groups per step are no multiple of .* {shards} row shards.*: use (\d+)"
    ) as caught:
        make_buffer(mesh, batch_size=9)
    advised = int(str(caught.value).rpartition(" ")[2])
    assert advised == -(-9 // shards) * shards
    make_buffer(mesh, batch_size=advised)


def test_capacity_is_rounded_up_to_the_shards(mesh):
    shards = sharding.num_row_shards(mesh)
    assert make_buffer(mesh, capacity=17).capacity == -(-17 // shards) * shards


def test_put_and_take_return_the_bits_in_the_order_of_the_tickets(mesh):
    buffer = make_buffer(mesh)
    put(buffer, mesh, list(range(16)), [True] * 16)
    tickets = [13, 2, 7, 15, 0, 1, 14, 8]
    check_batch(buffer.take(tickets), tickets)
    check_batch(buffer.take(tickets[:3]), tickets[:3])  # a short step; taking does not free
    check_batch(buffer.take([]), [])
    assert buffer.records([13])["step"].tolist() == [13]
    batch = buffer.take(tickets)
    assert all(leaf.sharding == sharding.rows(mesh) for leaf in jax.tree.leaves(batch))


def test_carry_over_several_steps(mesh):
    """A group stays as it is while others come and go around it."""
    buffer = make_buffer(mesh)
    put(buffer, mesh, list(range(10)), [True] * 10)
    carried, following = [4, 9], 10
    for _ in range(5):
        put(buffer, mesh, list(range(following, following + 12)), [True, False] * 6)
        tickets = [t for t in sorted(buffer.tickets) if t not in carried][:6]
        check_batch(buffer.take([*tickets, *carried]), [*tickets, *carried])
        buffer.free(tickets)
        following += 12
    check_batch(buffer.take(carried), carried)


def test_kept_groups_of_one_shard_spill_into_the_others(mesh):
    """All kept rows come from the first shard: they fit nevertheless, whatever number of passes it takes."""
    shards = sharding.num_row_shards(mesh)
    width = 16 // shards
    buffer = make_buffer(mesh)
    while room := buffer.capacity - len(buffer.tickets):
        first = 100 * len(buffer.tickets)
        put(buffer, mesh, list(range(first, first + min(width, room))), [True] * min(width, room))
    assert len(buffer.tickets) == buffer.capacity == 24  # exactly full
    for begin in (0, 8, 16):
        tickets = sorted(buffer.tickets)[begin : begin + 8]
        check_batch(buffer.take(tickets), tickets)


def test_several_spilling_passes_in_one_put(mesh8):
    """Only the last shard has room, and one pass brings two rows to a shard: three groups take two passes."""
    buffer = make_buffer(mesh8)
    put(buffer, mesh8, list(range(16)), [True] * 16)
    put(buffer, mesh8, list(range(16, 24)), [True] * 8)  # full: three slots a shard
    last = [t for t in buffer.tickets if buffer.state_dict()["groups"][buffer.tickets.index(t)][1] >= 21]
    buffer.free(last)
    put(buffer, mesh8, [100, 101, 102], [True] * 3)
    assert sorted(slot for t, slot, _ in buffer.state_dict()["groups"] if t >= 100) == [21, 22, 23]
    tickets = [102, 100, 0, 101]
    check_batch(buffer.take(tickets), tickets)


def test_errors_store_nothing(mesh):
    buffer = make_buffer(mesh)
    put(buffer, mesh, list(range(8)), [True] * 8)
    put(buffer, mesh, list(range(40, 48)), [True] * 8)
    with pytest.raises(ValueError, match=r"9 groups do not fit into the 8 free of 24 slots"):
        put(buffer, mesh, list(range(20, 29)), [True] * 9)
    with pytest.raises(ValueError, match="ticket 7 is in the buffer already"):
        put(buffer, mesh, [20, 7], [True, True])
    with pytest.raises(ValueError, match="ticket 21 is in the buffer already"):
        put(buffer, mesh, [21, 21], [True, True])  # twice in one hand-over
    assert sorted(buffer.tickets) == [*range(8), *range(40, 48)]
    put(buffer, mesh, [7, 20], [False, True])  # a row that is not kept does not count
    check_batch(buffer.take([20, 7]), [20, 7])


def test_unknown_tickets(mesh1):
    buffer = make_buffer(mesh1)
    put(buffer, mesh1, [1, 2], [True, True])
    for act in (lambda: buffer.take([1, 3]), lambda: buffer.records([3]), lambda: buffer.free([3])):
        with pytest.raises(KeyError, match="3"):
            act()
    with pytest.raises(ValueError, match="9 tickets for a batch of 8"):
        buffer.take(list(range(9)))
    buffer.free([1])
    with pytest.raises(KeyError):
        buffer.free([1])


def test_restore_into_a_new_buffer(mesh):
    buffer = make_buffer(mesh)
    put(buffer, mesh, list(range(16)), [True] * 16)
    buffer.free([0, 5, 11])
    document = json.loads(json.dumps(buffer.state_dict()))
    arrays = jax.tree.map(np.array, buffer.arrays)
    again = make_buffer(mesh, number=1)
    again.load_state_dict(document, jax.tree.map(lambda x: sharding.place(x, sharding.rows(mesh)), arrays))
    tickets = [15, 1, 4, 7]
    check_batch(again.take(tickets), tickets)
    assert again.records([4])["step"].tolist() == [4]
    # What follows is the same in both, slot for slot.
    for each in (buffer, again):
        put(each, mesh, list(range(30, 36)), [True] * 6)
    assert buffer.state_dict() == again.state_dict()
    assert jax.tree.all(jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(),
                                     buffer.arrays, again.arrays))  # fmt: skip
    with pytest.raises(ValueError, match="the checkpoint's buffer holds 24 groups, this run's 32"):
        make_buffer(mesh, capacity=32).load_state_dict(document, arrays)


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_random_puts_and_takes(mesh8, data):
    """Random rows are kept, none and all among them; the batch is any of what is stored, in any order."""
    buffer, following = make_buffer(mesh8), 0
    for _ in range(4):
        room = buffer.capacity - len(buffer.tickets)
        keep = np.array(data.draw(st.one_of(st.just([True] * 16), st.lists(st.booleans(), min_size=16, max_size=16))))
        keep &= np.cumsum(keep) <= room
        put(buffer, mesh8, list(range(following, following + 16)), list(keep))
        following += 16
        tickets = data.draw(st.permutations(buffer.tickets))[:8] if buffer.tickets else []
        check_batch(buffer.take(tickets), tickets)
        buffer.free(tickets[: data.draw(st.integers(0, 8))])


def test_nothing_compiles_after_warm_up(mesh):
    buffer, rng, following = make_buffer(mesh), np.random.default_rng(0), 0
    payload = jax.tree.map(lambda x: sharding.place(x, sharding.rows(mesh)), host_groups([], 16).payload)
    empty = Groups(payload, np.full(16, -1), np.zeros(16, bool), np.ones(16, bool), *[np.zeros(0)] * 3)
    check_batch(buffer.warm_up(empty), [])
    assert buffer.tickets == []
    compiles = CompileCounter()
    for i in range(100):
        num = i % 17  # from none to all
        keep = np.zeros(16, bool)
        keep[rng.permutation(16)[:num] if i % 2 else np.arange(num)] = True
        put(buffer, mesh, list(range(following, following + 16)), list(keep))
        following += 16
        buffer.take(rng.permutation(buffer.tickets)[:8].tolist())
        buffer.free(sorted(buffer.tickets)[: max(0, len(buffer.tickets) - 8)])
    assert compiles.count == 0, compiles.names
