"""Helpers to run users' code: threads for blocking calls, errors that end the caller, and forgotten `await`s."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import opcode
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

_GRACE_S = 10.0
"""Seconds that a cancelled task has to end; a task that swallows its cancellation is abandoned."""
_WRITTEN = re.compile(
    r"<(?:coroutine|async_generator) object [^\n]{1,300}? at 0x[0-9a-fA-F]+>"
    r"|<Task (?:pending|cancelling|finished|cancelled) name='[^'\n]{0,100}'"
    r"|<(?:_Gathering)?Future (?:pending|finished|cancelled)[ >]"
    r"|<Future at 0x[0-9a-fA-F]+ state="
)
"""A coroutine, task or future in an f-string."""
_MARKS = ("<coroutine object ", "<async_generator object ", "<Task ", "Future ")
_NO_TYPE = re.compile(r"arguments?:? '|coroutine\(|attribute 'coroutine")
"""In an error of Python: names of parameters, functions and attributes, which may be `coroutine`, too."""
_DEPTH = 8


def is_callers_end(raised: BaseException) -> bool:
    """Whether an error that a call raised on the event loop ends the current task, and not the call alone.

    A call may raise CancelledError although this task was not cancelled: it awaited a task that was. SystemExit, and
    exceptions that libraries derive from BaseException, do not end the caller either.
    """
    if isinstance(raised, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(raised, KeyboardInterrupt | GeneratorExit)


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait for their end, `_GRACE_S` at most. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    ended, _ = await asyncio.wait(tasks, timeout=_GRACE_S) if tasks else (set(), set())
    for task in ended:
        if not task.cancelled():
            task.exception()  # read once, or asyncio logs it as never retrieved


async def in_thread(call: Callable[[], Any]) -> Any:
    """Run `call` in a separate daemon thread.

    If it never returns, other calls and the process's end do not wait for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except BaseException as raised:  # given to the caller
            if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
                error = raised
            else:  # no future can carry a StopIteration, and any other would end more than this call
                error = RuntimeError(f"raised {type(raised).__name__}").with_traceback(raised.__traceback__)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await future


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


def lacks_await(error: BaseException) -> bool:
    """Whether an AttributeError or TypeError comes from a coroutine that is used as its result.

    Either Python itself names the type of the operand, or a local variable of the function that refused it is a
    coroutine. A text that other code raises is no proof.
    """
    text, at = str(error), error.__traceback__
    if not isinstance(error, AttributeError | TypeError) or "coroutine" not in text or at is None:
        return False
    while at.tb_next is not None:
        at = at.tb_next
    frame = at.tb_frame
    by_python = frame.f_code.co_code[at.tb_lasti] != opcode.opmap["RAISE_VARARGS"] and not _NO_TYPE.search(text)
    return by_python or any(map(inspect.iscoroutine, frame.f_locals.values()))


def _leaves(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield the texts and other objects that a value contains, at most `depth` collections deep."""
    if depth == 0 or not isinstance(value, Mapping | list | tuple | set | frozenset):
        yield value
    else:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(inner, depth - 1)
