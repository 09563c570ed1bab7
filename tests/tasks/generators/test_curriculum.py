"""The curriculum against simulated policies: a pass rate that falls with the level, and a half point that moves."""

import json
from typing import Any

import numpy as np
import pytest

from dynrl.tasks.base import task_hash
from dynrl.tasks.generators.base import Cancelled, GeneratorContext
from dynrl.tasks.generators.curriculum import ProceduralCurriculum
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.procedural import Arithmetic, DigitSorting
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore
from dynrl.tasks.store_base import GivenTasks
from dynrl.types import Outcome, Verdict

GROUP = 8


def asked(source, outcomes=None, step=0, max_tasks=1_000):
    unused: Any = None
    rng = np.random.default_rng([11, step])
    outcomes = (outcomes or TaskOutcomes()).snapshot()
    store = TaskStore(source, 0, 1).view(1)
    return GeneratorContext(step, step, rng, outcomes, store, source, max_tasks, unused, unused)


class Simulation:
    """A policy that passes a level as often as a logistic curve says, and a run that trains on what is proposed.

    Each step judges 32 groups of 8: half of the source's own tasks, half of the newest proposals.
    """

    def __init__(self, source, curriculum, width=1.0):
        self.source, self.curriculum, self.width = source, curriculum, width
        self.outcomes, self.rng, self.step = TaskOutcomes(decay=0.9), np.random.default_rng(3), 0
        self.tasks = []
        ladder = list(source.reachable_levels()[:100])
        self.position = {level: at for at, level in enumerate(ladder)}

    def run(self, half, num_steps):
        """Trains at a half point, a position on the ladder; returns the mean position of the last 10 calls' tasks."""
        means = []
        for _ in range(num_steps):
            base = [self.source.task(0, int(i)) for i in self.rng.integers(10**6, size=16)]
            newest = self.rng.choice(len(self.tasks), 16).tolist() if self.tasks else []
            for task in [*base, *(self.tasks[i] for i in newest)]:
                rate = 1 / (1 + np.exp((self.position[task.level] - half) / self.width))
                passed = int(self.rng.binomial(GROUP, rate))
                outcome = Outcome(0, 0, Verdict.KEPT, GROUP, passed, passed / GROUP, self.step, task.source, task.level)
                self.outcomes.observe(outcome)
            self.tasks = self.curriculum.propose(asked(self.source, self.outcomes, self.step))
            means.append(np.mean([self.position[task.level] for task in self.tasks]))
            self.step += 1
        return np.mean(means[-10:])


@pytest.mark.parametrize("source", [DigitSorting(), DigitSorting(4, 5), Arithmetic()], ids=repr)
@pytest.mark.parametrize("width", [0.5, 1.0])
def test_the_mean_level_follows_the_half_point(source, width):
    simulation = Simulation(source, ProceduralCurriculum(), width)
    for half in (3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0):
        assert abs(simulation.run(half, 20) - half) <= 1.0, half


def test_the_mean_level_follows_a_jump():
    simulation = Simulation(DigitSorting(), ProceduralCurriculum())
    for half in (3.0, 10.0, 3.0):
        assert abs(simulation.run(half, 40) - half) <= 1.0, half


def test_another_target_is_another_level():
    """At a width of one level a pass rate of 1/4 lies log(3) = 1.1 levels above the half point, one of 3/4 below."""
    means = [Simulation(DigitSorting(), ProceduralCurriculum(target=t, floor=0.02)).run(6.0, 40) for t in (0.25, 0.75)]
    assert 6.5 < means[0] < 8.0
    assert 4.0 < means[1] < 5.5


def test_a_policy_that_fails_at_everything_ends_at_the_easiest_level():
    simulation = Simulation(DigitSorting(4, 8), ProceduralCurriculum(num_tasks=8))
    assert simulation.run(-20.0, 40) < 1.0
    assert max(task.level for task in simulation.tasks) <= 8  # nothing harder than the source's own


def test_a_policy_that_passes_everything_ends_at_the_hardest_level_that_fits():
    simulation = Simulation(DigitSorting(2, 4), ProceduralCurriculum(max_prompt_chars=10))
    assert simulation.run(90.0, 40) > 7.0  # nine digits and the delimiter fit: position 8
    assert {task.level for task in simulation.tasks} <= set(range(2, 10))
    countdown = make_source("countdown", max_numbers=3)  # the ladder has 2, 3, 4 and 5 numbers
    assert Simulation(countdown, ProceduralCurriculum()).run(90.0, 40) > 2.3


def test_without_a_bound_it_moves_no_further_than_one_level_beyond_what_was_tried():
    outcomes = TaskOutcomes()
    for level in (2, 3):
        outcomes.observe(Outcome(0, 0, Verdict.FILTERED, 800, 800, 1.0, 0, "digit_sorting", level))
    for _ in range(5):  # the outcomes of longer prompts never come: admission refused them
        tasks = ProceduralCurriculum().propose(asked(DigitSorting(2, 3), outcomes))
        assert max(task.level for task in tasks) == 4


def test_tasks_are_fresh_distinct_and_nobodys_elses():
    curriculum = ProceduralCurriculum(num_tasks=50)
    source = DigitSorting(6, 8)
    seen = [curriculum.propose(asked(source, step=step)) for step in range(4)]
    tasks = [task for each in seen for task in each]
    assert [len(each) for each in seen] == [50] * 4
    assert all((task.task_id, task.parents, task.source) == (-1, (), "digit_sorting") for task in tasks)
    assert len({task_hash(task.prompt) for task in tasks}) == 200
    assert TaskStore(source, 0, 5).append(tasks) == range(5, 205)
    others = {source.task(seed, i).prompt for seed in (0, 1, 20_000_000) for i in range(300)}
    assert not others & {task.prompt for task in tasks if task.level >= 8}
    assert curriculum.state_dict() == {"next_index": 200}
    another = ProceduralCurriculum(num_tasks=50, seed=1).propose(asked(source))
    assert not {task.prompt for task in another} & {task.prompt for task in seen[0]}
    assert len(curriculum.propose(asked(source, max_tasks=7))) == 7
    assert curriculum.propose(asked(source, max_tasks=0)) == []


