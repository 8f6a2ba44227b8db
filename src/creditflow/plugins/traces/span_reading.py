"""Classifies a span as a model call, a reward, an agent at work, or none of these, by all trace conventions.

Traces come from other programs, so values of an unexpected form are ignored.
"""

from __future__ import annotations

import ast
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import repeat
from operator import countOf, itemgetter
from typing import Any

from creditflow.data import Message
from creditflow.plugins.traces.content import LIST_TYPES, FoundParts, Raw, json_of
from creditflow.plugins.traces.conventions import conventions
from creditflow.plugins.traces.conventions.base import (
    AgentSpan,
    Link,
    Meaning,
    Messages,
    ModelCall,
    Reward,
    RewardReader,
    RewardSpanReader,
    RewardWithoutNumber,
    Values,
    first_of,
)
from creditflow.plugins.traces.messages import (
    DIGITS,
    NOT_PLAIN,
    OF_A_TEXT,
    from_spread,
    in_short,
    listed,
    parts_of,
    response_of,
)
from creditflow.plugins.traces.requests import PROMPT_TOKENS, RESPONSE_TOKENS, first_in
from creditflow.plugins.traces.spans import Span, SpanEvent, text_of

_NOTHING = "neither messages nor a response were recorded in a form that is known"


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
    if names.reward_span_readers and (reward := _reward_span(span, names)) is not None:
        return reward
    if names.of_call and _is_call(span.attributes, names):
        return _model_call(span, names)
    like_call = _is_like_a_call(span.attributes, names)
    if like_call and names.has_model_and_messages:
        return _model_call(span, names)
    if names.of_agent and (name := _agent_name(span, names)):
        return AgentSpan(name)
    return _model_call(span, names) if like_call else None


# ---- attributes by their names -------------------------------------------------------------------------------------


@cache
def _values(*fields: str) -> tuple[Any, ...]:
    """The values of fields of all conventions, in order of precedence; a single value counts as a tuple of one."""
    values = [getattr(convention, field) for field in fields for convention in conventions()]
    return tuple(entry for value in values if value for entry in (value if isinstance(value, tuple) else (value,)))


@cache
def _keys(*fields: str) -> frozenset[str]:
    """The names in fields of all conventions; an entry of several values begins with its attribute's name."""
    return frozenset(entry if isinstance(entry, str) else entry[0] for entry in _values(*fields))


