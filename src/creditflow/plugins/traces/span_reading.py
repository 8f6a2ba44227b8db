"""Classifies a span as a model call, a reward, an agent at work, or none of these, by all trace conventions.

Traces come from other programs, so values of an unexpected form are ignored.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from itertools import islice, repeat
from operator import countOf, itemgetter
from typing import Any, Literal

from creditflow.data import Message
from creditflow.plugins.traces.conventions import conventions
from creditflow.plugins.traces.conventions.base import AgentSpan, Convention, EventKind, Meaning, ModelCall
from creditflow.plugins.traces.messages import (
    BLOCKS,
    NOT_PLAIN,
    OF_A_TEXT,
    READERS,
    THINKING,
    ChatMessage,
    Notes,
    Raw,
    decode,
    first_in,
    joined,
    json_of,
    listed,
    message_of,
    prompt_of,
    unflattened,
)
from creditflow.plugins.traces.spans import LIST_TYPES, Reward, RewardWithoutNumber, Span, SpanEvent, mapping, text_of


def read_span(span: Span) -> tuple[Meaning | None, list[Reward]]:
    """The meaning of `span` (None: nothing of interest) and all its rewards.

    The rewards are those of a reward span and those attached to a span of any kind.
    """
    names = _names_of(span.attributes)
    rewards = _rewards(span, names) if span.events or span.rewards or names.reward_readers or names.like_rewards else []
    for reward in rewards:
        if reward.is_span:
            return reward, rewards
    kind = _kind(span, names)
    return _model_call(span, names) if kind == "call" else kind if isinstance(kind, AgentSpan) else None, rewards


def kind_of(span: Span) -> Kind:
    """A model call, an agent's work, a span of another kind (such as a tool's), or one without a kind."""
    return _kind(span, _names_of(span.attributes))


Kind = AgentSpan | Literal["call", "other"] | None


def _kind(span: Span, names: _AttributeNames) -> Kind:
    """The kind by a span's attributes.

    A span with attributes of a call is a call although no convention marks it as one: it is read as far as possible, or
    listed as left out.
    """
    attributes, is_like_call = span.attributes, False
    if not names.has(attributes, "not_calls"):
        kinds = [attributes[key] for key in names.present["kinds"]] if names.present["kinds"] else ()
        is_like_call = names.like_call and not (kinds and any(kind not in _NO_KIND for kind in kinds))
        has_content = names.prompt or names.response or names.first(attributes, "response_ids") is not None
        # Some tracers also put an agent's first and last message on the agent's span, as for a call.
        is_content = has_content and "AGENT" not in kinds and "agent" not in kinds
        if is_content or names.has(attributes, "calls") or (is_like_call and names.has_model_and_messages):
            return "call"
    if name := _agent_name(span, names):
        return AgentSpan(name)
    if is_like_call:
        return "call"
    has_kind = any(attributes.get(_key_of(e)) for field in ("not_calls", "kinds") for e in names.present[field])
    return "other" if has_kind else None


_NO_KIND = (None, "", "span", "SPAN")


# ---- attributes by their names -------------------------------------------------------------------------------------


@cache
def _values(*names: str) -> tuple[Any, ...]:
    """The values of fields of all conventions, in order of precedence; a single value counts as a tuple of one."""
    values = [getattr(convention, name) for name in names for convention in conventions()]
    return tuple(entry for value in values if value for entry in (value if isinstance(value, tuple) else (value,)))


class _AttributeNames:
    """Facts that follow from the names of a span's attributes alone.

    Many spans of a trace have the same attribute names, so these facts are computed once per set of names.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        there = frozenset(keys)
        self.present = {name: tuple(e for e in _values(name) if _key_of(e) in there) for name in _KEY_FIELDS}
        """Field of a convention to those of its attributes that are present, in order of precedence."""
        lists: dict[str, dict[int, dict[str, str]]] = {}
        for key in keys:
            if (place := _place(key)) is not None:
                name, number, rest = place
                lists.setdefault(name, {}).setdefault(number, {})[rest] = key
        numbers: Mapping[int, Any] = next((lists[name] for name in _values("prompt_list") if name in lists), {0: {}})
        self.gaps = ["a gap in their numbers"] * (max(numbers) - min(numbers) >= len(numbers))
        """The note on a prompt of which the tracer has skipped a message; none if it has all."""
        self.lists = {name: [entries[number] for number in sorted(entries)] for name, entries in lists.items()}
        """Attributes such as `gen_ai.prompt.0.role`, by list. The entries are in order of their numbers; each maps the
        rest of the name (`role`) to the attribute."""
        self.prompt, self.response = (
            next((self.lists[name] for name in _values(field) if name in self.lists), [])
            for field in ("prompt_list", "response_list")
        )
        """The attributes of each spread message, of the first list present: two conventions repeat the same ones."""
        self.nested = any(c.has_nested_parts and c.prompt_list in self.lists for c in conventions())
        """Whether the content of a spread message may be JSON."""
        self.plain = self._plain_getter()
        """Reads the content of the response, then role and content of each prompt message. None unless all messages are
        spread over attributes, with no further fields."""
        self.whole: list[Convention] = []
        read: set[str] = set()
        for convention in conventions():
            own = {place.attribute for place in (*convention.prompt, *convention.response)} & there - read
            if own and (not convention.kinds or there & set(convention.kinds)):
                self.whole.append(convention)
                read |= own
        """Conventions with messages in single attributes that none before them reads, in order of precedence."""
        places = (place for c in conventions() for place in (*c.prompt, *c.response) if place.attribute in there)
        names_model, has_messages = bool(self.present["call_attributes"]), any(not place.shared for place in places)
        self.like_call = names_model or has_messages
        """Whether it has attributes that only model calls have, unless its kind is something else."""
        self.has_model_and_messages = names_model and has_messages
        """Whether it has both a model and messages, and so is a call even if it names an agent."""
        self.like_rewards = [
            key for key in keys if "reward" in key.lower() and not f"{key}.".startswith(_values("reward_prefixes"))
        ]
        """Attributes with "reward" in their name that are not read as one."""
        self.reward_readers = [
            c.rewards
            for c in conventions()
            if c.rewards is not None and any(f"{key}.".startswith(c.reward_prefixes) for key in keys)
        ]
        """Readers of the rewards that the attributes may give."""

    def _plain_getter(self) -> Callable[[Mapping[str, Any]], Sequence[Any]] | None:
        are_texts = all({"role", "content"} <= entry.keys() <= OF_A_TEXT for entry in self.prompt)
        is_text = len(self.response) == 1 and {"content"} <= self.response[0].keys() <= OF_A_TEXT
        if self.gaps or not (self.prompt and are_texts and is_text):
            return None
        keys = [key for entry in self.prompt for key in (entry["role"], entry["content"])]
        return itemgetter(self.response[0]["content"], *keys)

    def first(self, attributes: Mapping[str, Any], name: str) -> Any:
        """The first value that is not None of the attributes in a field."""
        for key in self.present[name]:
            if (value := attributes.get(key)) is not None:
                return value
        return None

    def has(self, attributes: Mapping[str, Any], name: str) -> bool:
        """Whether an attribute has one of the values in this field."""
        entries = self.present[name]
        return bool(entries) and any(attributes.get(key) in values for key, values in entries)


