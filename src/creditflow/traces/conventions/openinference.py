"""OpenInference (Arize Phoenix)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from creditflow.traces.content import Raw
from creditflow.traces.conventions.base import (
    NO_SCORE,
    Convention,
    Entries,
    Reward,
    RewardWithoutNumber,
    name_of_agent_span,
)
from creditflow.traces.spans import Span, text_of

_KIND = "openinference.span.kind"
_LISTS = ("evaluations", "annotations")


def _agent(span: Span) -> str | None:
    return name_of_agent_span(span) if span.attributes.get(_KIND) == "AGENT" else None


def _reward_span(span: Span, entries: Entries) -> list[tuple[str, Any]] | None:
    return [] if span.attributes.get(_KIND) == "EVALUATOR" else None


def _rewards(span: Span, entries: Entries) -> Iterator[Reward]:
    """Rewards of the span, and of the whole trace."""
    if values := [score for name in _LISTS for score in _scores(entries(name), name)]:
        yield Reward(values)
    if values := [score for name in _LISTS for score in _scores(entries(f"trace.{name}"), name)]:
        yield Reward(values, [()])


def _scores(entries: Sequence[Raw], list_name: str) -> Iterator[tuple[str, Any]]:
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


CONVENTION = Convention(
    name="openinference",
    precedence=40,
    kinds=(_KIND,),
    calls=((_KIND, ("LLM",)),),
    prompt_list="llm.input_messages",
    response_list="llm.output_messages",
    model=("llm.model_name",),
    parameters=("llm.invocation_parameters",),
    prompt_tokens=("llm.token_count.prompt",),
    completion_tokens=("llm.token_count.completion",),
    span_agent=("agent.name",),
    agent_span=_agent,
    agent_attributes=(_KIND,),
    rewards=_rewards,
    reward_lists=(*_LISTS, *(f"trace.{name}" for name in _LISTS)),
    reward_span=_reward_span,
    reward_attributes=(_KIND,),
)
