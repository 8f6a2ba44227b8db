"""Classifies a span as a model call, a reward, an agent at work, or none of these.

Reads the naming conventions of OpenTelemetry for generative AI (`gen_ai.*`, as attributes, events and log records),
OpenLLMetry, OpenInference, Agent Lightning and creditflow. Traces come from other programs, so values of an unexpected
form are ignored.
"""

from __future__ import annotations

import ast
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from operator import countOf, itemgetter
from typing import Any

from creditflow.data import Message
from creditflow.traces.content import LIST_TYPES, FoundParts, Raw, json_of
from creditflow.traces.messages import (
    DIGITS,
    NOT_PLAIN,
    OF_A_TEXT,
    content_of,
    from_spread,
    in_short,
    listed,
    messages_of,
    parts_of,
    response_of,
)
from creditflow.traces.spans import Span, SpanEvent, text_of

_CALLS = (
    *("chat", "text_completion", "generate_content", "completion"),
    *("chat.completions", "chat.streaming_completions", "text.completions", "text.streaming_completions"),
)
"""Values that mark a model call: of `gen_ai.operation.name` (by the conventions and by Semantic Kernel) and of
OpenLLMetry's `llm.request.type`."""
_NO_CALLS = ("embeddings", "execute_tool", "create_agent", "invoke_agent", "invoke_workflow", "retrieval")


_NOTHING = "neither messages nor a response were recorded in a form that is known"


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
    said: str = ""
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
        return cls(f"it is no number, but a label: {label[:80]!r}") if label else _NO_SCORE


_NO_SCORE = RewardWithoutNumber("no score was recorded")


@dataclass(frozen=True, slots=True)
class Reward:
    """Named numbers or labels and their target."""

    values: list[tuple[str, Any]]
    links: list[tuple[tuple[str, str], ...]] = field(default_factory=list)
    """The target: the first link that resolves. A link is pairs of attribute and value, all of which a span must have
    (`span_id` and `trace_id` are the span's ids). A link without pairs is the whole trajectory."""


@dataclass(frozen=True, slots=True)
class AgentSpan:
    """A span that encloses an agent's work."""

    name: str


Meaning = ModelCall | Reward | AgentSpan


def read_span(span: Span) -> tuple[Meaning | None, list[Reward]]:
    """The meaning of `span` (None: nothing of interest) and all its rewards.

    The rewards are those of a reward span and those attached to a span of any kind.
    """
    names = _names_of(span.attributes)
    meaning = _meaning(span, names)
    rewards = _rewards(span, names, meaning) if span.events or names.gives else []
    if isinstance(meaning, Reward) and not rewards:
        rewards = [meaning]
    return meaning, rewards


def _meaning(span: Span, names: _AttributeNames) -> Meaning | None:
    if names.of_reward and (reward := _reward_span(span, names)) is not None:
        return reward
    operation = span.attributes.get("gen_ai.operation.name")
    if names.of_call and _is_call(span.attributes, operation, names):
        return _model_call(span, names)
    like_call = _is_like_a_call(span.attributes, operation, names)
    if like_call and names.says_and_has:
        return _model_call(span, names)
    if names.of_agent and (name := _agent_name(span, operation)):
        return AgentSpan(name)
    return _model_call(span, names) if like_call else None


# ---- attributes by their names -------------------------------------------------------------------------------------

_READ = ("gen_ai.prompt", "llm.input_messages", "agentlightning.operation.input.messages")
_WROTE = ("gen_ai.completion", "llm.output_messages", "agentlightning.operation.output.choices")
"""Prefixes of messages spread over attributes (`gen_ai.prompt.0.role`): OpenLLMetry, AgentOps, OpenInference, Weave."""
_SPREAD = frozenset((*_READ, *_WROTE))
_REWARD, _LINK, _OWN = "agentlightning.reward", "agentlightning.link", "creditflow.rewards"
_FEEDBACK = ("evaluations", "annotations")
EVALUATION, _OF_EVALUATION = "gen_ai.evaluation.result", "gen_ai.evaluation."
_GIVING = frozenset((_OWN, *_FEEDBACK, *(f"trace.{word}" for word in _FEEDBACK)))
"""Lists that give rewards on a span of any kind."""
_LIST_NAMES = (*_READ, *_WROTE, _REWARD, _LINK, *_FEEDBACK, *(f"trace.{word}" for word in _FEEDBACK))


