"""Helpers that list the processes and file descriptors of the system."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

HANG_S = 300.0
"""The longest wait for a thing that takes moments: a busy machine may need minutes, and only a hang reaches it."""


def children(pid: int | None = None) -> dict[int, str]:
    """Return the processes that a process (default: this one) has started and that still exist, and their states."""
    pids = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (pid or os.getpid()):
            pids[int(stat.parent.name)] = fields[0]
    return pids


def descendants(pid: int | None = None) -> set[int]:
    """Return the children of a process (default: this one), their children, and so on."""
    return {below for child in children(pid) for below in {child, *descendants(child)}}


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors() -> int:
    """The number of open descriptors, without those of objects that other tests left to the garbage collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def until(condition: Callable[[], object], seconds: float = HANG_S, every: float = 0.01) -> None:
    """Wait until a condition holds; fail if it does not."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(every)
