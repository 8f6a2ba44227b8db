"""The sandbox interface: three methods, their limits, result and errors. Independent of back ends and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol

from creditflow.errors import ConfigError, CreditflowError, InputError

Limit = Literal["wall", "cpu", "memory", "output", "file_size", "processes"]

_MOST: dict[str, float] = {
    "wall_s": 1e6,
    "cpu_s": 1e6,
    "memory_mb": 2**24,
    "processes": 2**22,
    "open_files": 2**20,
    "file_mb": 2**24,
    "disk_mb": 2**24,
    "files": 2**31,
    "output_bytes": 2**30,
}
"""Largest accepted limits. A larger value is a mistake or exceeds the kernel's maximum: 11 days, 16 TiB, the largest
pid, `fs.nr_open`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run. A program that exceeds one is stopped; `Result.limit` names it if it is known."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """CPU seconds of each process; all together are bounded by `wall_s` times the cores."""
    memory_mb: int = 512
    """Memory of all processes together with a cgroup; memory of each process without."""
    processes: int = 32
    """Processes and threads alive at a time."""
    open_files: int = 256
    """Open files of each process."""
    file_mb: int = 16
    """Size of the largest file."""
    disk_mb: int = 64
    """Total size of all files written."""
    files: int = 4096
    """Number of files and folders, if the back end can count them."""
    output_bytes: int = 1_000_000
    """Size of stdout and stderr together, and of each kept file."""

    def __post_init__(self) -> None:
        """Raise SandboxOptionError for a limit that is not positive or too large; seconds may be fractional."""
        for field in fields(self):
            value, most = getattr(self, field.name), _MOST[field.name]
            kind, types = ("a number", (int, float)) if field.name.endswith("_s") else ("a whole number", (int,))
            fits = isinstance(value, types) and not isinstance(value, bool) and 0 < value <= most
            expect_option(fits, f"sandbox limit {field.name}", f"{kind} above 0 and at most {most:,.0f}", value)


@dataclass(frozen=True, slots=True)
class Result:
    """Exit and output of a program. All of it is under the program's control: hostile input."""

    exit_code: int | None
    """Exit code; None if a signal ended the program, or if a limit ended it or one of its processes."""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    limit: Limit | None = None
    """The limit that ended the program, or one of its processes (memory). Earlier output is in stdout and stderr."""
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0 and met no limit."""
        return self.exit_code == 0 and self.limit is None


class SandboxError(CreditflowError):
    """The sandbox itself failed: the score is `failed`. A program cannot cause this error."""


class SandboxOptionError(ConfigError, ValueError):
    """An unknown back end, limit or option, or an invalid value of one."""


def expect_option(fits: object, key: str, kind: str, value: object) -> None:
    """Raise SandboxOptionError for the value of an option that does not fit; `kind`: the expected values in words."""
    if not fits:
        raise SandboxOptionError(f"{key}: expected {kind}, got {value!r}")


class SandboxUnavailable(SandboxError, InputError):
    """The back end does not work here; the message explains how to install it. Nothing runs unprotected instead."""


class Sandbox(Protocol):
    """A box for untrusted programs. Thread-safe; runs are isolated from each other.

    Every run gets fresh processes and a fresh file system: its working folder holds the files written so far and
    nothing else. When `run` returns, no process and no file of the run is left.
    """

    @property
    def limits(self) -> Limits:
        """The limits of every run."""
        ...

    def run(self, command: Sequence[str], *, stdin: bytes = b"", keep: Sequence[str] = ()) -> Result:
        """Run a command and wait for its end; `python` is the box's own interpreter.

        `keep`: files (relative to the working folder) for a later `read` in the same thread, until its next run. A
        program that exceeds a limit raises nothing: `Result.limit` names the limit.

        Raises SandboxUnavailable if the back end is missing or not permitted here, SandboxError if it failed (the box
        could not be set up, the service did not answer), ValueError for an empty or too long command, a path outside
        the working folder, or input and files above 64 MB, `disk_mb` or half of `memory_mb`, and TypeError for input
        that is not bytes.
        """
        ...

    def write(self, path: str, content: bytes) -> None:
        """Write a file for all later runs. Each run gets a copy in its working folder; its changes are discarded.

        Raises ValueError if the path leaves the working folder, TypeError if the content is not bytes, SandboxError if
        it is larger than `file_mb`.
        """
        ...

    def read(self, path: str) -> bytes:
        """Read a kept file of this thread's last run.

        Raises FileNotFoundError if the run left no plain file of that name, ValueError if the path was not in `keep` or
        the file is larger than `output_bytes`.
        """
        ...


@dataclass(frozen=True, slots=True)
class SandboxBackend:
    """The record of a back end: a file in `sandbox/backends/`, or an entry point of `creditflow.sandboxes`, has one."""

    name: str
    """Value of `reward.sandbox.backend` and of `creditflow sandbox check --backend`."""
    create: Callable[..., Sandbox]
    """Called as `create(limits=Limits(...), **options)`; its other parameters are the options of the back end.

    Raises SandboxOptionError for an invalid option, SandboxUnavailable if the back end does not work on this machine.
    """