@dataclass(frozen=True, slots=True)
class _AttributeNames:
    """Facts that follow from the names of a span's attributes alone.

    Many spans of a trace have the same attribute names, so these facts are computed once per set of names.
    """

    lists: dict[str, list[dict[str, str]]]
    """Attributes such as `gen_ai.prompt.0.role`, by list. The entries are in order of their numbers; each maps the rest
    of the name (`role`) to the attribute. `creditflow.rewards.NAME` is a list of one entry."""
    spread: bool
    """Whether messages are spread over attributes."""
    gives: bool
    """Whether the span gives rewards, whatever its kind."""
    evaluates: bool
    """Whether it has OpenTelemetry's attributes of an evaluation."""
    like_rewards: Sequence[str]
    """Attributes with "reward" in their name that are not read as one."""
    of_reward: bool
    """Whether it may be a reward span."""
    of_call: bool
    """Whether it may be a model call."""
    of_kind: bool
    """Whether it has an attribute that states its kind."""
    like_call: bool
    """Whether it has attributes that only model calls have, unless its kind is something else."""
    says_and_has: bool
    """Whether it has both a model and messages, and so is a call even if it names an agent."""
    of_agent: bool
    """Whether it may be an agent's."""
    prompt_ids: Sequence[str]
    """The attributes present that may hold the prompt's token ids, in order of precedence; likewise the next fields."""
    response_ids: Sequence[str]
    response_id: Sequence[str]
    model: Sequence[str]
    agent: Sequence[str]
    temperature: Sequence[str]
    counts: Sequence[tuple[str, Sequence[str]]]
    whole: bool
    """Whether a single attribute holds a whole list of messages."""
    plain: Callable[[Mapping[str, Any]], Sequence[Any]] | None
    """Reads the content of the response, then role and content of each prompt message. Only for messages spread over
    attributes with no further fields."""
    read_from: list[dict[str, str]]
    """The attributes of each prompt message."""
    wrote: list[dict[str, str]]
    """The attributes of each response message."""

    @classmethod
    def read(cls, keys: tuple[str, ...]) -> _AttributeNames:
        places: dict[str, dict[int, dict[str, str]]] = {}
        for key in keys:
            if (place := _place(key)) is not None:
                name, number, rest = place
                places.setdefault(name, {}).setdefault(number, {})[rest] = key
        there = frozenset(keys)

        def these(wanted: Iterable[str]) -> tuple[str, ...]:
            return tuple(key for key in wanted if key in there)

        lists = {name: [entries[number] for number in sorted(entries)] for name, entries in places.items()}
        # Two conventions on one span repeat the same messages.
        read, wrote = (next((lists[name] for name in one if name in lists), []) for one in (_READ, _WROTE))
        spread = not _SPREAD.isdisjoint(places)
        evaluates = any(key.startswith(_OF_EVALUATION) for key in keys)
        like_rewards = tuple(key for key in keys if "reward" in key.lower() and _place(key) is None and key != _REWARD)
        return cls(
            lists=lists,
            spread=spread,
            gives=not _GIVING.isdisjoint(places) or evaluates or bool(like_rewards),
            evaluates=evaluates,
            like_rewards=like_rewards,
            of_reward=_REWARD in places or not _OF_REWARD.isdisjoint(there),
            of_call=spread or not _OF_CALL.isdisjoint(there),
            of_kind=not _OF_KIND.isdisjoint(there),
            says_and_has=not (_LIKE_CALL.isdisjoint(there) or _OF_MESSAGES.isdisjoint(there)),
            like_call=not (_LIKE_CALL.isdisjoint(there) and _OF_MESSAGES.isdisjoint(there)),
            of_agent=not _OF_AGENT.isdisjoint(there),
            prompt_ids=these(_PROMPT_IDS),
            response_ids=these(_RESPONSE_IDS),
            response_id=these(_RESPONSE_ID),
            model=these(_MODEL),
            agent=these(_AGENT_OF_CALL),
            temperature=these(_TEMPERATURE),
            whole=not _WHOLE.isdisjoint(there),
            plain=_plain_getter(read, wrote),
            read_from=read,
            wrote=wrote,
            counts=[(name, found) for name, wanted in _COUNTS.items() if (found := these(wanted))],
        )

    def listed(self, attributes: Mapping[str, Any], name: str) -> list[Raw]:
        """The entries of list `name`, with their values."""
        return [_entry(attributes, entry) for entry in self.lists.get(name, ())]


