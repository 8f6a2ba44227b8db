"""The content of chat messages, as data sets, templates and servers receive it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from creditflow.data.trajectory import Message

_DEPTH = 64
"""The deepest nesting of a message that is read; templates recurse over it."""


def without_nulls(message: Message, *, in_arguments: bool = False) -> Message:
    """Return `message` without null keys and without an empty list of tool calls; `content` may be null.

    Chat templates test whether a key is present. OpenAI's client writes every key of its types (`model_dump()`), and
    Parquet every key that any row has. `in_arguments`: also remove nulls from the calls' arguments, for messages from
    Parquet; elsewhere nulls in arguments are values.
    """
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    depth = _DEPTH if in_arguments else _CALL_LEVELS
    for key in ("tool_calls", "function_call", "content"):
        if isinstance(kept.get(key), list | tuple | Mapping):
            kept[key] = _bare(kept[key], depth)
    if kept.get("tool_calls") in ([], ()):
        del kept["tool_calls"]
    return kept


_CALL_LEVELS = 2
"""Nested objects: a call, and its function. Deeper objects are arguments."""


def _bare(value: Any, depth: int) -> Any:
    """Return `value` without null keys, down to `depth` levels of objects."""
    if isinstance(value, list | tuple):
        return [_bare(inner, depth) for inner in value]
    if isinstance(value, Mapping) and depth > 0:
        return {key: _bare(inner, depth - 1) for key, inner in value.items() if inner is not None}
    return value
