"""Environments: what they may return, replay, and every way that a turn can fail in real workers."""

import json
import math
import sys
from typing import Any

import pytest

from dynrl.tasks.environments import (
    MAX_OBSERVATION_CHARS,
    Environment,
    Step,
    TurnVerifier,
    turn_result,
    turns_text,
)
from dynrl.tasks.rewards import as_reward, find_environment, resolve_verifier
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Reward, Status, Task

HOSTILE = '''
import os, time
from dynrl.tasks.environments import Environment, Step
from dynrl.tasks.rewards import Unparsable

class Deeds(Environment):
    """Each turn says what it does; every good one is worth a half."""
    components = ("turns",)

    def reset(self, task):
        self.seen = []
        if task.answer == "reset": raise KeyError("no reset")
        return ""

    def step(self, text):
        self.seen.append(text)
        deed, _, rest = text.partition(" ")
        if deed == "good": return Step("|".join(self.seen), 0.5, False, {"turns": 1})
        if deed == "end": return Step("", 1, True, {"turns": 1})
        if deed == "loop":
            while True: pass
        if deed == "exit": os._exit(3)
        if deed == "raise": raise KeyError(rest)
        if deed == "unparsable": raise Unparsable(rest)
        if deed == "nan": return Step("more", float("nan"), False)
        if deed == "infinite": return Step("more", 0.0, False, {"turns": float("inf")})
        if deed == "mute": return Step("", 0.5, False)
        if deed == "recurse": return self.step(text)
        if deed == "once":
            if not os.path.exists(rest):
                open(rest, "w").close()
                os._exit(1)
            return Step("survived", 0.5, False)
        raise AssertionError(deed)

class Half:
    def reset(self, task): return ""
    def step(self, text): return None

class Lacks(Environment):
    def reset(self, task): return ""
'''


@pytest.fixture(scope="module", autouse=True)
def hostile_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "hostile_turns.py").write_text(HOSTILE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def pool(hostile_module):
    sources = {"s": "hostile_turns:Deeds", "sums": "calculator"}
    with Verifiers(sources, timeout_secs=0.5, max_attempts=2, metrics=("score",)) as verifiers:
        yield verifiers


class Echo(Environment):
    """Repeats what it was told, and counts; the fourth turn ends it."""

    stop_strings = ("!",)
    components = ("length", "loud")
    has_opening = True

    def reset(self, task):
        self.num_turns = 0
        return f"<{task.answer}>"

    def step(self, text):
        self.num_turns += 1
        parts = {"length": len(text)} | ({"loud": 1.0} if text.isupper() else {})
        return Step(f"{self.num_turns}:{text}", 0.25, self.num_turns == 4, parts)


def task(answer="a", source="s", task_id=7):
    return Task(task_id=task_id, source=source, prompt="p", answer=answer)


def played(*turns):
    return TurnVerifier("echo", Echo)(task(), turns_text(turns))


def scores_of(verifiers, *episodes, **kwargs):
    verifiers.submit(1, task(**kwargs), [turns_text(turns) for turns in episodes])
    found = []
    for _ in range(100):
        found += verifiers.wait(0.2)
        if found:
            return found[0]
    raise AssertionError("the pool does not finish")


def test_rewards_are_sums_over_the_turns_so_far():
    # Lengths 2, 3 and 1; "AB" and "C" are upper case.
    assert played("AB") == Reward(0.25, {"length": 2, "loud": 1}, {"observation": "1:AB", "done": False})
    assert played("AB", "abc", "C") == Reward(
        0.75, {"length": 6, "loud": 2}, {"observation": "3:C", "done": False}
    )  # fmt: skip
    assert played("", "", "", "x") == Reward(1.0, {"length": 1, "loud": 0}, {"observation": "4:x", "done": True})


def test_no_turn_gives_the_opening():
    assert played() == Reward(0.0, {"length": 0.0, "loud": 0.0}, {"observation": "<a>", "done": False})


def test_a_replay_is_the_turn_by_turn_episode():
    turns, live = ["ab", "\ud800", "\N{PILE OF POO}!", '["x"]'], Echo()
    live.reset(task())
    for n, turn in enumerate(turns, 1):
        step, replayed = live.step(turn), played(*turns[:n])
        assert (step.observation, step.done) == (replayed.info["observation"], replayed.info["done"])
        assert replayed == played(*turns[:n])


def test_a_turn_after_the_last_is_the_callers_error():
    with pytest.raises(ValueError, match="environment 'echo', task 7, turn 5: the episode was over"):
        played("", "", "", "", "")


@pytest.mark.parametrize("text", ["", "hello", "[1]", '{"a": "b"}', '"a"', '["a", null]', '["a"', "[" * 100])
def test_a_text_that_is_no_list_of_turns_is_named(text):
    with pytest.raises(ValueError, match=r"environment 'echo', task 7 judges turns, a JSON list"):
        TurnVerifier("echo", Echo)(task(), text)


def answering(value: Any, reset: Any = "", **attributes):
    class Odd(Environment):
        def reset(self, task):
            return reset

        def step(self, text):
            return value

    for name, attribute in attributes.items():
        setattr(Odd, name, attribute)
    return Odd


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        (answering(None), TypeError, "turn 1: step returned NoneType None, not a Step"),
        (answering(("", 1.0, True)), TypeError, "step returned tuple .*not a Step"),
        (answering(Step(b"x", 1.0, True)), TypeError, "step returned an observation that is no string: bytes"),  # pyright: ignore
        (answering(Step("x" * 4_001, 1.0, True)), ValueError, "of 4001 characters, more than .* = 4000"),
        (answering(Step("xyz", 1.0, True), max_observation_chars=2), ValueError, "more than max_observation_chars = 2"),
        (answering(Step("", "1", True)), TypeError, "the reward must be a number, got str '1'"),  # pyright: ignore
        (answering(Step("", 10**400, True)), ValueError, "the reward is beyond the range of a float"),
        (answering(Step("", 1.0, 1)), TypeError, "done must be a bool, got int 1"),  # pyright: ignore
        (answering(Step("", 1.0, True, None)), TypeError, "components must be a mapping, got None"),  # pyright: ignore
        (answering(Step("", 1.0, True, {"x": 1})), ValueError, "component 'x' is not among .*`components`: none"),
        (answering(Step("", 1.0, True, {"x": "1"}), components=("x",)), TypeError, "the component 'x' must be a num"),  # pyright: ignore
        (answering(None, reset=3), TypeError, ": reset returned an observation that is no string: int 3"),
        (answering(None, reset="hi"), ValueError, "reset returned 'hi', but the class does not set has_opening"),
    ],
)  # fmt: skip
def test_what_an_environment_may_not_return(environment, error, message):
    with pytest.raises(error, match=rf"environment 'odd', task 7.*{message}"):
        TurnVerifier("odd", environment)(task(), turns_text(["x"]))


