r"""math_verify on pairs of answers, equal and not: tiny numbers, complex numbers, matrices, other scripts, boxes.

`tests/samples/math_pairs.jsonl` holds 200 pairs that were written by hand before the code, and
`tests/samples/math_public_pairs.jsonl` pairs after issues of math-verify (1, 14, 25, 26, 37, 41, 60, 64, 76), verl
(7274, 7440) and others.
"""

import asyncio
import gc
import json
import math
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Score
from creditflow.rewards import RewardManager
from creditflow.rewards.builtin.math import math_verify
from creditflow.rewards.support.mathematics import MAX_CHARACTERS, read
from creditflow.rewards.support.processor_time import processor_time_limit
from tests.builders import examples
from tests.paths import GSM8K, SAMPLES
from tests.rewards.trajectories import a_trajectory, load

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
        ("so it is 72 apples", "72", 1.0),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("1/2", "\\frac{1}{2}", 1.0),
        ("$x^2 + 1$", "1 + x^2", 1.0),
        ("x^2 + 2", "1 + x^2", 0.0),
        ("\ufffd\x00 nothing", "72", 0.0),
        ("72.0", "72", 1.0),
        ("-3", "3", 0.0),
        ("0.25", "0.25", 1.0),
        ("1,000", "1000", 1.0),
        ("7", "70", 0.0),
        ("monday.", "Monday", 1.0),
        ("\\text{Monday}", "Monday", 1.0),
        ("$x$", "Monday", 0.0),
        ("5", "Monday", 0.0),
    ],
)
def test_answers_equal_to_the_truth_score_one(text, truth, expected):
    assert math_verify(text, truth) == expected


def test_published_solutions_equal_only_their_own_answers():
    truths = [solution.rpartition("#### ")[2] for solution in SOLUTIONS]
    assert all(math_verify(solution, truth) == 1.0 for solution, truth in zip(SOLUTIONS, truths, strict=True))
    other = list(zip(SOLUTIONS, truths[1:], truths, strict=False))
    assert all(math_verify(solution, next_one) == float(next_one == own) for solution, next_one, own in other)


def pairs_in(name):
    return [json.loads(line) for line in (SAMPLES / name).open(encoding="utf8")]


OWN, PUBLIC = pairs_in("math_pairs.jsonl"), pairs_in("math_public_pairs.jsonl")
NOTATION = pairs_in("math_notation_pairs.jsonl")
TRUTHS = [pair for pair in OWN if pair["kind"] != "hostile" and pair["answer"] != "71 = 72"]
"""The pairs whose answer can be a truth."""
EXCHANGED = [{**pair, "answer": pair["truth"], "truth": pair["answer"]} for pair in TRUTHS]


@pytest.mark.parametrize(
    "pairs",
    [OWN, EXCHANGED, NOTATION, PUBLIC[::6], pytest.param(PUBLIC, marks=pytest.mark.slow)],
    ids=["own", "exchanged", "notation", "some public", "public"],
)
def test_pairs_score_as_wanted(pairs):
    scores = {(pair["answer"], pair["truth"]): float(pair["equal"]) for pair in pairs}
    results = {pair: math_verify(*pair, seconds=5) for pair in scores}
    assert {pair: 0.0 if isinstance(score, Score) else score for pair, score in results.items()} == scores


