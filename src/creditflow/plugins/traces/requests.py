"""Reads requests to model APIs and their responses, in the form of each API.

Chat logs contain them, and so do the spans of LangSmith, Langfuse and MLflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_TOKENS = ("prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_token_count")
RESPONSE_TOKENS = (
    *("completion_tokens", "output_tokens", "outputTokens"),
    *("candidatesTokenCount", "candidates_token_count"),
)
"""Keys of the token counts in an object of usage."""
WHY_ENDED = ("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason")
"""Keys of the reason why a response ended."""
_SYSTEM = ("system", "instructions", "systemInstruction", "system_instruction")
_READ = ("messages", "input", "contents", "prompt")


def prompt_of(request: Any) -> list[dict[str, Any]]:
    """The messages of a request.

    Reads requests to OpenAI (chat, responses, completions), Anthropic, Bedrock, Gemini and LangChain's models, a list
    of messages, and a text.
    """
    body = request if isinstance(request, Mapping) else {"messages": request}
    system, read = first_in(body, _SYSTEM), first_in(body, _READ)
    if isinstance(read, list | tuple) and len(read) == 1 and isinstance(read[0], list | tuple):
        read = read[0]  # LangChain's list of requests
    messages = list(read) if isinstance(read, list | tuple) else [] if read is None else [read]
    return ([_as_message(system, "system")] if system else []) + [_as_message(message, "user") for message in messages]


def _as_message(value: Any, role: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        message = _of_langchain(value)
        is_item = "role" not in message and "content" not in message and "type" in message  # OpenAI's responses API
        return {"role": role, **({"content": [message]} if is_item else message)}
    return {"role": role, "content": value}


_LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


def _of_langchain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of LangChain in OpenAI's form; any other message unchanged."""
    fields = mapping(message.get("kwargs")) if message.get("type") == "constructor" else message
    role = _LANGCHAIN_ROLES.get(kind) if isinstance(kind := fields.get("type"), str) else None
    if role is None or "role" in fields or "content" not in fields:
        return message
    return {"role": role, **{key: fields[key] for key in ("content", "tool_calls", "name") if fields.get(key)}}


def responses_of(response: Any) -> list[dict[str, Any]]:
    """The message of each choice of a response, with its `finish_reason`."""
    if response is None:
        return []
    choices = ((message, first_in(choice, WHY_ENDED)) for message, choice in choices_of(response))
    return [{**message, **({} if reason is None else {"finish_reason": reason})} for message, reason in choices]


def choices_of(response: Any) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The message of each choice of a response, with the object that describes the choice.

    OpenAI completions have `choices` and Gemini responses `candidates`. Other providers return one message: Bedrock in
    `output`, Ollama in `message`, Anthropic as the response itself. OpenAI's responses API returns a list of items.
    LangChain's models return lists of `generations`, one for each request.
    """
    if not isinstance(response, Mapping):
        return [({"content": response}, {})]
    for key, inner in (("choices", "message"), ("candidates", "content"), ("generations", "message")):
        if isinstance(choices := response.get(key), list) and choices:
            choices = choices[0] if isinstance(choices[0], list) else choices
            pairs = [choice if isinstance(choice, Mapping) else {inner: choice} for choice in choices]
            return [
                (_message_in(choice, inner), {**mapping(choice.get("generation_info")), **choice}) for choice in pairs
            ]
    output = response.get("output")
    if isinstance(output, Mapping):
        return [(_message_in(output, "message"), response)]
    if isinstance(output, str):
        return [({"content": output}, response)]
    if isinstance(output, list):
        ended = mapping(response.get("incomplete_details")).get("reason") or response.get("status")
        return [({"role": "assistant", "content": output}, {"finish_reason": ended})]
    return [(_message_in(response, "message"), response)]


def _message_in(holder: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The message in `holder`, or `holder` itself as one; an unknown form keeps its keys, which name it in reports."""
    message = holder.get(key)
    if isinstance(message, Mapping):
        return _of_langchain(message)
    if message is not None:
        return {"content": message}
    text = first_in(holder, ("text", "completion", "output_text"))
    if isinstance(text, str):
        return {"content": text}
    return {name: value for name, value in holder.items() if name not in _ABOUT_A_RESPONSE}


_ABOUT_A_RESPONSE = frozenset(
    (
        *("object", "created", "model", "usage", "usageMetadata", "system_fingerprint", "service_tier", "metrics"),
        *("logprobs", "token_ids", "prompt_token_ids", "choices", "candidates", "stop_sequence", *WHY_ENDED),
    )
)
"""Keys that describe a response rather than holding its content."""


def first_in(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The first value that is not None."""
    return next((values[key] for key in keys if values.get(key) is not None), None)


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}
