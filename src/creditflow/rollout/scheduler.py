"""Gathers the calls of all live trajectories and hands them, policy by policy, to the model together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from creditflow.errors import CreditflowError
from creditflow.rollout.client import ChatClient, Generation, GenerationRequest, ModelClient

_Pending = tuple[GenerationRequest, "asyncio.Future[Generation]"]

_QUIET_TURNS = 3
"""Turns of the event loop without a new call after which all that can call has called. No clock: the same seed gives
the same batches."""
_PATIENCE = 0.25
"""Seconds without a new call after which plays that think outside of the event loop are not waited for any longer."""
_LOOK = 0.001
"""Seconds between two looks for them."""
_MODELS = ThreadPoolExecutor(thread_name_prefix="creditflow-model")
"""Of their own: in the event loop's, a workflow's threads that wait for a response could keep it from being made."""


class Scheduler:
    """Batches the pending calls of each policy into one generation.

    A generation starts when the event loop has gone quiet, that is, when every trajectory waits for a model or for the
    world outside (a tool, a judge, an endpoint); calls that arrive while one runs join the next. The loop stays free
    meanwhile. Plays whose agents call over HTTP think outside of the loop: they are waited for while calls keep coming.
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
        self._pending: dict[str, list[_Pending]] = {name: [] for name in self._models}
        self._dispatcher: asyncio.Task[None] | None = None
        self._expected = 0

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        """The policy's response to `request`; returns when its batch is done."""
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._pending[policy].append((request, future))
        if self._dispatcher is None or self._dispatcher.done():
            self._dispatcher = asyncio.create_task(self._dispatch())
        return await future

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
                live = [(request, future) for request, future in pending if not future.done()]
                live.sort(key=lambda call: call[0].seed)
                batch, self._pending[policy] = live[: self.max_num_seqs], live[self.max_num_seqs :]
                if batch:
                    await self._run(policy, batch)

    async def _until_quiet(self) -> None:
        quiet, seen, last_call = 0, (-1, -1), 0.0
        while True:
            calls = (sum(len(pending) for pending in self._pending.values()), self._expected)
            if calls != seen:
                quiet, seen, last_call = 0, calls, time.monotonic()
            else:
                quiet += 1
            waiting = self._expected > 0 and time.monotonic() < last_call + _PATIENCE
            if quiet >= _QUIET_TURNS and not waiting:
                return
            await asyncio.sleep(_LOOK if quiet > _QUIET_TURNS else 0)

    async def _run(self, policy: str, batch: list[_Pending]) -> None:
        self.batch_sizes.append(len(batch))
        try:
            generations = await asyncio.get_running_loop().run_in_executor(
                _MODELS, self._models[policy].generate, [request for request, _ in batch]
            )
            if len(generations) != len(batch):
                raise CreditflowError(
                    f"policy {policy}: {len(batch)} requests, but {len(generations)} generations came"
                )
        except Exception as error:  # handed to every caller, and to the owner of the scheduler
            self.fault = self.fault or error
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), generation in zip(batch, generations, strict=True):
            if not future.done():  # its trajectory may have been cancelled meanwhile
                future.set_result(generation)