def _key_of(entry: Any) -> Any:
    return entry[0] if isinstance(entry, tuple) else entry


_KEY_FIELDS = tuple(
    field.name
    for field in fields(Convention)
    if field.type.startswith("tuple[") or field.type == "Values"
    if field.name not in ("prompt", "response")
)
"""Fields of a convention that name attributes."""


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
    place = _LIST.match(key)
    return None if place is None else (place[1], int(place[2]), place[3])


_LIST = re.compile(r"([^\d]{1,200}?)\.(\d{1,8})\.(.+)", re.DOTALL)


# ---- model calls ---------------------------------------------------------------------------------------------------

_ENDED_BY_LENGTH = ("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded")


def _model_call(span: Span, names: _AttributeNames) -> ModelCall:
    attributes = span.attributes
    response_ids = _token_ids(names.first(attributes, "response_ids")) if names.present["response_ids"] else ()
    is_spread = not (span.events or span.is_cut or names.whole or span.scope in _values("repr_scopes"))
    texts = _plain_texts(names.plain(attributes)) if is_spread and names.plain is not None else None
    if texts is not None and texts[0] and attributes.get(names.response[0].get("role", "")) != THINKING:
        each = iter(texts)
        response = next(each)
        messages: list[Message] = [{"role": r or "user", "content": text} for r, text in zip(each, each, strict=True)]
        call = ModelCall(messages, response, spoken=response)
        reason = attributes.get(names.response[0].get("finish_reason", ""))
    else:
        call, reason = _read_call(span, names, has_ids=bool(response_ids))
    name = names.first(attributes, "call_agent")
    if name := _agent_name(span, names) if not name or name in _values("no_agents") else name:
        call.agent = _TEAM_ID.sub("", text_of(name)).strip('"')  # MLflow writes texts as JSON
    call.response_id = text_of(names.first(attributes, "response_id"))
    call.model = text_of(names.first(attributes, "model")).strip('"')
    temperature = names.first(attributes, "temperature")
    if temperature is None and names.present["parameters"]:
        temperature = mapping(json_of(names.first(attributes, "parameters"))).get("temperature")
    if isinstance(temperature, int | float) and 0 <= temperature < _LARGEST:
        call.temperature = float(temperature)
    call.prompt_ids, call.response_ids = _token_ids(names.first(attributes, "prompt_ids")), response_ids
    if names.present["logprobs"]:
        call.logprobs = _logprobs(names.first(attributes, "logprobs"))
    call.info = _info(span, names, reason)
    call.scope = span.scope
    return call


