"""Worker processes that run reward functions, with time-outs that end the work.

Each worker has a thread that drives it: it takes a batch of calls, records each answer as it comes, and kills the
worker when its current call takes too long. A call whose worker dies is made once more.

A library's pool does not fit: `concurrent.futures` cannot end a call and breaks as a whole when one worker dies; pools
that do end calls (pebble) apply one time-out to a whole batch, and batches make calls of a millisecond worth sending.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from creditflow.rewards.calls import Answered, Returned, RewardCall, too_late
from creditflow.rewards.execution import wire
from creditflow.rewards.registry import RewardFunction

START_TIMEOUT_S = 120.0
"""Seconds for a worker to start and import the functions' modules, and to read a batch; torch alone may take half a
minute on a busy machine.
"""
BATCH = (16, 64)
"""Minimum (if there are enough calls) and maximum number of calls in a batch."""
MAX_PRINTED, MAX_ANSWER = 1 << 20, 64 << 20
"""Maximum bytes that one call may print, and of one answer."""
_ATTEMPTS = 2
"""Tries of a call whose worker dies, and of starting a worker."""
_LAST_WORDS_S = 1.0
"""Seconds that a worker may take to exit after it closed its connection: only then is its exit code known."""
_KEPT_OUTPUT, _SHOWN_OUTPUT = 400, 4_000


class _StartError(Exception):
    """A worker died before it could run a call."""


class _Job:
    """The calls of one scoring, which the threads of the workers share."""

    def __init__(self, calls: Sequence[RewardCall], n_workers: int, answered: Answered) -> None:
        self.calls = calls
        self.returned: dict[int, Returned] = {}
        self.deaths = Counter[int]()
        """Number of workers that died in each call."""
        self.failed_starts = 0
        """Number of starts that failed since the last answer."""
        self.stopped = False
        self._answered = answered
        self._queue = deque(batches(range(len(calls)), n_workers))
        self._changed = threading.Condition()

    def take(self) -> deque[int]:
        """The next batch, by the calls' numbers; empty at the end. Waits for calls that other threads may give back."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.stopped or len(self.returned) == len(self.calls))
            return deque(self._queue.popleft() if self._queue and not self.stopped else ())

    def give_back(self, numbers: Iterable[int]) -> None:
        """Put calls at the front of the queue, each alone."""
        with self._changed:
            self._queue.extendleft([number] for number in reversed([*numbers]))
            self._changed.notify_all()

    def answer(self, number: int, returned: Returned) -> None:
        """Record the first result of a call."""
        with self._changed:
            is_first = self.returned.setdefault(number, returned) is returned
            self.failed_starts = 0
            self._changed.notify_all()
        if is_first:
            self._answered()

    def stop(self) -> None:
        """Let the threads end."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


class _Output(threading.Thread):
    """Shows the beginning of a worker's output on stderr, keeps the end, and kills a worker that prints too much."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.forget()
        self.start()

    def forget(self) -> None:
        """Begin to count and to keep the output of another call."""
        self.printed, self.tail = 0, b""

    def run(self) -> None:
        assert self.process.stdout is not None
        left = _SHOWN_OUTPUT
        with self.process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 1 << 16):
                self.printed += len(chunk)
                self.tail = (self.tail + chunk)[-_KEPT_OUTPUT:]
                if self.printed > MAX_PRINTED:
                    self.process.kill()
                if left > 0:
                    more = "" if len(chunk) <= left else "\n(reward functions printed more than is shown)\n"
                    print(chunk[:left].decode(errors="replace"), end=more, file=sys.stderr, flush=True)
                    left -= len(chunk)


