"""Processes that end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "CREDITFLOW_PARENT"
"""The environment variable with the process id of the parent that the command is to end with."""
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Kill this process when `parent`, which started it, ends, however that ends. Linux only; nothing elsewhere."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before
        os._exit(1)


def end_with_parent() -> None:
    """Kill this process when the parent that `PARENT` names ends; processes that this one starts are not affected."""
    if (parent := os.environ.pop(PARENT, None)) is not None:
        end_with(int(parent))
