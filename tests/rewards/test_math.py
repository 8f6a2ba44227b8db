import contextlib
import gc
import json
import math
import signal
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rewards.builtin import math as module
from creditflow.rewards.builtin.math import math_verify
from creditflow.rewards.support.math_parsing import MAX_CHARACTERS, NotAnAnswerError, read
from tests.builders import examples
from tests.paths import GSM8K

SOLUTIONS = [json.loads(line)["answer"] for line in (GSM8K).open(encoding="utf8")]


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


def test_published_solutions_equal_only_their_own_answers():
    truths = [solution.rpartition("#### ")[2] for solution in SOLUTIONS]
    assert all(math_verify(solution, truth) == 1.0 for solution, truth in zip(SOLUTIONS, truths, strict=True))
    other = list(zip(SOLUTIONS, truths[1:], truths, strict=False))
    assert all(math_verify(solution, next_one) == float(next_one == own) for solution, next_one, own in other)


SLOW = r"\sin(\cos(" * 10 + "x" + "))" * 10
"""Formulas that are not refused, but that the library cannot simplify in seconds."""


def test_endless_answer_is_wrong():
    start = time.perf_counter()
    assert math_verify(SLOW, "x^2-1", seconds=0.3) == 0.0
    assert time.perf_counter() - start < 30  # it would take minutes


@pytest.mark.parametrize(
    "answer", ["9^{9^{9^9}}", "9^9^9^9", "[" * 900, "1000000000!", "((5!)!)!", "1e999999", "x^{99999}"]
)
def test_huge_numbers_are_refused_before_the_library(answer):
    with pytest.raises(NotAnAnswerError):
        read(answer)
    assert math_verify(answer, "x^2-1") == 0.0


@pytest.mark.parametrize("answer", ["x^{y^{z}}", "2^{2^{3}}", "e^{x^2}", "100!", "(x+1)^{10}", "7^{2024}", "((((1))))"])
def test_moderate_nesting_is_accepted(answer):
    read(answer)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_alarm_repeats_if_a_destructor_swallows_it():
    class Swallows:
        def __del__(self):
            end = time.monotonic() + 0.2
            while time.monotonic() < end:  # the first alarms ring in here
                pass

    def forever():
        Swallows()
        while True:
            pass

    with pytest.raises(module._TimeIsUpError), module._time_limit(0.05):
        forever()


def test_time_limit_restores_handler_timer_and_collector():
    def mine(signum, frame):
        raise AssertionError("rang early")

    old = signal.signal(signal.SIGALRM, mine)
    signal.setitimer(signal.ITIMER_REAL, 100.0)
    try:
        assert math_verify("x+1", "1+x") == 1.0
        assert math_verify(SLOW, "x^2-1", seconds=0.1) == 0.0
        assert signal.getsignal(signal.SIGALRM) is mine
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100.0
        assert gc.isenabled()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize("truth", ["\\frac{", "9^{9^{9^9}}", "71 = 72", "[" * 30, "\\boxed{}"])
def test_unreadable_truth_raises(truth):
    with pytest.raises(ValueError, match="expected a ground truth that can be read as mathematics"):
        math_verify("72", truth)


def test_truth_in_words_is_compared_as_words():
    assert [math_verify(text, "Monday") for text in ("monday.", "\\text{Monday}", "Tuesday", "$x$", "5")] == [
        1,
        1,
        0,
        0,
        0,
    ]


def test_time_limit_must_be_positive():
    with pytest.raises(ValueError, match="time limit of more than 0 seconds"):
        math_verify("1", "1", seconds=0)


def test_other_threads_compare_numbers_only():
    seen = []

    def work():
        seen.append(math_verify("#### 72", "72"))
        with pytest.raises(RuntimeError, match="main thread only"):
            math_verify("$x^2$", "72")
        seen.append("refused")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1.0, "refused"]


@given(st.fractions(max_denominator=10**6))
def test_all_spellings_of_a_fraction_are_equal(value):
    n, d = value.numerator, value.denominator
    ways = [f"{n}/{d}", f"\\frac{{{n}}}{{{d}}}", f"$\\dfrac{{{n}}}{{{d}}}$", f"{100 * n}/{d}\\%"]
    if n >= 0:
        ways.append(f"{n // d} {n % d}/{d}")
    assert [math_verify(way, f"{n}/{d}") for way in ways] == [1.0] * len(ways)
    assert math_verify(f"{n + 1}/{d}", f"{n}/{d}") == 0.0


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_separators_and_trailing_zeros_are_ignored(value, zeros):
    text = f"{value:,}" + ("." + "0" * zeros if zeros else "")
    assert math_verify(text, value) == 1.0
    assert math_verify(text, value + 1) == 0.0


@given(st.integers(1, 9999), st.integers(2, 9999), st.integers(1, 12))
def test_decimal_equals_a_fraction_from_six_digits_on(n, d, digits):
    value = Fraction(n, d)
    finite = (value * 10**40).denominator == 1
    cut = Fraction(math.floor(value * 10**digits), 10**digits)
    text = f"{cut.numerator * 10**digits // cut.denominator:0{digits + 1}d}"
    text = f"{text[:-digits]}.{text[-digits:]}"
    significant = len(text.replace(".", "").lstrip("0"))
    expected = cut == value or (not finite and significant >= 6)
    assert math_verify(text, f"{n}/{d}") == float(expected)


PIECES = [*"[({^!1x$=%-.&|\n\x00\ud800", "^{", r"\frac{", r"\boxed{", r"\text{", r"\sqrt{", r"\left"]
PIECES += [r"\begin{pmatrix}", "1,111", r"\$", r"\pm", r"\%", " or ", " cm", "answer is "]


@examples(200)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
def test_any_answer_gets_a_score(text):
    assert math_verify(text, "72", seconds=0.2) in (0.0, 1.0)
    assert math_verify(text, "\\{1,\\sqrt{2}\\}", seconds=0.2) in (0.0, 1.0)


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_is_read_quickly(piece):
    start = time.process_time()
    for n in (MAX_CHARACTERS, 100 * MAX_CHARACTERS):
        with contextlib.suppress(NotAnAnswerError):
            read((piece * n)[:n])
    assert time.process_time() - start < 60  # quadratic time would be minutes for the longer text
