"""Exports of tracing products: their spans and scores as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from creditflow.plugins.traces.messages import mapping
from creditflow.plugins.traces.spans import (
    LATEST,
    NO_SCORE,
    UNREADABLE,
    Reward,
    RewardWithoutNumber,
    Span,
    SpanEvent,
    id_of,
    text_of,
    time_of,
)

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
    score = label if value is None else value
    return None if score is None else text_of(score)


# The events of Agent Lightning 1.0's gateway, as its API returns them.
#
# Agent Lightning 0.3 has spans (`spans.py`). The gateway keeps one reward for each rollout, the last one. That reward
# becomes the outcome, and an earlier one belongs to the call before it.


_LIGHTNING_EVENT = frozenset(("event_type", "rollout_id", "data"))


def _lightning_read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    rewards: dict[str, list[GivenScore]] = {}
    last_call: dict[str, str] = {}
    for number, event in enumerate(records):
        trace = "/".join(filter(None, (text_of(event["rollout_id"]), text_of(event.get("attempt_id")))))
        data, time = mapping(event["data"]), _lightning_nanoseconds(event.get("timestamp"))
        if event["event_type"] == "model_request":
            last_call[trace] = f"event {number}"
            into.spans.append(_lightning_call(trace, last_call[trace], data, time))
        elif event["event_type"] == "reward":
            target = (last_call[trace],) if trace in last_call else ()
            reward = GivenScore("reward", value_or_label(data.get("value")), trace, target, time)
            rewards.setdefault(trace, []).append(reward)
    for scores in rewards.values():
        scores[-1].targets = ()
        into.scores += scores


def _lightning_call(trace: str, id: str, data: Mapping[str, Any], ended: int | None) -> Span:
    request, response = mapping(data.get("request")), mapping(data.get("response"))
    choices = response.get("choices")
    choice = mapping(choices[0]) if isinstance(choices, list) and choices else {}
    usage, latency = mapping(data.get("usage")), data.get("latency_ms")
    took = _lightning_nanoseconds(latency, 1e6)
    started = None if ended is None or took is None else time_of(ended - took)
    own = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": data.get("model"),
        "gen_ai.request.temperature": request.get("temperature"),
        "gen_ai.input.messages": dict(request),
        "gen_ai.output.messages": dict(response) if choice else None,
        "gen_ai.response.id": response.get("id"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "prompt_token_ids": response.get("prompt_token_ids"),
        "response_token_ids": choice.get("token_ids"),
        "logprobs.content": mapping(choice.get("logprobs")).get("content"),
    }
    error = f"status {data.get('http_status')}" if data.get("status") == "error" else ""
    attributes = {key: value for key, value in own.items() if value is not None}
    return Span(trace, id, None, "model_request", started, ended, attributes, error=error)


def _lightning_nanoseconds(time: Any, unit: float = 1e9) -> int | None:
    """A time of any size as nanoseconds; None if it is not a number of a usable size. `unit`: its nanoseconds."""
    try:
        return time_of(float(time) * unit)
    except (TypeError, ValueError, OverflowError):
        return None


LIGHTNING = Export(
    name="Agent Lightning 1.0", has=lambda record: record.keys() >= _LIGHTNING_EVENT, read=_lightning_read
)


# Langfuse's scores, as its SDK posts them since version 5. Its spans go over OTLP.


def _langfuse_has(record: Mapping[str, Any]) -> bool:
    return {"name", "value"} <= record.keys() and not record.keys().isdisjoint(("traceId", "sessionId"))


def _langfuse_read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for score in records:
        name, trace = text_of(score.get("name")) or "score", text_of(score.get("traceId"))
        if not trace:
            into.lost.append((f"score {name}", "it belongs to a session, not to a trace"))
            continue
        observation = text_of(score.get("observationId"))
        time = nanoseconds(score.get("timestamp"))
        value = value_or_label(score.get("value"), score.get("stringValue"))
        into.scores.append(GivenScore(name, value, trace, (observation,) if observation else (), time))


LANGFUSE = Export(name="Langfuse", has=_langfuse_has, read=_langfuse_read, lists=("data",))


# LangSmith's runs and feedback, as its client posts them.
#
# A run becomes a span with the attributes of LangSmith's own export over OTLP, so that one convention reads both.


def _langsmith_has(record: Mapping[str, Any]) -> bool:
    is_run = "id" in record and not record.keys().isdisjoint(("run_type", "dotted_order"))
    return is_run or _langsmith_is_feedback(record)


def _langsmith_is_feedback(record: Mapping[str, Any]) -> bool:
    return {"key", "run_id"} <= record.keys() and not record.keys().isdisjoint(("score", "value"))


def _langsmith_read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    runs: dict[str, dict[str, Any]] = {}
    for record in records:
        if _langsmith_is_feedback(record):
            into.scores.append(_langsmith_score(record))
            continue
        # The client posts a run when it starts and patches it when it ends.
        run = runs.setdefault(text_of(record["id"]), {})
        run |= {key: value for key, value in record.items() if value is not None}
    into.spans += map(_langsmith_span, runs.values())


def _langsmith_score(record: Mapping[str, Any]) -> GivenScore:
    run, trace = text_of(record.get("run_id")), text_of(record.get("trace_id"))
    value = value_or_label(record.get("score"), record.get("value"))
    targets = (run,) if run else ()
    return GivenScore(text_of(record.get("key")), value, trace, targets, nanoseconds(record.get("created_at")))


def _langsmith_span(run: Mapping[str, Any]) -> Span:
    outputs, metadata = mapping(run.get("outputs")), mapping(mapping(run.get("extra")).get("metadata"))
    usage = mapping(outputs.get("usage_metadata") or metadata.get("usage_metadata"))
    attributes = {
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
        {key: value for key, value in attributes.items() if value is not None},
        error=text_of(run.get("error")),
    )


LANGSMITH = Export(name="LangSmith", has=_langsmith_has, read=_langsmith_read, lists=("post", "patch", "runs"))


# MLflow's traces with their assessments, as `Trace.to_dict` and `to_json` write them.


def _mlflow_has(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("info"), Mapping) and "spans" in mapping(record.get("data"))


def _mlflow_read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for record in records:
        info, spans = record["info"], record["data"]["spans"]
        trace = text_of(info.get("trace_id") or info.get("request_id"))
        for number, span in enumerate(spans if isinstance(spans, list) else (), 1):
            if isinstance(span, Mapping):
                into.spans.append(_mlflow_span(trace, span))
            else:
                into.lost.append((f"{trace}: span {number}", f"expected an object, got {type(span).__name__}"))
        assessments = info.get("assessments")
        for assessment in assessments if isinstance(assessments, list) else ():
            into.scores += _mlflow_scores(trace, mapping(assessment))


def _mlflow_span(trace: str, raw: Mapping[str, Any]) -> Span:
    attributes = {
        text_of(key): value if key in _MLFLOW_MESSAGES else _mlflow_decoded(value)
        for key, value in mapping(raw.get("attributes")).items()
    }
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


_MLFLOW_MESSAGES = ("mlflow.spanInputs", "mlflow.spanOutputs")
"""Attributes that stay JSON, as over OTLP: their convention decodes them once."""


def _mlflow_decoded(value: Any) -> Any:
    """An attribute's value, which MLflow stores as JSON."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _mlflow_scores(trace: str, assessment: Mapping[str, Any]) -> Iterator[GivenScore]:
    """The feedback in force. Expectations give no score."""
    if not isinstance(assessment.get("feedback"), Mapping) or assessment.get("valid") is False:
        return
    name, span = text_of(assessment.get("assessment_name")), id_of(assessment.get("span_id"))
    value = value_or_label(assessment["feedback"].get("value"))
    yield GivenScore(name, value, trace, (span,) if span else (), nanoseconds(assessment.get("create_time")))


