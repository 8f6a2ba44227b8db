"""Worker processes that run reward functions, under time-outs that really end the work.

One thread drives them all: it hands out batches of calls to workers that are free, takes each answer as it comes, and
kills the worker whose present call has taken too long or printed too much. It must not know what a score is.

Why not a library's pool: `concurrent.futures` cannot end a call and breaks as a whole when one worker dies; pools that
do end calls (pebble) give one time-out to a whole batch, and batches make calls of a millisecond worth sending.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from creditflow.reward import worker
from creditflow.reward.calls import Answered, Call, Returned, too_late
from creditflow.reward.registry import RewardFunction
from creditflow.reward.wire import pack_calls, pack_functions, unpack_returned

START_TIMEOUT_S = 120.0
"""For a worker to start and import what the functions are in; on a busy machine torch alone may take half a minute."""
MAX_PRINTED = 1 << 20
"""Bytes that one call may print."""
MAX_ANSWER = 64 << 20
"""Bytes of one answer."""
ATTEMPTS = 2
"""Of a call whose worker died; the second worker that dies with it is taken as the call's doing."""
BATCH = (16, 64)
"""Calls that travel together, at least (where there are as many) and at most."""
_POLL_S = 0.2
"""How often the driver looks whether it is wanted any more."""
_KEPT_OUTPUT = 400
_SHOWN_OUTPUT = 4_000


@dataclass(slots=True)
class _Batch:
    """Calls that travel together, and which of them is running."""

    numbers: deque[int]
    started: float = 0.0


