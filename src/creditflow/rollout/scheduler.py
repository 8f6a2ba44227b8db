"""Collect the calls of all running rollouts and batch them per policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from creditflow.errors import CreditflowError
from creditflow.rollout.client import ChatClient, Generation, GenerationRequest, ModelClient

_Pending = dict["asyncio.Future[Generation]", GenerationRequest]

_QUIET_TURNS = 3
"""Turns of the event loop without a new call, after which every task that can call has called. No clock: the same seed
gives the same batches."""
_PATIENCE = 0.25
"""Seconds without a new call, after which a batch no longer waits for rollouts outside the event loop."""
_LONGEST_WAIT = 10.0
"""Seconds after which it stops waiting for them even while calls keep coming."""
_LOOK = 0.001
"""Seconds between two checks for their calls."""
_MODELS = ThreadPoolExecutor(thread_name_prefix="creditflow-model")
"""Separate threads: in the event loop's pool, a workflow's threads that wait for a response could prevent its
generation."""


class Scheduler:
    """Batches the pending calls of each policy into one generation.

    A generation starts when the event loop is quiet, that is, when every rollout waits for a model or for the outside
    world (a tool, a judge, an endpoint). Calls that arrive during a generation join the next one; the loop stays free
    meanwhile. Rollouts whose agents call over HTTP run outside the loop: a batch waits for them while calls keep
    coming, and for at most `_LONGEST_WAIT`. The calls of a batch are ordered by their seeds, not by arrival.
    """

    def __init__(self, clients: Mapping[str, ModelClient | ChatClient], max_num_seqs: int = 1024) -> None:
        self.clients = clients
        self._models = {name: client for name, client in clients.items() if not isinstance(client, ChatClient)}
        self.max_num_seqs = max_num_seqs
        self.fault: Exception | None = None
        """The first error of a model itself. It is not a rollout's fault: the caller must raise it."""
        self.batch_sizes: list[int] = []
        """Number of calls of each generation."""
        self._pending: dict[str, _Pending] = {name: {} for name in self._models}
        """Calls that wait for a generation, in order of arrival."""
        self._dispatcher: asyncio.Task[None] | None = None
        self._expected = 0
        self._context = copy_context()
        """The context of a generation, which finds the caller's progress bar in it."""

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """Return the policy's response to `request`, when its batch is done."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        pending = self._pending[policy]
        pending[future] = request
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())
        try:
            return await future
        finally:
            pending.pop(future, None)  # a cancelled call is neither waited for nor generated

    def expect(self, rollouts: int) -> None:
        """Add to the number of rollouts that run outside the event loop and are about to call (negative: subtract)."""
        self._expected += rollouts

    async def idle(self) -> None:
        """Return when no generation is running."""
        if self._dispatcher is not None:
            await self._dispatcher

    async def _dispatch(self) -> None:
        while any(self._pending.values()):
            await self._until_quiet()
            for policy, pending in self._pending.items():
                ordered = sorted(pending, key=lambda future: pending[future].seed)
                batch = {future: pending.pop(future) for future in ordered[: self.max_num_seqs]}
                if batch:
                    await self._run(policy, batch)

    async def _until_quiet(self) -> None:
        most = quiet = 0
        seen = (0, 0)
        begun = last_call = time.monotonic()
        while True:
            calls, now = sum(map(len, self._pending.values())), time.monotonic()
            if calls > most:
                most, last_call = calls, now
            patient = now < min(last_call + _PATIENCE, begun + _LONGEST_WAIT)
            expected = self._expected if patient else 0
            quiet = quiet + 1 if (calls, expected) == seen else 0
            seen = (calls, expected)
            if quiet >= _QUIET_TURNS and not expected:
                return
            await asyncio.sleep(_LOOK if quiet > _QUIET_TURNS else 0)

    async def _run(self, policy: str, batch: _Pending) -> None:
        self.batch_sizes.append(len(batch))
        try:
            generations = await asyncio.get_running_loop().run_in_executor(
                _MODELS, self._context.run, self._models[policy].generate, list(batch.values())
            )
            if len(generations) != len(batch):
                raise CreditflowError(
                    f"policy {policy}: {len(batch)} requests, but {len(generations)} generations came"
                )
        except Exception as error:  # given to every caller, and to the owner of the scheduler
            self.fault = self.fault or error
            for future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for future, generation in zip(batch, generations, strict=True):
            if not future.done():  # its rollout may have been cancelled meanwhile
                future.set_result(generation)
