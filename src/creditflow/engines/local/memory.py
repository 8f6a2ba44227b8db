"""What training keeps of the memory that it no longer needs, and what goes back to the system. Knows no model."""

from __future__ import annotations

import ctypes
import platform

import torch

LARGE = 50_000_000
"""Parameters of a model from which on freed tensors go back to the system at once."""
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = {_M_MMAP_THRESHOLD: 1 << 20, _M_TRIM_THRESHOLD: 1 << 20}
_SMALL = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 30}


_largest = [0]
"""Parameters of the largest model so far: what glibc is told holds for the whole process."""


def suit(parameters: int, device: torch.device) -> bool:
    """From now on memory is kept and given back as suits a model of that size; whether that can be told here.

    Of a large model, tensors of a mebibyte and more go back as soon as they are freed: glibc keeps them for what comes,
    and they are of so many sizes that it holds up to twice what a pass needs. Of a small one, up to a gibibyte is kept:
    where each pass asks the system for it again, the pages that it clears take a fifteenth of the time. On the CPU,
    with glibc. Of several models, the largest decides.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False
    _largest[0] = max(_largest[0], parameters)
    tell = ctypes.CDLL(None).mallopt
    wanted = _LARGE if _largest[0] >= LARGE else _SMALL
    return [tell(what, size) for what, size in wanted.items()] == [1] * len(wanted)
