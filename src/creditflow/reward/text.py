"""Ready-made comparisons of an answer's text with the truth, and how numbers are read out of text.

It knows nothing of trajectories: text and truth in, a number out. What it reads was written by a model, so every
expression here takes time linear in the text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from creditflow.reward.registry import answer, builtin

MAX_CHARACTERS = 20_000
"""No answer is longer; of a longer text only the end is read."""

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-\u2212])?"  # a minus after a digit or a bracket is an operation, not a sign
    r"(?:\\?[$€£]\s?)?"
    r"(?P<digits>(?<![\d.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]{1,300})?|[0-9]{1,300}(?:\.[0-9]{1,300})?|\.[0-9]{1,300})"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w.]))?"
    r"(?P<percent>\s?\\?%)?"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it stands in a text."""

    value: float
    percent: bool = False
    """Whether a % follows; `value` is what stands before it."""


def numbers_in(text: str) -> list[Number]:
    """Every finite number in the text, in order: `-3`, `1,080`, `$0.5`, `.25`, `50%`, `1e-3`."""
    found = []
    for match in NUMBER.finditer(text[-MAX_CHARACTERS:]):
        plain = re.sub(r"[^0-9.eE+-]", "", match.group().replace("\u2212", "-"))
        value = float(plain)
        if math.isfinite(value):
            found.append(Number(value, match["percent"] is not None))
    return found


def final_answer(text: str) -> str:
    """What stands on the last line `#### answer`, or the whole text where there is none."""
    _, marker, rest = text[-MAX_CHARACTERS:].rpartition("####")
    return rest.strip().split("\n", 1)[0].strip() if marker else text[-MAX_CHARACTERS:].strip()


@builtin
@answer
def exact_match(text: str, truth: Any, ignore_case: bool = False) -> float:
    """1 where the text is the truth, or one of a list of truths; surrounding and repeated white space does not count.

    All of the text is compared, not only a final answer in it. `ignore_case` compares casefolded (`Straße`, `STRASSE`).

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: exact match as in SQuAD (arXiv 1606.05250), without
    its removal of articles and punctuation.
    """

    def tidy(value: object) -> str:
        words = " ".join(str(value).split())
        return words.casefold() if ignore_case else words

    truths = truth if isinstance(truth, list | tuple) else [truth]
    return float(any(tidy(text) == tidy(one) for one in truths))


@builtin
@answer
def numeric_match(text: str, truth: Any, rel_tol: float = 1e-6) -> float:
    """1 where the last number of the text is the truth's last number, within `rel_tol` of the larger.

    Of a text with a line `#### answer`, only what follows the last #### is read. Thousands separators and currency
    signs do not count; what else stands there (units, words, a slash: the last number of 1/2 is 2) does not either: for
    fractions, units and formulas use math_verify. A per cent sign on one side only may mean either: 50% is 50 and 0.5.

    Range: 0 or 1. Cost: microseconds, linear in the text. Source: the usual reading of GSM8K answers (arXiv
    2110.14168), with tolerance. Raises ValueError where the truth holds no number, or rel_tol is not in [0, 1).
    """
    if not 0 <= rel_tol < 1:
        raise ValueError(f"expected a rel_tol of 0 or more and less than 1, got {rel_tol}")
    wanted = numbers_in(str(truth))
    if not wanted:
        raise ValueError(f"expected a ground truth with a number in it, got {str(truth)[:80]!r}")
    found = numbers_in(final_answer(text))
    if not found:
        return 0.0
    return float(same_number(found[-1], wanted[-1], rel_tol))


def same_number(one: Number, other: Number, rel_tol: float = 1e-6) -> bool:
    """Whether two numbers are equal within `rel_tol`; where only one has a per cent sign, 50% is both 50 and 0.5."""

    def close(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=rel_tol, abs_tol=1e-12)

    if one.percent == other.percent:
        return close(one.value, other.value)
    per_cent, plain = (one, other) if one.percent else (other, one)
    return close(per_cent.value, plain.value) or close(per_cent.value / 100, plain.value)
