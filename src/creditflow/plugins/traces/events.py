"""Model calls recorded in events: parts of a span's own call, and calls on spans of another kind or on missing spans.

Makes a span for each of the latter; `span_reading` reads its contents as it reads any call's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from creditflow.plugins.traces.conventions import conventions
from creditflow.plugins.traces.span_reading import Kind, is_reward_event, kind_of, message_kind
from creditflow.plugins.traces.spans import Span, SpanEvent, is_of_models, text_of

_OPERATION = "gen_ai.operation.name"


def with_calls_apart(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield `spans`, each call with the attributes of its records, and a new span inside for every other call."""
    for span in spans:
        kind = kind_of(span) if span.events else None
        calls = _recorded_calls(span, kind) if span.events else ()
        taken = {id(event) for events in calls for event in events}
        rest = [event for event in span.events if id(event) not in taken] if calls else span.events
        recorded = [{key: value for event in events for key, value in event.attributes.items()} for events in calls]
        if len(calls) == 1 and kind == "call":
            # The longer of two values counts: a limit may have cut off the other.
            own = {k: v for k, v in span.attributes.items() if len(text_of(v)) >= len(text_of(recorded[0].get(k)))}
            yield replace(span, attributes={**recorded[0], **own}, events=rest)
            continue
        yield replace(span, events=rest) if calls else span
        for number, (events, attributes) in enumerate(zip(calls, recorded, strict=True)):
            times = [event.time for event in events if event.time is not None]
            start, end = min(times, default=span.start), max(times, default=span.end)
            ids = span.trace, f"{span.id}/{number}", span.id, events[0].name
            messages = [event for event in events if message_kind(event) != "record"]
            call = Span(*ids, start, end, {_OPERATION: "chat", **attributes}, messages)
            yield replace(call, resource=span.resource, trace_id=span.trace_id, scope=span.scope)


def _recorded_calls(span: Span, kind: Kind) -> Sequence[list[SpanEvent]]:
    """Events by the call that they record.

    Records are parts of one call unless an attribute of messages repeats; then each with a prompt and a response is a
    call. On an agent's or a tool's span they are its own messages, unless they name another operation. Messages on a
    span without a kind are one call if they have at most one response: of several, which belong together was not
    recorded.
    """
    is_part, operation = kind in ("call", None), span.attributes.get(_OPERATION)
    records = [event for event in span.events if message_kind(event) == "record"]
    records = [e for e in records if is_part or e.attributes.get(_OPERATION, operation) != operation]
    prompt = {place.attribute for convention in conventions() for place in convention.prompt}
    response = {place.attribute for convention in conventions() for place in convention.response}
    parts = [record.attributes.keys() & (prompt | response) for record in records]
    is_one = sum(map(len, parts)) == len(set().union(*parts)) and parts.count(set()) <= 1
    whole = [[r] for r, part in zip(records, parts, strict=True) if bool(part & prompt) == bool(part & response)]
    calls = whole if not is_one else [records] if records else []
    messages = [event for event in span.events if message_kind(event) in ("prompt", "response")]
    kinds = [message_kind(event) for event in messages]
    return [*calls, messages] if kind is None and kinds.count("response") <= 1 and "prompt" in kinds else calls


def unread(span: Span) -> Iterator[tuple[str, str]]:
    """Name and reason of each of a span's generative-AI events that no rule reads."""
    kind = kind_of(span)
    for event in span.events:
        form = message_kind(event)
        if (kind is None and form) or (kind == "call" and form == "record"):
            yield event.name, "which call of its span it belongs to was not recorded"
        elif is_of_models(event) and not form and not is_reward_event(event):
            yield event.name, "an event of this name is not read"
