"""Ready-made comparisons of a text with the truth, and parsers of answers and numbers.

They take text and truth, and return a number; trajectories are not used here. The text comes from a model, so every
regular expression here takes time linear in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from creditflow.reward.registry import answer, builtin

MAX_CHARACTERS = 20_000
"""No answer is longer; only the end of a longer text is read."""

NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?"  # a minus after a digit or a bracket is an operation, not a sign
    r"(?:\\?[$€£]\s?)?"
    r"(?P<digits>(?<![\d.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]{1,300})?|[0-9]{1,300}(?:\.[0-9]{1,300})?|\.[0-9]{1,300})"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w.]))?"
    r"(?P<percent>\s?\\?%)?"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text."""

    value: float
    percent: bool = False
    """Whether a % follows; `value` is the number before it."""


_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_SAME_IN_ASCII = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u00a0\u2006\u2009\u202f\u3000", " "),
    **{"\u2019": "'", "\u3001": ",", "\u3002": ".", "\u2026": "..."},
}


def as_ascii(text: str) -> str:
    """Write full-width characters, and variants of signs and spaces, in ASCII."""

    def same(match: re.Match[str]) -> str:
        character = match.group()
        full_width = "\uff01" <= character <= "\uff5e"
        return chr(ord(character) - 0xFEE0) if full_width else _SAME_IN_ASCII.get(character, character)

    return _NOT_ASCII.sub(same, text)


def numbers_in(text: str) -> list[Number]:
    """Return every finite number in the text, in order: `-3`, `1,080`, `$0.5`, `.25`, `50%`, `1e-3`."""
    found = []
    for match in NUMBER.finditer(as_ascii(text[-MAX_CHARACTERS:])):
        plain = re.sub(r"[^0-9.eE+-]", "", match.group())
        value = float(plain)
        if math.isfinite(value):
            found.append(Number(value, match["percent"] is not None))
    return found


def is_missing(truth: Any) -> bool:
    """Whether a ground truth has no value: None, NaN, pandas' NA or NaT, an empty container, a blank text."""
    if truth is None or isinstance(truth, str):
        return truth is None or not truth.strip()
    if isinstance(truth, Sequence | Mapping | Set):
        return not truth
    if hasattr(truth, "tolist"):  # numpy's
        return is_missing(truth.tolist())
    try:
        return bool(truth != truth)  # noqa: PLR0124 (true of every kind of NaN)
    except TypeError:  # pandas' NA is neither equal nor unequal to itself
        return True


def truths_of(truth: Any) -> list[Any]:
    """Return the values that a ground truth lists, or its single value.

    Raises ValueError if one of them is missing or blank, so that the score is `failed`.
    """
    plain = truth.tolist() if hasattr(truth, "tolist") else truth
    several = list(plain) if isinstance(plain, list | tuple) else [plain]
    for one in several or [plain]:
        if is_missing(one):
            raise ValueError(f"ground_truth: expected a value to compare with, got {truth!r}: the task has none")
        if isinstance(one, list | tuple | Mapping | Set):
            raise ValueError(f"ground_truth: expected a text, a number or a list of them, got {str(truth)[:80]!r}")
    return several


def without_thoughts(text: str) -> str:
    """Return the text after the last `</think>` of a reasoning model.

    Returns an empty text if `<think>` never closes.
    """
    *_, rest = text.rpartition("</think>")
    before, opened, _ = rest.partition("<think>")
    return before if opened and not before.strip() else rest


def final_answer(text: str) -> str:
    """Return the last line `#### answer`, or else the whole text, without thoughts."""
    text = without_thoughts(text[-MAX_CHARACTERS:])
    _, marker, rest = text.rpartition("####")
    return rest.strip().split("\n", 1)[0].strip() if marker else text.strip()


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

    return float(tidy(text) in [tidy(one) for one in truths_of(truth)])


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
    wanted = [numbers_in(str(one)) for one in truths_of(truth)]
    if not any(wanted):
        raise ValueError(f"expected a ground truth with a number in it, got {str(truth)[:80]!r}")
    found = numbers_in(final_answer(text))
    return float(bool(found) and any(same_number(found[-1], numbers[-1], rel_tol) for numbers in wanted if numbers))


def same_number(one: Number, other: Number, rel_tol: float = 1e-6) -> bool:
    """Whether two numbers are equal within `rel_tol`; if only one has a per cent sign, 50% equals both 50 and 0.5."""

    def close(a: float, b: float) -> bool:
        return math.isclose(a, b, rel_tol=rel_tol, abs_tol=1e-12)

    if one.percent == other.percent:
        return close(one.value, other.value)
    per_cent, plain = (one, other) if one.percent else (other, one)
    return close(per_cent.value, plain.value) or close(per_cent.value / 100, plain.value)