class _AttributeNames:
    """Facts that follow from the names of a span's attributes alone.

    Many spans of a trace have the same attribute names, so these facts are computed once per set of names.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        there = frozenset(keys)

        def present(*fields: str) -> tuple[Any, ...]:
            return tuple(
                entry for entry in _values(*fields) if (entry if isinstance(entry, str) else entry[0]) in there
            )

        def has(*fields: str) -> bool:
            return not _keys(*fields).isdisjoint(there)

        places: dict[str, dict[int, dict[str, str]]] = {}
        for key in keys:
            if (place := _place(key)) is not None:
                name, number, rest = place
                places.setdefault(name, {}).setdefault(number, {})[rest] = key
        self.lists = {name: [entries[number] for number in sorted(entries)] for name, entries in places.items()}
        """Attributes such as `gen_ai.prompt.0.role`, by list. The entries are in order of their numbers; each maps the
        rest of the name (`role`) to the attribute. `creditflow.reward.NAME` is a list of one entry."""
        self.prompt, self.response = self._first_list("prompt_list"), self._first_list("response_list")
        """The attributes of each prompt message and of each response message."""
        self.plain = _plain_getter(self.prompt, self.response)
        """Reads the content of the response, then role and content of each prompt message. None unless all messages are
        spread over attributes, with no further fields."""
        self.spread = bool(self.prompt or self.response)
        """Whether messages are spread over attributes."""
        self.whole = has("message_attributes", "shared_message_attributes")
        """Whether a single attribute holds a whole list of messages."""

        self.kinds, self.calls, self.not_calls = present("kinds"), present("calls"), present("not_calls")
        """The attributes present that state a kind, and those with the values that mark a call or another span."""
        self.of_kind = bool(self.kinds or self.calls or self.not_calls)
        """Whether it has an attribute that states its kind."""
        self.of_call = self.spread or has("calls", "response_ids")
        """Whether it may be a model call."""
        names_model, has_messages = has("call_attributes"), has("message_attributes")
        self.like_call = names_model or has_messages
        """Whether it has attributes that only model calls have, unless its kind is something else."""
        self.has_model_and_messages = names_model and has_messages
        """Whether it has both a model and messages, and so is a call even if it names an agent."""
        self.of_agent = has("span_agent", "call_agent", "agent_kinds", "agent_attributes")
        """Whether it may be an agent's."""
        self.agent_kinds, self.span_agent = present("agent_kinds"), present("span_agent")
        self.not_agents = present("not_agents")
        """The attributes present that mark an agent's span, name its agent, or mark a span that is no agent's work."""

        self.like_rewards = [key for key in keys if _is_like_a_reward(key)]
        """Attributes with "reward" in their name that are not read as one."""
        self.reward_readers: list[RewardReader] = [
            convention.rewards
            for convention in conventions()
            if convention.rewards
            and (
                not places.keys().isdisjoint(convention.reward_lists)
                or any(map(_starts_with(convention.reward_prefixes), keys))
            )
        ]
        """Readers of the rewards that the attributes give."""
        self.gives = bool(self.reward_readers or self.like_rewards or places.keys() & _keys("named_rewards"))
        """Whether the span gives rewards, whatever its kind."""
        self.reward_span_readers: list[RewardSpanReader] = [
            convention.reward_span
            for convention in conventions()
            if convention.reward_span
            and (convention.reward_span_list in places or not there.isdisjoint(convention.reward_attributes))
        ]
        """Readers that may recognise a reward span."""

        self.prompt_ids, self.response_ids = present("prompt_ids"), present("response_ids")
        """The attributes present that may hold token ids, in order of precedence; likewise the next fields."""
        self.logprobs, self.response_id = present("logprobs"), present("response_id")
        self.model, self.agent = present("model", "response_model"), present("call_agent")
        self.temperature = present("temperature", "parameters")
        self.counts = [(name, present(name)) for name in ("prompt_tokens", "completion_tokens") if has(name)]
        self.usage = present("usage")

    def _first_list(self, field: str) -> list[dict[str, str]]:
        """Entries of the first list present; two conventions on one span repeat the same messages."""
        return next((self.lists[name] for name in _values(field) if name in self.lists), [])

    def reader(self, attributes: Mapping[str, Any]) -> Callable[[str], list[Raw]]:
        """A function that reads a numbered list of attributes by its name."""
        return lambda name: [_entry(attributes, entry) for entry in self.lists.get(name, ())]


def _plain_getter(
    prompt: Sequence[Mapping[str, str]], response: Sequence[Mapping[str, str]]
) -> Callable[[Mapping[str, Any]], Sequence[Any]] | None:
    """See `_AttributeNames.plain`; None if the messages have another form."""
    are_texts = all(entry.keys() <= OF_A_TEXT and {"role", "content"} <= entry.keys() for entry in prompt)
    is_text = len(response) == 1 and "content" in response[0] and response[0].keys() <= OF_A_TEXT
    if not (prompt and are_texts and is_text):
        return None
    keys = [key for entry in prompt for key in (entry["role"], entry["content"])]
    return itemgetter(response[0]["content"], *keys)


def _entry(attributes: Mapping[str, Any], keys: Mapping[str, str]) -> Raw:
    return {rest: attributes[key] for rest, key in keys.items()}


_names = lru_cache(maxsize=1 << 9)(_AttributeNames)
_MOST_NAMES = 128
"""Names of spans with more attributes are not cached: the entries would be large, and few spans would share them."""


def _names_of(attributes: Mapping[str, Any]) -> _AttributeNames:
    keys = tuple(attributes)
    return _names(keys) if len(keys) <= _MOST_NAMES else _AttributeNames(keys)


@lru_cache(maxsize=1 << 14)
def _place(key: str) -> tuple[str, int, str] | None:
    """List, number and rest of an attribute's name; None if it is not part of a list."""
    for name in _values("named_rewards"):
        if key.startswith(f"{name}."):
            return name, 0, key[len(name) + 1 :]
        if key == name:
            return name, 0, "reward"
    for name in _values("prompt_list", "response_list", "reward_span_list", "link_list", "reward_lists"):
        if key.startswith(f"{name}."):
            number, _, rest = key[len(name) + 1 :].partition(".")
            if rest and number.isdecimal() and len(number) < DIGITS:
                return name, int(number), rest
    return None


