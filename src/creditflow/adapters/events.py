"""Model calls that events alone tell of: in log records whose span is not there, or that name a span of something else.

It knows which events are of one call, by OpenTelemetry's conventions; what they say is read as any call's is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from creditflow.adapters.meaning import CHOICE, DETAILS, PROMPT, ROLES, TEXT, is_call, is_nothing
from creditflow.adapters.spans import Event, Span

_READ, _WROTE = frozenset((*ROLES, PROMPT)), frozenset((CHOICE, TEXT))


def with_calls_apart(spans: Iterable[Span]) -> Iterator[Span]:
    """`spans`; each call that the events of one tell of, and that is not the span itself, is one more, inside of it."""
    for span in spans:
        if span.events:
            yield from _parts(span)
        else:
            yield span


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
