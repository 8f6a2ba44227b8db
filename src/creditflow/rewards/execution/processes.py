"""Worker processes that run reward functions, with time-outs that end the work.

Each worker has a thread that drives it: it sends batches of calls, takes each answer as it comes, and kills the worker
when its current call takes too long or prints too much.

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
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

from creditflow.rewards.execution import worker
from creditflow.rewards.execution.calls import Answered, Returned, RewardBackend, RewardCall, too_late
from creditflow.rewards.execution.scheduler import START_TIMEOUT_S, HostDiedError, Pool, StartError
from creditflow.rewards.execution.wire import (
    FrameReader,
    TooLongError,
    TransferError,
    UnreadableAnswerError,
    pack_calls,
    unpack_returned,
    write_frame,
)
from creditflow.rewards.registry import RewardFunction

MAX_PRINTED = 1 << 20
"""Bytes that one call may print."""
MAX_ANSWER = 64 << 20
"""Maximum bytes of one answer."""
_POLL_S = 0.2
"""Seconds between a thread's checks for cancellation."""
_FEW, _BREATH_S = 4, 0.004
"""While its worker has more than a few calls left, a thread pauses between its checks: each check costs a tenth of a
millisecond that the workers could use.
"""
_LAST_WORDS_S = 1.0
"""Seconds that a worker may take to exit after it closed its connection: only then is its exit code known."""
_KEPT_OUTPUT = 400
_SHOWN_OUTPUT = 4_000


class _MustEndError(Exception):
    """The worker must be ended because of its current call; the message is the reason of that call's score."""


class _StoppedError(Exception):
    """The scoring was cancelled."""


class _Echo:
    """Passes on the output of functions to stderr, up to a limit per scoring."""

    def __init__(self) -> None:
        self.shown = 0

    def __call__(self, output: bytes) -> None:
        if not output or self.shown > _SHOWN_OUTPUT:
            return
        text = output[: _SHOWN_OUTPUT - self.shown].decode(errors="replace")
        self.shown += len(output)
        more = "" if self.shown <= _SHOWN_OUTPUT else "\n(reward functions printed more than is shown)\n"
        print(text, end=more, file=sys.stderr, flush=True)


class _Worker:
    """A worker process, with its connection and its output."""

    def __init__(self, echo: _Echo) -> None:
        self.connection, theirs = socket.socketpair()
        self.frames = FrameReader(self.connection, MAX_ANSWER)
        self.echo = echo
        self.printed = 0
        """Bytes since the last answer."""
        self.tail = b""
        """The end of its output."""
        with theirs:
            # -P: as in the parent process, modules are not searched in the working directory first.
            command = [sys.executable, "-P", "-m", worker.__name__, str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # so that everything that a function starts can be killed with it
                env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ},
            )
        assert self.process.stdout is not None
        self.output: IO[bytes] | None = self.process.stdout
        """None once the worker has closed it."""
        os.set_blocking(self.output.fileno(), False)

    def send(self, message: bytes) -> None:
        """Send a message. Raises TimeoutError if the worker does not read it."""
        self.connection.settimeout(START_TIMEOUT_S)
        with suppress(BrokenPipeError, ConnectionResetError):  # reported by the next `receive`
            write_frame(self.connection, message)
        self.connection.settimeout(None)

    def receive(self, timeout: float, stopped: threading.Event, pause: float = 0.0) -> tuple[bytes, bytes]:
        """Wait for the kind and the content of the next message; look again `pause` seconds after it may have come.

        Raises EOFError if the worker died, TimeoutError, _MustEndError, _StoppedError.
        """
        deadline = time.monotonic() + timeout
        while True:
            dead = self.process.poll() is not None
            # Read the output first, then the answer: a worker runs ahead of its answers, and output of a later call
            # must not count as an earlier one's. Output that no answer has followed belongs to the current call, or is
            # at most a pipe's content of the previous one.
            self.read_output()
            try:
                message = self.frames.arrived()
            except TooLongError:
                raise _MustEndError(f"its answer is larger than {MAX_ANSWER >> 20} MiB") from None
            if message is not None:
                kind, _, content = message.partition(b" ")
                return kind + b" ", content
            if self.printed > MAX_PRINTED:
                raise _MustEndError(f"printed more than {MAX_PRINTED >> 20} MiB")
            if dead:
                raise EOFError
            if stopped.is_set():
                raise _StoppedError
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            if self.output is not None:
                poll.register(self.output, select.POLLIN)
            poll.poll(1000 * min(left, _POLL_S))
            time.sleep(pause)

    def answer(self, number: int, timeout: float, stopped: threading.Event, pause: float) -> Returned:
        """Wait for the result of a call, by its number in the batch. Raises as `receive` does."""
        kind, content = self.receive(timeout, stopped, pause)
        place, _, packed = content.partition(b" ")
        if kind != worker.ANSWER or place != b"%d" % number:  # user code can write to the connection, too
            raise _MustEndError("its answer could not be read (out of turn)")
        try:
            returned = unpack_returned(packed)
        except UnreadableAnswerError as error:
            raise _MustEndError(str(error)) from error
        self.printed, self.tail = 0, b""
        return returned

    def read_output(self) -> None:
        """Read and pass on the output that is available."""
        chunks = []
        while self.printed <= MAX_PRINTED and self.output is not None:
            try:
                chunk = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                self.output.close()
                self.output = None
            self.printed += len(chunk)
            chunks.append(chunk)
        self.tail = b"".join([self.tail, *chunks])[-_KEPT_OUTPUT:]
        self.echo(b"".join(chunks))

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
        self.read_output()  # its last words
        self.connection.close()
        if self.output is not None:
            self.output.close()
        name = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self.tail.decode(errors="replace").strip().splitlines()
        return f"{name}{f': {words[-1]}' if words else ''}"


