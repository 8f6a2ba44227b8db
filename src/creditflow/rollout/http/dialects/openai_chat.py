"""OpenAI's chat completions: `POST chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from creditflow.data import Message
from creditflow.data.trajectory import without_nulls
from creditflow.rollout.chat import Prompt
from creditflow.rollout.http import openai_format
from creditflow.rollout.http.answers import divided, finish_reason, prompt_tokens, said
from creditflow.rollout.http.openai_format import (
    CompletionFields,
    ToolDefinition,
    prompt_token_ids,
    text_parts,
    text_parts_only,
    unread_parts,
)
from creditflow.rollout.http.requests import (
    MOST_MESSAGES,
    MOST_TOOLS,
    Dialect,
    RequestBody,
    TokenLimit,
    TokensOf,
)
from creditflow.rollout.recorder import Reply


class ChatMessage(RequestBody):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content")
    @classmethod
    def _texts(cls, content: Any) -> Any:
        return text_parts_only(content)


_ROLES = {"developer": "system", "function": "tool"}


class ChatRequest(CompletionFields):
    """`POST chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: TokenLimit | None = None
    tools: list[ToolDefinition] | None = Field(None, max_length=MOST_TOOLS)
    parallel_tool_calls: bool | None = True
    logprobs: bool | None = False

    def unread(self) -> dict[str, Any]:
        # Only one of several calls is reported, but all were sampled, and are trained on.
        several = {"parallel_tool_calls": True} if self.parallel_tool_calls is False else {}
        return super().unread() | several | unread_parts(message.content for message in self.messages)

    @property
    def conversation(self) -> list[Message]:
        """The messages in the form that chat templates read."""
        return [_plain(message.model_dump(exclude_unset=True)) for message in self.messages]

    def prompts(self, earlier: Sequence[Message] = ()) -> Sequence[Prompt]:
        return [self.conversation]

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        if (self.model_extra or {}).get("tool_choice") == "none":
            return []
        return None if self.tools is None else [tool.model_dump() for tool in self.tools]

    @property
    def most_tokens(self) -> int | None:
        """The limit under its new name or its old one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _plain(message: Message) -> Message:
    """Return a message with a role and parts that chat templates read."""
    role = _ROLES.get(message["role"], message["role"])
    content = {"content": text_parts(message["content"])} if "content" in message else {}
    return without_nulls({**message, "role": role, **content})


def answer(request: ChatRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `chat.completion` with one choice for each reply."""
    choices = [_choice(request, reply, tokens_of) for reply in replies]
    whole = openai_format.completed(request, replies, "chat.completion", choices, prompt_tokens(replies[0]))
    return {**whole, **prompt_token_ids(request, replies[0])}  # as in vLLM, once for all choices


def _choice(request: ChatRequest, reply: Reply, tokens_of: TokensOf) -> dict[str, Any]:
    text, calls = divided(reply, tools=bool(request.schemas), several=request.parallel_tool_calls is not False)
    logprobs = {"content": tokens_of(reply), "refusal": None} if request.logprobs else None
    finish = "tool_calls" if calls else finish_reason(reply)
    return {
        "message": {**said(reply, text, calls), "refusal": None},
        "finish_reason": finish,
        "logprobs": logprobs,
    }


def streamed(request: ChatRequest, answer: Mapping[str, Any]) -> bytes:
    """Return an answer as server-sent events: for each choice its role, its content, and its finish reason."""
    return openai_format.chunks(request, answer, _deltas, "chat.completion.chunk")


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
