import threading

import pytest

from creditflow.reward.math import math_verify


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("#### 72", "72", 1.0),
        ("48/2 = 24\n#### 24", "72", 0.0),
        ("#### 1,080", "1080", 1.0),
        ("\\$1,080.00", "1080", 1.0),
        ("#### $18", "18", 1.0),
        ("72.", 72, 1.0),
        ("$50\\%$", "0.5", 1.0),
        ("50%", "50", 1.0),
        ("-5", "5", 0.0),
        ("so it is 72 apples", "72", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("1/2", "\\frac{1}{2}", 1.0),
        ("$x^2 + 1$", "1 + x^2", 1.0),
        ("x^2 + 2", "1 + x^2", 0.0),
        ("(1, 2)", "(1,2)", 1.0),
        ("", "72", 0.0),
        ("\ufffd\x00 nothing", "72", 0.0),
    ],
)
def test_answers_equal_to_the_truth_score_one(text, truth, expected):
    assert math_verify(text, truth) == expected


@pytest.mark.parametrize(
    ("text", "truth"), [("72", "72"), ("72.0", "72"), ("-3", "3"), ("0.25", "0.25"), ("1,000", "1000"), ("7", "70")]
)
def test_plain_numbers_compared_here_agree_with_the_library(text, truth):
    from math_verify import parse, verify

    assert math_verify(text, truth) == float(verify(parse(truth), parse(text)))


def test_an_answer_that_takes_forever_is_a_wrong_answer():
    assert math_verify("$9^{9^{9^9}}$", "72", seconds=1) == 0.0


def test_a_truth_that_cannot_be_read_cannot_be_scored():
    with pytest.raises(ValueError, match="expected a ground truth that math-verify can read, got 'Monday'"):
        math_verify("$x$", "Monday")


def test_away_from_the_main_thread_it_compares_numbers_and_refuses_what_needs_a_time_limit():
    seen = []

    def work():
        seen.append(math_verify("#### 72", "72"))
        with pytest.raises(RuntimeError, match="main thread only"):
            math_verify("$9^{9^9}$", "72")
        seen.append("refused")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1.0, "refused"]