def test_odd_but_sound_returns():
    import numpy as np

    step = Step(Text("y" * MAX_OBSERVATION_CHARS), np.float32(0.5), np.bool_(True), {"x": np.int64(2)})  # pyright: ignore
    reward = TurnVerifier("odd", answering(step, components=("x",)))(task(), turns_text(["x"]))
    assert reward == Reward(0.5, {"x": 2.0}, {"observation": "y" * MAX_OBSERVATION_CHARS, "done": True})
    assert json.loads(json.dumps(as_reward(reward, "odd", 7).info)) == reward.info  # whole, as it travels


class NeedsArguments(Echo):
    def __init__(self, size):
        self.size = size


class OneString(Echo):
    stop_strings = "!"  # pyright: ignore


class EmptyString(Echo):
    stop_strings = ("",)


class NumberedComponents(Echo):
    components = (1,)  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hostile_turns:Half", "must be a dynrl.tasks.environments.Environment"),
        ("hostile_turns:Lacks", "lacks the methods: step"),
        ("dynrl.tasks.environments:Environment", "lacks the methods: reset, step"),
        (f"{__name__}:NeedsArguments", "must be made without arguments: missing a required argument: 'size'"),
        (f"{__name__}:OneString", "stop_strings must be a tuple of non-empty strings, got '!'"),
        (f"{__name__}:EmptyString", "stop_strings must be a tuple of non-empty strings"),
        (f"{__name__}:NumberedComponents", "components must be a tuple of non-empty strings"),
        ("dynrl.types:Task", "must be a dynrl.tasks.environments.Environment"),
    ],
)
def test_classes_that_are_no_environments_are_refused_by_name(name, message):
    for find in (resolve_verifier, find_environment):
        with pytest.raises(TypeError, match=f"environment '{name}'.*{message}"):
            find(name)


