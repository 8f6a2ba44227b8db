"""One call of a reward function, what it came back with, and what runs calls: the nouns between manager and backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from creditflow.reward.registry import RewardFunction
from creditflow.reward.values import REASON_CHARACTERS, Plain
from creditflow.tracebacks import location, traceback_text
from creditflow.trajectory import Step, Trajectory

Answered = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one reward function. Without a step, the function sees the trajectory alone."""

    function: RewardFunction
    trajectory: Trajectory
    step: Step | None = None
    steps: tuple[Step, ...] | None = None
    """Of a function of trajectories: the steps that it scores; None: all."""

    @property
    def arguments(self) -> tuple[Step, Trajectory] | tuple[Trajectory]:
        """What the function is called with."""
        return (self.trajectory,) if self.step is None else (self.step, self.trajectory)

    def timeout(self, default: float) -> float:
        """Seconds that it may take."""
        return self.function.timeout or default


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call came back with: a value (see `values.taken`), or an error."""

    value: Plain = None
    error: str = ""
    seconds: float = 0.0
    timed_out: bool = False
    traceback: str = ""
    """The whole one, where the function raised."""

    @classmethod
    def raised(cls, error: BaseException, seconds: float = 0.0) -> Returned:
        """A call that ended with an exception."""
        return cls(error=describe(error), seconds=seconds, traceback=traceback_text(error))


class Backend(Protocol):
    """Runs calls somewhere else than on the manager's own event loop."""

    def takes(self, function: RewardFunction) -> bool:
        """Whether it runs this function; the others run where the manager is."""
        ...

    async def run(self, calls: Sequence[Call], answered: Answered = lambda: None) -> list[Returned]:
        """What each call came back with, in order; an exception, a time-out or a dead process is an error there.

        `answered`: told of every answer as it comes, from whichever thread.
        """
        ...

    async def metrics(self) -> list[tuple[RewardFunction, dict[str, float]]]:
        """What the functions that run here counted themselves since they were last asked."""
        ...

    def close(self) -> None:
        """End every process that was started; the next `run` starts them again."""
        ...


def describe(error: BaseException) -> str:
    """An exception as a score's reason, with the user's frames: `KeyError: 'labels' (team.py:42 in reward)`."""
    where = location(error)[-_LOCATION_CHARACTERS:]
    return _said(error, REASON_CHARACTERS - len(where) - len(" ()")) + (f" ({where})" if where else "")


_LOCATION_CHARACTERS = 120


def _said(error: BaseException, most: int) -> str:
    if isinstance(error, SystemExit):
        return f"it tried to end the process: sys.exit({error.code!r})"[:most]
    try:
        said = f": {error}"
    except Exception:  # its __str__ is a user's code, too
        said = ""
    return " ".join(f"{type(error).__name__}{said}"[: 4 * REASON_CHARACTERS].split())[:most]


def too_late(timeout: float) -> str:
    """The reason of a score that did not come in time."""
    return f"took longer than {timeout:g} s"
