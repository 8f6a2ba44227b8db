"""The time limit of one rollout: a clock that stops during calls of the run's sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from creditflow.errors import RolloutTimedOut


class RolloutClock:
    """Counts the seconds of a rollout by its event loop's clock. Use it on that loop only.

    It stops while at least one call of the rollout waits in `stopped`, so a busy sampler fails no trajectory. The limit
    applies inside of `started`.
    """

    def __init__(self, limit_s: float) -> None:
        self._left = self.limit_s = limit_s
        self._expired = False
        self._waiting = 0
        """Calls inside of `stopped`."""
        self._since = 0.0
        """Time of the loop at which the clock resumed."""
        self._over: asyncio.Future[None] | None = None
        """Done when the limit is reached. None before the rollout begins and after it ends."""
        self._timer: asyncio.TimerHandle | None = None

    async def within_limit(self, running: asyncio.Task[Any]) -> bool:
        """Wait for `running`, whose work is `started`. Return False if it took longer; nothing is cancelled."""
        self._over = over = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait((running, over), return_when=asyncio.FIRST_COMPLETED)
            return not self._expired
        finally:
            self._over = None

    @contextmanager
    def started(self) -> Iterator[None]:
        """Run the clock in the task that it measures, without the work of other rollouts before and after it."""
        self._go_on()
        try:
            yield
        finally:
            self._halt()
            self._over = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock for a wait that the rollout does not cause. Raises RolloutTimedOut if no time is left."""
        if not self._waiting:
            self._halt()
        if self._expired:
            raise RolloutTimedOut(self.limit_s)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._go_on()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the clock that `stopped_clock` stops for calls in this context."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    def _go_on(self) -> None:
        if self._over is not None:
            loop = self._over.get_loop()
            self._since = loop.time()
            self._timer = loop.call_later(self._left, self._expire)

    def _halt(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if self._over is not None:
            self._left -= self._over.get_loop().time() - self._since
            if self._left <= 0:  # the workflow blocked the loop, so the timer could not fire
                self._expire()

    def _expire(self) -> None:
        self._expired = True
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


_CURRENT: ContextVar[RolloutClock | None] = ContextVar("creditflow_rollout_clock", default=None)


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Stop the clock of the calling rollout, if there is one, during a wait in a queue of this process."""
    clock = _CURRENT.get()
    if clock is None:
        yield
    else:
        with clock.stopped():
            yield
