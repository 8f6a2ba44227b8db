"""Where reward functions run, by name: `process`, `ray` or `inline`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from creditflow.errors import ConfigError, did_you_mean
from creditflow.reward.calls import Backend
from creditflow.reward.pool import WorkerPool
from creditflow.reward.registry import RewardFunction, leaves

_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What the backends are made with."""

    num_workers: int | None = None
    """Processes, or Ray actors; None: one per core, at most eight."""
    timeout: float = 60.0
    """Seconds for each call of a function that has none of its own."""
    max_in_flight: int = 256
    """Calls of async functions that wait at a time, on Ray."""
    ray_init: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `ray.init`."""

    @property
    def workers(self) -> int:
        """How many, resolved."""
        return min(_MOST_WORKERS, len(os.sched_getaffinity(0))) if self.num_workers is None else self.num_workers


def _inline(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend | None:
    return None


def _process(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend:
    return WorkerPool(functions, options.workers, options.timeout)


def _ray(functions: Sequence[RewardFunction], options: BackendOptions) -> Backend:
    from creditflow.reward.ray_backend import RayBackend

    return RayBackend(functions, options.workers, options.timeout, options.max_in_flight, options.ray_init)


BACKENDS: dict[str, Callable[[Sequence[RewardFunction], BackendOptions], Backend | None]] = {
    "process": _process,
    "ray": _ray,
    "inline": _inline,
}


def make_backend(
    name: str, functions: Sequence[RewardFunction], options: BackendOptions | None = None
) -> Backend | None:
    """The backend for these functions and the parts that they are composed of; starts nothing yet.

    `process`: worker processes on this machine. `ray`: Ray actors, for async functions too. `inline` (None): the
    manager's own thread, without time-outs; for a debugger.
    Raises ConfigError for another name, RewardError where a function cannot be sent to another process.
    """
    if name not in BACKENDS:
        raise ConfigError(f"reward.backend: expected {', '.join(BACKENDS)}, got {name!r}{did_you_mean(name, BACKENDS)}")
    return BACKENDS[name](list(leaves(functions)), options or BackendOptions())
