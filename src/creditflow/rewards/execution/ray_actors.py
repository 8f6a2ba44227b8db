"""Ray actors that run reward functions on the machines of a cluster.

Each actor is a host: a worker pool for plain functions (which ends hanging calls on the spot) and an event loop for
async ones. This module sends batches, and replaces a host that died.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from creditflow.errors import ConfigError, first_line
from creditflow.rewards.execution.calls import Answered, Returned, RewardBackend, RewardCall
from creditflow.rewards.execution.inline import run_on_loop, together
from creditflow.rewards.execution.processes import ATTEMPTS, START_TIMEOUT_S, WorkerPool, batches, in_parts
from creditflow.rewards.execution.wire import (
    CannotTravel,
    UnreadableAnswer,
    pack_calls,
    pack_functions,
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
        return [pack_returned(one) for one in returned]

    async def metrics(self) -> str:
        """Numbers counted by each async function, as JSON: pairs of its index and its numbers."""
        counters = [(i, getattr(function.instance, "metrics", None)) for i, function in enumerate(self.functions)]
        return json.dumps([(i, ask()) for i, ask in counters if ask is not None and self.functions[i].is_async])

    async def pids(self) -> list[int]:
        """Process ids of this process and its workers. Any reply shows that the actor lives."""
        return [os.getpid(), *self.pool.pids]


@dataclass(slots=True)
class _Batch:
    """Calls that are sent together, by their index in the run."""

    numbers: list[int]
    is_async: bool
    attempts: int = 0
    alone: bool = False
    """Whether it is a single call on its last try."""


@dataclass(eq=False, slots=True)
class _Actor:
    """The driver's state of an actor."""

    handle: Any
    busy: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Batches in progress, of async and of plain functions."""
    started: bool = False
    dead: bool = False


@dataclass(slots=True)
class _CallSet:
    """The calls of one `run`."""

    calls: Sequence[RewardCall]
    answered: Answered
    queues: dict[bool, deque[_Batch]]
    returned: dict[int, Returned] = field(default_factory=dict)
    suspects: list[int] = field(default_factory=list)
    """Calls of batches during which an actor died, twice. Each is then tried alone, to find the cause."""

    failed_starts: int = 0

    def answer(self, number: int, returned: Returned) -> None:
        """Record the first answer of a call: calls that were given up may still come back."""
        if number not in self.returned:
            self.returned[number] = returned
            self.answered()

    def give_up(self, why: str) -> None:
        """Answer all open calls at once, with an error."""
        for queue in self.queues.values():
            queue.clear()
        self.suspects.clear()
        for number in range(len(self.calls)):
            self.answer(number, Returned(error=why))


class _CannotStart(Exception):
    """Actors die before their first answer."""


class _ActorDied(Exception):
    """An actor died, or does not answer any more."""


class RayBackend:
    """A backend of `n_actors` Ray actors; they start at the first call, and stay.

    `ray_init`: arguments of `ray.init`, by default a new Ray on this machine; `address` joins a cluster. If Ray runs in
    this process already, it is used. Each actor requests its share of the free CPUs.
    Raises ConfigError if Ray is not installed, RewardError if a function cannot be sent to another process.
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
        self._async_batch = max(1, min(_ASYNC_BATCH, max_in_flight // n_actors))
        self._index = {id(function): i for i, function in enumerate(self.functions)}
        self._packed = pack_functions(self.functions)
        self._actors: list[_Actor] = []
        self._own_ray = False

    def takes(self, function: RewardFunction) -> bool:
        """Accepts all functions except those that must stay in the manager's process."""
        return not function.inline

    def start(self) -> None:
        """Start Ray, unless it runs in this process, and the actors. `run` does so if necessary.

        Raises ConfigError if Ray cannot be reached.
        """
        if not self._ray.is_initialized():
            try:
                self._ray.init(**{"include_dashboard": False, "log_to_driver": False, **self.ray_init})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"ray_kwargs.ray_init: Ray cannot be reached: {first_line(error)}") from error
            self._own_ray = True
        while len(self._actors) < self.n_actors:
            self._actors.append(self._start_actor())

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        if not calls:
            return []
        self.start()
        run = _CallSet(calls, answered, {kind: self._parcels(calls, kind) for kind in (True, False)})
        try:
            # One task per batch that may be in progress; each sends one batch at a time to the least busy actor.
            await together(
                self._carry(queue, run)
                for kind, queue in run.queues.items()
                for _ in range(min(len(queue), self._under_way(kind)))
            )
            while run.suspects:
                number = run.suspects.pop(0)
                last_try = _Batch([number], calls[number].function.is_async, ATTEMPTS - 1, alone=True)
                await self._carry(deque([last_try]), run)
        except BaseException:  # cancelled, while actors are still busy
            for actor in self._actors:
                self._kill(actor)
            raise
        return [run.returned[number] for number in range(len(calls))]

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Numbers summed over the actors; for a name with `_max` in it, the largest."""
        counted: dict[int, dict[str, float]] = {}
        for actor in self._actors:
            if actor.dead:
                continue
            try:
                pairs = json.loads(await self._answer(actor, actor.handle.metrics.remote()))
            except _ActorDied:
                continue  # its numbers are lost with it; the scores are not
            for place, values in pairs:
                mine = counted.setdefault(place, {})
                for name, value in values.items():
                    mine[name] = max(mine.get(name, value), value) if "_max" in name else mine.get(name, 0.0) + value
        return [(self.functions[place], values) for place, values in counted.items()]

    def close(self) -> None:
        """Kill the actors, and end Ray if it was started here."""
        for actor in self._actors:
            self._kill(actor)
        self._actors.clear()
        if self._own_ray:
            self._ray.shutdown()
            self._own_ray = False

    def _under_way(self, is_async: bool) -> int:
        """Maximum number of batches in progress."""
        return max(1, self.max_in_flight // self._async_batch) if is_async else _WAITING * self.n_actors

    def _parcels(self, calls: Sequence[RewardCall], is_async: bool) -> deque[_Batch]:
        numbers = [i for i, call in enumerate(calls) if call.function.is_async is is_async]
        parts = in_parts(numbers, self._async_batch) if is_async else batches(numbers, self.n_actors)
        return deque(_Batch(list(part), is_async) for part in parts)

    async def _carry(self, queue: deque[_Batch], run: _CallSet) -> None:
        while queue:
            parcel = queue.popleft()
            actor = min(self._living(), key=lambda one: one.busy[parcel.is_async])
            actor.busy[parcel.is_async] += 1
            try:
                await self._until_started(actor, run)
                mine = [run.calls[number] for number in parcel.numbers]
                texts = await self._answer(actor, actor.handle.run.remote(pack_calls(mine, self._index)))
                for number, text in zip(parcel.numbers, texts, strict=True):
                    run.answer(number, unpack_returned(text))
            except _CannotStart as error:
                run.give_up(f"its Ray actor cannot start: {error}")
            except _ActorDied as error:
                self._kill(actor)
                _after_a_death(parcel, queue, run, str(error))
            except CannotTravel as error:
                if len(parcel.numbers) == 1:
                    run.answer(parcel.numbers[0], Returned(error=str(error)))
                else:  # each alone, so that only the faulty ones fail
                    queue.extendleft(_Batch([number], parcel.is_async) for number in parcel.numbers)
            except UnreadableAnswer as error:
                for number in parcel.numbers:
                    run.answer(number, Returned(error=str(error)))
            finally:
                actor.busy[parcel.is_async] -= 1

    async def _until_started(self, actor: _Actor, run: _CallSet) -> None:
        """Wait for the first answer of an actor. Raises _CannotStart if this fails for the second time."""
        if actor.started:
            return
        try:
            await self._answer(actor, actor.handle.pids.remote())
        except _ActorDied as error:
            run.failed_starts += not actor.dead
            if run.failed_starts >= ATTEMPTS:
                raise _CannotStart(str(error)) from error
            raise
        run.failed_starts = 0

    async def _answer(self, actor: _Actor, reference: Any) -> Any:
        """Wait for an actor's answer as long as it lives. Raises _ActorDied, CannotTravel."""
        errors = self._ray.exceptions
        answer = asyncio.ensure_future(_awaited(reference))
        try:
            while not (await asyncio.wait({answer}, timeout=_PULSE_S if actor.started else START_TIMEOUT_S))[0]:
                pulse = asyncio.ensure_future(_awaited(actor.handle.pids.remote()))
                done, _ = await asyncio.wait({pulse, answer}, timeout=_PULSE_S)
                if not done:
                    raise _ActorDied("it does not answer; an async function that blocks its thread stops all others")
            actor.started = True
            return answer.result()
        except errors.RayTaskError as error:
            if isinstance(error.cause, CannotTravel):
                raise CannotTravel(str(error.cause)) from error
            raise _ActorDied(first_line(error.cause)) from error
        except errors.RayError as error:
            raise _ActorDied(first_line(error)) from error
        finally:
            answer.cancel()

    def _living(self) -> list[_Actor]:
        for i, actor in enumerate(self._actors):
            if actor.dead:
                self._actors[i] = self._start_actor()
        return self._actors

    def _start_actor(self) -> _Actor:
        free = self._ray.available_resources().get("CPU", 0.0)
        # Half of a fair share, so that all actors can be placed even if the free CPUs are scattered over nodes.
        share = math.floor(min(1.0, free / self.n_actors / 2) * 100) / 100
        self.started += 1
        actor = self._ray.remote(ActorHost).options(
            num_cpus=share,
            max_concurrency=2 + self._under_way(False) + self._under_way(True),
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )
        return _Actor(actor.remote(self._packed, self.timeout, self.max_in_flight))

    def _kill(self, actor: _Actor) -> None:
        if not actor.dead:
            actor.dead = True
            self._ray.kill(actor.handle)


def _after_a_death(parcel: _Batch, queue: deque[_Batch], run: _CallSet, why: str) -> None:
    if all(number in run.returned for number in parcel.numbers):  # given up meanwhile
        return
    parcel.attempts += 1
    if parcel.attempts < ATTEMPTS:
        queue.appendleft(parcel)
    elif parcel.alone:
        run.answer(parcel.numbers[0], Returned(error=f"its Ray actor died twice ({why})"))
    else:
        run.suspects += parcel.numbers


async def _awaited(reference: Any) -> Any:
    return await reference


BACKEND = RewardBackend(
    "ray",
    lambda functions, options: RayBackend(
        functions, options.workers, options.timeout, options.max_in_flight, options.ray_init
    ),
)
