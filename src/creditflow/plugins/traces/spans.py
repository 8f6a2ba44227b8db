"""Spans of a trace, read from OTLP (JSON, JSON lines, protobuf), OpenTelemetry objects or Agent Lightning's spans.

Nothing is dropped here: a damaged span in a readable file keeps the fields that could be read. `span_reading`
interprets the attributes.
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

from creditflow._utils.install import needs
from creditflow.errors import DataError, first_line, json_fault

LIST_TYPES = (list, tuple)
"""A tuple, as `list | tuple` would make a new type at every check, dozens of times per span."""
LATEST = (1 << 63) - 2
"""The largest valid time. Times are nanoseconds since 1970, above 0; a value outside this range counts as missing."""


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

    reason: str = "no score was recorded"

    @classmethod
    def label(cls, text: Any) -> RewardWithoutNumber:
        label = text_of(text)
        return cls(f"it is no number, but a label: {label[:80]!r}") if label else cls()


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
    is_cut: bool = False
    """Whether a limit on the number of attributes or events has dropped some."""
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


def json_values(data: bytes, path: Path) -> Iterator[Any]:
    """Yield the single value of a JSON file, or the value of each line."""
    try:
        # The decoder holds back a last character that is cut off; its line is cut off too.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data)
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {error.start}"
        hint = "unpack compressed files first; protobuf is known by a name that ends with .pb or .bin"
        raise DataError(f"{path}: expected JSON in UTF-8: {place}; {hint}") from error
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.split("\n") if line.strip()]  # JSON strings may contain other line separators
        if len(lines) < 2:
            raise DataError(f"{path}: expected OTLP as JSON: {first_line(error)}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                place = f"line {number} of those that are not empty: {json_fault(error)}"
                raise DataError(f"{path}: {place}; expected one JSON value, or one in each line") from error
            warnings.warn(f"{path}: line {number}, the last, is torn; all before it is read", stacklevel=2)


def expect_spans(values: Iterable[Any], where: str) -> list[dict[str, Any]]:
    """The JSON objects of spans and log records, from `values` or from lists in it.

    Metrics and profiles, which collectors may write to the same file, are skipped. Raises DataError for other objects,
    or if nothing is left; its message begins with `where`.
    """
    objects = [record for value in values for record in (value if isinstance(value, list) else [value])]
    records = [(n, o) for n, o in enumerate(objects, 1) if not (isinstance(o, dict) and _OTHER_SIGNALS & o.keys())]
    if objects and not records:
        raise DataError(f"{where}: expected spans or log records, got metrics or profiles")
    for number, record in records:
        place = f"{where}: object {number}" if len(objects) > 1 else where
        if not (isinstance(record, dict) and ("span_id" in record or not _OTLP.isdisjoint(record))):
            keys = list(record) if isinstance(record, dict) else []
            content = f"an object with {', '.join(map(repr, keys[:5]))}" if keys else repr(record)
            raise DataError(
                f"{place}: expected OTLP (`resourceSpans`, `resourceLogs`), Agent Lightning's spans (`span_id`), an "
                "export of LangSmith, Langfuse, MLflow or Phoenix, or a chat log (a list `messages`, or `request` and "
                f"`response`), got {content[:300]}"
            )
    return [record for _, record in records]


_OTHER_SIGNALS = frozenset(("resourceMetrics", "resourceProfiles"))
_OTLP = frozenset(("resourceSpans", "resourceLogs"))


def from_json(values: Iterable[Any], where: str = "spans") -> list[Span]:
    """Read spans from JSON values, or lists of them, in OTLP or Agent Lightning's form.

    Log records that name a span become its events, even from another message. `gen_ai.*` records whose span is missing
    become a new span. Raises DataError for other values; its message begins with `where`.
    """
    return with_events(*spans_and_logs(values, where))


def spans_and_logs(values: Iterable[Any], where: str) -> tuple[list[Span], list[Span]]:
    """The spans in values for `from_json`, and each log record as a span with one event."""
    objects = expect_spans(values, where)
    spans, logs = from_agent_lightning(record for record in objects if "span_id" in record), list[Span]()
    for message in (record for record in objects if "span_id" not in record):
        spans += [_from_otlp(*record) for record in _records(message, _SPAN_KEYS, where)]
        logs += [_from_log(*record) for record in _records(message, _LOG_KEYS, where)]
    return spans, logs


def with_events(spans: list[Span], logs: Iterable[Span]) -> list[Span]:
    """Add log records to their spans as events; `gen_ai.*` records whose span is missing get a new one."""
    by_place = {(span.trace_id or span.trace, span.id): span for span in spans}
    known: set[tuple[int, str]] = set()
    for number, log in enumerate(sorted(logs, key=lambda log: log.start or 0)):  # collectors write them in any order
        (event,) = log.events
        # Records that name no span do not belong together.
        key = log.trace, log.id or f"log record {number}"
        if (span := by_place.get(key)) is None and is_of_models(event):
            span = by_place[key] = replace(log, id=key[1], events=[])
            spans.append(span)
        if span is not None and (event.time is None or (id(span), repr(event)) not in known):  # some write them twice
            known.add((id(span), repr(event)))
            span.events.append(event)
    return spans


# ---- OTLP ----------------------------------------------------------------------------------------------------------


_SPAN_KEYS = ("resourceSpans", "scopeSpans", "spans")
_LOG_KEYS = ("resourceLogs", "scopeLogs", "logRecords")
"""Keys of the lists of resources, scopes and records."""
_Record = tuple[Mapping[str, Any], Mapping[str, Any], str]


def _records(message: Mapping[str, Any], keys: tuple[str, str, str], where: str) -> Iterator[_Record]:
    """Each record of a message, with the attributes of its resource and the name of its instrumentation."""
    for group in _each(message, keys[0], where):
        resource = _attributes(mapping(group.get("resource")).get("attributes"))
        for scope in _each(group, keys[1], f"{where}: {keys[0]}"):
            name = text_of(mapping(scope.get("scope")).get("name"))
            for record in _each(scope, keys[2], f"{where}: {keys[1]}"):
                yield record, resource, name


def _each(holder: Mapping[str, Any], key: str, where: str) -> Sequence[Mapping[str, Any]]:
    """The objects in a list of `holder`. Raises DataError for anything else, such as a list of another name."""
    items, others = holder.get(key), [name for name in holder.keys() - _BESIDE_LISTS if isinstance(holder[name], list)]
    if (items is None and others) or not isinstance(items, list | None):
        raise DataError(f"{where}: {key}: expected a list, got {', '.join(sorted(others)) or repr(items)[:80]}"[:300])
    if odd := [item for item in items or () if not isinstance(item, dict)]:
        raise DataError(f"{where}: {key}: expected objects, got {repr(odd[0])[:80]}")
    return items or ()


_BESIDE_LISTS = _OTLP | _OTHER_SIGNALS | {"resource", "scope", "schemaUrl"}


def _from_log(raw: Mapping[str, Any], resource: Mapping[str, Any], scope: str) -> Span:
    """A log record as a span with one event."""
    event, trace, id = _otlp_event(raw), id_of(raw.get("traceId")), id_of(raw.get("spanId"))
    return Span(trace, id, None, "", event.time, event.time, {}, [event], resource=resource, scope=scope)


def _otlp_event(raw: Mapping[str, Any]) -> SpanEvent:
    """An event of a span, or a log record. A `gen_ai.*` name in an attribute is preferred."""
    attributes = _attributes(raw.get("attributes"))
    names = (raw.get("eventName"), raw.get("name"), attributes.get("event.name"), attributes.get("otel.event.name"))
    texts = [text_of(name) for name in names if name]
    name = next((text for text in texts if text.startswith("gen_ai.")), texts[0] if texts else "")
    time = time_of(raw.get("timeUnixNano")) or time_of(raw.get("observedTimeUnixNano"))
    return SpanEvent(name, attributes, _value(raw.get("body")), time)


def is_of_models(event: SpanEvent) -> bool:
    """Whether an event belongs to OpenTelemetry's generative-AI conventions, by its name, attributes or body."""
    body = event.body if isinstance(event.body, dict) else {}
    return event.name.startswith("gen_ai.") or any(key.startswith("gen_ai.") for key in (*event.attributes, *body))


