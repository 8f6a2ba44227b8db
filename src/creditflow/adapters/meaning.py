"""What a span says: a model call, a reward, an agent at work, or none of these.

It knows conventions of names: OpenTelemetry's for generative AI (`gen_ai.*`, as attributes, events and log records), of
OpenLLMetry, OpenInference and Agent Lightning, and creditflow's own. It does not know trees or times, nor what becomes
of what it reads. Everything that it reads was written by others: what does not have the expected form is as if it were
not there.
"""

from __future__ import annotations

import ast
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import countOf
from typing import Any

from creditflow.adapters.messages import (
    DIGITS,
    LIST_TYPES,
    OF_A_TEXT,
    Raw,
    content_of,
    from_spread,
    in_short,
    json_of,
    listed,
    messages_of,
    parts_of,
    text_content,
    without_reasoning,
)
from creditflow.adapters.spans import Event, Span, text_of
from creditflow.trajectory import Message

_CALLS = (
    *("chat", "text_completion", "generate_content", "completion"),
    *("chat.completions", "chat.streaming_completions", "text.completions", "text.streaming_completions"),
)
"""Of `gen_ai.operation.name`, as the conventions and as Semantic Kernel have it, and of OpenLLMetry's
`llm.request.type`."""
_NO_CALLS = ("embeddings", "execute_tool", "create_agent", "invoke_agent", "invoke_workflow", "retrieval")


_NOTHING = "neither messages nor a response were recorded in a form that is known"


@dataclass(slots=True)
class ModelCall:
    """One request to a model. Not frozen: there is one for every step, and freezing doubles what making it takes."""

    messages: list[Message]
    """`role` and `content`, a text, of each."""
    response: str
    agent: str = ""
    """As the call itself says; empty where it does not."""
    response_id: str = ""
    model: str = ""
    temperature: float = 1.0
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)
    """Usage, finish reason and what else a step keeps."""
    said: str = ""
    """The response as others may read it: without its reasoning."""
    choices: Sequence[str] = ()
    """Further responses to the same request."""

    @property
    def unusable(self) -> str:
        """Why it cannot be a step; empty where it can."""
        if not self.response and not self.response_ids:
            return "no response was recorded" if self.messages else _NOTHING
        return ""

    @property
    def fullness(self) -> int:
        """How much was recorded, to compare records of the same call."""
        return 8 * bool(self.response_ids) + 4 * bool(self.messages) + 2 * bool(self.response) + bool(self.logprobs)


@dataclass(frozen=True, slots=True)
class Label:
    """What was given in place of a number."""

    text: str


@dataclass(frozen=True, slots=True)
class Reward:
    """Numbers, or labels, that were given to something."""

    values: list[tuple[str, Any]]
    links: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    """What it was given to: the first that there is. Each is pairs of an attribute and its value, all of which a span
    must have; `span_id` and `trace_id` are the span's own. No pairs at all: the whole play."""


@dataclass(frozen=True, slots=True)
class AgentAtWork:
    """What lies inside is done by an agent."""

    name: str


Meaning = ModelCall | Reward | AgentAtWork


def read_span(span: Span) -> tuple[Meaning | None, list[Reward]]:
    """What `span` says (None: nothing of interest), and all rewards that it gives: what it is there to give, and what
    it has of its own, whatever else it is.
    """
    names = _names_of(span.attributes)
    meaning = _meaning(span, names)
    if not span.events and not names.gives:
        return meaning, [meaning] if isinstance(meaning, Reward) else []
    return meaning, _rewards(span, names, meaning)


def _meaning(span: Span, names: _Names) -> Meaning | None:
    if names.of_reward and (reward := _reward_span(span, names)) is not None:
        return reward
    operation = span.attributes.get("gen_ai.operation.name")
    if names.of_call and _is_call(span.attributes, operation, names):
        return _model_call(span, names)
    if names.of_agent and (name := _agent_name(span, operation)):
        return AgentAtWork(name)
    return _model_call(span, names) if _is_like_a_call(span.attributes, operation, names) else None


# ---- attributes by their names -------------------------------------------------------------------------------------

