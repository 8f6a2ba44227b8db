"""Reads trace files: OTLP, the spans and scores that tracing products export as JSON, and chat logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from creditflow.errors import DataError
from creditflow.plugins.traces.chat_log import call_span, is_chat_log, read_chat_log
from creditflow.plugins.traces.spans import (
    Reward,
    RewardWithoutNumber,
    Span,
    SpanEvent,
    id_of,
    json_values,
    mapping,
    nanoseconds,
    objects_of,
    protobuf_messages,
    spans_and_logs,
    text_of,
    time_of,
    with_events,
)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Export:
    """The form in which a product writes its spans and scores as JSON."""

    name: str
    has: Callable[[Record], bool]
    """Whether an object is a record of this form."""
    read: Callable[[Sequence[Record]], Iterator[Span]]
    """Reads the spans and scores of a file's records."""
    lists: tuple[str, ...] = ()
    """Keys of the lists of records in an object around them, such as a page of a REST API."""


def _span(
    trace: Any, ids: tuple[Any, Any], name: Any, times: tuple[int | None, int | None], attributes: Record, error: Any
) -> Span:
    """A span. `ids`: its own and its parent's; `times`: start and end."""
    own = {text_of(key): value for key, value in attributes.items() if value is not None}
    id, parent = text_of(ids[0]), text_of(ids[1]) or None
    return Span(text_of(trace), id, parent, text_of(name), *times, own, error=text_of(error))


def _score(name: Any, value: Any, label: Any, trace: Any, target: Any, time: int | None) -> Span:
    """A score of the span `target`, or without one of the whole trace.

    `value`: a number or a label; None: `label` is the label. `trace` may be empty if there is a target.
    """
    if not isinstance(value, int | float | RewardWithoutNumber):
        value = RewardWithoutNumber.label(label if value is None else value)
    reward = Reward([(text_of(name), value)], [(("span_id", text_of(target)),)] if target else [()])
    return Span(text_of(trace), "", None, text_of(name), time, time, {}, rewards=[reward])


CHAT_LOG = Export("a chat log (a list `messages`, or `request` and `response`)", is_chat_log, read_chat_log)


# The events of Agent Lightning 1.0's gateway, as its API returns them.
#
# Agent Lightning 0.3 has spans (`spans.py`). The gateway keeps one reward for each rollout, the last one. That reward
# becomes the outcome, and an earlier one belongs to the call before it.


def _lightning_read(records: Sequence[Record]) -> Iterator[Span]:
    rewards: dict[str, list[tuple[Any, str, int | None]]] = defaultdict(list)
    last_call: dict[str, str] = defaultdict(str)
    for number, event in enumerate(records):
        trace = "/".join(filter(None, (text_of(event["rollout_id"]), text_of(event.get("attempt_id")))))
        data, end = mapping(event["data"]), nanoseconds(event.get("timestamp"))
        if event["event_type"] == "model_request":
            duration = nanoseconds(data.get("latency_ms"), 1e6)
            start = None if end is None or duration is None else time_of(end - duration)
            error = f"status {data.get('http_status')}" if data.get("status") == "error" else ""
            call = call_span(data, trace, number)
            last_call[trace] = call.id
            yield replace(call, start=start, end=end, error=error)
        elif event["event_type"] == "reward":
            rewards[trace].append((data.get("value"), last_call[trace], end))
    for trace, values in rewards.items():
        for number, (value, call_id, time) in enumerate(values, 1):
            yield _score("reward", value, None, trace, call_id if number < len(values) else "", time)


_LIGHTNING_EVENT = frozenset(("event_type", "rollout_id", "data"))
LIGHTNING = Export("Agent Lightning 1.0", lambda record: record.keys() >= _LIGHTNING_EVENT, _lightning_read)


# Langfuse's scores, as its SDK posts them since version 5. Its spans go over OTLP.


def _langfuse_read(records: Sequence[Record]) -> Iterator[Span]:
    for score in records:
        name, trace = text_of(score.get("name")) or "score", score.get("traceId")
        value, label = score.get("value"), score.get("stringValue")
        if not trace:
            value = RewardWithoutNumber("it belongs to a session, not to a trace")
        yield _score(name, value, label, trace, score.get("observationId"), nanoseconds(score.get("timestamp")))


