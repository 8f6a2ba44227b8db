"""Conventions of tracing products and agent frameworks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from creditflow.plugins.traces.content import Raw, json_of
from creditflow.plugins.traces.conventions.base import (
    NO_SCORE,
    Attributes,
    Convention,
    Entries,
    Messages,
    Reward,
    RewardWithoutNumber,
    first_of,
    name_of_agent_span,
)
from creditflow.plugins.traces.messages import listed, messages_of
from creditflow.plugins.traces.requests import prompt_of, responses_of
from creditflow.plugins.traces.spans import Span, text_of

# OpenInference (Arize Phoenix).
_OPENINFERENCE_KIND = "openinference.span.kind"
_OPENINFERENCE_LISTS = ("evaluations", "annotations")


def _openinference_agent(span: Span) -> str | None:
    return name_of_agent_span(span) if span.attributes.get(_OPENINFERENCE_KIND) == "AGENT" else None


def _openinference_reward_span(span: Span, entries: Entries) -> list[tuple[str, Any]] | None:
    return [] if span.attributes.get(_OPENINFERENCE_KIND) == "EVALUATOR" else None


def _openinference_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    """Rewards of the span, and of the whole trace."""
    if values := [score for name in _OPENINFERENCE_LISTS for score in _openinference_scores(entries(name), name)]:
        yield Reward(values)
    if values := [
        score for name in _OPENINFERENCE_LISTS for score in _openinference_scores(entries(f"trace.{name}"), name)
    ]:
        yield Reward(values, [()])


def _openinference_scores(entries: Sequence[Raw], list_name: str) -> Iterator[tuple[str, Any]]:
    """Name and score of each entry, such as `evaluations.0.evaluation.name` and `.score`."""
    word = list_name.removesuffix("s")
    for entry in entries:
        name = text_of(entry.get(f"{word}.name")) or word
        if f"{word}.score" in entry:
            yield name, entry[f"{word}.score"]
        elif f"{word}.label" in entry:
            yield name, RewardWithoutNumber.label(entry[f"{word}.label"])
        else:
            yield name, NO_SCORE


OPENINFERENCE = Convention(
    name="openinference",
    precedence=40,
    kinds=(_OPENINFERENCE_KIND,),
    calls=((_OPENINFERENCE_KIND, ("LLM",)),),
    prompt_list="llm.input_messages",
    response_list="llm.output_messages",
    model=("llm.model_name",),
    parameters=("llm.invocation_parameters",),
    prompt_tokens=("llm.token_count.prompt",),
    completion_tokens=("llm.token_count.completion",),
    span_agent=("agent.name",),
    agent_span=_openinference_agent,
    agent_attributes=(_OPENINFERENCE_KIND,),
    rewards=_openinference_rewards,
    reward_lists=(*_OPENINFERENCE_LISTS, *(f"trace.{name}" for name in _OPENINFERENCE_LISTS)),
    reward_span=_openinference_reward_span,
    reward_attributes=(_OPENINFERENCE_KIND,),
)


# LangGraph's nodes, as OpenLLMetry and OpenInference record them: a node is an agent.
_LANGGRAPH_NODE = "traceloop.association.properties.langgraph_node"


def _langgraph_node(attributes: Attributes) -> str:
    metadata = attributes.get("metadata")
    data = json_of(metadata) if isinstance(metadata, str) and "langgraph_node" in metadata else None
    node = data.get("langgraph_node") if isinstance(data, dict) else None
    return text_of(node) or text_of(attributes.get(_LANGGRAPH_NODE))


LANGGRAPH = Convention(
    name="langgraph",
    precedence=45,
    call_agent=(_LANGGRAPH_NODE,),
    agent_node=_langgraph_node,
    agent_attributes=("metadata", _LANGGRAPH_NODE),
)


# Agent Lightning, with the token ids that vLLM's server and LiteLLM add to its calls.
_LIGHTNING_REWARD, _LIGHTNING_OUTPUT = "agentlightning.reward", "agentlightning.operation.output"
_LIGHTNING_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


def _lightning_reward_span(span: Span, entries: Entries) -> list[tuple[str, Any]] | None:
    attributes = span.attributes
    if rewards := entries(_LIGHTNING_REWARD):
        return [(text_of(reward.get("name")) or "primary", reward.get("value", NO_SCORE)) for reward in rewards]
    if _LIGHTNING_REWARD in attributes:
        return [("primary", attributes[_LIGHTNING_REWARD])]
    if span.name == "agentlightning.annotation" and "reward" in attributes:  # before 0.3
        return [("primary", attributes["reward"])]
    for key in _LIGHTNING_AGENTOPS_OUTPUTS:  # its reward functions through AgentOps
        output = json_of(attributes.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return [("primary", output.get("value"))]
    is_empty = (
        span.name == "agentlightning.operation" and attributes.get("agentlightning.operation.name") == _LIGHTNING_REWARD
    )
    return [] if is_empty else None


LIGHTNING = Convention(
    name="agent_lightning",
    precedence=50,
    prompt_list="agentlightning.operation.input.messages",
    response_list=f"{_LIGHTNING_OUTPUT}.choices",
    prompt_ids=("prompt_token_ids", "llm.hosted_vllm.prompt_token_ids", f"{_LIGHTNING_OUTPUT}.prompt_token_ids"),
    response_ids=(
        "response_token_ids",
        "llm.hosted_vllm.response_token_ids",
        f"{_LIGHTNING_OUTPUT}.response_token_ids.0",
        f"{_LIGHTNING_OUTPUT}.choices.0.token_ids",
        f"{_LIGHTNING_OUTPUT}.choices.0.provider_specific_fields.token_ids",
    ),
    logprobs=("logprobs.content",),
    response_id=("llm.hosted_vllm.id", f"{_LIGHTNING_OUTPUT}.id"),
    span_agent=("recipient_agent_type", "langchain.chain.type", "executor.id"),
    agent_kinds=(("type", ("agent",), "agentlightning.operation.input.name"),),
    reward_span=_lightning_reward_span,
    reward_attributes=(_LIGHTNING_REWARD, "reward", "agentlightning.operation.name", *_LIGHTNING_AGENTOPS_OUTPUTS),
    reward_span_list=_LIGHTNING_REWARD,
    link_list="agentlightning.link",
)


# LangSmith: its export over OTLP, and its runs (`exports.py`).
_LANGSMITH_KIND, _LANGSMITH_NODE, _LANGSMITH_METADATA = (
    "langsmith.span.kind",
    "langsmith.metadata.langgraph_node",
    "langsmith.metadata.",
)
_LANGSMITH_PROMPT, _LANGSMITH_RESPONSE = "gen_ai.prompt", "gen_ai.completion"


def _langsmith_messages(attributes: Attributes) -> Messages:
    """The messages in a model call's inputs and outputs: those of the model's API, or LangChain's."""
    if text_of(attributes.get(_LANGSMITH_KIND)).lower() != "llm":
        return [], []
    inputs, outputs = json_of(attributes.get(_LANGSMITH_PROMPT)), json_of(attributes.get(_LANGSMITH_RESPONSE))
    return prompt_of(inputs), responses_of(outputs)