_READ = ("gen_ai.prompt", "llm.input_messages", "agentlightning.operation.input.messages")
_WROTE = ("gen_ai.completion", "llm.output_messages", "agentlightning.operation.output.choices")
"""Where messages are spread over attributes: `gen_ai.prompt.0.role`. OpenLLMetry and AgentOps, OpenInference, Weave."""
_SPREAD = frozenset((*_READ, *_WROTE))
_REWARD, _LINK, _OWN = "agentlightning.reward", "agentlightning.link", "creditflow.reward"
_FEEDBACK = ("evaluations", "annotations")
_GIVING = frozenset((_OWN, *_FEEDBACK, *(f"trace.{word}" for word in _FEEDBACK)))
"""Lists that give rewards, whatever the span is."""
_LIST_NAMES = (*_READ, *_WROTE, _REWARD, _LINK, *_FEEDBACK, *(f"trace.{word}" for word in _FEEDBACK))


@dataclass(frozen=True, slots=True)
class _Names:
    """What the names of a span's attributes say, whatever their values: most spans of a trace have the same names as
    many others, so it is found out once for all of these, and nobody asks for what is not there.
    """

    lists: dict[str, list[dict[str, str]]]
    """Attributes such as `gen_ai.prompt.0.role`, by list and in the order of their numbers: of each entry, by what
    follows the number, the attribute. `creditflow.reward.NAME` is a list of one."""
    spread: bool
    """Whether messages are."""
    gives: bool
    """Whether there are rewards, whatever the span is."""
    of_reward: bool
    """Whether it may be there to give a reward."""
    of_call: bool
    """Whether it may be a model call."""
    of_kind: bool
    """Whether there is an attribute that says what the span is."""
    like_call: bool
    """Whether it has what only model calls have, if nothing says that it is something else."""
    of_agent: bool
    """Whether it may be an agent's."""
    prompt_ids: Sequence[str]
    """Those attributes that there are of the ones that may say it, first things first; as are the following."""
    response_ids: Sequence[str]
    response_id: Sequence[str]
    model: Sequence[str]
    agent: Sequence[str]
    temperature: Sequence[str]
    counts: Sequence[tuple[str, Sequence[str]]]
    whole: bool
    """Whether messages are, each list of them in one attribute."""
    texts: Sequence[tuple[str, str]] | None
    """Where messages are spread over attributes, and are texts and no more: of each that was read, the attributes of
    its role and its content; empty: there is none. None: they are more."""
    wrote: list[dict[str, str]]
    """Of each message that was written, the attributes."""

    @classmethod
    def read(cls, keys: tuple[str, ...]) -> _Names:
        places: dict[str, dict[int, dict[str, str]]] = {}
        for key in keys:
            if (place := _place(key)) is not None:
                name, number, rest = place
                places.setdefault(name, {}).setdefault(number, {})[rest] = key
        there = frozenset(keys)

        def these(wanted: Iterable[str]) -> tuple[str, ...]:
            return tuple(key for key in wanted if key in there)

        lists = {name: [entries[number] for number in sorted(entries)] for name, entries in places.items()}
        # Two conventions on one span say the same twice.
        read, wrote = (next((lists[name] for name in one if name in lists), []) for one in (_READ, _WROTE))
        plain = all(map(OF_A_TEXT.issuperset, read))
        spread = not _SPREAD.isdisjoint(places)
        return cls(
            lists=lists,
            spread=spread,
            gives=not _GIVING.isdisjoint(places),
            of_reward=_REWARD in places or not _OF_REWARD.isdisjoint(there),
            of_call=spread or not _OF_CALL.isdisjoint(there),
            of_kind=not _OF_KIND.isdisjoint(there),
            like_call=not _LIKE_CALL.isdisjoint(there),
            of_agent=not _OF_AGENT.isdisjoint(there),
            prompt_ids=these(_PROMPT_IDS),
            response_ids=these(_RESPONSE_IDS),
            response_id=these(_RESPONSE_ID),
            model=these(_MODEL),
            agent=these(_AGENT_OF_CALL),
            temperature=these(_TEMPERATURE),
            whole=not _WHOLE.isdisjoint(there),
            texts=[(entry.get("role", ""), entry.get("content", "")) for entry in read] if plain else None,
            wrote=wrote,
            counts=[(name, found) for name, wanted in _COUNTS.items() if (found := these(wanted))],
        )

    def listed(self, attributes: Mapping[str, Any], name: str) -> list[Raw]:
        """The entries of a list."""
        return [_entry(attributes, entry) for entry in self.lists.get(name, ())]


def _entry(attributes: Mapping[str, Any], keys: Mapping[str, str]) -> Raw:
    return {rest: attributes[key] for rest, key in keys.items()}


