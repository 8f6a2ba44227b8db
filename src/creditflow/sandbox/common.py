"""Shared parts of the back ends: commands, paths and written files.

Independent of the back ends. Nothing here touches a disk.
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from creditflow.sandbox.base import Limits, Result, SandboxError

MB = 1024 * 1024
_INPUT_MB = 64
"""Largest size of a run's input and files together: they pass through the memory of this process and of the box."""
_PATH_BYTES = 1024
_NAME_BYTES = 255


def inside(path: str) -> str:
    """Normalize a path relative to the working folder: drop `.` and doubled slashes. Raises ValueError if it leaves it.

    `..` is refused in every position: its meaning depends on links, which only the box could follow.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or path.endswith("/") or ".." in parts:
        raise ValueError(f"path {path[:80]!r} is not a file inside the working folder")
    if not path.isprintable() or len(path.encode()) > _PATH_BYTES or len(max(parts, key=len).encode()) > _NAME_BYTES:
        raise ValueError(f"path {path[:80]!r} is too long, or has characters that no file name should have")
    return "/".join(parts)


def by_signal(status: int | None) -> int | None:
    """The signal N of an exit code 128 + N, the encoding of shells and bubblewrap; else None."""
    return status - 128 if status is not None and 128 < status <= 128 + signal.SIGRTMAX else None


def _bytes(what: str, value: object) -> bytes:
    """Copy a bytes-like value. Raises TypeError for any other type: `bytes(7)` would be seven zeros."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what}: expected bytes, got {type(value).__name__}")
    return bytes(value)


class Box(ABC):
    """Base class of the back ends: all of `Sandbox` except the abstract method `_run`."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._files: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def limits(self) -> Limits:
        """The limits of every run."""
        return self._limits

    def run(self, command: Sequence[str], *, stdin: bytes = b"") -> Result:
        """See `Sandbox.run`."""
        if isinstance(command, (str, bytes)) or not (command and command[0]):
            raise ValueError(f"command: expected a list of words, got {command!r}")
        content = _bytes("stdin", stdin)
        with self._lock:
            files = dict(self._files)
        # Half of the memory: the box holds them in its memory, too.
        most = min(_INPUT_MB * MB, self._limits.disk_mb * MB, self._limits.memory_mb * MB // 2)
        size = len(content) + sum(map(len, files.values()))
        if size > most:
            raise ValueError(f"stdin and files: {size} bytes in all are more than a run may have ({most})")
        return self._run(list(command), content, files)

    def write(self, path: str, content: bytes) -> None:
        """See `Sandbox.write`. Also raises SandboxError for more files, folders or bytes than a run may have."""
        path, content = inside(path), _bytes(f"content of {path!r}"[:80], content)
        if len(content) > self._limits.file_mb * MB:
            raise SandboxError(
                f"{path!r}: {len(content)} bytes are more than a file may have ({self._limits.file_mb} MB)"
            )
        with self._lock:
            files = {**self._files, path: content}
            folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
            if clashes := folders & files.keys():
                raise ValueError(f"{path!r}: {min(clashes)!r} cannot be both a file and a folder")
            inodes = len(files) + len(folders) - 1  # without the working folder
            if inodes > self._limits.files or sum(map(len, files.values())) > self._limits.disk_mb * MB:
                most = f"{self._limits.files} files and folders, and {self._limits.disk_mb} MB"
                raise SandboxError(f"{path!r}: a run may have {most} in all")
            self._files = files

    @abstractmethod
    def _run(self, command: list[str], stdin: bytes, files: Mapping[str, bytes]) -> Result:
        """Run a checked command with these files."""
