"""LangSmith: its export over OTLP, and its runs (`traces.exports.langsmith`)."""

from __future__ import annotations

from creditflow.traces.content import json_of
from creditflow.traces.conventions.base import Attributes, Convention, Messages
from creditflow.traces.requests import prompt_of, responses_of
from creditflow.traces.spans import Span, text_of

_KIND, _NODE, _METADATA = "langsmith.span.kind", "langsmith.metadata.langgraph_node", "langsmith.metadata."
_PROMPT, _RESPONSE = "gen_ai.prompt", "gen_ai.completion"


def _messages(attributes: Attributes) -> Messages:
    """The messages in a model call's inputs and outputs: those of the model's API, or LangChain's."""
    if text_of(attributes.get(_KIND)).lower() != "llm":
        return [], []
    inputs, outputs = json_of(attributes.get(_PROMPT)), json_of(attributes.get(_RESPONSE))
    return prompt_of(inputs), responses_of(outputs)


def _agent(span: Span) -> str | None:
    """A chain's name; None for LangChain's own chains."""
    is_agent = span.attributes.get(_KIND) == "chain" and not span.name.startswith("Runnable")
    return text_of(span.attributes.get(_NODE)) or span.name if is_agent else None


CONVENTION = Convention(
    name="langsmith",
    precedence=55,
    kinds=(_KIND,),
    calls=((_KIND, ("llm", "LLM")),),
    messages=_messages,
    shared_message_attributes=(_PROMPT, _RESPONSE),
    call_agent=(_NODE,),
    temperature=(f"{_METADATA}ls_temperature",),
    agent_span=_agent,
    agent_attributes=(_KIND,),
)