def _is_langfuse(record: Record) -> bool:
    return {"name", "value"} <= record.keys() and not record.keys().isdisjoint(("traceId", "sessionId"))


LANGFUSE = Export("Langfuse", _is_langfuse, _langfuse_read, ("data",))


# LangSmith's runs and feedback, as its client posts them.
#
# A run becomes a span with the attributes of LangSmith's own export over OTLP, so that one convention reads both.


def _is_feedback(record: Record) -> bool:
    return {"key", "run_id"} <= record.keys() and not record.keys().isdisjoint(("score", "value"))


def _langsmith_read(records: Sequence[Record]) -> Iterator[Span]:
    runs: dict[str, dict[str, Any]] = defaultdict(dict)
    for record in records:
        if _is_feedback(record):
            value, label, time = record.get("score"), record.get("value"), nanoseconds(record.get("created_at"))
            yield _score(record.get("key"), value, label, record.get("trace_id"), record.get("run_id"), time)
        else:  # the client posts a run when it starts and patches it when it ends
            runs[text_of(record["id"])] |= {key: value for key, value in record.items() if value is not None}
    for run in runs.values():
        outputs, metadata = mapping(run.get("outputs")), mapping(mapping(run.get("extra")).get("metadata"))
        attributes = {
            "langsmith.span.kind": run.get("run_type"),
            "gen_ai.prompt": run.get("inputs"),
            "gen_ai.completion": run.get("outputs"),
            "gen_ai.request.model": metadata.get("ls_model_name"),
            "gen_ai.request.temperature": metadata.get("ls_temperature"),
            "gen_ai.response.id": outputs.get("id"),
            **{f"langsmith.metadata.{text_of(key)}": value for key, value in metadata.items()},
        }
        ids = run["id"], run.get("parent_run_id")
        times = nanoseconds(run.get("start_time")), nanoseconds(run.get("end_time"))
        yield _span(run.get("trace_id") or run["id"], ids, run.get("name"), times, attributes, run.get("error"))


def _is_langsmith(record: Record) -> bool:
    return ("id" in record and not record.keys().isdisjoint(("run_type", "dotted_order"))) or _is_feedback(record)


LANGSMITH = Export("LangSmith", _is_langsmith, _langsmith_read, ("post", "patch", "runs"))


# MLflow's traces with their assessments, as `Trace.to_dict` and `to_json` write them.


def _mlflow_read(records: Sequence[Record]) -> Iterator[Span]:
    for record in records:
        info, spans = record["info"], record["data"]["spans"]
        trace = text_of(info.get("trace_id") or info.get("request_id"))
        for raw in objects_of(spans):
            status, ids = mapping(raw.get("status")), (id_of(raw.get("span_id")), id_of(raw.get("parent_span_id")))
            error = status.get("message") or "error" if status.get("code") == "STATUS_CODE_ERROR" else ""
            times = time_of(raw.get("start_time_unix_nano")), time_of(raw.get("end_time_unix_nano"))
            yield _span(trace, ids, raw.get("name"), times, mapping(raw.get("attributes")), error)
        for assessment in objects_of(info.get("assessments")):
            # Expectations give no score, and a feedback that was overridden is not valid.
            if isinstance(feedback := assessment.get("feedback"), Mapping) and assessment.get("valid") is not False:
                name, time = assessment.get("assessment_name"), nanoseconds(assessment.get("create_time"))
                yield _score(name, feedback.get("value"), None, trace, id_of(assessment.get("span_id")), time)


def _is_mlflow(record: Record) -> bool:
    return isinstance(record.get("info"), Mapping) and "spans" in mapping(record.get("data"))


MLFLOW = Export("MLflow", _is_mlflow, _mlflow_read, ("traces",))


# Phoenix's spans and annotations, as its REST API returns them.


def _is_annotation(record: Record) -> bool:
    return {"name", "annotator_kind"} <= record.keys() and not record.keys().isdisjoint(("span_id", "trace_id"))


