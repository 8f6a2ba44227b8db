"""The back ends that run reward functions, by name."""

from __future__ import annotations

from collections.abc import Sequence

from creditflow.errors import ConfigError, did_you_mean
from creditflow.rewards.calls import Backend, BackendOptions
from creditflow.rewards.execution.processes import WorkerPool
from creditflow.rewards.execution.ray_actors import RayBackend
from creditflow.rewards.registry import RewardFunction, leaves

__all__ = ["BACKENDS", "BackendOptions", "make_backend"]

BACKENDS = ("process", "ray", "inline")


def make_backend(
    name: str, functions: Sequence[RewardFunction], options: BackendOptions | None = None
) -> Backend | None:
    """Create the backend for these functions and the parts of sums; no process starts yet.

    `process`: worker processes on this machine. `ray`: Ray actors, which run async functions too. `inline` (returns
    None): the manager's own thread, without time-outs, for debugging.
    Raises ConfigError for an unknown name, RewardError if a function cannot be sent to another process.
    """
    options, parts = options or BackendOptions(), list(leaves(functions))
    if name == "process":
        return WorkerPool(parts, options.workers, options.timeout)
    if name == "ray":
        return RayBackend(parts, options)
    if name == "inline":
        return None
    raise ConfigError(f"reward.backend: expected {', '.join(BACKENDS)}, got {name!r}{did_you_mean(name, BACKENDS)}")
