"""Reads the texts of model and agent messages in various forms.

Reads OpenAI's form, the form of OpenTelemetry's conventions (`parts`), and messages spread over several attributes.
Module `parts` reads the parts of a content.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from creditflow.data import Message
from creditflow.plugins.traces.content import LIST_TYPES, FoundParts, Line, Raw, are_parts, joined, json_of, lines_of
from creditflow.plugins.traces.spans import text_of

OF_A_TEXT = frozenset(("role", "content", "finish_reason"))
"""Keys of a message that is one text."""
DIGITS = 9
"""The number of an entry in a list has fewer digits."""
NOT_PLAIN = ("[", "data:")
"""Prefixes of a content that may be a JSON list of parts, or a data URL."""


def in_short(messages: Sequence[Raw], notes: FoundParts) -> list[Message]:
    """Role and text of each message."""
    return [
        {"role": text_of(message.get("role") or "user"), "content": content_of(message, notes)} for message in messages
    ]


def from_spread(spread: Raw) -> Raw:
    """Build a message from attributes such as `role` or `message.tool_calls.0.tool_call.function.name`."""
    if OF_A_TEXT.issuperset(spread):
        return spread
    message: Raw = {}
    for rest, value in spread.items():
        name, _, deeper = rest.removeprefix("message.").partition(".")
        number, _, field_ = deeper.partition(".")
        if not deeper:
            message[name] = value
        elif name in ("contents", "tool_calls") and number.isdecimal() and len(number) < DIGITS:
            parts = message.setdefault(f"{name}_by_number", {})
            parts.setdefault(int(number), {})[field_.rpartition(".")[2]] = value
        elif isinstance(inner := message.setdefault(name, {}), dict):
            inner[deeper] = value
    if "function_call_name" in message:  # OpenInference's names of OpenAI's first form of a tool call
        arguments = message.pop("function_call_arguments_json", None)
        message["function_call"] = {"name": message.pop("function_call_name"), "arguments": arguments}
    if "user" in message and "content" not in message:  # OpenLLMetry's prompt of Anthropic's completions
        message["content"] = message.pop("user")
    return message


def messages_of(raw: Any) -> list[Raw]:
    """The messages in one attribute: a list, an object that holds a list, a text, or JSON with any of these."""
    if raw is None:
        return []
    value = json_of(raw)
    if isinstance(value, dict):
        value = value.get("messages", [value])
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, LIST_TYPES):
        return []
    if value and all(isinstance(item, dict) and "role" not in item for item in value) and are_parts(value):
        return [{"content": value}]  # the parts of one message
    return [item if isinstance(item, dict) else {"content": item} for item in value if item is not None]


def is_plain(content: Any) -> bool:
    """Whether a content is a text that is neither a JSON list of parts nor a data URL."""
    return type(content) is str and not content.startswith(NOT_PLAIN)


def content_of(message: Raw, notes: FoundParts) -> str:
    """The text of a message: reasoning, one line per part, tool calls as JSON."""
    content = message.get("content")
    if is_plain(content) and OF_A_TEXT.issuperset(message):
        return text_of(content)
    return joined(list(_lines(message, notes)))


def response_of(message: Raw, notes: FoundParts) -> tuple[str, str]:
    """The text of a response, and the same without reasoning, as other agents read it.

    Both are empty if no part of the message has a known form.
    """
    content = message.get("content")
    if is_plain(content) and OF_A_TEXT.issuperset(message):
        text = text_of(content)
        return text, text
    lines = list(_lines(message, notes))
    if all(kind == "unknown" for kind, _ in lines):
        return "", ""
    spoken = [line for line in lines if line[0] != "reasoning"]
    text = joined(lines)
    return text, text if len(spoken) == len(lines) else joined(spoken)


_BESIDE = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Keys of reasoning outside the content: vLLM, SGLang and DeepSeek; OpenRouter; Ollama; LiteLLM. A message may have the
same reasoning under several keys, so only the first counts."""


def parts_of(message: Raw) -> list[Any]:
    """A message as one list of parts: reasoning, texts, media, tool results, tool calls."""
    content = message.get("content")
    calls = (
        *listed(message.get("tool_calls")),
        *_by_number(message.get("tool_calls_by_number")),
        *([call] if isinstance(call := json_of(message.get("function_call")), dict) else ()),
    )
    return [
        *_reasoning_beside(message),
        *(_content_parts(content) if isinstance(content, str) else listed(content)),
        *listed(message.get("parts")),
        *_by_number(message.get("contents_by_number")),
        *_further(message),
        *({"type": "tool_call", **call} if isinstance(call, dict) else call for call in calls),
    ]


def _lines(message: Raw, notes: FoundParts) -> Iterator[Line]:
    parts = parts_of(message)
    yield from lines_of(parts, notes)
    if not parts and _KNOWN_KEYS.isdisjoint(message) and (keys := [key for key in message if not _is_about(key)]):
        yield from lines_of([dict.fromkeys(keys)], notes)


def _is_about(key: Any) -> bool:
    """Whether a key describes a message rather than holding its content."""
    return key in _ABOUT or not isinstance(key, str) or "." in key


_KNOWN_KEYS = frozenset(("content", "parts", "refusal", "tool_calls", "contents_by_number", "tool_calls_by_number"))
_ABOUT = frozenset(("role", "finish_reason", "name", "id", "index", "type", "tool_call_id", *_BESIDE))


def _content_parts(content: str) -> Sequence[Any]:
    """The parts of a content that is a JSON list of them, or the text itself."""
    if content[:1] == "[" and isinstance(read := json_of(content), list) and are_parts(read):
        return read
    return (content,) if content else ()


def _reasoning_beside(message: Raw) -> Iterator[Any]:
    for key in _BESIDE:
        value = message.get(key)
        if isinstance(value, str) and value:
            yield {"type": "reasoning", "text": value}
            return
        if isinstance(value, LIST_TYPES) and value:
            yield from ({"type": "reasoning", **item} if isinstance(item, dict) else item for item in value)
            return


def _further(message: Raw) -> Iterator[Any]:
    """Further kinds of response content: OpenAI's refusal and audio with transcript, OpenRouter's images."""
    if isinstance(refusal := message.get("refusal"), str) and refusal:
        yield {"type": "refusal", "refusal": refusal}
    if isinstance(audio := message.get("audio"), dict) and audio:
        yield {"type": "audio", **audio}
        if isinstance(transcript := audio.get("transcript"), str):
            yield transcript
    if isinstance(images := message.get("images"), list):
        yield from images


def listed(value: Any) -> Sequence[Any]:
    """`value` as a list: a list or a JSON list of it as is, None as an empty list, anything else as a list of one."""
    items = json_of(value) if isinstance(value, str) else value
    return items if isinstance(items, LIST_TYPES) else () if items is None else (items,)


def _by_number(parts: Any) -> list[Any]:
    return [parts[number] for number in sorted(parts)] if isinstance(parts, dict) else []