def _phoenix_read(records: Sequence[Record]) -> Iterator[Span]:
    for record in records:
        if _is_annotation(record):  # that of a span names no trace
            result, time = mapping(record.get("result")), nanoseconds(record.get("updated_at"))
            value, label = result.get("score"), result.get("label")
            yield _score(record.get("name"), value, label, record.get("trace_id"), record.get("span_id"), time)
            continue
        context = mapping(record["context"])
        # Phoenix takes the kind out of the attributes.
        attributes = {"openinference.span.kind": record["span_kind"], **mapping(record.get("attributes"))}
        error = record.get("status_message") or "error" if record.get("status_code") == "ERROR" else ""
        ids = context.get("span_id"), record.get("parent_id")
        times = nanoseconds(record.get("start_time")), nanoseconds(record.get("end_time"))
        span = _span(context.get("trace_id"), ids, record.get("name"), times, attributes, error)
        for event in objects_of(record.get("events")):
            time = nanoseconds(event.get("timestamp"))
            span.events.append(SpanEvent(text_of(event.get("name")), mapping(event.get("attributes")), time=time))
        yield span


def _is_phoenix(record: Record) -> bool:
    return ("span_kind" in record and "trace_id" in mapping(record.get("context"))) or _is_annotation(record)


PHOENIX = Export("Phoenix", _is_phoenix, _phoenix_read, ("data",))


EXPORTS = (CHAT_LOG, LIGHTNING, LANGFUSE, LANGSMITH, MLFLOW, PHOENIX)


def _export_of(value: Any) -> Export | None:
    """The form of a record, or of an object with a list of records; else None."""
    for export in EXPORTS:
        if any(isinstance(record, Mapping) and export.has(record) for record in _records(value, export)):
            return export
    return None


def _records_of(export: Export, values: Iterable[Any], where: str) -> list[Record]:
    """The records in a file's values. Raises DataError for a record of another form."""
    records = [record for value in values for record in _records(value, export)]
    for number, record in enumerate(records, 1):
        if not (isinstance(record, Mapping) and export.has(record)):
            raise DataError(f"{where}: record {number}: expected a record of {export.name}, got {repr(record)[:80]}")
    return records


def _records(value: Any, export: Export) -> list[Any]:
    """The records of a value: the entries of its lists, or else the value itself."""
    lists = [entries for key in export.lists if isinstance(entries := mapping(value).get(key), list)]
    return [record for entries in lists for record in entries] if lists else [value]


def read_spans(paths: Path | str | Iterable[Path | str]) -> list[Span]:
    """Read the spans of one file, or of several that belong together.

    Collectors may write spans to one file and the log records with their messages to another, and products their scores
    to a third. Reads OTLP as JSON (one object, or one per line), OTLP as protobuf (`.pb`, `.bin`, `.binpb`), Agent
    Lightning's spans as JSON (a list, or one per line), exports of other products, and chat logs (`chat_log`). Raises
    DataError for a file of another form.
    """
    spans: list[Span] = []
    logs: list[Span] = []
    exported: dict[Export, list[Record]] = {}
    for path in map(Path, [paths] if isinstance(paths, Path | str) else paths):
        try:
            data = path.read_bytes()
        except OSError as error:
            hint = "; name the files in it" if isinstance(error, IsADirectoryError) else ""
            raise DataError(f"{path}: {error.strerror or error}{hint}") from error
        if not data.strip():
            raise DataError(f"{path}: is empty")
        is_protobuf = path.suffix in (".pb", ".bin", ".binpb")
        read = protobuf_messages(data, str(path)) if is_protobuf else json_values(data, path)
        values = [record for value in read for record in (value if isinstance(value, list) else [value])]
        if values and (export := _export_of(values[0])) is not None:
            exported.setdefault(export, []).extend(_records_of(export, values, str(path)))
        else:
            more, records = spans_and_logs(values, str(path))
            spans += more
            logs += records
    spans += [span for export, of_export in exported.items() for span in export.read(of_export)]
    return _with_traces(with_events(spans, logs))


def from_chat_log(lines: Iterable[Any]) -> list[Span]:
    """Read the spans of a chat log's lines, given as JSON values. Raises DataError for a line of another form."""
    return list(CHAT_LOG.read(_records_of(CHAT_LOG, lines, "chat log")))


def _with_traces(spans: list[Span]) -> list[Span]:
    """Place scores without a trace in the trace of their span, if only one trace has a span of that id."""
    links = [(span, link) for span in spans if not span.trace for reward in span.rewards for link in reward.links]
    traces: dict[str, set[str]] = defaultdict(set)
    for span in spans if links else ():
        traces[span.id].add(span.trace)
    for score, link in links:
        for _, target in link:
            score.trace = next(iter(traces[target])) if len(traces[target]) == 1 else ""
    return spans
