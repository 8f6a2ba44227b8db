"""Settings of the C library's allocator (glibc)."""

from __future__ import annotations

import ctypes
import platform

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MOST_MMAP_THRESHOLD = 32 << 20
"""The largest threshold that every version of glibc accepts, on 64 bits; see mallopt(3)."""


def set_malloc(mmap_threshold: int, trim_threshold: int) -> bool:
    """Set from how many bytes freed memory returns to the system; returns whether both settings took effect.

    `mmap_threshold`: pieces of this size return at once. `trim_threshold`: the end of the heap returns if it has this
    size. Without glibc nothing is set.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(_M_MMAP_THRESHOLD, mmap_threshold), mallopt(_M_TRIM_THRESHOLD, trim_threshold)] == [1, 1]