_names = lru_cache(maxsize=1 << 9)(_Names.read)
_MOST_NAMES = 128
"""Of spans with more attributes, nothing is remembered: it would be much, and of few others."""


def _names_of(attributes: Mapping[str, Any]) -> _Names:
    keys = tuple(attributes)
    return _names(keys) if len(keys) <= _MOST_NAMES else _Names.read(keys)


@lru_cache(maxsize=1 << 14)
def _place(key: str) -> tuple[str, int, str] | None:
    """List, number and rest of an attribute's name; None for those that are no part of a list."""
    if key.startswith(f"{_OWN}."):
        return _OWN, 0, key[len(_OWN) + 1 :]
    if key == _OWN:
        return _OWN, 0, "reward"
    for name in _LIST_NAMES:
        if key.startswith(f"{name}."):
            number, _, rest = key[len(name) + 1 :].partition(".")
            if rest and number.isdecimal() and len(number) < DIGITS:
                return name, int(number), rest
    return None


# ---- model calls ---------------------------------------------------------------------------------------------------

_PROMPT_IDS = (
    "prompt_token_ids",
    "llm.hosted_vllm.prompt_token_ids",
    "agentlightning.operation.output.prompt_token_ids",
)
_RESPONSE_IDS = (
    "response_token_ids",
    "llm.hosted_vllm.response_token_ids",
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
)
_RESPONSE_ID = ("gen_ai.response.id", "llm.hosted_vllm.id", "agentlightning.operation.output.id")
_MODEL = ("gen_ai.request.model", "llm.model_name", "gen_ai.response.model")
_COUNTS = {
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    "completion_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
}
_ENDED_BY_LENGTH = ("length", "max_tokens", "max_output_tokens")


_OF_CALL = frozenset(("gen_ai.operation.name", "openinference.span.kind", "llm.request.type", *_RESPONSE_IDS))
_LIKE_CALL = frozenset(("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"))


def _model_call(span: Span, names: _Names) -> ModelCall:
    attributes = span.attributes
    read, wrote = _from_attributes(attributes) if names.whole else ([], [])
    if span.events:
        told: tuple[list[Raw], list[Raw]] = [], []
        for event in span.events:
            _from_event(event, *told)
        read, wrote = read or told[0], wrote or told[1]  # what attributes say, events say again
    if read or wrote or not names.spread:
        messages = in_short(read)
    else:
        messages = _spread_read(attributes, names)
        wrote = [from_spread(_entry(attributes, entry)) for entry in names.wrote]
    said, choices = _told_apart(attributes, wrote) if len(wrote) > 1 else (wrote[0] if wrote else {}, ())
    response = content_of(said)
    return ModelCall(
        messages,
        response,
        _agent_of_call(attributes, names) if names.of_agent else "",
        text_of(_first(attributes, names.response_id)),
        text_of(_first(attributes, names.model)),
        _temperature(attributes) if names.temperature else 1.0,
        _token_ids(_first(attributes, names.prompt_ids)),
        _token_ids(_first(attributes, names.response_ids)),
        _logprobs(attributes.get("logprobs.content")),
        _info(span, names, said),
        without_reasoning(said, response),
        choices,
    )


def _told_apart(attributes: Mapping[str, Any], wrote: Sequence[Raw]) -> tuple[Raw, Sequence[str]]:
    """What a call said, and further choices that it was given: some conventions have a message for each choice, others
    for each item of one response (a text, a call of a tool).
    """
    parameters = json_of(attributes.get("llm.invocation_parameters"))
    several = isinstance(parameters, dict) and isinstance(n := parameters.get("n"), int) and n > 1
    if several or any("finish_reason" in one or "index" in one for one in wrote):
        return wrote[0], [content_of(one) for one in wrote[1:]]
    return {"role": wrote[0].get("role"), "parts": [part for one in wrote for part in parts_of(one)]}, ()


def _is_call(attributes: Mapping[str, Any], operation: Any, names: _Names) -> bool:
    has_a_calls = names.spread or _first(attributes, names.response_ids) is not None
    if not names.of_kind:
        return has_a_calls
    if operation in _NO_CALLS:
        return False
    if (
        operation in _CALLS
        or attributes.get("openinference.span.kind") == "LLM"
        or attributes.get("llm.request.type") in _CALLS
    ):
        return True
    # Some tracers note an agent's first and last message at its own span, too, as if it were one call.
    return has_a_calls and not any(attributes.get(key) in ("AGENT", "agent") for key in _KINDS)


