"""The record of a trace convention, and the readings of a span: model call, agent span, reward.

A convention states which attributes and events a tracer writes. Modules beside this one define one convention each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from creditflow.data import Message
from creditflow.plugins.traces.messages import Form, Raw
from creditflow.plugins.traces.spans import Reward, Span, SpanEvent

Entries = Callable[[str], list[Raw]]
"""Reads a numbered list of attributes: `entries("evaluations")` has one object per number."""
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
    """Finish reason and error, for `Step.info`."""
    spoken: str = ""
    """The response without its reasoning, as other agents read it."""
    scope: str = ""
    """The name of the instrumentation."""
    source: str = "list"
    """The place of the response: a convention, `events`, or `list` for messages spread over attributes."""
    is_cut: bool = False
    """Whether a part of its messages was cut off."""
    choices: Sequence[str] = ()
    """Further responses to the same request."""
    media: Sequence[tuple[str, Any]] = ()
    """Marker and original of each image, audio, video or file in the messages and the response."""
    unknown: Sequence[str] = ()
    """Names of the parts in no known form, in the messages and the response."""
    unusable: str = ""
    """The reason why the call cannot be a step; empty if it can."""

    @property
    def fullness(self) -> tuple[bool, int, bool, bool]:
        """Completeness of the record, to compare records of the same call: token ids, texts, model."""
        n_characters = len(self.response) + sum(len(message["content"]) for message in self.messages)
        return bool(self.response_ids), n_characters, bool(self.model), bool(self.logprobs)


@dataclass(frozen=True, slots=True)
class AgentSpan:
    """A span that encloses an agent's work."""

    name: str


Meaning = ModelCall | Reward | AgentSpan


EventKind = Literal["record", "prompt", "response", ""]
"""An event with attributes of a call, at the places of any convention; with one message; or another one."""
RewardReader = Callable[[Span, Entries], Iterable[Reward]]


@dataclass(frozen=True, slots=True)
class Place:
    """An attribute with messages, and the form of its value."""

    attribute: str
    form: Form = "json"
    """`json`: messages, a request or a response, as JSON or as an object. `either`: a text, or such JSON whose keys are
    all those of messages. `text`: a text as it stands, even if it looks like JSON."""
    key: str = ""
    """The field of the one response message, or `system` for a system prompt beside the messages; empty: all of it."""
    shared: bool = False
    """Whether other spans than model calls have the attribute too."""


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
    prompt: tuple[Place, ...] = ()
    """Attributes of the prompt: the first with messages counts."""
    response: tuple[Place, ...] = ()
    """Attributes of the response: the first with messages, or all that hold a field of one message."""
    prompt_list: str = ""
    """Prefix of prompt messages spread over attributes, such as `gen_ai.prompt` for `gen_ai.prompt.0.role`."""
    response_list: str = ""
    has_nested_parts: bool = False
    """Whether the content of a spread message may be a list of parts written as JSON; of a response, one that begins
    with a typed text."""
    repr_scopes: tuple[str, ...] = ()
    """Instrumentation scopes that write a tool-calling message as Python prints it."""

    events: Mapping[str, tuple[EventKind, str]] = field(default_factory=dict)
    """Event name to its kind, and to the role of the message in its body."""

    prompt_ids: tuple[str, ...] = ()
    """Attributes of token ids, in order of precedence; likewise the next fields."""
    response_ids: tuple[str, ...] = ()
    logprobs: tuple[str, ...] = ()
    response_id: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """Attributes of the model, the requested one before the one that answered."""
    temperature: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    """Attributes of all sampling parameters as JSON."""
    finish_reason: tuple[str, ...] = ()
    n_choices: tuple[str, ...] = ()
    """Attributes of the number of responses that were requested."""

    call_agent: tuple[str, ...] = ()
    """Attributes of the agent's name on a model call."""
    span_agent: tuple[str, ...] = ()
    """Attributes of the agent's name that make any other span an agent span."""
    no_agents: tuple[str, ...] = ()
    """Agent names to ignore."""
    agent_kinds: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = ()
    """Attribute, the values that mark an agent span, and the attributes of its name; an empty one: the span's name."""
    agent_keys: tuple[tuple[str, str], ...] = ()
    """Attributes of the agent's name on any span, read last, each with its key in JSON; an empty one: the whole."""

    rewards: RewardReader | None = None
    """Reads the rewards of a span of any kind that has `reward_prefixes` or events. A reward without links
    belongs to the span."""
    reward_prefixes: tuple[str, ...] = ()
    """Names, and beginnings of names that end with a dot, of attributes that may be rewards."""
    is_reward_event: Callable[[SpanEvent], bool] | None = None
    """Whether `rewards` reads an event."""
