"""Comparisons of a text with the ground truth: exact, and by its last number."""

from __future__ import annotations

from typing import Any

from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.answers import places
from creditflow.rewards.support.mathematics import read
from creditflow.rewards.support.text import Number, numbers_in, same_number, truths_of


@builtin
@answer(read_truth=truths_of)
def exact_match(text: str, truth: Any, ignore_case: bool = False) -> float:
    """1 if the whole text or the answer in it equals the truth, or one of a list of truths.

    The answer is the last box, else the line `#### answer`, else the text after `answer is` or another word with a
    colon, up to the end of its line, sentence or clause. Surrounding and repeated white space is ignored.
    `ignore_case` compares casefolded (`Straße`, `STRASSE`). A truth of 72.0, as in a column of pandas with missing
    values, is also 72.

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: exact match as in SQuAD (arXiv 1606.05250), without
    its removal of articles and punctuation. Raises ValueError if the truth is missing.
    """

    def tidy(value: object) -> str:
        words = " ".join(str(value).split())
        return words.casefold() if ignore_case else words

    truths = truths_of(truth)
    truths += [int(value) for value in truths if isinstance(value, float) and value.is_integer()]
    answers = (text, *next(places(text)))
    return float(not {tidy(option) for option in truths}.isdisjoint(map(tidy, answers)))


def numeric_truths(truth: Any) -> list[Number]:
    """The last number of the truth, or of each listed truth. Raises ValueError if the truth is missing or has none."""
    numbers = [number for value in truths_of(truth) if (number := _last_number(str(value)))]
    if not numbers:
        raise ValueError(f"expected a ground truth with a number in it, got {str(truth)[:80]!r}")
    return numbers


@builtin
@answer(read_truth=numeric_truths)
def numeric_match(text: str, truth: Any, rel_tol: float = 1e-6) -> float:
    """1 if the last number of the answer equals the last number of the truth, or of a listed truth.

    The answer is found as in math_verify: the last box, else a line `#### answer`, and so on, else the last number of
    the text. Whole numbers are compared exactly, others within `rel_tol`. Thousands separators and currency signs are
    ignored, and so is everything else around the number (units, words, a slash: the last number of 1/2 is 2). For
    fractions, units and formulas use math_verify. A per cent sign on one side only is ambiguous: 50% equals both 50 and
    0.5.

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: the usual reading of GSM8K answers (arXiv
    2110.14168), with tolerance. Raises ValueError if the truth is missing or holds no number, or if rel_tol is not in
    [0, 1).
    """
    if not 0 <= rel_tol < 1:
        raise ValueError(f"expected a rel_tol of 0 or more and less than 1, got {rel_tol}")
    truths, number = numeric_truths(truth), _last_number(text)
    return float(number is not None and any(same_number(number, other, rel_tol) for other in truths))


def _last_number(text: str) -> Number | None:
    for variant in (variant for variants in places(text) for variant in variants):
        if (answer := read(variant)) and not answer.has("words") and (numbers := numbers_in(variant)):
            return numbers[-1]
    return None
