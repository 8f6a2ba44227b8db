"""Messages of models and agents, in whatever form: the text of each.

It knows forms: OpenAI's, that of OpenTelemetry's conventions (`parts`), and messages that are spread over attributes,
a piece in each. Not where they stand, nor what a span is. What does not have an expected form is as if it were not
there.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from typing import Any

from creditflow.adapters.spans import text_of
from creditflow.trajectory import Message

LIST_TYPES = (list, tuple)
"""Not `list | tuple`, which makes a new type at every look: there are dozens for each span."""
Raw = dict[str, Any]
"""One entry of a list: what follows its number, and the value. Of a message: `role`, `content` or `parts`,
`tool_calls`, `finish_reason`."""
OF_A_TEXT = frozenset(("role", "content", "finish_reason"))
"""What a message has that is a text and no more."""
_MAY_HAVE_MORE = ("tool_calls", "tool_calls_by_number", "contents_by_number")
DIGITS = 9
"""An entry's number in a list has fewer."""


def in_short(messages: Sequence[Raw]) -> list[Message]:
    """The role and the text of each."""
    return [{"role": text_of(one.get("role") or "user"), "content": content_of(one)} for one in messages]


def from_spread(spread: Raw) -> Raw:
    """The message whose parts and tool calls are spread, too: `message.tool_calls.0.tool_call.function.name`."""
    if OF_A_TEXT.issuperset(spread):
        return spread
    message: Raw = {}
    for rest, value in spread.items():
        name, _, deeper = rest.removeprefix("message.").partition(".")
        if not deeper:
            message[name] = value
        elif name in ("contents", "tool_calls"):
            number, _, field_ = deeper.partition(".")
            if number.isdecimal() and len(number) < DIGITS:
                parts = message.setdefault(f"{name}_by_number", {})
                parts.setdefault(int(number), {})[field_.rpartition(".")[2]] = value
    return message


def messages_of(raw: Any) -> list[Raw]:
    """Those of one attribute: a list of them, an object that has one, a text, or JSON of any of these."""
    if raw is None:
        return []
    found = json_of(raw)
    if isinstance(found, dict):
        found = found.get("messages", [found])
    if isinstance(found, str):
        found = [{"content": found}]
    return [one for one in found if isinstance(one, dict)] if isinstance(found, LIST_TYPES) else []


def text_content(content: Any) -> str:
    """The text of a message that has nothing but its content."""
    return text_of(content) if type(content) is str and content[:1] != "[" else content_of({"content": content})


def content_of(message: Raw) -> str:
    """The text of a message: its parts in lines, a tool call as JSON."""
    content = message.get("content")
    if type(content) is str and content[:1] != "[" and OF_A_TEXT.issuperset(message):
        return text_of(content)
    parts = message.get("parts")
    if message.keys().isdisjoint(_MAY_HAVE_MORE):
        if type(content) is str and parts is None and content[:1] != "[":
            return text_of(content)
        if content is None and type(parts) is list and len(parts) == 1 and type(parts[0]) is dict:
            text = parts[0].get("content")
            if parts[0].get("type") == "text" and type(text) is str and not text.startswith(_A_MESSAGE):
                return text_of(text)
    return text_of("\n".join(_lines(parts_of(message))))


def parts_of(message: Raw) -> list[Any]:
    """All that a message says, however it is spread, as the parts of one: texts, results of tools, calls."""
    content = message.get("content")
    found: Sequence[Any]
    if isinstance(content, str):
        read = json_of(content) if content[:1] == "[" else None
        found = read if isinstance(read, list) and _are_parts(read) else [content] if content else []
    else:
        found = listed(content)
    calls = (*listed(message.get("tool_calls")), *_by_number(message.get("tool_calls_by_number")))
    return [
        *found,
        *listed(message.get("parts")),
        *_by_number(message.get("contents_by_number")),
        *({"type": "tool_call", **call} if isinstance(call, dict) else call for call in calls),
    ]


def _are_parts(value: Sequence[Any]) -> bool:
    return bool(value) and all(isinstance(part, dict) and "type" in part for part in value)


def _lines(parts: Sequence[Any]) -> Iterator[str]:
    before: str | None = None
    for one in parts:
        if isinstance(one, str):
            yield (before := one)
        elif isinstance(one, dict):
            function = one.get("function")  # OpenAI's form of a tool call
            part = {**function, "type": "tool_call"} if isinstance(function, dict) else one
            kind = part.get("type")
            if isinstance(text := part.get("content", part.get("text")), str) and text.startswith(_A_MESSAGE):
                yield from _lines_of_repr(text)
            elif kind in ("tool_call", "tool_use", "function"):
                given = json_of(part.get("arguments", part.get("input")))  # some leave out what is empty
                yield (before := _dumped({"name": part.get("name"), "arguments": {} if given is None else given}))
            elif kind in ("tool_call_response", "tool_result"):
                result = _plain(part.get("response", part.get("result", part.get("content"))))
                if result != before:  # it may stand twice, as a text and as a result
                    yield (before := result)
            elif isinstance(text, str):
                yield (before := text)


_A_MESSAGE = "{'content': "
"""So begins the text of a message that calls a tool, by OpenTelemetry's instrumentation of the Agents SDK: it is
OpenAI's whole message, as Python prints it."""


def _lines_of_repr(text: str) -> Iterator[str]:
    try:
        message = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        message = None
    if not isinstance(message, dict):
        yield text
    elif content := content_of(message):
        yield content


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _dumped(value)


def _dumped(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        return ""


def listed(value: Any) -> Sequence[Any]:
    """A list as it is, JSON of one read; anything else as a list of one, and None as an empty one."""
    found = json_of(value) if isinstance(value, str) else value
    return found if isinstance(found, LIST_TYPES) else () if found is None else (found,)


def _by_number(parts: Any) -> list[Any]:
    return [parts[number] for number in sorted(parts)] if isinstance(parts, dict) else []


def json_of(value: Any) -> Any:
    """What a text says if it is JSON, else the text; other values as they are."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


_REASONING = ("reasoning", "thinking", "redacted_thinking")


def without_reasoning(said: Raw, response: str) -> str:
    """What others may read of a response: agents are handed the text alone."""
    if said.keys().isdisjoint(_HAVE_PARTS):
        return response
    parts = parts_of(said)
    texts = [part for part in parts if not (isinstance(part, dict) and part.get("type") in _REASONING)]
    return response if len(texts) == len(parts) else content_of({"parts": texts})


_HAVE_PARTS = ("parts", "contents_by_number")
