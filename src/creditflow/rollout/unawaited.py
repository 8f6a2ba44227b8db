"""Detect a forgotten `await`: a coroutine in place of its result, as an object or in a text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping

_WRITTEN = re.compile(
    r"<(?:coroutine|async_generator) object [^\n]{1,300}? at 0x[0-9a-fA-F]+>"
    r"|<Task (?:pending|cancelling|finished|cancelled) name='[^'\n]{0,100}'"
    r"|<(?:_Gathering)?Future (?:pending|finished|cancelled)[ >]"
    r"|<Future at 0x[0-9a-fA-F]+ state="
)
"""Such an object in an f-string."""
_MARKS = ("<coroutine object ", "<async_generator object ", "<Task ", "Future ")
_DEPTH = 8


def unawaited(value: object, own: Iterable[object] = ()) -> str | None:
    """Return the coroutine (task, future, async generator) that `value` is, contains or spells out, or None.

    `own`: values whose texts may spell one out: the task's, and those that models wrote.
    """
    for found, is_text in _found(value):
        if not is_text or not any(found in text for text in _texts(own)):
            return found
    return None


def _found(value: object, depth: int = _DEPTH) -> Iterator[tuple[str, bool]]:
    """Yield each such object, and whether it is only spelled out."""
    if isinstance(value, str):
        if any(mark in value for mark in _MARKS):
            yield from ((match[0], True) for match in _WRITTEN.finditer(value))
    elif inspect.isawaitable(value) or inspect.isasyncgen(value):
        yield repr(value)[:200], False
    elif depth > 0 and isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _found(inner, depth - 1)


def _texts(value: object, depth: int = _DEPTH) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner, depth - 1)
    elif depth > 0 and isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner, depth - 1)
