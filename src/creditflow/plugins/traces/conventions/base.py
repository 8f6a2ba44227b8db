"""The record of a trace convention, and the readings of a span: model call, agent span, reward.

A convention states which attributes and events a tracer writes. Modules beside this one define one convention each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from creditflow.data import Message
from creditflow.plugins.traces.content import Raw
from creditflow.plugins.traces.spans import Span, SpanEvent, text_of

Attributes = Mapping[str, Any]
Messages = tuple[list[Raw], list[Raw]]
"""Prompt messages and response messages, as recorded."""
Entries = Callable[[str], list[Raw]]
"""Reads a numbered list of attributes: `entries("evaluations")` has one object per number."""
Link = tuple[tuple[str, str], ...]
Values = tuple[tuple[str, tuple[Any, ...]], ...]
"""Attributes, each with the values that count."""


@dataclass(slots=True)
class ModelCall:
    """One request to a model. Not frozen: each step has one, and a frozen dataclass takes twice as long to create."""

    messages: list[Message]
    """The prompt; each message has `role` and `content`, a text."""
    response: str
    agent: str = ""
    """The agent's name in the call's own attributes; empty if they have none."""
    response_id: str = ""
    model: str = ""
    temperature: float = 1.0
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    """Token counts, finish reason and error, for `Step.info`."""
    spoken: str = ""
    """The response without its reasoning, as other agents read it."""
    choices: Sequence[str] = ()
    """Further responses to the same request."""
    media: Sequence[tuple[str, Any]] = ()
    """Marker and original of each image, audio, video or file in the messages and the response."""
    unknown: Sequence[str] = ()
    """Names of the parts in no known form, in the messages and the response."""
    unusable: str = ""
    """The reason why the call cannot be a step; empty if it can."""

    @property
    def fullness(self) -> int:
        """Completeness of the record, to compare records of the same call."""
        return 8 * bool(self.response_ids) + 4 * bool(self.messages) + 2 * bool(self.response) + bool(self.logprobs)


@dataclass(frozen=True, slots=True)
class RewardWithoutNumber:
    """A reward without a number: a label, or an attribute that is not read as a reward."""

    reason: str

    @classmethod
    def label(cls, text: Any) -> RewardWithoutNumber:
        label = text_of(text)
        return cls(f"it is no number, but a label: {label[:80]!r}") if label else NO_SCORE


NO_SCORE = RewardWithoutNumber("no score was recorded")


@dataclass(frozen=True, slots=True)
class Reward:
    """Named numbers or labels and their target."""

    values: list[tuple[str, Any]]
    links: list[Link] = field(default_factory=list)
    """The target: the first link that resolves. A link is pairs of attribute and value, all of which a span must have
    (`span_id` and `trace_id` are the span's ids). A link without pairs is the whole trajectory."""


@dataclass(frozen=True, slots=True)
class AgentSpan:
    """A span that encloses an agent's work."""

    name: str


Meaning = ModelCall | Reward | AgentSpan


RewardReader = Callable[[Span, Entries], Iterable[Reward]]
RewardSpanReader = Callable[[Span, Entries], list[tuple[str, Any]] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """The attributes and events of one tracer. A field that a convention leaves out does not concern it.

    Where a span has attributes of several conventions, the one of lower `precedence` counts, field by field.
    """

    name: str
    precedence: int = 100

    kinds: tuple[str, ...] = ()
    """Attributes that state the kind of any span."""
    calls: Values = ()
    """Attribute values that mark a model call."""
    not_calls: Values = ()
    """Attribute values that mark another kind of span, whatever `calls` says."""
    call_attributes: tuple[str, ...] = ()
    """Model name and response id: attributes that only model calls have, unless the span states another kind."""
    encloses_calls: Callable[[Attributes], bool] | None = None
    """Whether a span encloses several requests to a model although its attributes are those of one."""

    prompt_list: str = ""
    """Prefix of prompt messages spread over attributes, such as `gen_ai.prompt` for `gen_ai.prompt.0.role`."""
    response_list: str = ""
    messages: Callable[[Attributes], Messages] | None = None
    """Reads messages from attributes that each hold a whole list or text."""
    message_attributes: tuple[str, ...] = ()
    """Attributes of `messages` that only model calls have."""
    shared_message_attributes: tuple[str, ...] = ()
    """Further attributes of `messages`, which other spans may have too."""

    call_events: tuple[str, ...] = ()
    """Names of events that each hold all messages of a call, as attributes that `messages` reads."""
    prompt_events: tuple[str, ...] = ()
    """Names of events of single prompt messages."""
    response_events: tuple[str, ...] = ()
    event_messages: Callable[[SpanEvent], Messages] | None = None
    """Reads one of `prompt_events` and `response_events`."""

    prompt_ids: tuple[str, ...] = ()
    """Attributes of token ids, in order of precedence; likewise the next fields."""
    response_ids: tuple[str, ...] = ()
    logprobs: tuple[str, ...] = ()
    response_id: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """Attributes of the requested model."""
    response_model: tuple[str, ...] = ()
    """Attributes of the model that answered, read if none names the requested one."""
    temperature: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    """Attributes of all sampling parameters as JSON."""
    prompt_tokens: tuple[str, ...] = ()
    completion_tokens: tuple[str, ...] = ()
    usage: tuple[str, ...] = ()
    """Attributes with both token counts as JSON, read if there is no attribute for one."""
    finish_reason: tuple[str, ...] = ()

    call_agent: tuple[str, ...] = ()
    """Attributes of the agent's name on a model call."""
    span_agent: tuple[str, ...] = ()
    """Attributes of the agent's name that make any other span an agent span."""
    no_agents: tuple[str, ...] = ()
    """Agent names to ignore."""
    not_agents: Values = ()
    """Attribute values of spans that name an agent without being its work."""
    agent_kinds: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    """Attribute, the values that mark an agent span, and the attribute of its name; empty: the span's name."""
    agent_span: Callable[[Span], str | None] | None = None
    """The agent's name from a span without one in its attributes; None if the span is not an agent's."""
    agent_node: Callable[[Attributes], str] | None = None
    """The agent's name from further data on any span, read last; empty if missing."""
    agent_attributes: tuple[str, ...] = ()
    """Attributes that `agent_span` and `agent_node` read."""

    rewards: RewardReader | None = None
    """Reads rewards on a span of any kind that has `reward_lists`, `reward_prefixes` or events. A reward without links
    belongs to the span."""
    named_rewards: str = ""
    """Prefix of attributes that are each a reward: `creditflow.reward` for `creditflow.reward.NAME`."""
    reward_lists: tuple[str, ...] = ()
    """Numbered lists that `rewards` reads."""
    reward_prefixes: tuple[str, ...] = ()
    """Prefixes of further attributes that `rewards` reads."""
    is_reward_event: Callable[[SpanEvent], bool] | None = None
    """Whether `rewards` reads an event."""
    reward_span: RewardSpanReader | None = None
    """The values of a reward span; None if the span is not one. Model calls inside such a span are the judge's."""
    reward_attributes: tuple[str, ...] = ()
    """Attributes that `reward_span` reads; a span without any of them is not passed to it."""
    reward_span_list: str = ""
    """The numbered list that `reward_span` reads."""
    link_list: str = ""
    """A numbered list of a reward's targets, each with `key_match` and `value_match`."""


def first_of(attributes: Attributes, keys: Sequence[str]) -> Any:
    """The first value that is not None."""
    for key in keys:
        if (value := attributes.get(key)) is not None:
            return value
    return None


def name_of_agent_span(span: Span) -> str:
    """The agent's name from OpenInference's graph node, else from the span's name, which may begin `invoke_agent`."""
    return text_of(span.attributes.get("graph.node.id") or span.name.removeprefix("invoke_agent").strip())
