"""Ray actors that run reward functions on the machines of a cluster.

Each actor holds a worker pool for plain functions (which ends hanging calls on the spot) and an event loop for async
ones. Ray replaces an actor that dies, and its calls are made once more.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from creditflow._utils.install import needs
from creditflow.errors import ConfigError, first_line
from creditflow.rewards.calls import Answered, BackendOptions, Returned, RewardCall, add_counts
from creditflow.rewards.execution import wire
from creditflow.rewards.execution.inline import run_on_loop, together
from creditflow.rewards.execution.processes import START_TIMEOUT_S, WorkerPool, batches
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.values import REASON_CHARACTERS

_WAITING = 2
"""Batches of plain calls that an actor has at a time: one that runs, and one that waits."""
_ATTEMPTS = 2
"""Tries of a call whose actor dies."""
GRACE_S = 20.0
"""Seconds after an async call's time limit in which its actor must answer. The actor ends the call itself, unless its
event loop is blocked.
"""


class ActorHost:
    """The object that runs inside an actor."""

    def __init__(self, functions: bytes, timeout: float, max_in_flight: int) -> None:
        self.functions = wire.unpack_functions(functions, same_machine=False)
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self.pool = WorkerPool(self.functions, 1, timeout)

    async def run(self, batch: bytes) -> list[Returned]:
        """Run one async call, or a batch of plain ones."""
        calls = wire.unpack_calls(batch, self.functions)
        if calls[0].function.is_async:
            return await run_on_loop(calls, self.timeout, self.max_in_flight)
        return await self.pool.run(calls)

    async def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Numbers counted by each async function, with its index."""
        counters = [(i, getattr(function.instance, "metrics", None)) for i, function in enumerate(self.functions)]
        return [(i, ask()) for i, ask in counters if ask is not None and self.functions[i].is_async]

    async def pids(self) -> list[int]:
        """Process ids of this process and its workers."""
        return [os.getpid(), *self.pool.pids]


class RayBackend:
    """A backend of Ray actors; they start at the first call, and stay. Ray replaces one that dies.

    `options.ray_init`: arguments of `ray.init`, by default a new Ray on this machine; `address` joins a cluster. If Ray
    runs in this process already, it is used. Each actor requests its share of the free CPUs.
    Raises ConfigError if Ray is not installed, RewardError if a function cannot be sent to another process.
    """

    def __init__(self, functions: Sequence[RewardFunction], options: BackendOptions) -> None:
        with needs("reward.backend: ray", "ray"):
            import ray
        self.ray = ray
        self.options = options
        self.functions = [function for function in functions if self.takes(function)]
        self.packed = wire.pack_functions(self.functions)
        self.index = {id(function): i for i, function in enumerate(self.functions)}
        self.actors: list[Any] = []
        """The handles of the actors."""
        self._own_ray = False

    def takes(self, function: RewardFunction) -> bool:
        """Accepts all functions except those that must stay in the manager's process."""
        return not function.inline

    def start(self) -> None:
        """Start Ray, unless it runs in this process, and the actors. `run` does so if necessary.

        Raises ConfigError if Ray cannot be reached.
        """
        if not self.ray.is_initialized():
            try:
                self.ray.init(**{"include_dashboard": False, "log_to_driver": False, **self.options.ray_init})
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"ray_kwargs.ray_init: Ray cannot be reached: {first_line(error)}") from error
            self._own_ray = True
        n, free = self.options.workers, self.ray.available_resources().get("CPU", 0.0)
        if not self.actors:
            actor = self.ray.remote(ActorHost).options(
                # Half of a fair share, so that all actors can be placed even if the free CPUs are scattered over nodes.
                num_cpus=math.floor(min(1.0, free / n / 2) * 100) / 100,
                max_concurrency=2 + self.options.max_in_flight + _WAITING,
                max_restarts=-1,
                scheduling_strategy="SPREAD",
            )
            arguments = (self.packed, self.options.timeout, self.options.max_in_flight)
            self.actors = [actor.remote(*arguments) for _ in range(n)]

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        if not calls:
            return []
        self.start()
        returned: dict[int, Returned] = {}
        free: dict[bool, asyncio.Queue[Any]] = {True: asyncio.Queue(), False: asyncio.Queue()}
        for is_async, at_once in ((True, max(1, self.options.max_in_flight // len(self.actors))), (False, _WAITING)):
            for actor in self.actors * at_once:
                free[is_async].put_nowait(actor)

        async def run(batch: Sequence[int]) -> None:
            actors = free[calls[batch[0]].function.is_async]
            actor = await actors.get()
            results = await self._run(actor, [calls[i] for i in batch])
            for i, result in zip(batch, results, strict=True):
                returned[i] = result
                answered()
            actors.put_nowait(actor)

        plain = [i for i, call in enumerate(calls) if not call.function.is_async]
        waiting = [[i] for i, call in enumerate(calls) if call.function.is_async]
        try:
            await together(self._ask(actor.pids) for actor in self.actors)
            await together(map(run, [*waiting, *batches(plain, len(self.actors))]))
        except (self.ray.exceptions.RayError, TimeoutError) as error:
            self._kill_all()
            why = first_line(getattr(error, "cause", None) or error)
            failed = Returned(error=f"its Ray actor cannot start: {why}")
            return [returned.get(i, failed) for i in range(len(calls))]
        except BaseException:  # cancelled, while actors are still busy
            self._kill_all()
            raise
        return [returned[i] for i in range(len(calls))]

    async def _run(self, actor: Any, calls: Sequence[RewardCall]) -> list[Returned]:
        """Run a batch on an actor, and once more after its death."""
        errors, function, why = self.ray.exceptions, calls[0].function, ""
        limit = calls[0].timeout(self.options.timeout) + GRACE_S if function.is_async else None
        for _ in range(_ATTEMPTS):
            try:
                packed = wire.pack_calls(calls, self.index)
                return cast(list[Returned], await asyncio.wait_for(actor.run.remote(packed), limit))
            except (wire.TransferError, errors.RayTaskError) as error:
                why = str(getattr(error, "cause", error))
                if len(calls) > 1:  # sent again one by one, so that only the faulty ones fail
                    return [result for call in calls for result in await self._run(actor, [call])]
                break
            except errors.RayError as error:
                why = f"its Ray actor died twice ({first_line(error)})"
            except TimeoutError:
                why = "its Ray actor does not answer; an async function that blocks its thread stops all others"
                self.ray.kill(actor, no_restart=False)
                break
            await self._ask(actor.pids)  # Ray replaces it
        return [Returned(error=why[:REASON_CHARACTERS])] * len(calls)

    async def _ask(self, method: Any) -> Any:
        """Call a method without arguments, when its actor runs. Raises RayError or TimeoutError if it cannot run."""
        return await asyncio.wait_for(method.options(max_task_retries=-1).remote(), START_TIMEOUT_S)

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Numbers summed over the actors; for a name with `_max` in it, the largest."""
        counts: dict[int, list[dict[str, float]]] = defaultdict(list)
        for actor in self.actors:
            with suppress(self.ray.exceptions.RayError, TimeoutError):  # its numbers are lost; the scores are not
                for i, numbers in await self._ask(actor.metrics):
                    counts[i].append(numbers)
        return [(self.functions[i], add_counts(numbers)) for i, numbers in counts.items()]

    def close(self) -> None:
        """Kill the actors, and end Ray if it was started here."""
        self._kill_all()
        if self._own_ray:
            self.ray.shutdown()
            self._own_ray = False

    def _kill_all(self) -> None:
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors.clear()
