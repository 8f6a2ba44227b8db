"""Ray actors that run reward functions on the machines of a cluster.

Each actor is a host: a worker pool of its own for plain functions (which ends what hangs, on the spot) and a loop for
async ones. This module hands out batches, and replaces a host that died. It must not know what a score is.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from creditflow.errors import ConfigError, first_line
from creditflow.reward.calls import Answered, Call, Returned, run_on_loop, together
from creditflow.reward.pool import ATTEMPTS, START_TIMEOUT_S, WorkerPool, batch_size
from creditflow.reward.registry import RewardFunction
from creditflow.reward.wire import (
    pack_calls,
    pack_functions,
    pack_returned,
    unpack_calls,
    unpack_functions,
    unpack_returned,
)

_ASYNC_BATCH = 4
"""Calls of async functions that travel together: few, for a batch is only answered when its slowest call is."""
_WAITING = 2
"""Batches of plain calls that an actor is given at a time: one that runs, one that is there when it ends."""


class Host:
    """What runs inside an actor."""

    def __init__(self, functions: bytes, n_workers: int, timeout: float, max_in_flight: int) -> None:
        self.functions = unpack_functions(functions)
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.pool = WorkerPool(self.functions, n_workers, timeout)

    async def run(self, batch: bytes) -> list[str]:
        """The answers to a batch of calls that are all async, or all plain."""
        calls = unpack_calls(batch, self.functions)
        if calls[0].function.is_async:
            returned = await run_on_loop(calls, self.timeout, self.max_in_flight)
        else:
            returned = await self.pool.run(calls)
        return [pack_returned(one) for one in returned]

    async def metrics(self) -> str:
        """What the functions counted themselves, as JSON."""
        counted = {
            function.name: ask()
            for function in self.functions
            if (ask := getattr(function.instance, "metrics", None)) is not None
        }
        return json.dumps(counted)

    async def pids(self) -> list[int]:
        """Of this process and its workers."""
        return [os.getpid(), *self.pool.pids]


@dataclass(slots=True)
class _Batch:
    """Calls that travel together, by their place in the run."""

    numbers: list[int]
    is_async: bool
    attempts: int = 0


@dataclass(eq=False, slots=True)
class _Actor:
    """An actor as the driver sees it."""

    handle: Any
    busy: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Batches it has now, of async and of plain functions."""
    dead: bool = False