def _langsmith_agent(span: Span) -> str | None:
    """A chain's name; None for LangChain's own chains."""
    is_agent = span.attributes.get(_LANGSMITH_KIND) == "chain" and not span.name.startswith("Runnable")
    return text_of(span.attributes.get(_LANGSMITH_NODE)) or span.name if is_agent else None


LANGSMITH = Convention(
    name="langsmith",
    precedence=55,
    kinds=(_LANGSMITH_KIND,),
    calls=((_LANGSMITH_KIND, ("llm", "LLM")),),
    messages=_langsmith_messages,
    shared_message_attributes=(_LANGSMITH_PROMPT, _LANGSMITH_RESPONSE),
    call_agent=(_LANGSMITH_NODE,),
    temperature=(f"{_LANGSMITH_METADATA}ls_temperature",),
    agent_span=_langsmith_agent,
    agent_attributes=(_LANGSMITH_KIND,),
)


# MLflow: its export over OTLP, and its traces (`exports.py`).
_MLFLOW_KIND, _MLFLOW_INPUTS, _MLFLOW_OUTPUTS = "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs"
_MLFLOW_CALLS, _MLFLOW_AGENTS = (("LLM", "CHAT_MODEL", '"LLM"', '"CHAT_MODEL"'), ("AGENT", '"AGENT"'))


def _mlflow_messages(attributes: Attributes) -> Messages:
    """The messages in a model call's inputs and outputs: those of the model's API, or LangChain's."""
    if attributes.get(_MLFLOW_KIND) not in _MLFLOW_CALLS:
        return [], []
    return prompt_of(json_of(attributes.get(_MLFLOW_INPUTS))), responses_of(json_of(attributes.get(_MLFLOW_OUTPUTS)))


