"""What a sandbox is: three methods, their limits, their result and their errors. Knows no back end and no reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
"""Above these a limit is a mistake, or more than the kernel takes: 11 days, 16 TiB, its largest pid, `fs.nr_open`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Who exceeds one is stopped; `Result.limit` says which, where it can be known."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    """Of each process; all together are bounded by `wall_s` times the cores."""
    memory_mb: int = 512
    """Of all processes together where a cgroup can be had; else of each one."""
    processes: int = 32
    """Processes and threads alive at a time."""
    open_files: int = 256
    """Of each process."""
    file_mb: int = 16
    """The largest file."""
    disk_mb: int = 64
    """Everything written, in all."""
    files: int = 4096
    """Files and folders, where the back end can count them."""
    output_bytes: int = 1_000_000
    """Of stdout and stderr together, and of each file that is kept."""

    def __post_init__(self) -> None:
        """Refuse what is no positive number, or too large (SandboxOptionError); seconds may have a fraction."""
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name in ("wall_s", "cpu_s") else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
                kind = "a number" if float in kinds else "a whole number"
                raise SandboxOptionError(f"sandbox limit {field.name}: {kind} above 0 expected, {value!r} came")
            if value > _MOST[field.name]:
                raise SandboxOptionError(
                    f"sandbox limit {field.name}: at most {_MOST[field.name]:,.0f}, {value!r} came"
                )


@dataclass(frozen=True, slots=True)
class Result:
    """What a program did. All of it is the program's word: hostile input."""

    exit_code: int | None
    """What it exited with; None where a signal ended it, or a limit it or a part of it."""
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    limit: Limit | None = None
    """The limit that ended it, or a process of it (memory); what came until then is in stdout and stderr."""
    signal: int | None = None

    @property
    def ok(self) -> bool:
        """It ended by itself, with 0."""
        return self.exit_code == 0 and self.limit is None


class SandboxError(CreditflowError):
    """The sandbox itself failed: the score is `failed`, which is never the program's doing."""


class SandboxOptionError(ConfigError, ValueError):
    """A back end, a limit or an option that there is not, or with a value that it cannot have."""


class SandboxUnavailable(SandboxError, InputError):
    """There is no such back end here; the message says how to get it. Never answered by running unprotected."""


class Sandbox(Protocol):
    """A box for untrusted programs. One object may be used from several threads; runs do not see one another.

    Every run gets fresh processes and a fresh file system: the files written so far, nothing else, in the working
    folder. Nothing that a run leaves behind is alive, or on a disk, when `run` returns.
    """

    @property
    def limits(self) -> Limits:
        """In force for every run."""
        ...

    def run(self, command: Sequence[str], *, stdin: bytes = b"", keep: Sequence[str] = ()) -> Result:
        """Run a command, `python` being the box's own interpreter, and wait for its end.

        `keep`: files (relative to the working folder) that `read` can give afterwards; those of the last run of this
        thread. A program that exceeds a limit is no error: the result says so.

        Raises SandboxUnavailable where the back end is missing or not allowed to work here, SandboxError where it
        failed (the box could not be set up, the service did not answer), ValueError for an empty or too long command, a
        path that leaves the working folder, or more input and files than 64 MB, `disk_mb` or half of `memory_mb`, and
        TypeError for input that is not bytes.
        """
        ...

    def write(self, path: str, content: bytes) -> None:
        """A file that every later run finds in its working folder (a copy: what a run does to it is gone after it).

        Raises ValueError where the path leaves the working folder, TypeError where the content is not bytes,
        SandboxError where it is larger than a file may be.
        """
        ...

    def read(self, path: str) -> bytes:
        """What the last run of this thread left in a file that it was told to keep.

        Raises FileNotFoundError where it left none (or a thing that is no plain file), ValueError where it was not told
        to keep it or where it was larger than `output_bytes`.
        """
        ...
