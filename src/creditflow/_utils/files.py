"""Atomic writes of files and folders: written under a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from creditflow.errors import InputError, first_line, says_disk_full


def cache_folder() -> Path:
    """The folder of files that can be made again: $CREDITFLOW_CACHE, else ~/.cache/creditflow."""
    return Path(os.environ.get("CREDITFLOW_CACHE") or Path.home() / ".cache" / "creditflow")


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, then rename it to `target`; on an error `target` stays as it was.

    Devices and pipes are written in place: a rename would replace them. A link stays, and its file is replaced.
    """
    if target.exists() and not target.is_file():
        write(target)
        return
    target = target.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write(aside)
        _sync(aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    _sync(target.parent)


def write_named(target: Path, write: Callable[[Path], object], option: str) -> None:
    """Call `write_whole` for a file named by a command's option; make its folder.

    Raises InputError if the file cannot be written. A full disk is not an input error: its OSError propagates.
    """
    make_folder(target.parent, option)
    try:
        write_whole(target, write)
    except OSError as error:
        if says_disk_full(error):
            raise
        raise InputError(f"{option}: {target} cannot be written: {error.strerror or first_line(error)}") from error


def write_json(target: Path, value: object) -> None:
    """Write a value as JSON, with null in place of NaN and infinities; see `write_whole`."""
    write_whole(target, lambda aside: aside.write_text(json.dumps(json_ready(value), indent=1, default=_plain) + "\n"))


def _plain(value: Any) -> Any:
    """A numpy number as Python's, any other object as text."""
    return json_ready(value.item()) if hasattr(value, "item") else str(value)


def json_ready(value: Any) -> Any:
    """`value` with None in place of NaN and infinities, in nested mappings and lists too."""
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_whole(target: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` fill a temporary folder, then rename it to `target`; an existing `target` is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        plain = aside / ".plain"
        plain.touch()
        mode = stat.S_IMODE(plain.stat().st_mode)  # of a new file, by the umask
        plain.unlink()
        fill(aside)
        for path in (*aside.rglob("*"), aside):
            if path.is_file() and not path.is_symlink():
                path.chmod(mode)  # safetensors writes files that only their owner may read, whatever the umask
            _sync(path)
        aside.chmod(0o755)
        aside.rename(target)
    except OSError as error:
        # Another process made it first, with the same result; an error of `fill` names no such destination.
        if error.filename2 != str(target) or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _sync(target.parent)


def remove_unfinished(target: Path) -> None:
    """Remove the temporary folders that killed calls of `make_whole` left; no such call may run now."""
    named = re.compile(rf"\.{re.escape(target.name)}-[a-z0-9_]{{8}}")  # the form of mkdtemp
    for path in target.parent.iterdir():
        if named.fullmatch(path.name) and path.is_dir() and stat.S_IMODE(path.stat().st_mode) == 0o700:
            shutil.rmtree(path, ignore_errors=True)


def make_folder(path: Path, key: str) -> None:
    """Make the folder `path`, which the option `key` names; raise InputError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be made: {error.strerror}") from error


@contextmanager
def alone_in(folder: Path, refused: Exception | None = None) -> Iterator[None]:
    """Hold an exclusive lock on an existing folder. If another process holds it, raise `refused`, or wait without one.

    The lock ends with the process, however that ends, and leaves no file. Where a file system has no locks, nothing is
    locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if refused else 0))
        except BlockingIOError:
            assert refused is not None
            raise refused from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
