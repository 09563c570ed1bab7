"""Hostile completions through the pool: bounded time and memory, no false 1, and a pool that goes on afterwards."""

import contextlib
import random
import time
from pathlib import Path

import pytest

from dynrl.tasks.sources import make_source
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Scores, Task

GROUP = 8
NUM_TEXTS = 200  # for each of five verifiers
MEMORY_LIMIT_MB = 512
# Each costs a deadline and a new worker. The packages' parsers hang on towers of powers; dynrl's own never do.
MAX_TIMEOUTS = {"integer_match": 0, "gsm8k": 0, "countdown": 0, "math_verify": 20, "reasoning_gym": 12}

# Texts that a policy may come upon, by kind; none of them is a right answer to any task below.
TOWERS = [
    "9**9**9", "9^9^9^9", "9**9**9**9**9", r"\boxed{9^{9^{9^{9}}}}", "$9^{9^{9^9}}$", "2**(2**(2**(2**(2**2))))",
    "<answer>9**9**9</answer>", "<answer>(9**9)**(9**9)</answer>", r"\boxed{10^{10^{10}}}", r"$1000000!$",
    r"\boxed{\binom{10^9}{5\cdot10^8}}", r"\boxed{\sqrt[10^9]{2^{10^9}}}", "99999999**99999999 = 5",
]  # fmt: skip
NESTS = [
    r"\boxed{" + r"\frac{1}{" * 300 + "1" + "}" * 300 + "}",
    "$" + r"\sqrt{" * 500 + "2" + "}" * 500 + "$",
    "(" * 50_000,
    "(" * 5_000 + "1" + ")" * 5_000,
    "[" * 50_000 + "]" * 50_000,
    "{" * 50_000,
    r"\boxed{" * 20_000,
    "<answer>" * 50_000,
    "</answer>" * 50_000,
    "<answer>" + "[" * 9_000 + "</answer>",
    "<answer>" + "-" * 15_000 + "1</answer>",
    "<answer>" + "1+" * 9_000 + "1</answer>",
    "$" + "x_{" * 300 + "1" + "}" * 300 + "$",
    r"\left(" * 1_000 + "1" + r"\right)" * 1_000,
    "$" + "^{1" * 200 + "}" * 200 + "$",
]
CODE = [
    "__import__('os').system('touch TOUCHED')", "<answer>__import__('os').system('touch TOUCHED')</answer>",
    "exec(\"open('TOUCHED', 'w')\")", "[open('TOUCHED', 'w') for _ in (1,)]", "eval('2+2')", "(lambda: 5)()",
    "().__class__.__bases__[0].__subclasses__()", "1 if print(5) else 5", "import os; os._exit(0)", "exit()",
    "raise SystemExit", "while True: pass", "$(touch TOUCHED)", "`touch TOUCHED`", "; rm -rf TOUCHED",
    "<script>5</script>",
    r"\input{/etc/passwd}", r"\immediate\write18{touch TOUCHED}", "{{7*7}}", "${7*7}", "' OR 1=1 --",
    "open('TOUCHED','w')",
    "yaml.load('!!python/object/apply:os.system [touch TOUCHED]')", "[].append(5)", "assert 5", "*args", "@", "x := 5",
]  # fmt: skip
FORMATS = [
    "%s" * 1_000,
    "%n%n%n",
    "{0}" * 1_000,
    "{task}",
    "{0.__class__}",
    "%1000000000d",
    "{:>1000000000}",
    "\\x41",
    "\\u0031",
]
CHARACTERS = [
    "", " ", "\n" * 100_000, "\0", "4\0", "\0" * 100_000, "\ud800", "\udfff5", "\ud83d" * 1_000, "\x1b[2J",
    "\x08" * 1_000,
    "\x7f", "\u202e5", "\ufeff7", "\u200b6", "\N{ARABIC-INDIC DIGIT FIVE}", "\N{FULLWIDTH DIGIT SEVEN}",
    "\N{SUPERSCRIPT TWO}", "\N{VULGAR FRACTION ONE HALF}", "\N{ROMAN NUMERAL FIVE}", "\N{CIRCLED DIGIT SIX}",
    "\N{MATHEMATICAL BOLD DIGIT FIVE}", "\N{INFINITY}", "\N{PILE OF POO}" * 10_000, "e\u0301" * 10_000,
    "\u0300" * 50_000,
    "\r" * 10_000, "\t" * 10_000, "\x85", "\u2028" * 1_000, "\N{MINUS SIGN}3", "\N{EN DASH}3",
]  # fmt: skip
NUMBERS = [
    "9" * 5_000, "9" * 1_000_000, "-" + "9" * 5_000, "#### " + "9" * 5_000, "0." + "0" * 100_000 + "1", "1e999999999",
    "#### 1e999999999", "1e-999999999", r"\boxed{1e999999999}", "1" + "0" * 4_299, "nan", "inf", "-inf", "NaN", "1e400",
    "0x7fffffffffffffff", "1_000", "1,2,3,4", "--5", "+-5", "1/0", "0/0", r"\boxed{\frac{1}{0}}", "5/", "3.14.15", "1e",
    "e1",
    "<answer>1e999999999</answer>", "<answer>" + "9" * 19_000 + "</answer>", "1" * 9_999 + "/" + "1" * 9_999,
    "#### 12/3",
]  # fmt: skip
BOMBS = [
    "a" * 100_000 + "!", "aaaa " * 50_000, "1 " * 100_000, "1," * 100_000, ",1" * 100_000, "$" * 100_000, "$1" * 20_000,
    "1.1" * 50_000, "= " * 50_000, "answer is " * 20_000, "final answer is " * 20_000, "Answer: " * 30_000,
    "-" * 200_000, "1e" * 100_000, "####" * 50_000, "#### " * 50_000, "\\" * 200_000, "\\\\frac" * 20_000,
    r"\text{" * 20_000,
    r"\boxed" * 20_000, "and $x$ or $y$, " * 5_000, "x" * 5_000_000, "5 " * 2_000_000,
    "<answer> " * 100_000 + "</answer>",
    "+1" * 250, "1+" * 250, "(1)" * 160, "1*" * 249 + "1", "2 " * 5_000, "% " * 50_000, r"\% " * 30_000, "$x+$" * 5_000,
]  # fmt: skip


