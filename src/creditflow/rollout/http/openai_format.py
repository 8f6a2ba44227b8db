"""Parts of OpenAI's dialects: environment variables, parts of messages, and the format of errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditflow.rollout.http.requests import RefusedError

VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY")
"""Environment variables of OpenAI's client."""
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


def error(refused: RefusedError) -> dict[str, Any]:
    """Return a refusal in OpenAI's format."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}
