"""Phoenix's spans and annotations, as its REST API returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.traces.exports.base import Export, GivenScore, Records, nanoseconds, value_or_label
from creditflow.traces.requests import mapping
from creditflow.traces.spans import Span, SpanEvent, text_of


def _has(record: Mapping[str, Any]) -> bool:
    return ("span_kind" in record and "trace_id" in mapping(record.get("context"))) or _is_annotation(record)


def _is_annotation(record: Mapping[str, Any]) -> bool:
    return {"name", "annotator_kind"} <= record.keys() and not record.keys().isdisjoint(("span_id", "trace_id"))


def _read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for record in records:
        if _is_annotation(record):
            into.scores.append(_score(record))
        else:
            into.spans.append(_span(record))


def _score(record: Mapping[str, Any]) -> GivenScore:
    """The score of an annotation. A span's annotation names no trace."""
    result, span = mapping(record.get("result")), text_of(record.get("span_id"))
    value = value_or_label(result.get("score"), result.get("label"))
    targets, time = ((span,) if span else ()), nanoseconds(record.get("updated_at"))
    return GivenScore(text_of(record.get("name")), value, text_of(record.get("trace_id")), targets, time)


def _span(record: Mapping[str, Any]) -> Span:
    context, events = mapping(record["context"]), record.get("events")
    # Phoenix takes the kind out of the attributes.
    attributes = {"openinference.span.kind": record["span_kind"], **mapping(record.get("attributes"))}
    failed = record.get("status_code") == "ERROR"
    return Span(
        text_of(context.get("trace_id")),
        text_of(context.get("span_id")),
        text_of(record.get("parent_id")) or None,
        text_of(record.get("name")),
        nanoseconds(record.get("start_time")),
        nanoseconds(record.get("end_time")),
        {text_of(key): value for key, value in attributes.items()},
        [_event(mapping(event)) for event in events] if isinstance(events, list) else [],
        error=text_of(record.get("status_message") or "error") if failed else "",
    )


def _event(event: Mapping[str, Any]) -> SpanEvent:
    attributes = mapping(event.get("attributes"))
    return SpanEvent(text_of(event.get("name")), attributes, time=nanoseconds(event.get("timestamp")))


EXPORT = Export(name="Phoenix", has=_has, read=_read, lists=("data",))