@dataclass(slots=True)
class _Worker:
    """A worker process as the driver sees it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes] | None
    """What it prints; None once it has closed that."""
    deadline: float
    ready: bool = False
    batch: _Batch | None = None
    printed: int = 0
    """Bytes, since the last answer."""
    tail: bytes = b""
    """The end of what it printed."""

    def read_output(self) -> bytes:
        """What it has printed meanwhile."""
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

    def end(self) -> str:
        """Kill it and whatever it started; returns how it had died, where it had."""
        with suppress(ProcessLookupError):  # it is dead, and so is its group
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.connection.close()
        if self.output is not None:
            self.output.close()
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self.tail.decode(errors="replace").strip().splitlines()
        return f"{name}{f': {words[-1]}' if words else ''}"


@dataclass(slots=True)
class _Job:
    """The calls of one `run`."""

    calls: Sequence[Call]
    returned: list[Returned | None]
    queue: deque[_Batch]
    answered: Answered
    attempts: dict[int, int] = field(default_factory=dict)
    left: int = 0
    cancelled: bool = False

    def answer(self, number: int, returned: Returned) -> None:
        assert self.returned[number] is None  # a call is answered once
        self.returned[number] = returned
        self.left -= 1
        self.answered()


class WorkerPool:
    """A backend of `n_workers` processes on this machine; they start at the first call, and stay."""

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
        # One thread for the pool's life: workers are killed by the system when the thread that started them ends.
        self._driver: ThreadPoolExecutor | None = None

    def takes(self, function: RewardFunction) -> bool:
        """Plain functions; async ones wait rather than work, and some must stay where the manager is."""
        return not function.is_async and not function.here

    @property
    def pids(self) -> list[int]:
        """Of the workers that live."""
        return [one.process.pid for one in self._workers if one.process.poll() is None]

    async def run(self, calls: Sequence[Call], answered: Answered = lambda: None) -> list[Returned]:
        """What each call came back with, in order."""
        if not calls:
            return []
        if self._driver is None:
            self._driver = ThreadPoolExecutor(1, thread_name_prefix="creditflow-rewards")
        job = _Job(calls, [None] * len(calls), _batches(len(calls), self.n_workers), answered, left=len(calls))
        try:
            return await asyncio.wrap_future(self._driver.submit(self._drive, job))
        finally:
            job.cancelled = True

    async def metrics(self) -> dict[str, dict[str, float]]:
        """Plain functions count nothing."""
        return {}

    def close(self) -> None:
        """Kill the workers."""
        if self._driver is not None:
            self._driver.submit(_end_all, self._workers).result()
            self._driver.shutdown()
            self._driver = None

    # ---- the driver's thread -------------------------------------------------------------------------------------

    def _drive(self, job: _Job) -> list[Returned]:
        self._shown = 0
        try:
            while job.left and not job.cancelled:
                self._staff(job)
                for one in self._workers:
                    if one.ready and one.batch is None and job.queue:
                        self._give(one, job)
                now = time.monotonic()
                soonest = min((one.deadline for one in self._workers if one.batch or not one.ready), default=now)
                sources: list[Any] = [one.connection for one in self._workers]
                sources += [one.output for one in self._workers if one.output is not None]
                ready = set(wait(sources, max(0.0, min(_POLL_S, soonest - now))))
                for one in list(self._workers):
                    if one in self._workers:  # giving up ends them all
                        self._attend(one, job, ready)
        except BaseException:
            _end_all(self._workers)
            raise
        if job.cancelled:
            _end_all(self._workers)  # they are still at it
        return [returned or Returned(error="was cancelled") for returned in job.returned]

    def _staff(self, job: _Job) -> None:
        """Start workers while there is work for more."""
        for one in list(self._workers):
            if one.batch is None and one.process.poll() is not None and not one.connection.poll():
                self._dismiss(one, job, None)  # died while idle
        wanted = min(self.n_workers, len(job.queue) + sum(one.batch is not None for one in self._workers))
        while len(self._workers) < wanted:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", worker.__name__, str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that whatever a function starts can be killed with it
                env=_environment(),
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.started += 1
        one = _Worker(process, Connection(ours.detach()), process.stdout, time.monotonic() + START_TIMEOUT_S)
        with suppress(OSError):  # it died at once; seen, and told, when its end is attended to
            one.connection.send_bytes(self._packed)
        return one

    def _give(self, one: _Worker, job: _Job) -> None:
        batch = job.queue.popleft()
        one.batch = batch
        self._begin(one, job)
        with suppress(OSError):  # as above
            one.connection.send_bytes(pack_calls([job.calls[number] for number in batch.numbers], self._index))

    def _begin(self, one: _Worker, job: _Job) -> None:
        """The next call of its batch starts now; without one, it is free."""
        assert one.batch is not None
        if not one.batch.numbers:
            one.batch = None
            return
        one.batch.started = time.monotonic()
        one.deadline = one.batch.started + self._timeout_of(job.calls[one.batch.numbers[0]])

    def _timeout_of(self, call: Call) -> float:
        return call.function.timeout or self.timeout

    def _attend(self, one: _Worker, job: _Job, ready: set[Any]) -> None:
        """Take what it answered and printed; end it where it must not go on."""
        try:
            while one.connection in ready or one.connection.poll():
                ready.discard(one.connection)
                answer = one.connection.recv_bytes(MAX_ANSWER)
                self._show(one.read_output())
                if not self._take(one, job, answer):
                    return
        except (EOFError, OSError):  # it died, or sent more than an answer can be
            self._show(one.read_output())
            self._dismiss(one, job, None)
            return
        if one.output in ready:
            self._show(one.read_output())
            if one.printed > MAX_PRINTED:
                self._dismiss(one, job, Returned(error=_PRINTED_TOO_MUCH))
                return
        if time.monotonic() > one.deadline and (one.batch is not None or not one.ready):
            late = None
            if one.batch is not None:
                timeout = self._timeout_of(job.calls[one.batch.numbers[0]])
                late = Returned(error=too_late(timeout), timed_out=True)
            self._dismiss(one, job, late)

    def _take(self, one: _Worker, job: _Job, answer: bytes) -> bool:
        """Whether the worker can go on after this answer."""
        if not one.ready:
            if answer != worker.READY:
                self._dismiss(one, job, None, said=answer.removeprefix(worker.CANNOT_START).decode())
                return False
            one.ready, self._failed_starts = True, 0
            return True
        assert one.batch is not None
        if one.printed > MAX_PRINTED:
            self._dismiss(one, job, Returned(error=_PRINTED_TOO_MUCH))
            return False
        one.printed, one.tail = 0, b""
        job.answer(one.batch.numbers.popleft(), unpack_returned(answer))
        self._begin(one, job)
        return True

    def _dismiss(self, one: _Worker, job: _Job, verdict: Returned | None, said: str = "") -> None:
        """End a worker. `verdict`: of the call that it was at; None: it died, and the call may have another try.

        `said`: why it cannot start.
        """
        self._workers.remove(one)
        how = one.end()
        if not one.ready:
            self._failed_starts += 1
            if self._failed_starts >= ATTEMPTS:
                self._give_up(job, f"the worker process cannot start: {said or how}")
            return
        if one.batch is None:
            return
        numbers = one.batch.numbers
        number = numbers[0]
        seconds = time.monotonic() - one.batch.started
        if verdict is not None:
            numbers.popleft()
            job.answer(number, Returned(error=verdict.error, seconds=seconds, timed_out=verdict.timed_out))
        else:
            tries = job.attempts[number] = job.attempts.get(number, 0) + 1
            if tries >= ATTEMPTS:
                numbers.popleft()
                job.answer(number, Returned(error=f"its worker process died twice ({how})", seconds=seconds))
        if numbers:  # what was not yet begun goes to another worker, and first: results are waited for in order
            job.queue.appendleft(_Batch(numbers))

    def _give_up(self, job: _Job, why: str) -> None:
        self._failed_starts = 0
        for number, returned in enumerate(job.returned):
            if returned is None:
                job.answer(number, Returned(error=why))
        job.queue.clear()
        _end_all(self._workers)

    def _show(self, output: bytes) -> None:
        """Pass on what functions print, within reason."""
        if not output or self._shown > _SHOWN_OUTPUT:
            return
        text = output[: _SHOWN_OUTPUT - self._shown].decode(errors="replace")
        self._shown += len(output)
        more = "" if self._shown <= _SHOWN_OUTPUT else "\n(reward functions printed more than is shown)\n"
        print(text, end=more, file=sys.stderr, flush=True)


_PRINTED_TOO_MUCH = f"printed more than {MAX_PRINTED >> 20} MiB"


def _end_all(workers: list[_Worker]) -> None:
    for one in workers:
        one.end()
    workers.clear()


def batch_size(n_calls: int, n_workers: int) -> int:
    """How many of so many calls travel together: many, for what it costs to send them; few, to end at the same time."""
    smallest, largest = BATCH
    if n_calls < smallest * n_workers:  # few calls: they may be long ones, so every worker gets some
        return max(1, n_calls // (2 * n_workers))
    return max(smallest, min(largest, n_calls // (8 * n_workers)))


def _batches(n_calls: int, n_workers: int) -> deque[_Batch]:
    size = batch_size(n_calls, n_workers)
    return deque(_Batch(deque(range(i, min(i + size, n_calls)))) for i in range(0, n_calls, size))


def _environment() -> dict[str, str]:
    """A worker is one of several side by side: numerical libraries must not each start a thread per core."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
