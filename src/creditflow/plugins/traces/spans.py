"""Spans of a trace, read from OTLP (JSON, JSON lines, protobuf), OpenTelemetry objects or Agent Lightning's spans.

Nothing is dropped here: a damaged span in a readable file keeps the fields that could be read. `meaning` interprets the
attributes.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import gc
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from creditflow.errors import DataError, InputError, first_line

LATEST = (1 << 63) - 2
"""The largest valid time. Times are nanoseconds since 1970, above 0; a value outside this range counts as missing."""
_NANOSECONDS = 1_000_000_000


@dataclass(slots=True)
class SpanEvent:
    """An event recorded on a span, or a log record that names the span."""

    name: str
    attributes: Mapping[str, Any]
    body: Any = None
    time: int | None = None


@dataclass(slots=True)
class Link:
    """A reference from one span to another."""

    trace: str
    span: str


Target = tuple[tuple[str, str], ...]
"""Pairs of attribute and value, all of which a span must have (`span_id` and `trace_id` are the span's ids). Without
pairs it is the whole trajectory."""


@dataclass(frozen=True, slots=True)
class RewardWithoutNumber:
    """A reward without a number: a label, or an attribute that is not read as a reward."""

    reason: str

    @classmethod
    def label(cls, text: Any) -> RewardWithoutNumber:
        label = text_of(text)
        return cls(f"it is no number, but a label: {label[:80]!r}") if label else NO_SCORE


NO_SCORE = RewardWithoutNumber("no score was recorded")


@dataclass(frozen=True, slots=True)
class Reward:
    """Named numbers or labels and their target."""

    values: list[tuple[str, Any]]
    links: list[Target] = field(default_factory=list)
    """The target: the first one that resolves; none: the span that gives the reward."""
    is_span: bool = False
    """Whether the span does nothing but give rewards: model calls inside of it are the judge's."""


@dataclass(slots=True)
class Span:
    """One span, independent of the form it was read from."""

    trace: str
    id: str
    parent: str | None
    name: str
    start: int | None
    """Nanoseconds since 1970; None: not recorded."""
    end: int | None
    attributes: Mapping[str, Any]
    events: list[SpanEvent] = field(default_factory=list)
    links: Sequence[Link] = ()
    error: str = ""
    """The status message if the status is an error, otherwise empty."""
    resource: Mapping[str, Any] = field(default_factory=dict)
    trace_id: str = ""
    """OpenTelemetry's trace id, if `trace` is something else."""
    scope: str = ""
    """The name of the instrumentation."""
    rewards: Sequence[Reward] = ()
    """Rewards listed apart from the attributes, as in exports and chat logs."""
    unread: Sequence[tuple[str, str]] = ()
    """Name and reason of each record of the file that could not be read."""


def distinct(spans: Iterable[Span], mended: Counter[str]) -> list[Span]:
    """Each span once: exporters may send one twice, or before its end and after it.

    Records of one id are of one span if nothing in them differs; then they complete one another.
    """
    once: dict[Any, Span] = {}
    for number, span in enumerate(spans):
        key = (span.trace, span.id) if span.id and not span.unread else number
        if (other := once.get(key)) is None:
            once[key] = span
        elif (span.name, span.start) == (other.name, other.start) and all(
            other.attributes.get(name, value) == value for name, value in span.attributes.items()
        ):
            mended["a span that was exported twice"] += 1
            once[key] = replace(
                other if span.end is None else span,
                attributes={**other.attributes, **span.attributes},
                events=list({repr(event): event for event in (*other.events, *span.events)}.values()),
            )
        else:
            once[number] = span
    return list(once.values())


NO_SPAN = "log records without a span"
"""The id of the span made for log records that name none, one per trace."""


def json_values(data: bytes, path: Path) -> Iterator[Any]:
    """Yield the single value of a JSON file, or the value of each line."""
    try:
        # The decoder holds back a last character that is cut off; its line is cut off too.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data)
    except UnicodeDecodeError as error:
        if data.startswith(_COMPRESSED):
            raise DataError(f"{path}: is compressed; unpack it first") from error
        raise DataError(
            f"{path}: expected JSON in UTF-8: {error.reason} at byte {error.start}; protobuf is known by a name that "
            "ends with .pb or .bin"
        ) from error
    try:
        yield json.loads(text)
        return
    except RecursionError as error:
        raise DataError(f"{path}: is nested too deep to be spans") from error
    except ValueError as error:
        lines = [line for line in text.split("\n") if line.strip()]  # JSON strings may contain other line separators
        if len(lines) < 2:
            raise DataError(f"{path}: expected OTLP as JSON: {first_line(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # the writer was interrupted
                warnings.warn(f"{path}: line {number}, the last, is torn; all before it is read", stacklevel=2)
                return
            raise DataError(
                f"{path}: line {number} of those that are not empty: {first_line(error)}; expected one JSON value, or "
                "one in each line"
            ) from error


_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""Magic numbers of gzip and zstandard files."""


def _without_metrics(objects: list[Any], where: str) -> list[Any]:
    """`objects` without metrics and profiles, which collectors may write to the same file.

    Raises DataError if nothing else is left.
    """
    others = [record for record in objects if not (isinstance(record, dict) and not _OTHER_SIGNALS.isdisjoint(record))]
    if objects and not others:
        raise DataError(f"{where}: expected spans or log records, got metrics or profiles")
    return others


_OTHER_SIGNALS = frozenset(("resourceMetrics", "resourceProfiles"))


def expect_spans(values: Iterable[Any], where: str) -> list[dict[str, Any]]:
    """The JSON objects of spans and log records, from `values` or from lists in it.

    Raises DataError for other objects; its message begins with `where`.
    """
    objects = _without_metrics(
        [record for value in values for record in (value if isinstance(value, list) else [value])], where
    )
    for number, record in enumerate(objects, 1):
        place = f"{where}: object {number}" if len(objects) > 1 else where
        if not (isinstance(record, dict) and ("span_id" in record or not _OTLP.isdisjoint(record))):
            keys = list(record) if isinstance(record, dict) else []
            content = f"an object with {', '.join(map(repr, keys[:5]))}" if keys else repr(record)
            form = next((form for key, form in _NOT_READ.items() if key in keys), None)
            content += f"; this looks like {form}, which is not read" if form else ""
            raise DataError(
                f"{place}: expected OTLP (`resourceSpans`, `resourceLogs`), Agent Lightning's spans (`span_id`), an "
                "export of LangSmith, Langfuse, MLflow or Phoenix, or a log of chats (`messages`, or `request` and "
                f"`response`), got {content[:300]}"
            )
        if broken := [key for key in _OTLP & record.keys() if not isinstance(record[key], list | None)]:
            raise DataError(f"{place}: {broken[0]}: expected a list, got {repr(record[broken[0]])[:80]}")
    return objects


_OTLP = frozenset(("resourceSpans", "resourceLogs"))
_NOT_READ = {
    "observations": "an export of Langfuse's page",
    "conversations": "ShareGPT's conversations",
    "resource_spans": "OTLP with names in snake_case",
    "context": "spans of OpenTelemetry's console exporter",
    "processes": "a trace of Jaeger",
    "data": "a page of another program's records",
}
"""Unsupported forms, by a key that only they have, for the error message."""


def from_json(values: Iterable[Any], where: str = "spans") -> list[Span]:
    """Read spans from JSON values, or lists of them, in OTLP or Agent Lightning's form.

    Raises DataError for other values; its message begins with `where`.
    """
    objects = expect_spans(values, where)
    spans, logs = _otlp(record for record in objects if "span_id" not in record)
    return _joined(spans, logs, from_agent_lightning(record for record in objects if "span_id" in record))


# ---- OTLP ----------------------------------------------------------------------------------------------------------


def from_otlp_json(messages: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Read spans from OTLP messages in JSON form.

    Log records that name a span become its events, even from another message. `gen_ai.*` records whose span is missing
    become a new span.
    """
    return _joined(*_otlp(messages))


Lost = list[tuple[str, str]]
"""Place and reason of each record of a file that could not be read."""


def _otlp(messages: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    """The spans of OTLP messages, and each log record as a span with one event."""
    spans: list[Span] = []
    logs: list[Span] = []
    lost: Lost = []
    for message in messages:
        spans += [_from_otlp(*record) for record in _records(message, _SPAN_KEYS, lost)]
        logs += [_log(*record) for record in _records(message, _LOG_KEYS, lost)]
    if lost:
        spans.append(Span("", UNREADABLE, None, "", None, None, {}, unread=lost))
    return spans, logs


_SPAN_KEYS = (("resourceSpans",), ("scopeSpans", "instrumentationLibrarySpans"), ("spans",))
_LOG_KEYS = (("resourceLogs",), ("scopeLogs", "instrumentationLibraryLogs"), ("logRecords", "logs"))
"""Keys of the lists of resources, scopes and records: the present names, then the earlier ones."""


def _records(
    message: Mapping[str, Any], keys: Sequence[Sequence[str]], lost: Lost
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str]]:
    """Each record of a message, with the attributes of its resource and the name of its instrumentation."""
    for where, group in _each(message, keys[0], "", lost):
        resource = _attributes(_object(group.get("resource")).get("attributes"))
        for place, scope in _each(group, keys[1], where, lost):
            name = text_of(_object(scope.get("scope", scope.get("instrumentationLibrary"))).get("name"))
            for _, record in _each(scope, keys[2], place, lost):
                yield record, resource, name


def _each(
    holder: Mapping[str, Any], keys: Sequence[str], where: str, lost: Lost
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a list of `holder`, each with its place in the file; list other values in `lost`."""
    key = next((key for key in keys if holder.get(key) is not None), keys[0])
    items = holder.get(key)
    place = f"{where}.{key}" if where else key
    if items is None:
        others = [text_of(other) for other in holder if other not in _BESIDE_LISTS and other not in _OTLP]
        if others:
            lost.append((place, f"expected a list, got {', '.join(others)[:100]}"))
    elif not isinstance(items, list):
        lost.append((place, f"expected a list, got {type(items).__name__}"))
    else:
        for number, item in enumerate(items):
            if isinstance(item, dict):
                yield f"{place}[{number}]", item
            else:
                lost.append((f"{place}[{number}]", f"expected an object, got {type(item).__name__}"))


_BESIDE_LISTS = frozenset(("resource", "scope", "schemaUrl", "instrumentationLibrary", "resourceMetrics"))
UNREADABLE = "unreadable"
"""The id of the span that carries the unreadable records of a file."""


def _log(raw: Mapping[str, Any], resource: Mapping[str, Any], scope: str) -> Span:
    attributes = _attributes(raw.get("attributes"))
    name = _event_name(raw.get("eventName"), attributes)
    time = time_of(raw.get("timeUnixNano")) or time_of(raw.get("observedTimeUnixNano"))
    event = SpanEvent(name, attributes, _value(raw.get("body")), time)
    return _span_of_log(id_of(raw.get("traceId")), id_of(raw.get("spanId")), event, resource, scope)


def _span_of_log(trace: str, id: str, event: SpanEvent, resource: Mapping[str, Any], scope: str) -> Span:
    return Span(trace, id, None, "", event.time, event.time, {}, [event], resource=resource, scope=scope)


def _event_name(name: Any, attributes: Mapping[str, Any]) -> str:
    """The event name of a log record, from its field or an attribute; a `gen_ai.*` name is preferred."""
    names = [text_of(text) for text in (name, *map(attributes.get, ("event.name", "otel.event.name"))) if text]
    return next((text for text in names if text.startswith("gen_ai.")), names[0] if names else "")


def is_of_models(event: SpanEvent) -> bool:
    """Whether an event belongs to OpenTelemetry's generative-AI conventions, by its name, attributes or body."""
    body = event.body if isinstance(event.body, dict) else {}
    return event.name.startswith("gen_ai.") or any(key.startswith("gen_ai.") for key in (*event.attributes, *body))


def _joined(spans: list[Span], logs: Sequence[Span], named_otherwise: Sequence[Span] = ()) -> list[Span]:
    """Attach log records to spans as events; `gen_ai.*` records whose span is missing get a new span without a name.

    `logs`: each a span with the record as its event. `named_otherwise`: further spans, whose `trace` differs from the
    trace id in log records.
    """
    spans = [*spans, *named_otherwise]
    if not logs:
        return spans
    by_place = {(span.trace, span.id): span for span in spans}
    any_trace, other_names = _by_id(spans), _by_id(named_otherwise)
    events: dict[int, tuple[Span, list[SpanEvent]]] = {}
    for number, log in enumerate(logs):
        # The records of one call belong together; an evaluation is separate, with its own time.
        (event,) = log.events
        is_alone = "evaluation" in event.name or any("evaluation" in key for key in event.attributes)
        key = log.trace, log.id or (f"log record {number}" if is_alone else NO_SPAN)
        span = by_place.get(key) or (other_names if log.trace else any_trace).get(log.id)
        if span is None and is_of_models(event):
            span = by_place[key] = replace(log, id=key[1], events=[])
            spans.append(span)
        if span is not None:
            events.setdefault(id(span), (span, []))[1].append(event)
    for span, records in events.values():
        span.events += _in_order(records)
    return spans


def _by_id(spans: Sequence[Span]) -> dict[str, Span]:
    """Id to span, for spans with a unique id."""
    often = Counter(span.id for span in spans)
    return {span.id: span for span in spans if span.id and often[span.id] == 1}


def _in_order(events: list[SpanEvent]) -> list[SpanEvent]:
    """Events sorted by time without duplicates: collectors may write records out of order, or twice."""
    if any(event.time is None for event in events):
        return events
    once = {repr(event): event for event in events}
    return sorted(once.values(), key=lambda event: event.time or 0)


def _from_otlp(raw: Mapping[str, Any], resource: Mapping[str, Any], scope: str) -> Span:
    status = _object(raw.get("status"))
    return Span(
        trace=id_of(raw.get("traceId")),
        id=id_of(raw.get("spanId")),
        parent=id_of(raw.get("parentSpanId")) or None,
        name=text_of(raw.get("name")),
        start=time_of(raw.get("startTimeUnixNano")),
        end=time_of(raw.get("endTimeUnixNano")),
        attributes=_attributes(raw.get("attributes")),
        events=[
            SpanEvent(
                text_of(event.get("name")),
                _attributes(event.get("attributes")),
                time=time_of(event.get("timeUnixNano")),
            )
            for event in _objects(raw.get("events"))
        ],
        links=[Link(id_of(link.get("traceId")), id_of(link.get("spanId"))) for link in _objects(raw.get("links"))],
        error=text_of(status.get("message") or "error") if status.get("code") in (2, "STATUS_CODE_ERROR") else "",
        resource=resource,
        scope=scope,
    )


def from_otlp_protobuf(data: bytes) -> list[Span]:
    """Read spans from OTLP messages in protobuf.

    `data` is one message (TracesData, LogsData, or an export request, which has the same bytes) or a sequence of
    messages, each after its length in four bytes, as collectors write them to files. Raises DataError for other bytes,
    InputError if opentelemetry-proto is not installed.
    """
    return from_otlp_json(protobuf_messages(data, "spans"))


def protobuf_messages(data: bytes, where: str) -> list[dict[str, Any]]:
    """Decode the bytes that `from_otlp_protobuf` accepts to OTLP messages in JSON form."""
    try:
        from google.protobuf.json_format import MessageToDict
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
        from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
    except ModuleNotFoundError as error:
        raise InputError(f"{where}: protobuf needs opentelemetry-proto: pip install 'creditflow[traces]'") from error

    def message_of(part: bytes) -> Any:
        # The bytes do not identify their message type. Parsed as metrics, only metrics have valid names; parsed as
        # spans, log records fail or have no ids.
        with suppress(DecodeError):
            data = MetricsData.FromString(part)
            metrics = [
                metric for group in data.resource_metrics for scope in group.scope_metrics for metric in scope.metrics
            ]
            if metrics and all(metric.name and metric.WhichOneof("data") for metric in metrics):
                return data
        with suppress(DecodeError):
            data = TracesData.FromString(part)
            spans = [span for group in data.resource_spans for scope in group.scope_spans for span in scope.spans]
            if not spans or any(span.span_id for span in spans):
                return data
        with suppress(DecodeError):
            data = LogsData.FromString(part)
            records = [log for group in data.resource_logs for scope in group.scope_logs for log in scope.log_records]
            if any(log.HasField("body") or log.event_name or log.attributes for log in records):
                return data
        return TracesData.FromString(part)

    try:
        messages = [MessageToDict(message_of(part)) for part in _framed(data, where) or [data]]
    except DecodeError as error:
        raise DataError(f"{where}: expected OTLP as protobuf: {first_line(error)}") from error
    return _without_metrics(messages, where)


def _framed(data: bytes, where: str) -> list[bytes]:
    """The messages of a file of length-prefixed messages; empty for any other file."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if not 0 < length <= len(data) - at - 4:
            if parts:
                warnings.warn(
                    f"{where}: message {len(parts) + 1}, the last, is torn; all before it is read", stacklevel=2
                )
            return parts
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


def _attributes(raw: Any) -> dict[str, Any]:
    return {text_of(pair.get("key")): _value(pair.get("value")) for pair in _objects(raw)}


def _value(raw: Any) -> Any:
    """An OTLP AnyValue as a Python value; None if it is malformed or nested too deep."""
    if not isinstance(raw, dict) or not raw:
        return None
    kind, value = next(iter(raw.items()))
    try:
        return _READ_AS[kind](value) if kind in _READ_AS else value
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


_READ_AS: dict[str, Callable[[Any], Any]] = {
    "intValue": int,
    "doubleValue": float,
    "arrayValue": lambda value: [_value(item) for item in _objects(_object(value).get("values"))],
    "kvlistValue": lambda value: _attributes(_object(value).get("values")),
}


def id_of(raw: Any) -> str:
    """An id in hexadecimal, from OTLP JSON (hexadecimal) or protobuf's JSON (base64); empty for all zeros."""
    text = text_of(raw)
    try:
        id = text.lower() if len(text) in (16, 32) else base64.b64decode(text, validate=True).hex()
        return id if id.strip("0") else ""
    except (binascii.Error, ValueError):
        return text


def text_of(value: Any) -> str:
    """`value` as a text that UTF-8 can encode; empty for None. A lone surrogate becomes U+FFFD."""
    if type(value) is str and value.isascii():  # the common case
        return value
    try:
        text = value if isinstance(value, str) else "" if value is None else str(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a deeply nested list
        return ""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def time_of(raw: Any) -> int | None:
    """`raw` as nanoseconds; None if it is not a valid time."""
    try:
        time = int(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= LATEST else None


def _object(raw: Any) -> Mapping[str, Any]:
    return raw if isinstance(raw, dict) else {}


def _objects(raw: Any) -> list[Any]:
    return [item for item in raw if isinstance(item, dict)] if isinstance(raw, list) else []


# ---- objects -------------------------------------------------------------------------------------------------------


def from_readable(spans: Iterable[Any], logs: Iterable[Any] = ()) -> list[Span]:
    """Read OpenTelemetry's `ReadableSpan` and `ReadableLogRecord` objects, as exporters receive them."""
    read = []
    for span in spans:
        context, parent, status = span.context, span.parent, span.status
        read.append(
            Span(
                trace=f"{context.trace_id:032x}",
                id=f"{context.span_id:016x}",
                parent=None if parent is None else f"{parent.span_id:016x}",
                name=span.name,
                start=time_of(span.start_time),
                end=time_of(span.end_time),
                attributes=span.attributes or {},
                events=[
                    SpanEvent(event.name, event.attributes or {}, time=time_of(event.timestamp))
                    for event in span.events
                ],
                links=[Link(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links],
                error="" if status.is_ok or status.is_unset else status.description or "error",
                resource=span.resource.attributes if span.resource is not None else {},
                scope=span.instrumentation_scope.name if span.instrumentation_scope is not None else "",
            )
        )
    return _joined(read, [_readable_log(log) for log in logs])


def _readable_log(log: Any) -> Span:
    record, resource = log.log_record, log.resource
    attributes = record.attributes or {}
    time = time_of(record.timestamp) or time_of(record.observed_timestamp)
    return _span_of_log(
        f"{record.trace_id:032x}" if record.trace_id else "",
        f"{record.span_id:016x}" if record.span_id else "",
        SpanEvent(_event_name(record.event_name, attributes), attributes, record.body, time),
        resource.attributes if resource is not None else {},
        log.instrumentation_scope.name if log.instrumentation_scope is not None else "",
    )


def from_agent_lightning(spans: Iterable[Any]) -> list[Span]:
    """Read Agent Lightning's spans (0.3), as objects or as `model_dump` output; each attempt is one trajectory."""
    with without_collection():
        return [
            _of_agent_lightning(raw if type(raw) is dict or isinstance(raw, Mapping) else vars(raw)) for raw in spans
        ]


def _of_agent_lightning(raw: Mapping[str, Any]) -> Span:
    get = raw.get
    rollout, attempt, status = get("rollout_id"), get("attempt_id"), _plain(get("status"))
    if rollout and attempt:
        trace = f"{text_of(rollout)}/{text_of(attempt)}"
    else:
        trace = text_of(rollout or attempt or None) or text_of(get("trace_id"))
    events, links, resource = get("events"), get("links"), _plain(get("resource"))
    return Span(
        trace,
        text_of(get("span_id")),
        text_of(parent) or None if (parent := get("parent_id")) else None,
        text_of(get("name")),
        _nanoseconds(get("start_time")),
        _nanoseconds(get("end_time")),
        _plain(get("attributes")),
        [_event(_plain(event)) for event in events] if events and isinstance(events, (list, tuple)) else [],
        [_link(_plain(_plain(link).get("context"))) for link in links]
        if links and isinstance(links, (list, tuple))
        else (),
        text_of(status.get("description") or "error") if status.get("status_code") == "ERROR" else "",
        _plain(resource.get("attributes")),
        text_of(get("trace_id")),
    )


def _event(raw: Mapping[str, Any]) -> SpanEvent:
    return SpanEvent(text_of(raw.get("name")), _plain(raw.get("attributes")))


def _link(context: Mapping[str, Any]) -> Link:
    return Link(text_of(context.get("trace_id")), text_of(context.get("span_id")))


def _plain(value: Any) -> Mapping[str, Any]:
    """A mapping as is, or a model's fields as a mapping."""
    if type(value) is dict or isinstance(value, Mapping):  # most are a dict, and the first check is fast
        return value
    return getattr(value, "__dict__", None) or {}


def _nanoseconds(seconds: Any) -> int | None:
    try:
        time = int(float(seconds) * _NANOSECONDS)
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= LATEST else None


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection inside the block and move the new objects to the oldest generation.

    For code that creates many objects and no cycles, where the search for cycles takes up to half of the time.
    `gc.freeze` and `gc.unfreeze` move the objects without scanning them. A process that already has frozen objects
    (before a fork) keeps them frozen: the move is skipped.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
