"""Parse answers and numbers in texts, and ground truths.

The text comes from a model, so every regular expression here takes time linear in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_CHARACTERS = 20_000
"""No answer is longer; only the end of a longer text is read."""

NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?"  # a minus after a digit or a bracket is an operation, not a sign
    r"(?:\\?[$€£]\s?)?"
    r"(?P<digits>(?<![\d.])[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:,[0-9]{2})+,[0-9]{3})(?![0-9])(?:\.[0-9]{1,300})?|[0-9]{1,300}(?:\.[0-9]{1,300})?|\.[0-9]{1,300})"
    r"(?:[eE][-+]?[0-9]{1,3}(?![\w.]))?"
    r"(?P<percent>\s?\\?%)?"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A number in a text."""

    value: float
    exact: Fraction
    percent: bool = False
    """Whether a % follows; `value` is the number before it."""


_ASCII = str.maketrans({
    **{chr(code + 0xFEE0): chr(code) for code in range(0x21, 0x7F)},
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2006\u2009\u202f\u3000", " "),
    **{"\u2044": "/", "\u2215": "/", "\u3001": ",", "\u060c": ",", "\u066a": "%", "\u066b": ".", "\u066c": ","},
    **{"\u2019": "'", "\u2026": "...", "\u3002": ". ", "\u0964": ". ", "\u06d4": ". "},
})  # fmt: skip


def as_ascii(text: str) -> str:
    """Write digits of all scripts, full-width characters, and variants of signs, stops and spaces in ASCII."""
    return re.sub(r"[^\D0-9]", lambda digit: str(int(digit[0])), text.translate(_ASCII))


def numbers_in(text: str) -> list[Number]:
    """Return every finite number in the text, in order: `-3`, `1,080`, `$0.5`, `.25`, `50%`, `1e-3`."""
    numbers = []
    for match in NUMBER.finditer(as_ascii(text[-MAX_CHARACTERS:])):
        plain = re.sub(r"[^0-9.eE+-]", "", match.group())
        value = float(plain)
        if math.isfinite(value):
            numbers.append(Number(value, Fraction(plain), match["percent"] is not None))
    return numbers


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
    for value in several or [plain]:
        if is_missing(value):
            raise ValueError(f"ground_truth: expected a value to compare with, got {truth!r}: the task has none")
        if isinstance(value, list | tuple | Mapping | Set):
            raise ValueError(f"ground_truth: expected a text, a number or a list of them, got {str(truth)[:80]!r}")
    return several


def without_thoughts(text: str) -> str:
    """Return the text after the last `</think>` of a reasoning model.

    Returns an empty text if `<think>` never closes.
    """
    *_, rest = text.rpartition("</think>")
    before, opened, _ = rest.partition("<think>")
    return before if opened and not before.strip() else rest