def _is_like_a_call(attributes: Mapping[str, Any], operation: Any, names: _Names) -> bool:
    """Of a span that no convention tells to be a call, and that is no agent's: whether it has what calls have. It is
    read as far as it can be, or told to be left out.
    """
    return names.like_call and operation not in _NO_CALLS and not any(attributes.get(key) for key in _KINDS)


def is_call(span: Span) -> bool:
    """Whether its attributes say that a span is a model call."""
    attributes, names = span.attributes, _names_of(span.attributes)
    operation = attributes.get("gen_ai.operation.name")
    if _is_call(attributes, operation, names):
        return True
    return _is_like_a_call(attributes, operation, names) and not _agent_name(span, operation)


def is_nothing(span: Span) -> bool:
    """Whether its attributes do not say what a span is: neither a model call nor an agent, a tool or their like."""
    operation = span.attributes.get("gen_ai.operation.name")
    kinds = (operation, *(span.attributes.get(key) for key in _KINDS))
    return not (any(kinds) or is_call(span) or _agent_name(span, operation))


def _spread_read(attributes: Mapping[str, Any], names: _Names) -> list[Message]:
    if names.texts is None:
        return in_short([from_spread(raw) for name in _READ for raw in names.listed(attributes, name)])
    return [
        {
            "role": text_of((attributes[role] if role else "") or "user"),
            "content": text_content(attributes[content]) if content else "",
        }
        for role, content in names.texts
    ]


def _info(span: Span, names: _Names, said: Raw) -> dict[str, Any]:
    attributes = span.attributes
    info: dict[str, Any] = {}
    for name, keys in names.counts:
        count = _first(attributes, keys)
        if isinstance(count, int) and not isinstance(count, bool):
            info[name] = count
    reason = said.get("finish_reason")
    if not reason and (reasons := attributes.get("gen_ai.response.finish_reasons")):
        reason = next(iter(listed(reasons)), None)
    reason = reason or attributes.get("llm.finish_reason")
    if isinstance(reason, str):
        info["finish_reason"] = "length" if reason.lower() in _ENDED_BY_LENGTH else reason
    if span.error:
        info["error"] = span.error
    return info


_VERCEL = ("ai.prompt.messages", "ai.response.text", "ai.response.toolCalls")
_WHOLE = frozenset(("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", *_VERCEL))


def _from_attributes(attributes: Mapping[str, Any]) -> tuple[list[Raw], list[Raw]]:
    """What the call read, and what it wrote: by OpenTelemetry's conventions since 1.37, or Vercel's AI SDK's."""
    read = messages_of(attributes.get("gen_ai.input.messages"))
    if (system := json_of(attributes.get("gen_ai.system_instructions"))) is not None:
        first = {"role": "system", "parts": [system] if isinstance(system, dict | str) else system}
        if not (read and read[0].get("role") == "system" and content_of(read[0]) == content_of(first)):
            read.insert(0, first)
    wrote = messages_of(attributes.get("gen_ai.output.messages"))
    return (read, wrote) if read or wrote else _from_vercel(attributes)


def _from_vercel(attributes: Mapping[str, Any]) -> tuple[list[Raw], list[Raw]]:
    text, calls = attributes.get("ai.response.text"), listed(attributes.get("ai.response.toolCalls"))
    called = [
        {"name": call.get("toolName"), "arguments": call.get("input", call.get("args"))}
        for call in calls
        if isinstance(call, dict)
    ]
    said = [{"role": "assistant", "content": text, "tool_calls": called}] if text or called else []
    return messages_of(attributes.get("ai.prompt.messages")), said


# Events. The messages of a call are in one, or in one each.
DETAILS = "gen_ai.client.inference.operation.details"
ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
CHOICE, PROMPT, TEXT = "gen_ai.choice", "gen_ai.content.prompt", "gen_ai.content.completion"


def _from_event(event: Event, read: list[Raw], wrote: list[Raw]) -> None:
    """By OpenTelemetry's conventions before, one event a message, and since, one for all."""
    if event.name == DETAILS:
        if not (read or wrote):
            more_read, more_wrote = _from_attributes(event.attributes)
            read += more_read
            wrote += more_wrote
    elif event.name in ROLES:
        read.append({"role": ROLES[event.name], **_body(event)})
    elif event.name == CHOICE:
        body = _body(event)
        message = json_of(body.get("message"))
        wrote.append({**body, **(message if isinstance(message, dict) else {})})
    elif event.name in (PROMPT, TEXT):
        read += messages_of(event.attributes.get("gen_ai.prompt"))
        wrote += messages_of(event.attributes.get("gen_ai.completion"))