EITHER_WAY = [
    # small differences
    (r"[0, e^{-50}]", r"[0, e^{-51}]", 0),
    (r"(-\infty, \frac{\sqrt2}{2^{98}})", r"(-\infty, \frac{\sqrt3}{2^{98}})", 0),
    (r"(-\infty, \frac{\sqrt2}{2^{98}})", r"(-\infty, \frac{1}{\sqrt2 \cdot 2^{97}})", 1),
    (r"\{e^{-50}, 1\}", r"\{e^{-51}, 1\}", 0),
    (r"x = e^{-50}", r"x = e^{-51}", 0),
    (r"x > e^{-50}", r"x > e^{-51}", 0),
    (r"x = 10^{-250}", r"x = 10^{-251}", 0),
    (r"\begin{pmatrix} e^{-50} \\ 1 \end{pmatrix}", r"\begin{pmatrix} e^{-51} \\ 1 \end{pmatrix}", 0),
    (r"x + e^{-50}", r"x + e^{-51}", 0),
    (r"x + 2^{-98}", "x", 0),
    (r"\sqrt{1 + e^{-1000}}", "1", 0),
    (r"\frac{x}{2^{98}}", r"\frac{x}{2^{99}}", 0),
    (r"\frac{2x}{2^{98}}", r"\frac{x}{2^{97}}", 1),
    (r"(\sqrt2 + \sqrt3)^2", r"5 + 2\sqrt6", 1),
    (r"\sqrt{2 + \sqrt3}", r"\frac{\sqrt6 + \sqrt2}{2}", 1),
    # complex numbers, by value
    (r"e^{i\pi/2}", "i", 1),
    (r"e^{i\pi} + 5", "5", 0),
    (r"5 + 2^{-98}i", "5", 0),
    (r"\begin{pmatrix} i^2 & 2i \end{pmatrix}", r"\begin{pmatrix} -1 & (1+i)^2 \end{pmatrix}", 1),
    (r"\{1+i, 1-i\}", r"1 \pm i", 1),
    (r"|3+4i|", "5", 1),
    (r"z^2 + (1+i)^2", "z^2 + 2i", 1),
    (r"\sqrt{-4}", "-2i", 0),
    (r"\sum_{i=1}^{4} i", "10", 1),
    # matrices and systems, in their order
    (r"\begin{pmatrix}1\\,2\end{pmatrix}", r"\begin{pmatrix}12\end{pmatrix}", 0),
    (r"\begin{pmatrix}1\\,2\\;3\\:4\\ 5\end{pmatrix}", r"\begin{pmatrix}1\\2\\3\\4\\5\end{pmatrix}", 1),
    (r"\begin{pmatrix}1\\\,2\\[4pt]\;3\end{pmatrix}", r"\begin{pmatrix}1\\2\\3\end{pmatrix}", 1),
    (r"\\frac{1}{2}", "0.5", 1),
    (r"A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", 1),
    (r"2\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 4 \end{pmatrix}", 1),
    (
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}, \begin{pmatrix} 3 \\ 4 \end{pmatrix}",
        r"\left\{\begin{pmatrix}3\\4\end{pmatrix}, \begin{pmatrix}1\\2\end{pmatrix}\right\}",
        1,
    ),
    (r"\begin{pmatrix} x+1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1+x \\[4pt] 2 \end{pmatrix}", 1),
    (r"\begin{cases} y=2 \\ x=1 \end{cases}", r"x=1, y=2", 1),
    (r"\begin{cases} x=2 \\ y=1 \end{cases}", r"\begin{cases} x=1 \\ y=2 \end{cases}", 0),
    (r"(1,2),(3,4)", r"\{(3,4),(1,2)\}", 1),
    (r"(2,1),(3,4)", r"(1,2),(3,4)", 0),
]

ONE_WAY = [
    # inequalities, by their solutions
    ("x^2 < 4", "-2 < x < 2", 1),
    ("|x - 1| < 2", "-1 < x < 3", 1),
    ("x^3 > 8", "x > 2", 1),
    (r"\ln x > 0", "x > 1", 1),
    ("x(x - 2) < 0", "0 < x < 2", 1),
    (r"\sqrt{x} > 2", "x > 4", 1),
    ("x^2 < 4", "-2 < x < 3", 0),
    ("x < 3", "x < 4", 0),
    ("x < 3", "y < 3", 0),
    # other scripts
    ("\\boxed{上海}", "北京", 0),
    ("Москва", "москва", 1),
    ("答案\uff1a\uff08\uff11\uff0c\uff12\uff09", "(1,2)", 1),
    ("\\boxed{\uff14\uff12\uff0e\uff15\uff05}", "42.5%", 1),
    ("\\boxed{\uff0d\uff13}", "-3", 1),
    ("\\boxed{४२}", "42", 1),
    ("答案是43", "42", 0),
    ("\\boxed{\\alpha\\beta}", "\\beta\\alpha", 1),
    ("\\boxed{αβ}", "βα", 1),
    # formulas, units and boxes
    ("x + t", "t + x", 1),  # the library reads t, h, c, m, s and others as units
    ("a + c", "c + a", 1),
    ("\\boxed{3}, \\boxed{5}", "5", 0),
    ("\\boxed{7", "7", 1),
    ("<think>It is 8.</think> 7", "7", 1),
    ("<think>So \\boxed{7}", "7", 0),
    ("0.1212...", "\\frac{4}{33}", 1),
    ("3.14159...", "\\pi", 1),
    ("2x = 4", "x = 2", 1),
    ("2x < 4", "x < 2", 1),
    ("-2x < 4", "x > -2", 1),
    ("x + y < 1", "2x + 2y < 2", 1),
    ("x + y < 1", "-2x - 2y < -2", 0),
    ("x^2 = 4", "x = 2", 0),
    ("\\frac{y}{x} = 2", "y = 2x", 1),
    ("\\sqrt{xy}", "\\sqrt{x}\\sqrt{y}", 0),
]
"""Rows (answer, truth, score); those of `EITHER_WAY` score alike with answer and truth exchanged."""


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [*EITHER_WAY, *ONE_WAY, *((truth, text, expected) for text, truth, expected in EITHER_WAY)],
)
def test_form_of_an_answer_is_read(text, truth, expected):
    assert math_verify(text, truth) == expected


SLOW = r"\sin(\cos(" * 10 + "x" + "))" * 10
"""Formulas that are not refused, but that the library cannot simplify in seconds."""


