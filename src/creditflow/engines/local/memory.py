"""The memory that the process keeps after it is freed: settings of glibc's allocator, and its release."""

from __future__ import annotations

import ctypes
import platform
import resource
from pathlib import Path

import torch

LARGE = 50_000_000
"""The number of model parameters from which large freed tensors are returned to the system at once."""
SPARE = 1 << 30
"""The growth of resident memory, in bytes, after which freed memory is returned between two micro-batches."""
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = {_M_MMAP_THRESHOLD: 4 << 20, _M_TRIM_THRESHOLD: 1 << 30}
_SMALL = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: 1 << 30}


_largest = [0]
"""The parameters of the largest model so far, because the settings apply to the whole process."""


def suit(parameters: int, device: torch.device) -> bool:
    """Set the allocator for a model of this size; returns whether the settings took effect (CPU and glibc only).

    Large models: tensors of 4 MiB and more return to the system when freed; smaller ones are kept, up to 1 GiB. With a
    bound of 1 MiB, clearing newly requested pages took a fifth of an update's processor time; without a bound, glibc
    keeps large tensors of varying sizes, and a pass holds more memory. Small models: up to 1 GiB is kept. With several
    models, the largest decides.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        return False  # `release` does nothing then
    _largest[0] = max(_largest[0], parameters)
    tell = ctypes.CDLL(None).mallopt
    settings = _settings(_largest[0])
    return [tell(what, size) for what, size in settings.items()] == [1] * len(settings)


def release(spare: int = 0) -> None:
    """Return freed memory to the system, if `suit` has been called for a large model.

    By itself, glibc returns only the end of the heap, and the pieces that are free between others add up. `spare`: do
    nothing if resident memory has grown by less than this since the last release, in bytes.
    """
    if _largest[0] < LARGE or resident() - _after_release[0] < spare:
        return
    ctypes.CDLL(None).malloc_trim(0)
    _after_release[0] = resident()


_after_release = [0]


def resident() -> int:
    """The resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def returned_from(parameters: int) -> int:
    """The size in bytes from which freed tensors of a model of this size return to the system at once."""
    return _settings(parameters)[_M_MMAP_THRESHOLD]


def _settings(parameters: int) -> dict[int, int]:
    return _LARGE if parameters >= LARGE else _SMALL
