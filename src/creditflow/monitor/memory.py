"""How much memory this process has held, from one moment to the next. Knows no device."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_OWN = Path("/proc/self")
_GIB = 1 << 30


def forget_peak() -> None:
    """Begin anew: from now on `peak_gib` is of what comes. Where the system cannot do that, nothing happens."""
    with contextlib.suppress(OSError):  # no Linux, or a kernel that is told not to
        (_OWN / "clear_refs").write_text("5")


def peak_gib() -> float:
    """The largest resident memory since `forget_peak`, or of the process where that cannot be told; GiB."""
    try:
        lines = (_OWN / "status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / _GIB for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most * (1 if sys.platform == "darwin" else 1024) / _GIB
