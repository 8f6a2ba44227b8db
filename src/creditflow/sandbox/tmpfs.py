"""Bound the number of files in a box with the kernel's mount calls, from outside. Independent of the back ends.

Bubblewrap sets the size of a tmpfs but not its number of inodes, and one inode takes a kilobyte that the size does not
count. A process with CAP_SYS_ADMIN over the machine can set the number afterwards; without it, no process can, neither
inside nor outside the box.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable

_FSCONFIG, _FSPICK = 431, 433
"""System call numbers, the same on all architectures with a bubblewrap package."""
_CLOEXEC, _EMPTY_PATH = 1, 8
_SET_STRING, _RECONFIGURE = 1, 7
_POLL_S = 0.0004


@functools.cache
def _syscall() -> Callable[..., int]:
    import ctypes

    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long

    def checked(number: int, *arguments: int | bytes | None) -> int:
        wide: list[object] = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
        result = int(call(ctypes.c_long(number), *wide))
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    return checked


def bound_inodes(fd: int, inodes: int) -> None:
    """Set the number of files and folders of the tmpfs that holds the folder `fd` (O_PATH is sufficient).

    Raises OSError: PermissionError without CAP_SYS_ADMIN, other errors before Linux 5.2 or for other file systems.
    """
    context = _syscall()(_FSPICK, fd, b"", _CLOEXEC | _EMPTY_PATH)
    try:
        _syscall()(_FSCONFIG, context, _SET_STRING, b"nr_inodes", str(inodes).encode(), 0)
        _syscall()(_FSCONFIG, context, _RECONFIGURE, None, None, 0)
    finally:
        os.close(context)


def bound_files(pid: int, path: str, size: int, inodes: int, wait_s: float) -> None:
    """Bound the tmpfs of `size` bytes that process `pid` is about to mount at `path` in its own file system.

    Raises OSError (see `bound_inodes`), ProcessLookupError if the process ends, TimeoutError if no tmpfs appears.
    """
    inside = f"/proc/{pid}/root{path}"
    deadline = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(inside, os.O_PATH | os.O_CLOEXEC)
            try:
                # Until bwrap changes its root, the path leads to the machine's own folder of that name.
                if os.fstat(fd).st_dev != _device(path) and _size(fd) == size:
                    bound_inodes(fd, inodes)
                    return
            finally:
                os.close(fd)
        os.kill(pid, 0)
        if time.monotonic() > deadline:
            raise TimeoutError(f"no tmpfs of {size} bytes appeared at {path} within {wait_s:.0f} s")
        time.sleep(_POLL_S)


def _device(path: str) -> int:
    try:
        return os.stat(path).st_dev  # noqa: PTH116
    except FileNotFoundError:
        return -1


def _size(fd: int) -> int:
    usage = os.fstatvfs(fd)
    return usage.f_blocks * usage.f_frsize
