"""OpenTelemetry's conventions for generative AI since 1.37, with its evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from creditflow.traces.content import FoundParts, Raw, json_of
from creditflow.traces.conventions.base import (
    Attributes,
    Convention,
    Entries,
    Link,
    Messages,
    Reward,
    RewardWithoutNumber,
    name_of_agent_span,
)
from creditflow.traces.messages import content_of, messages_of
from creditflow.traces.spans import Span, SpanEvent, text_of

OPERATION = "gen_ai.operation.name"
CALL_OPERATIONS = ("chat", "text_completion", "generate_content", "completion")
_PROMPT, _RESPONSE, _SYSTEM = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"
_EVALUATION = "gen_ai.evaluation."


def _messages(attributes: Attributes) -> Messages:
    prompt = messages_of(attributes.get(_PROMPT))
    if (system := json_of(attributes.get(_SYSTEM))) is not None:
        first = {"role": "system", "parts": [system] if isinstance(system, dict | str) else system}
        if not (prompt and prompt[0].get("role") == "system" and _same_text(prompt[0], first)):
            prompt.insert(0, first)
    return prompt, messages_of(attributes.get(_RESPONSE))


def _same_text(one: Raw, other: Raw) -> bool:
    return content_of(one, FoundParts()) == content_of(other, FoundParts())


def _agent(span: Span) -> str | None:
    return name_of_agent_span(span) if span.attributes.get(OPERATION) == "invoke_agent" else None


def _rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    if any(key.startswith(_EVALUATION) for key in span.attributes):
        yield Reward([_evaluation(span.attributes)])
    for event in filter(_is_evaluation, span.events):
        attributes = _with_body(event)
        response = attributes.get("gen_ai.response.id")
        links: list[Link] = [(("gen_ai.response.id", text_of(response)),)] if response else []
        yield Reward([_evaluation(attributes)], links)


def _evaluation(attributes: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and score of an evaluation; without a score, a `RewardWithoutNumber` with its label."""
    label = RewardWithoutNumber.label(attributes.get("gen_ai.evaluation.score.label"))
    name = text_of(attributes.get("gen_ai.evaluation.name")) or "evaluation"
    return name, attributes.get("gen_ai.evaluation.score.value", label)


def _is_evaluation(event: SpanEvent) -> bool:
    """Whether an event is an evaluation, by its name or its attributes."""
    return event.name == "gen_ai.evaluation.result" or any(key.startswith(_EVALUATION) for key in _with_body(event))


def _with_body(event: SpanEvent) -> Mapping[str, Any]:
    """An event's attributes, merged with those in its body."""
    body = json_of(event.body)
    return {**body, **event.attributes} if isinstance(body, dict) else event.attributes


CONVENTION = Convention(
    name="opentelemetry",
    precedence=10,
    calls=((OPERATION, CALL_OPERATIONS),),
    not_calls=(
        (OPERATION, ("embeddings", "execute_tool", "create_agent", "invoke_agent", "invoke_workflow", "retrieval")),
    ),
    call_attributes=("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"),
    messages=_messages,
    message_attributes=(_PROMPT, _RESPONSE),
    shared_message_attributes=(_SYSTEM,),
    call_events=("gen_ai.client.inference.operation.details",),
    response_id=("gen_ai.response.id",),
    model=("gen_ai.request.model",),
    response_model=("gen_ai.response.model",),
    temperature=("gen_ai.request.temperature",),
    prompt_tokens=("gen_ai.usage.input_tokens",),
    completion_tokens=("gen_ai.usage.output_tokens",),
    finish_reason=("gen_ai.response.finish_reasons",),
    call_agent=("gen_ai.agent.name",),
    span_agent=("gen_ai.agent.name",),
    no_agents=("OpenAI Agent",),  # its Agents SDK instrumentation writes this on every span except an agent's
    not_agents=((OPERATION, ("create_agent",)),),
    agent_span=_agent,
    agent_attributes=(OPERATION,),
    rewards=_rewards,
    reward_prefixes=(_EVALUATION,),
    is_reward_event=_is_evaluation,
)
