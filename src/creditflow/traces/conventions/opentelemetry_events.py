"""OpenTelemetry's conventions before 1.37: one event per message, or attributes `gen_ai.prompt` and `.completion`."""

from __future__ import annotations

from creditflow.traces.content import Raw, json_of
from creditflow.traces.conventions.base import Attributes, Convention, Messages
from creditflow.traces.messages import messages_of
from creditflow.traces.spans import SpanEvent

_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_CHOICE, _PROMPT, _TEXT = "gen_ai.choice", "gen_ai.content.prompt", "gen_ai.content.completion"


def _messages(attributes: Attributes) -> Messages:
    return messages_of(attributes.get("gen_ai.prompt")), messages_of(attributes.get("gen_ai.completion"))


def _event_messages(event: SpanEvent) -> Messages:
    if event.name in _ROLES:
        return [{"role": _ROLES[event.name], **_body(event)}], []
    if event.name == _CHOICE:
        body = dict(_body(event))
        message = json_of(body.pop("message", None))
        more = message if isinstance(message, dict) else {} if message is None else {"content": message}
        return [], [{**body, **more}]
    return _messages(event.attributes)


def _body(event: SpanEvent) -> Raw:
    for body in (json_of(event.body), json_of(event.attributes.get("gen_ai.event.content"))):
        if isinstance(body, dict):
            return body
    return dict(event.attributes)


CONVENTION = Convention(
    name="opentelemetry_events",
    precedence=80,
    messages=_messages,
    message_attributes=("gen_ai.completion",),
    shared_message_attributes=("gen_ai.prompt",),
    prompt_events=(*_ROLES, _PROMPT),
    response_events=(_CHOICE, _TEXT),
    event_messages=_event_messages,
)