def test_a_level_with_few_tasks_gives_what_it_has_and_others_the_rest():
    source = DigitSorting(1, 1, 2)  # two prompts of one digit, four of two
    tasks = ProceduralCurriculum(num_tasks=6).propose(asked(source))
    assert len({task.prompt for task in tasks}) == len(tasks) == 6
    assert ProceduralCurriculum(num_tasks=10, max_prompt_chars=1).propose(asked(source)) == []
    assert len(ProceduralCurriculum(num_tasks=10, max_prompt_chars=2).propose(asked(source))) == 2


def test_restored_anywhere_it_goes_on_as_before():
    source, outcomes = DigitSorting(), TaskOutcomes(0.9)
    curriculum, proposed, states = ProceduralCurriculum(num_tasks=9), [], []
    for step in range(6):
        states.append(json.loads(json.dumps(curriculum.state_dict())))
        proposed.append(curriculum.propose(asked(source, outcomes, step)))
        for task in proposed[-1]:
            passed = 8 if task.level < 5 + step else 0
            outcomes.observe(Outcome(0, 0, Verdict.KEPT, 8, passed, passed / 8, step, task.source, task.level))
    for start, state in enumerate(states):
        again, outcomes = ProceduralCurriculum(num_tasks=9), TaskOutcomes(0.9)
        for step, tasks in enumerate(proposed):
            if step == start:
                again.load_state_dict(state)
            if step >= start:
                assert again.propose(asked(source, outcomes, step)) == tasks
            for task in tasks:
                passed = 8 if task.level < 5 + step else 0
                outcomes.observe(Outcome(0, 0, Verdict.KEPT, 8, passed, passed / 8, step, task.source, task.level))


def test_when_nobody_waits_any_more_nothing_has_changed():
    curriculum = ProceduralCurriculum()
    context = asked(DigitSorting())
    context.cancelled.set()
    with pytest.raises(Cancelled):
        curriculum.propose(context)
    assert curriculum.state_dict() == {"next_index": 0}


def test_the_sources_of_a_mixture_move_apart_and_keep_their_shares(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "p", "answer": "a"}\n')
    entries = [
        {"name": "digit_sorting", "weight": 3},
        {"name": "arithmetic", "weight": 1},
        {"name": "jsonl", "weight": 4, "kwargs": {"path": str(rows)}},
    ]
    mixture = make_source("mixture", sources=[{"name": "mixture", "kwargs": {"sources": entries}}])
    outcomes = TaskOutcomes()
    for level in DigitSorting().levels:
        outcomes.observe(Outcome(0, 0, Verdict.FILTERED, 80, 80, 1.0, 0, "digit_sorting", level))
    for level in Arithmetic().levels:
        outcomes.observe(Outcome(0, 0, Verdict.FILTERED, 80, 0, 0.0, 0, "arithmetic", level))
    tasks = ProceduralCurriculum(num_tasks=80).propose(asked(mixture, outcomes))
    levels = {name: [task.level for task in tasks if task.source == name] for name in ("digit_sorting", "arithmetic")}
    assert (len(levels["digit_sorting"]), len(levels["arithmetic"])) == (60, 20)
    assert np.mean(levels["digit_sorting"]) > 10
    assert levels["arithmetic"].count(12) > 10


def test_reasoning_gym_moves_along_its_curriculum():
    pytest.importorskip("reasoning_gym")
    source = make_source("reasoning_gym", generator="gcd", difficulty=1)
    simulation = Simulation(source, ProceduralCurriculum(num_tasks=12))
    assert simulation.run(90.0, 12) > 2.4
    assert {task.source for task in simulation.tasks} == {"reasoning_gym/gcd"}
    assert len({task.prompt for task in simulation.tasks}) == 12
    assert simulation.run(-90.0, 25) < 0.6


def test_sources_without_levels_of_choice_say_why():
    pytest.importorskip("reasoning_gym")
    entries = [{"name": "reasoning_gym", "kwargs": {"generator": name}} for name in ("acre", "gcd")]
    with pytest.raises(ValueError, match=r"procedural_curriculum: no source .*acre has no curriculum.*gcd: with diff"):
        ProceduralCurriculum().propose(asked(make_source("mixture", sources=entries)))
    given = GivenTasks((DigitSorting().task(0, 0),))
    with pytest.raises(ValueError, match="given_tasks has no levels to choose from"):
        ProceduralCurriculum().propose(asked(given))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_tasks": 0}, "num_tasks must be at least 1, got 0"),
        ({"target": 1.0}, r"target must lie in \(0, 1\), got 1.0"),
        ({"floor": 0.0}, r"floor must lie in \(0, 1\], got 0.0"),
        ({"half_life_versions": 0}, "half_life_versions must be positive, got 0"),
        ({"half_life_versions": float("nan")}, "half_life_versions must be positive, got nan"),
        ({"max_prompt_chars": 0}, "max_prompt_chars must be positive, got 0"),
        ({"seed": 2**32}, r"seed must lie in \[0, 2\*\*32\), got 4294967296"),
    ],
)
def test_impossible_arguments(kwargs, message):
    with pytest.raises(ValueError, match=f"procedural_curriculum: {message}"):
        ProceduralCurriculum(**kwargs)
