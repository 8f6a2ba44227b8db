"""OpenTelemetry's conventions for generative AI, the dialects built on them, and creditflow's own attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from creditflow.plugins.traces.content import FoundParts, Raw, json_of
from creditflow.plugins.traces.conventions.base import (
    NO_SCORE,
    Attributes,
    Convention,
    Entries,
    Link,
    Messages,
    Reward,
    RewardWithoutNumber,
    name_of_agent_span,
)
from creditflow.plugins.traces.messages import content_of, messages_of
from creditflow.plugins.traces.spans import Span, SpanEvent, text_of

# creditflow's own attributes: an agent's name and rewards on any span.
OWN = Convention(
    name="creditflow",
    precedence=0,
    call_agent=("creditflow.agent",),
    span_agent=("creditflow.agent",),
    named_rewards="creditflow.reward",
)


# Scores listed apart from spans (`exports.py`): one span each.
_SCORES_PREFIX = "creditflow.score."
_SCORES_NAME, _SCORES_VALUE, _SCORES_LABEL, _SCORES_OF = (
    f"{_SCORES_PREFIX}{key}" for key in ("name", "value", "label", "of")
)


def _scores_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    """The score, with a link to each id that its span may have; without any, it belongs to the whole trajectory."""
    if _SCORES_NAME not in span.attributes:
        return
    value = span.attributes.get(_SCORES_VALUE)
    if value is None:
        value = (
            RewardWithoutNumber.label(span.attributes[_SCORES_LABEL]) if _SCORES_LABEL in span.attributes else NO_SCORE
        )
    targets = span.attributes.get(_SCORES_OF) or ()
    links: list[Link] = [(("span_id", text_of(id)),) for id in targets] if isinstance(targets, list | tuple) else []
    yield Reward([(text_of(span.attributes[_SCORES_NAME]) or "score", value)], links or [()])


SCORES = Convention(name="scores", precedence=5, rewards=_scores_rewards, reward_prefixes=(_SCORES_PREFIX,))


# OpenTelemetry's conventions for generative AI since 1.37, with its evaluations.
_OPERATION = "gen_ai.operation.name"
_OTEL_CALLS = ("chat", "text_completion", "generate_content", "completion")
_OTEL_PROMPT, _OTEL_RESPONSE, _OTEL_SYSTEM = (
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.system_instructions",
)
_OTEL_EVALUATION = "gen_ai.evaluation."


def _otel_messages(attributes: Attributes) -> Messages:
    prompt = messages_of(attributes.get(_OTEL_PROMPT))
    if (system := json_of(attributes.get(_OTEL_SYSTEM))) is not None:
        first = {"role": "system", "parts": [system] if isinstance(system, dict | str) else system}
        if not (prompt and prompt[0].get("role") == "system" and _otel_same_text(prompt[0], first)):
            prompt.insert(0, first)
    return prompt, messages_of(attributes.get(_OTEL_RESPONSE))


def _otel_same_text(first: Raw, other: Raw) -> bool:
    return content_of(first, FoundParts()) == content_of(other, FoundParts())


def _otel_agent(span: Span) -> str | None:
    return name_of_agent_span(span) if span.attributes.get(_OPERATION) == "invoke_agent" else None


def _otel_rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    if any(key.startswith(_OTEL_EVALUATION) for key in span.attributes):
        yield Reward([_otel_evaluation(span.attributes)])
    for event in filter(_otel_is_evaluation, span.events):
        attributes = _otel_with_body(event)
        response = attributes.get("gen_ai.response.id")
        links: list[Link] = [(("gen_ai.response.id", text_of(response)),)] if response else []
        yield Reward([_otel_evaluation(attributes)], links)


def _otel_evaluation(attributes: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and score of an evaluation; without a score, a `RewardWithoutNumber` with its label."""
    label = RewardWithoutNumber.label(attributes.get("gen_ai.evaluation.score.label"))
    name = text_of(attributes.get("gen_ai.evaluation.name")) or "evaluation"
    return name, attributes.get("gen_ai.evaluation.score.value", label)


def _otel_is_evaluation(event: SpanEvent) -> bool:
    """Whether an event is an evaluation, by its name or its attributes."""
    return event.name == "gen_ai.evaluation.result" or any(
        key.startswith(_OTEL_EVALUATION) for key in _otel_with_body(event)
    )


