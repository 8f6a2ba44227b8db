"""Ray actors that run reward functions on the machines of a cluster.

Each actor holds a worker pool for plain functions (which ends hanging calls on the spot) and an event loop for async
ones.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.errors import ConfigError, first_line
from creditflow.rewards.execution.calls import Answered, Returned, RewardBackend, RewardCall
from creditflow.rewards.execution.inline import run_on_loop
from creditflow.rewards.execution.processes import WorkerPool
from creditflow.rewards.execution.scheduler import START_TIMEOUT_S, HostDiedError, Pool, StartError
from creditflow.rewards.execution.wire import (
    TransferError,
    pack_calls,
    pack_returned,
    unpack_calls,
    unpack_functions,
    unpack_returned,
)
from creditflow.rewards.registry import RewardFunction

_ASYNC_BATCH = 4
"""Calls of async functions in one batch: few, because a batch is answered only when its slowest call is."""
_WAITING = 2
"""Batches of plain calls that an actor has at a time: one that runs, and one that waits."""
_PULSE_S = 15.0
"""Seconds between checks whether a silent actor lives, and the time limit for its reply. The actor ends hanging calls
itself, so a live one is awaited; an actor with a blocked event loop does not reply.
"""


class ActorHost:
    """The object that runs inside an actor."""

    def __init__(self, functions: bytes, timeout: float, max_in_flight: int) -> None:
        self.functions = unpack_functions(functions, same_machine=False)
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.pool = WorkerPool(self.functions, 1, timeout)

    async def run(self, batch: bytes) -> list[str]:
        """Run a batch of calls that are all async, or all plain, and return the packed results."""
        calls = unpack_calls(batch, self.functions)
        if calls[0].function.is_async:
            returned = await run_on_loop(calls, self.timeout, self.max_in_flight)
        else:
            returned = await self.pool.run(calls)
        return [pack_returned(result) for result in returned]

    async def metrics(self) -> str:
        """Numbers counted by each async function, as JSON: pairs of its index and its numbers."""
        counters = [(i, getattr(function.instance, "metrics", None)) for i, function in enumerate(self.functions)]
        return json.dumps([(i, ask()) for i, ask in counters if ask is not None and self.functions[i].is_async])

    async def pids(self) -> list[int]:
        """Process ids of this process and its workers. Any reply shows that the actor lives."""
        return [os.getpid(), *self.pool.pids]


@dataclass(eq=False, slots=True)
class _Actor:
    """The driver's state of an actor."""

    handle: Any
    started: bool = False
    dead: bool = False


class _ActorDiedError(Exception):
    """An actor died, or does not answer any more."""


class _ActorHost:
    """An actor, replaced when it dies."""

    def __init__(self, backend: RayBackend) -> None:
        self.backend = backend
        self.ray = backend.ray
        self.actor = backend.start_actor()

    async def run(
        self, calls: Sequence[RewardCall], answer: Callable[[Returned], None], stopped: threading.Event
    ) -> None:
        """Run the calls (see `scheduler.Host`); return early if another batch has seen that the actor cannot start."""
        if self.actor.dead:
            self.actor = self.backend.start_actor()
        actor = self.actor
        try:
            if not actor.started:
                await self.reply(actor, actor.handle.pids.remote())
            packed = pack_calls(calls, self.backend.index)
            for text in await self.reply(actor, actor.handle.run.remote(packed)):
                answer(unpack_returned(text))
        except _ActorDiedError as error:
            was_dead = actor.dead
            self.kill(actor)
            if actor.started:
                raise HostDiedError(str(error), at_first=False) from error
            if not was_dead:
                raise StartError(str(error)) from error

    async def reply(self, actor: _Actor, reference: Any) -> Any:
        """Wait for an actor's reply as long as it lives. Raises _ActorDiedError, TransferError."""
        errors = self.ray.exceptions
        reply = asyncio.ensure_future(_awaited(reference))
        try:
            while not (await asyncio.wait({reply}, timeout=_PULSE_S if actor.started else START_TIMEOUT_S))[0]:
                pulse = asyncio.ensure_future(_awaited(actor.handle.pids.remote()))
                done, _ = await asyncio.wait({pulse, reply}, timeout=_PULSE_S)
                if not done:
                    raise _ActorDiedError(
                        "it does not answer; an async function that blocks its thread stops all others"
                    )
            result = reply.result()
            actor.started = True
            return result
        except errors.RayTaskError as error:
            if isinstance(error.cause, TransferError):
                raise TransferError(str(error.cause)) from error
            raise _ActorDiedError(first_line(error.cause)) from error
        except errors.RayError as error:
            raise _ActorDiedError(first_line(error)) from error
        finally:
            reply.cancel()

    def kill(self, actor: _Actor) -> None:
        """Kill an actor, once."""
        if not actor.dead:
            actor.dead = True
            self.ray.kill(actor.handle)