def _plain_getter(
    read: Sequence[Mapping[str, str]], wrote: Sequence[Mapping[str, str]]
) -> Callable[[Mapping[str, Any]], Sequence[Any]] | None:
    """See `_AttributeNames.plain`; None if the messages have another form."""
    are_texts = all(entry.keys() <= OF_A_TEXT and {"role", "content"} <= entry.keys() for entry in read)
    if not (read and are_texts and len(wrote) == 1 and "content" in wrote[0] and wrote[0].keys() <= OF_A_TEXT):
        return None
    keys = [key for entry in read for key in (entry["role"], entry["content"])]
    return itemgetter(wrote[0]["content"], *keys)


def _entry(attributes: Mapping[str, Any], keys: Mapping[str, str]) -> Raw:
    return {rest: attributes[key] for rest, key in keys.items()}


_names = lru_cache(maxsize=1 << 9)(_AttributeNames.read)
_MOST_NAMES = 128
"""Names of spans with more attributes are not cached: the entries would be large, and few spans would share them."""


def _names_of(attributes: Mapping[str, Any]) -> _AttributeNames:
    keys = tuple(attributes)
    return _names(keys) if len(keys) <= _MOST_NAMES else _AttributeNames.read(keys)


@lru_cache(maxsize=1 << 14)
def _place(key: str) -> tuple[str, int, str] | None:
    """List, number and rest of an attribute's name; None if it is not part of a list."""
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
_MODEL = ("gen_ai.request.model", "llm.model_name", "gen_ai.response.model", "langfuse.observation.model.name")
_COUNTS = {
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
    "completion_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
}
_ENDED_BY_LENGTH = ("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded")


_LIKE_CALL = frozenset(("gen_ai.request.model", "gen_ai.response.model", "gen_ai.response.id"))
_SAYS_CALL = (
    ("openinference.span.kind", ("LLM",)),
    ("llm.request.type", _CALLS),
    ("langfuse.observation.type", ("generation", "GENERATION")),
    ("langsmith.span.kind", ("llm", "LLM")),
    ("mlflow.spanType", ("LLM", "CHAT_MODEL", '"LLM"', '"CHAT_MODEL"')),
)
"""Attributes, with their values, that mark a model call in other conventions."""
_OF_CALL = frozenset(("gen_ai.operation.name", *(key for key, _ in _SAYS_CALL), *_RESPONSE_IDS))


def _model_call(span: Span, names: _AttributeNames) -> ModelCall:
    attributes = span.attributes
    found = _NOTHING_BESIDE
    choices: Sequence[str] = ()
    texts = None if span.events or names.whole or names.plain is None else _plain_texts(names.plain(attributes))
    if texts is not None:
        each = iter(texts)
        response = heard = next(each)
        messages = [{"role": role or "user", "content": text} for role, text in zip(each, each, strict=True)]
        ended = attributes.get(names.wrote[0].get("finish_reason", ""))
    else:
        found = FoundParts()
        messages, wrote = _messages(span, names, found)
        said: Raw = wrote[0] if wrote else {}
        if len(wrote) > 1:
            said, others = _told_apart(attributes, _with_thoughts(wrote))
            choices = [response_of(one, found)[0] for one in others]
        n_unknown = len(found.unknown)
        response, heard = response_of(said, found)
        ended = said.get("finish_reason")
    response_ids = _token_ids(_first(attributes, names.response_ids)) if names.response_ids else ()
    unusable = ""
    if not response and not response_ids:
        unusable = _why_unusable(attributes, messages, found.unknown[n_unknown:] if found.unknown else ())
    return ModelCall(
        messages,
        response,
        _agent_of_call(attributes, names) if names.of_agent else "",
        text_of(_first(attributes, names.response_id)) if names.response_id else "",
        text_of(_first(attributes, names.model)) if names.model else "",
        _temperature(attributes) if names.temperature else 1.0,
        _token_ids(_first(attributes, names.prompt_ids)) if names.prompt_ids else (),
        response_ids,
        _logprobs(attributes["logprobs.content"]) if "logprobs.content" in attributes else (),
        _info(span, names, ended),
        heard,
        choices,
        found.media,
        found.unknown,
        unusable,
    )


