"""Anthropic's Messages API: `POST messages`.

Only functions are tools: their calls are run by the client. Thoughts stay in the text, so an answer has no `thinking`
blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from creditflow.data import Message
from creditflow.rollout.http.answers import (
    call_id,
    divided,
    finish_reason,
    named_events,
    prompt_tokens,
    response_tokens,
)
from creditflow.rollout.http.requests import (
    MOST_MESSAGES,
    MOST_TOOLS,
    NEUTRAL,
    Asked,
    Dialect,
    RefusedError,
    Request,
    RequestBody,
    ShortName,
    StopTexts,
    TokenLimit,
    TokensOf,
    ToolForm,
)
from creditflow.rollout.recorder import Reply


class TextBlock(RequestBody):
    """A text."""

    type: Literal["text"]
    text: str


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ToolUseBlock(RequestBody):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: ShortName
    name: ShortName
    input: dict[str, Any]


class ToolResultBlock(RequestBody):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: ShortName
    content: Annotated[list[TextBlock] | None, BeforeValidator(_blocks)] = None


class ThinkingBlock(RequestBody):
    """Thoughts of another model; they are ignored."""

    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]


class InputMessage(RequestBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(_blocks)]


def _custom(kind: Any) -> Any:
    if kind not in (None, "custom"):
        raise ValueError(f"expected 'custom', got {str(kind)[:80]!r}: only tools with an input_schema can be called")
    return kind


class ToolDefinition(ToolForm):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_custom)] = None
    name: ShortName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Written into the prompt, as in chat completions; arguments are not constrained."""

    @property
    def definition(self) -> dict[str, Any]:
        parts = ("name", self.name), ("description", self.description), ("parameters", self.input_schema)
        function = {key: value for key, value in (*parts, ("strict", self.strict)) if value is not None}
        return {"type": "function", "function": function}


class ToolChoice(RequestBody):
    """How a tool is chosen."""

    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool | None = False


class MessagesRequest(Request):
    """`POST messages`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **{name: values for name, values in NEUTRAL.items() if name != "stop_sequences"},
        "compaction": (None,),
        "container": (None,),
        "context_management": (None, {}, {"edits": []}),
        "max_completion_tokens": (None,),
        "mcp_servers": (None, []),
        "n": (None, 1),
        "output_config.format": (None,),
        "output_format": (None,),
        "stop": (None, []),
        "thread": (None,),
        "tool_choice": (None, {"type": "auto"}, {"type": "none"}),
    }

    several_field: ClassVar[str] = "tool_choice.disable_parallel_tool_use"

    messages: list[InputMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Annotated[list[TextBlock] | None, BeforeValidator(_blocks)] = None
    max_tokens: TokenLimit | None = None
    stop_sequences: StopTexts = Field([])
    tools: list[ToolDefinition] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    output_config: RequestBody | None = None

    def unread(self) -> dict[str, Any]:
        unread = super().unread()
        if self.output_config is not None:
            unread |= {f"output_config.{name}": value for name, value in (self.output_config.model_extra or {}).items()}
        if self.tool_choice is not None:
            unread["tool_choice"] = {"type": self.tool_choice.type}
        return unread

    def asked(self) -> Asked:
        if self.messages[-1].role == "assistant":
            raise RefusedError(
                400,
                "messages: expected a user's message last, got an assistant's: a response cannot be continued here",
                param="messages",
            )
        system = [] if self.system is None else [{"role": "system", "content": _content(self.system)}]
        messages = [*system, *(plain for message in self.messages for plain in _translated(message))]
        return Asked(messages, self.max_tokens, self.stop_sequences)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return None if self.tools is None else [tool.definition for tool in self.tools]

    @property
    def several(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use


def _content(texts: Sequence[TextBlock]) -> Any:
    """Return texts as a message's content: one as a text, several as parts."""
    if len(texts) == 1:
        return texts[0].text
    return [{"type": "text", "text": block.text} for block in texts]


def _translated(message: InputMessage) -> list[Message]:
    """Return messages of chat completions: results of calls are separate messages. Raises RefusedError."""
    plain: list[Message] = []
    texts: list[TextBlock] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block)
            case ToolUseBlock() if message.role == "assistant":
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock() if message.role != "assistant":
                if texts:
                    plain.append({"role": message.role, "content": _content(texts)})
                    texts = []
                result = _content(block.content or [TextBlock(type="text", text="")])
                plain.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
            case ToolUseBlock() | ToolResultBlock():
                raise RefusedError(
                    400, f"messages: expected no {block.type} in a message of the {message.role}", param="messages"
                )
    if calls:
        plain.append({"role": "assistant", "content": _content(texts) or None, "tool_calls": calls})
    elif texts or not plain:
        plain.append({"role": message.role, "content": _content(texts) or ""})
    return plain


def answer(request: MessagesRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `message`."""
    (reply,) = replies
    text, calls = divided(reply, tools=bool(request.schemas), several=request.several)
    content: list[dict[str, Any]] = []
    if text or not calls:  # clients read the text of an empty response, too
        content.append({"type": "text", "text": text})
    content += [
        {"type": "tool_use", "id": call_id(reply.step, i), "name": call.name, "input": dict(call.arguments or {})}
        for i, call in enumerate(calls)
    ]
    reason = "max_tokens" if finish_reason(reply) == "length" else "stop_sequence" if reply.stop_text else "end_turn"
    return {
        "id": reply.step.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": "tool_use" if calls else reason,
        "stop_sequence": None if calls else reply.stop_text or None,
        "usage": {
            "input_tokens": prompt_tokens(reply),
            "output_tokens": response_tokens(reply),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def streamed(request: MessagesRequest, answer: Mapping[str, Any]) -> bytes:
    """Return a `message` as server-sent events."""
    return named_events(_events(answer))


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    usage = answer["usage"]
    begun: dict[str, Any] = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**answer, **begun}}
    for index, block in enumerate(answer["content"]):
        if block["type"] == "text":
            empty: dict[str, Any] = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Types of errors by status, where they are not the most general of their class."""


def error(refused: RefusedError) -> dict[str, Any]:
    """Return a refusal in Anthropic's format."""
    kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    # Clients find such an error by these words.
    too_long = "prompt is too long: " if refused.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": f"{too_long}{refused.message}"}, "request_id": None}


DIALECT = Dialect(
    "/messages",
    MessagesRequest,
    answer,
    streamed,
    error,
    ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
    client_adds_version=True,
)