def _from_otlp(raw: Mapping[str, Any], resource: Mapping[str, Any], scope: str) -> Span:
    get, status = raw.get, mapping(raw.get("status"))
    ids = id_of(get("traceId")), id_of(get("spanId")), id_of(get("parentSpanId")) or None
    times = time_of(get("startTimeUnixNano")), time_of(get("endTimeUnixNano"))
    events = [_otlp_event(event) for event in objects_of(get("events"))]
    links = [Link(id_of(link.get("traceId")), id_of(link.get("spanId"))) for link in objects_of(get("links"))]
    error = text_of(status.get("message") or "error") if status.get("code") in (2, "STATUS_CODE_ERROR") else ""
    is_cut = any(holder.get("droppedAttributesCount") for holder in (raw, *objects_of(get("events"))))
    is_cut |= bool(get("droppedEventsCount")) and any(map(is_of_models, events))
    values = _attributes(get("attributes"))
    return Span(*ids, text_of(get("name")), *times, values, events, links, error, resource, scope=scope, is_cut=is_cut)


def from_readable(spans: Sequence[Any], logs: Sequence[Any] = ()) -> list[Span]:
    """Read OpenTelemetry's `ReadableSpan` and `ReadableLogRecord` objects, as exporters receive them.

    Raises InputError if opentelemetry-exporter-otlp-proto-common is not installed.
    """
    with needs("OTLP", "traces"):
        from google.protobuf.json_format import MessageToDict
        from opentelemetry.exporter.otlp.proto.common._log_encoder import encode_logs
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    messages = [MessageToDict(encode_spans(spans)), MessageToDict(encode_logs(logs))]
    return from_json(message for message in messages if message)


