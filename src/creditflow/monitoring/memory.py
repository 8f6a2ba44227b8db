"""Peak resident memory of this process over an interval. Device memory is not included."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_OWN = Path("/proc/self")
_GIB = 1 << 30


def forget_peak() -> None:
    """Reset the peak that `peak_gib` reports. Has no effect on systems without support."""
    with contextlib.suppress(OSError):  # not Linux, or forbidden by the kernel
        (_OWN / "clear_refs").write_text("5")


def peak_gib() -> float:
    """The largest resident memory in GiB since `forget_peak`, or of the whole process if a reset is unsupported."""
    try:
        lines = (_OWN / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / _GIB for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024) / _GIB
