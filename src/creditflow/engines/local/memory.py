"""What training leaves to the system of the memory that it no longer needs. Knows the C library, and no model."""

from __future__ import annotations

import ctypes
import platform

import torch

LARGE = 50_000_000
"""Parameters of a model from which on it pays."""
_M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""


def keep_little(parameters: int, device: torch.device) -> bool:
    """From now on tensors of a mebibyte and more go back to the system as soon as they are freed; whether that is so.

    glibc keeps them for what comes, and they are of so many sizes that it holds up to twice what a pass of a large
    model needs. Not for a small one: asking the system each time costs it half of its speed. On the CPU, with glibc.
    """
    if device.type != "cpu" or parameters < LARGE or platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20))
