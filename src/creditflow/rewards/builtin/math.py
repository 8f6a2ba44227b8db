"""The ready-made comparison of mathematical answers: takes text and truth, returns a number.

`support.answers` finds the answer and `support.mathematics` reads it. Rational numbers and words are compared here. The
math-verify library parses everything else, and `support.equality` compares the result. The library (and sympy with it)
is imported at the first call that needs it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from creditflow.data import Score
from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.answers import places
from creditflow.rewards.support.mathematics import Answer, NotAnAnswerError, rational, read
from creditflow.rewards.support.processor_time import TimeIsUpError, processor_time_limit
from creditflow.rewards.support.text import truths_of

SECONDS = 2.0
"""Default limit of processor time for one comparison."""
SIGNIFICANT_DIGITS = 6
"""A decimal with fewer digits is never equal to an irrational or repeating number."""


def read_truths(truth: Any) -> list[Answer]:
    """Read a truth, or each of several. Raises ValueError if one is missing, or nothing that can be compared."""
    return [read_truth(str(value)) for value in truths_of(truth)]


@lru_cache(maxsize=4096)
def read_truth(text: str) -> Answer:
    """Read a truth, once for each text. Raises ValueError if it is nothing that can be compared."""
    words = []
    for variant in (variant for variants in places(text, last_number=False) for variant in variants):
        try:
            truth = read(variant)
            if truth.has_words():
                words.append(truth)
            elif not truth.has_expression() or _limited(_has_value, (truth,), SECONDS):
                return truth
        except (NotAnAnswerError, TimeIsUpError):
            continue
    if not words:
        raise ValueError(f"expected a ground truth that can be read as mathematics, got {text[:80]!r}")
    return words[0]


@builtin
@answer(read_truth=read_truths)
def math_verify(text: str, truth: Any, seconds: float = SECONDS) -> float | Score:
    r"""1 if the answer is mathematically equal to the truth: numbers, fractions, LaTeX, units, sets, intervals, words.

    The answer is found by the order of docs/how_to/rewards.md, which also has the rules for debatable cases; pair by
    pair they are in tests/samples/math_pairs.jsonl. Sentences are not understood: without a box or `answer is`, the
    last number or formula counts, also after `not`.

    Rational numbers and words are compared here, everything else by the library, for `seconds` of processor time: after
    that the status is `timeout`. An answer that makes the library raise scores 0. So do answers that are longer than
    1,000 characters, nested more than 24 deep, or have exponents or factorials of more than four digits: they do not
    reach the library. The limit is the signal of an interval timer and works in the main thread of a process only. In
    another thread, a comparison that needs the library raises RuntimeError, and the score is `failed` rather than
    computed without a limit.

    Range: 0 or 1. Cost: 0.1 ms for numbers and words, 1 to 10 ms in the library, `seconds` at worst, and a second for
    the first formula (it imports sympy). Source: https://github.com/huggingface/Math-Verify, version 0.9. Raises
    ValueError if the truth cannot be read.
    """
    if not seconds > 0:
        raise ValueError(f"expected a time limit of more than 0 seconds, got {seconds}")
    truths = read_truths(truth)
    try:
        return float(any(_matches(text, true_answer, seconds) for true_answer in truths))
    except TimeIsUpError:
        return Score(0.0, status="timeout", reason=f"the comparison took more than {seconds:g} s of processor time")


def _matches(text: str, truth: Answer, seconds: float) -> bool:
    for variants in places(text, last_number=not truth.has_words()):
        for variant in variants:
            try:
                answer = read(variant)
            except NotAnAnswerError:
                continue
            if not truth.has_words() and not answer.has_words():
                needs_library = answer.has_expression() or truth.has_expression()
                return _limited(_same, (answer, truth), seconds) if needs_library else _same(answer, truth)
            if _same(answer, truth):
                return True
        if truth.has_words():
            return False
    return False


def _limited(function: Callable[..., bool], answers: tuple[Answer, ...], seconds: float) -> bool:
    """Call a function that uses the library, within the time limit. Import and first use do not count."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify limits its time by a signal, which works in the main thread only")
    _warm_up()
    with processor_time_limit(seconds):
        return function(*answers)


@cache
def _warm_up() -> None:
    from creditflow.rewards.support.equality import parse, same

    same(parse("3x^2+4y^2=\\frac{48}{1}"), parse("\\frac{x^2}{16}+\\frac{y^2}{\\sqrt{144}}=1"))


