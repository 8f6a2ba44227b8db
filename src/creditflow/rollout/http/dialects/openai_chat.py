"""OpenAI's chat completions: `POST chat/completions`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from creditflow.data import Message
from creditflow.data.trajectory import without_nulls
from creditflow.rollout.http import openai_format
from creditflow.rollout.http.answers import divided, finish_reason, prompt_tokens, response_tokens, said
from creditflow.rollout.http.openai_format import Content, OpenAIRequest
from creditflow.rollout.http.requests import (
    MOST_CHOICES,
    MOST_MESSAGES,
    Asked,
    Dialect,
    RequestBody,
    ShortName,
    TokenLimit,
    TokensOf,
    ToolForm,
)
from creditflow.rollout.recorder import Reply


class ChatMessage(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None


class FunctionDefinition(RequestBody):
    """The function of a tool."""

    name: ShortName


class ToolDefinition(ToolForm):
    """One tool of a request."""

    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = False


_ROLES = {"developer": "system", "function": "tool"}


class ChatRequest(OpenAIRequest[ToolDefinition]):
    """`POST chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    """As in vLLM: return the tokens of prompt and response, as used in training."""

    def asked(self) -> Asked:
        messages = [_plain(message.model_dump(exclude_unset=True)) for message in self.messages]
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens  # the new name
        return Asked(messages, most, self.stop, self.n or 1)


def _plain(message: Message) -> Message:
    """Return a message with a role that chat templates read."""
    return without_nulls({**message, "role": _ROLES.get(message["role"], message["role"])})


def answer(request: ChatRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `chat.completion` with one choice for each reply."""
    first = replies[0]
    read, sampled = prompt_tokens(first), sum(map(response_tokens, replies))
    whole: dict[str, Any] = {
        "id": first.step.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"policy-version-{first.step.policy_version}",
        "choices": [_choice(request, index, reply, tokens_of) for index, reply in enumerate(replies)],
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
    }
    if request.return_token_ids:  # as in vLLM, once for all choices
        whole["prompt_token_ids"] = list(first.step.prompt_ids)
    return whole


def _choice(request: ChatRequest, index: int, reply: Reply, tokens_of: TokensOf) -> dict[str, Any]:
    text, calls = divided(reply, tools=bool(request.schemas), several=request.several)
    choice: dict[str, Any] = {
        "message": {**said(reply, text, calls), "refusal": None},
        "finish_reason": "tool_calls" if calls else finish_reason(reply),
        "logprobs": {"content": tokens_of(reply), "refusal": None} if request.logprobs else None,
        "index": index,
        "step_id": reply.step.id,
    }
    if request.return_token_ids:
        choice["token_ids"] = list(reply.step.response_ids)
    return choice


def streamed(request: ChatRequest, answer: Mapping[str, Any]) -> bytes:
    """Return an answer as server-sent events: for each choice its role, its content, and its finish reason."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "prompt_token_ids")}
    head["object"] = "chat.completion.chunk"
    events = [{**head, "choices": [part]} for choice in answer["choices"] for part in _deltas(choice)]
    if "prompt_token_ids" in answer:
        events[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if request.stream_options is not None and request.stream_options.include_usage:
        events.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [json.dumps(event) for event in events]  # in ASCII: for many clients U+2028 ends a line
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


def _deltas(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message["content"]:
        deltas.append({"content": message["content"]})
    if calls := message.get("tool_calls"):
        deltas.append({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
    parts: list[dict[str, Any]] = [
        {"index": choice["index"], "delta": delta, "finish_reason": None} for delta in deltas
    ]
    parts[-1] |= {name: choice[name] for name in ("logprobs", "token_ids") if name in choice}
    end = {name: choice[name] for name in ("index", "finish_reason", "step_id")}
    return [*parts, {**end, "delta": {}}]


DIALECT = Dialect("/chat/completions", ChatRequest, answer, streamed, openai_format.error, openai_format.VARIABLES)