_NOTHING_BESIDE = FoundParts()
"""Empty result for calls with plain-text messages. Never modified."""


def _plain_texts(values: Sequence[Any]) -> Sequence[str] | None:
    """`values` if all are ASCII texts that need no parsing, as in most calls; otherwise None."""
    try:
        if not all(map(str.isascii, values)):
            return None
    except TypeError:
        return None
    return None if any(map(str.startswith, values, repeat(NOT_PLAIN))) else values


def _messages(span: Span, names: _AttributeNames, found: FoundParts) -> tuple[list[Message], list[Raw]]:
    """The prompt messages of a call, reduced to role and text, and its response messages."""
    attributes = span.attributes
    read, wrote = _from_attributes(attributes) if names.whole else ([], [])
    if span.events:
        told: tuple[list[Raw], list[Raw]] = [], []
        for event in span.events:
            _from_event(event, *told)
        read, wrote = read or told[0], wrote or told[1]  # events repeat the attributes
    if read or wrote or not names.spread:
        return in_short(read, found), wrote
    wrote = [from_spread(_entry(attributes, entry)) for entry in names.wrote]
    return in_short([from_spread(_entry(attributes, entry)) for entry in names.read_from], found), wrote


def _why_unusable(attributes: Mapping[str, Any], messages: Sequence[Message], unknown: Sequence[str]) -> str:
    """The reason why a call without a response cannot be a step, with the names of unknown forms or attributes."""
    if unknown:
        return f"its response is in a form that is not known: {', '.join(unknown)[:200]}"
    others = [
        key
        for key, value in attributes.items()
        if value and isinstance(value, str | list | tuple | dict) and _LIKE_CONTENT.search(key)
    ]
    if messages and not any(map(_LIKE_RESPONSE.search, others)):
        return "no response was recorded"
    why = "no response was recorded in a form that is known" if messages else _NOTHING
    return f"{why}: it has {', '.join(sorted(others))[:200]}" if others else why


_LIKE_RESPONSE = re.compile(r"(output|completion|response|generation|result)s?(\.value)?$", re.IGNORECASE)
_LIKE_CONTENT = re.compile(
    r"(input|output|prompt|completion|request|response|message|content|generation|result)s?(\.value)?$", re.IGNORECASE
)
"""Names of attributes that may hold prompts or responses."""


def _with_thoughts(wrote: Sequence[Raw]) -> Sequence[Raw]:
    """Merge reasoning into the message after it: OpenLLMetry writes Anthropic's reasoning as separate messages."""
    if not any(one.get("role") == "thinking" for one in wrote):
        return wrote
    found: list[Raw] = []
    ended: Raw = {}
    thoughts: list[Raw] = []
    for one in [*wrote, None]:
        if one is not None and one.get("role") == "thinking":
            thoughts.append({"type": "thinking", "thinking": text_of(one.get("content"))})
            ended |= {key: one[key] for key in ("finish_reason",) if key in one}
        elif one is not None or thoughts:
            found.append({**ended, **(one or {"role": "assistant"}), "thinking_blocks": thoughts})
            ended, thoughts = {}, []
    return found


def _told_apart(attributes: Mapping[str, Any], wrote: Sequence[Raw]) -> tuple[Raw, Sequence[Raw]]:
    """The response of a call, and its further choices.

    Some conventions have one message per choice, others one per item of a response (a text, a tool call).
    """
    parameters = json_of(attributes.get("llm.invocation_parameters"))
    several = isinstance(parameters, dict) and isinstance(n := parameters.get("n"), int) and n > 1
    if several or any("finish_reason" in one or "index" in one for one in wrote):
        return wrote[0], wrote[1:]
    return {"role": wrote[0].get("role"), "parts": [part for one in wrote for part in parts_of(one)]}, ()


