"""GSM8K: the format of its references, and the whole data set where it lies beside the repository."""

import json
import os
from pathlib import Path

import pytest

from dynrl.tasks.gsm8k import gsm8k
from dynrl.tasks.rewards import Unparsable
from dynrl.tasks.sources import make_source
from dynrl.tasks.verifiers import Verifiers
from dynrl.types import Status, Task

# Four references as the data set has them: calculator marks, thousands, a negative number, dollars.
SAMPLE = [
    ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips.\n#### 72", "72"),
    ("The total is $250,000 x 30% = $<<250000*.01*30=75000>>75,000.\n#### 75,000", "75000"),
    ("It fell by 10 - 15 = <<10-15=-5>>-5 degrees.\n#### -5", "-5"),
    ("Each costs $12/60 = $<<12/60=0.2>>0.2.\n#### 10", "10.0"),
]


def folder() -> Path | None:
    """$DYNRL_DATA/gsm8k, or shared/data/gsm8k in the repository or beside it."""
    root = Path(__file__).parents[2]
    named = [Path(os.environ["DYNRL_DATA"])] if "DYNRL_DATA" in os.environ else []
    places = [place / "gsm8k" for place in (*named, root / "shared/data", root.parent / "shared/data")]
    return next((place for place in places if (place / "train.jsonl").exists()), None)


def task(answer: str) -> Task:
    return Task(7, "gsm8k", "p", answer)


@pytest.mark.parametrize(("reference", "value"), SAMPLE)
def test_references_score_1_against_themselves_and_their_value(reference, value):
    for text in (reference, f"#### {value}", f"The answer is {value}.", value, f"#### {value} clips", f"${value}"):
        assert gsm8k(task(reference), text).score == 1.0
    assert gsm8k(task(reference), f"#### {value}1").score == 0.0


@pytest.mark.parametrize(
    ("reference", "text", "score"),
    [
        ("#### 1,234", "#### 1234.00", 1.0),
        ("#### 1234", "#### $1,234.", 1.0),
        ("#### 1234", "####1234", 1.0),
        ("#### 1234", "#### 1.234", 0.0),
        ("#### 50", "#### 50%", 1.0),  # what follows the number is its unit
        ("#### 5", "#### 1 #### 5", 1.0),
        ("#### 1", "#### 1 #### 5", 0.0),
        ("#### 5", "so 5 ####", 1.0),  # cut off
        ("#### 5", "#### \n5", 1.0),
        ("#### 5", "5 and then 6", 0.0),
        ("#### 5", "#### 5 and then 6", 1.0),
        ("#### 5", "#### is it 5?", 1.0),
        ("#### -5", "#### 5", 0.0),
        ("#### 5", "10-5", 1.0),
        ("#### 1", "#### 1e3", 0.0),
        ("#### 1000", "#### 1e3", 1.0),
        ("#### 0.1", "0.1000", 1.0),
        ("7", "7", 1.0),
    ],
)
def test_numbers_are_compared_exactly(reference, text, score):
    assert gsm8k(task(reference), text).score == score


@pytest.mark.parametrize("text", ["", "none", "####", "#### 12/3", "#### " + "9" * 2_000, "٣", "#### seven"])
def test_completions_without_a_number_are_unparsable(text):
    with pytest.raises(Unparsable):
        gsm8k(task("#### 3"), text)


def test_a_reference_without_a_number_is_an_error_that_names_the_task():
    with pytest.raises(ValueError, match="task 7: there is no number in the answer 'seven'") as caught:
        gsm8k(task("seven"), "7")
    assert not isinstance(caught.value, Unparsable)


@pytest.mark.skipif(folder() is None, reason="the data set is not there")
@pytest.mark.parametrize(("split", "num_rows"), [("train", 7_473), ("test", 1_319)])
def test_every_reference_of_the_data_set_scores_1_through_the_pool(split, num_rows):
    place = folder()
    assert place is not None
    source = make_source(
        "jsonl", path=str(place / f"{split}.jsonl"), prompt="Question: {question}\nAnswer:", source="gsm8k",
        verifier="gsm8k",
    )  # fmt: skip
    assert source.num_tasks == num_rows
    tasks = [source.task(0, index) for index in range(num_rows)]
    with (place / f"{split}.jsonl").open() as file:
        references = [json.loads(line)["answer"] for line in file]
    with Verifiers(source.verifiers) as verifiers:
        for ticket, (each, reference) in enumerate(zip(tasks, references, strict=True)):
            value = reference.rpartition("####")[2].strip()
            verifiers.submit(ticket, each, [reference, f"The answer is {value}.", f"#### {value}0"])
        found = {}
        while verifiers.num_pending:
            found.update({scores.ticket: scores for scores in verifiers.wait(5.0)})
    assert len(found) == num_rows
    expected = [1.0, 1.0, 0.0]
    for ticket, scores in found.items():
        zero = references[ticket].endswith("#### 0")  # "00" is 0 too
        assert scores.statuses == (Status.OK,) * 3
        assert [reward.score for reward in scores.rewards] == ([1.0] * 3 if zero else expected), references[ticket]
