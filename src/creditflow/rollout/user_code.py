"""Helpers to run users' code: threads for blocking calls, and errors that end the caller."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_S = 10.0
"""Seconds that a cancelled task has to end; a task that swallows its cancellation is abandoned."""


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


def result_of(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. It runs in a thread if this one has an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, thread_name_prefix="creditflow-coroutine") as pool:
        return pool.submit(asyncio.run, work).result()


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
