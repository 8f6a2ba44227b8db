"""Model calls that events alone tell of: in log records whose span is not there, or that name a span of something else.

It knows which events are of one call, by OpenTelemetry's conventions; what they say is read as any call's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from creditflow.adapters.meaning import (
    CHOICE,
    DETAILS,
    PROMPT,
    ROLES,
    TEXT,
    ModelCall,
    is_call,
    is_evaluation,
    is_nothing,
    read_span,
)
from creditflow.adapters.spans import NO_SPAN, Event, Span, is_of_models

_READ, _WROTE = frozenset((*ROLES, PROMPT)), frozenset((CHOICE, TEXT))
MESSAGES = _READ | _WROTE | {DETAILS}
"""Names of the events that have a call's messages."""


def with_calls_apart(spans: Iterable[Span]) -> Iterator[Span]:
    """`spans`; each call that the events of one tell of, and that is not the span itself, is one more, inside of it."""
    spans = list(spans)
    if nameless := [span for span in spans if span.id == NO_SPAN]:
        spans = _with_their_events(spans, nameless)
    for span in spans:
        if span.events:
            yield from _parts(span)
        else:
            yield span


def _with_their_events(spans: list[Span], nameless: Sequence[Span]) -> list[Span]:
    """`spans`, where calls that lack messages have the events of `nameless`, the records that name no span.

    In each trace, the calls that the records tell of are matched in order with the calls that lack messages; where
    their numbers differ, nothing tells which belongs to which.
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
        told, calls = _told(span), lacking.get(span.trace, [])
        if calls and len(told) == len(calls):
            taken = {id(event) for events in told for event in events}
            changed[id(span)] = replace(span, events=[event for event in span.events if id(event) not in taken])
            for call, events in zip(calls, told, strict=True):
                changed[id(call)] = replace(call, events=[*call.events, *events])
    found = [changed.get(id(span), span) for span in spans]
    return [span for span in found if span.id != NO_SPAN or span.events]


def unread(span: Span) -> Iterator[str]:
    """Names of a span's events that are of models and that nothing reads."""
    for event in span.events:
        if is_of_models(event) and event.name not in MESSAGES and not is_evaluation(event):
            yield event.name


def _parts(span: Span) -> list[Span]:
    told = _told(span)
    if not told:
        return [span]
    of_calls = {id(event) for events in told for event in events}
    rest = [event for event in span.events if id(event) not in of_calls]
    if rest or span.name or span.attributes:
        parts = [replace(span, events=rest)]
        return parts + [_call(span, events, f"{span.id}/{number}", span.id) for number, events in enumerate(told)]
    if len(told) == 1:
        return [_call(span, told[0], span.id, None)]
    return [_call(span, events, f"{span.id}/{number}", None) for number, events in enumerate(told)]


def _told(span: Span) -> list[list[Event]]:
    """Events by the call that they tell of; none where the span is that call."""
    whole = [[event] for event in span.events if event.name == DETAILS]
    if is_call(span):
        return whole if len(whole) > 1 else []
    return whole + (_exchanges(span.events) if is_nothing(span) else [])


def _exchanges(events: Sequence[Event]) -> list[list[Event]]:
    """One event a message: what is read after something was written begins another call."""
    found: list[list[Event]] = []
    answered = True
    for event in events:
        if event.name in _READ:
            if answered:
                found.append([])
            answered = False
        elif event.name in _WROTE:
            if not found:
                found.append([])
            answered = True
        else:
            continue
        found[-1].append(event)
    return found


def _call(span: Span, events: list[Event], id: str, parent: str | None) -> Span:
    times = [event.time for event in events if event.time is not None]
    said = {name: value for event in events for name, value in event.attributes.items()}
    return Span(
        span.trace,
        id,
        parent,
        events[0].name,
        min(times, default=span.start),
        max(times, default=span.end),
        {"gen_ai.operation.name": "chat", **said},
        events,
        resource=span.resource,
        trace_id=span.trace_id,
    )