def _is_call(attributes: Mapping[str, Any], operation: Any, names: _AttributeNames) -> bool:
    has_a_calls = names.spread or _first(attributes, names.response_ids) is not None
    if not names.of_kind:
        return has_a_calls
    if operation in _NO_CALLS:
        return False
    if operation in _CALLS or any(attributes.get(key) in values for key, values in _SAYS_CALL):
        return True
    # Some tracers also put an agent's first and last message on the agent's span, as for a call.
    return has_a_calls and not any(attributes.get(key) in ("AGENT", "agent") for key in _KINDS)


def _is_like_a_call(attributes: Mapping[str, Any], operation: Any, names: _AttributeNames) -> bool:
    """Whether a span has attributes of a call though no convention marks it as one.

    Such a span is read as far as possible, or listed as left out.
    """
    if not names.like_call:
        return False
    around_calls = ".do" not in text_of(attributes.get("ai.operationId", ".do"))  # Vercel: encloses several requests
    is_other = around_calls or any(attributes.get(key) not in _SAYS_NOTHING for key in _KINDS)
    return operation not in _NO_CALLS and not is_other


def is_call(span: Span) -> bool:
    """Whether a span is a model call by its attributes."""
    attributes, names = span.attributes, _names_of(span.attributes)
    operation = attributes.get("gen_ai.operation.name")
    if _is_call(attributes, operation, names):
        return True
    return _is_like_a_call(attributes, operation, names) and (names.says_and_has or not _agent_name(span, operation))


def is_nothing(span: Span) -> bool:
    """Whether a span's attributes give no kind: no model call, agent, tool or similar."""
    operation = span.attributes.get("gen_ai.operation.name")
    kinds = (operation, *(span.attributes.get(key) for key in _KINDS))
    return not (any(kinds) or is_call(span) or _agent_name(span, operation))


def _info(span: Span, names: _AttributeNames, reason: Any) -> dict[str, Any]:
    attributes = span.attributes
    info: dict[str, Any] = {}
    for name, keys in names.counts:
        count = _first(attributes, keys)
        if isinstance(count, int) and not isinstance(count, bool):
            info[name] = count
    if not reason and (reasons := attributes.get("gen_ai.response.finish_reasons")):
        reason = next(iter(listed(reasons)), None)
    reason = reason or attributes.get("llm.finish_reason") or attributes.get("ai.response.finishReason")
    if isinstance(reason, str):
        info["finish_reason"] = "length" if reason.lower() in _ENDED_BY_LENGTH else reason
    if span.error:
        info["error"] = span.error
    return info


_OTEL_READ, _OTEL_WROTE = "gen_ai.input.messages", "gen_ai.output.messages"
_SYSTEM = "gen_ai.system_instructions"
_VERCEL_READ, _VERCEL_PROMPT, _VERCEL_THOUGHT = "ai.prompt.messages", "ai.prompt", "ai.response.reasoning"
_VERCEL_SAID = ("ai.response.text", "ai.response.object", "ai.result.text", "ai.result.object")
_VERCEL_CALLS = ("ai.response.toolCalls", "ai.result.toolCalls")
_VERCEL_FILES = "ai.response.files"
_WHOLE_PAIRS = (
    ("langfuse.observation.input", "langfuse.observation.output"),
    ("gen_ai.prompt", "gen_ai.completion"),
)
"""Pairs of attributes with the whole prompt and the whole response: Langfuse's, and the first of OpenTelemetry."""
_OF_MESSAGES = frozenset(
    (_OTEL_READ, _OTEL_WROTE, _VERCEL_READ, _VERCEL_THOUGHT, *_VERCEL_SAID, *_VERCEL_CALLS, *_WHOLE_PAIRS[1])
)
"""Attributes that only model calls have, unless the span's kind is something else."""
_WHOLE = _OF_MESSAGES | {_SYSTEM, _VERCEL_PROMPT, _VERCEL_FILES, *_WHOLE_PAIRS[0]}


