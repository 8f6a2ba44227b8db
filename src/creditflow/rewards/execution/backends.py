"""The back ends that run reward functions, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from creditflow.rewards.calls import Backend, BackendOptions
from creditflow.rewards.execution.processes import WorkerPool
from creditflow.rewards.execution.ray_actors import RayBackend
from creditflow.rewards.registry import RewardFunction, leaves

__all__ = ["BackendOptions", "make_backend"]


def make_backend(
    name: Literal["process", "ray", "inline"],
    functions: Sequence[RewardFunction],
    options: BackendOptions | None = None,
) -> Backend | None:
    """Create the backend for these functions and the parts of sums; no process starts yet.

    `process`: worker processes on this machine. `ray`: Ray actors, which run async functions too. `inline` (returns
    None): the manager's own thread, without time-outs, for debugging.
    Raises RewardError if a function cannot be sent to another process.
    """
    options, parts = options or BackendOptions(), list(leaves(functions))
    if name == "process":
        return WorkerPool(parts, options.workers, options.timeout)
    if name == "ray":
        return RayBackend(parts, options)
    return None
