"""What a test asks the system about processes."""

import os
import time
from collections.abc import Callable
from pathlib import Path


def children(pid: int | None = None) -> dict[int, str]:
    """The processes that a process (default: this one) has started and that are still there, and their states."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == (pid or os.getpid()):
            found[int(stat.parent.name)] = fields[0]
    return found


def descendants(pid: int | None = None) -> set[int]:
    """The children of a process (default: this one), theirs, and so on."""
    return {found for child in children(pid) for found in {child, *descendants(child)}}


def alive(pid: int) -> bool:
    """Whether the process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def until(condition: Callable[[], object], seconds: float = 60.0, every: float = 0.01) -> None:
    """Waits for what must come; fails where it does not."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come about"
        time.sleep(every)