def _from_attributes(attributes: Mapping[str, Any]) -> tuple[list[Raw], list[Raw]]:
    """Prompt and response messages of a call, by OpenTelemetry's conventions since 1.37 or those of others."""
    read = messages_of(attributes.get(_OTEL_READ))
    if (system := json_of(attributes.get(_SYSTEM))) is not None:
        first = {"role": "system", "parts": [system] if isinstance(system, dict | str) else system}
        if not (read and read[0].get("role") == "system" and _same_text(read[0], first)):
            read.insert(0, first)
    wrote = messages_of(attributes.get(_OTEL_WROTE))
    if not (read or wrote):
        read, wrote = _from_vercel(attributes)
    for one, other in _WHOLE_PAIRS:
        if not (read or wrote):
            read, wrote = messages_of(attributes.get(one)), messages_of(attributes.get(other))
    return read, wrote


def _same_text(one: Raw, other: Raw) -> bool:
    return content_of(one, FoundParts()) == content_of(other, FoundParts())


def _from_vercel(attributes: Mapping[str, Any]) -> tuple[list[Raw], list[Raw]]:
    text, calls = _first(attributes, _VERCEL_SAID), listed(_first(attributes, _VERCEL_CALLS))
    thought, files = attributes.get(_VERCEL_THOUGHT), listed(attributes.get(_VERCEL_FILES))
    said: Raw = {"role": "assistant", "reasoning": thought, "content": text, "parts": files, "tool_calls": calls}
    read = messages_of(attributes.get(_VERCEL_READ)) or _vercel_prompt(json_of(attributes.get(_VERCEL_PROMPT)))
    return read, [said] if text or calls or thought or files else []


def _vercel_prompt(prompt: Any) -> list[Raw]:
    """The messages of `ai.prompt`, an object with `system`, and `prompt` or `messages`."""
    if not isinstance(prompt, dict):
        return messages_of(prompt)
    system = [{"role": "system", "content": prompt["system"]}] if prompt.get("system") else []
    return system + messages_of(prompt.get("messages") or prompt.get("prompt"))


# Events: one holds all messages of a call, or each holds one.
DETAILS = "gen_ai.client.inference.operation.details"
ROLES = {f"gen_ai.{role}.message": role for role in ("system", "user", "assistant", "tool")}
CHOICE, PROMPT, TEXT = "gen_ai.choice", "gen_ai.content.prompt", "gen_ai.content.completion"


def _from_event(event: SpanEvent, read: list[Raw], wrote: list[Raw]) -> None:
    """Add an event's messages to `read` and `wrote`.

    OpenTelemetry's older conventions have one event per message, the current ones a single event for all.
    """
    if event.name == DETAILS:
        if not (read or wrote):
            more_read, more_wrote = _from_attributes(event.attributes)
            read += more_read
            wrote += more_wrote
    elif event.name in ROLES:
        read.append({"role": ROLES[event.name], **_body(event)})
    elif event.name == CHOICE:
        body = dict(_body(event))
        message = json_of(body.pop("message", None))
        more = message if isinstance(message, dict) else {} if message is None else {"content": message}
        wrote.append({**body, **more})
    elif event.name in (PROMPT, TEXT):
        read += messages_of(event.attributes.get("gen_ai.prompt"))
        wrote += messages_of(event.attributes.get("gen_ai.completion"))


def _body(event: SpanEvent) -> Raw:
    for body in (json_of(event.body), json_of(event.attributes.get("gen_ai.event.content"))):
        if isinstance(body, dict):
            return body
    return dict(event.attributes)


def _first(attributes: Mapping[str, Any], keys: Sequence[str]) -> Any:
    for key in keys:
        if (value := attributes.get(key)) is not None:
            return value
    return None


_PARAMETERS = ("llm.invocation_parameters", "langfuse.observation.model.parameters")
_TEMPERATURE = ("gen_ai.request.temperature", *_PARAMETERS)


def _temperature(attributes: Mapping[str, Any]) -> float:
    value = attributes.get("gen_ai.request.temperature")
    if value is None and isinstance(parameters := json_of(_first(attributes, _PARAMETERS)), dict):
        value = parameters.get("temperature")
    if value is None:
        return 1.0
    usable = isinstance(value, int | float) and 0 <= value < _HOTTEST
    return float(value) if usable else 1.0


_HOTTEST = 1e6


