"""Calls what others wrote: what blocks in a thread of its own; and tells whose end it is that they raise."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


def is_callers_end(raised: BaseException) -> bool:
    """Whether what a call raised on the event loop ends the current task, and not the call alone.

    A call may raise CancelledError though nobody cancelled this task: it has awaited something that was. SystemExit,
    and what libraries derive from BaseException, are no end of whoever called either.
    """
    if isinstance(raised, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(raised, KeyboardInterrupt | GeneratorExit)


async def in_thread(call: Callable[[], Any]) -> Any:
    """`call` in a thread of its own. One that never returns holds nothing up: neither other calls nor the end."""
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
        except StopIteration:  # no future can carry it
            error = RuntimeError("raised StopIteration")
        except Exception as raised:  # handed over
            error = raised
        except BaseException as raised:  # it would end more than this call, were it handed over as it is
            error = RuntimeError(f"raised {type(raised).__name__}")
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # nobody waits any more: the loop is closed
            return

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return await future
