"""Worker processes that run reward functions, with time-outs that end the work.

One thread drives all workers: it sends batches of calls to free workers, takes each answer as it comes, and kills a
worker when its current call takes too long or prints too much.

A library's pool does not fit: `concurrent.futures` cannot end a call and breaks as a whole when one worker dies; pools
that do end calls (pebble) apply one time-out to a whole batch, and batches make calls of a millisecond worth sending.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from creditflow.rewards.execution import worker
from creditflow.rewards.execution.calls import Answered, Returned, RewardBackend, RewardCall, too_late
from creditflow.rewards.execution.frames import Channel, TooLong
from creditflow.rewards.execution.wire import (
    CannotTravel,
    UnreadableAnswer,
    pack_calls,
    pack_functions,
    unpack_returned,
)
from creditflow.rewards.registry import RewardFunction

START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and import the functions' modules, and to read a batch; torch alone may take half a
minute on a busy machine.
"""
MAX_PRINTED = 1 << 20
"""Bytes that one call may print."""
MAX_ANSWER = 64 << 20
"""Maximum bytes of one answer."""
ATTEMPTS = 2
"""Tries of a call whose worker dies; if the second worker dies, too, the call is taken as the cause."""
BATCH = (16, 64)
"""Minimum (if there are enough calls) and maximum number of calls in a batch."""
_POLL_S = 0.2
"""Seconds between the driver's checks for cancellation."""
_FEW, _BREATH_S = 4, 0.004
"""While every worker has more than a few calls left, the driver pauses between its checks: each check costs a tenth of
a millisecond that the workers could use.
"""
_LAST_WORDS_S = 1.0
"""Seconds that a worker may take to exit after it closed its connection: only then is its exit code known."""
_KEPT_OUTPUT = 400
_SHOWN_OUTPUT = 4_000


@dataclass(slots=True)
class _Batch:
    """Calls that are sent together, by their index in the job; the first is the one that runs."""

    numbers: deque[int]
    at: int = 0
    """Number of answered calls."""
    begun: float | None = None
    """Start time of the first of `numbers`; None: the worker has not read the batch yet."""


@dataclass(slots=True, eq=False)
class _Worker:
    """The driver's state of a worker process."""

    process: subprocess.Popen[bytes]
    channel: Channel
    output: IO[bytes] | None
    """Its output; None once the worker has closed it."""
    deadline: float
    ready: bool = False
    errand: _Batch | None = None
    printed: int = 0
    """Bytes since the last answer."""
    tail: bytes = b""
    """The end of its output."""

    @property
    def free(self) -> bool:
        return self.ready and self.errand is None

    def read_output(self) -> bytes:
        """Read the output that is available."""
        read = bytearray()
        while self.printed <= MAX_PRINTED and self.output is not None:
            try:
                chunk = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                self.output.close()
                self.output = None
            self.printed += len(chunk)
            read += chunk
        if read:
            self.tail = (self.tail + bytes(read))[-_KEPT_OUTPUT:]
        return bytes(read)

    def end(self, *, patiently: bool = False) -> str:
        """Kill the worker and its descendants, and return how it ended. `patiently`: it is about to exit by itself.

        If the worker exits by itself, descendants that left its session live on: they can no longer be attributed to
        it.
        """
        if patiently:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAST_WORDS_S)
        self.process.send_signal(signal.SIGSTOP)  # if it lives: it must start nothing during the search for descendants
        beneath = _descendants(self.process.pid)
        for pid in beneath:
            _kill(os.kill, pid)
        _kill(os.killpg, self.process.pid)
        code = self.process.wait()
        _await_end(beneath)
        self.channel.close()
        if self.output is not None:
            self.output.close()
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self.tail.decode(errors="replace").strip().splitlines()
        return f"{name}{f': {words[-1]}' if words else ''}"


@dataclass(slots=True)
class _Job:
    """The calls of one `run`."""

    calls: Sequence[RewardCall]
    queue: deque[_Batch]
    answered: Answered
    returned: dict[int, Returned] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False

    @property
    def left(self) -> int:
        return len(self.calls) - len(self.returned)

    def answer(self, number: int, returned: Returned) -> None:
        assert number not in self.returned  # a call is answered once
        self.returned[number] = returned
        self.answered()


