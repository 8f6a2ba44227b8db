"""MLflow's traces with their assessments, as `Trace.to_dict` and `to_json` write them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from creditflow.traces.exports.base import Export, GivenScore, Records, nanoseconds, value_or_label
from creditflow.traces.requests import mapping
from creditflow.traces.spans import Span, id_of, text_of, time_of


def _has(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("info"), Mapping) and "spans" in mapping(record.get("data"))


def _read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for record in records:
        info, spans = record["info"], record["data"]["spans"]
        trace = text_of(info.get("trace_id") or info.get("request_id"))
        for number, span in enumerate(spans if isinstance(spans, list) else (), 1):
            if isinstance(span, Mapping):
                into.spans.append(_span(trace, span))
            else:
                into.lost.append((f"{trace}: span {number}", f"expected an object, got {type(span).__name__}"))
        assessments = info.get("assessments")
        for assessment in assessments if isinstance(assessments, list) else ():
            into.scores += _scores(trace, mapping(assessment))


def _span(trace: str, raw: Mapping[str, Any]) -> Span:
    attributes = {text_of(key): _decoded(value) for key, value in mapping(raw.get("attributes")).items()}
    status = mapping(raw.get("status"))
    return Span(
        trace,
        id_of(raw.get("span_id")),
        id_of(raw.get("parent_span_id")) or None,
        text_of(raw.get("name")),
        time_of(raw.get("start_time_unix_nano")),
        time_of(raw.get("end_time_unix_nano")),
        attributes,
        error=text_of(status.get("message") or "error") if status.get("code") == "STATUS_CODE_ERROR" else "",
    )


def _decoded(value: Any) -> Any:
    """An attribute's value, which MLflow stores as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _scores(trace: str, assessment: Mapping[str, Any]) -> Iterator[GivenScore]:
    """The feedback in force. Expectations give no score."""
    if not isinstance(assessment.get("feedback"), Mapping) or assessment.get("valid") is False:
        return
    name, span = text_of(assessment.get("assessment_name")), id_of(assessment.get("span_id"))
    value = value_or_label(assessment["feedback"].get("value"))
    yield GivenScore(name, value, trace, (span,) if span else (), nanoseconds(assessment.get("create_time")))


EXPORT = Export(name="MLflow", has=_has, read=_read, lists=("traces",))
