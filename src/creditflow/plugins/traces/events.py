"""Model calls recorded only in events: in log records whose span is missing or is not a model call.

Makes a span for each such call; `span_reading` reads its contents as it reads any call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from creditflow.plugins.traces.span_reading import has_no_kind, is_call, is_reward_event, message_kind
from creditflow.plugins.traces.spans import Span, SpanEvent, is_of_models


def with_calls_apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield `spans`, and one more span inside a span for each call that its events record besides the span itself."""
    for span in spans:
        calls = _recorded_calls(span) if span.events else ()
        taken = {id(event) for events in calls for event in events}
        yield replace(span, events=[event for event in span.events if id(event) not in taken]) if calls else span
        for number, events in enumerate(calls):
            attributes = {"gen_ai.operation.name": "chat"}
            for event in events:
                attributes |= event.attributes
            times = [event.time for event in events if event.time is not None]
            start, end = min(times, default=span.start), max(times, default=span.end)
            call = Span(span.trace, f"{span.id}/{number}", span.id, events[0].name, start, end, attributes, events)
            yield replace(call, resource=span.resource, trace_id=span.trace_id, scope=span.scope)


def _recorded_calls(span: Span) -> Sequence[list[SpanEvent]]:
    """Events by the call that they record; empty if the span is that call.

    Events of one message each are one call if they have at most one response: of several calls, which messages belong
    together was not recorded.
    """
    whole = [[event] for event in span.events if message_kind(event) == "call"]
    if is_call(span):
        return whole if len(whole) > 1 else ()
    messages = [event for event in span.events if message_kind(event) in ("prompt", "response")]
    kinds = [message_kind(event) for event in messages]
    is_one = kinds.count("response") <= 1 and "prompt" in kinds and has_no_kind(span)
    return [*whole, messages] if is_one else whole


def unread(span: Span) -> Iterator[tuple[str, str]]:
    """Name and reason of each of a span's generative-AI events that no rule reads."""
    is_kindless = has_no_kind(span)
    for event in span.events:
        if is_kindless and message_kind(event):
            yield event.name, "which call of its span it belongs to was not recorded"
        elif is_of_models(event) and not message_kind(event) and not is_reward_event(event):
            yield event.name, "an event of this name is not read"
