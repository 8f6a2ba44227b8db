"""Values that reward functions may return beside numbers and `Score`, and helpers to make and read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real

from creditflow.data import Score

REASON_CHARACTERS = 200
"""Maximum length of a failure's reason. The reason of an ok score may be longer."""
MAX_NUMBERS = 50
"""Maximum count of numbers beside one score."""
_NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class DetailedScore(Score):
    """A score with other numbers by name, which become metrics."""

    numbers: tuple[tuple[str, float], ...] = ()


class NotApplicable:
    """The function does not apply to its input, which is not a failure. Only calls by a signature return it."""


def plain(value: object) -> object:
    """A value with arrays, tensors and their scalars as Python's lists and numbers."""
    return value.tolist() if not isinstance(value, type) and hasattr(value, "tolist") else value


def as_float(value: Real | Decimal) -> float:
    """A number as a float, infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def number_of(value: object) -> float | None:
    """The value as a float if it is a finite number or a bool, also of numpy or torch; otherwise None."""
    value = plain(value)
    number = as_float(value) if isinstance(value, Real | Decimal) else math.nan
    return number if math.isfinite(number) else None


def numbers_of(named: Iterable[tuple[str, object]]) -> tuple[tuple[str, float], ...]:
    """The numbers among named values, with names that fit into those of metrics."""
    pairs = ((name[:_NAME_CHARACTERS].replace("/", "."), number_of(value)) for name, value in named)
    return tuple((name, number) for name, number in pairs if name and number is not None)[:MAX_NUMBERS]


def shown(value: object) -> str:
    """A short text of a plain value; for any other value its type's name, since its text may hold an address."""
    is_plain = value is None or isinstance(value, str | bool | int | float)
    return str(value)[:REASON_CHARACTERS] if is_plain else type(value).__name__


def neutral_where_not_sampled(values: Sequence[float], response_mask: Sequence[int]) -> list[float]:
    """Give tokens that were not sampled, and are not trained on, the mean of the sampled ones.

    The plain mean over all tokens then equals the mean over the sampled ones. Unchanged if no token was sampled.
    """
    sampled = [value for value, mask in zip(values, response_mask, strict=True) if mask]
    if not sampled:
        return list(values)
    mean = sum(sampled) / len(sampled)
    return [value if mask else mean for value, mask in zip(values, response_mask, strict=True)]
