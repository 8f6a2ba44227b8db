"""One child process: start, output up to a cap, end. Independent of the back ends.

The child is untrusted: it may not read its input, not close its output, and not end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow.sandbox.base import Limit

_CHUNK = 65536
_TICK_S = 0.02
"""Polling interval for the end of a process if the kernel has no pidfd."""


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """Output and end of a child process."""

    returncode: int
    """As in subprocess: -N for signal N."""
    stdout: bytes
    stderr: bytes
    seconds: float
    cpu_s: float
    """CPU seconds of the child and of its descendants that were waited for."""
    limit: Limit | None = None
    """`wall` or `output` if the child was killed for it."""


def sealed(content: bytes) -> int:
    """A descriptor, at offset 0, of an immutable file in memory; the caller closes it. Only on Linux."""
    fd = os.memfd_create("creditflow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Child:
    """A child process that is always ended, even if an exception arrives while it starts.

    A signal that arrives during `Popen` raises after the fork and before the pid is stored. The process then exists,
    and no Python object has its number. But it is a new child of this thread, and the kernel lists those.
    Use: create it, enter a `try` with `end` in its `finally`, then call `start`; all in one thread. The list needs
    Linux with CONFIG_PROC_CHILDREN.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._before: frozenset[int] | None = None
        """Children of this thread before the start; None: nothing was started."""
        self._since = 0

    def start(self, popen: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """Start the process, which must lead its own process group."""
        self._since = _ticks()
        self._before = frozenset(_children())
        self.process = popen()
        return self.process

    def pid(self) -> int | None:
        """The process number; None if it was reaped, or never started."""
        if self.process is not None:
            return self.process.pid if self.process.returncode is None else None
        return self._lost()

    def end(self, kill: Callable[[int], None] | None = None) -> None:
        """Kill the process and reap it. `kill` receives its number; default: SIGKILL to its group."""
        pid = self.pid()
        if pid is None:
            return
        (kill or kill_group)(pid)
        if self.process is not None:
            self.process.wait()
        else:
            with contextlib.suppress(ChildProcessError):  # the finalizer of Popen may have reaped it
                os.waitpid(pid, 0)
            self._before = None

    def _lost(self) -> int | None:
        """The child whose `Popen` was interrupted."""
        if self._before is None:
            return None
        for pid in set(_children()) - self._before:
            # The children of a thread that ends move to another thread. Those are older, or in another group.
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == pid and int(fields[19]) >= self._since:
                    return pid
        return None


def kill_group(pid: int) -> None:
    """Send SIGKILL to the process group of this number, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def call(words: Sequence[str], timeout: float | None = None) -> int:
    """Run a command silently and return its exit code. Raises OSError, and TimeoutExpired after `timeout` seconds."""
    child, null = Child(), subprocess.DEVNULL
    try:
        process = child.start(lambda: subprocess.Popen(words, stdin=null, stdout=null, stderr=null, process_group=0))
        return process.wait(timeout)
    finally:
        child.end()


def _children() -> list[int]:
    """The children of this thread, zombies included."""
    try:
        return [int(pid) for pid in Path("/proc/thread-self/children").read_text().split()]
    except OSError:
        return []


def _ticks() -> int:
    """The current time in the unit of the kernel's process start times."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def attend(
    process: subprocess.Popen[bytes],
    outputs: tuple[int, int],
    most: int,
    wall_s: float,
    kill: Callable[[], None],
) -> ProcessOutput:
    """Read the outputs until the process has ended; kill it if it exceeds the time limit or the cap of its output.

    `outputs`: the descriptors of its stdout and stderr (left open); `most`: their bytes together. `kill` must end the
    process and all others that could hold an output open; it is called at most once. After the end of the process the
    rest of its pipes is read without waiting: a child process may hold them open.
    """
    started = time.monotonic()
    reader = _Reader(outputs, most)
    limit: Limit | None = None
    with _ended(process) as (end_fd, tick), selectors.DefaultSelector() as selector:
        for fd in outputs:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        if end_fd is not None:
            selector.register(end_fd, selectors.EVENT_READ)
        running = True
        while running:
            left = started + wall_s - time.monotonic()
            if left <= 0:
                limit = "wall"
                break
            events = selector.select(min(left, tick))
            ready = [key.fd for key, _ in events if key.fd != end_fd]
            running = len(ready) == len(events) and (end_fd is not None or not _is_over(process))
            for fd in ready:
                if not reader.read(fd):
                    selector.unregister(fd)
            if reader.exceeded:
                limit = "output"
                break
    if limit is not None:
        kill()
    returncode, cpu_s = _reap(process)
    seconds = time.monotonic() - started
    if limit is None and reader.drain():
        limit = "output"
    elif limit == "wall":
        reader.drain()
    stdout, stderr = map(bytes, reader.data.values())
    return ProcessOutput(returncode, stdout, stderr, seconds, cpu_s, limit)


def start(child: Child, words: Sequence[str], stdin: bytes, **options: Any) -> subprocess.Popen[bytes]:
    """Start a command with this input, and with pipes for its output. `options`: those of Popen.

    Raises ValueError if the command line is too long for the system, and OSError for other reasons.
    """
    pipe = subprocess.PIPE
    with tempfile.TemporaryFile() as file:
        file.write(stdin)
        file.seek(0)
        try:
            return child.start(lambda: subprocess.Popen(words, stdin=file, stdout=pipe, stderr=pipe, **options))
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise ValueError("command: it is too long") from error
            raise


def attend_pipes(process: subprocess.Popen[bytes], most: int, wall_s: float, kill: Callable[[], None]) -> ProcessOutput:
    """Attend a process with pipes; see `attend`."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        return attend(process, (process.stdout.fileno(), process.stderr.fileno()), most, wall_s, kill)


class _Reader:
    """Read non-blocking descriptors, up to a cap on their bytes together."""

    def __init__(self, outputs: Sequence[int], most: int) -> None:
        self.data: dict[int, bytearray] = {fd: bytearray() for fd in outputs}
        self.exceeded = False
        self._left = most
        self._open = set(outputs)

    def read(self, fd: int) -> bool:
        """Read once; False at the end, or over the cap."""
        try:
            # Read one byte more than is left: output exactly as long as the cap does not exceed it.
            chunk = os.read(fd, min(_CHUNK, self._left + 1))
        except BlockingIOError:
            return True
        if not chunk:
            self._open.discard(fd)
            return False
        self.exceeded = self.exceeded or len(chunk) > self._left
        self.data[fd] += chunk[: self._left]
        self._left = max(0, self._left - len(chunk))
        return not self.exceeded

    def drain(self) -> bool:
        """Read the available bytes without waiting; return whether the cap was exceeded."""
        for fd in sorted(self._open):
            before = -1
            while before != len(self.data[fd]) and not self.exceeded:
                before = len(self.data[fd])
                self.read(fd)
        return self.exceeded


def _is_over(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended; it is not reaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Wait for the process and return its exit code and CPU seconds."""
    if process.returncode is not None:  # `kill` of Popen polls the process first, and so may have reaped it
        return process.returncode, 0.0
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[tuple[int | None, float]]:
    """A descriptor that becomes readable when the process ends, and the longest wait; without pidfd None and a tick."""
    fd = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # an old kernel, or a seccomp filter that denies it
            fd = os.pidfd_open(process.pid)
    try:
        yield fd, (_TICK_S if fd is None else float("inf"))
    finally:
        if fd is not None:
            os.close(fd)
