"""Bound the number of files in a box with the kernel's mount calls, from outside. Independent of the back ends.

Bubblewrap sets the size of a tmpfs but not its number of inodes, and one inode takes a kilobyte that the size does not
count. A process with CAP_SYS_ADMIN over the machine can set the number afterwards; without it, no process can, neither
inside nor outside the box.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

_FSCONFIG, _FSPICK = 431, 433
"""System call numbers, the same on all architectures with a bubblewrap package."""
_CLOEXEC, _EMPTY_PATH = 1, 8
_SET_STRING, _RECONFIGURE = 1, 7


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


def bound_inodes(pid: int, inodes: int) -> None:
    """Set the number of files and folders of the tmpfs at /tmp of process `pid`, which is not our own /tmp.

    Raises ProcessLookupError if the process has ended, and OSError: PermissionError without CAP_SYS_ADMIN, other errors
    before Linux 5.2 or for other file systems.
    """
    try:
        fd = os.open(f"/proc/{pid}/root/tmp", os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} has ended") from error
    try:
        if os.fstat(fd).st_dev == Path("/tmp").stat().st_dev:
            raise ProcessLookupError(f"process {pid} has ended, and another one has its number")
        context = _syscall()(_FSPICK, fd, b"", _CLOEXEC | _EMPTY_PATH)
    finally:
        os.close(fd)
    try:
        _syscall()(_FSCONFIG, context, _SET_STRING, b"nr_inodes", str(inodes).encode(), 0)
        _syscall()(_FSCONFIG, context, _RECONFIGURE, None, None, 0)
    finally:
        os.close(context)