def protobuf_messages(data: bytes, where: str) -> list[dict[str, Any]]:
    """Decode OTLP in protobuf to messages in JSON form.

    `data` is one message (TracesData, LogsData, or an export request, which has the same bytes) or a sequence of
    messages, each after its length in four bytes, as collectors write them to files. Raises DataError for other bytes,
    InputError if opentelemetry-proto is not installed.
    """
    with needs(f"{where}: OTLP", "traces"):
        from google.protobuf.json_format import MessageToDict
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
        from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
        from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
    # The bytes do not identify their message type. Parsed as metrics, only metrics have valid names; parsed as spans,
    # log records fail or have no ids.
    signals = (
        (MetricsData, ("resourceMetrics", "scopeMetrics", "metrics"), {"name"}),
        (TracesData, _SPAN_KEYS, {"spanId"}),
        (LogsData, _LOG_KEYS, {"body", "eventName", "attributes"}),
    )

    def message_of(part: bytes) -> dict[str, Any]:
        for signal, keys, marks in signals:
            with suppress(DecodeError):
                message: dict[str, Any] = MessageToDict(signal.FromString(part))
                records = [record for record, *_ in _records(message, keys, where)]
                if records and not any(map(marks.isdisjoint, records)):
                    return message
        return dict(MessageToDict(TracesData.FromString(part)))

    try:
        return [message_of(part) for part in _framed(data, where) or [data]]
    except DecodeError as error:
        raise DataError(f"{where}: expected OTLP as protobuf: {first_line(error)}") from error


def _framed(data: bytes, where: str) -> list[bytes]:
    """The messages of a file of length-prefixed messages; empty for any other file."""
    parts: list[bytes] = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if not 0 < length <= len(data) - at - 4:
            if parts:
                torn = f"{where}: message {len(parts) + 1}, the last, is torn; all before it is read"
                warnings.warn(torn, stacklevel=2)
            return parts
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


def _attributes(raw: Any) -> dict[str, Any]:
    return {text_of(pair.get("key")): _value(pair.get("value")) for pair in objects_of(raw)}


def _value(raw: Any) -> Any:
    """An OTLP AnyValue as a Python value; None if it is malformed or nested too deep."""
    kind, value = next(iter(mapping(raw).items()), ("", cast(Any, None)))
    try:
        if kind == "arrayValue":
            return [_value(item) for item in objects_of(mapping(value).get("values"))]
        if kind == "kvlistValue":
            return _attributes(mapping(value).get("values"))
        return int(value) if kind == "intValue" else float(value) if kind == "doubleValue" else value
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


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
        text = "" if value is None else str(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a deeply nested list
        return ""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def time_of(raw: Any) -> int | None:
    """`raw` as nanoseconds; None if it is not a valid time."""
    try:
        time = int(raw)
    except (TypeError, ValueError, OverflowError):
        return None
    return time if 0 < time <= LATEST else None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def objects_of(value: Any) -> list[Any]:
    """The objects in a list; empty for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, LIST_TYPES) else []


# ---- Agent Lightning -----------------------------------------------------------------------------------------------


def from_agent_lightning(spans: Iterable[Any]) -> list[Span]:
    """Read Agent Lightning's spans (0.3), as objects or as `model_dump` output; each attempt is one trajectory."""
    with without_collection():
        return [_of_agent_lightning(_plain(raw).get) for raw in spans]


def _of_agent_lightning(get: Callable[[str], Any]) -> Span:
    rollout, attempt, trace_id = get("rollout_id"), get("attempt_id"), text_of(get("trace_id"))
    trace = f"{text_of(rollout)}/{text_of(attempt)}" if rollout and attempt else text_of(rollout or attempt or trace_id)
    status, resource = _plain(get("status")), _plain(get("resource"))
    ids = trace, text_of(get("span_id")), text_of(get("parent_id") or None) or None
    times = nanoseconds(get("start_time")), nanoseconds(get("end_time"))
    error = text_of(status.get("description") or "error") if status.get("status_code") == "ERROR" else ""
    values, of_resource = _plain(get("attributes")), _plain(resource.get("attributes"))
    return Span(*ids, text_of(get("name")), *times, values, error=error, resource=of_resource, trace_id=trace_id)


def _plain(value: Any) -> Mapping[str, Any]:
    """A mapping as is, or a model's fields as a mapping."""
    is_mapping = type(value) is dict or isinstance(value, Mapping)  # most are a dict, and the first check is fast
    return value if is_mapping else getattr(value, "__dict__", None) or {}


def nanoseconds(time: Any, unit: float = 1e9) -> int | None:
    """A number of units of `unit` nanoseconds, or a time in ISO 8601 (UTC without a zone); None if it is neither."""
    try:
        if isinstance(time, str):
            date = datetime.fromisoformat(time)
            since = (date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH
            return time_of(since // timedelta(microseconds=1) * 1000)
        return time_of(float(time) * unit)
    except (TypeError, ValueError, OverflowError):
        return None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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
