"""Gathers the calls of all live trajectories and hands them, policy by policy, to the model together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from creditflow.errors import CreditflowError
from creditflow.rollout.client import ChatClient, Generation, GenerationRequest, ModelClient

_Pending = dict["asyncio.Future[Generation]", GenerationRequest]

_QUIET_TURNS = 3
"""Turns of the event loop without a new call after which all that can call has called. No clock: the same seed gives
the same batches."""
_PATIENCE = 0.25
"""Seconds without a new call after which plays that think outside of the event loop are not waited for any longer."""
_LONGEST_WAIT = 10.0
"""Seconds after which they are not, though calls keep coming."""
_LOOK = 0.001
"""Seconds between two looks for them."""
_MODELS = ThreadPoolExecutor(thread_name_prefix="creditflow-model")
"""Of their own: in the event loop's, a workflow's threads that wait for a response could keep it from being made."""


class Scheduler:
    """Batches the pending calls of each policy into one generation.

    A generation starts when the event loop has gone quiet, that is, when every trajectory waits for a model or for the
    world outside (a tool, a judge, an endpoint); calls that arrive while one runs join the next. The loop stays free
    meanwhile. Plays whose agents call over HTTP think outside of the loop: they are waited for while calls keep coming,
    and never for longer than `_LONGEST_WAIT`.
    A batch has its calls in the order of their seeds, in whatever order they came.
    """

    def __init__(self, clients: Mapping[str, ModelClient | ChatClient], max_num_seqs: int = 1024) -> None:
        self.clients = clients
        self._models = {name: client for name, client in clients.items() if not isinstance(client, ChatClient)}
        self.max_num_seqs = max_num_seqs
        self.fault: Exception | None = None
        """The first error of a model itself. It is nobody's play that failed: the caller must raise it."""
        self.batch_sizes: list[int] = []
        """How many calls each generation served."""
        self._pending: dict[str, _Pending] = {name: {} for name in self._models}
        """Calls that wait for a generation to begin, in the order in which they came."""
        self._dispatcher: asyncio.Task[None] | None = None
        self._expected = 0

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """The policy's response to `request`; returns when its batch is done."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        pending = self._pending[policy]
        pending[future] = request
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())
        try:
            return await future
        finally:
            pending.pop(future, None)  # who has gone away is not waited for, nor generated for

    def expect(self, plays: int) -> None:
        """So many more plays (fewer, where negative) think outside of the event loop, and are about to call."""
        self._expected += plays

    async def idle(self) -> None:
        """Returns when nothing is generated any more."""
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
                _MODELS, self._models[policy].generate, list(batch.values())
            )
            if len(generations) != len(batch):
                raise CreditflowError(
                    f"policy {policy}: {len(batch)} requests, but {len(generations)} generations came"
                )
        except Exception as error:  # handed to every caller, and to the owner of the scheduler
            self.fault = self.fault or error
            for future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for future, generation in zip(batch, generations, strict=True):
            if not future.done():  # its trajectory may have been cancelled meanwhile
                future.set_result(generation)
