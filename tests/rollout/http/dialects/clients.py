"""The client of Anthropic, and the same requests in every dialect."""

import json

import anthropic
from pydantic import BaseModel


def anthropic_of(team) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=team.base_url, api_key=team.api_key, max_retries=0)


FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSE_TOOL = {"type": "function", **FUNCTION}
MESSAGE_TOOL = {"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}


def spelled(arguments: dict) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def chat_messages(system: str | None, turns: list) -> list:
    """Return a conversation as messages of chat completions.

    A turn is `("user", text)`, `("assistant", text, calls)` with calls `(id, name, arguments)`, or
    `("tool", id, text)`.
    """
    messages = [] if system is None else [{"role": "system", "content": system}]
    for role, *rest in turns:
        if role == "tool":
            messages.append({"role": "tool", "tool_call_id": rest[0], "content": rest[1]})
            continue
        message = {"role": role, "content": rest[0]}
        if calls := rest[1:] and rest[1]:
            message["content"] = rest[0] or None
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": spelled(arguments)}}
                for id, name, arguments in calls
            ]
        messages.append(message)
    return messages


def response_items(turns: list) -> list:
    """Return a conversation as the input of a response."""
    items = []
    for role, *rest in turns:
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": rest[0], "output": rest[1]})
            continue
        calls = rest[1] if rest[1:] else []
        if rest[0] or not calls:
            items.append({"role": role, "content": rest[0]})
        items += [
            {"type": "function_call", "call_id": id, "name": name, "arguments": spelled(arguments)}
            for id, name, arguments in calls
        ]
    return items


def anthropic_messages(turns: list) -> list:
    """Return a conversation as messages of Anthropic; results are blocks of one user's message."""
    messages = []
    for role, *rest in turns:
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": rest[0], "content": rest[1]}
            if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], list):
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
            continue
        calls = rest[1] if rest[1:] else []
        content = rest[0]
        if calls:
            content = [{"type": "text", "text": content}] if content else []
            content += [{"type": "tool_use", "id": id, "name": name, "input": args} for id, name, args in calls]
        messages.append({"role": role, "content": content})
    return messages


def extras(value) -> set[str]:
    """Return the names of the fields that a parsed object of an official client does not declare, at any depth."""
    if isinstance(value, BaseModel):
        own = set(value.model_extra or ())
        return own.union(*(extras(getattr(value, name)) for name in value.__class__.model_fields))
    if isinstance(value, list):
        return set().union(*map(extras, value))
    return set()


def events_of(text: str) -> list[tuple[str, dict]]:
    """Return the names and the data of server-sent events."""
    parts = [part.split("\n") for part in text.split("\n\n") if part]
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in parts]


async def texts_of(create, **request) -> list[str]:
    """Return the bodies of an answer and of its stream."""
    texts = []
    for stream in (False, True):
        async with create(**request, stream=stream) as response:
            texts.append(await response.text())
    return texts