def _starts_with(prefixes: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda key: key.startswith(prefixes)


def _is_like_a_reward(key: str) -> bool:
    """Whether an attribute is named like a reward but read by no convention."""
    if "reward" not in key.lower() or _place(key) is not None:
        return False
    return key not in _keys("reward_span_list") and not key.startswith(_values("reward_prefixes"))


# ---- model calls ---------------------------------------------------------------------------------------------------

_ENDED_BY_LENGTH = ("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded")


def _model_call(span: Span, names: _AttributeNames) -> ModelCall:
    attributes = span.attributes
    notes = _NO_NOTES
    choices: Sequence[str] = ()
    texts = None if span.events or names.whole or names.plain is None else _plain_texts(names.plain(attributes))
    if texts is not None:
        each = iter(texts)
        response = spoken = next(each)
        messages = [{"role": role or "user", "content": text} for role, text in zip(each, each, strict=True)]
        reason = attributes.get(names.response[0].get("finish_reason", ""))
    else:
        notes = FoundParts()
        messages, responses = _messages(span, names, notes)
        first: Raw = responses[0] if responses else {}
        if len(responses) > 1:
            first, others = _first_choice(attributes, _with_reasoning(responses))
            choices = [response_of(choice, notes)[0] for choice in others]
        n_unknown = len(notes.unknown)
        response, spoken = response_of(first, notes)
        reason = first.get("finish_reason")
    response_ids = _token_ids(first_of(attributes, names.response_ids)) if names.response_ids else ()
    unusable = ""
    if not response and not response_ids:
        unusable = _why_unusable(attributes, messages, notes.unknown[n_unknown:] if notes.unknown else ())
    return ModelCall(
        messages,
        response,
        _agent_of_call(attributes, names) if names.of_agent else "",
        text_of(first_of(attributes, names.response_id)) if names.response_id else "",
        text_of(first_of(attributes, names.model)).strip('"') if names.model else "",  # MLflow writes it as JSON
        _temperature(attributes) if names.temperature else 1.0,
        _token_ids(first_of(attributes, names.prompt_ids)) if names.prompt_ids else (),
        response_ids,
        _logprobs(first_of(attributes, names.logprobs)) if names.logprobs else (),
        _info(span, names, reason),
        spoken,
        choices,
        notes.media,
        notes.unknown,
        unusable,
    )


_NO_NOTES = FoundParts()
"""Empty result for calls with plain-text messages. Never modified."""


def _plain_texts(values: Sequence[Any]) -> Sequence[str] | None:
    """`values` if all are ASCII texts that need no parsing, as in most calls; otherwise None."""
    try:
        if not all(map(str.isascii, values)):
            return None
    except TypeError:
        return None
    return None if any(map(str.startswith, values, repeat(NOT_PLAIN))) else values


def _messages(span: Span, names: _AttributeNames, notes: FoundParts) -> tuple[list[Message], list[Raw]]:
    """The prompt messages of a call, reduced to role and text, and its response messages."""
    attributes = span.attributes
    prompt, response = _from_attributes(attributes) if names.whole else ([], [])
    if span.events:
        more_prompt, more_response = _from_events(span.events)
        prompt, response = prompt or more_prompt, response or more_response  # events repeat the attributes
    if prompt or response or not names.spread:
        return in_short(prompt, notes), response
    response = [from_spread(_entry(attributes, entry)) for entry in names.response]
    return in_short([from_spread(_entry(attributes, entry)) for entry in names.prompt], notes), response


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


def _with_reasoning(messages: Sequence[Raw]) -> Sequence[Raw]:
    """Merge reasoning into the message after it: OpenLLMetry writes Anthropic's reasoning as separate messages."""
    if not any(message.get("role") == "thinking" for message in messages):
        return messages
    merged: list[Raw] = []
    reason: Raw = {}
    blocks: list[Raw] = []
    for message in [*messages, None]:
        if message is not None and message.get("role") == "thinking":
            blocks.append({"type": "thinking", "thinking": text_of(message.get("content"))})
            reason |= {key: message[key] for key in ("finish_reason",) if key in message}
        elif message is not None or blocks:
            merged.append({**reason, **(message or {"role": "assistant"}), "thinking_blocks": blocks})
            reason, blocks = {}, []
    return merged


def _first_choice(attributes: Mapping[str, Any], responses: Sequence[Raw]) -> tuple[Raw, Sequence[Raw]]:
    """The response of a call, and its further choices.

    Some conventions have one message per choice, others one per item of a response (a text, a tool call).
    """
    parameters = json_of(first_of(attributes, _values("parameters")))
    several = isinstance(parameters, dict) and isinstance(n := parameters.get("n"), int) and n > 1
    if several or any("finish_reason" in response or "index" in response for response in responses):
        return responses[0], responses[1:]
    return {
        "role": responses[0].get("role"),
        "parts": [part for response in responses for part in parts_of(response)],
    }, ()


def _has(attributes: Mapping[str, Any], marks: Values) -> bool:
    return any(attributes.get(key) in values for key, values in marks)


def _is_call(attributes: Mapping[str, Any], names: _AttributeNames) -> bool:
    has_content = names.spread or first_of(attributes, names.response_ids) is not None
    if not names.of_kind:
        return has_content
    if _has(attributes, names.not_calls):
        return False
    if _has(attributes, names.calls):
        return True
    # Some tracers also put an agent's first and last message on the agent's span, as for a call.
    return has_content and not any(attributes[key] in ("AGENT", "agent") for key in names.kinds)


def _is_like_a_call(attributes: Mapping[str, Any], names: _AttributeNames) -> bool:
    """Whether a span has attributes of a call though no convention marks it as one.

    Such a span is read as far as possible, or listed as left out.
    """
    if not names.like_call or any(attributes[key] not in _NO_KIND for key in names.kinds):
        return False
    return not (
        _has(attributes, names.not_calls) or any(encloses(attributes) for encloses in _values("encloses_calls"))
    )


_NO_KIND = (None, "", "span", "SPAN")


def is_call(span: Span) -> bool:
    """Whether a span is a model call by its attributes."""
    attributes, names = span.attributes, _names_of(span.attributes)
    if _is_call(attributes, names):
        return True
    return _is_like_a_call(attributes, names) and (names.has_model_and_messages or not _agent_name(span, names))


def has_no_kind(span: Span) -> bool:
    """Whether a span's attributes give no kind: no model call, agent, tool or similar."""
    has_kind = any(map(span.attributes.get, _keys("not_calls", "kinds")))
    return not (has_kind or is_call(span) or _agent_name(span, _names_of(span.attributes)))


def _info(span: Span, names: _AttributeNames, reason: Any) -> dict[str, Any]:
    attributes = span.attributes
    info: dict[str, Any] = {}
    for name, keys in names.counts:
        count = first_of(attributes, keys)
        if type(count) is int:
            info[name] = count
    if names.usage and isinstance(usage := json_of(first_of(attributes, names.usage)), dict):
        info = {**_counts(usage), **info}
    for key in () if reason else _values("finish_reason"):
        if (reasons := attributes.get(key)) and (reason := next(iter(listed(reasons)), None)):
            break
    if isinstance(reason, str):
        info["finish_reason"] = "length" if reason.lower() in _ENDED_BY_LENGTH else reason
    if span.error:
        info["error"] = span.error
    return info


def _counts(usage: Mapping[str, Any]) -> dict[str, int]:
    """The token counts in an object of them, under any API's names."""
    counts = {"prompt_tokens": first_in(usage, PROMPT_TOKENS), "completion_tokens": first_in(usage, RESPONSE_TOKENS)}
    return {name: count for name, count in counts.items() if type(count) is int}


def _from_attributes(attributes: Mapping[str, Any]) -> Messages:
    """Prompt and response messages by the first convention that has any."""
    for read in _values("messages"):
        prompt, response = read(attributes)
        if prompt or response:
            return prompt, response
    return [], []


def _from_events(events: Sequence[SpanEvent]) -> Messages:
    """Prompt and response messages of events that hold one message each, or all messages of a call."""
    prompt: list[Raw] = []
    response: list[Raw] = []
    for event in events:
        if message_kind(event) != "call":
            more = _from_message_event(event)
        elif not (prompt or response):
            more = _from_attributes(event.attributes)
        else:
            continue
        prompt += more[0]
        response += more[1]
    return prompt, response


def _from_message_event(event: SpanEvent) -> Messages:
    for convention in conventions():
        if convention.event_messages is not None and event.name in (
            *convention.prompt_events,
            *convention.response_events,
        ):
            return convention.event_messages(event)
    return [], []


def message_kind(event: SpanEvent) -> str:
    """`call` if an event holds all messages of a call, `prompt` or `response` if it is one message; else empty."""
    return next((kind for kind in ("call", "prompt", "response") if event.name in _keys(f"{kind}_events")), "")


def _temperature(attributes: Mapping[str, Any]) -> float:
    value = first_of(attributes, _values("temperature"))
    if value is None and isinstance(parameters := json_of(first_of(attributes, _values("parameters"))), dict):
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
    values = [token.get("logprob") if isinstance(token, dict) else token for token in listed(value)]
    try:
        numbers = [float(value) for value in values if isinstance(value, int | float)]
    except OverflowError:
        return ()
    return tuple(numbers) if len(numbers) == len(values) else ()


# ---- agents --------------------------------------------------------------------------------------------------------


def _agent_of_call(attributes: Mapping[str, Any], names: _AttributeNames) -> str:
    """The agent's name in a call's own attributes; empty if missing."""
    name = first_of(attributes, names.agent)
    return _TEAM_ID.sub("", text_of(name)) if name and name not in _values("no_agents") else _agent_node(attributes)


def _agent_node(attributes: Mapping[str, Any]) -> str:
    return next((name for read in _values("agent_node") if (name := read(attributes))), "")


_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""The suffix that AutoGen adds to agent names in a team; it differs in each run."""


def _agent_name(span: Span, names: _AttributeNames) -> str:
    """The agent's name if a span is an agent's work, otherwise empty."""
    attributes = span.attributes
    if _has(attributes, names.not_agents):
        return ""
    if (name := first_of(attributes, names.span_agent)) and name not in _values("no_agents"):
        return _TEAM_ID.sub("", text_of(name))
    for key, kinds, name_key in names.agent_kinds:
        if attributes.get(key) in kinds:
            if not name_key:
                return text_of(span.name)
            if name := attributes.get(name_key):
                return text_of(name)
    for read in _values("agent_span"):
        if (agent := read(span)) is not None:
            return str(agent)
    return _agent_node(attributes)


# ---- rewards -------------------------------------------------------------------------------------------------------


def _reward_span(span: Span, names: _AttributeNames) -> Reward | None:
    """The reward of a reward span, otherwise None. Model calls inside such a span are the judge's."""
    entries = names.reader(span.attributes)
    readings = (values for read in names.reward_span_readers if (values := read(span, entries)) is not None)
    if (values := next(readings, None)) is None:
        return None
    if not values and not (names.gives or any(map(is_reward_event, span.events))):
        keys = ", ".join(sorted(span.attributes))[:200] or "no attribute"
        reason = f"no score was recorded in a form that is known: it has {keys}"
        values = [(span.name or "reward", RewardWithoutNumber(reason))]
    return Reward(values, [*_links(entries), *((("span_id", link.span),) for link in span.links)])


def _links(entries: Callable[[str], list[Raw]]) -> Iterator[Link]:
    """One link of all pairs in a list; each link of OpenTelemetry is separate."""
    for name in _values("link_list"):
        if pairs := tuple(
            (text_of(pair["key_match"]), text_of(pair["value_match"]))
            for pair in entries(name)
            if {"key_match", "value_match"} <= pair.keys()
        ):
            yield pairs


def _rewards(span: Span, names: _AttributeNames, meaning: Meaning | None) -> list[Reward]:
    """All rewards of a span, those of `meaning` included."""
    entries = names.reader(span.attributes)
    own = [entry for key in _values("named_rewards") for entry in entries(key)]
    values = [(text_of(name), value) for entry in own for name, value in entry.items()]
    if not isinstance(meaning, Reward):
        values += [(key, _NOT_READ) for key in names.like_rewards]
    rewards: list[Reward] = []
    for read in _values("rewards") if span.events else names.reward_readers:
        for reward in read(span, entries):
            if reward.links:
                rewards.append(reward)
            else:
                values += reward.values
    if isinstance(meaning, Reward):
        rewards.append(Reward(meaning.values + values, meaning.links))
    elif values:
        rewards.append(Reward(values, [(("span_id", span.id),)]))
    return rewards


_NOT_READ = RewardWithoutNumber("it is not read as a reward: name the attribute creditflow.reward.NAME")


def is_reward_event(event: SpanEvent) -> bool:
    """Whether an event is a reward, such as an evaluation."""
    return any(is_reward(event) for is_reward in _values("is_reward_event"))
