"""Forgotten `await`s in users' code: coroutines in values, and errors that a coroutine causes."""

from __future__ import annotations

import asyncio
import inspect
import opcode
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from creditflow.errors import did_you_mean

_PHRASES = (
    """(?:can't concat |[^'"]*)(?<!a )\\b(?:TYPE|not "TYPE")(?:[ .)]|$)""",
    "(?:cannot convert )?'TYPE' object ",
    r"(?:unsupported operand type\(s\) for .{1,3}(?: or pow\(\))?:|'.{1,2}' not supported between instances of)"
    r" (?:'[\w.]+' and )?'TYPE'",
    "(?:bad operand type for [^']*:|can't multiply sequence by non-int of type|(?:argument|object) of type) 'TYPE'",
    "(?:[^']*, not|expected [^']*, got) 'TYPE'",
    "'(?:in <string>|async for)' requires [^']*, (?:not|got) TYPE$",
    "await wasn't used with future$",
)
"""Beginnings of the interpreter's errors about an operand's type. No model's text can appear in them."""
_BY_TYPE = re.compile("|".join(_PHRASES).replace("TYPE", r"(?:coroutine|_asyncio\.(?:Task|Future)|_GatheringFuture)"))


def unawaited(value: object, own: Sequence[object] = ()) -> str | None:
    """Return the coroutine (task, future, async generator) that `value` is or contains, or None.

    Only a live object is proof: a model or a program may have written a text that spells one out. `own` is not used.
    """
    found = (leaf for leaf in _leaves(value) if inspect.isawaitable(leaf) or inspect.isasyncgen(leaf))
    return next((repr(leaf)[:200] for leaf in found), None)


def lacks_await(error: BaseException) -> bool:
    """Whether an error comes from a coroutine (task, future) that is used as its result.

    True if the error holds the operand, or if the interpreter or the standard library names its type. Other
    code may raise an error with a model's text, which does not count.
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


def _leaves(value: object, depth: int = 8) -> Iterator[object]:
    """Yield the texts and other objects that a value contains, at most `depth` collections deep."""
    if depth == 0 or not isinstance(value, Mapping | list | tuple | set | frozenset):
        yield value
    else:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner, depth - 1)