def _plain_texts(values: Sequence[Any]) -> Sequence[str] | None:
    """`values` if all are ASCII texts that need no parsing, as in most calls; otherwise None."""
    try:
        if not all(map(str.isascii, values)):
            return None
    except TypeError:
        return None
    # Chunks of Gemini's contents are joined, and so is Anthropic's reasoning with the text after it.
    is_chunked = values.count("model") > 1 or THINKING in values
    return None if is_chunked or any(map(str.startswith, values, repeat(NOT_PLAIN))) else values


def _read_call(span: Span, names: _AttributeNames, *, has_ids: bool) -> tuple[ModelCall, Any]:
    """The messages of a call in any form, and the reason why its response ended."""
    cut = ["the limit on the number of attributes"] if span.is_cut else []
    _, prompt, of_prompt = next(_readings(span, names, "prompt", cut), _NO_READING)
    is_cut = span.is_cut or (bool(cut) and not prompt)
    source, responses, of_response = next(_readings(span, names, "response", cut), _NO_READING)
    is_cut |= bool(cut) and not responses
    first, others = _first_choice(responses, span.attributes, names)
    if responses and not (others or first.calls):  # LiteLLM writes texts and calls by two conventions
        for _, more, _ in islice(_readings(span, names, "response", []), 1, None):
            first.parts += [call for message in more for call in message.calls]
    call = ModelCall([{"role": message.role, "content": message.text} for message in prompt], "")
    if not all(part.kind == "unknown" for part in first.parts):
        call.response = first.text
        call.spoken = joined([part for part in first.parts if part.kind != "reasoning"])
    call.source, call.choices, call.is_cut = source, [choice.text for choice in others], is_cut
    call.media, call.unknown = [*of_prompt.media, *of_response.media], [*of_prompt.unknown, *of_response.unknown]
    if is_cut:
        call.unusable = f"it was cut off by a limit of the recorder: {', '.join(dict.fromkeys(cut))[:200]}"
    elif not (call.response or has_ids):
        call.unusable = _why_unusable(span.attributes, call.messages, of_response.unknown)
    return call, first.finish_reason


_Side = Literal["prompt", "response"]
_Reading = tuple[str, list[ChatMessage], Notes]
_NO_READING: _Reading = ("", [], Notes())


def _readings(span: Span, names: _AttributeNames, side: _Side, cut: list[str]) -> Iterator[_Reading]:
    """The messages of a call at each place that has any, in order of precedence; `cut` gets the places cut off."""
    has_repr = span.scope in _values("repr_scopes")
    # Messages of a convention with kinds are a call's only if it marks one: another may have written it on an agent's.
    whole = [c for c in names.whole if not c.kinds or any(span.attributes.get(key) in marks for key, marks in c.calls)]
    places: list[Convention | str] = [*whole, "events", "list"]
    for place in places:
        notes = Notes(has_repr=has_repr)
        if isinstance(place, Convention):
            messages = _at_places(place, side, span.attributes, notes)
        elif place == "events":
            messages = _from_events(span.events, side, notes)
        else:
            entries = [unflattened(_entry(span.attributes, entry)) for entry in getattr(names, side)]
            notes.unknown += names.gaps if side == "prompt" else ()
            is_nested = side == "prompt" or any(BLOCKS.match(text_of(entry.get("content"))) for entry in entries)
            messages = READERS[side](entries, notes, nested=names.nested and is_nested)
        if notes.cut:
            cut += notes.cut
        elif messages:
            yield place if isinstance(place, str) else place.name, messages, notes


