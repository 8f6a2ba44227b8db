"""Files and folders that appear whole or not at all: written to the side, synced, renamed. Knows no contents."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from creditflow.errors import InputError, first_line, says_disk_full


def write_whole(target: Path, write: Callable[[Path], object]) -> None:
    """`write` fills a file beside `target`, which then takes its place; what goes wrong leaves `target` as it was."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write(aside)
        _sync(aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    _sync(target.parent)


def write_named(target: Path, write: Callable[[Path], object], option: str) -> None:
    """`write_whole` for a file that an option of a command names; its folder is made. Raises InputError where it cannot
    be written, but for a full disk, which is no mistake of the input.
    """
    make_folder(target.parent, option)
    try:
        write_whole(target, write)
    except OSError as error:
        if says_disk_full(error):
            raise
        raise InputError(f"{option}: {target} cannot be written: {error.strerror or first_line(error)}") from error


def json_ready(value: Any) -> Any:
    """`value`, with null in place of numbers that JSON has no word for, in mappings and lists too."""
    if isinstance(value, Mapping):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_whole(target: Path, fill: Callable[[Path], object]) -> None:
    """`fill` fills a folder beside `target`, which is then renamed. If `target` is there by then, it is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(aside)
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        aside.chmod(0o755)
        aside.rename(target)
    except OSError:
        if not target.is_dir():  # another process was quicker, which is as good
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    _sync(target.parent)


def make_folder(path: Path, key: str) -> None:
    """The folder `path`, that the option `key` asks for; raises InputError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{key}: {path} cannot be made: {error.strerror}") from error


@contextmanager
def alone_in(folder: Path, refused: Exception) -> Iterator[None]:
    """While no other process is in here with the same folder, which is there. Raises `refused` where one is."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise refused from None
        yield


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
