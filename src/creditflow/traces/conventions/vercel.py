"""Vercel's AI SDK. The function id that a program gives to a call names its agent."""

from __future__ import annotations

from typing import Any

from creditflow.traces.content import Raw, json_of
from creditflow.traces.conventions.base import Attributes, Convention, Messages, first_of
from creditflow.traces.messages import listed, messages_of
from creditflow.traces.spans import text_of

_MESSAGES, _PROMPT, _REASONING = "ai.prompt.messages", "ai.prompt", "ai.response.reasoning"
_RESPONSE = ("ai.response.text", "ai.response.object", "ai.result.text", "ai.result.object")
_TOOL_CALLS = ("ai.response.toolCalls", "ai.result.toolCalls")
_FILES = "ai.response.files"


def _messages(attributes: Attributes) -> Messages:
    text, calls = first_of(attributes, _RESPONSE), listed(first_of(attributes, _TOOL_CALLS))
    reasoning, files = attributes.get(_REASONING), listed(attributes.get(_FILES))
    response: Raw = {
        "role": "assistant", "reasoning": reasoning, "content": text, "parts": files, "tool_calls": calls
    }  # fmt: skip
    prompt = messages_of(attributes.get(_MESSAGES)) or _prompt(json_of(attributes.get(_PROMPT)))
    return prompt, [response] if text or calls or reasoning or files else []


def _prompt(prompt: Any) -> list[Raw]:
    """The messages of `ai.prompt`, an object with `system`, and `prompt` or `messages`."""
    if not isinstance(prompt, dict):
        return messages_of(prompt)
    system = [{"role": "system", "content": prompt["system"]}] if prompt.get("system") else []
    return system + messages_of(prompt.get("messages") or prompt.get("prompt"))


def _encloses_calls(attributes: Attributes) -> bool:
    """Whether the operation encloses requests (`ai.generateText`) rather than being one (`.doGenerate`)."""
    return ".do" not in text_of(attributes.get("ai.operationId", ".do"))


CONVENTION = Convention(
    name="vercel",
    precedence=60,
    encloses_calls=_encloses_calls,
    messages=_messages,
    message_attributes=(_MESSAGES, _REASONING, *_RESPONSE, *_TOOL_CALLS),
    shared_message_attributes=(_PROMPT, _FILES),
    response_id=("ai.response.id",),
    finish_reason=("ai.response.finishReason",),
    call_agent=("ai.telemetry.functionId",),
)
