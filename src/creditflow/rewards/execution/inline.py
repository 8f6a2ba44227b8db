"""Run calls in this process: async functions together on the event loop, plain functions one by one in this thread.

Every outcome of a user's function becomes a result, unless the function blocks or ends the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from creditflow.rewards.calls import Answered, Returned, RewardCall, too_late
from creditflow.rewards.scores import UnusableError, scores_in

T = TypeVar("T")
_UNWINDING_S = 5.0
"""Seconds that a cancelled coroutine may take to end before it is abandoned."""


async def run_on_loop(
    calls: Sequence[RewardCall], timeout: float, max_in_flight: int, answered: Answered = lambda: None
) -> list[Returned]:
    """Run the calls and return their results in order, with at most `max_in_flight` async calls at a time.

    `timeout`: default time limit for a call of an async function, in seconds. It cancels the call: a function that
    blocks the thread instead of awaiting cannot be ended here.
    """
    returned = [Returned()] * len(calls)
    waiting = iter([i for i, call in enumerate(calls) if call.function.is_async])

    async def serve() -> None:
        for i in waiting:
            returned[i] = await _await(calls[i], calls[i].timeout(timeout))
            answered()

    async def serve_plain() -> None:
        for i, call in enumerate(calls):
            if not call.function.is_async:
                returned[i] = run_plain(call)
                answered()
                await asyncio.sleep(0)  # lets async calls proceed between two plain ones

    n_async = sum(call.function.is_async for call in calls)
    await together([*(serve() for _ in range(min(max_in_flight, n_async))), serve_plain()])
    return returned


def run_plain(call: RewardCall) -> Returned:
    """Call the function in this thread."""
    start = time.perf_counter()
    try:
        returned = returned_by(call, call.function.call(*call.arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit and other subclasses of BaseException must not end the run
        returned = Returned.raised(error)
    return replace(returned, seconds=time.perf_counter() - start)


def returned_by(call: RewardCall, value: object) -> Returned:
    """The result of a call that returned `value`."""
    try:
        return Returned(scores_in(call, value))
    except UnusableError as error:
        return Returned(error=str(error))


async def _await(call: RewardCall, timeout: float) -> Returned:
    start = time.perf_counter()
    task = asyncio.create_task(_value(call))
    # A task that raises while it is being cancelled must not be reported as an exception that was never retrieved.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        if not task.done():
            task.cancel()
    seconds = time.perf_counter() - start
    if not done:
        await asyncio.wait({task}, timeout=_UNWINDING_S)
        return Returned(error=too_late(timeout), seconds=seconds, timed_out=True)
    if task.cancelled():
        return Returned(error="it cancelled itself", seconds=seconds)
    return replace(task.result(), seconds=seconds)


async def _value(call: RewardCall) -> Returned:
    """The call's value, or an error. asyncio passes some exceptions of a task through the loop: none may leave it."""
    try:
        returned = call.function.call(*call.arguments)
        return returned_by(call, await returned if hasattr(returned, "__await__") else returned)
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # as above
        return Returned.raised(error)


async def together(running: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all and return their results in order; if one raises, cancel the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in running]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
