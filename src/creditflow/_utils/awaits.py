"""Forgotten `await`s in users' code: coroutines in values, and errors that a coroutine causes."""

from __future__ import annotations

import asyncio
import inspect
import opcode
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from creditflow.errors import did_you_mean

_WRITTEN = re.compile(
    r"<(?:coroutine|async_generator) object [^\n]{1,300}? at 0x[0-9a-fA-F]+>"
    r"|<Task (?:pending|cancelling|finished|cancelled) name='[^'\n]{0,100}'"
    r"|<(?:_Gathering)?Future (?:pending|finished|cancelled)[ >]"
    r"|<Future at 0x[0-9a-fA-F]+ state="
)
"""A coroutine, task or future in an f-string."""
_MARKS = ("<coroutine object ", "<async_generator object ", "<Task ", "Future ")
_DEPTH = 8
_PHRASES = (
    "'TYPE' object ",
    "cannot convert 'TYPE' object ",
    "cannot unpack non-iterable TYPE object",
    r"""can only concatenate \w+ \(not "TYPE"\)""",
    "can't concat TYPE to ",
    "can't multiply sequence by non-int of type 'TYPE'",
    r"unsupported operand type\(s\) for \S+(?: or pow\(\))?: (?:'[\w.]+' and )?'TYPE'",
    r"unsupported format string passed to TYPE\.",
    r"'[<>=]+' not supported between instances of (?:'[\w.]+' and )?'TYPE'",
    "bad operand type for [^'\"]*: 'TYPE'",
    "(?:argument|[oO]bject) of type '?TYPE'? ",
    "type TYPE doesn't define ",
    "'in <string>' requires string as left operand, not TYPE$",
    r"sequence item \d+: expected \w+ instance, TYPE found",
    "(?:expected |'async for' requires )[^'\"]*, got '?TYPE",
    "[^'\"]*, (?:not|but) '?TYPE(?:'| found)?$",
    "await wasn't used with future$",
)
"""Beginnings of the interpreter's errors about an operand's type. A model's text can stand in none of them."""
_TYPE = r"(?:coroutine|_asyncio\.(?:Task|Future)|_GatheringFuture)"
_BY_TYPE = re.compile("|".join(_PHRASES).replace("TYPE", _TYPE))


def unawaited(value: object, own: Sequence[object] = ()) -> str | None:
    """Return the coroutine (task, future, async generator) that `value` is, contains or spells out, or None.

    `own`: values whose texts may spell one out: the task's, and those that models wrote.
    """
    for leaf in _leaves(value):
        if not isinstance(leaf, str):
            if inspect.isawaitable(leaf) or inspect.isasyncgen(leaf):
                return repr(leaf)[:200]
        elif any(mark in leaf for mark in _MARKS):
            written = _letters("".join(text for text in _leaves(own) if isinstance(text, str)))
            for match in _WRITTEN.finditer(leaf):
                if _letters(match[0]) not in written:
                    return match[0]
    return None


def _letters(text: str) -> str:
    """The letters and digits of a text, which stay the same without its markup or in lower case."""
    return re.sub(r"\W+", "", text).casefold()


def lacks_await(error: BaseException) -> bool:
    """Whether an error comes from a coroutine (task, future) that is used as its result.

    True if the error holds the operand, or if the interpreter or the standard library names its type. The text of an
    error that other code raises may come from a model, and is no proof.
    """
    argument, at = error.args[0] if error.args else None, error.__traceback__
    if type(error) in (AttributeError, KeyError):
        operand, name = getattr(error, "obj", argument), getattr(error, "name", "")
        mistyped = bool(did_you_mean(name, dir(operand)))  # `task.reslut()`
        return inspect.iscoroutine(operand) or (isinstance(operand, asyncio.Future) and not mistyped)
    if type(error) not in (TypeError, RuntimeError) or not isinstance(argument, str) or at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    module = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
    raised = at.tb_frame.f_code.co_code[at.tb_lasti] == opcode.opmap["RAISE_VARARGS"]
    return (not raised or module in sys.stdlib_module_names) and _BY_TYPE.match(argument) is not None


def _leaves(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield the texts and other objects that a value contains, at most `depth` collections deep."""
    if depth == 0 or not isinstance(value, Mapping | list | tuple | set | frozenset):
        yield value
    else:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner, depth - 1)
