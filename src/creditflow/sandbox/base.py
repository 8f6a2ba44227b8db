"""The sandbox interface: two methods, their limits, result and errors. Independent of back ends and rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field

from creditflow.errors import CreditflowError, InputError

Limit = Literal["wall", "cpu", "memory", "output", "file_size", "processes"]

Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""At most 11 days. A larger limit is a mistake, or exceeds the kernel's maximum, as for the other limits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one run. A program that exceeds one is stopped; `Result.limit` names it if it is known."""

    wall_s: Seconds = 10.0
    """Seconds from start to end."""
    cpu_s: Seconds = 10.0
    """CPU seconds of each process; all together are bounded by `wall_s` times the cores."""
    memory_mb: Annotated[int, Field(gt=0, le=2**24)] = 512
    """Memory of each process; with a cgroup also of all processes together."""
    processes: Annotated[int, Field(gt=0, le=2**22)] = 32
    """Processes and threads alive at a time."""
    open_files: Annotated[int, Field(gt=0, le=2**20)] = 256
    """Open files of each process."""
    file_mb: Annotated[int, Field(gt=0, le=2**24)] = 16
    """Size of the largest file."""
    disk_mb: Annotated[int, Field(gt=0, le=2**24)] = 64
    """Total size of all files written."""
    files: Annotated[int, Field(gt=0, le=2**31)] = 4096
    """Number of files and folders, if the back end can count them."""
    output_bytes: Annotated[int, Field(gt=0, le=2**30)] = 1_000_000
    """Size of stdout and stderr together."""


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

    def run(self, command: Sequence[str], *, stdin: bytes = b"") -> Result:
        """Run a command and wait for its end; `python` is the box's own interpreter.

        A program that exceeds a limit raises nothing: `Result.limit` names the limit.

        Raises SandboxUnavailable if the back end is missing or not permitted here, SandboxError if it failed (the box
        could not be set up, the service did not answer), ValueError for an empty or too long command, or input and
        files above 64 MB, `disk_mb` or half of `memory_mb`, and TypeError for input that is not bytes.
        """
        ...

    def write(self, path: str, content: bytes) -> None:
        """Write a file for all later runs. Each run gets a copy in its working folder; its changes are discarded.

        Raises ValueError if the path leaves the working folder, TypeError if the content is not bytes, SandboxError if
        it is larger than `file_mb`.
        """
        ...


@dataclass(frozen=True, slots=True)
class SandboxBackend:
    """The record of a back end: a file in `sandbox/backends/`, or an entry point of `creditflow.sandboxes`, has one."""

    name: str
    """Value of `reward.sandbox.backend` and of `creditflow sandbox check --backend`."""
    create: Callable[..., Sandbox]
    """Called as `create(limits=Limits(...), **options)`; its other parameters are the options of the back end.

    Options are checked against their type hints before the call. Raises ConfigError for an invalid option,
    SandboxUnavailable if the back end does not work on this machine.
    """