class _Worker:
    """A worker process with its connection and its output; started when it is first used, and again after its end."""

    connection: socket.socket
    output: _Output

    def __init__(self, functions: bytes) -> None:
        self.functions = functions
        self.process: subprocess.Popen[bytes] | None = None
        self.incoming = bytearray()

    @property
    def lives(self) -> bool:
        """Whether the process exists and has not ended."""
        return self.process is not None and self.process.poll() is None

    def start(self, job: _Job) -> None:
        """Start the process, unless it lives. Raises _StartError."""
        if self.lives:
            return
        self.end()
        self.connection, theirs = socket.socketpair()
        with theirs:
            # -P: as in the parent process, modules are not searched in the working directory first.
            command = [
                sys.executable,
                "-P",
                "-m",
                "creditflow.rewards.execution.worker",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that everything that a function starts can be killed with it
                env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            )
        self.output = _Output(self.process)
        if job.stopped:  # the scoring may have ended just before the process began
            self.kill()
        try:
            error = self.send(self.functions).error
        except (EOFError, TimeoutError) as ended:
            error = self.end(patiently=isinstance(ended, EOFError))
        if error:
            self.end()
            raise _StartError(error)

    def send(self, message: bytes) -> Returned:
        """Send the functions or a batch, and wait until it is read. Raises as `receive` does."""
        self.connection.settimeout(START_TIMEOUT_S)
        self.output.forget()  # not after the answer: the first call may have printed by then
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` reports it
            self.connection.sendall(pickle.dumps(message))
        return self.receive(START_TIMEOUT_S)

    def receive(self, timeout: float) -> Returned:
        """Wait for the next answer. Raises EOFError if the worker died, TimeoutError, UnreadableAnswerError."""
        deadline = time.monotonic() + timeout
        while (end := self.incoming.find(b"\n")) < 0:
            if len(self.incoming) > MAX_ANSWER:
                raise wire.UnreadableAnswerError(f"its answer is larger than {MAX_ANSWER >> 20} MiB")
            self.connection.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                chunk = self.connection.recv(1 << 20)
            except ConnectionResetError:
                chunk = b""
            if not chunk:
                raise EOFError
            self.incoming += chunk
        line = bytes(self.incoming[:end])
        del self.incoming[: end + 1]
        return wire.unpack_returned(line)

    def kill(self) -> None:
        """Kill the process and all processes below it. Each is stopped first, so that it starts nothing meanwhile."""
        process = self.process  # its thread may set it to None meanwhile
        if process is None:
            return
        stopped, new = set[int](), {process.pid} if process.poll() is None else set()
        while new:
            for pid in new:
                _signal(os.kill, pid, signal.SIGSTOP)
            stopped |= new
            new = {child for parent in stopped for child in _children(parent)} - stopped
        for pid in stopped:
            _signal(os.kill, pid, signal.SIGKILL)
        _signal(os.killpg, process.pid, signal.SIGKILL)

    def end(self, *, patiently: bool = False) -> str:
        """Kill the process and return how it ended. `patiently`: it is about to exit by itself.

        If it exits by itself, descendants that left its session live on: they can no longer be attributed to it.
        """
        if self.process is None:
            return ""
        if patiently:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_LAST_WORDS_S)
        self.kill()
        code = self.process.wait()
        self.process = None
        self.connection.close()
        self.incoming.clear()
        self.output.join(_LAST_WORDS_S)
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self.output.tail.decode(errors="replace").strip().splitlines()
        return f"{name}{f': {words[-1]}' if words else ''}"


def _signal(kill: Callable[[int, int], None], pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(pid, number)


def _children(pid: int) -> Iterator[int]:
    """The children of a process. Linux only."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, file.read_text().split())


class WorkerPool:
    """A backend of `n_workers` processes on this machine; they start when there is work for them, and stay.

    Raises RewardError if a function cannot be sent to another process.
    """

    def __init__(self, functions: Sequence[RewardFunction], n_workers: int, timeout: float) -> None:
        taken = [function for function in functions if self.takes(function)]
        self.index = {id(function): i for i, function in enumerate(taken)}
        self.timeout = timeout
        packed = wire.pack_functions(taken)
        self.workers = [_Worker(packed) for _ in range(n_workers)]
        self._jobs: list[_Job] = []
        self._threads: ThreadPoolExecutor | None = None
        """They stay until `close`: the system kills a worker when the thread that started it ends."""
        weakref.finalize(self, _end_all, self.workers)

    def takes(self, function: RewardFunction) -> bool:
        """Accepts plain functions: async ones wait rather than work, and some must stay in the manager's process."""
        return not function.is_async and not function.inline

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        return [worker.process.pid for worker in self.workers if worker.process is not None and worker.lives]

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        self._threads = self._threads or ThreadPoolExecutor(len(self.workers), "creditflow-rewards")
        job = _Job(calls, len(self.workers), answered)
        self._jobs.append(job)
        try:
            driving = [self._threads.submit(self._drive, worker, job) for worker in self.workers]
            await asyncio.gather(*map(asyncio.wrap_future, driving))
        finally:
            self._jobs.remove(job)
            if len(job.returned) < len(calls):
                self._stop(job)
        return [job.returned.get(number, Returned(error="was cancelled")) for number in range(len(calls))]

    def _drive(self, worker: _Worker, job: _Job) -> None:
        """Let a worker run batches until all calls are answered."""
        try:
            while rest := job.take():
                self._run(worker, job, rest)
                job.give_back(rest)
        except BaseException:
            worker.end()
            job.stop()
            raise

    def _run(self, worker: _Worker, job: _Job, rest: deque[int]) -> None:
        """Run a batch. Calls are left in it if the worker ends, or cannot read it."""
        begun, limit, timed_out = time.monotonic(), START_TIMEOUT_S, False
        try:
            worker.start(job)
            if unread := worker.send(wire.pack_calls([job.calls[number] for number in rest], self.index)).error:
                raise wire.TransferError(unread)
            while rest:
                begun, limit = time.monotonic(), job.calls[rest[0]].timeout(self.timeout)
                job.answer(rest[0], worker.receive(limit))
                worker.output.forget()
                rest.popleft()
            return
        except _StartError as error:
            job.failed_starts += 1
            if job.failed_starts >= _ATTEMPTS:
                for number in range(len(job.calls)):
                    job.answer(number, Returned(error=f"the worker process cannot start: {error}"))
                self._stop(job)
            return
        except wire.TransferError as error:
            if len(rest) > 1:  # sent again one by one, so that only the faulty ones fail
                return
            why = str(error)
        except TimeoutError:
            worker.end()
            why, timed_out = too_late(limit), True
        except wire.UnreadableAnswerError as error:
            worker.end()
            why = str(error)
        except EOFError:
            why = f"its worker process died twice ({worker.end(patiently=True)})"
            job.deaths[rest[0]] += 1
            if worker.output.printed > MAX_PRINTED:
                why = f"printed more than {MAX_PRINTED >> 20} MiB"
            elif job.stopped or job.deaths[rest[0]] < _ATTEMPTS:
                return
        job.answer(rest.popleft(), Returned(error=why, seconds=time.monotonic() - begun, timed_out=timed_out))

    def _stop(self, job: _Job) -> None:
        """End a scoring: its threads end with the processes that they wait for."""
        job.stop()
        for worker in self.workers:
            worker.kill()

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Always empty: numbers that a plain function counts stay in its workers."""
        return []

    def close(self) -> None:
        """Kill the workers; a scoring in progress ends with them."""
        for job in self._jobs:
            self._stop(job)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        _end_all(self.workers)


def _end_all(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.end()


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
