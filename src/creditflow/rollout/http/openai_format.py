"""Parts of OpenAI's dialects: common fields, environment variables, parts of messages, and the format of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field

from creditflow.rollout.http.requests import MOST_TOOLS, RefusedError, Request, StopTexts, ToolForm

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
"""Environment variables of OpenAI's client."""
PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts of a message's content, and the key of each part's text."""


def _text_parts(content: Any) -> Any:
    """Return a message's content with its parts as text parts. Raises ValueError for parts of other kinds."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in PARTS:
            raise ValueError(f"a part of type {str(kind)[:80]!r}: expected text")
        if not isinstance(text := part.get(PARTS[kind]), str):
            raise ValueError(f"a part of type {kind!r}: expected its {PARTS[kind]} as a text")
        texts.append({"type": "text", "text": text})
    return texts


Content = Annotated[str | list[dict[str, Any]], AfterValidator(_text_parts)]
"""A message's content; its parts become text parts."""


Tool = TypeVar("Tool", bound=ToolForm)


class OpenAIRequest(Request, Generic[Tool]):
    """The common fields of OpenAI's requests."""

    stop: StopTexts = Field([])
    """Not in OpenAI's Responses API."""
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    parallel_tool_calls: bool | None = True

    @property
    def several(self) -> bool:
        return self.parallel_tool_calls is not False

    @property
    def tool_choice(self) -> str:
        """The choice that is applied: `auto` or `none`."""
        return "none" if (self.model_extra or {}).get("tool_choice") == "none" else "auto"

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        if self.tool_choice == "none":
            return []
        return None if self.tools is None else [tool.definition for tool in self.tools]


def error(refused: RefusedError) -> dict[str, Any]:
    """Return a refusal in OpenAI's format."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}
