"""Agent Lightning, with the token ids that vLLM's server and LiteLLM add to its calls."""

from __future__ import annotations

from typing import Any

from creditflow.traces.content import json_of
from creditflow.traces.conventions.base import NO_SCORE, Convention, Entries
from creditflow.traces.spans import Span, text_of

_REWARD, _OUTPUT = "agentlightning.reward", "agentlightning.operation.output"
_AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")


def _reward_span(span: Span, entries: Entries) -> list[tuple[str, Any]] | None:
    attributes = span.attributes
    if given := entries(_REWARD):
        return [(text_of(one.get("name")) or "primary", one.get("value", NO_SCORE)) for one in given]
    if _REWARD in attributes:
        return [("primary", attributes[_REWARD])]
    if span.name == "agentlightning.annotation" and "reward" in attributes:  # before 0.3
        return [("primary", attributes["reward"])]
    for key in _AGENTOPS_OUTPUTS:  # its reward functions through AgentOps
        output = json_of(attributes.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return [("primary", output.get("value"))]
    is_empty = span.name == "agentlightning.operation" and attributes.get("agentlightning.operation.name") == _REWARD
    return [] if is_empty else None


CONVENTION = Convention(
    name="agent_lightning",
    precedence=50,
    prompt_list="agentlightning.operation.input.messages",
    response_list=f"{_OUTPUT}.choices",
    prompt_ids=("prompt_token_ids", "llm.hosted_vllm.prompt_token_ids", f"{_OUTPUT}.prompt_token_ids"),
    response_ids=(
        "response_token_ids",
        "llm.hosted_vllm.response_token_ids",
        f"{_OUTPUT}.response_token_ids.0",
        f"{_OUTPUT}.choices.0.token_ids",
        f"{_OUTPUT}.choices.0.provider_specific_fields.token_ids",
    ),
    logprobs=("logprobs.content",),
    response_id=("llm.hosted_vllm.id", f"{_OUTPUT}.id"),
    span_agent=("recipient_agent_type", "langchain.chain.type", "executor.id"),
    agent_kinds=(("type", ("agent",), "agentlightning.operation.input.name"),),
    reward_span=_reward_span,
    reward_attributes=(_REWARD, "reward", "agentlightning.operation.name", *_AGENTOPS_OUTPUTS),
    reward_span_list=_REWARD,
    link_list="agentlightning.link",
)
