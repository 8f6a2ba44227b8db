"""The backends that run reward functions, by name: `process`, `ray` and `inline`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from creditflow.errors import ConfigError, did_you_mean
from creditflow.rewards.execution.calls import Backend
from creditflow.rewards.execution.processes import WorkerPool
from creditflow.rewards.registry import RewardFunction, leaves

_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options of the backends."""

    num_workers: int | None = None
    """Number of processes or Ray actors; None: one per core, at most eight."""
    timeout: float = 60.0
    """Default time limit of a call in seconds."""
    max_in_flight: int = 256
    """Maximum number of concurrent calls of async functions, on Ray."""
    ray_init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `ray.init`."""

    @property
    def workers(self) -> int:
        """The resolved number of workers."""
        return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if self.num_workers is None else self.num_workers


def _inline(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend | None:
    return None


def _process(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend:
    return WorkerPool(functions, options.workers, options.timeout)


def _ray(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend:
    from creditflow.rewards.execution.ray_actors import RayBackend

    return RayBackend(functions, options.workers, options.timeout, options.max_in_flight, options.ray_init)


BACKENDS: dict[str, Callable[[Sequence[RewardFunction], BackendOptions], Backend | None]] = {
    "process": _process,
    "ray": _ray,
    "inline": _inline,
}


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
    return BACKENDS[name](list(leaves(functions)), options or BackendOptions())
