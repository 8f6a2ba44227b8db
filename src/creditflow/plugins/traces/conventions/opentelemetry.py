"""OpenTelemetry's conventions for generative AI, the dialects built on them, and creditflow's own attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from creditflow.plugins.traces.conventions.base import Convention, Entries, Place
from creditflow.plugins.traces.messages import json_of
from creditflow.plugins.traces.spans import Reward, RewardWithoutNumber, Span, SpanEvent, Target, text_of

# creditflow's own attributes: an agent's name and rewards on any span.
_OWN_REWARD = "creditflow.reward"


def _own_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    own = {key: value for key, value in span.attributes.items() if f"{key}.".startswith(f"{_OWN_REWARD}.")}
    if own:
        yield Reward([(key.removeprefix(_OWN_REWARD)[1:] or "reward", value) for key, value in own.items()])


OWN = Convention(
    name="creditflow",
    precedence=0,
    call_agent=("creditflow.agent",),
    span_agent=("creditflow.agent",),
    rewards=_own_rewards,
    reward_prefixes=(f"{_OWN_REWARD}.",),
)


# OpenTelemetry's conventions for generative AI since 1.37, with its evaluations.
_OPERATION = "gen_ai.operation.name"
_KERNEL_CALLS = ("chat.completions", "chat.streaming_completions", "text.completions", "text.streaming_completions")
"""Semantic Kernel's operations."""
_CALLS = ("chat", "text_completion", "generate_content", "completion", *_KERNEL_CALLS)
_OTEL_EVALUATION = "gen_ai.evaluation."


def _otel_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    if any(key.startswith(_OTEL_EVALUATION) for key in span.attributes):
        yield Reward([_otel_evaluation(span.attributes)])
    for event in filter(_otel_is_evaluation, span.events):
        attributes = _otel_with_body(event)
        response = attributes.get("gen_ai.response.id")
        links: list[Target] = [(("gen_ai.response.id", text_of(response)),)] if response else []
        yield Reward([_otel_evaluation(attributes)], links)


def _otel_evaluation(attributes: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and score of an evaluation; without a score, a `RewardWithoutNumber` with its label."""
    label = RewardWithoutNumber.label(attributes.get("gen_ai.evaluation.score.label"))
    name = text_of(attributes.get("gen_ai.evaluation.name")) or "evaluation"
    return name, attributes.get("gen_ai.evaluation.score.value", label)


def _otel_is_evaluation(event: SpanEvent) -> bool:
    """Whether an event is an evaluation, by its name or its attributes."""
    is_named = event.name == "gen_ai.evaluation.result"
    return is_named or any(key.startswith(_OTEL_EVALUATION) for key in _otel_with_body(event))


def _otel_with_body(event: SpanEvent) -> Mapping[str, Any]:
    """An event's attributes, merged with those in its body."""
    body = json_of(event.body)
    return {**body, **event.attributes} if isinstance(body, dict) else event.attributes


OTEL = Convention(
    name="opentelemetry",
    precedence=10,
    calls=((_OPERATION, (*_CALLS, "acompletion")),),  # the last is LiteLLM's
    not_calls=(
        (_OPERATION, ("embeddings", "execute_tool", "create_agent", "invoke_agent", "invoke_workflow", "retrieval")),
        (_OPERATION, ("execute_event_loop_cycle",)),  # Strands: a call and its tools
    ),
    call_attributes=("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"),
    prompt=(Place("gen_ai.input.messages"), Place("gen_ai.system_instructions", key="system", shared=True)),
    response=(Place("gen_ai.output.messages"),),
    repr_scopes=("opentelemetry.instrumentation.openai_agents",),
    events={"gen_ai.client.inference.operation.details": ("record", "")},
    response_id=("gen_ai.response.id",),
    model=("gen_ai.request.model", "gen_ai.response.model"),
    temperature=("gen_ai.request.temperature",),
    finish_reason=("gen_ai.response.finish_reasons",),
    n_choices=("gen_ai.request.choice.count",),
    call_agent=("gen_ai.agent.name",),
    span_agent=("gen_ai.agent.name",),
    no_agents=("OpenAI Agent",),  # its Agents SDK instrumentation writes this on every span except an agent's
    agent_kinds=((_OPERATION, ("invoke_agent",), ("graph.node.id", "")),),
    rewards=_otel_rewards,
    reward_prefixes=(_OTEL_EVALUATION,),
    is_reward_event=_otel_is_evaluation,
)


# OpenLLMetry (Traceloop), and AgentOps, which has its messages and its own span kinds.
_AGENTOPS_KIND, _TRACELOOP_KIND = "agentops.span.kind", "traceloop.span.kind"
TRACELOOP = Convention(
    name="openllmetry",
    precedence=30,
    kinds=(_AGENTOPS_KIND, _TRACELOOP_KIND),
    calls=(("llm.request.type", _CALLS),),
    prompt_list="gen_ai.prompt",
    response_list="gen_ai.completion",
    has_nested_parts=True,
    finish_reason=("llm.finish_reason",),
    agent_kinds=(
        (_AGENTOPS_KIND, ("agent",), ("operation.name",)),
        (_TRACELOOP_KIND, ("agent",), ("traceloop.entity.name",)),
    ),
)


# OpenTelemetry's conventions before 1.37: one event per message, or attributes `gen_ai.prompt` and `.completion`.
EVENTS = Convention(
    name="opentelemetry_events",
    precedence=80,
    prompt=(Place("gen_ai.prompt", "either", shared=True),),
    response=(Place("gen_ai.completion", "either"),),
    events={
        **{f"gen_ai.{role}.message": ("prompt", role) for role in ("system", "user", "assistant", "tool")},
        "gen_ai.content.prompt": ("record", ""),
        "gen_ai.choice": ("response", "assistant"),
        "gen_ai.content.completion": ("record", ""),
    },
)

CONVENTIONS = (OWN, OTEL, TRACELOOP, EVENTS)
