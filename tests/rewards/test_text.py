import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest

from creditflow.rewards.builtin.math import math_verify
from creditflow.rewards.builtin.text import exact_match, numeric_match
from creditflow.rewards.support.answers import places
from creditflow.rewards.support.test_cases import read_tests
from creditflow.rewards.support.text import is_missing, numbers_in
from tests.rewards.trajectories import a_trajectory, load, score


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("It costs $1,080.50 now.", [1080.5]),
        ("-3, \u22124 and -$5", [-3.0, -4.0, -5.0]),
        ("10-5 and 10 - 5", [10.0, 5.0, 10.0, 5.0]),
        ("(2)-1", [2.0, 1.0]),
        (".25 of 1e-3", [0.25, 0.001]),
        ("1,000,000 but 1,08", [1e6, 1.0, 8.0]),
        ("\u0663 \u00b2 none", [3.0]),
        ("", []),
    ],
)
def test_numbers_in_common_notations_are_read(text, values):
    assert [number.value for number in numbers_in(text)] == values


def test_per_cent_sign_is_detected():
    assert [number.percent for number in numbers_in("50% and 50 % and 50\\% and 50")] == [True, True, True, False]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48+24=72\n#### 71\nno:\n#### 72\nDone. 5", "72"),
        ("#### 2. Add them\n48+24=72", "#### 2. Add them\n48+24=72"),
        ("#### Step 2: Check\n#### 72", "72"),
        ("#### Final answer\n\nThe answer is 72.", "72."),
        ("so #### Paris", "Paris"),
        ("\\boxed{5} #### 6", "5"),
        ("\\boxed{5} papers and $\\boxed{6}$", "5, 6"),
        ("\\boxed{5}. Then \\boxed{6}", "6"),
        ("\\boxed{}", ""),
        ("  72 ", "72"),
        ("####", "####"),
        ("<think>\n#### 3\n</think>\n#### 4", "4"),
        ("It is 3.</think>4", "4"),
        ("<think>It is 3", ""),
        ("tags such as <think> are 4", "tags such as <think> are 4"),
    ],
)
def test_first_place_of_an_answer(text, answer):
    assert next(places(text))[0] == answer


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("The answer is 72, since $48+24$ is.", ["72, since $48+24$ is.", "72, since $48+24$ is", "72", "48+24"]),
        ("We add $48+24$.", ["We add $48+24$.", "48+24"]),
        ("So 3/4 of 80 km", ["So 3/4 of 80 km", "80"]),
        ("So $x$ is 5", ["So $x$ is 5", "5"]),
    ],
)
def test_places_are_in_order(text, answers):
    assert [variant for variants in places(text) for variant in variants][: len(answers)] == answers


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("72", "72", 1.0),
        (" forty  two\n", "forty two", 1.0),
        ("72.0", "72", 0.0),
        ("Answer: b<|im_end|>", ["a", "b"], 1.0),
        ("B", "b", 0.0),
        ("", "72", 0.0),
        ("<answer>72</answer> or #### 71", "72", 1.0),
        ("#### 71", "72", 0.0),
        ("The answer is **Paris**.", "Paris", 1.0),
        ("**Answer:** New York", "New York", 1.0),
        ("It is \\boxed{Paris}, not London", "Paris", 1.0),
        ("Answer: ४२", "42", 1.0),
        ("72", 72.0, 1.0),
        ("72.5", 72.5, 1.0),
    ],
)
def test_exact_match(text, truth, expected):
    assert exact_match(text, truth) == expected
    assert exact_match("Paris", "PARIS", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("48 + 24 = 72", "72", 1.0),
        ("72 clips of 80", "72", 0.0),
        ("#### 72\nThat is 100 % sure.", "72", 1.0),
        ("$1,080.00", "1080", 1.0),
        ("-5", "5", 0.0),
        ("10-5", 5, 1.0),
        ("The area is 72 m^2.", "72", 1.0),
        ("50%", 0.5, 1.0),
        ("0.5", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("1e309", "1e310", 0.0),
        ("12 500", "500", 0.0),
        ("72.0000001", "72", 1.0),
        ("x = 2^{10}", "1024", 1.0),
        ("inf nan", "72", 0.0),
        ("<answer>72</answer> 80", "72", 1.0),
        ("3 shirts cost 3 * 150, so he has to pay Rs.450.", "450", 1.0),
        ("so its area is 15 m^2.", "12 m^2", 0.0),
        ("She drank 2 1/2 cups.", "0.5", 0.0),
        ("1/2", "0.5", 1.0),
        ("0.33", 1 / 3, 0.0),
        ("20000001", "20000000", 0.0),
        ("12345678901234567891", "12345678901234567890", 0.0),
        ("72", 72.0, 1.0),
        ("#### 2. Add them\n48+24=72", "72", 1.0),
        ("The answer is 72. I am 100% sure.", "72", 1.0),
        ("There are $5!$ ways", "120", 1.0),
        ("\uff11\uff0c\uff10\uff18\uff10\uff0e\uff15", "1080.5", 1.0),
        ("সুতরাং সে প্রতিদিন $১৮ আয় করে। উত্তর হল ১৮।", "18", 1.0),
        ("A is 5, so ১৮", "5", 0.0),
        ("A是5。所以共有18个。", "18", 1.0),
        ("\\boxed{{3 \\over 4}}", "4", 0.0),
        ("Total: \u20b91,00,000", "100000", 1.0),
        ("2,00,000", "1,00,000", 0.0),
        ("Answer: 3/4 \u2705", "4", 0.0),
        ("Answer: $\\frac{3}{4}$ \u2713", "3/4", 1.0),
        ("\\boxed{20\\%~\\text{loss}}", "\\frac15", 1.0),
    ],
)
def test_numeric_match(text, truth, expected):
    assert numeric_match(text, truth) == expected


