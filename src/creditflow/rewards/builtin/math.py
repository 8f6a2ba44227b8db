"""The ready-made comparison of mathematical answers: takes text and truth, returns a number.

`support.answers` finds the answer and `support.mathematics` reads it. Rational numbers and words are compared here. The
math-verify library parses everything else, and `support.equality` compares the result. The library (and sympy with it)
is imported at the first call that needs it.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from creditflow.data import Score
from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.answers import places
from creditflow.rewards.support.mathematics import Answer, read
from creditflow.rewards.support.processor_time import processor_time_limit
from creditflow.rewards.support.text import truths_of

SECONDS = 2.0
"""Default limit of processor time for one comparison."""
SIGNIFICANT_DIGITS = 6
"""A decimal with fewer digits is never equal to an irrational or repeating number."""


def read_truths(truth: Any) -> list[Answer]:
    """Read a truth, or each of several. Raises ValueError if one is missing, or nothing that can be compared."""
    return [_read_truth(str(value)) for value in truths_of(truth)]


@lru_cache(maxsize=4096)
def _read_truth(text: str) -> Answer:
    truths = [truth for variants in places(text, last_number=False) for truth in map(read, variants) if truth]
    for truth in sorted(truths, key=lambda truth: truth.has("words")):
        if _compare(truth, truth, SECONDS):  # the library reads it
            return truth
    raise ValueError(f"expected a ground truth that can be read as mathematics, got {text[:80]!r}")


@builtin
@answer(read_truth=read_truths)
def math_verify(text: str, truth: Any, seconds: float = SECONDS) -> float | Score:
    r"""1 if the answer is mathematically equal to the truth: numbers, fractions, LaTeX, units, sets, intervals, words.

    The answer is found by the order of docs/how_to/rewards.md. Sentences are not understood: without a box or
    `answer is`, the last number or formula counts, also after `not`. These conventions decide where readings differ:

    * 50% is 0.5; with the sign on one side only, also 50.
    * Units count if both sides have one, and are converted: 5 cm is 5 and 0.05 m, not 5 m. Other words (`72 apples`) do
      not count.
    * A decimal equals a number without finite decimals from six significant digits on: 0.333333 is 1/3, 0.333 is not.
    * `1, 2`, `{2, 1}`, `x=1 or x=2` and `\pm` are sets, without order or repetition. `(1,2)` is an interval or a point.
    * `\log` is decimal and `\ln` natural; `i` is the imaginary unit.
    * `x = 5` is 5; a false equation between numbers (`71 = 72`) is no answer.
    * `(A)`, `option A` and `A. 42` are the choice A. Words are compared as a whole, without capitals.

    `seconds`: Limit of processor time for one comparison in the library; then the status is `timeout`.

    Rational numbers and words are compared here, everything else by the library. An answer that makes the library raise
    scores 0. So do answers that are longer than 1,000 characters, nested more than 24 deep, or have exponents or
    factorials of more than four digits: they do not reach the library. The limit is the signal of an interval timer and
    works in the main thread of a process only. In another thread, a comparison that needs the library raises
    ValueError, and the score is `failed` rather than computed without a limit.

    Range: 0 or 1. Cost: 0.1 ms for numbers and words, 1 to 10 ms in the library, `seconds` at worst, and a second for
    the first formula (it imports sympy). Source: https://github.com/huggingface/Math-Verify, version 0.9; the
    conventions, pair by pair, are in tests/samples/math_pairs.jsonl. Raises ValueError if the truth cannot be read.
    """
    if not seconds > 0:
        raise ValueError(f"expected a time limit of more than 0 seconds, got {seconds}")
    try:
        return float(any(_matches(text, true_answer, seconds) for true_answer in read_truths(truth)))
    except TimeoutError as error:
        return Score(0.0, status="timeout", reason=f"the comparison took {error}")


def _matches(text: str, truth: Answer, seconds: float) -> bool:
    has_words, choice = truth.has("words"), truth.text.upper()
    for variants in places(text, last_number=not has_words):
        readings = [one for one in map(read, variants) if one and (one.has("words") <= has_words or one.text == choice)]
        if has_words or readings:
            return any(_compare(reading, truth, seconds) for reading in readings[: None if has_words else 1])
    return False


def _compare(answer: Answer, truth: Answer, seconds: float) -> bool:
    """Whether answer and truth are equal; the limit is for the library only, without its import and first use."""
    if truth.has("words") or not (answer.has("expression") or truth.has("expression")):
        return _same(answer, truth)
    _library()
    with processor_time_limit(seconds):
        return _same(answer, truth)


_library: Any = cache(lambda: import_module("creditflow.rewards.support.equality"))


# Comparing answers


def _same(answer: Answer, truth: Answer) -> bool:
    short, long = sorted((answer.name, truth.name), key=len)
    is_one_name = short and re.fullmatch(re.escape(short) + r"(?:_\{?\d\}?)?", long)  # x_1 = 2 is x = 2
    if long and (is_one_name or any(side.kind != "expression" or "=" not in side.text for side in (answer, truth))):
        return _same(*(side.parts[0] if side.name else side for side in (answer, truth)))
    kinds = {answer.kind, truth.kind}
    if "ordered" in kinds and kinds <= {"set", "ordered"}:  # also a point without brackets, or by its coordinates
        ends = {side.text[0] + side.text[-1] for side in (answer, truth) if side.kind == "ordered"}
        is_point = "::" not in ends and (truth.kind == "ordered" or all("=" in part.text for part in truth.parts))
        is_alike = len(ends) == 1 and (kinds == {"ordered"} or is_point) and answer.text[0] != "\\"
        return is_alike and len(answer.parts) == len(truth.parts) and all(map(_same_part, answer.parts, truth.parts))
    if kinds == {"set"} or ("set" in kinds and None in (answer.number, truth.number)):  # no decimal comma
        some, others = (side.parts if side.kind == "set" else (side,) for side in (answer, truth))
        matches = [[_same_part(part, other) for other in others] for part in some]
        return bool(some) and all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
    # the choice A may be written as a; a quantity may be an interval and an inequality
    return answer.text.casefold() == truth.text.casefold() if "words" in kinds else _same_quantity(answer, truth)


def _same_part(part: Answer, other: Answer) -> bool:
    """In a list, counted things must agree: 5 boys and 3 girls."""
    return (not part.unit or not other.unit or part.unit[0] == other.unit[0]) and _same(part, other)


def _same_quantity(answer: Answer, truth: Answer) -> bool:
    (name, size), (other, true_size) = (side.unit or ("", Fraction(0)) for side in (answer, truth))
    if size and true_size:  # 20% is 20% profit, which is not 20% loss
        return (name.startswith(other) or other.startswith(name)) and _same_value(answer, truth, size / true_size)
    percent = Fraction(1, 100) if name[:1] == "%" else Fraction(100 if other[:1] == "%" else 1)
    return any(_same_value(answer, truth, factor) for factor in {Fraction(1), percent})


def _same_value(answer: Answer, truth: Answer, factor: Fraction) -> bool:
    """Whether the answer, times a factor, equals the truth."""
    is_rounded = factor == 1 and (_stands_for(answer, truth) or _stands_for(truth, answer))
    if answer.number is not None and truth.number is not None:
        return is_rounded or answer.number * factor == truth.number
    return is_rounded or bool(_library().same(answer, truth, factor))


def _stands_for(decimal: Answer, exact: Answer) -> bool:
    """Whether a decimal is `exact` rounded or cut to its digits, given that `exact` has no finite decimals."""
    digits = re.fullmatch(r"[-+]?(\d*)\.(\d{1,60})(?:\s?\\ldots)?", decimal.text)
    if decimal.number is None or not digits or len((digits[1] + digits[2]).lstrip("0")) < SIGNIFICANT_DIGITS:
        return False
    value = exact.number if exact.number is not None else _library().decimals(exact)
    unit = Fraction(1, 10 ** len(digits[2]))
    if value is None or value * decimal.number <= 0 or (value / unit * 10**30).denominator == 1:
        return False  # one of finite decimals equals a decimal with all of them only
    return bool(abs(value - decimal.number) * 2 <= unit or 0 <= abs(value) - abs(decimal.number) < unit)
