"""Classifies a span as a model call, a reward, an agent at work, or none of these, by all trace conventions.

Traces come from other programs, so values of an unexpected form are ignored.
"""

from __future__ import annotations

import ast
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import repeat
from operator import countOf, itemgetter
from typing import Any

from creditflow.data import Message
from creditflow.traces.content import LIST_TYPES, FoundParts, Raw, json_of
from creditflow.traces.conventions import conventions
from creditflow.traces.conventions.base import (
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
from creditflow.traces.messages import (
    DIGITS,
    NOT_PLAIN,
    OF_A_TEXT,
    from_spread,
    in_short,
    listed,
    parts_of,
    response_of,
)
from creditflow.traces.spans import Span, SpanEvent, text_of

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
    if like_call and names.says_and_has:
        return _model_call(span, names)
    if names.of_agent and (name := _agent_name(span)):
        return AgentSpan(name)
    return _model_call(span, names) if like_call else None


# ---- attributes by their names -------------------------------------------------------------------------------------


class _Tables:
    """The fields of all conventions, joined in order of precedence."""

    def __init__(self) -> None:
        self.conventions = all_ = conventions()

        def joined(field: str) -> tuple[Any, ...]:
            return tuple(value for one in all_ for value in getattr(one, field))

        def stated(field: str) -> tuple[Any, ...]:
            return tuple(value for one in all_ if (value := getattr(one, field)))

        self.kinds, self.calls, self.not_calls = joined("kinds"), joined("calls"), joined("not_calls")
        self.states_kind = frozenset((*self.kinds, *(key for key, _ in (*self.calls, *self.not_calls))))
        self.kind_keys = tuple(dict.fromkeys((*(key for key, _ in self.not_calls), *self.kinds)))
        self.encloses_calls = stated("encloses_calls")
        self.like_call = frozenset(joined("call_attributes"))
        self.prompt_lists, self.response_lists = stated("prompt_list"), stated("response_list")
        self.spread = frozenset((*self.prompt_lists, *self.response_lists))
        self.messages = stated("messages")
        self.of_messages = frozenset(joined("message_attributes"))
        self.whole = self.of_messages.union(joined("shared_message_attributes"))
        self.call_events = frozenset(joined("call_events"))
        self.prompt_events, self.response_events = (
            frozenset(joined("prompt_events")),
            frozenset(joined("response_events")),
        )
        self.event_readers = {
            event: one.event_messages
            for one in reversed(all_)
            if one.event_messages is not None
            for event in (*one.prompt_events, *one.response_events)
        }
        self.prompt_ids, self.response_ids = joined("prompt_ids"), joined("response_ids")
        self.logprobs, self.response_id = joined("logprobs"), joined("response_id")
        self.model = (*joined("model"), *joined("response_model"))
        self.temperature, self.parameters = joined("temperature"), joined("parameters")
        self.counts = {name: joined(name) for name in ("prompt_tokens", "completion_tokens")}
        self.finish_reason = joined("finish_reason")
        self.of_call = frozenset((*(key for key, _ in self.calls), *self.response_ids))
        self.call_agent, self.span_agent = joined("call_agent"), joined("span_agent")
        self.no_agents, self.not_agents = joined("no_agents"), joined("not_agents")
        self.agent_kinds = joined("agent_kinds")
        self.agent_span, self.agent_node = stated("agent_span"), stated("agent_node")
        kinds_of_agents = (key for key, *_ in self.agent_kinds)
        self.of_agent = frozenset((*self.span_agent, *self.call_agent, *kinds_of_agents, *joined("agent_attributes")))
        self.rewards = stated("rewards")
        self.named_rewards = stated("named_rewards")
        self.reward_prefixes = joined("reward_prefixes")
        self.is_reward_event = stated("is_reward_event")
        self.reward_span_lists, self.link_lists = frozenset(stated("reward_span_list")), stated("link_list")
        self.lists = tuple(
            dict.fromkeys(
                [
                    *self.prompt_lists,
                    *self.response_lists,
                    *self.reward_span_lists,
                    *self.link_lists,
                    *joined("reward_lists"),
                ]
            )
        )


@cache
def _tables() -> _Tables:
    return _Tables()


@dataclass(frozen=True, slots=True)
class _AttributeNames:
    """Facts that follow from the names of a span's attributes alone.

    Many spans of a trace have the same attribute names, so these facts are computed once per set of names.
    """

    lists: dict[str, list[dict[str, str]]]
    """Attributes such as `gen_ai.prompt.0.role`, by list. The entries are in order of their numbers; each maps the rest
    of the name (`role`) to the attribute. `creditflow.reward.NAME` is a list of one entry."""
    spread: bool
    """Whether messages are spread over attributes."""
    gives: bool
    """Whether the span gives rewards, whatever its kind."""
    like_rewards: Sequence[str]
    """Attributes with "reward" in their name that are not read as one."""
    reward_readers: Sequence[RewardReader]
    """Readers of the rewards that the attributes give."""
    reward_span_readers: Sequence[RewardSpanReader]
    """Readers that may recognise a reward span; empty if there are none."""
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
    logprobs: Sequence[str]
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
    prompt: list[dict[str, str]]
    """The attributes of each prompt message."""
    response: list[dict[str, str]]
    """The attributes of each response message."""

    @classmethod
    def read(cls, keys: tuple[str, ...]) -> _AttributeNames:
        tables = _tables()
        places: dict[str, dict[int, dict[str, str]]] = {}
        for key in keys:
            if (place := _place(key)) is not None:
                name, number, rest = place
                places.setdefault(name, {}).setdefault(number, {})[rest] = key
        there = frozenset(keys)

        def present(wanted: Iterable[str]) -> tuple[str, ...]:
            return tuple(key for key in wanted if key in there)

        def first_list(names: Sequence[str]) -> list[dict[str, str]]:
            """Entries of the first list present; two conventions on one span repeat the same messages."""
            return next((lists[name] for name in names if name in lists), [])

        lists = {name: [entries[number] for number in sorted(entries)] for name, entries in places.items()}
        prompt, response = first_list(tables.prompt_lists), first_list(tables.response_lists)
        spread = not tables.spread.isdisjoint(places)
        like_call, has_messages = (not one.isdisjoint(there) for one in (tables.like_call, tables.of_messages))
        like_rewards = tuple(key for key in keys if _is_like_a_reward(key))
        reward_readers = [
            one.rewards
            for one in tables.conventions
            if one.rewards is not None
            and (any(name in places for name in one.reward_lists) or any(map(_starts_with(one.reward_prefixes), keys)))
        ]
        reward_span_readers = [
            one.reward_span
            for one in tables.conventions
            if one.reward_span is not None
            and (one.reward_span_list in places or not there.isdisjoint(one.reward_attributes))
        ]
        return cls(
            lists=lists,
            spread=spread,
            gives=bool(reward_readers or like_rewards) or any(name in places for name in tables.named_rewards),
            reward_readers=reward_readers,
            reward_span_readers=reward_span_readers,
            like_rewards=like_rewards,
            of_call=spread or not tables.of_call.isdisjoint(there),
            of_kind=not tables.states_kind.isdisjoint(there),
            says_and_has=like_call and has_messages,
            like_call=like_call or has_messages,
            of_agent=not tables.of_agent.isdisjoint(there),
            prompt_ids=present(tables.prompt_ids),
            response_ids=present(tables.response_ids),
            logprobs=present(tables.logprobs),
            response_id=present(tables.response_id),
            model=present(tables.model),
            agent=present(tables.call_agent),
            temperature=present((*tables.temperature, *tables.parameters)),
            whole=not tables.whole.isdisjoint(there),
            plain=_plain_getter(prompt, response),
            prompt=prompt,
            response=response,
            counts=[(name, keys) for name, wanted in tables.counts.items() if (keys := present(wanted))],
        )

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


_names = lru_cache(maxsize=1 << 9)(_AttributeNames.read)
_MOST_NAMES = 128
"""Names of spans with more attributes are not cached: the entries would be large, and few spans would share them."""


def _names_of(attributes: Mapping[str, Any]) -> _AttributeNames:
    keys = tuple(attributes)
    return _names(keys) if len(keys) <= _MOST_NAMES else _AttributeNames.read(keys)


@lru_cache(maxsize=1 << 14)
def _place(key: str) -> tuple[str, int, str] | None:
    """List, number and rest of an attribute's name; None if it is not part of a list."""
    tables = _tables()
    for name in tables.named_rewards:
        if key.startswith(f"{name}."):
            return name, 0, key[len(name) + 1 :]
        if key == name:
            return name, 0, "reward"
    for name in tables.lists:
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
    return key not in _tables().reward_span_lists and not key.startswith(_tables().reward_prefixes)


# ---- model calls ---------------------------------------------------------------------------------------------------

_ENDED_BY_LENGTH = ("length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded")


def _model_call(span: Span, names: _AttributeNames) -> ModelCall:
    attributes = span.attributes
    found = _NOTHING_BESIDE
    choices: Sequence[str] = ()
    texts = None if span.events or names.whole or names.plain is None else _plain_texts(names.plain(attributes))
    if texts is not None:
        each = iter(texts)
        response = spoken = next(each)
        messages = [{"role": role or "user", "content": text} for role, text in zip(each, each, strict=True)]
        reason = attributes.get(names.response[0].get("finish_reason", ""))
    else:
        found = FoundParts()
        messages, responses = _messages(span, names, found)
        first: Raw = responses[0] if responses else {}
        if len(responses) > 1:
            first, others = _first_choice(attributes, _with_reasoning(responses))
            choices = [response_of(one, found)[0] for one in others]
        n_unknown = len(found.unknown)
        response, spoken = response_of(first, found)
        reason = first.get("finish_reason")
    response_ids = _token_ids(first_of(attributes, names.response_ids)) if names.response_ids else ()
    unusable = ""
    if not response and not response_ids:
        unusable = _why_unusable(attributes, messages, found.unknown[n_unknown:] if found.unknown else ())
    return ModelCall(
        messages,
        response,
        _agent_of_call(attributes, names) if names.of_agent else "",
        text_of(first_of(attributes, names.response_id)) if names.response_id else "",
        text_of(first_of(attributes, names.model)) if names.model else "",
        _temperature(attributes) if names.temperature else 1.0,
        _token_ids(first_of(attributes, names.prompt_ids)) if names.prompt_ids else (),
        response_ids,
        _logprobs(first_of(attributes, names.logprobs)) if names.logprobs else (),
        _info(span, names, reason),
        spoken,
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
    prompt, response = _from_attributes(attributes) if names.whole else ([], [])
    if span.events:
        more_prompt, more_response = _from_events(span.events)
        prompt, response = prompt or more_prompt, response or more_response  # events repeat the attributes
    if prompt or response or not names.spread:
        return in_short(prompt, found), response
    response = [from_spread(_entry(attributes, entry)) for entry in names.response]
    return in_short([from_spread(_entry(attributes, entry)) for entry in names.prompt], found), response


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
    if not any(one.get("role") == "thinking" for one in messages):
        return messages
    merged: list[Raw] = []
    reason: Raw = {}
    blocks: list[Raw] = []
    for one in [*messages, None]:
        if one is not None and one.get("role") == "thinking":
            blocks.append({"type": "thinking", "thinking": text_of(one.get("content"))})
            reason |= {key: one[key] for key in ("finish_reason",) if key in one}
        elif one is not None or blocks:
            merged.append({**reason, **(one or {"role": "assistant"}), "thinking_blocks": blocks})
            reason, blocks = {}, []
    return merged


def _first_choice(attributes: Mapping[str, Any], responses: Sequence[Raw]) -> tuple[Raw, Sequence[Raw]]:
    """The response of a call, and its further choices.

    Some conventions have one message per choice, others one per item of a response (a text, a tool call).
    """
    parameters = json_of(first_of(attributes, _tables().parameters))
    several = isinstance(parameters, dict) and isinstance(n := parameters.get("n"), int) and n > 1
    if several or any("finish_reason" in one or "index" in one for one in responses):
        return responses[0], responses[1:]
    return {"role": responses[0].get("role"), "parts": [part for one in responses for part in parts_of(one)]}, ()


def _has(attributes: Mapping[str, Any], wanted: Values) -> bool:
    return any(attributes.get(key) in values for key, values in wanted)


def _is_call(attributes: Mapping[str, Any], names: _AttributeNames) -> bool:
    tables = _tables()
    has_content = names.spread or first_of(attributes, names.response_ids) is not None
    if not names.of_kind:
        return has_content
    if _has(attributes, tables.not_calls):
        return False
    if _has(attributes, tables.calls):
        return True
    # Some tracers also put an agent's first and last message on the agent's span, as for a call.
    return has_content and not any(attributes.get(key) in ("AGENT", "agent") for key in tables.kinds)


def _is_like_a_call(attributes: Mapping[str, Any], names: _AttributeNames) -> bool:
    """Whether a span has attributes of a call though no convention marks it as one.

    Such a span is read as far as possible, or listed as left out.
    """
    if not names.like_call:
        return False
    tables = _tables()
    has_kind = any(attributes.get(key) not in _NO_KIND for key in tables.kinds)
    if has_kind or any(encloses(attributes) for encloses in tables.encloses_calls):
        return False
    return not _has(attributes, tables.not_calls)


_NO_KIND = (None, "", "span", "SPAN")


def is_call(span: Span) -> bool:
    """Whether a span is a model call by its attributes."""
    attributes, names = span.attributes, _names_of(span.attributes)
    if _is_call(attributes, names):
        return True
    return _is_like_a_call(attributes, names) and (names.says_and_has or not _agent_name(span))


def has_no_kind(span: Span) -> bool:
    """Whether a span's attributes give no kind: no model call, agent, tool or similar."""
    return not (any(map(span.attributes.get, _tables().kind_keys)) or is_call(span) or _agent_name(span))


def _info(span: Span, names: _AttributeNames, reason: Any) -> dict[str, Any]:
    attributes = span.attributes
    info: dict[str, Any] = {}
    for name, keys in names.counts:
        count = first_of(attributes, keys)
        if isinstance(count, int) and not isinstance(count, bool):
            info[name] = count
    for key in () if reason else _tables().finish_reason:
        if (reasons := attributes.get(key)) and (reason := next(iter(listed(reasons)), None)):
            break
    if isinstance(reason, str):
        info["finish_reason"] = "length" if reason.lower() in _ENDED_BY_LENGTH else reason
    if span.error:
        info["error"] = span.error
    return info


def _from_attributes(attributes: Mapping[str, Any]) -> Messages:
    """Prompt and response messages by the first convention that has any."""
    for read in _tables().messages:
        prompt, response = read(attributes)
        if prompt or response:
            return prompt, response
    return [], []


def _from_events(events: Sequence[SpanEvent]) -> Messages:
    """Prompt and response messages of events that hold one message each, or all messages of a call."""
    tables = _tables()
    prompt: list[Raw] = []
    response: list[Raw] = []
    for event in events:
        if event.name in tables.call_events:
            more = _from_attributes(event.attributes) if not (prompt or response) else ([], [])
        elif (read := tables.event_readers.get(event.name)) is not None:
            more = read(event)
        else:
            continue
        prompt += more[0]
        response += more[1]
    return prompt, response


def is_call_event(event: SpanEvent) -> bool:
    """Whether an event holds all messages of a call."""
    return event.name in _tables().call_events


def is_prompt_event(event: SpanEvent) -> bool:
    """Whether an event is one message of a prompt."""
    return event.name in _tables().prompt_events


def is_response_event(event: SpanEvent) -> bool:
    """Whether an event is one message of a response."""
    return event.name in _tables().response_events


def is_message_event(event: SpanEvent) -> bool:
    """Whether an event holds messages of a call."""
    return is_call_event(event) or is_prompt_event(event) or is_response_event(event)


def _temperature(attributes: Mapping[str, Any]) -> float:
    tables = _tables()
    value = first_of(attributes, tables.temperature)
    if value is None and isinstance(parameters := json_of(first_of(attributes, tables.parameters)), dict):
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
    name = first_of(attributes, names.agent)
    return _TEAM_ID.sub("", text_of(name)) if name and name not in _tables().no_agents else _agent_node(attributes)


def _agent_node(attributes: Mapping[str, Any]) -> str:
    return next((name for read in _tables().agent_node if (name := read(attributes))), "")


_TEAM_ID = re.compile(r"_[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")
"""The suffix that AutoGen adds to agent names in a team; it differs in each run."""


def _agent_name(span: Span) -> str:
    """The agent's name if a span is an agent's work, otherwise empty."""
    attributes, tables = span.attributes, _tables()
    if _has(attributes, tables.not_agents):
        return ""
    if (name := first_of(attributes, tables.span_agent)) and name not in tables.no_agents:
        return _TEAM_ID.sub("", text_of(name))
    for key, kinds, name_key in tables.agent_kinds:
        if attributes.get(key) in kinds:
            if not name_key:
                return text_of(span.name)
            if name := attributes.get(name_key):
                return text_of(name)
    for read in tables.agent_span:
        if (agent := read(span)) is not None:
            return str(agent)
    return _agent_node(attributes)


# ---- rewards -------------------------------------------------------------------------------------------------------


def _reward_span(span: Span, names: _AttributeNames) -> Reward | None:
    """The reward of a reward span, otherwise None. Model calls inside such a span are the judge's."""
    entries = names.reader(span.attributes)
    found = (values for read in names.reward_span_readers if (values := read(span, entries)) is not None)
    if (values := next(found, None)) is None:
        return None
    if not values and not (names.gives or any(map(is_reward_event, span.events))):
        keys = ", ".join(sorted(span.attributes))[:200] or "no attribute"
        reason = f"no score was recorded in a form that is known: it has {keys}"
        values = [(span.name or "reward", RewardWithoutNumber(reason))]
    return Reward(values, [*_links(entries), *((("span_id", link.span),) for link in span.links)])


def _links(entries: Callable[[str], list[Raw]]) -> Iterator[Link]:
    """One link of all pairs in a list; each link of OpenTelemetry is separate."""
    for name in _tables().link_lists:
        if pairs := tuple(
            (text_of(one["key_match"]), text_of(one["value_match"]))
            for one in entries(name)
            if {"key_match", "value_match"} <= one.keys()
        ):
            yield pairs


def _rewards(span: Span, names: _AttributeNames, meaning: Meaning | None) -> list[Reward]:
    """All rewards of a span, those of `meaning` included."""
    tables, entries = _tables(), names.reader(span.attributes)
    values = [
        (text_of(name), value) for key in tables.named_rewards for own in entries(key) for name, value in own.items()
    ]
    if not isinstance(meaning, Reward):
        values += [(key, _NOT_READ) for key in names.like_rewards]
    rewards: list[Reward] = []
    for read in tables.rewards if span.events else names.reward_readers:
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
    return any(is_reward(event) for is_reward in _tables().is_reward_event)