class _WorkerHost:
    """The thread that drives a worker, and its worker: started at the first call, and replaced when it dies."""

    def __init__(self, functions: bytes, index: dict[int, int], timeout: float, echo: _Echo) -> None:
        self.functions = functions
        self.index = index
        self.timeout = timeout
        self.echo = echo
        self.started = 0
        """Workers started so far."""
        self.worker: _Worker | None = None
        # One thread from start to end: the system kills a worker when the thread that started it ends.
        self._thread: ThreadPoolExecutor | None = None

    async def run(
        self, calls: Sequence[RewardCall], answer: Callable[[Returned], None], stopped: threading.Event
    ) -> None:
        """Run the calls (see `scheduler.Host`); return early if the worker had to be ended."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="creditflow-rewards")
        await asyncio.wrap_future(self._thread.submit(self._run, calls, answer, stopped))

    def close(self) -> None:
        """End the worker and the thread."""
        if self._thread is not None:
            self._thread.submit(self.end).result()
            self._thread.shutdown()
            self._thread = None

    def end(self, *, patiently: bool = False) -> str:
        """End the worker, if there is one, and return how it ended."""
        ending, self.worker = self.worker, None
        return "" if ending is None else ending.end(patiently=patiently)

    def _run(self, calls: Sequence[RewardCall], answer: Callable[[Returned], None], stopped: threading.Event) -> None:
        begun = time.monotonic()
        try:
            living = self._living(stopped)
            self._send(living, calls, stopped)
            for number, call in enumerate(calls):
                begun, timeout = time.monotonic(), call.timeout(self.timeout)
                pause = _BREATH_S if len(calls) - number > _FEW else 0.0
                try:
                    returned = living.answer(number, timeout, stopped, pause)
                except TimeoutError:
                    self.end()
                    answer(Returned(error=too_late(timeout), seconds=time.monotonic() - begun, timed_out=True))
                    return
                answer(returned)
        except (EOFError, TimeoutError) as error:  # the worker died, or does not read
            raise HostDiedError(self.end(patiently=isinstance(error, EOFError)), at_first=True) from error
        except _MustEndError as error:
            self.end()
            answer(Returned(error=str(error), seconds=time.monotonic() - begun))
        except _StoppedError:
            self.end()
        except (StartError, TransferError):
            raise
        except BaseException:
            self.end()
            raise

    def _living(self, stopped: threading.Event) -> _Worker:
        """The worker, or a new one if it died while it was free. Raises StartError."""
        if self.worker is not None and self.worker.process.poll() is None:
            return self.worker
        self.end()
        self.started += 1
        try:
            self.worker = _Worker(self.echo)
            self.worker.send(self.functions)
            kind, content = self.worker.receive(START_TIMEOUT_S, stopped)
        except (EOFError, TimeoutError) as error:
            reason = self.end(patiently=isinstance(error, EOFError))
            raise StartError(reason or f"it was not ready within {START_TIMEOUT_S:g} s") from error
        except _MustEndError as error:
            self.end()
            raise StartError(str(error)) from error
        if kind != worker.READY:
            self.end()
            raise StartError(content.decode(errors="replace"))
        return self.worker

    def _send(self, living: _Worker, calls: Sequence[RewardCall], stopped: threading.Event) -> None:
        """Send a batch and wait until it is read. Raises TransferError."""
        living.send(pack_calls(calls, self.index))
        kind, content = living.receive(START_TIMEOUT_S, stopped)
        if kind == worker.CANNOT_READ:
            raise TransferError(content.decode(errors="replace"))
        if kind != worker.BEGUN:
            raise _MustEndError("its answer could not be read (out of turn)")


class WorkerPool(Pool[_WorkerHost]):
    """A backend of `n_workers` processes on this machine; they start when there is work for them, and stay.

    Raises RewardError if a function cannot be sent to another process.
    """

    no_start, died = "the worker process cannot start", "its worker process died"

    def __init__(self, functions: Sequence[RewardFunction], n_workers: int, timeout: float) -> None:
        super().__init__(functions, n_workers, {True: 0, False: n_workers})
        self._echo = _Echo()
        self.hosts = [_WorkerHost(self.packed, self.index, timeout, self._echo) for _ in range(n_workers)]
        weakref.finalize(self, _end_all, self.hosts)

    def takes(self, function: RewardFunction) -> bool:
        """Accepts plain functions: async ones wait rather than work, and some must stay in the manager's process."""
        return not function.is_async and not function.inline

    @property
    def started(self) -> int:
        """Workers started so far."""
        return sum(host.started for host in self.hosts)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        workers = [host.worker for host in self.hosts]
        return [each.process.pid for each in workers if each is not None and each.process.poll() is None]

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order."""
        self._echo.shown = 0
        return await super().run(calls, answered)

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Always empty: numbers that a plain function counts stay in its workers."""
        return []

    def close(self) -> None:
        """Kill the workers; a scoring in progress ends with them."""
        for job in list(self.jobs):
            job.stopped.set()
        for host in self.hosts:
            host.close()


def _end_all(hosts: Iterable[_WorkerHost]) -> None:
    for host in hosts:
        host.end()


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
    pids: set[int] = set()
    while new := {child for child, parent in _parents().items() if parent in pids | {pid}} - pids:
        for child in new:
            _kill(os.kill, child, signal.SIGSTOP)
        pids |= new
    return pids


def _parents() -> dict[int, int]:
    """The parent of every process, by process id."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
    return parents


BACKEND = RewardBackend("process", lambda functions, options: WorkerPool(functions, options.workers, options.timeout))
