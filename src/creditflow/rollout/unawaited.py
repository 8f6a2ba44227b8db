"""Detect a forgotten `await`: a coroutine in place of its result, as an object or in a text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence

_WRITTEN = re.compile(
    r"<(?:coroutine|async_generator) object [^\n]{1,300}? at 0x[0-9a-fA-F]+>"
    r"|<Task (?:pending|cancelling|finished|cancelled) name='[^'\n]{0,100}'"
    r"|<(?:_Gathering)?Future (?:pending|finished|cancelled)[ >]"
    r"|<Future at 0x[0-9a-fA-F]+ state="
)
"""Such an object in an f-string."""
_MARKS = ("<coroutine object ", "<async_generator object ", "<Task ", "Future ")
_DEPTH = 8


def unawaited(value: object, own: Sequence[object] = ()) -> str | None:
    """Return the coroutine (task, future, async generator) that `value` is, contains or spells out, or None.

    `own`: values whose texts may spell one out: the task's, and those that models wrote.
    """
    for leaf in _leaves(value):
        if not isinstance(leaf, str):
            if inspect.isawaitable(leaf) or inspect.isasyncgen(leaf):
                return repr(leaf)[:200]
        elif any(mark in leaf for mark in _MARKS):
            for match in _WRITTEN.finditer(leaf):
                if not any(match[0] in text for text in _leaves(own) if isinstance(text, str)):
                    return match[0]
    return None


def _leaves(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield the texts and other objects that a value contains, at most `depth` collections deep."""
    if depth == 0 or not isinstance(value, Mapping | list | tuple | set | frozenset):
        yield value
    else:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner, depth - 1)
