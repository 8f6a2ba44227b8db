"""Return values of reward functions as plain values, copied at once, so that later changes have no effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any

from creditflow.data import Score

MAX_VALUES = 1_000_000
"""Maximum count of numbers in one return value; a response has fewer tokens."""
REASON_CHARACTERS = 200
"""Maximum length of a failure's reason. The reason of an ok score may be longer."""
_OK_CHARACTERS = 10_000
_DEPTH = 3
Plain = Any
"""None, a number, a tuple of these, a Score of these, ByAgent of these, NotApplicable, or UnknownValue."""
MAX_NUMBERS = 50
"""Maximum count of numbers beside one score."""
_NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class DetailedScore(Score):
    """A score with other numbers by name, which become metrics."""

    numbers: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A value of a type that cannot be a score."""

    kind: str


@dataclass(frozen=True, slots=True)
class ByAgent(UnknownValue):
    """Values by agent. Only an outcome function returns them; elsewhere they are an invalid value."""

    values: tuple[tuple[str | UnknownValue, Plain], ...]
    """Pairs of name and value; a name of another type is an UnknownValue."""


@dataclass(frozen=True, slots=True)
class NotApplicable(UnknownValue):
    """The function does not apply to its input, which is not a failure. Only calls by a signature return it."""

    kind: str = "value for an input to which the function does not apply"


def taken(value: object, depth: int = 0) -> Plain:
    """Copy a value into Python's own numbers and tuples. Arrays, tensors and their scalars are converted.

    A dict with a `score`, as verl's reward functions return, becomes that score. Its other entries become the reason,
    and the numbers among them the numbers of a DetailedScore. Any other dict becomes values by agent.

    Raises ValueError for more than MAX_VALUES numbers, and any exception that an unusual object raises on access.
    """
    if isinstance(value, Score):
        return _of_score(value)
    if not isinstance(value, type) and hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool | NotApplicable):
        return value
    if isinstance(value, Real | Decimal):
        return _number(value)
    if isinstance(value, Mapping):
        return _of_mapping(value, depth)
    if not isinstance(value, list | tuple) or depth >= _DEPTH:
        return UnknownValue(type(value).__name__)
    if len(value) > MAX_VALUES:
        raise ValueError(f"expected at most {MAX_VALUES} values, got {len(value)}")
    return tuple(taken(item, depth + 1) for item in value)


def _of_score(score: Score) -> Score:
    plain = Score(
        value=taken(score.value, 1),
        range=taken(score.range, 1),
        status=score.status if isinstance(score.status, str) else "failed",
        reason=str(score.reason)[:_OK_CHARACTERS],
    )
    return _with_numbers(plain, score.numbers if isinstance(score, DetailedScore) else ())


def _number(value: Real | Decimal) -> int | float:
    try:
        return int(value) if isinstance(value, int) and abs(value) < 1 << 53 else float(value)
    except OverflowError:
        return float("inf")


def _of_mapping(value: Mapping[Any, Any], depth: int) -> Score | UnknownValue:
    if "score" in value and depth < _DEPTH:
        return _score_of_dict(value, depth)
    kind = type(value).__name__
    if depth:
        return UnknownValue(kind)
    if len(value) > MAX_VALUES:
        raise ValueError(f"expected at most {MAX_VALUES} values, got {len(value)}")
    names = (str(name) if isinstance(name, str) else UnknownValue(type(name).__name__) for name in value)
    return ByAgent(kind, tuple(zip(names, (taken(item, 1) for item in value.values()), strict=True)))


def _score_of_dict(value: Mapping[Any, Any], depth: int) -> Score:
    score = taken(value["score"], depth + 1)
    others = [(str(name), item) for name, item in value.items() if name != "score"]
    notes = "; ".join(f"{name}: {shown(item)}" for name, item in others)[:_OK_CHARACTERS]
    scored = replace(score, reason=score.reason or notes) if isinstance(score, Score) else Score(score, reason=notes)
    return _with_numbers(scored, others)


def _with_numbers(score: Score, named: Iterable[tuple[str, object]]) -> Score:
    """The score with the numbers among the named values; other values are left out."""
    pairs = ((name[:_NAME_CHARACTERS].replace("/", "."), number_of(item)) for name, item in named)
    numbers = tuple((name, number) for name, number in pairs if name and number is not None)[:MAX_NUMBERS]
    if not numbers:
        return score
    return DetailedScore(score.value, range=score.range, status=score.status, reason=score.reason, numbers=numbers)


def number_of(value: object) -> float | None:
    """The value as a float if it is a finite number or a bool, also of numpy or torch; otherwise None."""
    if not isinstance(value, type) and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Real | Decimal):
        return None
    number = float(_number(value))
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """A short text of a plain value; for any other value its type's name, since its text may hold an address."""
    plain = value is None or isinstance(value, str | bool | int | float)
    return str(value)[:REASON_CHARACTERS] if plain else type(value).__name__


def to_json(value: Plain) -> Any:
    """A value from `taken` as JSON data."""
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, ByAgent):
        return {"by_agent": [[to_json(name), to_json(item)] for name, item in value.values], "other": value.kind}
    if isinstance(value, NotApplicable):
        return {"applies": False}
    if isinstance(value, UnknownValue):
        return {"other": value.kind}
    if isinstance(value, Score):
        fields = ("value", "range", "status", "reason")
        numbers = {"numbers": value.numbers} if isinstance(value, DetailedScore) else {}
        return {"score": {name: to_json(getattr(value, name)) for name in fields}, **numbers}
    return value


def of_json(value: Any) -> Plain:
    """The inverse of `to_json`. Raises KeyError, TypeError or OverflowError for other input."""
    if isinstance(value, list):
        return tuple(of_json(item) for item in value)
    if not isinstance(value, dict):
        if isinstance(value, int):
            float(value)  # raises OverflowError if it is too large to be compared with a range
        return value
    if "by_agent" in value:
        named = [(of_json(name), of_json(item)) for name, item in value["by_agent"]]
        if not all(isinstance(name, str | UnknownValue) for name, _ in named):
            raise TypeError("an agent whose name is no text")
        return ByAgent(str(value["other"]), tuple(named))
    if "applies" in value:
        return NotApplicable()
    if "other" in value:
        return UnknownValue(str(value["other"]))
    score = Score(**{name: of_json(field) for name, field in value["score"].items()})
    if not (isinstance(score.status, str) and isinstance(score.reason, str)):
        raise TypeError("a score whose status or reason is no text")
    return _with_numbers(score, [(str(name), number) for name, number in value.get("numbers", ())])