def _body(event: Event) -> Raw:
    for body in (json_of(event.body), json_of(event.attributes.get("gen_ai.event.content"))):
        if isinstance(body, dict):
            return body
    return dict(event.attributes)


def _first(attributes: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        if (value := attributes.get(key)) is not None:
            return value
    return None


_TEMPERATURE = ("gen_ai.request.temperature", "llm.invocation_parameters")


def _temperature(attributes: Mapping[str, Any]) -> float:
    value = attributes.get("gen_ai.request.temperature")
    if value is None and isinstance(parameters := json_of(attributes.get("llm.invocation_parameters")), dict):
        value = parameters.get("temperature")
    if value is None:
        return 1.0
    usable = isinstance(value, int | float) and 0 <= value < _HOTTEST
    return float(value) if usable else 1.0


_HOTTEST = 1e6


def _token_ids(value: Any) -> tuple[int, ...]:
    """A list of ids, or the first of several, or a text that says either."""
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return ()
    if not isinstance(value, LIST_TYPES) or not value:
        return ()
    ids = value[0] if isinstance(value[0], LIST_TYPES) else value
    return tuple(ids) if ids and countOf(map(type, ids), int) == len(ids) and _fit(ids) else ()


def _fit(numbers: Sequence[int]) -> bool:
    """Whether all are from 0 to 2^31 - 1: of 4 bytes without a sign, the highest then has its highest bit unset. It
    takes half the time of `min` and `max`, and traces have more token ids than anything else.
    """
    try:
        return array("I", numbers).tobytes()[_HIGHEST::4].isascii()
    except OverflowError:
        return False


_HIGHEST = 3 if sys.byteorder == "little" else 0


def _logprobs(value: Any) -> tuple[float, ...]:
    """Of OpenAI's list of tokens."""
    if value is None:
        return ()
    found = [one.get("logprob") if isinstance(one, dict) else one for one in listed(value)]
    try:
        numbers = [float(one) for one in found if isinstance(one, int | float)]
    except OverflowError:
        return ()
    return tuple(numbers) if len(numbers) == len(found) else ()


# ---- agents --------------------------------------------------------------------------------------------------------


def _agent_of_call(attributes: Mapping[str, Any], names: _Names) -> str:
    """Who made a call, where the call itself says so."""
    named = _first(attributes, names.agent)
    return _TEAM_ID.sub("", text_of(named)) if named and named != _UNNAMED else _node(attributes)


_GRAPH_NODE = "traceloop.association.properties.langgraph_node"
_AGENT_OF_CALL = ("creditflow.agent", "gen_ai.agent.name", _GRAPH_NODE)
_UNNAMED = "OpenAI Agent"
"""What OpenTelemetry's instrumentation of the Agents SDK calls all that is no agent's own span."""
_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""AutoGen adds it to the name of an agent in a team; each run has another."""


def _node(attributes: Mapping[str, Any]) -> str:
    """The node of a LangGraph, as OpenInference keeps it."""
    metadata = attributes.get("metadata")
    if isinstance(metadata, str) and "langgraph_node" in metadata and isinstance(read := json_of(metadata), dict):
        return text_of(read.get("langgraph_node"))
    return ""


_AGENT = (
    "creditflow.agent",
    "gen_ai.agent.name",
    "agent.name",
    "recipient_agent_type",
    "langchain.chain.type",
    "executor.id",
)
_BY_KIND = (
    ("agentops.span.kind", "agent", "operation.name"),
    ("traceloop.span.kind", "agent", "traceloop.entity.name"),
    ("type", "agent", "agentlightning.operation.input.name"),
)
_KINDS = ("openinference.span.kind", "traceloop.span.kind", "agentops.span.kind")
"""What a span is, by other conventions."""
_OF_KIND = frozenset(("gen_ai.operation.name", "llm.request.type", *_KINDS))
_OF_AGENT = frozenset(
    (
        "gen_ai.operation.name",
        "openinference.span.kind",
        "metadata",
        _GRAPH_NODE,
        *_AGENT,
        *(key for key, *_ in _BY_KIND),
    )
)


def _agent_name(span: Span, operation: Any) -> str:
    """The name of the agent whose work a span is; empty: no agent's."""
    attributes = span.attributes
    if operation == "create_agent":
        return ""
    if (named := _first(attributes, _AGENT)) and named != _UNNAMED:
        return _TEAM_ID.sub("", text_of(named))
    for key, kind, name in _BY_KIND:
        if attributes.get(key) == kind and (named := attributes.get(name)):
            return text_of(named)
    if operation == "invoke_agent" or attributes.get("openinference.span.kind") == "AGENT":
        node = attributes.get("graph.node.id")  # OpenInference's name of an agent; the span is named for what it does
        return text_of(node or span.name.removeprefix("invoke_agent").strip())
    return _node(attributes) or text_of(attributes.get(_GRAPH_NODE))


# ---- rewards -------------------------------------------------------------------------------------------------------

_ANNOTATION, _OPERATION = "agentlightning.annotation", "agentlightning.operation"


_AGENTOPS_OUTPUT = ("agentops.task.output", "agentops.entity.output")
_OF_REWARD = frozenset(
    (_REWARD, "reward", "agentlightning.operation.name", "openinference.span.kind", *_AGENTOPS_OUTPUT)
)


def _reward_span(span: Span, names: _Names) -> Reward | None:
    """A span that is there to give a reward: model calls inside are made by whoever judges."""
    attributes = span.attributes
    values: list[tuple[str, Any]] = []
    if _REWARD in names.lists:
        given = names.listed(attributes, _REWARD)
        values = [(text_of(one.get("name")) or "primary", one["value"]) for one in given if "value" in one]
    elif _REWARD in attributes:
        values = [("primary", attributes[_REWARD])]
    elif span.name == _ANNOTATION and "reward" in attributes:  # Agent Lightning before 0.3
        values = [("primary", attributes["reward"])]
    elif (output := _agentops_output(attributes)) is not None:
        values = [("primary", output.get("value"))]
    elif not (
        (span.name == _OPERATION and attributes.get("agentlightning.operation.name") == _REWARD)
        or attributes.get("openinference.span.kind") == "EVALUATOR"
    ):
        return None
    # A link of Agent Lightning's is all its pairs together; of OpenTelemetry's each is one.
    pairs = tuple(
        (text_of(one["key_match"]), text_of(one["value_match"]))
        for one in names.listed(attributes, _LINK)
        if {"key_match", "value_match"} <= one.keys()
    )
    return Reward(values, ([pairs] if pairs else []) + [(("span_id", link.span),) for link in span.links])


def _agentops_output(attributes: Mapping[str, Any]) -> Raw | None:
    for key in _AGENTOPS_OUTPUT:
        output = json_of(attributes.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return output
    return None


def _rewards(span: Span, names: _Names, meaning: Meaning | None) -> list[Reward]:
    """Beside those that a reward's span is there for: `creditflow.reward.NAME`; OpenTelemetry's event
    `gen_ai.evaluation.result`; OpenInference's evaluations and annotations, those of the whole trace included.
    """
    attributes = span.attributes
    values = [(text_of(name), value) for own in names.listed(attributes, _OWN) for name, value in own.items()]
    found = []
    for event in span.events:
        if event.name == "gen_ai.evaluation.result":
            name = text_of(event.attributes.get("gen_ai.evaluation.name")) or "evaluation"
            label = Label(text_of(event.attributes.get("gen_ai.evaluation.score.label")))
            value = event.attributes.get("gen_ai.evaluation.score.value", label)
            if response := event.attributes.get("gen_ai.response.id"):
                found.append(Reward([(name, value)], [(("gen_ai.response.id", text_of(response)),)]))
            else:
                values.append((name, value))
    values += [one for word in _FEEDBACK for one in _feedback(names.listed(attributes, word), word)]
    if whole := [one for word in _FEEDBACK for one in _feedback(names.listed(attributes, f"trace.{word}"), word)]:
        found.append(Reward(whole, [()]))
    if isinstance(meaning, Reward):
        found.append(Reward(meaning.values + values, meaning.links))
    elif values:
        found.append(Reward(values, [(("span_id", span.id),)]))
    return found


def _feedback(entries: Sequence[Raw], word: str) -> Iterator[tuple[str, Any]]:
    """`evaluations.0.evaluation.name` and `.score`."""
    one = word.removesuffix("s")
    for entry in entries:
        name = text_of(entry.get(f"{one}.name")) or one
        if f"{one}.score" in entry:
            yield name, entry[f"{one}.score"]
        elif f"{one}.label" in entry:
            yield name, Label(text_of(entry[f"{one}.label"]))
