"""The types between manager and backend: a call of a reward function, its result, and the backend protocol."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from pydantic import ConfigDict

from creditflow._utils.awaits import lacks_await
from creditflow._utils.tracebacks import location, traceback_text
from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.values import REASON_CHARACTERS

Answered = Callable[[], None]
_MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class RewardCall:
    """One call of one reward function. Without a step, the function receives the trajectory alone."""

    function: RewardFunction
    trajectory: Trajectory
    step: Step | None = None
    steps: tuple[Step, ...] | None = None
    """Steps that a trajectory function scores; None: all."""
    agent: str | None = None
    """The agent whose own outcome a score is; None: the score of the step or the trajectory."""

    @property
    def arguments(self) -> tuple[Step, Trajectory] | tuple[Trajectory]:
        """Positional arguments of the function."""
        return (self.trajectory,) if self.step is None else (self.step, self.trajectory)

    def timeout(self, default: float) -> float:
        """Time limit of the call in seconds."""
        return self.function.timeout or default


@dataclass(frozen=True, slots=True)
class PlacedScore:
    """One of the scores that a call returned, without the function's weight and version."""

    score: Score
    place: int | str | None = None
    """The index of a step, the name of an agent, or None: the step or trajectory of the call."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Numbers that were returned beside the score, by name."""
    fault: str = ""
    """The error in the returned value: `shape`, `finite` or `range`; empty for a valid one."""


@dataclass(frozen=True, slots=True)
class Returned:
    """Result of a call: scores or an error. Neither: the function does not apply to its input."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)

    scores: tuple[PlacedScore, ...] = ()
    error: str = ""
    seconds: float = 0.0
    timed_out: bool = False
    traceback: str = ""
    """The full traceback, if the function raised."""

    @classmethod
    def raised(cls, error: BaseException, seconds: float = 0.0) -> Returned:
        """The result of a call that ended with an exception."""
        return cls(error=describe(error), seconds=seconds, traceback=traceback_text(error))

    @property
    def applies(self) -> bool:
        """Whether the function applies to its input."""
        return bool(self.scores or self.error)


class Backend(Protocol):
    """Runs calls outside of the manager's event loop."""

    def takes(self, function: RewardFunction) -> bool:
        """Whether this backend runs the function; the manager runs all other functions itself."""
        ...

    async def run(self, calls: Sequence[RewardCall], answered: Answered = lambda: None) -> list[Returned]:
        """Run the calls and return their results in order; an exception, time-out or dead process becomes an error.

        `answered`: called after each result, from any thread.
        """
        ...

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """Numbers counted by the functions that run here, since the previous call."""
        ...

    def close(self) -> None:
        """End every process that was started; the next `run` starts new ones."""
        ...


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


def add_counts(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add up the numbers of several processes or scorings; for a name with `_max` in it, the largest is kept."""
    total: dict[str, float] = {}
    for name, value in (item for numbers in counts for item in numbers.items()):
        before = total.get(name, value if "_max" in name else 0.0)
        total[name] = max(before, value) if "_max" in name else before + value
    return total


def describe(error: BaseException) -> str:
    """Format an exception as a score's reason, with the user's frames: `KeyError: 'labels' (team.py:42 in reward)`."""
    where = location(error)[-_LOCATION_CHARACTERS:]
    end = ("; an `await` is missing" if lacks_await(error) else "") + (f" ({where})" if where else "")
    return _message(error, REASON_CHARACTERS - len(end)) + end


_LOCATION_CHARACTERS = 120


def _message(error: BaseException, most: int) -> str:
    if isinstance(error, SystemExit):
        return f"it tried to end the process: sys.exit({error.code!r})"[:most]
    try:
        message = f": {error}"
    except Exception:  # __str__ is user code, too
        message = ""
    return " ".join(f"{type(error).__name__}{message}"[: 4 * REASON_CHARACTERS].split())[:most]


def too_late(timeout: float) -> str:
    """The reason of a score whose call exceeded its time limit."""
    return f"took longer than {timeout:g} s"
