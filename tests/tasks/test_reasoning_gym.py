"""The source and the verifier of reasoning-gym: all 105 generators."""

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dynrl.tasks.base import task_hash
from dynrl.tasks.rewards import Unparsable
from dynrl.tasks.sources import make_source
from dynrl.tasks.store import TaskStore, make_frozen
from dynrl.types import Task

pytest.importorskip("reasoning_gym")
from dynrl.tasks import reasoning_gym_entries as entries
from dynrl.tasks.reasoning_gym_entries import GENERATORS, HASH_ORDERED, curriculum_size, make_dataset, reasoning_gym

# The package knows no answer; its scorers judge what is given.
NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
# These take up to seconds for one item, or to score one: less at this level of their curriculum.
LEVEL_OF_SLOW = {
    "futoshiki": 2, "intermediate_integration": 1, "knight_swap": 1, "puzzle24": 1, "quantum_lock": 0,
    "sokoban": None, "sudoku": 0, "zebra_puzzles": 0,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def hash_seed():
    """As if it had been set: one process needs no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        yield


def source_of(generator, **kwargs) -> Any:
    return make_source("reasoning_gym", generator=generator, **kwargs)


def small_source(generator):
    return source_of(generator, difficulty=LEVEL_OF_SLOW.get(generator))


def score(task, text):
    try:
        return reasoning_gym(task, text).score
    except Unparsable:
        return 0.0


@pytest.mark.parametrize("difficulty", [0, (0, 2), {"num_terms": 1, "num_digits": 3}])
def test_kinds_are_known_without_making_an_item_where_the_difficulty_is_given(difficulty, monkeypatch):
    source = source_of("chain_sum", difficulty=difficulty)
    expected = [(task.source, task.level) for task in (source.task(1, index) for index in range(40))]
    monkeypatch.setattr(entries, "make_entry", None)
    assert [source.kind(1, index) for index in range(40)] == expected
    assert source_of("chain_sum").kind(1, 0) is None


def test_every_generator_gives_tasks_whose_answers_score_1():
    assert len(GENERATORS) == 105
    unsolved = set()
    for generator in sorted(GENERATORS):
        source = small_source(generator)
        num_tasks = 1 if generator in LEVEL_OF_SLOW else 3
        tasks = [source.task(7, index) for index in range(num_tasks)]
        assert [source.task(7, 0)] == tasks[:1], generator  # pure, also after other draws
        assert num_tasks == 1 or len({task.prompt for task in tasks}) > 1, generator
        for task in tasks:
            assert (task.source, task.task_id) == (f"reasoning_gym/{generator}", -1)
            assert json.loads(json.dumps(dict(task.metadata))) == task.metadata
            for attempt in range(2):  # scoring changes nothing that the next scoring sees
                if score(task, task.answer) != 1.0 or score(task, f"So <answer>{task.answer}</answer>") != 1.0:
                    unsolved.add(generator)
                    assert task.answer == "", (generator, attempt)
    assert unsolved == NO_ANSWER


def test_the_entry_that_travels_scores_as_the_one_that_was_made():
    """Also wrong answers: the metadata that scorers read must come through."""
    for generator in sorted(GENERATORS - set(LEVEL_OF_SLOW)):
        dataset = make_dataset(generator, {}, None)
        entry = entries.make_entry(generator, dataset, 123)
        metadata = {"generator": generator, "config": {}, "difficulty": None, "entry": entries.entry_text(entry)}
        task = Task(1, "s", entry["question"], "", metadata=metadata)
        gold = entry["answer"] or "1"
        for text in (gold, gold[: len(gold) // 2], gold + "1", gold[::-1], "0", "[[1, 2], [3]]", "x"):
            try:
                expected = float(dataset.score_answer(text.strip(), entry))
            except Exception:
                expected = 0.0
            try:
                partial = reasoning_gym(task, text).components["partial"]
            except Unparsable as error:
                partial = expected if "could be code" in str(error) else 0.0
            assert partial == expected, (generator, text)


@pytest.mark.parametrize(
    ("generator", "solution_key"),
    [("graph_color", "possible_answer"), ("rubiks_cube", "example_correct_answer")],
)
def test_scorers_judge_where_no_answer_is_known(generator, solution_key):
    source = source_of(generator)
    task = source.task(0, 0)
    entry = entries.make_entry(generator, make_dataset(generator, {}, None), 0)
    solution = entry["metadata"][solution_key]
    text = json.dumps(solution) if isinstance(solution, dict) else solution
    assert (task.prompt, task.answer) == (entry["question"], "")
    assert score(task, text) == 1.0
    assert score(task, "") == score(task, "wrong") == 0.0


def digests(generators):
    """What a start of Python makes of the generators' tasks."""
    found = {}
    for generator in generators:
        source = small_source(generator)
        text = repr([source.task(3, index) for index in range(2)])
        found[generator] = hashlib.sha256(text.encode()).hexdigest()
    return found


def digests_elsewhere(generators):
    code = "import json, sys, test_reasoning_gym as t; print(json.dumps(t.digests(sys.argv[1:])))"
    done = subprocess.run(
        [sys.executable, "-c", code, *generators],
        env={
            **os.environ,
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_other_processes_make_the_same_tasks():
    """One process has a random hash seed, and two have the same."""
    elsewhere = digests_elsewhere(sorted(GENERATORS - set(LEVEL_OF_SLOW)))
    ordered = HASH_ORDERED - set(LEVEL_OF_SLOW)
    assert elsewhere == digests(elsewhere.keys() - ordered) | digests_elsewhere(sorted(ordered))


def test_generators_that_depend_on_the_hash_seed_say_so(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED")
    for generator in HASH_ORDERED:
        with pytest.raises(ValueError, match=rf"{generator}.*set the environment variable PYTHONHASHSEED=0"):
            source_of(generator)


@pytest.mark.parametrize(
    "generator", ["gcd", "acre", "list_functions", "gsm_symbolic", "pool_matrix", "chain_sum", "survo"]
)
def test_seeds_share_nothing_but_true_duplicates(generator):
    """reasoning-gym's own seeds 0 and 1 share 99 of 100 items."""
    source = source_of(generator)
    seeds = (0, 1, 2, 10_000_000, 20_000_000)
    num_tasks = 60
    prompts = {seed: [source.task(seed, index).prompt for index in range(num_tasks)] for seed in seeds}
    counts = Counter(prompt for seed in seeds for prompt in prompts[seed])
    num_repeated = sum(count - 1 for count in counts.values())
    # What 300 independent draws repeat by chance; lists of a few small numbers may.
    assert num_repeated <= (12 if generator in ("chain_sum", "list_functions") else 3)


def test_no_two_draws_share_a_number(monkeypatch):
    """The number is all that tells items apart: seeds, draws of one task and indices never meet."""
    seen = []
    made = {"question": "q", "answer": "1", "metadata": {}}
    monkeypatch.setattr(entries, "make_entry", lambda generator, dataset, number: seen.append(number) or made)
    source = source_of("gcd")
    for seed in (0, 1, 2, 10_000_000, 20_000_000, 2**63):
        for index in (0, 1, 2, 499, 500, 2**32 - 1):
            with pytest.raises(ValueError, match="all 1001 draws"):
                source.task(seed, index, {task_hash("q")})
    assert len(seen) == len(set(seen)) == 6 * 6 * 1_001
    with pytest.raises(IndexError, match="reasoning_gym/gcd: the index must lie in"):
        source.task(0, 2**32)


def test_excluded_prompts_are_avoided_and_an_exhausted_generator_says_so():
    source = source_of("gcd", config={"max_value": 4})  # 16 prompts of two numbers
    evaluation = make_frozen(source, 1, 8)
    store = TaskStore(source, 1, 50, evaluation.hashes)
    assert not evaluation.hashes & {task_hash(task.prompt) for task in store.get(range(50))}
    with pytest.raises(ValueError, match=r"gave 16 distinct tasks of 17.*all 1001 draws.*fewer evaluation tasks"):
        make_frozen(source, 1, 17)


def test_failing_draws_are_drawn_again_and_then_reported(monkeypatch):
    calls = []

    def fails(generator, dataset, number):
        calls.append(number)
        if len(calls) % 3:
            raise RuntimeError("no item")
        return {"question": "q", "answer": "1", "metadata": {}}

    monkeypatch.setattr(entries, "make_entry", fails)
    source = source_of("gcd")
    assert source.task(0, 0).prompt == "q"
    monkeypatch.setattr(entries, "make_entry", lambda *args: 1 / 0)
    with pytest.raises(ValueError, match=r"reasoning_gym/gcd: 10 draws failed, the last with ZeroDivisionError"):
        source.task(0, 0)


def test_levels_come_from_the_curriculum():
    fixed = source_of("gcd", difficulty=2)
    assert fixed.levels == (2,)
    assert fixed.task(0, 0).level == 2
    mixed = source_of("gcd", difficulty=(0, 3))
    assert mixed.levels == (0, 3)
    tasks = [mixed.task(0, index) for index in range(60)]
    assert 15 < sum(task.level == 3 for task in tasks) < 45
    largest = {level: max(map(len, (t.prompt for t in tasks if t.level == level))) for level in (0, 3)}
    assert largest[0] < largest[3]
    named = source_of("gcd", difficulty={"num_terms": 3, "value": 0})
    assert named.levels == (3,)
    assert named.task(0, 0).prompt.count(",") == 4  # five numbers
    assert source_of("gcd").task(0, 0).level == 0
    assert source_of("bitwise_arithmetic").task(0, 0).level == 2  # the package's own default, a whole number
    assert source_of("bitwise_arithmetic").levels == (2,)
    assert source_of("gcd", config={"max_numbers": 5}, difficulty=0).task(0, 0).level == 0


def test_every_level_of_every_curriculum_works_or_is_refused_at_once():
    refused = set()
    for generator in sorted(GENERATORS - {"arc_agi", "group_anagrams", "figlet_font", "word_ladder", "codeio"}):
        for level in range(curriculum_size(generator)):
            try:
                make_dataset(generator, {}, level)
            except ValueError as error:
                refused.add((generator, level, f"generator {generator!r}" in str(error)))
    expected = [("caesar_cipher", 2), ("caesar_cipher", 3), ("knight_swap", 0), ("modulo_grid", 1), ("rubiks_cube", 4)]
    assert refused == {(*each, True) for each in expected}


def test_kwargs_rebuild_the_source():
    source = source_of("basic_arithmetic", config={"operators": ("+", "-"), "max_terms": 3}, difficulty=(0, 1))
    again = make_source("reasoning_gym", **json.loads(json.dumps(source.kwargs)))
    assert [again.task(5, i) for i in range(20)] == [source.task(5, i) for i in range(20)]
    assert source.verifiers == {"reasoning_gym/basic_arithmetic": "reasoning_gym"}
    assert source.num_tasks is None
    assert source.without(frozenset()) is source


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"generator": "gdc"}, r"unknown reasoning_gym generator 'gdc' \(did you mean 'gcd'"),
        ({"generator": "composite"}, "unknown reasoning_gym generator 'composite'"),
        ({"generator": "gcd", "config": {"max_valu": 9}}, r"'gcd' has no field 'max_valu' \(did you mean 'max_value'"),
        ({"generator": "gcd", "config": {"seed": 1}}, "has no field 'seed'"),
        ({"generator": "gcd", "config": {"min_value": 0}}, "min_value must be positive"),
        ({"generator": "gcd", "difficulty": 9}, "no level 9; its curriculum has 0 to 3"),
        ({"generator": "gcd", "difficulty": (0, 9)}, "no level 9"),
        ({"generator": "gcd", "difficulty": ()}, "difficulty is an empty sequence"),
        ({"generator": "gcd", "difficulty": {"valu": 1}}, r"no attribute 'valu' \(did you mean 'value'.*num_terms"),
        ({"generator": "gcd", "difficulty": {"value": 9}}, "Invalid level: 9"),
        ({"generator": "acre", "difficulty": 0}, "it has no curriculum"),
    ],
)
def test_wrong_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_source("reasoning_gym", **kwargs)


