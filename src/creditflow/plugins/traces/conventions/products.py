"""Conventions of tracing products and agent frameworks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from creditflow.plugins.traces.conventions.base import Convention, Entries, Place
from creditflow.plugins.traces.spans import Reward, RewardWithoutNumber, Span, Target, text_of

# OpenInference (Arize Phoenix).
_OPENINFERENCE_KIND = "openinference.span.kind"
_OPENINFERENCE_LISTS = ("evaluations", "annotations")


def _openinference_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    """Rewards of the span, and of the whole trace."""
    for prefix, links in (("", []), ("trace.", [()])):
        values = [score for name in _OPENINFERENCE_LISTS for score in _openinference_scores(prefix + name, entries)]
        is_span = not prefix and span.attributes.get(_OPENINFERENCE_KIND) == "EVALUATOR"
        if values or is_span:
            yield Reward(values, list(links), is_span)


def _openinference_scores(list_name: str, entries: Entries) -> Iterator[tuple[str, Any]]:
    """Name and score of each entry, such as `evaluations.0.evaluation.name` and `.score`."""
    word = list_name.removeprefix("trace.").removesuffix("s")
    for entry in entries(list_name):
        label = RewardWithoutNumber.label(entry.get(f"{word}.label"))
        yield text_of(entry.get(f"{word}.name")) or word, entry.get(f"{word}.score", label)


OPENINFERENCE = Convention(
    name="openinference",
    precedence=40,
    kinds=(_OPENINFERENCE_KIND,),
    calls=((_OPENINFERENCE_KIND, ("LLM",)),),
    prompt_list="llm.input_messages",
    response_list="llm.output_messages",
    model=("llm.model_name",),
    parameters=("llm.invocation_parameters",),
    call_agent=("agent.name",),
    span_agent=("agent.name",),
    agent_kinds=((_OPENINFERENCE_KIND, ("AGENT",), ("graph.node.id", "")),),
    rewards=_openinference_rewards,
    reward_prefixes=(
        *(f"{prefix}{name}." for name in _OPENINFERENCE_LISTS for prefix in ("", "trace.")),
        f"{_OPENINFERENCE_KIND}.",
    ),
)


# LangGraph's nodes, as OpenLLMetry and OpenInference record them: a node is an agent.
_LANGGRAPH_NODE = "traceloop.association.properties.langgraph_node"


LANGGRAPH = Convention(
    name="langgraph",
    precedence=45,
    call_agent=(_LANGGRAPH_NODE,),
    agent_keys=(
        ("metadata", "langgraph_node"),
        (_LANGGRAPH_NODE, ""),
        ("langfuse.observation.metadata.langgraph_node", ""),
    ),
)


# Agent Lightning, with the token ids that vLLM's server and LiteLLM add to its calls.
_LIGHTNING, _LIGHTNING_OUTPUT = "agentlightning.reward", "agentlightning.operation.output"


def _lightning_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    named = [(text_of(item.get("name")) or "primary", item) for item in entries(_LIGHTNING)]
    rewards = [(name, item.get("value", RewardWithoutNumber())) for name, item in named]
    pairs = [pair for pair in entries("agentlightning.link") if {"key_match", "value_match"} <= pair.keys()]
    link: Target = tuple((text_of(pair["key_match"]), text_of(pair["value_match"])) for pair in pairs)
    is_named = any(f"{key}.".startswith(f"{_LIGHTNING}.") for key in span.attributes)
    if is_named or span.attributes.get("agentlightning.operation.name") == _LIGHTNING:
        yield Reward(rewards, [link] if link else [], is_span=True)


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
    agent_kinds=(("type", ("agent",), ("agentlightning.operation.input.name",)),),
    rewards=_lightning_rewards,
    reward_prefixes=(f"{_LIGHTNING}.", "agentlightning.operation.name."),
)


# LangSmith: its export over OTLP, and its runs (`files.py`). LangChain's own chains do not count as agents.
_LANGSMITH_KIND, _LANGSMITH_NODE = "langsmith.span.kind", "langsmith.metadata.langgraph_node"
LANGSMITH = Convention(
    name="langsmith",
    precedence=55,
    kinds=(_LANGSMITH_KIND,),
    calls=((_LANGSMITH_KIND, ("llm", "LLM")),),
    prompt=(Place("gen_ai.prompt", shared=True),),
    response=(Place("gen_ai.completion", shared=True),),
    call_agent=(_LANGSMITH_NODE,),
    temperature=("langsmith.metadata.ls_temperature",),
    agent_kinds=((_LANGSMITH_KIND, ("chain",), (_LANGSMITH_NODE, "")),),
)


# MLflow: its export over OTLP, and its traces (`files.py`).
_MLFLOW_KIND, _MLFLOW_INPUTS = "mlflow.spanType", "mlflow.spanInputs"
MLFLOW = Convention(
    name="mlflow",
    precedence=55,
    kinds=(_MLFLOW_KIND,),
    calls=((_MLFLOW_KIND, ("LLM", "CHAT_MODEL", '"LLM"', '"CHAT_MODEL"')),),
    prompt=(Place(_MLFLOW_INPUTS, shared=True),),
    response=(Place("mlflow.spanOutputs", shared=True),),
    model=("mlflow.llm.model",),
    parameters=(_MLFLOW_INPUTS,),
    agent_kinds=((_MLFLOW_KIND, ("AGENT", '"AGENT"'), ("name", "")),),
)


# Vercel's AI SDK. The function id that a program gives to a call names its agent.
_VERCEL_ENCLOSING = tuple(f"ai.{verb}{noun}" for verb in ("generate", "stream") for noun in ("Text", "Object"))
VERCEL = Convention(
    name="vercel",
    precedence=60,
    not_calls=(("ai.operationId", _VERCEL_ENCLOSING),),
    prompt=(Place("ai.prompt.messages"), Place("ai.prompt", shared=True)),
    response=(
        *(Place(f"ai.{of}.{part}", "text", "content") for part in ("text", "object") for of in ("response", "result")),
        *(Place(f"ai.{of}.toolCalls", key="tool_calls") for of in ("response", "result")),
        Place("ai.response.reasoning", "text", "reasoning"),
        Place("ai.response.files", key="files", shared=True),
    ),
    response_id=("ai.response.id",),
    finish_reason=("ai.response.finishReason",),
    call_agent=("ai.telemetry.functionId",),
)


# Langfuse, over OTLP. Its scores come apart (`files.py`).
_LANGFUSE_KIND = "langfuse.observation.type"
LANGFUSE = Convention(
    name="langfuse",
    precedence=70,
    kinds=(_LANGFUSE_KIND,),
    calls=((_LANGFUSE_KIND, ("generation", "GENERATION")),),
    prompt=(Place("langfuse.observation.input", "either", shared=True),),
    response=(Place("langfuse.observation.output", "either", shared=True),),
    model=("langfuse.observation.model.name",),
    parameters=("langfuse.observation.model.parameters",),
    agent_kinds=((_LANGFUSE_KIND, ("agent", "AGENT"), ("",)),),
)

CONVENTIONS = (OPENINFERENCE, LANGGRAPH, LIGHTNING, LANGSMITH, MLFLOW, VERCEL, LANGFUSE)