def test_numeric_match_applies_rel_tol():
    assert numeric_match("0.33", 1 / 3, rel_tol=0.02) == 1.0
    with pytest.raises(ValueError, match="rel_tol of 0 or more and less than 1, got -1"):
        numeric_match("72", "72", rel_tol=-1)


def test_truth_without_a_number_raises():
    with pytest.raises(ValueError, match="expected a ground truth with a number in it, got 'Paris'"):
        numeric_match("72", "Paris")


@pytest.mark.parametrize("piece", ["1", "1,111", "-", "$", "1.", "1e", " ", "#", "%", "\\", "\\quad ", "\u2705 "])
def test_hostile_answer_is_read_quickly(piece):
    assert numeric_match(piece * 200_000, "3") == 0.0  # an expression that backtracks would take hours


MISSING = [None, math.nan, np.float32("nan"), np.array(None), Decimal("nan")]
MISSING += [[], {}, (), np.array([]), ["4", None], ["", "4"], [math.nan], "", " "]


@pytest.mark.parametrize("compare", [exact_match, numeric_match, math_verify, lambda text, truth: read_tests(truth)])
@pytest.mark.parametrize("truth", MISSING, ids=repr)
def test_missing_truth_raises(compare, truth):
    for text in ("4", str(truth), "None", "nan", ""):
        with pytest.raises(ValueError, match="expected"):
            compare(text, truth)


def test_pandas_missing_values_are_missing():
    pandas = pytest.importorskip("pandas")
    assert is_missing(pandas.NA)
    assert is_missing(pandas.NaT)
    with pytest.raises(ValueError, match="ground_truth: expected a value to compare with, got <NA>"):
        math_verify("<NA>", pandas.NA)


@pytest.mark.parametrize("truth", [0, False, 0.0, "null", "nan", "None", "N/A", ["4", "four"], np.array(["a", "b"])])
def test_values_are_not_missing(truth):
    assert not is_missing(truth)
    assert exact_match(str(truth if isinstance(truth, str | int | float) else truth[0]), truth) == 1.0


@pytest.mark.parametrize("compare", [exact_match, numeric_match, math_verify])
def test_one_of_several_truths_is_enough(compare):
    assert [compare(text, ["4", "5"]) for text in ("4", "5", "6")] == [1.0, 1.0, 0.0]
    assert compare("5", np.array([4, 5])) == 1.0


def test_missing_truth_is_a_failed_score():
    trajectory = a_trajectory(answer="None")
    trajectory.task = replace(trajectory.task, ground_truth=None)
    score([load("exact_match")], [trajectory])
    assert trajectory.outcome.status == "failed"
    assert "expected a value to compare with, got None" in trajectory.outcome.reason