class RayBackend(Pool[_ActorHost]):
    """A backend of `n_actors` Ray actors; they start at the first call, and stay.

    `ray_init`: arguments of `ray.init`, by default a new Ray on this machine; `address` joins a cluster. If Ray runs in
    this process already, it is used. Each actor requests its share of the free CPUs.
    Raises ConfigError if Ray is not installed, RewardError if a function cannot be sent to another process.
    """

    no_start, died = "its Ray actor cannot start", "its Ray actor died"

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        n_actors: int,
        timeout: float,
        max_in_flight: int,
        ray_init: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("reward.backend: ray needs Ray: pip install 'creditflow[ray]'") from error
        self.ray = ray
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.ray_init = dict(ray_init or {})
        self.started = 0
        """Actors started so far."""
        self._own_ray = False
        async_batch = max(1, min(_ASYNC_BATCH, max_in_flight // n_actors))
        limits = {True: max(1, max_in_flight // async_batch), False: _WAITING * n_actors}
        super().__init__(functions, n_actors, limits, async_batch)

    def takes(self, function: RewardFunction) -> bool:
        """Accepts all functions except those that must stay in the manager's process."""
        return not function.inline

    def start(self) -> None:
        """Start Ray, unless it runs in this process, and the actors. `run` does so if necessary.

        Raises ConfigError if Ray cannot be reached.
        """
        if not self.ray.is_initialized():
            try:
                self.ray.init(**{"include_dashboard": False, "log_to_driver": False, **self.ray_init})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"ray_kwargs.ray_init: Ray cannot be reached: {first_line(error)}") from error
            self._own_ray = True
        while len(self.hosts) < self.n:
            self.hosts.append(_ActorHost(self))

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        if calls:
            self.start()
        try:
            return await super().run(calls, answered)
        except BaseException:  # cancelled, while actors are still busy
            self._kill_all()
            raise

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Numbers summed over the actors; for a name with `_max` in it, the largest."""
        counted: dict[int, dict[str, float]] = {}
        for host in self.hosts:
            if host.actor.dead:
                continue
            try:
                pairs = json.loads(await host.reply(host.actor, host.actor.handle.metrics.remote()))
            except _ActorDiedError:
                continue  # its numbers are lost with it; the scores are not
            for place, values in pairs:
                mine = counted.setdefault(place, {})
                for name, value in values.items():
                    mine[name] = max(mine.get(name, value), value) if "_max" in name else mine.get(name, 0.0) + value
        return [(self.functions[place], values) for place, values in counted.items()]

    def close(self) -> None:
        """Kill the actors, and end Ray if it was started here."""
        self._kill_all()
        self.hosts.clear()
        if self._own_ray:
            self.ray.shutdown()
            self._own_ray = False

    def _kill_all(self) -> None:
        for host in self.hosts:
            host.kill(host.actor)

    def start_actor(self) -> _Actor:
        """Start one of the actors."""
        free = self.ray.available_resources().get("CPU", 0.0)
        # Half of a fair share, so that all actors can be placed even if the free CPUs are scattered over nodes.
        share = math.floor(min(1.0, free / self.n / 2) * 100) / 100
        self.started += 1
        actor = self.ray.remote(ActorHost).options(
            num_cpus=share,
            max_concurrency=2 + sum(self.limits.values()),
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        return _Actor(actor.remote(self.packed, self.timeout, self.max_in_flight))


async def _awaited(reference: Any) -> Any:
    return await reference


BACKEND = RewardBackend(
    "ray",
    lambda functions, options: RayBackend(
        functions, options.workers, options.timeout, options.max_in_flight, options.ray_init
    ),
)
