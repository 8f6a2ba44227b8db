"""Logs of OpenAI-like chats, as spans: so the same rules make trajectories of them.

It knows the form of the logs; not the rules. A line is either a conversation,

    {"messages": [..., {"role": "assistant", "content": ..., "name": AGENT, "reward": ...}], "reward": ...}

each of whose assistant messages answers all that stands before it, or one call,

    {"request": {"messages": [...], ...}, "response": {... a chat completion ...}, "agent": AGENT, "reward": ...}

The lines of one `trajectory_id` (or `trace_id`, `conversation_id`, `session_id`) are one play, in their order; a line
without is one of its own. A reward is a number or `{name: number}`: a conversation's is the play's, a call's or a
message's is that step's. What a line of a play says over again, as chats are often logged, counts once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from creditflow.adapters.spans import Span, text_of
from creditflow.errors import DataError

_PLAY = ("trajectory_id", "trace_id", "conversation_id", "session_id")


def is_chat_log(value: Any) -> bool:
    """Whether a JSON value looks like a line of one."""
    return isinstance(value, Mapping) and ("messages" in value or {"request", "response"} <= value.keys())


def from_chat_log(lines: Iterable[Any], where: str = "chat log", *, after: int = 0) -> list[Span]:
    """Spans of the lines, given as JSON values. `after`: how many lines there were in the files before this one.

    Raises DataError for a line of another form.
    """
    spans: list[Span] = []
    for number, line in enumerate(lines, after + 1):
        if not is_chat_log(line):
            raise DataError(f"{where}: line {number - after}: expected `messages`, or `request` and `response`")
        if not isinstance(line.get("messages", []), list):
            raise DataError(f"{where}: line {number - after}: messages: expected a list of them")
        play = next((text_of(line[key]) for key in _PLAY if line.get(key) is not None), f"line {number}")
        spans += _call(line, play, number) if "request" in line else _conversation(line, play, number)
    return spans


_STRIDE = 1 << 32
"""Nanoseconds from one line to the next: logs have order, and no times that could be relied on."""


def _conversation(line: Mapping[str, Any], play: str, number: int) -> Iterator[Span]:
    messages = [message for message in _listed(line.get("messages")) if isinstance(message, Mapping)]
    time, around = number * _STRIDE, f"{number}"
    given = _named(line.get("reward", line.get("rewards")))
    attributes = {f"trace.annotations.{i}.annotation.name": name for i, name in enumerate(given)}
    attributes |= {f"trace.annotations.{i}.annotation.score": value for i, value in enumerate(given.values())}
    yield Span(play, around, None, "conversation", time, time + _STRIDE - 1, attributes)
    so_far = hashlib.sha256()
    for place, message in enumerate(messages):
        so_far.update(_spelled(message) or f"{number}.{place}".encode())
        if message.get("role") == "assistant":
            start = time + 2 * place + 1
            more = {
                "gen_ai.input.messages": messages[:place],
                "gen_ai.output.messages": [message],
                "creditflow.agent": message.get("name") or "assistant",
                "gen_ai.request.model": line.get("model"),
                "gen_ai.response.id": so_far.hexdigest(),
                **_rewards(message.get("reward", message.get("rewards"))),
            }
            yield Span(play, f"{number}.{place}", around, "chat", start, start + 1, _call_attributes(more))


def _spelled(message: Mapping[str, Any]) -> bytes:
    """The same for the same messages; empty for one that JSON cannot hold."""
    try:
        return json.dumps(message, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError):
        return b""


def _call(line: Mapping[str, Any], play: str, number: int) -> Iterator[Span]:
    request, response = _mapping(line.get("request")), _mapping(line.get("response"))
    usage = _mapping(response.get("usage"))
    common = {
        "gen_ai.input.messages": _listed(request.get("messages")),
        "gen_ai.request.model": request.get("model"),
        "gen_ai.request.temperature": request.get("temperature"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens"),
        "prompt_token_ids": response.get("prompt_token_ids"),
        "creditflow.agent": line.get("agent"),
        **_rewards(line.get("reward", line.get("rewards"))),
    }
    choices = [choice for choice in _listed(response.get("choices")) if isinstance(choice, Mapping)]
    time = number * _STRIDE
    for place, choice in enumerate(choices or [{}]):
        # Several choices have one response's id, and are not the same call recorded twice.
        response_id = response.get("id") if len(choices) == 1 else None
        more = {
            "gen_ai.output.messages": [
                {**_mapping(choice.get("message")), "finish_reason": choice.get("finish_reason")}
            ],
            "gen_ai.response.id": response_id,
            "response_token_ids": choice.get("token_ids"),
            "logprobs.content": _mapping(choice.get("logprobs")).get("content"),
        }
        yield Span(play, f"{number}.{place}", None, "chat", time, time + 1, _call_attributes(common | more))


def _call_attributes(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"gen_ai.operation.name": "chat", **{key: value for key, value in given.items() if value is not None}}


def _rewards(given: Any) -> dict[str, Any]:
    return {f"creditflow.reward.{text_of(name)}": value for name, value in _named(given).items()}


def _named(given: Any) -> Mapping[Any, Any]:
    if given is None:
        return {}
    return given if isinstance(given, Mapping) else {"reward": given}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
