"""The player of turns: how each rollout goes on, what it is worth in the end, and what a restart knows."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath
from jax.experimental import multihost_utils

from dynrl.journal import Journal
from dynrl.models.tokenizer import CharTokenizer
from dynrl.rollout.turns import TurnPlayer
from dynrl.sampling.follow_up import Turn
from dynrl.tasks.environments import Environment, Step, TurnVerifier
from dynrl.types import Finish, Purpose, Request, Reward, SamplingParams, Scores, Status, Task

TOKENIZER = CharTokenizer("0123456789;?")
OK = Status.OK


class Counting(Environment):
    """Says how many turns there were, until one is empty."""

    stop_strings = ("?",)

    def reset(self, task) -> str:
        self.turns = 0
        return ""

    def step(self, text):
        self.turns += 1
        return Step(f"{self.turns};" if text else "Bye!", float(len(text)), not text)


class Greeting(Counting):
    """Says 7 first."""

    has_opening = True

    def reset(self, task) -> str:
        super().reset(task)
        return "7"


class Sampler:
    """Notes what is asked of it; turns and groups come as the test says."""

    def __init__(self):
        self.requests, self.done, self.turns = [], [], []

    num_in_flight = 1

    def submit(self, requests):
        if len(requests[0].prompt) > 3:
            raise ValueError("request of ticket 5 (task 9): the prompt has 4 tokens, more than max_prompt_tokens = 3")
        self.requests += requests

    def cancel(self, tickets): ...

    def poll(self, min_groups=1):
        return None

    def take_turns(self):
        turns, self.turns = self.turns, []
        return turns

    def extend(self, ticket, sample, tokens):
        self.done.append((ticket, sample, TOKENIZER.decode(tokens)))

    def finish(self, ticket, sample, truncated):
        self.done.append((ticket, sample, "cut" if truncated else "end"))


class Pool:
    """Judges turns at once; `status` by text in the place of what it gives."""

    def __init__(self, environment, status=None):
        self._judge, self._status, self._done, self.seen = TurnVerifier("e", environment), status or {}, [], []

    def submit(self, ticket, task, texts):
        self.seen.append(texts[0])
        status = self._status.get(texts[0], OK)
        reward = self._judge(task, texts[0]) if status is OK else Reward(0.0 if status.live else float("nan"))
        self._done.append(Scores(ticket, (reward,), (status,)))

    def wait(self, timeout_secs):
        done, self._done = self._done, []
        return done


def player_of(environment=Counting, status=None):
    sampler = Sampler()
    player = TurnPlayer(sampler, Pool(environment, status), TOKENIZER, {"e": environment}, (), 4)  # pyright: ignore
    return player, sampler


def begin(player, ticket=5, visit=2):
    params = SamplingParams(max_tokens=20, stop_strings=(";",))
    request = Request(ticket, 9, visit, Purpose.TRAIN, [1, 2], 2, params)
    player.submit([request], [Task(9, "e", "12", "3")])
    return request


def turn(sample, text, ticket=5, room=10, finish=Finish.STOP):
    return Turn(ticket, sample, TOKENIZER.encode(text), len(text), room, finish)


def played(player, *finish, ticket=5):
    groups = SimpleNamespace(
        valid_P=np.array([True, False]), tickets_P=np.array([ticket, -1]), host_length_PG=np.zeros((2, 2)),
        host_finish_PG=np.array([finish or [0, 0], [0, 0]]),
    )  # fmt: skip
    return player.take_scores(groups)[ticket]


def test_each_rollout_goes_on_with_what_is_said_to_its_own_turns():
    player, sampler = player_of()
    request = begin(player)
    (sent,) = sampler.requests
    assert sent == dataclasses.replace(
        request, multi_turn=True, params=dataclasses.replace(request.params, stop_strings=(";", "?"))
    )
    sampler.turns = [turn(0, "12?"), turn(1, "")]
    player.poll()
    assert sampler.done == []  # judged while others decode
    player.poll()
    assert sampler.done == [(5, 0, "1;"), (5, 1, "end")]  # what is said at the end need not be written as tokens
    sampler.turns = [turn(0, "3?")]
    player.poll()
    sampler.turns = [turn(0, "")]
    player.poll()
    assert sampler.done[-1] == (5, 0, "2;")
    player.poll()
    assert sampler.done[-1] == (5, 0, "end")
    scores = played(player)
    assert [r.score for r in scores.rewards] == [5.0, 0.0]
    assert scores.statuses == (OK, OK)
    assert player.given_tokens == [4, 0]


@pytest.mark.parametrize(("room", "finish"), [(2, Finish.STOP), (9, Finish.LENGTH)])
def test_a_rollout_without_room_for_more_is_cut(room, finish):
    player, sampler = player_of()
    begin(player)
    sampler.turns = [turn(0, "12?", room=room, finish=finish)]
    player.poll()
    player.poll()
    assert sampler.done == [(5, 0, "cut")]
    assert played(player).rewards[0].score == 3.0  # so far


def test_what_the_sampler_failed_is_dead_whatever_was_said_before():
    player, sampler = player_of()
    begin(player)
    sampler.turns = [turn(0, "12?"), turn(1, "1?")]
    player.poll()
    player.poll()
    scores = played(player, Finish.STOP, Finish.FAILED)
    assert scores.statuses == (OK, Status.SAMPLER)
    assert np.isnan(scores.rewards[1].score)


@pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT])
def test_a_turn_that_cannot_be_judged_ends_the_rollout(status):
    player, sampler = player_of(status={'["12?"]': status})
    begin(player)
    sampler.turns = [turn(0, "12?")]
    player.poll()
    player.poll()
    assert sampler.done == [(5, 0, "end")]
    assert played(player).statuses == (status, Status.SAMPLER)


def test_an_opening_belongs_to_the_prompt():
    player, sampler = player_of(Greeting)
    begin(player)
    assert (sampler.requests, player.num_in_flight) == ([], 2)
    player.poll()
    assert sampler.requests[0].prompt == [1, 2, *TOKENIZER.encode("7")]


def test_a_prompt_that_its_opening_makes_too_long_is_named():
    class Chatty(Greeting):
        def reset(self, task):
            return "77"

    player, _ = player_of(Chatty)
    begin(player)
    with pytest.raises(
        ValueError, match=r"environment of source e, task 9: with its opening, request of ticket 5 .* 4 tokens"
    ):
        player.poll()


def test_without_its_opening_a_group_is_lost():
    player, sampler = player_of(Greeting, {"[]": Status.CRASHED})
    begin(player)
    sampler.turns = [turn(0, "12?"), turn(1, "")]
    player.poll()
    player.poll()
    assert sampler.done == [(5, 0, "end"), (5, 1, "end")]
    assert played(player).statuses == (Status.CRASHED, Status.CRASHED)


def test_observations_that_cannot_be_given_are_named():
    class Wordy(Counting):
        def step(self, text):
            return Step("12345", 0.0, False)

    player, sampler = player_of(Wordy)
    begin(player)
    sampler.turns = [turn(0, "1?")]
    player.poll()
    with pytest.raises(ValueError, match=r"source e, task 9: observation '12345': 5 tokens are more than the 4"):
        player.poll()


def test_a_deadline_that_was_missed_is_missed_after_a_restart(tmp_path):
    for status in ({'["12?"]': Status.TIMEOUT}, {}):  # the second life is faster
        player, sampler = player_of(status=status)
        player.journal = Journal(epath.Path(tmp_path))
        begin(player)
        sampler.turns = [turn(0, "12?")]
        player.poll()
        player.poll()
        assert played(player).statuses[0] is Status.TIMEOUT
    begin(player, visit=3)  # another rollout of the task
    sampler.turns = [turn(0, "12?")]
    player.poll()
    player.poll()
    assert played(player).statuses[0] is OK


def test_a_restart_judges_again_what_was_under_way():
    player, sampler = player_of()
    begin(player)
    sampler.turns = [turn(0, "12?"), turn(1, "")]
    player.poll()
    player.poll()
    sampler.turns = [turn(0, "3?")]
    player.poll()
    state = json.loads(json.dumps(player.state_dict()))
    again, other = player_of()
    again.load_state_dict(state, {5: Task(9, "e", "12", "3")}, [])
    for one, its in ((player, sampler), (again, other)):
        one.poll()
        assert its.done[-1] == (5, 0, "2;")
    assert played(again) == played(player)


def test_processes_share_turns_and_hear_of_all_answers(monkeypatch):
    """Tickets 5 and 6 of two processes: each judges its own, and the sum of the rows is what both go on with."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    rows, players = [], []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        player, sampler = player_of()
        for ticket in (5, 6):
            begin(player, ticket)
        sampler.turns = [turn(0, "12?", 5), turn(1, "", 6)]
        player.poll()
        assert len(player._verifiers.seen) == 1  # pyright: ignore
        players.append((player, sampler))
        monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: rows.append(own) or own[None])
        player.poll()
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda own: np.stack(rows))
    player, sampler = player_of()
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    for ticket in (5, 6):
        begin(player, ticket)
    sampler.turns = [turn(0, "12?", 5), turn(1, "", 6)]
    player.poll()
    player.poll()
    assert sampler.done == [(5, 0, "1;"), (6, 1, "end")]
    assert played(player, ticket=5).rewards[0].score == 3.0
