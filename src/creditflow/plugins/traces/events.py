"""Model calls recorded only in events: in log records whose span is missing or is not a model call.

Groups events into calls; `span_reading` reads their contents as it reads any call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from creditflow.plugins.traces.conventions.base import ModelCall
from creditflow.plugins.traces.span_reading import (
    has_no_kind,
    is_call,
    is_reward_event,
    message_kind,
    read_span,
)
from creditflow.plugins.traces.spans import NO_SPAN, Span, SpanEvent, is_of_models


def with_calls_apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield `spans`, and one more span inside a span for each call that its events record besides the span itself."""
    spans = list(spans)
    if nameless := [span for span in spans if span.id == NO_SPAN]:
        spans = _with_their_events(spans, nameless)
    for span in spans:
        if span.events:
            yield from _parts(span)
        else:
            yield span


def _with_their_events(spans: list[Span], nameless: Sequence[Span]) -> list[Span]:
    """Give calls without messages the events of `nameless`, the log records that name no span.

    In each trace, the recorded calls are matched in order with the calls that lack messages. If the counts differ, the
    match is ambiguous and neither is changed.
    """
    traces = {span.trace for span in nameless}
    lacking: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start or 0):
        if span.trace in traces and span.id != NO_SPAN:
            meaning, _ = read_span(span)
            if isinstance(meaning, ModelCall) and not (meaning.messages and meaning.response):
                lacking.setdefault(span.trace, []).append(span)
    changed: dict[int, Span] = {}
    for span in nameless:
        groups, calls = _recorded_calls(span), lacking.get(span.trace, [])
        if calls and len(groups) == len(calls):
            taken = {id(event) for events in groups for event in events}
            changed[id(span)] = replace(span, events=[event for event in span.events if id(event) not in taken])
            for call, events in zip(calls, groups, strict=True):
                changed[id(call)] = replace(call, events=[*call.events, *events])
    spans = [changed.get(id(span), span) for span in spans]
    return [span for span in spans if span.id != NO_SPAN or span.events]


def unread(span: Span) -> Iterator[str]:
    """Names of a span's generative-AI events that no rule reads."""
    for event in span.events:
        if is_of_models(event) and not message_kind(event) and not is_reward_event(event):
            yield event.name


def _parts(span: Span) -> list[Span]:
    groups = _recorded_calls(span)
    if not groups:
        return [span]
    grouped = {id(event) for events in groups for event in events}
    rest = [event for event in span.events if id(event) not in grouped]
    if rest or span.name or span.attributes:
        parts = [replace(span, events=rest)]
        return parts + [_call(span, events, f"{span.id}/{number}", span.id) for number, events in enumerate(groups)]
    if len(groups) == 1:
        return [_call(span, groups[0], span.id, None)]
    return [_call(span, events, f"{span.id}/{number}", None) for number, events in enumerate(groups)]


def _recorded_calls(span: Span) -> list[list[SpanEvent]]:
    """Events grouped by the call they record; empty if the span is that call."""
    whole = [[event] for event in span.events if message_kind(event) == "call"]
    if is_call(span):
        return whole if len(whole) > 1 else []
    return whole + (_exchanges(span.events) if has_no_kind(span) else [])


def _exchanges(events: Sequence[SpanEvent]) -> list[list[SpanEvent]]:
    """Group events of one message each; a prompt message after a response begins another call."""
    calls: list[list[SpanEvent]] = []
    before = "response"
    for event in events:
        if (kind := message_kind(event)) in ("prompt", "response"):
            if not calls or (kind, before) == ("prompt", "response"):
                calls.append([])
            calls[-1].append(event)
            before = kind
    return calls


def _call(span: Span, events: list[SpanEvent], id: str, parent: str | None) -> Span:
    times = [event.time for event in events if event.time is not None]
    attributes = {name: value for event in events for name, value in event.attributes.items()}
    start, end = min(times, default=span.start), max(times, default=span.end)
    attributes = {"gen_ai.operation.name": "chat", **attributes}
    call = Span(span.trace, id, parent, events[0].name, start, end, attributes, events, resource=span.resource)
    return replace(call, trace_id=span.trace_id, scope=span.scope)