def _token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a list, from the first of several lists, or from either written as text; empty if malformed."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return ()
    if not isinstance(value, LIST_TYPES) or not value:
        return ()
    ids = tuple(value[0] if isinstance(value[0], LIST_TYPES) else value)
    if countOf(map(type, ids), int) != len(ids):
        return ()
    try:
        # All ids are from 0 to 2^31 - 1 if the highest bit of each unsigned 32-bit value is unset. This check takes
        # half the time of `min` and `max`, and traces have more token ids than anything else.
        return ids if array("I", ids).tobytes()[_HIGHEST::4].isascii() else ()
    except OverflowError:
        return ()


_HIGHEST = 3 if sys.byteorder == "little" else 0


def _logprobs(value: Any) -> tuple[float, ...]:
    """Log-probabilities from OpenAI's list of tokens; empty if any is missing."""
    if value is None:
        return ()
    found = [one.get("logprob") if isinstance(one, dict) else one for one in listed(value)]
    try:
        numbers = [float(one) for one in found if isinstance(one, int | float)]
    except OverflowError:
        return ()
    return tuple(numbers) if len(numbers) == len(found) else ()


# ---- agents --------------------------------------------------------------------------------------------------------


def _agent_of_call(attributes: Mapping[str, Any], names: _AttributeNames) -> str:
    """The agent's name in a call's own attributes; empty if missing."""
    named = _first(attributes, names.agent)
    return _TEAM_ID.sub("", text_of(named)) if named and named != _UNNAMED else _node(attributes)


_GRAPH_NODE = "traceloop.association.properties.langgraph_node"
_AGENT_OF_CALL = ("creditflow.agent", "gen_ai.agent.name", _GRAPH_NODE)
_UNNAMED = "OpenAI Agent"
"""The agent name that OpenTelemetry's Agents SDK instrumentation gives to every span except an agent's."""
_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""The suffix that AutoGen adds to agent names in a team; it differs in each run."""


def _node(attributes: Mapping[str, Any]) -> str:
    """The LangGraph node in OpenInference's metadata; empty if missing."""
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
_KINDS = (
    *("openinference.span.kind", "traceloop.span.kind", "agentops.span.kind"),
    *("langfuse.observation.type", "langsmith.span.kind"),
)
"""Attributes that state the kind of a span in other conventions."""
_SAYS_NOTHING = (None, "", "span", "SPAN")
_OF_KIND = frozenset(("gen_ai.operation.name", *(key for key, _ in _SAYS_CALL), *_KINDS))
_OF_AGENT = frozenset(
    (
        "gen_ai.operation.name",
        "openinference.span.kind",
        "langfuse.observation.type",
        "metadata",
        _GRAPH_NODE,
        *_AGENT,
        *(key for key, *_ in _BY_KIND),
    )
)


def _agent_name(span: Span, operation: Any) -> str:
    """The agent's name if a span is an agent's work, otherwise empty."""
    attributes = span.attributes
    if operation == "create_agent":
        return ""
    if (named := _first(attributes, _AGENT)) and named != _UNNAMED:
        return _TEAM_ID.sub("", text_of(named))
    for key, kind, name in _BY_KIND:
        if attributes.get(key) == kind and (named := attributes.get(name)):
            return text_of(named)
    if attributes.get("langfuse.observation.type") in ("agent", "AGENT"):
        return text_of(span.name)
    if operation == "invoke_agent" or attributes.get("openinference.span.kind") == "AGENT":
        node = attributes.get("graph.node.id")  # OpenInference's agent name; the span is named after its action
        return text_of(node or span.name.removeprefix("invoke_agent").strip())
    return _node(attributes) or text_of(attributes.get(_GRAPH_NODE))


# ---- rewards -------------------------------------------------------------------------------------------------------

_ANNOTATION, _OPERATION = "agentlightning.annotation", "agentlightning.operation"


_AGENTOPS_OUTPUT = ("agentops.task.output", "agentops.entity.output")
_OF_REWARD = frozenset(
    (_REWARD, "reward", "agentlightning.operation.name", "openinference.span.kind", *_AGENTOPS_OUTPUT)
)