def judged(generator, answer, metadata, text):
    entry = {"question": "q", "answer": answer, "metadata": metadata}
    carried = {"generator": generator, "config": {}, "difficulty": None, "entry": entries.entry_text(entry)}
    return reasoning_gym(Task(1, "s", "q", answer, metadata=carried), text)


def test_partial_credit_does_not_pass():
    wrong = judged("chain_sum", "-4", {}, "-40")
    assert (wrong.score, round(wrong.components["partial"], 2)) == (0.0, 0.67)
    wrong = judged("gsm_symbolic", "12", {}, "13")
    assert (wrong.score, wrong.components["partial"]) == (0.0, 0.01)
    wrong = judged("countdown", "2*3", {"numbers": [2, 3], "target": 6}, "2+3")
    assert (wrong.score, wrong.components["partial"]) == (0.0, 0.05)
    right = judged("countdown", "2*3", {"numbers": [2, 3], "target": 6}, "<answer>3*2</answer>")
    assert (right.score, right.components["partial"]) == (1.0, 1.0)


def test_a_lower_threshold_accepts_partial_credit():
    metadata = {"generator": "chain_sum", "config": {}, "difficulty": None}
    task = Task(1, "s", "q", "-4", metadata={**metadata, "entry": repr({"answer": "-4", "metadata": {}})})
    assert reasoning_gym(task, "-40", threshold=0.6).score == 1.0
    assert reasoning_gym(task, "-400", threshold=0.6).score == 0.0


