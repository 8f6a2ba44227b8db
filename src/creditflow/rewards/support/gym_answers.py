"""Answers that the scorers of reasoning-gym may read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from creditflow.rewards.support.formulas import (
    has_small_counts,
    has_small_exponents,
    is_arithmetic,
    is_literal,
    is_polynomial,
    is_proposition,
    may_be_integral,
)

Entry = Mapping[str, Any]
"""A family's entry: question, answer, metadata."""
Check = Callable[[str, Entry], bool]

MAX_CHARACTERS = 4000
MAX_JSON_PRODUCT = 100_000
"""Limit for the characters of answer times truth, where JSON trees are compared node by node."""


def refusal(family: str, text: str, entry: Entry) -> str | None:
    """The reason not to pass an answer to the scorer; None for an answer that the scorer may read."""
    truth = _truth(entry)
    if text == truth:
        return None
    if len(text) > MAX_CHARACTERS:
        return f"the answer has more than {MAX_CHARACTERS} characters"
    check = EVALUATED.get(family)
    return None if check is None or check(text, entry) else "the answer is no literal or formula of the accepted form"


def _truth(entry: Entry) -> str:
    """The true answer; empty if the entry has none, as several are right."""
    return "" if entry["answer"] is None else str(entry["answer"])


# Before the scorer


def _on_text(check: Callable[[str], bool]) -> Check:
    return lambda text, entry: check(text)


def _may_be_integral(text: str, entry: Entry) -> bool:
    metadata = entry["metadata"]
    return may_be_integral(text, str(metadata["integrand"]), str(metadata["variable"]))


def _has_small_exponents(text: str, entry: Entry) -> bool:
    return has_small_exponents(text.replace(",", ""))  # scorers delete commas


def _is_small_json(text: str, entry: Entry) -> bool:
    """Whether two JSON trees are compared quickly: both are small, or they are equal."""
    truth = _truth(entry)
    if len(text) * len(truth) <= MAX_JSON_PRODUCT:
        return True
    try:
        return bool(json.loads(text) == json.loads(truth))
    except (ValueError, RecursionError):
        return False


EVALUATED: Mapping[str, Check] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _on_text(is_literal)),
    **dict.fromkeys(("countdown", "puzzle24"), _on_text(is_arithmetic)),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), _may_be_integral),
    **dict.fromkeys(
        (
            *("chain_sum", "coin_flip", "complex_arithmetic", "decimal_arithmetic", "decimal_chain_sum"),
            *("power_function", "products"),
        ),
        _has_small_exponents,
    ),
    **dict.fromkeys(("rubiks_cube", "rush_hour"), _on_text(has_small_counts)),
    "codeio": _is_small_json,
    "polynomial_multiplication": _on_text(is_polynomial),
    "propositional_logic": _on_text(is_proposition),
}
"""The families whose scorer evaluates or repeats parts of the answer, and the check that comes first."""
