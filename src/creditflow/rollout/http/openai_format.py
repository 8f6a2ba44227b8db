"""Parts of OpenAI's dialects: fields of completions, tools, parts of messages, and the format of errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from creditflow.rollout.http.answers import response_tokens
from creditflow.rollout.http.requests import (
    MOST_CHOICES,
    RefusedError,
    Request,
    RequestBody,
    StopTexts,
    TokenLimit,
    unread_names,
)
from creditflow.rollout.recorder import Reply

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
"""Environment variables of OpenAI's client."""


class StreamOptions(RequestBody):
    """Options of a stream."""

    include_usage: bool | None = False


class CompletionFields(Request):
    """Fields of chat completions and completions."""

    max_tokens: TokenLimit | None = None
    n: int | None = Field(1, ge=1, le=MOST_CHOICES)
    stop: StopTexts = Field([])
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    """As in vLLM: return the tokens of prompt and response, as used in training."""

    def unread(self) -> dict[str, Any]:
        options = [] if self.stream_options is None else [self.stream_options]
        return super().unread() | unread_names("stream_options", options)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        return self.stop


class FunctionDefinition(RequestBody):
    """The function of a tool."""

    name: str = Field(max_length=256)


class ToolDefinition(RequestBody):
    """One tool of a request."""

    type: Literal["function"]
    function: FunctionDefinition


PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a message's content, and the key of each part's text."""


def text_parts_only(content: Any) -> Any:
    """Return a message's content unchanged. Raises ValueError for parts of other kinds than `PARTS`."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in PARTS:
            raise ValueError(f"a part of type {str(kind)[:80]!r}: expected text")
        if not isinstance(part.get(PARTS[kind]), str):
            raise ValueError(f"a part of type {kind!r}: expected its {PARTS[kind]} as a text")
    return content


def text_parts(content: Any) -> Any:
    """Return a message's content with its parts as text parts."""
    if not isinstance(content, list):
        return content
    return [{"type": "text", "text": part[PARTS[part["type"]]]} for part in content]


def unread_parts(contents: Iterable[Any]) -> dict[str, Any]:
    """Return the fields of the parts of `contents` that are not read and not empty, as `content.NAME`."""
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return {
        f"content.{name}": True
        for part in parts
        for name, value in part.items()
        if value and name not in ("type", PARTS[part["type"]])
    }


def error(refused: RefusedError) -> dict[str, Any]:
    """Return a refusal in OpenAI's format."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


def completed(
    request: CompletionFields, replies: Sequence[Reply], kind: str, choices: Sequence[dict[str, Any]], read: int
) -> dict[str, Any]:
    """Return an object of the `kind` with one choice for each reply. `read`: tokens of the prompts."""
    for index, (choice, reply) in enumerate(zip(choices, replies, strict=True)):
        choice |= {"index": index, "step_id": reply.step.id}
        if request.return_token_ids:
            choice["token_ids"] = list(reply.step.response_ids)
    sampled = sum(map(response_tokens, replies))
    return {
        "id": replies[0].step.id,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": f"policy-version-{replies[0].step.policy_version}",
        "choices": choices,
        "usage": {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled},
    }


def prompt_token_ids(request: CompletionFields, reply: Reply) -> dict[str, Any]:
    """Return the field with the prompt's tokens, if the request asks for it."""
    return {"prompt_token_ids": list(reply.step.prompt_ids)} if request.return_token_ids else {}


def chunks(
    request: CompletionFields,
    answer: Mapping[str, Any],
    parts_of: Callable[[Mapping[str, Any]], Iterable[dict[str, Any]]],
    kind: str,
) -> bytes:
    """Return an answer as server-sent events of the `kind`: the parts of each choice, then `[DONE]`."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "prompt_token_ids")}
    head["object"] = kind
    events = [{**head, "choices": [part]} for choice in answer["choices"] for part in parts_of(choice)]
    if "prompt_token_ids" in answer:
        events[0]["prompt_token_ids"] = answer["prompt_token_ids"]
    if request.stream_options is not None and request.stream_options.include_usage:
        events.append({**head, "choices": [], "usage": answer["usage"]})
    lines = [json.dumps(event) for event in events]  # in ASCII: for many clients U+2028 ends a line
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()