def _otel_with_body(event: SpanEvent) -> Mapping[str, Any]:
    """An event's attributes, merged with those in its body."""
    body = json_of(event.body)
    return {**body, **event.attributes} if isinstance(body, dict) else event.attributes


OTEL = Convention(
    name="opentelemetry",
    precedence=10,
    calls=((_OPERATION, _OTEL_CALLS),),
    not_calls=(
        (_OPERATION, ("embeddings", "execute_tool", "create_agent", "invoke_agent", "invoke_workflow", "retrieval")),
    ),
    call_attributes=("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"),
    messages=_otel_messages,
    message_attributes=(_OTEL_PROMPT, _OTEL_RESPONSE),
    shared_message_attributes=(_OTEL_SYSTEM,),
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
    not_agents=((_OPERATION, ("create_agent",)),),
    agent_span=_otel_agent,
    agent_attributes=(_OPERATION,),
    rewards=_otel_rewards,
    reward_prefixes=(_OTEL_EVALUATION,),
    is_reward_event=_otel_is_evaluation,
)


# Semantic Kernel: OpenTelemetry's conventions with its own operation names.
_KERNEL_CALLS = (*("chat.completions", "chat.streaming_completions", "text.completions", "text.streaming_completions"),)
KERNEL = Convention(name="semantic_kernel", precedence=15, calls=((_OPERATION, _KERNEL_CALLS),))


# AgentOps: the messages of OpenLLMetry, with its own span kinds.
_AGENTOPS_KIND = "agentops.span.kind"
AGENTOPS = Convention(
    name="agentops",
    precedence=20,
    kinds=(_AGENTOPS_KIND,),
    agent_kinds=((_AGENTOPS_KIND, ("agent",), "operation.name"),),
)


# OpenLLMetry (Traceloop).
_TRACELOOP_KIND = "traceloop.span.kind"
TRACELOOP = Convention(
    name="openllmetry",
    precedence=30,
    kinds=(_TRACELOOP_KIND,),
    calls=(("llm.request.type", (*_OTEL_CALLS, *_KERNEL_CALLS)),),
    prompt_list="gen_ai.prompt",
    response_list="gen_ai.completion",
    prompt_tokens=("gen_ai.usage.prompt_tokens",),
    completion_tokens=("gen_ai.usage.completion_tokens",),
    finish_reason=("llm.finish_reason",),
    agent_kinds=((_TRACELOOP_KIND, ("agent",), "traceloop.entity.name"),),
)


# OpenTelemetry's conventions before 1.37: one event per message, or attributes `gen_ai.prompt` and `.completion`.
_EVENTS_ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
_EVENTS_CHOICE, _EVENTS_PROMPT, _EVENTS_TEXT = "gen_ai.choice", "gen_ai.content.prompt", "gen_ai.content.completion"


def _events_messages(attributes: Attributes) -> Messages:
    return messages_of(attributes.get("gen_ai.prompt")), messages_of(attributes.get("gen_ai.completion"))


def _events_event_messages(event: SpanEvent) -> Messages:
    if event.name in _EVENTS_ROLES:
        return [{"role": _EVENTS_ROLES[event.name], **_events_body(event)}], []
    if event.name == _EVENTS_CHOICE:
        body = dict(_events_body(event))
        message = json_of(body.pop("message", None))
        more = message if isinstance(message, dict) else {} if message is None else {"content": message}
        return [], [{**body, **more}]
    return _events_messages(event.attributes)


def _events_body(event: SpanEvent) -> Raw:
    for body in (json_of(event.body), json_of(event.attributes.get("gen_ai.event.content"))):
        if isinstance(body, dict):
            return body
    return dict(event.attributes)


EVENTS = Convention(
    name="opentelemetry_events",
    precedence=80,
    messages=_events_messages,
    message_attributes=("gen_ai.completion",),
    shared_message_attributes=("gen_ai.prompt",),
    prompt_events=(*_EVENTS_ROLES, _EVENTS_PROMPT),
    response_events=(_EVENTS_CHOICE, _EVENTS_TEXT),
    event_messages=_events_event_messages,
)

CONVENTIONS = (OWN, SCORES, OTEL, KERNEL, AGENTOPS, TRACELOOP, EVENTS)
