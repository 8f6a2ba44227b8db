"""The ready-made comparison of mathematical answers: takes text and truth, returns a number.

`support.math_parsing` parses both. Rational numbers and words are compared here. The math-verify library parses
everything else, and `support.equality` compares the result. The library (and sympy with it) is imported at the first
call that needs it.
"""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from types import FrameType
from typing import Any

from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.math_parsing import SIGNIFICANT_DIGITS, Answer, NotAnAnswerError, Part, read
from creditflow.rewards.support.text import final_answer, truths_of

_EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")


@builtin
@answer
def math_verify(text: str, truth: Any, seconds: float = 2.0) -> float:
    r"""1 if the answer is mathematically equal to the truth: numbers, fractions, LaTeX, units, sets, intervals.

    If the text has a line `#### answer`, only the text after the last #### is read; else its last box, else all of it.
    The rules for debatable cases are in docs/how_to/rewards.md and, pair by pair, in tests/samples/math_pairs.jsonl.

    Rational numbers and words are compared here. Everything else goes to the library, for `seconds` in total: an answer
    that takes longer scores 0, and so does an answer that makes the library raise. Expressions that cannot be evaluated
    (`9^{9^{9^9}}`, brackets hundreds deep) are refused before that. Sentences are not understood: in a sentence without
    a box, the library takes the last number or formula, also after `not`. The limit is the signal of an interval timer
    and works in the main thread of a process only. In another thread, a comparison that needs the library raises
    RuntimeError, and the score is `failed` rather than computed without a limit.

    Range: 0 or 1. Cost: 0.1 ms for numbers and words, 1 to 10 ms in the library, `seconds` at worst, and a second for
    the first formula (it imports sympy). Source: https://github.com/huggingface/Math-Verify, version 0.9. Raises
    ValueError if the truth cannot be read.
    """
    if not seconds > 0:
        raise ValueError(f"expected a time limit of more than 0 seconds, got {seconds}")
    truths = [_truth(str(value), seconds) for value in truths_of(truth)]
    try:
        answer = read(final_answer(text))
    except NotAnAnswerError:
        return 0.0
    return float(any(_scored(answer, true_answer, seconds) for true_answer in truths))


def _scored(answer: Answer, truth: Answer, seconds: float) -> bool:
    if not _needs_library(answer, truth):
        return _same(answer, truth)
    _prepare_library()
    try:
        with _time_limit(seconds):
            return _same(answer, truth)
    except _TimeIsUpError:
        return False


def _prepare_library() -> None:
    """Import the library outside of any time limit: a slow import must not count against the answer, nor be cut off."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("math_verify limits its time by a signal, which works in the main thread only")
    import math_verify  # noqa: F401

    import creditflow.rewards.support.equality  # noqa: F401


def _truth(text: str, seconds: float) -> Answer:
    """Parse the truth; raises ValueError if it, or the library's reading of it, has no value."""
    try:
        truth = read(final_answer(text))
        unread = [part for part in truth.parts if _is_formula(part)]
        if unread or truth.kind == "prose":
            _prepare_library()
            with _time_limit(seconds):
                readable = _prose(truth.text) is not None if truth.kind == "prose" else all(map(_readable, unread))
            if not readable:
                raise NotAnAnswerError("it has no value")
    except (NotAnAnswerError, _TimeIsUpError) as error:
        raise ValueError(
            f"expected a ground truth that can be read as mathematics, got {text[:80]!r}: {error}"
        ) from error
    return truth


def _readable(part: Part) -> bool:
    if part.inner is not None:
        return all(_readable(element) for element in part.inner.parts if _is_formula(element))
    return _expression(part.text) is not None


# Comparing answers


def _needs_library(answer: Answer, truth: Answer) -> bool:
    if "prose" in (answer.kind, truth.kind):
        return not any(part.words for part in truth.parts)
    return any(_is_formula(part) for part in (*answer.parts, *truth.parts))


def _is_formula(part: Part) -> bool:
    if part.inner is not None:
        return any(map(_is_formula, part.inner.parts))
    return part.number is None and not part.words


def _same(answer: Answer, truth: Answer) -> bool:
    if "prose" in (answer.kind, truth.kind):
        if any(part.words for part in truth.parts):
            return False
        return _same_in_library(_any_expression(answer), _any_expression(truth))
    if answer.kind == truth.kind == "ordered":
        return answer.brackets == truth.brackets and _pairwise(answer.parts, truth.parts)
    if "ordered" in (answer.kind, truth.kind):
        # an interval may equal an inequality or a union, but not a number or several values
        other = truth if answer.kind == "ordered" else answer
        if other.kind == "set" or not _is_formula(other.parts[0]):
            return False
        return _same_in_library(_any_expression(answer), _any_expression(truth))
    return _covers(answer.parts, truth.parts) and _covers(truth.parts, answer.parts)


def _pairwise(parts: Sequence[Part], true_parts: Sequence[Part]) -> bool:
    return len(parts) == len(true_parts) and all(map(_same_part, parts, true_parts))


def _covers(some: Sequence[Part], others: Sequence[Part]) -> bool:
    return all(any(_same_part(part, other) for other in others) for part in some)


def _same_part(part: Part, true_part: Part) -> bool:
    if part.words or true_part.words:
        return part.words == true_part.words
    if part.inner and true_part.inner:
        return _same(part.inner, true_part.inner)
    if not part.percent and not true_part.percent and part.unit is not None and true_part.unit is not None:
        if part.unit.kind != true_part.unit.kind:
            return False
        factor = part.unit.size / true_part.unit.size
    else:
        factor = Fraction(1)
    factors = [factor, Fraction(1, 100)] if part.percent and not true_part.percent else [factor]
    factors += [Fraction(100)] if true_part.percent and not part.percent else []
    return any(_same_value(part, true_part, factor) for factor in factors)