MLFLOW = Convention(
    name="mlflow",
    precedence=55,
    kinds=(_MLFLOW_KIND,),
    calls=((_MLFLOW_KIND, _MLFLOW_CALLS),),
    messages=_mlflow_messages,
    shared_message_attributes=(_MLFLOW_INPUTS, _MLFLOW_OUTPUTS),
    model=("mlflow.llm.model",),
    parameters=(_MLFLOW_INPUTS,),
    usage=("mlflow.chat.tokenUsage",),
    agent_kinds=((_MLFLOW_KIND, _MLFLOW_AGENTS, ""),),
)


# Vercel's AI SDK. The function id that a program gives to a call names its agent.
_VERCEL_MESSAGES, _VERCEL_PROMPT, _VERCEL_REASONING = "ai.prompt.messages", "ai.prompt", "ai.response.reasoning"
_VERCEL_RESPONSE = ("ai.response.text", "ai.response.object", "ai.result.text", "ai.result.object")
_VERCEL_TOOL_CALLS = ("ai.response.toolCalls", "ai.result.toolCalls")
_VERCEL_FILES = "ai.response.files"


def _vercel_messages(attributes: Attributes) -> Messages:
    text, calls = first_of(attributes, _VERCEL_RESPONSE), listed(first_of(attributes, _VERCEL_TOOL_CALLS))
    reasoning, files = attributes.get(_VERCEL_REASONING), listed(attributes.get(_VERCEL_FILES))
    response: Raw = {
        "role": "assistant", "reasoning": reasoning, "content": text, "parts": files, "tool_calls": calls
    }  # fmt: skip
    prompt = messages_of(attributes.get(_VERCEL_MESSAGES)) or _vercel_prompt(json_of(attributes.get(_VERCEL_PROMPT)))
    return prompt, [response] if text or calls or reasoning or files else []


def _vercel_prompt(prompt: Any) -> list[Raw]:
    """The messages of `ai.prompt`, an object with `system`, and `prompt` or `messages`."""
    if not isinstance(prompt, dict):
        return messages_of(prompt)
    system = [{"role": "system", "content": prompt["system"]}] if prompt.get("system") else []
    return system + messages_of(prompt.get("messages") or prompt.get("prompt"))


def _vercel_encloses_calls(attributes: Attributes) -> bool:
    """Whether the operation encloses requests (`ai.generateText`) rather than being one (`.doGenerate`)."""
    return ".do" not in text_of(attributes.get("ai.operationId", ".do"))


VERCEL = Convention(
    name="vercel",
    precedence=60,
    encloses_calls=_vercel_encloses_calls,
    messages=_vercel_messages,
    message_attributes=(_VERCEL_MESSAGES, _VERCEL_REASONING, *_VERCEL_RESPONSE, *_VERCEL_TOOL_CALLS),
    shared_message_attributes=(_VERCEL_PROMPT, _VERCEL_FILES),
    response_id=("ai.response.id",),
    finish_reason=("ai.response.finishReason",),
    call_agent=("ai.telemetry.functionId",),
)


# Langfuse, over OTLP. Its scores come apart (`exports.py`).
_LANGFUSE_KIND, _LANGFUSE_INPUT, _LANGFUSE_OUTPUT = (
    "langfuse.observation.type",
    "langfuse.observation.input",
    "langfuse.observation.output",
)


def _langfuse_messages(attributes: Attributes) -> Messages:
    return messages_of(attributes.get(_LANGFUSE_INPUT)), messages_of(attributes.get(_LANGFUSE_OUTPUT))


LANGFUSE = Convention(
    name="langfuse",
    precedence=70,
    kinds=(_LANGFUSE_KIND,),
    calls=((_LANGFUSE_KIND, ("generation", "GENERATION")),),
    messages=_langfuse_messages,
    shared_message_attributes=(_LANGFUSE_INPUT, _LANGFUSE_OUTPUT),
    response_model=("langfuse.observation.model.name",),
    parameters=("langfuse.observation.model.parameters",),
    usage=("langfuse.observation.usage_details",),
    agent_kinds=((_LANGFUSE_KIND, ("agent", "AGENT"), ""),),
)

CONVENTIONS = (OPENINFERENCE, LANGGRAPH, LIGHTNING, LANGSMITH, MLFLOW, VERCEL, LANGFUSE)
