"""OpenAI's Responses API: `POST responses`.

Only functions are tools: their calls are run by the client. Thoughts stay in the text, so an answer has no reasoning
items.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from creditflow.data import Message
from creditflow.rollout.http import openai_format
from creditflow.rollout.http.answers import (
    call_id,
    divided,
    finish_reason,
    named_events,
    prompt_tokens,
    response_tokens,
    rollout_of,
)
from creditflow.rollout.http.openai_format import Content, OpenAIRequest
from creditflow.rollout.http.requests import (
    MOST_MESSAGES,
    NEUTRAL,
    Asked,
    Dialect,
    RefusedError,
    RequestBody,
    ShortName,
    TokenLimit,
    TokensOf,
    ToolForm,
)
from creditflow.rollout.recorder import Reply


class MessageItem(RequestBody):
    """A message of the input."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(RequestBody):
    """A call of a function in the input."""

    type: Literal["function_call"]
    call_id: ShortName
    name: ShortName
    arguments: str


class ResultItem(RequestBody):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: ShortName
    output: Content


class ReasoningItem(RequestBody):
    """Reasoning of another model; it is ignored."""

    type: Literal["reasoning"]


def _items(value: Any) -> Any:
    """Return the input as a list of items, each with its type."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{**item, "type": item.get("type") or "message"} if isinstance(item, dict) else item for item in value]


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")]


def _function(kind: Any) -> Any:
    if kind != "function":
        raise ValueError(f"expected 'function', got {str(kind)[:80]!r}: other tools run on OpenAI's servers")
    return kind


class FunctionTool(ToolForm):
    """A function that the client runs."""

    type: Annotated[Literal["function"], BeforeValidator(_function)]
    name: ShortName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Written into the prompt, as in chat completions; arguments are not constrained."""

    @property
    def definition(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(include=_FUNCTION, exclude_none=True)}


_FUNCTION = {"name", "description", "parameters", "strict"}


class ResponsesRequest(OpenAIRequest[FunctionTool]):
    """`POST responses`."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **NEUTRAL,
        "text.format": (None, {"type": "text"}),
        "background": (None, False),
        "context_management": (None, []),
        "conversation": (None,),
        "max_completion_tokens": (None,),
        "max_tokens": (None,),
        "n": (None, 1),
        "previous_response_id": (None,),
        "prompt": (None,),
        "truncation": (None, "disabled"),
    }

    input: Annotated[list[Item], BeforeValidator(_items)] = Field([], max_length=MOST_MESSAGES)
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    text: RequestBody | None = None

    def unread(self) -> dict[str, Any]:
        text = self.text.model_extra or {} if self.text else {}
        return super().unread() | {f"text.{name}": value for name, value in text.items()}

    def asked(self) -> Asked:
        """Translate the request; calls join the assistant's message before them. Raises RefusedError."""
        messages: list[Message] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item:
                case MessageItem():
                    role = "system" if item.role == "developer" else item.role
                    messages.append({"role": role, "content": item.content})
                case ResultItem():
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
                case CallItem():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant", "content": None})
                    messages[-1].setdefault("tool_calls", []).append(call)
        if not messages:
            raise RefusedError(400, "input: expected at least one message", param="input")
        return Asked(messages, self.max_output_tokens, self.stop)


def answer(request: ResponsesRequest, replies: Sequence[Reply], tokens_of: TokensOf) -> dict[str, Any]:
    """Return a `response`."""
    (reply,) = replies
    text, calls = divided(reply, tools=bool(request.schemas), several=request.several)
    cut_off = finish_reason(reply) == "length"
    status = "incomplete" if cut_off else "completed"
    place = f"{rollout_of(reply.step.trajectory_id)}_{reply.step.index}"
    output: list[dict[str, Any]] = []
    if text or not calls:  # clients read the text of an empty response, too
        part = {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": [],
        }
        message = {"id": f"msg_{place}", "type": "message", "status": status, "role": "assistant", "content": [part]}
        output.append(message)
    for i, call in enumerate(calls):
        id = call_id(reply.step, i)
        head = {"id": f"fc_{place}_{i}", "type": "function_call", "status": "completed", "call_id": id}
        output.append({**head, **call.to_message(id)["function"]})
    read, sampled = prompt_tokens(reply), response_tokens(reply)
    now = int(time.time())
    return {
        "id": reply.step.id,
        "object": "response",
        "created_at": now,
        "completed_at": None if cut_off else now,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "model": request.model,
        "output": output,
        "instructions": request.instructions,
        "metadata": request.metadata or {},
        "previous_response_id": None,
        "parallel_tool_calls": request.several,
        "tool_choice": request.tool_choice,
        "tools": [{"type": "function", **tool.model_dump(include=_FUNCTION)} for tool in request.tools or ()],
        "temperature": reply.step.temperature,
        "top_p": 1.0,
        "max_output_tokens": request.max_output_tokens,
        "background": False,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        },
    }


def streamed(request: ResponsesRequest, answer: Mapping[str, Any]) -> bytes:
    """Return a `response` as the numbered events of the Responses API."""
    return named_events({**event, "sequence_number": i} for i, event in enumerate(_events(answer)))


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun: dict[str, Any] = {
        "status": "in_progress",
        "completed_at": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    for kind in ("response.created", "response.in_progress"):
        yield {"type": kind, "response": {**answer, **begun}}
    for index, item in enumerate(answer["output"]):
        contents: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        opened = {**item, "status": "in_progress", **contents}
        yield {"type": "response.output_item.added", "output_index": index, "item": opened}
        place = {"item_id": item["id"], "output_index": index}
        yield from _text_events(item, place) if item["type"] == "message" else _call_events(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}


def _text_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    part, where = item["content"][0], {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
    if part["text"]:
        yield {"type": "response.output_text.delta", **where, "delta": part["text"], "logprobs": []}
    yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **where, "part": part}


def _call_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, "arguments": item["arguments"]}


DIALECT = Dialect("/responses", ResponsesRequest, answer, streamed, openai_format.error, openai_format.VARIABLES)
