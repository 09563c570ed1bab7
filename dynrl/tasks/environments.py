"""Environments: tasks that answer the policy, turn by turn. How one is written, and how its turns are judged.

    class Guess(Environment):
        stop_strings = ("?",)  # the policy's turn ends with one of them, or with its stop token

        def reset(self, task):
            self.answer = task.answer
            return ""

        def step(self, text):
            right = text.rstrip("?") == self.answer
            return Step("" if right else "no;", reward=float(right), done=right)

It is named where a verifier is: 'package.module:Guess'. It runs in the killable verifier workers, which hold no state:
a turn is judged by making a new environment and replaying all turns so far. So whatever happens to a worker, a process
or a run, the same texts meet the same environment; that is why an environment must be deterministic. The price: with n
turns, `step` runs n (n + 1) / 2 times, and the verifiers' deadline holds for the replay as a whole.

This module knows neither JAX nor the workers.
"""

import inspect
import json
import numbers
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dynrl.types import Reward, Status, Task

MAX_OBSERVATION_CHARS = 4_000  # what fits into a reward's `info` whole; a class may set itself a lower bound

# Paths, as of the built-in verifiers, among which these are too.
BUILT_IN_ENVIRONMENTS: dict[str, str] = {"calculator": "dynrl.tasks.calculator:Calculator"}

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200


class Step(NamedTuple):
    """What an environment answers to one turn.

    Attributes:
      observation: text that the policy sees next; it joins the completion, and is not trained on. Where the episode is
        over, nobody reads it.
      reward: of this turn; the episode's score is the sum over its turns.
      done: whether the episode is over.
      components: further named rewards of this turn, summed by name as well: of those the class declares.
    """

    observation: str
    reward: float
    done: bool
    components: Mapping[str, float] = {}


class Environment(ABC):
    """One episode with one task. The class is made without arguments, for every turn anew; see this module.

    It must be deterministic: the same task and texts give the same steps, in any process. What it raises is its own
    fault, and the rollout is dead; `dynrl.tasks.rewards.Unparsable` ends the rollout with score 0, as a missed
    deadline does. An episode that ends before it is done, since its tokens are spent, has the score so far.

    Attributes:
      stop_strings: a turn of the policy ends with the token that completes one of them in its text; the text keeps it.
      components: names of further rewards; each starts at 0.
      has_opening: whether `reset` may return text.
      max_observation_chars: bounds every observation; longer ones are an error. Samplers make room by it.
    """

    stop_strings: ClassVar[tuple[str, ...]] = ()
    components: ClassVar[tuple[str, ...]] = ()
    has_opening: ClassVar[bool] = False
    max_observation_chars: ClassVar[int] = MAX_OBSERVATION_CHARS

    @abstractmethod
    def reset(self, task: Task) -> str:
        """Begins the episode. Returns what the policy sees after the prompt; "" for nothing.

        It depends on the task alone, so all rollouts of a group see the same.
        """

    @abstractmethod
    def step(self, text: str) -> Step:
        """Takes in the policy's next turn: whatever it wrote since the last observation, of any length."""


def turns_text(turns: Sequence[str]) -> str:
    """Writes the turns so far, of one rollout, as the text that its verifier is given.

    Args:
      turns: the policy's texts in order, without observations; none to ask for the opening.
    """
    return json.dumps(list(turns))


def turn_result(reward: Reward, status: Status) -> tuple[str, bool]:
    """Reads a judged turn: the observation, and whether the rollout is over.

    It is over, too, where there is no observation: at every status but OK.
    """
    if status is not Status.OK:
        return "", True
    return reward.info["observation"], reward.info["done"]


