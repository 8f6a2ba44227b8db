"""Comparisons of a text with the ground truth: exact, and by its last number."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.answers import places
from creditflow.rewards.support.mathematics import read
from creditflow.rewards.support.text import as_ascii, numbers_in, truths_of

_SCRIPTS = re.compile(r"(?<=[a-zA-Z)}])\s?[\^_]\s?(?:\{[^{}]*\}|-?\w+)")
"""Exponents and subscripts of letters and brackets."""


@builtin
@answer(read_truth=truths_of)
def exact_match(text: str, truth: Any, ignore_case: bool = False) -> float:
    """1 if the whole text or the answer in it equals the truth, or one of a list of truths.

    The answer is in the last `<answer>` tags, if there are any: the last box, else the line `#### answer`, else the
    text after `answer is` or another word with a colon, up to the end of its line, sentence or clause. Surrounding and
    repeated white space is ignored. A truth of 72.0, as in a column of pandas with missing values, is also 72.

    `ignore_case`: Compare casefolded (`Straße`, `STRASSE`).

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: exact match as in SQuAD (arXiv 1606.05250), without
    its removal of articles and punctuation. Raises ValueError if the truth is missing.
    """

    def tidy(value: object) -> str:
        words = " ".join(as_ascii(str(value)).split())
        return words.casefold() if ignore_case else words

    truths = truths_of(truth)
    truths += [int(value) for value in truths if isinstance(value, float) and value.is_integer()]
    answers = (text, *next(places(text)))
    return float(not {tidy(option) for option in truths}.isdisjoint(map(tidy, answers)))


Numeral = tuple[Fraction, bool]
"""A number, and whether it is one of per cent."""


def numeric_truths(truth: Any) -> list[Numeral]:
    """The number of the truth, or of each listed truth. Raises ValueError if the truth is missing or has none."""
    numbers = [number for value in truths_of(truth) if (number := _number(str(value)))]
    if not numbers:
        raise ValueError(f"expected a ground truth with a number in it, got {str(truth)[:80]!r}")
    return numbers


@builtin
@answer(read_truth=numeric_truths)
def numeric_match(text: str, truth: Any, rel_tol: float = 1e-6) -> float:
    """1 if the number of the answer equals the number of the truth, or of a listed truth.

    The answer is found as in math_verify: the last box, else a line `#### answer`, and so on, else the last number of
    the text. Its number is its value, if it is a number with or without a unit (1/2, 12 m^2, 1.5 million), else the
    last number in it that is no exponent or subscript. A formula with a power that is not evaluated has none. Units are
    ignored, and formulas not evaluated: for these use math_verify. A per cent sign on one side only is ambiguous: 50%
    equals both 50 and 0.5.

    `rel_tol`: Relative tolerance, from 0 to below 1. Whole numbers are compared exactly.

    Range: 0 or 1. Cost: 0.1 ms, linear in the text. Source: the usual reading of GSM8K answers (arXiv
    2110.14168), with tolerance. Raises ValueError if the truth is missing or holds no number, or if rel_tol is not in
    [0, 1).
    """
    if not 0 <= rel_tol < 1:
        raise ValueError(f"expected a rel_tol of 0 or more and less than 1, got {rel_tol}")
    truths, number = numeric_truths(truth), _number(text)
    return float(number is not None and any(_same_number(number, other, rel_tol) for other in truths))


def _number(text: str) -> Numeral | None:
    for variant in (variant for variants in places(text) for variant in variants):
        value = read(variant)
        if value and value.name:
            value = value.parts[0]
        if value and value.number is not None:
            return value.number, bool(value.unit and value.unit[0].startswith("%"))
        plain = _SCRIPTS.sub(" ", value.text) if value and not value.has("words") else ""
        if not re.search(r"\^|\d ?!", plain) and (numbers := numbers_in(plain)):
            return numbers[-1].exact, numbers[-1].percent
    return None


def _same_number(left: Numeral, right: Numeral, rel_tol: float) -> bool:
    (number, is_percent), (other, of_percent) = left, right
    factor = 1 if is_percent == of_percent else Fraction(1, 100) if is_percent else 100
    return _is_close(number, other, rel_tol) or _is_close(number * factor, other, rel_tol)


def _is_close(left: Fraction, right: Fraction, rel_tol: float) -> bool:
    are_whole = left.denominator == right.denominator == 1
    return left == right or (not are_whole and abs(left - right) <= max(abs(left), abs(right)) * Fraction(rel_tol))
