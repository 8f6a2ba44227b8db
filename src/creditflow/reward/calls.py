"""One call of a reward function, and what it came back with: what the manager hands to whatever runs functions.

It must not know where a function runs, nor how what it returned becomes a score.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from creditflow.reward.registry import RewardFunction
from creditflow.trajectory import Step, Trajectory

T = TypeVar("T")
Answered = Callable[[], None]
REASON_CHARACTERS = 200
_UNWINDING_S = 5.0
"""How long a cancelled coroutine may take to end before it is left to itself."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one reward function. Without a step, the function sees the trajectory alone."""

    function: RewardFunction
    trajectory: Trajectory
    step: Step | None = None

    @property
    def arguments(self) -> tuple[Step, Trajectory] | tuple[Trajectory]:
        """What the function is called with."""
        return (self.trajectory,) if self.step is None else (self.step, self.trajectory)


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call came back with: a value of whatever type, or an error."""

    value: object = None
    error: str = ""
    seconds: float = 0.0
    timed_out: bool = False


class Backend(Protocol):
    """Runs calls somewhere else than on the manager's own event loop."""

    def takes(self, function: RewardFunction) -> bool:
        """Whether it runs this function; the others run where the manager is."""
        ...

    async def run(self, calls: Sequence[Call], answered: Answered = lambda: None) -> list[Returned]:
        """What each call came back with, in order; an exception, a time-out or a dead process is an error there.

        `answered`: told of every answer as it comes, from whichever thread.
        """
        ...

    async def metrics(self) -> dict[str, dict[str, float]]:
        """What the functions counted themselves since they were last asked: function -> name -> number."""
        ...

    def close(self) -> None:
        """End every process that was started; the next `run` starts them again."""
        ...


def describe(error: BaseException) -> str:
    """An exception as a score's reason."""
    if isinstance(error, SystemExit):
        return f"it tried to end the process: sys.exit({error.code!r})"[:REASON_CHARACTERS]
    return " ".join(f"{type(error).__name__}: {error}"[: 4 * REASON_CHARACTERS].split())[:REASON_CHARACTERS]


def too_late(timeout: float) -> str:
    """The reason of a score that did not come in time."""
    return f"took longer than {timeout:g} s"


async def together(running: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in order; if one raises, the others are cancelled, and that error, and no group, is raised."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def leaves(functions: Iterable[RewardFunction]) -> Iterator[RewardFunction]:
    """The functions that are really called: of a composition, its parts."""
    for function in functions:
        yield from leaves(function.parts) if function.parts else (function,)


async def run_on_loop(
    calls: Sequence[Call], timeout: float, max_in_flight: int, answered: Answered = lambda: None
) -> list[Returned]:
    """What each call came back with, in order: async functions concurrently, the others one by one in this thread.

    `timeout`: seconds for each call of an async function that has none of its own. It ends the call by cancelling it:
    one that blocks the thread instead of waiting can be ended by nobody here.
    """
    returned = [Returned()] * len(calls)
    waiting = iter([i for i, call in enumerate(calls) if call.function.is_async])

    async def serve() -> None:
        for i in waiting:
            returned[i] = await _await(calls[i], calls[i].function.timeout or timeout)
            answered()

    async def serve_plain() -> None:
        for i, call in enumerate(calls):
            if not call.function.is_async:
                returned[i] = run_sync(call.function.call, call.arguments)
                answered()
                await asyncio.sleep(0)  # lets the async ones move on between two calls

    n_async = sum(call.function.is_async for call in calls)
    await together([*(serve() for _ in range(min(max_in_flight, n_async))), serve_plain()])
    return returned


async def _await(call: Call, timeout: float) -> Returned:
    start = time.perf_counter()

    async def value() -> Any:
        returned = call.function.call(*call.arguments)
        return await returned if hasattr(returned, "__await__") else returned

    task = asyncio.create_task(value())
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
    if (error := task.exception()) is not None:
        if not isinstance(error, Exception | SystemExit):
            raise error
        return Returned(error=describe(error), seconds=seconds)
    return Returned(task.result(), seconds=seconds)


def run_sync(function: Any, arguments: tuple[Any, ...]) -> Returned:
    """Call it in this thread; whatever a user's function may raise is a failed score, with its reason."""
    start = time.perf_counter()
    try:
        value = function(*arguments)
    except (Exception, SystemExit) as error:
        return Returned(error=describe(error), seconds=time.perf_counter() - start)
    return Returned(value, seconds=time.perf_counter() - start)