def test_answers_that_are_code_never_run(tmp_path):
    """Nine scorers of the package evaluate the answer."""
    generators = sorted(entries._EVALUATING | entries._SYMBOLIC)
    assert len(generators) == 9
    touched = tmp_path / "touched"
    codes = [
        f"__import__('os').system('touch {touched}')",
        f"open('{touched}', 'w')",
        f"exec(\"open(r'{touched}', 'w')\")",
        f"[open('{touched}', 'w')]",
        f"(lambda: open('{touched}', 'w'))()",
        f"getattr(x, 'subs')(open('{touched}', 'w'))",
        "x.__class__.__mro__",
        "Integral(x**2, x)",  # its derivative is the integrand: sympy would call it right
        "\N{MATHEMATICAL BOLD ITALIC SMALL O}pen(1)",
    ]
    for generator in generators:
        task = small_source(generator).task(0, 0)
        for code in codes:
            if "(" in code or generator in entries._SYMBOLIC:
                with pytest.raises(Unparsable, match="could be code"):
                    reasoning_gym(task, code)
    assert not touched.exists()


def test_answers_that_break_the_scorer_or_have_no_end_are_unparsable():
    task = source_of("prime_factorization").task(0, 0)
    with pytest.raises(Unparsable, match="the scorer raised ValueError"):
        reasoning_gym(task, "two times three")
    with pytest.raises(Unparsable, match="an answer of 50000 characters"):
        reasoning_gym(task, "1" * 50_000)
    assert reasoning_gym(task, "x" * 50_000 + f"<answer>{task.answer}</answer>").score == 1.0


