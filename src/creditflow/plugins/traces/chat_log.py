"""Chat logs as spans, so that `convert` applies the same rules to them.

A line is either a conversation,

    {"messages": [..., {"role": "assistant", "content": ..., "name": AGENT, "reward": ...}], "reward": ...}

in which each assistant message responds to all messages before it, or one call,

    {"request": {"messages": [...], ...}, "response": {... a chat completion ...}, "agent": AGENT, "reward": ...}

with the request and the response of the OpenAI, Anthropic, Bedrock, Gemini or Ollama API.

Lines with the same `trajectory_id` (or `trace_id`, `conversation_id`, `session_id`) form one trajectory, in file order;
a line without such an id is a trajectory. A reward is a number or `{name: number}`. A conversation's reward belongs to
the trajectory and a call's or a message's to that step, except that a reward named `outcome` or `final_reward` always
belongs to the trajectory. Chat logs often repeat earlier messages in later lines; these count once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from creditflow.plugins.traces.messages import ANSWERING, choices_of, dumped, first_in
from creditflow.plugins.traces.spans import Reward, Span, Target, mapping, text_of

_Line = Mapping[str, Any]
_TRAJECTORY = ("trajectory_id", "trace_id", "conversation_id", "session_id")


def is_chat_log(value: _Line) -> bool:
    """Whether an object is a line of a chat log."""
    return isinstance(value.get("messages"), list) or {"request", "response"} <= value.keys()


def read_chat_log(lines: Sequence[_Line]) -> Iterator[Span]:
    """Convert lines to spans."""
    for number, line in enumerate(lines, 1):
        trajectory_id = text_of(first_in(line, _TRAJECTORY)) or f"line {number}"
        if "request" in line:
            yield call_span(line, trajectory_id, number)
        else:
            yield from _conversation(line, trajectory_id, number)


_STRIDE = 1 << 32
"""Nanoseconds between lines. Logs have an order but no reliable times, so times are made from line numbers."""


def _conversation(line: _Line, trajectory_id: str, number: int) -> Iterator[Span]:
    messages = [item if isinstance(item, Mapping) else {"content": item} for item in line["messages"]]
    time, around = number * _STRIDE, f"{number}"
    answers = [place for place, message in enumerate(messages) if message.get("role") in ANSWERING]
    rest = len(messages) - (answers[-1] + 1 if answers else 0)
    unread = [(f"line {number}", f"{rest} of its messages come after the last response")] if rest else []
    unread += _unread_rewards(line, number)
    for place, message in enumerate(messages):
        unread += _unread_rewards(message, number, is_response=place in answers)
    times, rewards = (time, time + _STRIDE - 1), _rewards(line, ())
    yield Span(trajectory_id, around, None, "conversation", *times, {}, unread=unread, rewards=rewards)
    so_far = hashlib.sha256(trajectory_id.encode(errors="replace"))
    for place, message in enumerate(messages):
        said = {key: value for key, value in message.items() if value is not None and key not in _REWARDS}
        so_far.update((dumped(said) or f"{number}.{place}").encode(errors="replace"))
        if place in answers:
            own = {
                "gen_ai.input.messages": messages[:place],
                "gen_ai.output.messages": [message],
                "creditflow.agent": message.get("name") or "assistant",
                "gen_ai.request.model": line.get("model"),
                "gen_ai.response.id": so_far.hexdigest(),
            }
            yield _call((trajectory_id, f"{number}.{place}", around), time + 2 * place + 1, own, message)


def call_span(line: _Line, trajectory_id: str, number: int) -> Span:
    """The call of a line with `request` and `response`."""
    request, answer = mapping(line.get("request")), mapping(line.get("response"))
    choices = choices_of(line.get("response"))
    first = mapping(choices[0]) if choices else {}
    own = {
        "gen_ai.input.messages": dict(request),
        "gen_ai.output.messages": choices,
        "gen_ai.request.model": request.get("model") or answer.get("model"),
        "gen_ai.request.temperature": request.get("temperature"),
        "gen_ai.response.id": first_in(answer, ("id", "responseId", "response_id")),
        "prompt_token_ids": answer.get("prompt_token_ids"),
        "response_token_ids": first.get("token_ids"),
        "logprobs.content": mapping(first.get("logprobs")).get("content"),
        "creditflow.agent": line.get("agent"),
    }
    ids = trajectory_id, f"{number}", None
    return _call(ids, number * _STRIDE, own, line, *_unread_rewards(line, number))


def _call(ids: tuple[str, str, str | None], time: int, own: _Line, holder: _Line, *unread: tuple[str, str]) -> Span:
    """A call by its trace, its own id and that of its conversation; `holder` has its rewards."""
    attributes = {"gen_ai.operation.name": "chat", **{key: value for key, value in own.items() if value is not None}}
    return Span(*ids, "chat", time, time + 1, attributes, unread=unread, rewards=_rewards(holder))


def _rewards(holder: _Line, *links: Target) -> list[Reward]:
    rewards = first_in(holder, _REWARDS)
    named = rewards if isinstance(rewards, Mapping) else {} if rewards is None else {"reward": rewards}
    return [Reward([(text_of(name), value) for name, value in named.items()], list(links))] if named else []


_REWARDS = ("reward", "rewards")


def _unread_rewards(holder: _Line, number: int, *, is_response: bool = True) -> Iterator[tuple[str, str]]:
    """Keys of a line or a message that look like rewards but are not read as such."""
    read = next((key for key in _REWARDS if is_response and holder.get(key) is not None), "")
    why = "it is not read as a reward: name it `reward`"
    for key, value in holder.items():
        if "reward" in text_of(key).lower() and key != read and value is not None:
            yield f"line {number}: {key}", why if is_response else "it is given to a message that is no response"
