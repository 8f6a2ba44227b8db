"""The registry of the back ends that run reward functions."""

from __future__ import annotations

from collections.abc import Sequence

from creditflow.errors import ConfigError, did_you_mean
from creditflow.rewards.execution import inline, processes, ray_actors
from creditflow.rewards.execution.calls import Backend, BackendOptions
from creditflow.rewards.registry import RewardFunction, leaves

__all__ = ["BACKENDS", "BackendOptions", "make_backend"]

BACKENDS = {record.name: record for record in (processes.BACKEND, ray_actors.BACKEND, inline.BACKEND)}
"""The back ends by name."""


def make_backend(
    name: str, functions: Sequence[RewardFunction], options: BackendOptions | None = None
) -> Backend | None:
    """Create the backend for these functions and the parts of compositions; no process starts yet.

    `process`: worker processes on this machine. `ray`: Ray actors, which run async functions too. `inline` (returns
    None): the manager's own thread, without time-outs, for debugging.
    Raises ConfigError for an unknown name, RewardError if a function cannot be sent to another process.
    """
    if name not in BACKENDS:
        raise ConfigError(f"reward.backend: expected {', '.join(BACKENDS)}, got {name!r}{did_you_mean(name, BACKENDS)}")
    return BACKENDS[name].create(list(leaves(functions)), options or BackendOptions())