def _reward_span(span: Span, names: _AttributeNames) -> Reward | None:
    """The reward of a reward span, otherwise None. Model calls inside such a span are the judge's."""
    attributes = span.attributes
    values: list[tuple[str, Any]] = []
    if _REWARD in names.lists:
        given = names.listed(attributes, _REWARD)
        values = [(text_of(one.get("name")) or "primary", one.get("value", _NO_SCORE)) for one in given]
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
    if not values and not (names.gives or any(map(is_evaluation, span.events))):
        values = [
            (
                span.name or "reward",
                RewardWithoutNumber(f"no score was recorded in a form that is known: {_spelled(span)}"),
            )
        ]
    # All pairs of Agent Lightning form one link; each link of OpenTelemetry is separate.
    pairs = tuple(
        (text_of(one["key_match"]), text_of(one["value_match"]))
        for one in names.listed(attributes, _LINK)
        if {"key_match", "value_match"} <= one.keys()
    )
    return Reward(values, ([pairs] if pairs else []) + [(("span_id", link.span),) for link in span.links])


def _spelled(span: Span) -> str:
    return "it has " + (", ".join(sorted(span.attributes))[:200] or "no attribute")


def _agentops_output(attributes: Mapping[str, Any]) -> Raw | None:
    for key in _AGENTOPS_OUTPUT:
        output = json_of(attributes.get(key))
        if isinstance(output, dict) and output.get("type") == "reward":
            return output
    return None


def _rewards(span: Span, names: _AttributeNames, meaning: Meaning | None) -> list[Reward]:
    """All rewards of a span, those of `meaning` included.

    Reads `creditflow.rewards.NAME`, OpenTelemetry's event `gen_ai.evaluation.result`, and OpenInference's evaluations
    and annotations of the span and of the whole trace.
    """
    attributes = span.attributes
    values = [(text_of(name), value) for own in names.listed(attributes, _OWN) for name, value in own.items()]
    found = []
    values += [(key, _NOT_READ) for key in names.like_rewards if not isinstance(meaning, Reward)]
    if names.evaluates:
        values.append(_evaluation(attributes))
    for event in filter(is_evaluation, span.events):
        said = _said_by(event)
        if response := said.get("gen_ai.response.id"):
            found.append(Reward([_evaluation(said)], [(("gen_ai.response.id", text_of(response)),)]))
        else:
            values.append(_evaluation(said))
    values += [one for word in _FEEDBACK for one in _feedback(names.listed(attributes, word), word)]
    if whole := [one for word in _FEEDBACK for one in _feedback(names.listed(attributes, f"trace.{word}"), word)]:
        found.append(Reward(whole, [()]))
    if isinstance(meaning, Reward):
        found.append(Reward(meaning.values + values, meaning.links))
    elif values:
        found.append(Reward(values, [(("span_id", span.id),)]))
    return found


_NOT_READ = RewardWithoutNumber("it is not read as a reward: name the attribute creditflow.rewards.NAME")


def _evaluation(said: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and score of OpenTelemetry's evaluation; without a score, a `RewardWithoutNumber` with its label."""
    label = RewardWithoutNumber.label(said.get("gen_ai.evaluation.score.label"))
    name = text_of(said.get("gen_ai.evaluation.name")) or "evaluation"
    return name, said.get("gen_ai.evaluation.score.value", label)


def is_evaluation(event: SpanEvent) -> bool:
    """Whether an event is an evaluation, by its name or its attributes."""
    return event.name == EVALUATION or any(key.startswith(_OF_EVALUATION) for key in _said_by(event))


def _said_by(event: SpanEvent) -> Mapping[str, Any]:
    """An event's attributes, merged with those in its body."""
    body = json_of(event.body)
    return {**body, **event.attributes} if isinstance(body, dict) else event.attributes


def _feedback(entries: Sequence[Raw], word: str) -> Iterator[tuple[str, Any]]:
    """Name and score of each entry, such as `evaluations.0.evaluation.name` and `.score`."""
    one = word.removesuffix("s")
    for entry in entries:
        name = text_of(entry.get(f"{one}.name")) or one
        if f"{one}.score" in entry:
            yield name, entry[f"{one}.score"]
        elif f"{one}.label" in entry:
            yield name, RewardWithoutNumber.label(entry[f"{one}.label"])
        else:
            yield name, _NO_SCORE
