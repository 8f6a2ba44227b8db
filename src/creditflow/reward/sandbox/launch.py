"""Starts bwrap for one run, and lets the program go when it is confined. Knows no command, no limit's name, no result.

A box begins as a small shell, which says on a socket that it is there and waits for an answer. Only a harness that is
alive can give one: whatever ends the harness, or makes it give up, closes the socket, and then the shell ends. So there
is no moment at which a program can start without its limits. Bubblewrap's own `--block-fd` would not do: it takes the
end of the harness for the word to go.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from creditflow.reward.sandbox.base import SandboxError
from creditflow.reward.sandbox.common import END_ALL
from creditflow.reward.sandbox.process import Attended, Child, attend, sealed

_START_S = 10.0
"""How long bwrap may take to set up a box, before it is a failure; 3 ms is usual."""

_READY = """
exec 8>&2 9>&0 0<{stdin}
unset PWD OLDPWD SHLVL
echo >&9
read -r go <&9 || exit
"""
"""Bubblewrap hands descriptors on under their numbers here, and a plain shell knows only those up to 9: so the socket
comes as the shell's input, and the program's input is a file of the box."""
_GO = 'exec "$@" 8>&- 9>&-'
_KEEP = """
exec 2>/dev/null
(exec "$@" 2>&8 8>&- 9>&-)
code=$?
{end_all}
{{ {hand_out}
}} >&9
exit $code
"""
"""What the program left running is dead before a file is looked at: it could otherwise put a pipe in its place."""


def script(stdin: str, hand_out: str = "") -> str:
    """Pid 1 of a box, to be called with the program's words.

    `stdin`: the path of the program's input. `hand_out`: a script that prints, after the program, what is kept; without
    it the shell becomes the program.
    """
    return _READY.format(stdin=stdin) + (_KEEP.format(hand_out=hand_out, end_all=END_ALL) if hand_out else _GO)


class Descriptors:
    """The descriptors of a launch; all are closed when the stack is, some before."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._open: set[int] = set()
        stack.callback(lambda: self.close(*self._open))

    def sealed(self, content: bytes) -> int:
        """A file in memory."""
        return self.add(sealed(content))

    def pipe(self) -> tuple[int, int]:
        """Its end to read from, and its end to write to."""
        ends = os.pipe()
        self._open.update(ends)
        return ends

    def sockets(self) -> tuple[int, int]:
        """Two ends; unlike a pipe's, nobody can open one again through /proc."""
        ours, theirs = socket.socketpair()
        return self.add(ours.detach()), self.add(theirs.detach())

    def add(self, fd: int) -> int:
        """Close this one too."""
        self._open.add(fd)
        return fd

    def close(self, *fds: int) -> None:
        """Close those that are still open."""
        for fd in fds:
            if fd in self._open:
                self._open.discard(fd)
                os.close(fd)