MLFLOW = Export(name="MLflow", has=_mlflow_has, read=_mlflow_read, lists=("traces",))


# Phoenix's spans and annotations, as its REST API returns them.


def _phoenix_has(record: Mapping[str, Any]) -> bool:
    return ("span_kind" in record and "trace_id" in mapping(record.get("context"))) or _phoenix_is_annotation(record)


def _phoenix_is_annotation(record: Mapping[str, Any]) -> bool:
    return {"name", "annotator_kind"} <= record.keys() and not record.keys().isdisjoint(("span_id", "trace_id"))


def _phoenix_read(records: Sequence[Mapping[str, Any]], into: Records) -> None:
    for record in records:
        if _phoenix_is_annotation(record):
            into.scores.append(_phoenix_score(record))
        else:
            into.spans.append(_phoenix_span(record))


def _phoenix_score(record: Mapping[str, Any]) -> GivenScore:
    """The score of an annotation. A span's annotation names no trace."""
    result, span = mapping(record.get("result")), text_of(record.get("span_id"))
    value = value_or_label(result.get("score"), result.get("label"))
    targets, time = ((span,) if span else ()), nanoseconds(record.get("updated_at"))
    return GivenScore(text_of(record.get("name")), value, text_of(record.get("trace_id")), targets, time)


def _phoenix_span(record: Mapping[str, Any]) -> Span:
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
        [_phoenix_event(mapping(event)) for event in events] if isinstance(events, list) else [],
        error=text_of(record.get("status_message") or "error") if failed else "",
    )


def _phoenix_event(event: Mapping[str, Any]) -> SpanEvent:
    attributes = mapping(event.get("attributes"))
    return SpanEvent(text_of(event.get("name")), attributes, time=nanoseconds(event.get("timestamp")))


PHOENIX = Export(name="Phoenix", has=_phoenix_has, read=_phoenix_read, lists=("data",))


EXPORTS = (LIGHTNING, LANGFUSE, LANGSMITH, MLFLOW, PHOENIX)
"""All forms of exports, by name."""


def export_of(value: Any) -> Export | None:
    """The form of a record, or of an object with a list of records; else None."""
    if not isinstance(value, Mapping):
        return None
    return next((export for export in EXPORTS if any(map(export.has, _records_in(value, export.lists)))), None)


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
    lists_of = [value[key] for key in lists if isinstance(value.get(key), list)] if isinstance(value, Mapping) else []
    return [record for entries in lists_of for record in entries] if lists_of else [value]


def _records_in(value: Mapping[str, Any], lists: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    return (record for record in _entries(value, lists)[:_LOOKED_AT] if isinstance(record, Mapping))


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
    scored = []
    for number, score in enumerate(scores, 1):
        candidates = traces.get(score.targets[0], ()) if score.targets else ()
        trace = score.trace or (next(iter(candidates)) if len(candidates) == 1 else "")
        value = RewardWithoutNumber.label(score.value) if isinstance(score.value, str) else score.value
        reward = Reward(
            [(score.name, NO_SCORE if value is None else value)],
            [(("span_id", target),) for target in score.targets] or [()],
        )
        scored.append(Span(trace, f"score {number}", None, score.name, score.time, score.time, {}, rewards=[reward]))
    return scored