@pytest.mark.parametrize("metadata", [{}, {"generator": "gcd"}, {"entry": "1 +"}])
def test_a_task_without_an_entry_is_an_error_that_names_it(metadata):
    whole = {"generator": "gcd", "config": {}, "difficulty": None, "entry": "{}"}
    task = Task(31, "s", "q", "1", metadata={**whole, **metadata} if "entry" in metadata else metadata)
    with pytest.raises(ValueError, match="task 31: its metadata hold no entry of reasoning-gym") as caught:
        reasoning_gym(task, "1")
    assert not isinstance(caught.value, Unparsable)


def test_global_random_state_and_stdout_are_left_alone(capsys):
    before = repr((random.getstate(), np.random.get_state()))  # noqa: NPY002
    for generator in ("list_functions", "pool_matrix", "rectangle_count"):
        source_of(generator).task(0, 0)
    assert repr((random.getstate(), np.random.get_state())) == before  # noqa: NPY002
    assert capsys.readouterr().out == ""


def test_without_the_package_the_error_has_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.delitem(sys.modules, "dynrl.tasks.reasoning_gym_entries")
    monkeypatch.delattr("dynrl.tasks.reasoning_gym_entries")
    with pytest.raises(ImportError, match=r"pip install 'dynrl\[tasks\]'"):
        source_of("gcd")


def test_levels_can_be_chosen():
    source = source_of("gcd", config={"max_numbers": 9}, difficulty=(0, 1))
    assert source.reachable_levels() == [0, 1, 2, 3]
    hardest = source.at_level(3)
    assert hardest.kwargs == {"generator": "gcd", "config": {"max_numbers": 9}, "difficulty": 3}
    assert (hardest.levels, hardest.task(0, 0).level, hardest.reachable_levels()) == ((3,), 3, [0, 1, 2, 3])
    # Of rubiks_cube's five levels its generator refuses the last.
    assert source_of("rubiks_cube", difficulty=1).reachable_levels() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"generator": "acre"}, "reasoning_gym/acre has no curriculum"),
        ({"generator": "gcd"}, "reasoning_gym/gcd: with difficulty None .*choose a difficulty such as 0"),
        ({"generator": "gcd", "difficulty": {"value": 1}}, r"gcd: with difficulty \{'value': 1\}"),
        (
            {"generator": "rubiks_cube", "difficulty": 0},
            "/rubiks_cube cannot write at level 4; it can at 0, 1, 2, 3$",
        ),
    ],
)
def test_levels_that_cannot_be_chosen_say_why(kwargs, message):
    with pytest.raises(ValueError, match=message):
        source_of(**kwargs).at_level(4)


def test_threads_make_the_tasks_that_one_thread_makes():
    """list_functions and simple_geometry draw from the interpreter's generator, pool_matrix from NumPy's."""
    sources = [source_of(name) for name in ("list_functions", "pool_matrix", "simple_geometry", "gcd")]

    def prompts(start):
        return [source.task(start, index).prompt for index in range(25) for source in sources]

    alone = [prompts(start) for start in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(prompts, range(4))) == alone
    finally:
        sys.setswitchinterval(interval)


def test_a_generator_prints_nothing_and_other_threads_do(monkeypatch, capsys):
    printed = threading.Thread(target=print, args=("from elsewhere",))

    def talks(self, index):
        print("from the generator")
        printed.start()
        printed.join()
        return {"question": "q", "answer": "1", "metadata": {}}

    source = source_of("gcd")
    monkeypatch.setattr(type(source._settings[0][1]), "__getitem__", talks)
    assert source.task(0, 0).prompt == "q"
    assert capsys.readouterr().out == "from elsewhere\n"