@pytest.mark.parametrize("truth", ["x^2-1", "\\sqrt{2}"])
@pytest.mark.parametrize(
    "answer",
    [
        SLOW,
        r"2^{9999\cdot9999\cdot9999}",
        r"x^{9999\cdot9999\cdot9999}-x",
        r"((((2^{99})^{99})^{99})^{99})^{99}",
        r"2^{1000!}",
        "((5!)!)!",
        r"\sum_{k=1}^{1000} 9^{9^k}",
        r"\binom{5000!}{2}",
        r"\begin{pmatrix} 1 \\ 3^{99\cdot99\cdot99\cdot99} \end{pmatrix}",
        r"\int_0^1 \sin(\sin(\sin(x^x))) dx",
    ],
)
def test_evaluation_of_hostile_formulas_ends(answer, truth):
    start = time.perf_counter()
    score = math_verify(answer, truth, seconds=0.3)
    assert score == 0.0 or (score.value, score.status) == (0.0, "timeout")
    assert time.perf_counter() - start < 30  # it would take minutes


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^9}}", "9^9^9^9", "[" * 900, "1000000000!", "1e999999", "x^{99999}", "60000!", r"2^{20000}",
     "1," * 300, r"\gcd(((9^{99})^{99})^{99}, 2)", r"\begin{vmatrix}9^{9\cdot 9}\end{vmatrix}"],
)  # fmt: skip
def test_huge_numbers_are_refused_before_the_library(answer):
    assert read(answer) is None or read(answer).kind == "words"
    assert math_verify(answer, "x^2-1") == 0.0


@pytest.mark.parametrize("answer", ["x^{y^{z}}", "2^{2^{3}}", "e^{x^2}", "100!", "(x+1)^{10}", "7^{2024}", "((((1))))"])
def test_moderate_nesting_is_accepted(answer):
    assert read(answer).kind in ("number", "expression")


def test_time_limit_restores_handler_timer_and_collector():
    def mine(signum, frame):
        raise AssertionError("rang early")

    old = signal.signal(signal.SIGPROF, mine)
    signal.setitimer(signal.ITIMER_PROF, 100.0)
    try:
        assert math_verify("x+1", "1+x") == 1.0
        assert math_verify(SLOW, "x^2-1", seconds=0.1).status == "timeout"
        assert signal.getsignal(signal.SIGPROF) is mine
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] < 101
        assert gc.isenabled()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    with pytest.raises(ValueError, match="time limit of more than 0 seconds"):
        math_verify("1", "1", seconds=0)


def test_expired_limit_is_a_timeout_and_not_cached():
    trajectory = a_trajectory(answer=SLOW)
    trajectory.task = replace(trajectory.task, ground_truth="x^2-1")
    manager = RewardManager([load("math_verify", args={"seconds": 0.1})], max_failed_frac=1.0)
    for _ in range(2):
        report = asyncio.run(manager.score([trajectory]))
        assert (trajectory.outcome.status, report.functions[0].cached) == ("timeout", 0)
    assert "0.1 s of processor time" in trajectory.outcome.reason


def test_processor_time_is_limited_and_waiting_is_not():
    with processor_time_limit(0.2):
        time.sleep(0.3)
    with pytest.raises(TimeoutError, match="processor time"), processor_time_limit(0.1):
        for _ in count():  # a single call in C, such as sum(count()), could not be ended
            pass


@pytest.mark.parametrize("truth", ["\\frac{", "9^{9^{9^9}}", "71 = 72", "[" * 30, "\\boxed{}"])
def test_unreadable_truth_raises(truth):
    with pytest.raises(ValueError, match="expected a ground truth that can be read as mathematics"):
        math_verify("72", truth)


def test_numbers_words_and_points_skip_the_library():
    """The library is refused in another thread, so a score shows that it was not used."""
    pairs = [
        ("#### 72", "72"),
        ("\\boxed{(\\frac12, -3)}", "(0.5, -3)"),
        ("\uff10.\uff15", "1/2"),
        ("{(1,2)}", "(1,2)"),
    ]
    with ThreadPoolExecutor(1) as pool:
        assert [pool.submit(math_verify, *pair).result() for pair in [*pairs, ("北京", "北京")]] == [1.0] * 5
        with pytest.raises(ValueError, match="main thread"):
            pool.submit(math_verify, "$x^2$", "72").result()


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
PIECES += [" cubic", r" \cdot kg", "^{-3}", "<answer>", "**"]


@examples(200)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
def test_any_answer_gets_a_score(text):
    for truth in ("72", "\\{1,\\sqrt{2}\\}", "Monday"):
        score = math_verify(text, truth, seconds=0.2)
        assert score in (0.0, 1.0) or score.status == "timeout"


@pytest.mark.parametrize("piece", PIECES)
def test_hostile_text_is_read_quickly(piece):
    start = time.process_time()
    for n in (MAX_CHARACTERS, 100 * MAX_CHARACTERS):
        read((piece * n)[:n])
    assert time.process_time() - start < 60  # quadratic time would be minutes for the longer text
