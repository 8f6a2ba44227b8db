"""Tests of coherence: each part on texts made for it, and on published solutions; shares were counted by hand."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rewards.builtin.coherence import (
    MAX_CHARACTERS,
    Coherence,
    checked_claims,
    distinct_share,
    overlap_share,
)
from tests.builders import examples, make_trajectory, step
from tests.paths import GSM8K
from tests.rewards import trajectories
from tests.rewards.trajectories import load

ROWS = [json.loads(line) for line in (GSM8K).open(encoding="utf8")]
TASK = "A farm has 12 cows and 30 sheep. How many animals are there?"


def score(response: str, task: str = TASK, **args: float):
    trajectory = make_trajectory("a", [step("planner", response=response)], task=task)
    return Coherence(**args)(trajectory.steps[0], trajectory)


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("a b c d e", 4, 1.0),  # abcd, bcde
        ("a b a b a b", 2, 2 / 5),  # ab, ba of ab, ba, ab, ba, ab
        ("go go go go go", 4, 1 / 2),
        ("Go GO", 1, 1 / 2),
        ("one two", 4, 1.0),
        ("", 4, 1.0),
    ],
)
def test_repetition_is_the_share_of_distinct_n_grams(text, n, expected):
    assert distinct_share(text, n) == pytest.approx(expected)


def test_published_solutions_rarely_repeat_or_err():
    shares = [distinct_share(row["answer"], 4) for row in ROWS]
    assert min(shares) > 0.75
    assert sum(shares) / len(shares) > 0.9
    claims = [claim for row in ROWS for claim in checked_claims(row["answer"])]
    assert len(claims) > 150
    assert all(claim.holds for claim in claims)


def test_published_solutions_overlap_most_with_their_task():
    for row, other in zip(ROWS, ROWS[1:] + ROWS[:1], strict=True):
        own = overlap_share(row["answer"], row["question"])
        assert own > overlap_share(row["answer"], other["question"])


@pytest.mark.parametrize(
    ("text", "false"),
    [
        ("2+2=5", ["2+2=5"]),
        ("So 48/2 = 24, and 24+48=71.", ["24+48=71"]),
        ("She pays $12 x 3 = $35.", ["12*3=35"]),
        ("(3 + 4) * 2 = 15", ["(3+4)*2=15"]),
    ],
)
def test_wrong_calculations_are_found(text, false):
    assert [claim.text for claim in checked_claims(text) if not claim.holds] == false


@pytest.mark.parametrize(
    "text",
    [
        "10/3 = 3.33 and 2/3 = 0.667",  # rounded
        "2y + 3 + 4 = 13 and 3x - 2 = 7 and x^2 + 3 + 1 = 8",  # equations to be solved
        "20% of 50 + 5 = 15; half of 48 + 2 = 26",  # begin before the numbers shown
        "There are 60 students x 2/3 = 40 students",
        "2 liters * 20% = .4 liters",
        "2 + 3 = 10/2, 1/2 = 50%, 6 + 1 = 7!/720",  # end after the number
        "7/2 = 3 remainder 1",
        "1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1 = 12",  # longer than is read
        "10 mod 3 + 1 = 2",
    ],
)
def test_honest_work_is_not_wrong(text):
    assert [claim.text for claim in checked_claims(text) if not claim.holds] == []


def test_overlap_counts_numbers_and_words_of_the_task():
    # the task's words of four letters and more: farm cows sheep many animals there
    assert overlap_share("Add the 12 cows and the 30 sheep.", TASK) == pytest.approx((2 / 2 + 2 / 6) / 2)
    assert overlap_share("Add 12 to something.", TASK) == pytest.approx((1 / 2 + 0) / 2)
    assert overlap_share("Count every ANIMAL.", TASK) == pytest.approx((0 + 1 / 6) / 2)
    assert overlap_share("Anything", "Why?") is None


def test_score_is_the_weighted_mean_and_lists_its_parts():
    scored = score("Add 12 to 30: 12+30=43", repetition=1.0, numbers=2.0, overlap=1.0)
    # add 12 to 30 : 12 + 30 = 43: all 4-grams differ; the one claim is false; both numbers, none of six words
    assert scored.value == pytest.approx((1.0 * 1 + 2.0 * 0 + 1.0 * 0.5) / 4)
    assert scored.reason == "repetition 1.00, numbers 0.00, overlap 0.50 (12+30=43)"


def test_parts_without_weight_or_content_are_left_out():
    assert score("Add 12 to 30: 12+30=43", numbers=0.0, overlap=0.0).value == 1.0
    assert score("Because.", task="Why?").value == 1.0
    assert score("Because.", task="Why?", repetition=0.0, numbers=0.0).value == 1.0


def test_empty_response_scores_zero():
    assert (score(" \n").value, score("").reason) == (0.0, "an empty response")


def test_recipe_scores_steps_with_coherence():
    trajectory = make_trajectory("a", [step("planner", response="2+2=4"), step("planner", response="2+2=5")], task=TASK)
    trajectories.score([load("coherence", args={"overlap": 0.0})], [trajectory])
    assert [s.scores["coherence"].value for s in trajectory.steps] == [1.0, 0.5]


@examples(150)
@given(st.text(max_size=200) | st.text(alphabet="x=12.+-*/()$% \n\u00d7\u00b2{}\\<>,;'", max_size=120))
def test_any_response_scores_within_the_range(text):
    assert 0.0 <= score(text).value <= 1.0
    assert 0.0 <= score("Add 12.", task=text).value <= 1.0


@pytest.mark.parametrize(
    "piece", ["x = 1. ", "1+1=2 ", "1 1 1 1 1 1=1 ", "word ", *"(-ax9= \u00e9", "9.", "x=", "1x", "e1"]
)
def test_hostile_text_is_scored_quickly(piece):
    start = time.process_time()
    for n in (MAX_CHARACTERS, 20 * MAX_CHARACTERS):
        score((piece * n)[:n])
    assert time.process_time() - start < 20  # quadratic time would be minutes for the longer text


def test_repeated_true_calculation_does_not_hide_a_false_one():
    assert [claim.holds for claim in checked_claims("1+1=2, " * 50 + "2+2=5.")] == [True, False]
