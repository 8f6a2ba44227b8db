"""Shared parts of the back ends: paths, written files, kept files and the shell script that prints them.

Independent of the back ends. File names and contents are hostile input; nothing here touches a disk.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from creditflow.sandbox.base import Limits, Result, SandboxError

MB = 1024 * 1024
_INPUT_MB = 64
"""Largest size of a run's input and files together: they pass through the memory of this process and of the box."""
END_ALL = """kill -KILL -1 2>/dev/null
while kill -0 -1 2>/dev/null && command eval '(:)' 2>/dev/null; do :; done"""
"""Script for the shell that is pid 1: kill all other processes and wait until they are dead. A killed process still
completes its current system call. Waiting for a child process, `(:)`, also reaps the orphans; if the process limit
leaves no room for that child, the loop ends (`command eval` keeps the shell alive)."""
_PATH_BYTES = 1024
_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A kept file of a run."""

    content: bytes | None = None
    """Content of the file; None if the run left no plain file of that name."""
    too_large: bool = False


def inside(path: str) -> str:
    """Normalize a path relative to the working folder: drop `.` and doubled slashes. Raises ValueError if it leaves it.

    `..` is refused in every position: its meaning depends on links, which only the box could follow.
    """
    if not isinstance(path, str):
        raise ValueError(f"path {path!r}: expected text, got {type(path).__name__}")
    shown = repr(path[:80])
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or path.startswith("/") or path.endswith("/") or ".." in parts:
        raise ValueError(f"path {shown} is not a file inside the working folder")
    if not path.isprintable():
        raise ValueError(f"path {shown} has characters that no file name should have")
    encoded = [part.encode() for part in parts]
    if sum(map(len, encoded)) + len(encoded) > _PATH_BYTES or max(map(len, encoded)) > _NAME_BYTES:
        raise ValueError(f"path {shown}... is too long")
    return "/".join(parts)


def checked_command(command: Sequence[str]) -> list[str]:
    """The command as a list. Raises ValueError if it is empty, a single string, or has a NUL or a lone surrogate."""
    if isinstance(command, (str, bytes)) or not command:
        raise ValueError(f"command: expected a list of words, got {command!r}")
    for word in command:
        if not isinstance(word, str):
            raise ValueError(f"command: expected text, got {type(word).__name__}")
        if "\0" in word:
            raise ValueError("command: a word has a NUL character")
        word.encode()  # UnicodeEncodeError is a ValueError
    if not command[0]:
        raise ValueError("command: its first word is empty")
    return list(command)


def hand_out(names: Sequence[str], most: int, encoder: str) -> str:
    """A shell script that prints a line for each name: `-`, or `+` and the file's content, encoded by `encoder`.

    A file larger than `most` bytes is cut to `most` + 1. The names come from `inside`: they are printable and relative,
    so only a quote could end one.
    """
    quoted = " ".join("'./" + name.replace("'", "'\\''") + "'" for name in names)
    return f"""
for name in {quoted}; do
  if [ -f "$name" ] && [ ! -L "$name" ]
  then printf +; head -c {most + 1} "$name" | {encoder}; echo
  else echo -
  fi
done"""


def handed_out(names: Sequence[str], lines: Sequence[bytes], most: int) -> dict[str, KeptFile]:
    """Parse the lines that `hand_out` printed. A malformed line, or the last (cut off) line, means a missing file."""
    kept_files = {}
    for name, line in zip(names, lines[:-1], strict=False):
        if line.startswith(b"+"):
            with contextlib.suppress(ValueError):
                content = base64.b64decode(line[1:], validate=True)
                kept_files[name] = KeptFile(too_large=True) if len(content) > most else KeptFile(content)
    return kept_files


def handed_out_bytes(names: int, most: int) -> int:
    """Largest size of the output of `hand_out`, in bytes."""
    return names * (4 * (most + 3) // 3 + 8)


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
        self._last = threading.local()

    @property
    def limits(self) -> Limits:
        """The limits of every run."""
        return self._limits

    def run(self, command: Sequence[str], *, stdin: bytes = b"", keep: Sequence[str] = ()) -> Result:
        """See `Sandbox.run`."""
        words = checked_command(command)
        if isinstance(keep, str):
            raise ValueError(f"keep: expected a list of paths, got {keep!r}")
        paths = {path: inside(path) for path in keep}
        self._last.kept = {}
        content = _bytes("stdin", stdin)
        with self._lock:
            files = dict(self._files)
        # Half of the memory: the box holds them in its memory, too.
        most = min(_INPUT_MB * MB, self._limits.disk_mb * MB, self._limits.memory_mb * MB // 2)
        size = len(content) + sum(map(len, files.values()))
        if size > most:
            raise ValueError(f"stdin and files: {size} bytes in all are more than a run may have ({most})")
        result, kept = self._run(words, content, tuple(dict.fromkeys(paths.values())), files)
        self._last.kept = {path: kept.get(path, KeptFile()) for path in paths.values()}
        return result

    def write(self, path: str, content: bytes) -> None:
        """See `Sandbox.write`. Also raises SandboxError for more files, or more bytes in total, than a run may have."""
        path, content = inside(path), _bytes(f"content of {path!r}"[:80], content)
        if len(content) > self._limits.file_mb * MB:
            raise SandboxError(
                f"{path!r}: {len(content)} bytes are more than a file may have ({self._limits.file_mb} MB)"
            )
        with self._lock:
            others = {name: len(held) for name, held in self._files.items() if name != path}
            for name in others:
                if name.startswith(f"{path}/") or path.startswith(f"{name}/"):
                    raise ValueError(f"{path!r} and {name!r} cannot both be files")
            if len(others) + 1 > self._limits.files or sum(others.values()) + len(content) > self._limits.disk_mb * MB:
                raise SandboxError(
                    f"{path!r}: a run may have {self._limits.files} files and {self._limits.disk_mb} MB in all"
                )
            self._files[path] = content

    def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        path = inside(path)
        kept: Mapping[str, KeptFile] = getattr(self._last, "kept", {})
        if path not in kept:
            raise ValueError(f"{path!r}: the last run was not told to keep it")
        if kept[path].too_large:
            raise ValueError(f"{path!r} is larger than {self._limits.output_bytes} bytes")
        content = kept[path].content
        if content is None:
            raise FileNotFoundError(f"{path!r}: the last run left no plain file of that name")
        return content

    @abstractmethod
    def _run(
        self, command: list[str], stdin: bytes, keep: tuple[str, ...], files: Mapping[str, bytes]
    ) -> tuple[Result, dict[str, KeptFile]]:
        """Run a checked command with these files. A name missing from the kept files counts as a missing file."""
