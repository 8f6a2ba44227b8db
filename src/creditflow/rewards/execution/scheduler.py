"""Distribute the calls of a scoring over hosts, in batches and with retries: the common part of the back ends.

A host is a place where calls run: a worker process of this machine, or a Ray actor.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from creditflow.errors import CreditflowError
from creditflow.rewards.execution.calls import Answered, Returned, RewardCall
from creditflow.rewards.execution.wire import TransferError, UnreadableAnswerError, pack_functions
from creditflow.rewards.registry import RewardFunction

START_TIMEOUT_S = 120.0
"""Seconds for a host to start and import the functions' modules, and to read a batch; torch alone may take half a
minute on a busy machine.
"""
ATTEMPTS = 2
"""Tries of a call whose host dies, and of starting a host."""
BATCH = (16, 64)
"""Minimum (if there are enough calls) and maximum number of calls in a batch."""


class StartError(CreditflowError):
    """A host died before it could run a call."""


class HostDiedError(CreditflowError):
    """A host died during a batch."""

    def __init__(self, why: str, *, at_first: bool) -> None:
        super().__init__(why)
        self.at_first = at_first
        """Whether it died in the first call without a result; else any call that it ran may be the cause."""


class Host(Protocol):
    """A place where calls run."""

    async def run(
        self, calls: Sequence[RewardCall], answer: Callable[[Returned], None], stopped: threading.Event
    ) -> None:
        """Run the calls, and pass on the result of each, in order. A call without a result is tried again.

        `stopped`: set when nobody waits for the results any more. Raises StartError, HostDiedError, TransferError,
        UnreadableAnswerError.
        """
        ...


AnyHost = TypeVar("AnyHost", bound=Host)


@dataclass(slots=True)
class Batch:
    """Calls that are sent together, by their index in the job."""

    numbers: Sequence[int]
    is_async: bool = False
    alone: bool = False
    """Whether it is a single call on its last try, with no other call in progress."""


@dataclass(slots=True, eq=False)
class Job:
    """The calls of one `run`."""

    calls: Sequence[RewardCall]
    answered: Answered
    queues: dict[bool, deque[Batch]] = field(default_factory=lambda: {True: deque(), False: deque()})
    """Batches to send, of async (True) and of plain functions."""
    returned: dict[int, Returned] = field(default_factory=dict)
    tries: Counter[int] = field(default_factory=Counter)
    """Number of hosts that died in each call."""
    suspects: deque[int] = field(default_factory=deque)
    """Calls during which hosts died, with other calls in progress. Each is then tried alone, to find the cause."""
    failed_starts: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def answer(self, number: int, returned: Returned) -> None:
        """Record the first result of a call: calls that were given up may still come back."""
        if self.returned.setdefault(number, returned) is returned:
            self.failed_starts = 0
            self.answered()

    def fail_open_calls(self, why: str) -> None:
        """Answer all open calls at once, with an error."""
        for number in range(len(self.calls)):
            self.answer(number, Returned(error=why))


class Pool(Generic[AnyHost]):
    """The base of the back ends: sends batches to the least busy of `n` hosts.

    `limits`: maximum number of batches in progress, of async (True) and of plain functions. `async_batch`: calls in a
    batch of async ones. Raises RewardError if a function cannot be sent to another process.
    """

    no_start, died = "its host cannot start", "its host died"
    """The beginnings of a score's reason."""

    def __init__(
        self, functions: Sequence[RewardFunction], n: int, limits: Mapping[bool, int], async_batch: int = 1
    ) -> None:
        self.functions = [function for function in functions if self.takes(function)]
        self.n = n
        self.limits = limits
        self.async_batch = async_batch
        self.packed = pack_functions(self.functions)
        self.index = {id(function): i for i, function in enumerate(self.functions)}
        self.hosts: list[AnyHost] = []
        self.jobs: list[Job] = []

    def takes(self, function: RewardFunction) -> bool:
        """Whether the back end runs the function."""
        raise NotImplementedError

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        job = Job(calls, answered)
        for is_async, queue in job.queues.items():
            numbers = [i for i, call in enumerate(calls) if call.function.is_async is is_async]
            parts = in_parts(numbers, self.async_batch) if is_async else batches(numbers, self.n)
            queue.extend(Batch(part, is_async) for part in parts)
        busy: Counter[tuple[AnyHost, bool]] = Counter()
        running: dict[asyncio.Task[None], tuple[AnyHost, bool]] = {}
        self.jobs.append(job)
        try:
            while len(job.returned) < len(calls) and not job.stopped.is_set():
                while (batch := self._next(job, busy)) is not None:
                    host = min(self.hosts, key=lambda free, kind=batch.is_async: busy[free, kind])  # type: ignore[misc]
                    busy[host, batch.is_async] += 1
                    running[asyncio.create_task(self._run_batch(host, batch, job))] = host, batch.is_async
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    busy[running.pop(task)] -= 1
                    task.result()
        finally:
            job.stopped.set()
            self.jobs.remove(job)
            for task in running:
                task.cancel()
        return [job.returned.get(number, Returned(error="was cancelled")) for number in range(len(calls))]

    def _next(self, job: Job, busy: Counter[tuple[AnyHost, bool]]) -> Batch | None:
        """Take the next batch; None if none may be sent now."""
        for is_async, queue in job.queues.items():
            if queue and sum(n for (_, kind), n in busy.items() if kind is is_async) < self.limits[is_async]:
                return queue.popleft()
        if job.suspects and not any(job.queues.values()) and not any(busy.values()):
            number = job.suspects.popleft()
            return Batch([number], job.calls[number].function.is_async, alone=True)
        return None

    async def _run_batch(self, host: AnyHost, batch: Batch, job: Job) -> None:
        rest = deque(batch.numbers)
        parts = self.n
        try:
            await host.run(
                [job.calls[number] for number in rest],
                lambda returned: job.answer(rest.popleft(), returned),
                job.stopped,
            )
        except StartError as error:
            job.failed_starts += 1
            if job.failed_starts >= ATTEMPTS:
                job.fail_open_calls(f"{self.no_start}: {error}")
        except HostDiedError as error:
            job.failed_starts = 0  # the host had started
            for number in list(rest)[: 1 if error.at_first else None]:
                job.tries[number] += 1
                if job.tries[number] < ATTEMPTS:
                    continue
                rest.remove(number)
                if error.at_first or batch.alone:
                    job.answer(number, Returned(error=f"{self.died} twice ({error})"))
                else:
                    job.suspects.append(number)
        except TransferError as error:
            parts = len(rest)  # each alone, so that only the faulty ones fail
            if parts == 1:
                job.answer(rest[0], Returned(error=str(error)))
        except UnreadableAnswerError as error:
            for number in rest:
                job.answer(number, Returned(error=str(error)))
        left = [number for number in rest if number not in job.returned]
        again = in_parts(left, -(-len(left) // parts) or 1)
        # At the front of the queue: results are awaited in order.
        job.queues[batch.is_async].extendleft(Batch(part, batch.is_async) for part in reversed(again))


def batches(numbers: Sequence[int], n_hosts: int) -> Iterator[Sequence[int]]:
    """Split `numbers` into batches.

    Batches are large, because sending one has a cost, and smaller towards the end, so that all hosts end at the same
    time ("guided self-scheduling", Polychronopoulos and Kuck 1987). If there are few calls, they may be long, and every
    host gets some.
    """
    smallest, largest = BATCH
    if len(numbers) < smallest * n_hosts:
        smallest = largest = max(1, len(numbers) // (2 * n_hosts))
    at = 0
    while at < len(numbers):
        size = max(smallest, min(largest, (len(numbers) - at) // (4 * n_hosts)))
        yield numbers[at : at + size]
        at += size


def in_parts(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """Split `numbers` into parts of `size`; the last one may be smaller."""
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]
