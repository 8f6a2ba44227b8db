"""Forms of exports of tracing products: one module each, found by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from creditflow._utils.plugins import modules_in
from creditflow.traces.exports.base import Export, GivenScore, Records
from creditflow.traces.spans import UNREADABLE, Span


@cache
def exports() -> tuple[Export, ...]:
    """All forms of exports, by name."""
    return tuple(module.EXPORT for module in modules_in(__name__) if hasattr(module, "EXPORT"))


def export_of(value: Any) -> Export | None:
    """The form of a record, or of an object with a list of records; else None."""
    if not isinstance(value, Mapping):
        return None
    return next((one for one in exports() if any(map(one.has, _records_in(value, one.lists)))), None)


def read_export(export: Export, values: Iterable[Any], where: str) -> tuple[list[Span], list[GivenScore]]:
    """The spans and the scores in a file's values.

    Records that could not be read are listed in a span with the id `UNREADABLE`.
    """
    records = Records()
    objects: list[Mapping[str, Any]] = []
    for value in values:
        for number, record in enumerate(_entries(value, export.lists), 1):
            if isinstance(record, Mapping) and export.has(record):
                objects.append(record)
            else:
                records.lost.append((f"{where}: record {number}", f"expected a record of {export.name}"))
    export.read(objects, records)
    if records.lost:
        records.spans.append(Span("", UNREADABLE, None, "", None, None, {}, unread=records.lost))
    return records.spans, records.scores


def _entries(value: Any, lists: Sequence[str]) -> list[Any]:
    """The records of a value: the entries of its lists under the keys `lists`, or else the value itself."""
    found = [value[key] for key in lists if isinstance(value.get(key), list)] if isinstance(value, Mapping) else []
    return [one for entries in found for one in entries] if found else [value]


def _records_in(value: Mapping[str, Any], lists: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    return (one for one in _entries(value, lists)[:_LOOKED_AT] if isinstance(one, Mapping))


_LOOKED_AT = 8
"""The number of records that decide the form of a file."""


def score_spans(scores: Sequence[GivenScore], spans: Iterable[Span]) -> list[Span]:
    """One span for each score, in the trace of its target.

    A score without a trace belongs to the trace of its span, if only one trace has a span of that id.
    """
    traces: dict[str, set[str]] = {}
    if any(not score.trace for score in scores):
        for span in spans:
            traces.setdefault(span.id, set()).add(span.trace)
    made = []
    for number, score in enumerate(scores, 1):
        candidates = traces.get(score.targets[0], ()) if score.targets else ()
        trace = score.trace or (next(iter(candidates)) if len(candidates) == 1 else "")
        attributes: dict[str, Any] = {"creditflow.score.name": score.name, "creditflow.score.of": score.targets}
        attributes["creditflow.score.label" if isinstance(score.value, str) else "creditflow.score.value"] = score.value
        made.append(Span(trace, f"score {number}", None, score.name, score.time, score.time, attributes))
    return made