class WorkerPool:
    """A backend of `n_workers` processes on this machine; they start at the first call, and stay.

    Raises RewardError if a function cannot be sent to another process.
    """

    def __init__(self, functions: Sequence[RewardFunction], n_workers: int, timeout: float) -> None:
        self.functions = [function for function in functions if self.takes(function)]
        self.n_workers = n_workers
        self.timeout = timeout
        self.started = 0
        """Workers started so far."""
        self._index = {id(function): i for i, function in enumerate(self.functions)}
        self._packed = pack_functions(self.functions)
        self._workers: list[_Worker] = []
        weakref.finalize(self, _end_all, self._workers)
        self._failed_starts = 0
        self._shown = 0
        self._job: _Job | None = None
        # One thread for the pool's life: the system kills workers when the thread that started them ends.
        self._driver: ThreadPoolExecutor | None = None

    def takes(self, function: RewardFunction) -> bool:
        """Accepts plain functions: async ones wait rather than work, and some must stay in the manager's process."""
        return not function.is_async and not function.inline

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [one.process.pid for one in list(self._workers) if one.process.poll() is None]

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        if not calls:
            return []
        if self._driver is None:
            self._driver = ThreadPoolExecutor(1, thread_name_prefix="creditflow-rewards")
        job = _Job(calls, _errands(batches(range(len(calls)), self.n_workers)), answered)
        try:
            return await asyncio.wrap_future(self._driver.submit(self._drive, job))
        finally:
            job.cancelled = True

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Always empty: numbers that a plain function counts stay in its workers."""
        return []

    def close(self) -> None:
        """Kill the workers; a scoring in progress ends with them."""
        if self._driver is not None:
            if self._job is not None:
                self._job.cancelled = True
            self._driver.submit(_end_all, self._workers).result()
            self._driver.shutdown()
            self._driver = None

    # ---- the driver's thread -------------------------------------------------------------------------------------

    def _drive(self, job: _Job) -> list[Returned]:
        self._shown, self._job = 0, job
        try:
            while job.left and not job.cancelled:
                self._staff(job)
                for one in self._workers:
                    if one.free and job.queue:
                        self._give(one, job)
                self._wait()
                for one in list(self._workers):
                    if one in self._workers:  # giving up ends them all
                        self._attend(one, job)
        except BaseException:
            _end_all(self._workers)
            raise
        finally:
            self._job = None
        if job.left:
            _end_all(self._workers)  # cancelled, while workers are still busy
        return [job.returned.get(number, Returned(error="was cancelled")) for number in range(len(job.calls))]

    def _wait(self) -> None:
        """Wait until a worker sends something, can receive more, or passes its deadline."""
        poll = select.poll()
        soonest = time.monotonic() + _POLL_S
        for one in self._workers:
            poll.register(one.channel, select.POLLIN | (select.POLLOUT if one.channel.sending else 0))
            if one.output is not None:
                poll.register(one.output, select.POLLIN)
            if not one.free:
                soonest = min(soonest, one.deadline)
        poll.poll(max(0.0, soonest - time.monotonic()) * 1000)
        if all(one.errand is not None and len(one.errand.numbers) > _FEW for one in self._workers):
            time.sleep(_BREATH_S)  # no worker will be free soon: take several answers at a time

    def _staff(self, job: _Job) -> None:
        """Start workers while there is work for more, and replace workers that died while they were free."""
        for one in list(self._workers):
            if one.free and one.process.poll() is not None:
                self._workers.remove(one)
                one.end()
        wanted = min(self.n_workers, len(job.queue) + sum(one.errand is not None for one in self._workers))
        while len(self._workers) < wanted:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: as in the parent process, modules are not searched in the working directory first.
            command = [sys.executable, "-P", "-m", worker.__name__, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that everything that a function starts can be killed with it
                env=_environment(),
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.started += 1
        one = _Worker(process, Channel(ours, MAX_ANSWER), process.stdout, time.monotonic() + START_TIMEOUT_S)
        one.channel.send(self._packed)
        return one

    def _give(self, one: _Worker, job: _Job) -> None:
        errand = job.queue.popleft()
        try:
            packed = pack_calls([job.calls[number] for number in errand.numbers], self._index)
        except CannotTravel as error:
            self._cannot_travel(errand, job, str(error))
            return
        one.errand = errand
        one.deadline = time.monotonic() + START_TIMEOUT_S  # until the batch is read; then each call has its own
        one.channel.send(packed)

    def _cannot_travel(self, errand: _Batch, job: _Job, why: str) -> None:
        """Handle a batch that cannot be sent: each call is tried alone, so that only the faulty ones fail."""
        if len(errand.numbers) == 1:
            job.answer(errand.numbers[0], Returned(error=why))
        else:
            job.queue.extendleft(_errands([number] for number in errand.numbers))

    def _attend(self, one: _Worker, job: _Job) -> None:
        """Take the worker's answers and output; end it if it must not go on."""
        one.channel.flush()
        # Read the output first, then the answers: a worker runs ahead of its answers, and output of a later call must
        # not count as an earlier one's. Output that no answer has followed belongs to the current call, or is at most a
        # pipe's content of the previous one.
        self._show(one.read_output())
        try:
            for message in one.channel.messages():
                if not self._take(one, job, message):
                    return
        except TooLong:
            return self._kill(one, job, f"its answer is larger than {MAX_ANSWER >> 20} MiB")
        if one.printed > MAX_PRINTED:
            return self._kill(one, job, f"printed more than {MAX_PRINTED >> 20} MiB")
        if one.channel.ended or (not one.free and one.process.poll() is not None):
            self._show(one.read_output())  # its last words
            return self._died(one, job)
        if time.monotonic() > one.deadline and not one.free:
            self._late(one, job)
        return None

    def _take(self, one: _Worker, job: _Job, message: bytes) -> bool:
        """Process a message, and return whether the worker can go on."""
        kind, _, rest = message.partition(b" ")
        match kind + b" ":
            case worker.READY if not one.ready:
                one.ready, self._failed_starts = True, 0
            case worker.CANNOT_START if not one.ready:
                self._workers.remove(one)
                one.end()
                self._cannot_start(job, message.removeprefix(worker.CANNOT_START).decode(errors="replace"))
                return False
            case worker.BEGUN if one.errand is not None and one.errand.begun is None:
                self._next(one, job)
            case worker.CANNOT_READ if one.errand is not None and one.errand.begun is None:
                errand, one.errand = one.errand, None
                self._cannot_travel(errand, job, message.removeprefix(worker.CANNOT_READ).decode(errors="replace"))
            case worker.ANSWER if one.errand is not None and one.errand.begun is not None:
                return self._take_answer(one, one.errand, job, rest)
            case _:  # user code can write to the channel, too
                self._kill(one, job, "its answer could not be read (out of turn)")
                return False
        return True

    def _take_answer(self, one: _Worker, errand: _Batch, job: _Job, message: bytes) -> bool:
        number, _, answer = message.partition(b" ")
        try:
            if number != b"%d" % errand.at:
                raise UnreadableAnswer("its answer could not be read (out of turn)")
            returned = unpack_returned(answer)
        except UnreadableAnswer as error:
            self._kill(one, job, str(error))
            return False
        one.printed, one.tail = 0, b""
        errand.at += 1
        job.answer(errand.numbers.popleft(), returned)
        self._next(one, job)
        return True

    def _next(self, one: _Worker, job: _Job) -> None:
        """Begin the next call of the worker's batch; without one, the worker is free."""
        assert one.errand is not None
        if not one.errand.numbers:
            one.errand = None
            return
        one.errand.begun = time.monotonic()
        one.deadline = one.errand.begun + job.calls[one.errand.numbers[0]].timeout(self.timeout)

    def _late(self, one: _Worker, job: _Job) -> None:
        if one.errand is None or one.errand.begun is None:  # in starting, or in reading a batch
            self._died(one, job)
        else:
            timeout = job.calls[one.errand.numbers[0]].timeout(self.timeout)
            self._kill(one, job, too_late(timeout), timed_out=True)

    def _kill(self, one: _Worker, job: _Job, why: str, *, timed_out: bool = False) -> None:
        """End a worker because of its current call; answer that call, and requeue the calls behind it."""
        self._workers.remove(one)
        one.end()
        if not one.ready:
            self._cannot_start(job, why)
        elif one.errand is not None:
            seconds = 0.0 if one.errand.begun is None else time.monotonic() - one.errand.begun
            job.answer(one.errand.numbers.popleft(), Returned(error=why, seconds=seconds, timed_out=timed_out))
            self._requeue(one.errand, job)

    def _died(self, one: _Worker, job: _Job) -> None:
        """Handle a worker that died or stopped working: its current call gets another try."""
        self._workers.remove(one)
        how = one.end(patiently=one.channel.ended)
        if not one.ready:
            self._cannot_start(job, how)
            return
        if one.errand is None:
            return
        number = one.errand.numbers[0]
        tries = job.attempts[number] = job.attempts.get(number, 0) + 1
        if tries >= ATTEMPTS:
            one.errand.numbers.popleft()
            job.answer(number, Returned(error=f"its worker process died twice ({how})"))
        self._requeue(one.errand, job)

    def _requeue(self, errand: _Batch, job: _Job) -> None:
        """Put the remaining calls at the front of the queue, for other workers: results are awaited in order."""
        if errand.numbers:
            size = -(-len(errand.numbers) // self.n_workers)
            job.queue.extendleft(reversed(_errands(in_parts(errand.numbers, size))))

    def _cannot_start(self, job: _Job, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts < ATTEMPTS:
            return
        self._failed_starts = 0
        for number in range(len(job.calls)):
            if number not in job.returned:
                job.answer(number, Returned(error=f"the worker process cannot start: {why}"))
        job.queue.clear()
        _end_all(self._workers)

    def _show(self, output: bytes) -> None:
        """Pass on the output of functions, up to a limit."""
        if not output or self._shown > _SHOWN_OUTPUT:
            return
        text = output[: _SHOWN_OUTPUT - self._shown].decode(errors="replace")
        self._shown += len(output)
        more = "" if self._shown <= _SHOWN_OUTPUT else "\n(reward functions printed more than is shown)\n"
        print(text, end=more, file=sys.stderr, flush=True)


def batches(numbers: Sequence[int], n_workers: int) -> Iterator[Sequence[int]]:
    """Split `numbers` into batches.

    Batches are large, because sending one has a cost, and smaller towards the end, so that all workers end at the same
    time ("guided self-scheduling", Polychronopoulos and Kuck 1987). If there are few calls, they may be long, and every
    worker gets some.
    """
    smallest, largest = BATCH
    if len(numbers) < smallest * n_workers:
        smallest = largest = max(1, len(numbers) // (2 * n_workers))
    at = 0
    while at < len(numbers):
        size = max(smallest, min(largest, (len(numbers) - at) // (4 * n_workers)))
        yield numbers[at : at + size]
        at += size


def in_parts(numbers: Sequence[int] | deque[int], size: int) -> list[list[int]]:
    """Split `numbers` into parts of `size`; the last one may be smaller."""
    every = list(numbers)
    return [every[i : i + size] for i in range(0, len(every), size)]


def _errands(parts: Iterable[Sequence[int]]) -> deque[_Batch]:
    return deque(_Batch(deque(part)) for part in parts)


def _end_all(workers: list[_Worker]) -> None:
    for one in workers:
        one.end()
    workers.clear()


def _kill(kill: Callable[[int, int], None], pid: int, how: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, how)


def _await_end(pids: Iterable[int]) -> None:
    """Wait until killed processes have ended, which takes until they are scheduled on a busy machine. Linux only."""
    for pid in pids:
        with suppress(OSError):  # already ended
            descriptor = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(1000 * _LAST_WORDS_S)
            finally:
                os.close(descriptor)


def _descendants(pid: int) -> set[int]:
    """Process ids of all descendants of a worker; it adopts its orphans, so that all of them are below it.

    Descendants are stopped when found, and the search is repeated until it finds no new ones, so that none is missed.
    Linux only.
    """
    found: set[int] = set()
    while new := {child for child, parent in _parents().items() if parent in found | {pid}} - found:
        for child in new:
            _kill(os.kill, child, signal.SIGSTOP)
        found |= new
    return found


def _parents() -> dict[int, int]:
    """The parent of every process, by process id."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    return parents


def _environment() -> dict[str, str]:
    """The environment of the workers, in which numerical libraries do not each start a thread per core."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}


BACKEND = RewardBackend("process", lambda functions, options: WorkerPool(functions, options.workers, options.timeout))
