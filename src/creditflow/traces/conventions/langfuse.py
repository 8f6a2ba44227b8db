"""Langfuse, over OTLP. Its scores come apart (`traces.exports.langfuse`)."""

from __future__ import annotations

from creditflow.traces.conventions.base import Attributes, Convention, Messages
from creditflow.traces.messages import messages_of

_KIND, _INPUT, _OUTPUT = "langfuse.observation.type", "langfuse.observation.input", "langfuse.observation.output"


def _messages(attributes: Attributes) -> Messages:
    return messages_of(attributes.get(_INPUT)), messages_of(attributes.get(_OUTPUT))


CONVENTION = Convention(
    name="langfuse",
    precedence=70,
    kinds=(_KIND,),
    calls=((_KIND, ("generation", "GENERATION")),),
    messages=_messages,
    shared_message_attributes=(_INPUT, _OUTPUT),
    response_model=("langfuse.observation.model.name",),
    parameters=("langfuse.observation.model.parameters",),
    usage=("langfuse.observation.usage_details",),
    agent_kinds=((_KIND, ("agent", "AGENT"), ""),),
)