def _at_places(convention: Convention, side: _Side, attributes: Mapping[str, Any], notes: Notes) -> list[ChatMessage]:
    """The messages of a prompt or a response in the attributes that a convention names."""
    messages: list[ChatMessage] = []
    parts: Raw = {}
    for place in convention.prompt if side == "prompt" else convention.response:
        value = attributes.get(place.attribute)
        if value is None or (messages and not place.key):
            continue
        value = decode(value, place.form, place.attribute, notes)
        if place.key:
            parts.setdefault(place.key, value)
        else:
            messages = READERS[side](value, notes)
    if (system := parts.pop("system", None)) is not None:
        first = prompt_of([{"role": "system", "parts": listed(system)}], notes)
        if not (messages and (messages[0].role, messages[0].text) == ("system", first[0].text)):
            messages = first + messages
    if parts and (message := message_of({"role": "assistant", **parts}, "", notes)) and message.parts:
        messages = [message]
    return messages


def _first_choice(
    responses: Sequence[ChatMessage], attributes: Mapping[str, Any], names: _AttributeNames
) -> tuple[ChatMessage, Sequence[ChatMessage]]:
    """The response of a call, and its further choices.

    Some conventions have one message per choice, others one per item of a response (a text, a tool call). Without a
    number of choices, messages are choices if each has a text and an end.
    """
    if len(responses) > 1:
        parameters = mapping(json_of(names.first(attributes, "parameters")))
        n = names.first(attributes, "n_choices") or first_in(parameters, _N_CHOICES)
        are_texts = all(response.has_text and response.finish_reason not in _NO_END for response in responses)
        if (isinstance(n, int) and n > 1) or are_texts or all(response.is_choice for response in responses):
            return responses[0], responses[1:]
    reason = next((response.finish_reason for response in responses if response.finish_reason), None)
    return ChatMessage("assistant", [part for response in responses for part in response.parts], reason), ()


_NO_END = (None, "", "completed")
"""Finish reasons of items; `completed` is the status of OpenAI's."""
_N_CHOICES = ("n", "candidate_count", "candidateCount", "num_return_sequences")


def _why_unusable(attributes: Mapping[str, Any], messages: Sequence[Message], unknown: Sequence[str]) -> str:
    """The reason why a call without a response cannot be a step, with the names of unknown forms or attributes."""
    if unknown:
        return f"its response is in a form that is not known: {', '.join(unknown)[:200]}"
    others = sorted(key for key, v in attributes.items() if v and isinstance(v, _HOLDERS) and _LIKE_TEXT.search(key))
    why = "no response was recorded" if messages else "neither messages nor a response were recorded"
    why += "" if messages and not others else " in a form that is known"
    return f"{why}: it has {', '.join(others)[:200]}" if others else why


_HOLDERS = (str, *LIST_TYPES, dict)
_LIKE_TEXT = re.compile(r"(output|completion|response|generation|result|request|message|content)s?(\.value)?$", re.I)
"""Names of attributes that may hold messages."""


def _info(span: Span, names: _AttributeNames, reason: Any) -> dict[str, Any]:
    info: dict[str, Any] = {}
    for key in () if reason else names.present["finish_reason"]:
        reason = reason or next(iter(listed(json_of(span.attributes[key]))), None)
    if isinstance(reason, str):
        info["finish_reason"] = "length" if reason.lower() in _ENDED_BY_LENGTH else reason
    if span.error:
        info["error"] = span.error
    return info


def _from_events(events: Sequence[SpanEvent], side: _Side, notes: Notes) -> list[ChatMessage]:
    """The messages of events that hold one message each."""
    raw: list[Any] = []
    for event in events:
        kind, role = _event_kinds().get(event.name, ("", ""))
        if kind == side:
            bodies = (event.body, event.attributes.get("gen_ai.event.content"))
            decoded = (decode(value, "json", event.name, notes) for value in bodies)
            body = next((body for body in decoded if isinstance(body, dict)), dict(event.attributes))
            raw.append({"role": role, **body} if side == "prompt" else body)
    return READERS[side](raw, notes, nested=True)


