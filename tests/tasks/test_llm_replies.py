"""What a language model says: proposals read strictly, votes counted."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrl.tasks.generators.replies import bare, elected, normalized, parse_proposal

TEXTS = st.text(min_size=1).filter(str.strip)


@settings(deadline=None, max_examples=50)
@given(
    prompt=TEXTS, answer=TEXTS, fence=st.sampled_from(["{}", " {}\n", "```json\n{}\n```", "```\n{}```", "```json{}```"])
)
def test_a_proposal_comes_back_as_it_was_written(prompt, answer, fence):
    text = fence.replace("{}", json.dumps({"prompt": prompt, "answer": answer}))
    assert parse_proposal(text, needs_answer=True) == (prompt, answer)


def test_numbers_are_taken_as_they_are_written():
    assert parse_proposal('{"prompt": "p", "answer": 0.10}', True).answer == "0.10"
    assert parse_proposal('{"prompt": "p", "answer": -1e400}', True).answer == "-1e400"
    assert parse_proposal('{"prompt": "p", "answer": ' + "9" * 5000 + "}", True).answer == "9" * 5000


def test_an_answer_may_be_left_out_where_votes_decide():
    for text in ('{"prompt": "p"}', '{"prompt": "p", "answer": null}'):
        assert parse_proposal(text, needs_answer=False) == ("p", None)
        with pytest.raises(ValueError, match="prompt' and 'answer"):
            parse_proposal(text, needs_answer=True)


@pytest.mark.parametrize(
    "text",
    [
        "", "no JSON", "[]", "null", "{}", '"prompt"', '{"answer": "7"}', '{"prompt": "p", "answer": "7"} and more',
        'Here it is: {"prompt": "p", "answer": "7"}', '{"prompt": "p", "answer": "7", "why": "because"}',
        '{"prompt": " ", "answer": "7"}', '{"prompt": "p", "answer": ""}', '{"prompt": ["p"], "answer": "7"}',
        '{"prompt": "p", "answer": true}', '{"prompt": "p", "answer": NaN}', '{"prompt": "p", "answer": "7"',
        '{"prompt": "\\ud800", "answer": "7"}', '{"prompt": "p", "answer": "\\ud800"}', '{"a":' * 50_000, "```",
        "``````",
    ],
)  # fmt: skip
@pytest.mark.parametrize("needs_answer", [False, True])
def test_everything_else_is_malformed(text, needs_answer):
    with pytest.raises(ValueError, match=r"."):
        parse_proposal(text, needs_answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42 ", "42"), ("```\n42\n```", "42"), ("```text\n42\n```", "42"), ("<answer>42</answer>", "42"),
        (r"It is \boxed{42}", "42"), ("6 * 7 is 42\n#### 42", "42"), ("**42**", "42"), ('"a b"', "a b"),
        ("$x^2$", "x^2"), ("$5", "$5"), ("*", "*"), ("''", "''"), ("'*'", "*"),
    ],
)  # fmt: skip
def test_what_is_put_around_an_answer_is_no_part_of_it(text, answer):
    assert bare(text) == answer


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_unanimous_votes_confirm_any_text(text):
    answer = elected([text, f" {text}\n", text], 3, 1.0, None)
    assert (answer is None) == (not bare(text))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("1,234", "1234.0", True), ("$5", "5", True), ("42.", "42", True), ("0.1", "0.10", True), ("1e3", "1000", True),
        ("\uff14\uff12", "42", True), ("a  b", "a\nb", True), ("Paris.", "Paris", True), ("Paris", "paris", False),
        ("4", "42", False), ("1/2", "0.5", False), ("-4", "4", False),
    ],
)  # fmt: skip
def test_answers_are_compared_as_numbers_or_as_text(left, right, same):
    assert (normalized(left) == normalized(right)) is same


@pytest.mark.parametrize(
    ("votes", "min_share", "proposed", "answer"),
    [
        (["7", "7", "7", "7"], 1.0, None, "7"),
        (["7", "7", "7", "8"], 0.75, None, "7"),  # 3 of 4
        (["7", "7", "8", "8"], 0.75, None, None),  # 2 of 4
        (["7", "7", "7"], 0.75, None, "7"),  # the fourth never came
        (["7", "7"], 0.75, None, None),  # 2 of 4, though nobody disagrees
        ([], 0.75, None, None),
        (["7", "7.0", r"\boxed{7}", "8"], 0.75, "7", "7"),
        (["7", "7", "7", "7"], 0.75, "8", None),  # the majority contradicts the proposal
        (["7", "7", "7", "7"], 0.75, "3 + 4 = 7\n#### 7", "3 + 4 = 7\n#### 7"),  # kept in the form of the source
        (["<answer>a b</answer>", "a b", "a  b", "c"], 0.75, None, "a b"),
        (["\ud800", "\ud800", "\ud800", "\ud800"], 0.75, None, None),  # not a text
        (["```\n\n```"] * 4, 0.75, None, None),  # nothing in it
    ],
)
def test_a_majority_of_all_that_were_asked_decides(votes, min_share, proposed, answer):
    assert elected(votes, 4, min_share, proposed) == answer
