"""MLflow: its export over OTLP, and its traces (`traces.exports.mlflow`)."""

from __future__ import annotations

from creditflow.traces.content import json_of
from creditflow.traces.conventions.base import Attributes, Convention, Messages
from creditflow.traces.requests import prompt_of, responses_of

_KIND, _INPUTS, _OUTPUTS = "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs"
_CALLS, _AGENTS = (("LLM", "CHAT_MODEL", '"LLM"', '"CHAT_MODEL"'), ("AGENT", '"AGENT"'))


def _messages(attributes: Attributes) -> Messages:
    """The messages in a model call's inputs and outputs: those of the model's API, or LangChain's."""
    if attributes.get(_KIND) not in _CALLS:
        return [], []
    return prompt_of(json_of(attributes.get(_INPUTS))), responses_of(json_of(attributes.get(_OUTPUTS)))


CONVENTION = Convention(
    name="mlflow",
    precedence=55,
    kinds=(_KIND,),
    calls=((_KIND, _CALLS),),
    messages=_messages,
    shared_message_attributes=(_INPUTS, _OUTPUTS),
    model=("mlflow.llm.model",),
    parameters=(_INPUTS,),
    usage=("mlflow.chat.tokenUsage",),
    agent_kinds=((_KIND, _AGENTS, ""),),
)