class RayBackend:
    """A backend of `n_actors` Ray actors; they start at the first call, and stay.

    `ray_init`: arguments of `ray.init`, by default a Ray of its own on this machine; `address` joins a cluster. Where
    Ray is running in this process already, that one is used. Each actor asks for its share of the free CPUs.
    """

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
        self._ray = ray
        self.functions = [function for function in functions if self.takes(function)]
        self.n_actors = n_actors
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.ray_init = dict(ray_init or {})
        self.started = 0
        """Actors started so far."""
        self._index = {id(function): i for i, function in enumerate(self.functions)}
        self._packed = pack_functions(self.functions)
        self._actors: list[_Actor] = []
        self._own_ray = False

    def takes(self, function: RewardFunction) -> bool:
        """All but those that must stay where the manager is."""
        return not function.here

    def start(self) -> None:
        """Start Ray, where it does not run in this process, and the actors. `run` does so where it has to.

        Raises ConfigError where Ray cannot be reached.
        """
        if not self._ray.is_initialized():
            try:
                self._ray.init(**{"include_dashboard": False, "log_to_driver": False, **self.ray_init})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"ray_kwargs.ray_init: Ray cannot be reached: {first_line(error)}") from error
            self._own_ray = True
        while len(self._actors) < self.n_actors:
            self._actors.append(self._start_actor())

    async def run(self, calls: Sequence[Call], answered: Answered = lambda: None) -> list[Returned]:
        """What each call came back with, in order."""
        if not calls:
            return []
        self.start()
        returned: list[Returned | None] = [None] * len(calls)
        queues = {is_async: deque(self._batches(calls, is_async)) for is_async in (True, False)}
        # As many carriers as there may be batches under way; each carries one at a time, to the actor with the least.
        await together(
            self._carry(queue, calls, returned, answered)
            for is_async, queue in queues.items()
            for _ in range(min(len(queue), self._slots(is_async) * self.n_actors))
        )
        return [one or Returned(error="was not called") for one in returned]

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Summed over the actors; of a name that ends in `_max`, the largest."""
        counted: dict[str, dict[str, float]] = defaultdict(dict)
        for actor in self._actors:
            try:
                said = json.loads(await actor.handle.metrics.remote())
            except self._ray.exceptions.RayError:
                continue  # it is gone, and what it counted with it; the scores are not
            for name, values in said.items():
                for key, value in values.items():
                    before = counted[name].get(key)
                    both = value if before is None else max(before, value) if key.endswith("_max") else before + value
                    counted[name][key] = both
        return counted

    def close(self) -> None:
        """Kill the actors, and end Ray if it was started here."""
        for actor in self._actors:
            self._kill(actor)
        self._actors.clear()
        if self._own_ray:
            self._ray.shutdown()
            self._own_ray = False

    def _slots(self, is_async: bool) -> int:
        """Batches that an actor may have at a time."""
        if not is_async:
            return _WAITING
        return max(1, math.ceil(self.max_in_flight / self.n_actors / _ASYNC_BATCH))

    def _batches(self, calls: Sequence[Call], is_async: bool) -> list[_Batch]:
        numbers = [i for i, call in enumerate(calls) if call.function.is_async is is_async]
        size = _ASYNC_BATCH if is_async else batch_size(len(numbers), self.n_actors)
        return [_Batch(numbers[i : i + size], is_async) for i in range(0, len(numbers), size)]

    async def _carry(
        self, queue: deque[_Batch], calls: Sequence[Call], returned: list[Returned | None], answered: Answered
    ) -> None:
        while queue:
            batch = queue.popleft()
            actor = min(self._living(), key=lambda one: one.busy[batch.is_async])
            actor.busy[batch.is_async] += 1
            mine = [calls[number] for number in batch.numbers]
            limit = START_TIMEOUT_S + self._slots(batch.is_async) * sum(self._timeout_of(call) for call in mine)
            try:
                answer = actor.handle.run.remote(pack_calls(mine, self._index))
                texts = await asyncio.wait_for(answer, limit)
            except (self._ray.exceptions.RayActorError, TimeoutError) as error:
                self._kill(actor)
                batch.attempts += 1
                if batch.attempts < ATTEMPTS:
                    queue.appendleft(batch)
                    continue
                why = f"its Ray actor died twice ({first_line(error)})"
                for number in batch.numbers:
                    returned[number] = Returned(error=why)
                    answered()
                continue
            finally:
                actor.busy[batch.is_async] -= 1
            for number, text in zip(batch.numbers, texts, strict=True):
                returned[number] = unpack_returned(text)
                answered()

    def _timeout_of(self, call: Call) -> float:
        return call.function.timeout or self.timeout

    def _living(self) -> list[_Actor]:
        for i, actor in enumerate(self._actors):
            if actor.dead:
                self._actors[i] = self._start_actor()
        return self._actors

    def _start_actor(self) -> _Actor:
        free = self._ray.available_resources().get("CPU", 0.0)
        share = math.floor(min(1.0, free / self.n_actors) * 100) / 100  # all of them must find a place
        self.started += 1
        actor = self._ray.remote(Host).options(
            num_cpus=share,
            max_concurrency=2 + _WAITING + self._slots(True),
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        return _Actor(actor.remote(self._packed, 1, self.timeout, self.max_in_flight))

    def _kill(self, actor: _Actor) -> None:
        if not actor.dead:
            actor.dead = True
            self._ray.kill(actor.handle)
