"""Answers that the scorers of reasoning-gym read, and wrong answers to which some of them give full marks.

`refusal` comes before the scorer and `is_right` after it. Neither repeats the scorer's own rules.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from creditflow.plugins.gym.formulas import (
    arithmetic_value,
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
COIN_TOLERANCE = Fraction(1, 10_000)
"""The tolerance of coin_flip's scorer."""
_NOT_FINITE = re.compile(r"(?<![a-z])s?(?:nan|inf|infinity)[ij]?(?![a-z])", re.IGNORECASE)
_SIGNED = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?\b")
_TARGET_OF_24 = 24


def refusal(family: str, text: str, entry: Entry) -> str | None:
    """The reason not to pass an answer to the scorer; None for an answer that the scorer may read."""
    truth = _truth(entry)
    if text == truth:
        return None
    if len(text) > MAX_CHARACTERS:
        return f"the answer has more than {MAX_CHARACTERS} characters"
    if _has_other_digits(text) and not _has_other_digits(truth):
        return "the answer has digits other than 0 to 9"
    if _NOT_FINITE.search(text) and re.search(r"\d", truth) and not _NOT_FINITE.search(truth):
        return "the answer has a number that is not finite"
    check = EVALUATED.get(family)
    return None if check is None or check(text, entry) else "the answer is no literal or formula of the accepted form"


def is_right(family: str, text: str, entry: Entry) -> bool:
    """Whether an answer with the scorer's full marks is right. True for a family whose scorer decides alone."""
    check = FULL_MARKS.get(family)
    return check is None or text == _truth(entry) or check(text, entry)


def _truth(entry: Entry) -> str:
    """The true answer; empty if the entry has none, as several are right."""
    return "" if entry["answer"] is None else str(entry["answer"])


def _has_other_digits(text: str) -> bool:
    """Whether the text has decimal digits of another script, which Python's int and float read."""
    return any(character.isdecimal() and not character.isascii() for character in text)


# Before the scorer


def _on_text(check: Callable[[str], bool]) -> Check:
    return lambda text, entry: check(text)


def _may_be_integral(text: str, entry: Entry) -> bool:
    metadata = entry["metadata"]
    return may_be_integral(text, str(metadata["integrand"]), str(metadata["variable"]))


def _has_small_exponents(text: str, entry: Entry) -> bool:
    return has_small_exponents(text.replace(",", ""))  # scorers delete commas


def _has_no_escapes(text: str, entry: Entry) -> bool:
    """Whether a JSON text has no escapes, which can hide `NaN` and digits of other scripts."""
    return "\\" not in text


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
    "number_sorting": _has_no_escapes,
    "polynomial_multiplication": _on_text(is_polynomial),
    "propositional_logic": _on_text(is_proposition),
}
"""The families whose scorer evaluates or repeats parts of the answer, and the check that comes first."""


# After the scorer


def _same_text(text: str, entry: Entry) -> bool:
    """Equal apart from case and white space."""
    return "".join(text.casefold().split()) == "".join(_truth(entry).casefold().split())


def _same_words(text: str, entry: Entry) -> bool:
    """Equal apart from case, commas and white space between words."""
    answer, other = ([word for word in re.split(r"[\s,]+", part.casefold()) if word] for part in (text, _truth(entry)))
    return answer == other


def _same_probability(text: str, entry: Entry) -> bool:
    answer, truth = (Fraction(number.replace(",", "")) for number in (text, _truth(entry)))
    return abs(answer - truth) <= COIN_TOLERANCE


def _same_first_number(text: str, entry: Entry) -> bool:
    """Whether the first number, with its sign, is the true one."""
    number = _SIGNED.search(text)
    return number is not None and float(number[0]) == float(_truth(entry).replace(",", ""))


def _uses_the_numbers(text: str, entry: Entry) -> bool:
    """Whether arithmetic has the exact target as its value, and each given number once."""
    metadata = entry["metadata"]
    used = sorted(int(number) for number in re.findall(r"\d+", text))
    return used == sorted(metadata["numbers"]) and arithmetic_value(text) == metadata.get("target", _TARGET_OF_24)


def _moves_boxes_only(text: str, entry: Entry) -> bool:
    return not any(str(move).startswith("move(target") for step in json.loads(text) for move in step.values())


FULL_MARKS: Mapping[str, Check] = {
    "boxnet": _moves_boxes_only,  # the scorer lets a target be moved to the box
    "coin_flip": _same_probability,  # `0` is a prefix of every probability
    "countdown": _uses_the_numbers,  # rounded
    "figlet_font": _same_text,  # ten letters of a longer word are enough
    "game_of_life_halting": _same_text,  # every text but the empty one counts as True, and so does the true answer
    "gsm_symbolic": _same_first_number,  # the sign is not read
    "letter_jumble": _same_words,  # further words are not read
    "puzzle24": _uses_the_numbers,  # the given numbers are not compared, and 24.9 is cut off
    "word_sorting": _same_words,  # further words are not read
}
"""The families whose scorer gives full marks to wrong answers as well, and the check that comes after it."""