@dataclass(slots=True)
class Launch:
    """One bwrap: what it and this process share."""

    fds: Descriptors
    status: int
    """Where bwrap says which process is pid 1 of the box, and what it exited with."""
    out: int
    err: int
    channel: int
    """The socket to the shell in the box; what is kept comes by it, too."""
    passed: tuple[int, ...]
    """Descriptors for bwrap alone: its input, its output, its errors, and those that its arguments name."""
    bwrap: Child = field(default_factory=Child)
    program: int = -1
    """A pidfd of pid 1 of the box."""
    started: bool = False
    """Whether the program was let go."""
    said: bytes = b""
    """What came from `status`."""

    def start(self, words: Sequence[str]) -> None:
        """Start bwrap. Raises ValueError where the words are too long for the system, else SandboxError."""
        stdin, out, err, *others = self.passed
        try:
            self.bwrap.start(
                lambda: subprocess.Popen(
                    words,
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    env={},  # the parent's would be readable at /proc/1/environ until the program starts
                    cwd="/",
                    pass_fds=others,
                    process_group=0,  # Ctrl-C at a terminal is ours to handle
                )
            )
        except (OSError, subprocess.SubprocessError) as error:
            if isinstance(error, OSError) and error.errno == errno.E2BIG:
                raise ValueError("command: it is too long, or the names to keep are") from error
            raise SandboxError(f"bwrap could not be started: {error}") from error

    def run(
        self, confine: Callable[[int], None], limit: Callable[[], None], wall_s: float, caps: Mapping[str, int]
    ) -> Attended:
        """Confine pid 1 of the box, let it go, and wait for its end.

        `limit` sets the limits of the run's group, `confine` those of a process; `caps`: bytes of `output` (stdout and
        stderr together), and of `kept` where something is kept.
        """
        process = self.bwrap.process
        assert process is not None
        self.fds.close(*self.passed)
        # The ORDER is what keeps a program from running unconfined, or without us: (1) know pid 1 and hold it by a
        # pidfd, so that every failure from here on ends it; (2) limit the group; (3) confine pid 1; (4) hear from the
        # shell that bwrap is done, which has by then bound the box's life to ours; (5) only then say go.
        if self._find(_START_S):
            limit()
            with contextlib.suppress(ProcessLookupError):  # dead already: the shell will not answer
                confine(self.pid())
            if self._shell_is_there():
                started = time.monotonic()
                self._go()
                return self._attend(process, wall_s, caps, started)
        return self._attend(process, _START_S, caps, time.monotonic())

    def pid(self) -> int:
        """The box's pid 1, as the host counts. Raises SandboxError where bwrap reports none."""
        try:
            return int(json.loads(self.said.partition(b"\n")[0])["child-pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxError(f"bwrap reports no child: {self.said[:200]!r}") from error

    def _find(self, wait_s: float) -> bool:
        """Get hold of pid 1; False where bwrap ended before it had one, or that has ended."""
        deadline = time.monotonic() + wait_s
        while b"\n" not in self.said:
            if not _readable(self.status, deadline - time.monotonic()):
                raise SandboxError(f"bwrap did not set up a box within {wait_s:.0f} s")
            chunk = os.read(self.status, 4096)
            if not chunk:
                return False
            self.said += chunk
        # Until it has ended the number is its own, and it waits for us.
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
            # Before the word: an exception that comes right after it finds a program that was let go.
            self.started = True
            os.write(self.channel, b"go\n")

    def _attend(
        self, process: subprocess.Popen[bytes], wall_s: float, caps: Mapping[str, int], started: float
    ) -> Attended:
        outputs = {self.out: "output", self.err: "output"}
        if "kept" in caps:
            outputs[self.channel] = "kept"
        return attend(process, outputs, caps, wall_s, self._kill, started=started)

    def _kill(self) -> None:
        """Kill pid 1 of the box, and so all that is in it; bwrap sees that and ends."""
        if self.program >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.program, signal.SIGKILL)
        elif self.bwrap.process is not None:
            self.bwrap.process.kill()

    def end(self) -> None:
        """Whatever happened, leave no process and no zombie."""
        if self.bwrap.pid() is not None:
            if self.program < 0:
                # If bwrap ended now, for want of a reader of its status or by SIGKILL, its child could wait for ever
                # for a message from it. So first find that child.
                self.fds.close(*self.passed)
                with contextlib.suppress(SandboxError):
                    self._find(_START_S)
            self._kill()
            self.bwrap.end()
        if self.program >= 0:
            _readable(self.program, _START_S)

    def exit_code(self) -> int | None:
        """The program's, which bwrap reports only if something was started. After the end."""
        os.set_blocking(self.status, False)
        with contextlib.suppress(BlockingIOError):
            self.said += os.read(self.status, 65536)
        match = re.search(rb'"exit-code": (\d+)', self.said)
        return int(match[1]) if match and self.started else None


def _readable(fd: int, wait_s: float) -> bool:
    """Whether there is something to read, or an end, within so many seconds. Not by select, which knows 1024 only."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))
