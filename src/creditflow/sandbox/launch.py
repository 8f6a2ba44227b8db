"""Start bwrap for one run, and release the program once it is confined. Independent of commands, limits and results.

A box begins as a small shell that reports on a socket that it is ready and waits for an answer. Only a live harness can
answer: if the harness ends or gives up, the socket closes and the shell ends. A program can therefore never start
without its limits. Bubblewrap's `--block-fd` is not sufficient: it treats the end of the harness as the signal to
start.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from creditflow.sandbox.base import SandboxError
from creditflow.sandbox.process import Child, ProcessOutput, attend, sealed

_START_S = 10.0
"""Timeout for bwrap to set up a box, in seconds; 3 ms is usual."""

SCRIPT = """
exec 9>&0 0<{stdin}
unset PWD OLDPWD SHLVL
echo >&9
read -r go <&9 || exit
{prlimit} || exit
exec 9>&- 8>&2 2>/dev/null
(exec "$@" 2>&8 8>&-); exit
"""
"""For the shell that is pid 1 of a box: wait for the release, limit itself, then execute the arguments in a child.

The program is not pid 1, because a pid 1 ignores most signals and must reap orphans; the shell reaps them while it
waits. Its own messages ("Killed") are dropped. `prlimit`: a command. `stdin`: the path of the program's input, a file
in the box. Bubblewrap passes descriptors on under the same numbers, and a plain shell can address only those up to 9:
the socket is therefore the shell's own input."""


class Descriptors:
    """The descriptors of a launch; all are closed with the stack, some earlier."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._open: set[int] = set()
        stack.callback(lambda: self.close(*self._open))

    def sealed(self, content: bytes) -> int:
        """A descriptor of a sealed file in memory with this content."""
        return self.add(sealed(content))

    def pipe(self) -> tuple[int, int]:
        """A pipe: its read end and its write end."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def sockets(self) -> tuple[int, int]:
        """A socket pair: our end and the box's. Unlike a pipe, it cannot be reopened through /proc."""
        ours, theirs = socket.socketpair()
        return self.add(ours.detach()), self.add(theirs.detach())

    def add(self, fd: int) -> int:
        """Add a descriptor to those that are closed; return it."""
        self._open.add(fd)
        return fd

    def close(self, *fds: int) -> None:
        """Close these descriptors, if they are still open."""
        for fd in fds:
            if fd in self._open:
                self._open.discard(fd)
                os.close(fd)


@dataclass(slots=True)
class Launch:
    """One bwrap process and the descriptors it shares with this one."""

    fds: Descriptors
    status: int
    """Descriptor on which bwrap reports the host pid of the box's pid 1, and its exit code."""
    out: int
    err: int
    channel: int
    """The socket to the shell in the box."""
    passed: tuple[int, ...]
    """Descriptors for bwrap only: its stdin, stdout and stderr, and those named in its arguments."""
    bwrap: Child = field(default_factory=Child)
    program: int = -1
    """A pidfd of pid 1 of the box; -1 until it is found."""
    started: bool = False
    """Whether the program was released."""
    said: bytes = b""
    """Bytes read from `status`."""

    def start(self, words: Sequence[str]) -> None:
        """Start bwrap. Raises ValueError if the command line is too long for the system, else SandboxError."""
        stdin, out, err, *others = self.passed
        try:
            self.bwrap.start(
                lambda: subprocess.Popen(
                    words,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    env={},  # the parent's environment would be readable at /proc/1/environ until the program starts
                    cwd="/",
                    pass_fds=others,
                    process_group=0,  # Ctrl-C at a terminal is ours to handle
                )
            )
        except (OSError, subprocess.SubprocessError) as error:
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                raise ValueError("command: it is too long") from error
            raise SandboxError(f"bwrap could not be started: {error}") from error

    def run(self, confine: Callable[[int], None], wall_s: float, most: int) -> ProcessOutput:
        """Confine pid 1 of the box, release it, and wait for its end. `most`: bytes of stdout and stderr together."""
        process = self.bwrap.process
        assert process is not None
        self.fds.close(*self.passed)
        # This ORDER prevents a program from running unconfined, or without the harness: (1) find pid 1 and hold it by a
        # pidfd, so that every later failure ends it; (2) wait until the shell reports that bwrap is done: the box then
        # ends with this process; (3) confine pid 1; (4) only then release the program.
        if self._find(_START_S) and self._shell_is_there():
            with contextlib.suppress(ProcessLookupError):  # already dead: the release will fail
                confine(self.pid())
            self._go()
        return attend(process, (self.out, self.err), most, wall_s if self.started else _START_S, self._kill)

    def pid(self) -> int:
        """The host pid of the box's pid 1. Raises SandboxError if bwrap reports none."""
        try:
            return int(json.loads(self.said.partition(b"\n")[0])["child-pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"bwrap reports no child: {self.said[:200]!r}") from error

    def _find(self, wait_s: float) -> bool:
        """Open a pidfd of pid 1; False if bwrap ended before it started pid 1, or pid 1 has ended."""
        deadline = time.monotonic() + wait_s
        while b"\n" not in self.said:
            if not _readable(self.status, deadline - time.monotonic()):
                raise SandboxError(f"bwrap did not set up a box within {wait_s:.0f} s")
            chunk = os.read(self.status, 4096)
            if not chunk:
                return False
            self.said += chunk
        # Pid 1 waits for us, so its number cannot have been reused unless it has ended.
        with contextlib.suppress(ProcessLookupError):
            self.program = self.fds.add(os.pidfd_open(self.pid()))
        return self.program >= 0

    def _shell_is_there(self) -> bool:
        if not _readable(self.channel, _START_S):
            raise SandboxError(f"the shell of a box did not start within {_START_S:.0f} s")
        with contextlib.suppress(ConnectionResetError):
            return os.read(self.channel, 1) == b"\n"
        return False

    def _go(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # Set before the write: an exception right after the write must find the program marked as started.
            self.started = True
            os.write(self.channel, b"go\n")

    def _kill(self) -> None:
        """Kill pid 1 of the box, and with it every process in the box; bwrap then ends."""
        if self.program >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.program, signal.SIGKILL)
        elif self.bwrap.process is not None:
            self.bwrap.process.kill()

    def end(self) -> None:
        """End all processes and reap them, whatever happened before."""
        if self.bwrap.pid() is not None:
            if self.program < 0:
                # If bwrap ended now, because its status pipe has no reader or by SIGKILL, its child could wait forever
                # for a message from it. So find that child first.
                self.fds.close(*self.passed)
                with contextlib.suppress(SandboxError):
                    self._find(_START_S)
            self._kill()
            self.bwrap.end()
        if self.program >= 0:
            _readable(self.program, _START_S)

    def exit_code(self) -> int | None:
        """The program's exit code; None if it was not started or bwrap reports none. Call after the end."""
        os.set_blocking(self.status, False)
        with contextlib.suppress(BlockingIOError):
            self.said += os.read(self.status, 65536)
        match = re.search(rb'"exit-code": (\d+)', self.said)
        return int(match[1]) if match and self.started else None


def _readable(fd: int, wait_s: float) -> bool:
    """Whether the descriptor becomes readable or closed within `wait_s`. Not by select, which is limited to 1024."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))