def hostile_texts(folder) -> list[str]:
    """NUM_TEXTS texts: all of the above, then random mixtures of their pieces."""
    texts = [*TOWERS, *NESTS, *CODE, *FORMATS, *CHARACTERS, *NUMBERS, *BOMBS]
    rng = random.Random(0)
    while len(texts) < NUM_TEXTS:
        texts.append(" ".join(rng.choice(texts)[:200] for _ in range(4)))
    assert len(texts) == NUM_TEXTS
    return [text.replace("TOUCHED", str(folder / "touched")) for text in texts]


# Scorers that evaluate the answer first: they meet the towers and the code.
GENERATORS = ("countdown", "simple_integration", "polynomial_multiplication", "string_insertion", "n_queens", "gcd")


def tasks_of(name) -> list[tuple[Task, str]]:
    """Tasks, each with a right answer that is not among the hostile ones."""
    if name == "countdown":
        task = make_source("countdown", min_numbers=4, max_number=97, max_target=400).task(3, 1)
        return [(task, task.answer)]
    if name == "reasoning_gym":
        made = [make_source("reasoning_gym", generator=generator).task(5, 0) for generator in GENERATORS]
        return [(task, task.answer) for task in made]
    answer = "#### 73,946" if name == "gsm8k" else "73946"
    return [(Task(1, name, "p", answer), answer)]


def collect(verifiers, timeout_secs) -> list[Scores]:
    found = []
    deadline = time.monotonic() + timeout_secs
    while verifiers.num_pending:
        assert time.monotonic() < deadline, f"{verifiers.num_pending} groups are not judged: {verifiers.counts()}"
        found += verifiers.wait(0.1)
        for kib in children_kib():
            assert kib < 1_200_000  # what a worker imports, and the limit on top
    return sorted(found)


def children_kib() -> list[int]:
    """The memory that each child process has ever taken, but for those that are still copies of this one."""
    found, own = [], Path("/proc/self/cmdline").read_bytes()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(OSError, IndexError):  # it may end at any moment
                kib = int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
                if Path(f"/proc/{pid}/cmdline").read_bytes() != own:
                    found.append(kib)
    return found


@pytest.mark.parametrize("name", ["integer_match", "gsm8k", "countdown", "math_verify", "reasoning_gym"])
def test_no_hostile_answer_passes_hangs_or_kills_the_pool(name, tmp_path, monkeypatch):
    if name in ("math_verify", "reasoning_gym"):
        pytest.importorskip(name)
        monkeypatch.setenv("PYTHONHASHSEED", "0")
    tasks, texts = tasks_of(name), hostile_texts(tmp_path)
    sources = {task.source: name for task, _ in tasks}
    with Verifiers(
        sources, num_workers=2, timeout_secs=0.5, max_attempts=2, memory_limit_mb=MEMORY_LIMIT_MB
    ) as verifiers:  # fmt: skip
        for ticket in range(NUM_TEXTS // GROUP):
            verifiers.submit(ticket, tasks[ticket % len(tasks)][0], texts[ticket * GROUP : (ticket + 1) * GROUP])
        for scores in collect(verifiers, 100.0):
            judged = texts[scores.ticket * GROUP : (scores.ticket + 1) * GROUP]
            for text, reward, status in zip(judged, scores.rewards, scores.statuses, strict=True):
                assert status.live, (text[:100], verifiers.errors())  # whatever it is, it is the answer's doing
                assert reward.score == 0.0, text[:100]
        assert verifiers.counts()["timeout"] <= MAX_TIMEOUTS[name]
        # A normal group right after is judged as ever.
        for ticket, (task, answer) in enumerate(tasks):
            verifiers.submit(ticket, task, [answer, "1", f"{answer}\n<answer>{answer}</answer>"])
        for scores in collect(verifiers, 30.0):
            right = [reward.score for reward in scores.rewards]
            assert right == [1.0, 0.0, 0.0 if name == "integer_match" else 1.0], tasks[scores.ticket]
    assert not (tmp_path / "touched").exists()