def _same_value(part: Part, true_part: Part, factor: Fraction) -> bool:
    """Whether `part`, times a factor, equals `true_part`."""
    if part.number is not None and true_part.number is not None:
        return _same_numbers(part, part.number * factor, true_part, true_part.number)
    if part.text == true_part.text and factor == 1:
        return _readable(part)
    value, true_value = _expression(part.text), _expression(true_part.text)
    if factor != 1:
        return _same_in_library(_times(value, factor), true_value)
    return (
        _stands_for(part, lambda digits: _decimals(true_value, digits))
        or _stands_for(true_part, lambda digits: _decimals(value, digits))
        or _same_in_library(value, true_value)
    )


def _same_numbers(part: Part, value: Fraction, true_part: Part, true_value: Fraction) -> bool:
    if value == true_value or value != part.number:  # a converted unit is exact
        return value == true_value
    return _stands_for(part, lambda digits: true_value) or _stands_for(true_part, lambda digits: value)


def _stands_for(part: Part, exact: Callable[[int], Fraction | None]) -> bool:
    """Whether a decimal is `exact` rounded or cut to its digits, given that `exact` has no finite decimals."""
    if part.number is None or part.places is None or part.places > 60:
        return False
    true = exact(part.places + 60)
    if true is None or true * part.number <= 0:
        return False
    if (true * Fraction(10) ** (part.places + 30)).denominator == 1:  # finite decimals: all digits must be given
        return False
    unit = Fraction(1, 10**part.places)
    return abs(true - part.number) * 2 <= unit or 0 <= abs(true) - abs(part.number) < unit


# The library


def _any_expression(answer: Answer) -> Any:
    if answer.kind == "prose":
        return _prose(answer.text)
    if answer.kind == "one":
        return _expression(answer.parts[0].text)
    return _parse_latex(answer.text)


def _expression(text: str) -> Any:
    """The expression of one part; for an equation between numbers its value, if it holds. None: not readable."""
    sides = _EQUALS.split(text)
    if len(sides) > 1 and not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", text)):
        values = [_parse_latex(side.strip()) for side in sides]
        holds = all(value is not None and _same_in_library(value, values[-1]) for value in values)
        return values[-1] if holds else None
    return _parse_latex(text)


@lru_cache(maxsize=64)
def _parse_latex(text: str) -> Any:
    from math_verify import LatexExtractionConfig
    from math_verify.parser import NormalizationConfig

    if not text or text.count("(") + text.count("[") != text.count(")") + text.count("]"):
        return None
    # units are already removed: the library would read the t of `x + t` as one
    as_written = NormalizationConfig(units=False, malformed_operators=True, boxed="none")
    return _parse(f"${text}$", [LatexExtractionConfig(normalization_config=as_written)])


@lru_cache(maxsize=64)
def _prose(text: str) -> Any:
    """The formula or number that the library finds in a sentence: after `final answer is`, else the last one."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    return _parse(text, [LatexExtractionConfig(), ExprExtractionConfig()])


def _parse(text: str, targets: Sequence[Any]) -> Any:
    import math_verify.parser as library
    from sympy import MatrixBase, nan, zoo

    from creditflow.rewards.support.equality import worked_out

    library.TIMEOUT_WARNING_SHOWN = True  # our own time limit covers everything
    parsed = library.parse(text, targets, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed:
        return None
    expression = parsed[0].as_immutable() if isinstance(parsed[0], MatrixBase) else parsed[0]
    try:
        return None if worked_out(expression).has(nan, zoo) else expression
    except Exception:  # too large, or nothing that sympy can evaluate
        return None


def _same_in_library(expression: Any, true_expression: Any) -> bool:
    from creditflow.rewards.support.equality import same

    if expression is None or true_expression is None:
        return False
    try:
        return same(expression, true_expression)
    except Exception:  # a hostile expression; sympy may raise anything
        return False


def _times(expression: Any, factor: Fraction) -> Any:
    from sympy import Rational

    try:
        return expression * Rational(factor.numerator, factor.denominator)
    except Exception:  # as above: sets and equations have no product
        return None


def _decimals(expression: Any, digits: int) -> Fraction | None:
    """The value of a real number to `digits` digits; None for other expressions."""
    if not getattr(expression, "is_number", False):
        return None
    try:
        value = expression.doit()
        if value.is_Rational:
            return Fraction(int(value.p), int(value.q))
        return Fraction(str(value.evalf(digits + SIGNIFICANT_DIGITS)))
    except Exception:  # complex, infinite, or without digits
        return None


# Time


class _TimeIsUpError(BaseException):
    """The time limit is exceeded. Not an Exception, because sympy swallows those."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeIsUpError in this, the main, thread after `seconds` seconds.

    The signal repeats every 50 ms until it takes effect: raised inside a destructor, the exception would be lost. The
    garbage collector is disabled meanwhile, because its callbacks swallow exceptions, too.
    """
    running = True

    def ring(signum: int, frame: FrameType | None) -> None:
        if running:
            raise _TimeIsUpError("it took too long")

    collecting = gc.isenabled()
    gc.disable()
    old_handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        try:
            yield
        finally:
            running = False
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, old_handler)
        if collecting:
            gc.enable()