@cache
def _event_kinds() -> Mapping[str, tuple[EventKind, str]]:
    """Event name to its kind and role."""
    return {name: event for convention in conventions() for name, event in convention.events.items()}


def message_kind(event: SpanEvent) -> EventKind:
    """`record` if an event holds attributes of a call, `prompt` or `response` if it is one message; else empty."""
    return _event_kinds().get(event.name, ("", ""))[0]


_LARGEST = 1e6
"""The limit of temperatures and log-probabilities."""


def _token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from a list, from the first of several lists, or from either as JSON; empty if malformed."""
    value = json_of(value)
    if not isinstance(value, LIST_TYPES) or not value:
        return ()
    ids = tuple(value[0] if isinstance(value[0], LIST_TYPES) else value)
    try:
        # All are from 0 to 2^31 - 1 if no unsigned 32-bit value has its highest bit. This takes half the time of `min`
        # and `max`, and traces have more token ids than anything else.
        are_ids = countOf(map(type, ids), int) == len(ids) and array("I", ids).tobytes()[_HIGHEST::4].isascii()
    except OverflowError:
        return ()
    return ids if are_ids else ()


_HIGHEST = 3 if sys.byteorder == "little" else 0


def _logprobs(value: Any) -> tuple[float, ...]:
    """Log-probabilities from OpenAI's list of tokens; empty if any is missing."""
    values = [token.get("logprob") if isinstance(token, dict) else token for token in listed(json_of(value))]
    numbers = tuple(float(value) for value in values if isinstance(value, int | float) and abs(value) < _LARGEST)
    return numbers if len(numbers) == len(values) else ()


# ---- agents --------------------------------------------------------------------------------------------------------


_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""The suffix that AutoGen adds to agent names in a team; it differs in each run."""


def _agent_name(span: Span, names: _AttributeNames) -> str:
    """The agent's name if a span is an agent's work, otherwise empty."""
    attributes = span.attributes
    if (name := names.first(attributes, "span_agent")) and name not in _values("no_agents"):
        return _TEAM_ID.sub("", text_of(name))
    for key, kinds, name_keys in names.present["agent_kinds"]:
        if attributes.get(key) in kinds:
            own = "" if span.name.startswith("Runnable") else span.name.removeprefix("invoke_agent").strip()
            if name := next(filter(None, (attributes.get(key) if key else own for key in name_keys)), ""):
                return text_of(name).strip('"')
    for key, field in names.present["agent_keys"]:
        value = attributes[key]
        if field:
            value = mapping(json_of(value)).get(field) if isinstance(value, str) and field in value else None
        if name := text_of(value):
            return name
    return ""


# ---- rewards -------------------------------------------------------------------------------------------------------


def _rewards(span: Span, names: _AttributeNames) -> list[Reward]:
    """All rewards of a span: those with links, and one with all others."""

    def entries(name: str) -> list[Raw]:
        return [_entry(span.attributes, entry) for entry in names.lists.get(name, ())]

    readers = _values("rewards") if span.events else names.reward_readers
    rewards = [*span.rewards, *(reward for read in readers for reward in read(span, entries))]
    linked = [reward for reward in rewards if reward.links and not reward.is_span]
    links = [link for reward in rewards if reward.is_span for link in reward.links]
    values = [value for reward in rewards if reward.is_span or not reward.links for value in reward.values]
    is_span = any(reward.is_span for reward in rewards)
    if is_span:
        links += [(("span_id", link.span),) for link in span.links]
        if not (values or linked):
            keys = ", ".join(sorted(span.attributes))[:200] or "no attribute"
            reason = f"no score was recorded in a form that is known: it has {keys}"
            values = [(span.name or "reward", RewardWithoutNumber(reason))]
    else:
        links = [(("span_id", span.id),)]
        values += [(key, _NOT_READ) for key in names.like_rewards]
    return [*linked, Reward(values, links, is_span)] if values or is_span else linked


_NOT_READ = RewardWithoutNumber("it is not read as a reward: name the attribute creditflow.reward.NAME")


def is_reward_event(event: SpanEvent) -> bool:
    """Whether an event is a reward, such as an evaluation."""
    return any(is_reward(event) for is_reward in _values("is_reward_event"))
