"""MutateHardest against a real HTTP server on loopback: what it asks, what it takes, and all ways a server can fail."""

import copy
import json
import random
import re
import socket
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chat_server import ChatServer, drip, drop, hang_up, pour, say, send

from dynrl.tasks.generators import chat
from dynrl.tasks.generators.base import Cancelled, GeneratorContext
from dynrl.tasks.generators.mutate_hardest import VARIATION_PROMPT, VOTE_PROMPT, MutateHardest
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore
from dynrl.types import Task

PATIENCE_SECS = 3.0  # of a call that should end in a fraction of a second, on a machine with other work
KEY = "sk-live-0123456789/abcdef"
SOURCE = make_source("arithmetic")
# By task id, of 8 rollouts: the posterior pass rates are .2, .2, .3, .4; 4 was never solved, 5 is easy.
SOLVED = {0: 1, 1: 1, 2: 2, 3: 3, 4: 0, 5: 7}


@pytest.fixture(autouse=True)
def short_waits_and_no_proxy(monkeypatch):
    monkeypatch.setattr(chat, "_FIRST_BACKOFF_SECS", 0.01)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")


@pytest.fixture
def serve():
    """Starts a server that answers by a script."""
    servers = []

    def start(script):
        servers.append(ChatServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Written(dict):
    """What `once` writes down."""

    def once(self, key, call):
        if key not in self:
            self[key] = json.loads(json.dumps(call()))
        return self[key]


def make_context(solved=SOLVED, store=None, written=None, seed=0, **kwargs):
    store = TaskStore(SOURCE, 0, 8) if store is None else store
    outcomes = TaskOutcomes()
    for task_id, successes in solved.items():
        outcomes.by_task.update(task_id, successes, 8, version=0)
    fields = {"step": 5, "version": 5, "outcomes": outcomes, "store": store, "source": SOURCE, "max_tasks": 100}
    fields |= {"once": (Written() if written is None else written).once, "generate": lambda prompts: []}
    return GeneratorContext(rng=np.random.default_rng(seed), **(fields | kwargs))


def make_generator(server, **kwargs):
    """Asks for `vary <number> <prompt> <answer>` and `solve <prompt>`."""
    fields = {"base_url": getattr(server, "base_url", server), "model": "m", "max_requests": 1000, "max_tokens": 10**6}
    fields |= {"answers": "ask", "num_parents": 3, "num_variations": 1, "max_retries": 0, "timeout_secs": 5}
    fields |= {"variation_prompt": "vary {number} {prompt} {answer}", "vote_prompt": "solve {prompt}"}
    return MutateHardest(**(fields | kwargs))


def proposal(prompt, answer: object = "7"):
    return json.dumps({"prompt": prompt, "answer": answer})


def clever(prompt, number):
    """Varies a task into `new <number> <prompt>`, and gives every new task the same answer."""
    kind, number, *rest = prompt.split(" ")
    return "7" if kind == "solve" else proposal(f"new {number} {rest[0]}")


def test_variations_of_the_hardest_solvable_tasks(serve):
    context = make_context()
    tasks = make_generator(serve(clever), num_variations=2).propose(context)
    parents = [task.parents[0] for task in tasks]
    assert sorted(parents[:2]) == [0, 1]
    assert parents == [*parents[:2], 2, *parents[:2], 2]  # each has its first variation before any has its second
    for task, number in zip(tasks, [1, 1, 1, 2, 2, 2], strict=True):
        (parent,) = context.store.get(task.parents)
        assert task == Task(-1, "arithmetic", f"new {number} {parent.prompt}", "7", parent.level, task.parents)
    assert context.spent == {"requests": 6, "tokens": 60}


def test_parents_were_solved_and_seen_often_enough_and_are_hard(serve):
    generator = make_generator(serve(clever), num_parents=8, min_attempts=8, max_pass_rate=0.4)
    context = make_context()
    context.outcomes.by_task.update(6, 1, 7, version=0)  # too few attempts
    assert [task.parents[0] for task in generator.propose(context)][2:] == [2, 3]  # 3: (3 + 1) / (8 + 2) = 0.4
    generator = make_generator(serve(clever), num_parents=8, max_pass_rate=0.35)
    assert sorted(task.parents[0] for task in generator.propose(make_context())) == [0, 1, 2]
    assert generator.propose(make_context({4: 0, 5: 7})) == []
    assert generator.propose(make_context({})) == []


def test_ties_are_broken_by_the_calls_random_numbers(serve):
    generator = make_generator(serve(clever), num_parents=2)
    orders = [
        [task.parents[0] for task in generator.propose(make_context(dict.fromkeys(range(8), 1), seed=seed))]
        for seed in [*range(6), *range(6)]
    ]
    assert orders[:6] == orders[6:]
    assert len(set(map(tuple, orders))) > 3  # of 56


def test_no_more_than_can_be_admitted_are_asked_for(serve):
    server = serve(clever)
    generator = make_generator(server, num_variations=3)
    assert [task.prompt[:5] for task in generator.propose(make_context(max_tasks=4))] == ["new 1"] * 3 + ["new 2"]
    assert generator.propose(make_context(max_tasks=0)) == []
    assert len(server.bodies) == 4


def test_only_named_sources_and_metadata_that_variations_share(serve):
    tasks = [
        Task(-1, "a", "a0", "1", 3, metadata={"unit": "m"}),
        Task(-1, "b", "b1", "1", metadata={"numbers": [1, 2]}),
        Task(-1, "a", "a2", "1"),
        Task(-1, "c", "c3", "1"),
    ]
    solved, server = dict.fromkeys(range(4), 1), serve(clever)
    store = TaskStore.from_tasks(tasks)

    def parents(ids=solved, **kwargs):
        made = make_generator(server, num_parents=4, **kwargs).propose(
            make_context(dict.fromkeys(ids, 1), store, source=store._base._source)
        )
        return {task.parents[0]: task.metadata for task in made}

    assert parents() == {2: {}, 3: {}}  # the others' metadata may be their own
    assert parents(inherit_metadata=["unit"]) == {0: {"unit": "m"}, 2: {}, 3: {}}
    assert parents(inherit_metadata=["unit"], sources=["a"]) == {0: {"unit": "m"}, 2: {}}
    with pytest.raises(ValueError, match=r"source 'b' carry metadata \['numbers'\].*inherit_metadata"):
        parents(ids=[1], inherit_metadata=["unit"])
    assert parents(ids=[1], sources=["a"]) == {}
    with pytest.raises(ValueError, match=r"sources names 'arithmetics' \(did you mean 'arithmetic'\?\).*arithmetic$"):
        make_generator(server, sources=["arithmetics"]).propose(make_context())


def test_votes_confirm_answers(serve):
    votes = {"new 1": ["7", "7.", "7.0", "9"], "new 2": ["7", "7", "9", "9"], "new 3": ["9", "9", "9", "9"]}

    def script(prompt, number):
        kind, _, rest = prompt.partition(" ")
        return votes[rest[:5]].pop() if kind == "solve" else clever(prompt, number)

    context = make_context()
    generator = make_generator(serve(script), answers="vote", num_parents=1, num_variations=3, max_concurrency=1)
    assert [task.prompt[:5] for task in generator.propose(context)] == ["new 1"]
    assert context.spent == {"requests": 15, "tokens": 150, "refused_vote": 2}


def test_votes_give_the_answer_that_a_proposal_lacks(serve):
    def script(prompt, number):
        return "8" if prompt.startswith("solve") else json.dumps({"prompt": f"new{number}"})

    tasks = make_generator(serve(script), answers="vote").propose(make_context())
    assert [task.answer for task in tasks] == ["8", "8", "8"]


def test_templates_of_the_package_and_braces_in_a_tasks_text(serve):
    server = serve(lambda prompt, number: proposal("{new}") if '{"prompt":' in prompt else "{7}")
    store = TaskStore.from_tasks([Task(-1, "a", "{prompt} {0} }{ {{x}}", "{answer}")])
    fields = {"variation_prompt": VARIATION_PROMPT, "vote_prompt": VOTE_PROMPT, "answers": "vote", "num_votes": 1}
    generator = make_generator(server, **fields)
    context = make_context({0: 1}, store, source=store._base._source)
    assert generator.propose(context) == []
    assert context.spent["refused_vote"] == 1  # 7 is not {7}
    variation, vote = server.prompts
    assert "Task:\n{prompt} {0} }{ {{x}}\n\nAnswer:\n{answer}\n" in variation
    assert "solve this task:\n{new}\n" in vote
    assert "{prompt} {0} }{ {{x}}" in vote


def test_a_request_holds_what_was_configured(serve):
    server = serve(clever)
    make_generator(server, num_parents=1, temperature=0.5, max_reply_tokens=50).propose(make_context({0: 1}))
    (task,) = TaskStore(SOURCE, 0, 8).get([0])
    message = {"role": "user", "content": f"vary 1 {task.prompt} {task.answer}"}
    assert server.bodies == [{"model": "m", "messages": [message], "temperature": 0.5, "max_tokens": 50}]
    extra = {"temperature": None, "max_tokens": None, "max_completion_tokens": 9}
    make_generator(server, num_parents=1, extra_body=extra).propose(make_context({0: 1}))
    assert server.bodies[1] == {"model": "m", "messages": [message], "max_completion_tokens": 9}


def test_a_lone_surrogate_in_a_task_travels_as_a_question_mark(serve):
    server = serve(lambda prompt, number: proposal("x"))
    store = TaskStore.from_tasks([Task(-1, "a", "a\ud800b", "7")])
    context = make_context({0: 1}, store, source=store._base._source)
    assert len(make_generator(server).propose(context)) == 1
    assert server.prompts == ["vary 1 a?b 7"]


CONTENT = b'{"choices": [{"message": {"content": "%s"}}]}'
FAILURES = {  # action, tokens charged (None: the most it may have cost), what the error says
    "server error": (send(b'{"error": {"message": "out of\\nmemory"}}', 500), 0, "HTTP 500: .*out of.*memory"),
    "html error page": (send(b"<html>Bad Gateway</html>", 502, {"Content-Type": "text/html"}), 0, "HTTP 502: <html>"),
    "bad request": (send(b'{"error": "no such model"}', 404), 0, "HTTP 404: .*no such model"),
    "rate limit": (send(b"{}", 429, {"Retry-After": "0"}), 0, "HTTP 429"),
    "odd error page": (send(b"\xff\xfe", 500, {"Content-Type": "text/html; charset=none"}), 0, "HTTP 500"),
    "html": (send(b"<html></html>", headers={"Content-Type": "text/html"}), None, "JSONDecodeError: .*<html>"),
    "malformed JSON": (send(CONTENT[:-3]), None, "JSONDecodeError"),
    "not UTF-8": (send(CONTENT % b"\xff"), None, "UnicodeDecodeError"),
    "nothing": (send(b""), None, "JSONDecodeError"),
    "not an object": (send(b"[1]"), None, r"no chat completion, but \[1\]"),
    "a number of 5,000 digits": (send(b"9" * 5000), None, "ValueError"),
    "nested to where it can be read": (send(b"[" * 700 + b"]" * 700), None, "no chat completion"),
    "a decompressor": (send(b"x", 500, {"Content-Type": "text/html; charset=zlib"}), 0, "HTTP 500: x"),
    "nested": (send(b"[" * 200_000), None, "RecursionError"),
    "no choices": (send(b'{"choices": [], "usage": {"total_tokens": 3}}'), 3, "no chat completion, but .*choices"),
    "null choices": (send(b'{"choices": null, "usage": null}'), None, "no chat completion"),
    "null content": (say(None, 5, finish_reason="content_filter"), 5, "no text in the reply: .*content_filter"),
    "blank content": (say(" \n", 5), 5, "no text"),
    "content of parts": (say(["7"], 5), 5, "no text"),
    "cut off": (say(proposal("x"), 5, finish_reason="length"), 5, "max_reply_tokens"),
    "hang": (say("late", secs=5.0), None, "no reply within 0.8 s"),
    "drip": (drip(5.0), None, "no reply within 0.8 s"),
    "dropped in a reply": (drop, None, "RemoteProtocolError"),
    "dropped before a reply": (hang_up, None, "RemoteProtocolError|ReadError"),
    "not HTTP": (lambda handler: handler.wfile.write(b"hello\r\n\r\n"), None, "RemoteProtocolError"),
    "a gigabyte": (pour, None, "longer than 4 MiB"),
    "compressed": (send(b"x", headers={"Content-Encoding": "gzip"}), None, "compressed"),
    "a redirect": (send(b"", 307, {"Location": "/v1/chat/completions"}), 0, "HTTP 307"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_request_costs_its_variation_only(serve, failure):
    action, tokens, message = FAILURES[failure]
    (bad,) = TaskStore(SOURCE, 0, 8).get([2])
    server = serve(lambda prompt, number: action if bad.prompt in prompt else clever(prompt, number))
    written = Written()
    context = make_context(written=written)
    generator = make_generator(server, timeout_secs=0.8 if "0.8 s" in message else 60)
    start = time.monotonic()
    assert sorted(task.parents[0] for task in generator.propose(context)) == [0, 1]
    assert time.monotonic() - start < PATIENCE_SECS
    most = len(f"vary 1 {bad.prompt} {bad.answer}") + generator.max_reply_tokens
    spent = {"requests": 3, "tokens": 20 + (most if tokens is None else tokens)}
    assert context.spent == {**spent, "unanswered": 1}
    assert generator.state_dict() == spent
    error = written["task 2, variation 1"]["error"]
    assert re.search(message, error)
    assert "\n" not in error
    assert len(error) <= 300


@pytest.mark.parametrize("failure", ["server error", "null content", "html", "hang"])
def test_when_every_request_fails_the_error_says_what_failed(serve, failure):
    action, _, message = FAILURES[failure]
    server = serve(lambda prompt, number: action)
    generator = make_generator(server, timeout_secs=0.8)
    context = make_context()
    with pytest.raises(RuntimeError) as raised:
        generator.propose(context)
    assert str(raised.value).startswith(f"{server.base_url}, model 'm': 3 requests for 3 prompts, and no answer; ")
    assert re.search(message, str(raised.value))
    assert context.spent["unanswered"] == context.spent["requests"] == 3


def test_malformed_proposals_are_counted(serve):
    texts = ["no JSON", proposal(" "), proposal("new", "```")]
    context = make_context()
    generator = make_generator(serve(lambda prompt, number: texts[number]), max_concurrency=1)
    assert [task.answer for task in generator.propose(context)] == ["```"]
    assert context.spent == {"requests": 3, "tokens": 30, "malformed": 2}


def test_a_server_that_is_dead_for_good():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    generator = make_generator(base_url, max_retries=2)
    for call in (1, 2):
        with pytest.raises(RuntimeError, match=rf"{base_url}, model 'm': 9 requests for 3 .* ConnectError: "):
            generator.propose(make_context())
        assert generator.state_dict() == {"requests": 9 * call, "tokens": 0}  # nothing was sent


def test_retries_wait_longer_and_longer_and_all_count(serve, monkeypatch):
    monkeypatch.setattr(chat, "_FIRST_BACKOFF_SECS", 0.05)
    failures = [FAILURES[name][0] for name in ("server error", "dropped in a reply", "rate limit")]
    server = serve(lambda prompt, number: failures[number] if number < 3 else proposal("x"))
    generator = make_generator(server, max_retries=3)
    context = make_context({0: 1})
    assert len(generator.propose(context)) == 1
    pauses = np.diff(server.times)
    assert all(pause > least for least, pause in zip([0.05, 0.1, 0.2], pauses, strict=True))
    (task,) = context.store.get([0])
    dropped = len(f"vary 1 {task.prompt} {task.answer}") + generator.max_reply_tokens
    assert context.spent == {"requests": 4, "tokens": 0 + dropped + 0 + 10}
    assert generator.state_dict() == context.spent


@pytest.mark.parametrize("failure", ["bad request", "html", "null content", "cut off", "a redirect", "a gigabyte"])
def test_what_another_try_would_not_mend_is_not_tried_again(serve, failure):
    server = serve(lambda prompt, number: FAILURES[failure][0])
    with pytest.raises(RuntimeError, match="1 requests for 1 prompts"):
        make_generator(server, max_retries=5).propose(make_context({0: 1}))


def test_retry_after_is_respected(serve):
    def soon():
        return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 1.5))  # to whole seconds

    for value, least in [(lambda: "0.3", 0.3), (soon, 0.4), (lambda: "nonsense", 0), (lambda: "-5", 0)]:
        server = serve(
            lambda prompt, number, value=value: proposal("x") if number else send(b"{}", 429, {"Retry-After": value()})
        )
        assert len(make_generator(server, max_retries=1).propose(make_context({0: 1}))) == 1
        assert server.times[1] - server.times[0] >= least


@pytest.mark.parametrize("value", ["3600", "inf", "nan", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_a_retry_after_beyond_patience_ends_the_tries(serve, value):
    server = serve(lambda prompt, number: send(b"{}", 429, {"Retry-After": value}))
    with pytest.raises(RuntimeError, match=r"1 requests for 1 prompts.*HTTP 429"):
        make_generator(server, max_retries=5).propose(make_context({0: 1}))


def test_a_retry_after_beyond_the_deadline_costs_its_variation_only(serve):
    (bad,) = TaskStore(SOURCE, 0, 8).get([2])
    busy = send(b"{}", 429, {"Retry-After": "30"})
    server = serve(lambda prompt, number: busy if bad.prompt in prompt else clever(prompt, number))
    context = make_context(deadline=time.monotonic() + 20)
    start = time.monotonic()
    assert len(make_generator(server, max_retries=5).propose(context)) == 2
    assert time.monotonic() - start < PATIENCE_SECS
    assert context.spent["unanswered"] == 1


def test_the_budget_of_requests_is_never_exceeded_and_its_end_is_said_once(serve):
    server = serve(lambda prompt, number: send(b"{}", 503) if number % 2 else clever(prompt, number))
    generator = make_generator(server, num_variations=4, max_requests=17, max_retries=1)
    spent = {"requests": 0, "tokens": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while generator.state_dict()["requests"] < 17:
            generator.propose(context := make_context())
            spent = {name: spent[name] + context.spent[name] for name in spent}
    assert len(server.bodies) == 17
    assert spent == generator.state_dict()
    with pytest.warns(UserWarning, match=r"MutateHardest proposes nothing more.* 17 of max_requests=17 .*max_tokens"):
        assert generator.propose(make_context()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert generator.propose(make_context()) == []
    assert len(server.bodies) == 17


def test_no_variation_is_begun_whose_votes_the_budget_does_not_allow(serve):
    server = serve(clever)
    generator = make_generator(server, answers="vote", max_requests=13)  # of 1 + 4 each: two, with three left over
    assert len(generator.propose(make_context())) == 2
    assert len(server.bodies) == 10
    with pytest.warns(UserWarning, match=r"10 of max_requests=13 requests \(the next proposal takes 5\)"):
        assert generator.propose(make_context()) == []


def test_the_budget_of_tokens_ends_requests(serve):
    server = serve(lambda prompt, number: say(clever(prompt, number), total_tokens=100))
    generator = make_generator(server, num_variations=4, max_tokens=250, max_concurrency=2)
    context = make_context()
    assert len(generator.propose(context)) <= 4  # the third reply ends it, with one more under way
    assert generator.state_dict() in ({"requests": 3, "tokens": 300}, {"requests": 4, "tokens": 400})
    assert context.spent["unasked"] == 12 - generator.state_dict()["requests"]
    with pytest.warns(UserWarning, match="max_tokens=250"):
        assert generator.propose(make_context()) == []


@pytest.mark.parametrize("usage", [None, -1, "10", 1.5, [10]])
def test_without_a_usable_count_a_reply_costs_the_most_it_may_have(serve, usage):
    generator = make_generator(serve(lambda prompt, number: say(proposal("x"), usage)), max_reply_tokens=100)
    generator.propose(context := make_context({0: 1}))
    (task,) = context.store.get([0])
    assert generator.state_dict()["tokens"] == len(f"vary 1 {task.prompt} {task.answer}") + 100


def test_requests_run_together_up_to_the_limit_and_results_keep_their_order(serve):
    expected = None
    for limit in (1, 3, 8):
        delays, full = random.Random(limit), threading.Barrier(limit)

        def slow(prompt, number, limit=limit, delays=delays, full=full):
            if number < limit:
                full.wait(10)  # until as many are open as may be
            return say(clever(prompt, number), secs=delays.uniform(0, 0.03))

        server = serve(slow)
        tasks = make_generator(server, num_variations=5, max_concurrency=limit).propose(make_context())
        assert server.max_at_once == limit
        expected = expected or tasks
        assert tasks == expected


def voting(server, **kwargs):
    return make_generator(server, answers="vote", num_votes=2, num_variations=2, max_retries=2, **kwargs)


def test_a_restarted_call_hears_what_was_written_down_and_asks_for_the_rest(serve):
    first: dict[str, int] = {}

    def flaky(prompt, number):
        """By what is asked alone: a reply, one after an error, none, rubbish."""
        mood = zlib.crc32(prompt.encode()) % 6
        if mood == 1 and prompt.startswith("vary") and first.setdefault(prompt, number) == number:
            return send(b"{}", 500)
        return {2: send(b"<html>"), 3: "rubbish"}.get(mood) or clever(prompt, number)

    server = serve(flaky)
    written, whole = Written(), voting(server)
    context = make_context(written=written)
    tasks = whole.propose(context)
    num_asked = len(server.bodies)
    assert 0 < len(tasks) < 6
    assert num_asked == context.spent["requests"]
    for trial in range(7):
        rng = random.Random(trial)
        kept = Written({key: value for key, value in written.items() if trial and rng.random() < trial / 6})
        missing = sum(value["requests"] for key, value in written.items() if key not in kept)
        first.clear()
        server.bodies.clear()
        again, restarted = voting(server), make_context(written=kept)
        assert again.propose(restarted) == tasks
        assert kept == written
        assert (restarted.spent, again.state_dict()) == (context.spent, whole.state_dict())
        assert len(server.bodies) == missing


def test_state_restored_at_every_point_gives_the_same_continuation(serve):
    server = serve(clever)

    def run(generator, steps, written):
        made = []
        for step in steps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                made.append((generator.propose(make_context(written=written[step], seed=step)), generator.state_dict()))
        return made

    written = [Written() for _ in range(6)]
    whole = run(make_generator(server, max_requests=14), range(6), written)
    assert [len(tasks) for tasks, _ in whole] == [3, 3, 3, 3, 2, 0]
    server.bodies.clear()
    for stop in range(6):
        for heard in (written, [Written() for _ in range(6)]):
            restored = make_generator(server, max_requests=14)
            if stop:
                restored.load_state_dict(json.loads(json.dumps(whole[stop - 1][1])))
            assert run(restored, range(stop, 6), heard) == whole[stop:]
    assert len(server.bodies) == sum(14 - 3 * stop for stop in range(5))  # those of the second kind only


@pytest.mark.parametrize("action", [say("late", secs=5.0), drip(5.0), send(b"{}", 429, {"Retry-After": "20"}), pour])
def test_no_call_outlives_its_deadline(serve, action):
    server = serve(lambda prompt, number: action)
    start = time.monotonic()
    generator = make_generator(server, timeout_secs=60, max_retries=10**6)
    with pytest.raises((Cancelled, RuntimeError)):
        generator.propose(make_context(deadline=start + 0.3))
    assert time.monotonic() - start < PATIENCE_SECS


def test_what_was_heard_before_the_deadline_is_written_down_and_counted(serve):
    (slow,) = TaskStore(SOURCE, 0, 8).get([2])
    server = serve(lambda prompt, number: say("late", secs=5.0) if slow.prompt in prompt else clever(prompt, number))
    written, generator = Written(), make_generator(server)
    with pytest.raises(Cancelled):
        generator.propose(make_context(written=written, deadline=time.monotonic() + 1.5))
    assert sorted(written) == ["task 0, variation 1", "task 1, variation 1"]
    assert generator.state_dict()["requests"] == 3
    assert generator.state_dict()["tokens"] > 20 + generator.max_reply_tokens  # the third may have cost all that
    with pytest.raises(Cancelled):
        generator.propose(make_context(deadline=time.monotonic() - 1))
    assert len(server.bodies) == 3


def test_a_call_that_nobody_waits_for_ends_at_once(serve):
    server = serve(lambda prompt, number: say("late", secs=5.0))
    context = make_context()
    with ThreadPoolExecutor() as pool:  # a run calls it in a thread
        call = pool.submit(make_generator(server, timeout_secs=60).propose, context)
        while not server.bodies:
            time.sleep(0.01)
        context.cancelled.set()
        start = time.monotonic()
        with pytest.raises(Cancelled):
            call.result()
    assert time.monotonic() - start < PATIENCE_SECS


def test_a_look_up_of_the_hosts_name_that_hangs_does_not_hold_the_call(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: done.wait(10))
    start = time.monotonic()
    with pytest.raises(Cancelled):
        make_generator("http://nowhere.invalid/v1").propose(make_context(deadline=start + 0.3))
    assert time.monotonic() - start < PATIENCE_SECS
    with pytest.raises(RuntimeError, match=r"no reply within 0\.2 s"):
        make_generator("http://nowhere.invalid/v1", timeout_secs=0.2).propose(make_context())
    done.set()


def test_what_once_raises_ends_the_call(serve):
    def once(key, call):
        call()
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        make_generator(serve(clever)).propose(make_context(once=once))


def test_the_key_is_sent_and_stands_nowhere_else(serve, monkeypatch, caplog):
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
    caplog.set_level("DEBUG")
    echo = send(json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), 401)
    server = serve(lambda prompt, number: echo)
    written, generator = Written(), make_generator(server, api_key_env="SOME_KEY")
    with pytest.raises(RuntimeError, match=r"HTTP 401: .*bad key \[key\]") as raised:
        generator.propose(make_context(written=written))
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    chain, error = [], raised.value
    while error is not None:
        chain.append(repr(error))
        error = error.__cause__ or error.__context__
    held = [repr(generator), repr(vars(generator)), json.dumps(written), json.dumps(generator.state_dict()), *chain]
    assert KEY not in " ".join([*held, caplog.text])
    assert KEY not in repr(vars(copy.deepcopy(generator)))
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.setenv(name, KEY)
    with pytest.raises(RuntimeError):
        make_generator(server).propose(make_context())
    assert server.headers[-1]["authorization"] == "Bearer no-key"  # nothing is sent that was not named


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"base_url": "localhost:8000"}, r"base_url must be a URL such as http://localhost:8000/v1, got 'localhost:80"),
        ({"base_url": None}, "base_url must be a URL .* got None"),
        ({"base_url": "http://"}, "base_url must be a URL .* got 'http://'"),
        ({"base_url": "http://host:x/v1"}, "base_url must be a URL .* got 'http://host:x/v1'"),
        ({"model": ""}, "model must be the name of a model at the server, got ''"),
        ({"max_requests": 0}, "max_requests must be a whole number of at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number of at least 1, got 1.5"),
        ({"max_concurrency": True}, "max_concurrency must be a whole number of at least 1, got True"),
        ({"max_retries": -1}, "max_retries must be a whole number of at least 0, got -1"),
        ({"max_reply_tokens": "9"}, "max_reply_tokens must be a whole number of at least 1, got '9'"),
        ({"temperature": float("nan")}, "temperature must be a number of at least 0, got nan"),
        ({"timeout_secs": 0}, "timeout_secs must be a number of at least 0.001, got 0"),
        ({"extra_body": "x"}, "extra_body must be a mapping of request fields, got 'x'"),
        ({"num_parents": 0}, "num_parents must be a whole number of at least 1, got 0"),
        ({"num_variations": 0}, "num_variations must be"),
        ({"num_votes": 0}, "num_votes must be"),
        ({"min_attempts": -1}, "min_attempts must be a number of at least 0, got -1"),
        ({"max_pass_rate": 1.1}, "max_pass_rate must be a number from 0 to 1, got 1.1"),
        ({"min_vote_share": 0.4}, r"min_vote_share must be a number from 0.5 to 1, got 0.4"),
        ({"min_vote_share": 0.5}, "min_vote_share must be above 0.5"),
        ({"answers": "guess"}, "answers must be 'ask' or 'vote', got 'guess'"),
        ({"sources": "arithmetic"}, "sources must be a sequence of names, got 'arithmetic'"),
        ({"inherit_metadata": None}, "inherit_metadata must be a sequence of names, got None"),
        (
            {"variation_prompt": "{promt}"},
            r"variation_prompt has the field \{promt\} \(did you mean 'prompt'.* answer, n",
        ),
        ({"variation_prompt": '{"prompt": 1}'}, "variation_prompt has the field .* a brace is written {{ or }}"),
        ({"variation_prompt": "{prompt"}, "variation_prompt is no template: .* a brace is written {{ or }}"),
        ({"vote_prompt": "{parent_prompt}"}, r"vote_prompt must have the field \{prompt\}"),
        ({"vote_prompt": 3}, "vote_prompt is no template"),
        (
            {"answers": "vote", "max_requests": 4},
            "max_requests=4 does not allow one variation, which takes 5 .*num_votes=4",
        ),
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env names the environment variable NO_SUCH_KEY, which is not set"),
        ({"api_key_env": "ODD_KEY"}, "the environment variable ODD_KEY holds characters that no key has"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message, monkeypatch):
    monkeypatch.setenv("ODD_KEY", "a\x07b")
    with pytest.raises(ValueError, match=message):
        make_generator("http://localhost:1/v1", **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [{"api_key_env": KEY}, {"base_url": f"http://me:{KEY}@host/v1"}, {"base_url": f"http://host/v1?key={KEY}"}],
)
def test_a_key_where_none_belongs_is_not_shown(kwargs):
    with pytest.raises(ValueError, match="api_key_env") as raised:
        make_generator("http://localhost:1/v1", **kwargs)
    assert KEY not in str(raised.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    monkeypatch.delitem(__import__("sys").modules, "dynrl.tasks.generators.chat")
    monkeypatch.delattr("dynrl.tasks.generators.chat")
    with pytest.raises(ImportError, match=r"pip install 'dynrl\[llm\]'"):
        make_generator("http://localhost:1/v1")