def _has_value(answer: Answer) -> bool:
    return all(map(_has_value, answer.parts)) and (answer.kind != "expression" or _value(answer) is not None)


# Comparing answers


def _same(answer: Answer, truth: Answer) -> bool:
    kinds = (answer.kind, truth.kind)
    if kinds == ("ordered", "ordered"):
        return answer.brackets == truth.brackets and _pairwise(answer, truth)
    if set(kinds) == {"set", "ordered"}:  # a point without its brackets, or by its coordinates
        bare = answer.brackets != "\\}" if truth.kind == "ordered" else all("=" in part.text for part in truth.parts)
        return bare and _pairwise(answer, truth)
    if kinds != ("set", "set") and "set" in kinds and None not in (answer.number, truth.number):  # a decimal comma
        return answer.number == truth.number
    if "set" in kinds:
        some, others = (side.parts if side.kind == "set" else (side,) for side in (answer, truth))
        matches = [[_same_part(part, other) for other in others] for part in some]
        return bool(some) == bool(others) and all(map(any, matches)) and all(map(any, zip(*matches, strict=True)))
    if answer.has_words() or truth.has_words():
        return answer.kind == truth.kind and answer.text == truth.text
    return _same_quantity(answer, truth)  # or an interval and an inequality or union


def _pairwise(answer: Answer, truth: Answer) -> bool:
    return len(answer.parts) == len(truth.parts) and all(map(_same_part, answer.parts, truth.parts))


def _same_part(part: Answer, other: Answer) -> bool:
    """In a list, counted things must agree: 5 boys and 3 girls."""
    return (not part.thing or not other.thing or part.thing == other.thing) and _same(part, other)


def _same_quantity(answer: Answer, truth: Answer) -> bool:
    factors = {Fraction(1)}
    if answer.percent != truth.percent:
        factors.add(Fraction(1, 100) if answer.percent else Fraction(100))
    elif not answer.percent and answer.unit is not None and truth.unit is not None:
        if answer.unit[0] != truth.unit[0]:
            return False
        factors = {answer.unit[1] / truth.unit[1]}
    return any(_same_value(answer, truth, factor) for factor in factors)


def _same_value(answer: Answer, truth: Answer, factor: Fraction = Fraction(1)) -> bool:
    """Whether the answer, times a factor, equals the truth."""
    if answer.number is not None and truth.number is not None and (factor != 1 or answer.number == truth.number):
        return answer.number * factor == truth.number
    if answer.number is not None and truth.number is not None:
        return _stands_for(answer, truth.number) or _stands_for(truth, answer.number)
    from creditflow.rewards.support.equality import same

    value, true_value = _value(answer), _value(truth)
    if value is None or true_value is None:
        return False
    if factor == 1 and (answer.text == truth.text or _stands_for(answer, true_value) or _stands_for(truth, value)):
        return True
    return same(value if factor == 1 else value * factor, true_value)


def _stands_for(decimal: Answer, exact: Any) -> bool:
    """Whether a decimal is `exact` rounded or cut to its digits, given that `exact` has no finite decimals."""
    digits = re.fullmatch(r"[-+]?([0-9]*)\.([0-9]{1,60})(?:\s?\\ldots)?", decimal.text)
    if decimal.number is None or not digits or len((digits[1] + digits[2]).lstrip("0")) < SIGNIFICANT_DIGITS:
        return False
    if not isinstance(exact, Fraction):
        from creditflow.rewards.support.equality import decimals

        exact = decimals(exact, len(digits[1]) + 2 * len(digits[2]) + 60)
    if exact is None or exact * decimal.number <= 0 or rational(decimal.text) != decimal.number:
        return False
    if (exact * Fraction(10) ** (len(digits[2]) + 30)).denominator == 1:  # finite decimals: all digits must be given
        return False
    unit = Fraction(1, 10 ** len(digits[2]))
    return bool(abs(exact - decimal.number) * 2 <= unit or 0 <= abs(exact) - abs(decimal.number) < unit)


def _value(answer: Answer) -> Any:
    from sympy import Rational

    from creditflow.rewards.support.equality import parse

    return parse(answer.text) if answer.number is None else Rational(answer.number.numerator, answer.number.denominator)
