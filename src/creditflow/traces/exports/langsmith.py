"""LangSmith's runs and feedback, as its client posts them.

A run becomes a span with the attributes of LangSmith's own export over OTLP, so that one convention reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.traces.exports.base import Export, GivenScore, Records, nanoseconds, value_or_label
from creditflow.traces.requests import mapping
from creditflow.traces.spans import Span, text_of


def _has(record: Mapping[str, Any]) -> bool:
    is_run = "id" in record and not record.keys().isdisjoint(("run_type", "dotted_order"))
    return is_run or _is_feedback(record)


def _is_feedback(record: Mapping[str, Any]) -> bool:
    return {"key", "run_id"} <= record.keys() and not record.keys().isdisjoint(("score", "value"))


def _read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for record in records:
        if _is_feedback(record):
            into.scores.append(_score(record))
            continue
        # The client posts a run when it starts and patches it when it ends.
        known = runs.setdefault(text_of(record["id"]), {})
        known |= {key: value for key, value in record.items() if value is not None}
    into.spans += map(_span, runs.values())


def _score(record: Mapping[str, Any]) -> GivenScore:
    run, trace = text_of(record.get("run_id")), text_of(record.get("trace_id"))
    value = value_or_label(record.get("score"), record.get("value"))
    targets = (run,) if run else ()
    return GivenScore(text_of(record.get("key")), value, trace, targets, nanoseconds(record.get("created_at")))


def _span(run: Mapping[str, Any]) -> Span:
    outputs, metadata = mapping(run.get("outputs")), mapping(mapping(run.get("extra")).get("metadata"))
    usage = mapping(outputs.get("usage_metadata") or metadata.get("usage_metadata"))
    found = {
        "langsmith.span.kind": run.get("run_type"),
        "gen_ai.prompt": run.get("inputs"),
        "gen_ai.completion": run.get("outputs"),
        "gen_ai.request.model": metadata.get("ls_model_name"),
        "gen_ai.request.temperature": metadata.get("ls_temperature"),
        "gen_ai.response.id": outputs.get("id"),
        "gen_ai.usage.input_tokens": usage.get("input_tokens"),
        "gen_ai.usage.output_tokens": usage.get("output_tokens"),
        **{f"langsmith.metadata.{text_of(key)}": value for key, value in metadata.items()},
    }
    return Span(
        text_of(run.get("trace_id") or run["id"]),
        text_of(run["id"]),
        text_of(run.get("parent_run_id")) or None,
        text_of(run.get("name")),
        nanoseconds(run.get("start_time")),
        nanoseconds(run.get("end_time")),
        {key: value for key, value in found.items() if value is not None},
        error=text_of(run.get("error")),
    )


EXPORT = Export(name="LangSmith", has=_has, read=_read, lists=("post", "patch", "runs"))
