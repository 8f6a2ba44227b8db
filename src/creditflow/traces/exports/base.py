"""The record of an export's form, and scores that are listed apart from spans."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from creditflow.traces.spans import LATEST, Span, text_of

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class GivenScore:
    """A score of a span, or of a whole trace."""

    name: str
    value: Any
    """A number, or a text if the score is a label; None: no score was recorded."""
    trace: str = ""
    """The trace of its target; empty: the trace of the span `targets` names."""
    targets: tuple[str, ...] = ()
    """Ids that its span may have; empty: the score belongs to the whole trace."""
    time: int | None = None
    """Nanoseconds since 1970."""


@dataclass(slots=True)
class Records:
    """The result of reading an export."""

    spans: list[Span] = field(default_factory=list)
    scores: list[GivenScore] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    """Name and reason of each record that could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The form in which a product writes its spans and scores as JSON."""

    name: str
    has: Callable[[Mapping[str, Any]], bool]
    """Whether an object is a record of this form."""
    read: Callable[[Sequence[Mapping[str, Any]], Records], None]
    """Adds the spans and scores of a file's records."""
    lists: tuple[str, ...] = ()
    """Keys of the lists of records in an object around them, such as a page of a REST API."""


def nanoseconds(text: Any) -> int | None:
    """A time in ISO 8601 as nanoseconds since 1970, UTC if it has no zone; None if it is not one."""
    if not isinstance(text, str):
        return None
    try:
        time = datetime.fromisoformat(text)
        time = time if time.tzinfo else time.replace(tzinfo=UTC)
        since = (time - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        return None
    return since if 0 < since <= LATEST else None


def value_or_label(value: Any, label: Any = None) -> Any:
    """A score's number, infinite beyond the range of floats; or else its label as a text; None without either."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    found = label if value is None else value
    return None if found is None else text_of(found)