def test_a_bound_that_no_reward_can_carry_is_refused():
    with pytest.raises(ValueError, match="environment 'x': max_observation_chars must lie in 1 to 4000, got 4001"):
        TurnVerifier("x", answering(None, max_observation_chars=4_001))


def test_find_environment_tells_environments_from_functions():
    found = find_environment(f"{__name__}:Echo")
    assert found is not None
    assert found.stop_strings == ("!",)
    assert isinstance(resolve_verifier("calculator"), TurnVerifier)
    assert find_environment("calculator") is resolve_verifier("calculator").environment  # pyright: ignore
    assert find_environment("dynrl.tasks.rewards:exact_match") is None
    assert find_environment("math_verify") is None
    with pytest.raises(ValueError, match="did you mean 'calculator'"):
        find_environment("calculater")


# ---- In workers ----


def test_turns_are_judged_in_workers(pool):
    scores = scores_of(pool, ["good"], ["good a", "good b"], ["good", "end"], [])
    assert [reward.score for reward in scores.rewards] == [0.5, 1.0, 1.5, 0.0]
    assert [reward.components["turns"] for reward in scores.rewards] == [1, 2, 2, 0]
    pairs = zip(scores.rewards, scores.statuses, strict=True)
    assert [turn_result(*pair) for pair in pairs] == [
        ("good", False), ("good a|good b", False), ("", True), ("", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("turn", "status"),
    [
        ("loop", Status.TIMEOUT), ("unparsable x", Status.UNPARSABLE), ("recurse", Status.UNPARSABLE),
        ("exit", Status.CRASHED), ("raise x", Status.ERROR), ("unknown", Status.ERROR), ("nan", Status.NONFINITE),
        ("infinite", Status.NONFINITE), ("mute", Status.ERROR),
    ],
)  # fmt: skip
def test_a_turn_that_fails_ends_its_rollout_and_no_other(pool, turn, status):
    scores = scores_of(pool, ["good"], ["good", "good", turn], ["good", "end"])
    assert scores.statuses == (Status.OK, status, Status.OK)
    failed = scores.rewards[1]
    # What was earned before does not count: live is 0, dead is NaN.
    assert failed.score == 0.0 if status.live else math.isnan(failed.score)
    assert turn_result(failed, status) == ("", True)
    assert [scores.rewards[i].score for i in (0, 2)] == [0.5, 1.5]
    if not status.live:
        assert "'hostile_turns:Deeds', task 7, rollout 1" in pool.errors()[-1]


def test_a_failing_reset_and_a_turn_too_many_name_environment_and_task(pool):
    assert scores_of(pool, ["good"], answer="reset").statuses == (Status.ERROR,)
    assert "KeyError: 'no reset'" in pool.errors()[-1]
    assert scores_of(pool, ["end", "good"]).statuses == (Status.ERROR,)
    assert "environment 'hostile_turns:Deeds', task 7, turn 2: the episode was over" in pool.errors()[-1]
    pool.submit(2, task(), ["good"])  # not what turns_text writes
    (scores,) = pool.wait(10.0)
    assert scores.statuses == (Status.ERROR,)
    assert "environment 'hostile_turns:Deeds', task 7 judges turns" in pool.errors()[-1]


def test_an_episode_goes_on_in_the_next_worker_after_a_death(pool, tmp_path):
    scores = scores_of(pool, ["good x", f"once {tmp_path / 'died'}", "good y"])
    assert scores.statuses == (Status.OK,)
    assert scores.rewards[0].score == 1.5
    assert scores.rewards[0].info["observation"] == f"good x|once {tmp_path / 'died'}|good y"


def test_hostile_turns_reach_the_environment_as_they_are(pool):
    turns = ["good \ud800", 'good "]', "good \0\n", "good " + "x" * 1_000]
    observation = scores_of(pool, turns).rewards[0].info["observation"]
    assert observation == "|".join(turns)
    too_long = scores_of(pool, ["good " + "x" * 5_000])
    assert too_long.statuses == (Status.ERROR,)
    assert "observation of 5005 characters" in pool.errors()[-1]


def test_the_built_in_environment_in_a_worker(pool):
    scores = scores_of(pool, ["[1+2]"], ["[1+2]", "3"], ["4"], source="sums", answer="3")
    assert [reward.score for reward in scores.rewards] == [0.0, 1.0, 0.0]
    assert [reward.info["observation"] for reward in scores.rewards] == ["3;", "", ""]