class TurnVerifier:
    """Judges turns by replay: what an environment is to the verifier workers.

    Args:
      name: by which the environment was named, for messages.
      environment: a concrete subclass of `Environment`.

    Raises:
      TypeError, ValueError: saying what is wrong with the class.
    """

    def __init__(self, name: str, environment: type) -> None:
        self.name = name
        self.environment = _checked_class(name, environment)

    def __call__(self, task: Task, text: str) -> Reward:
        """Replays the turns of `turns_text` in a new environment.

        Returns:
          The sums of the rewards so far; `info` holds `observation` and `done`, of the last turn, or of `reset` where
          there was none.

        Raises:
          ValueError, TypeError: naming environment and task: the text is none of `turns_text`, a turn follows the one
            that was done, or the environment does not keep to its contract.
        """
        where = f"environment {self.name!r}, task {task.task_id}"
        turns = _turns(text, where)
        environment = self.environment()
        observation, done = _opening(environment, task, where), False
        score, components = 0.0, dict.fromkeys(self.environment.components, 0.0)
        for number, turn in enumerate(turns, 1):
            at = f"{where}, turn {number}"
            if done:
                raise ValueError(f"{at}: the episode was over with the turn before")
            step = environment.step(turn)
            observation, done = _checked_step(environment, step, at)
            score += as_float(step.reward, "reward", at)
            for name, value in step.components.items():
                if name not in components:
                    declared = ", ".join(components) or "none"
                    raise ValueError(f"{at}: component {name!r} is not among the class's `components`: {declared}")
                components[name] += as_float(value, f"component {name!r}", at)
        return Reward(score, components, {"observation": observation, "done": done})


def as_float(value: Any, what: str, where: str) -> float:
    """Returns a reward as a plain float; NaN and infinity pass.

    Raises:
      TypeError: it is not a number.
      ValueError: it is beyond the range of a float.
    """
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise TypeError(f"{where}: the {what} must be a number, got {type(value).__name__} {_REPR.repr(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{where}: the {what} is beyond the range of a float: {_REPR.repr(value)}") from error


def _checked_class(name: str, found: type) -> type[Environment]:
    where = f"environment {name!r}"
    if not issubclass(found, Environment):
        raise TypeError(f"{where}: a class that is named as a verifier must be a dynrl.tasks.environments.Environment")
    if inspect.isabstract(found):
        raise TypeError(f"{where} lacks the methods: {', '.join(sorted(found.__abstractmethods__))}")
    for key in ("stop_strings", "components"):
        value = getattr(found, key)
        if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
            raise TypeError(f"{where}: {key} must be a tuple of non-empty strings, got {_REPR.repr(value)}")
    limit = found.max_observation_chars
    if not 1 <= limit <= MAX_OBSERVATION_CHARS:
        raise ValueError(f"{where}: max_observation_chars must lie in 1 to {MAX_OBSERVATION_CHARS}, got {limit}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TypeError(f"{where} must be made without arguments: {error}") from error
    return found


def _turns(text: str, where: str) -> list[str]:
    try:
        turns = json.loads(text)
    except ValueError:  # a RecursionError is one of hostile text, and goes on as that
        turns = None
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{where} judges turns, a JSON list of texts (turns_text), got {_REPR.repr(text)}")
    return turns


def _opening(environment: Environment, task: Task, where: str) -> str:
    opening = _checked_text(environment, environment.reset(task), f"{where}: reset")
    if opening and not environment.has_opening:
        raise ValueError(f"{where}: reset returned {_REPR.repr(opening)}, but the class does not set has_opening")
    return opening


def _checked_step(environment: Environment, step: Any, where: str) -> tuple[str, bool]:
    if not isinstance(step, Step):
        raise TypeError(f"{where}: step returned {type(step).__name__} {_REPR.repr(step)}, not a Step")
    if not isinstance(step.done, (bool, np.bool_)):
        raise TypeError(f"{where}: done must be a bool, got {type(step.done).__name__} {_REPR.repr(step.done)}")
    if not isinstance(step.components, Mapping):
        raise TypeError(f"{where}: components must be a mapping, got {_REPR.repr(step.components)}")
    observation = _checked_text(environment, step.observation, f"{where}: step")
    if not (observation or step.done):
        raise ValueError(f"{where}: step returned an empty observation and done=False: the policy has nothing to go on")
    return observation, bool(step.done)


def _checked_text(environment: Environment, observation: Any, where: str) -> str:
    """A plain string: a subclass of it need not survive JSON as it is."""
    if not isinstance(observation, str):
        kind = type(observation).__name__
        raise TypeError(f"{where} returned an observation that is no string: {kind} {_REPR.repr(observation)}")
    limit = environment.max_observation_chars
    if len(observation) > limit:
        raise ValueError(
            f"{where} returned an observation of {len(observation)} characters, more than max_observation_chars = "
            f"{limit}"
        )
    return str(observation)
