"""Comparisons of a text with the ground truth: exact, and by its last number."""

from __future__ import annotations

from typing import Any

from creditflow.rewards.registry import answer, builtin
from creditflow.rewards.support.text import final_answer, numbers_in, same_number, truths_of


@builtin
@answer
def exact_match(text: str, truth: Any, ignore_case: bool = False) -> float:
    """1 if the text equals the truth, or one of a list of truths; surrounding and repeated white space is ignored.

    The whole text is compared, not only a final answer in it. `ignore_case` compares casefolded (`Straße`, `STRASSE`).

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: exact match as in SQuAD (arXiv 1606.05250), without
    its removal of articles and punctuation. Raises ValueError if the truth is missing.
    """

    def tidy(value: object) -> str:
        words = " ".join(str(value).split())
        return words.casefold() if ignore_case else words

    return float(tidy(text) in [tidy(option) for option in truths_of(truth)])


@builtin
@answer
def numeric_match(text: str, truth: Any, rel_tol: float = 1e-6) -> float:
    """1 if the last number of the text equals the last number of the truth, or of a listed truth, within `rel_tol`.

    If the text has a line `#### answer`, only the text after the last #### is read. Thousands separators and currency
    signs are ignored, and so is everything else around the number (units, words, a slash: the last number of 1/2 is 2).
    For fractions, units and formulas use math_verify. A per cent sign on one side only is ambiguous: 50% equals both 50
    and 0.5.

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: the usual reading of GSM8K answers (arXiv
    2110.14168), with tolerance. Raises ValueError if the truth is missing or holds no number, or if rel_tol is not in
    [0, 1).
    """
    if not 0 <= rel_tol < 1:
        raise ValueError(f"expected a rel_tol of 0 or more and less than 1, got {rel_tol}")
    expected = [numbers_in(str(value)) for value in truths_of(truth)]
    if not any(expected):
        raise ValueError(f"expected a ground truth with a number in it, got {str(truth)[:80]!r}")
    answers = numbers_in(final_answer(text))
    return float(bool(answers) and any(same_number(answers[-1], truth[-1], rel_tol) for truth in expected if truth))
