"""Runs reward functions over trajectories: fills `step.scores` and `trajectory.outcome`, and reports.

A function that fails makes a score that says so, never a reward of zero. This module must not know how functions are
declared or found, nor what becomes of the scores.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real

from creditflow.errors import TooManyFailedScores
from creditflow.reward.registry import Level, RewardFunction
from creditflow.trajectory import Score, Step, Trajectory

_SHOWN_REASONS = 3
_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one reward function. Without a step, the function sees the trajectory alone."""

    function: RewardFunction
    trajectory: Trajectory
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    """What a call came back with: a value of whatever type, or an error."""

    value: object = None
    error: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FunctionReport:
    """What one function did in one scoring."""

    name: str
    level: Level
    matched: int
    """Steps (for the outcome: trajectories) that it had to score."""
    failed: int
    mean: float
    """Of the scores that are ok, in the function's own range; NaN without any."""
    seconds: float
    """Sum over its calls; those of async functions overlap."""
    reasons: tuple[str, ...]
    """The first distinct reasons of failure, each with the first id that it came with."""

    @property
    def failed_frac(self) -> float:
        """0 to 1."""
        return self.failed / self.matched if self.matched else 0.0


@dataclass(frozen=True, slots=True)
class ScoringReport:
    """What one call of `RewardManager.score` did."""

    functions: tuple[FunctionReport, ...]
    seconds: float
    """Wall clock of the whole scoring."""

    @property
    def failed_frac(self) -> float:
        """Share of all scores, sub-rewards and outcomes alike, that failed."""
        matched = sum(function.matched for function in self.functions)
        return sum(function.failed for function in self.functions) / matched if matched else 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The first distinct reasons of failure."""
        return tuple(reason for function in self.functions for reason in function.reasons)

    def metrics(self) -> dict[str, float]:
        """`reward/<function>/mean` (where anything was scored), `reward/<function>/failed_frac`, `timing/...`."""
        metrics = {"reward/failed_frac": self.failed_frac, "timing/reward_s": self.seconds}
        for function in self.functions:
            if not math.isnan(function.mean):
                metrics[f"reward/{function.name}/mean"] = function.mean
            metrics[f"reward/{function.name}/failed_frac"] = function.failed_frac
            metrics[f"timing/reward_s/{function.name}"] = function.seconds
        return metrics


class RewardManager:
    """Scores trajectories with a fixed set of functions."""

    def __init__(self, functions: Sequence[RewardFunction], max_failed_frac: float = 0.2) -> None:
        self.functions = tuple(functions)
        self.max_failed_frac = max_failed_frac

    async def score(self, trajectories: Sequence[Trajectory]) -> ScoringReport:
        """Fill `step.scores` and `trajectory.outcome` in place.

        Trajectories that failed are left alone. Where the agents went wrong (`info["agent_error"]`), or the play was
        truncated before there was an answer, the outcome is the worst of its range (by default 0) without asking the
        function, and the steps are scored as ever. Latency goes into the report only: scores that hold a clock's
        readings would differ between two runs of one seed.

        Raises TooManyFailedScores where more than `max_failed_frac` of all scores failed, or of the outcomes (each of
        which masks a whole trajectory). The scores are filled in by then.
        """
        start = time.perf_counter()
        calls: list[Call] = []
        given: list[tuple[Call, Score]] = []
        for trajectory in trajectories:
            if trajectory.status == "failed":
                continue
            for function in self.functions:
                if function.level == "outcome" and (reason := _no_outcome(trajectory)):
                    given.append((Call(function, trajectory), _score(function, function.range[0], reason)))
                else:
                    calls += _calls(function, trajectory)
        returned = await run_here(calls)
        for call, one in zip(calls, returned, strict=True):
            given += _scores(call, one)
        for call, score in given:
            if call.step is None:
                call.trajectory.outcome = score
            else:
                call.step.scores[call.function.name] = score

        report = ScoringReport(
            tuple(_report(function, given, calls, returned) for function in self.functions),
            seconds=time.perf_counter() - start,
        )
        self._check(report)
        return report

    def _check(self, report: ScoringReport) -> None:
        for function in report.functions:
            if function.level == "outcome" and function.failed_frac > self.max_failed_frac:
                self._stop(f"{function.failed} of {function.matched} outcomes", function.reasons)
        if report.failed_frac > self.max_failed_frac:
            failed, matched = (sum(getattr(f, name) for f in report.functions) for name in ("failed", "matched"))
            self._stop(f"{failed} of {matched} scores", report.reasons)

    def _stop(self, what: str, reasons: Sequence[str]) -> None:
        raise TooManyFailedScores(
            f"{what} failed, more than reward.max_failed_frac={self.max_failed_frac:g} allows; "
            f"first reasons: {'; '.join(reasons[:_SHOWN_REASONS])}"
        )


async def run_here(calls: Sequence[Call]) -> list[Returned]:
    """What each call came back with, in order: async functions concurrently, the others one by one in this thread.

    The one place that decides where functions run.
    """
    returned = [Returned(error="was cancelled")] * len(calls)

    async def run_async(i: int, call: Call) -> None:
        start = time.perf_counter()
        try:
            value = call.function.call(*_arguments(call))
            returned[i] = Returned(await value if hasattr(value, "__await__") else value)
        except Exception as error:  # whatever a user's function may raise is a failed score, with its reason
            returned[i] = Returned(error=_describe(error))
        returned[i] = replace(returned[i], seconds=time.perf_counter() - start)

    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(run_async(i, call)) for i, call in enumerate(calls) if call.function.is_async]
        for i, call in enumerate(calls):
            if not call.function.is_async:
                returned[i] = _run(call)
                if waiting:
                    await asyncio.sleep(0)  # lets the async ones move on between two calls
    return returned


def _run(call: Call) -> Returned:
    start = time.perf_counter()
    try:
        value = call.function.call(*_arguments(call))
    except Exception as error:  # as above
        return Returned(error=_describe(error), seconds=time.perf_counter() - start)
    return Returned(value, seconds=time.perf_counter() - start)


def _arguments(call: Call) -> tuple[Step, Trajectory] | tuple[Trajectory]:
    return (call.trajectory,) if call.step is None else (call.step, call.trajectory)


def _calls(function: RewardFunction, trajectory: Trajectory) -> list[Call]:
    if function.level == "outcome":
        return [Call(function, trajectory)]
    matching = [step for step in trajectory.steps if function.matches(step.agent)]
    if function.level == "step":
        return [Call(function, trajectory, step) for step in matching]
    return [Call(function, trajectory)] if matching else []


def _no_outcome(trajectory: Trajectory) -> str:
    """Why the outcome function has nothing to look at; empty where it has."""
    if "agent_error" in trajectory.info:
        return f"the agents went wrong: {trajectory.info['agent_error']}"
    if "ended_early" in trajectory.info:
        return f"truncated before there was an answer: {trajectory.info['ended_early']}"
    return ""


def _scores(call: Call, returned: Returned) -> list[tuple[Call, Score]]:
    """The scores that one call made, each with the step that it is for (None: the trajectory)."""
    function, trajectory = call.function, call.trajectory
    if function.level != "trajectory":
        return [(call, _to_score(function, returned, call.step))]
    steps = [step for step in trajectory.steps if function.matches(step.agent)]
    of_step = _of_each_step(returned, len(trajectory.steps))
    return [(Call(function, trajectory, step), _to_score(function, of_step[step.index], step)) for step in steps]


def _of_each_step(returned: Returned, n_steps: int) -> list[Returned]:
    """A trajectory function's list, taken apart; its failure is every step's."""
    values = _plain(returned.value)
    if returned.error:
        error = returned.error
    elif not isinstance(values, list | tuple):
        error = f"expected a list with one value per step, got {_kind(values)}"
    elif len(values) != n_steps:
        error = f"expected one value for each of {n_steps} steps, got {len(values)}"
    else:
        return [Returned(value) for value in values]
    return [Returned(error=error)] * n_steps


class _UnusableError(Exception):
    """A value that cannot be a score; the message is the score's reason."""


def _to_score(function: RewardFunction, returned: Returned, step: Step | None) -> Score:
    try:
        if returned.error:
            raise _UnusableError(returned.error)
        if not isinstance(returned.value, Score):
            return _score(function, _checked(returned.value, function.range, step))
        given = returned.value
        if given.status != "ok":
            reason = given.reason or "the function said so, without a reason"
            return replace(_score(function, 0.0, reason[:_REASON_CHARACTERS]), status=given.status)
        # A Score made without a range has the default one: it is the function's that counts then.
        low, high = function.range if given.range == (0.0, 1.0) else given.range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise _UnusableError(f"expected a Score with a range of finite numbers, low < high, got {given.range}")
        value = _checked(given.value, (low, high), step)
        return replace(_score(function, value, given.reason), range=(float(low), float(high)))
    except _UnusableError as error:
        return replace(_score(function, 0.0, str(error)), status="failed")


def _score(function: RewardFunction, value: float | tuple[float, ...], reason: str = "") -> Score:
    return Score(value, range=function.range, weight=function.weight, reason=reason, version=function.version)


def _checked(value: object, allowed: tuple[float, float], step: Step | None) -> float | tuple[float, ...]:
    value = _plain(value)
    if not isinstance(value, list | tuple):
        return _number(value, allowed)
    if step is None:
        raise _UnusableError(f"expected one number for the whole trajectory, got {_kind(value)}")
    if len(value) != len(step.response_ids) or not value:
        raise _UnusableError(
            f"expected one value for each of {len(step.response_ids)} response tokens, got {len(value)}"
        )
    return tuple(_number(_plain(one), allowed) for one in value)


def _number(value: object, allowed: tuple[float, float]) -> float:
    if not isinstance(value, Real):
        raise _UnusableError(f"expected a number, got {_kind(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    low, high = allowed
    if not math.isfinite(number) or not low <= number <= high:
        raise _UnusableError(f"expected a value in [{low:g}, {high:g}], got {number:g}")
    return number


def _plain(value: object) -> object:
    """Arrays, tensors and their scalars as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]


def _report(
    function: RewardFunction, given: Sequence[tuple[Call, Score]], calls: Sequence[Call], returned: Sequence[Returned]
) -> FunctionReport:
    mine = [(call, score) for call, score in given if call.function is function]
    values = [_mean(score.value) for _, score in mine if score.status == "ok"]
    reasons: dict[str, str] = {}
    for call, score in mine:
        if score.status != "ok":
            where = f"step {call.step.id}" if call.step else f"trajectory {call.trajectory.id}"
            reasons.setdefault(score.reason, f"{function.name}, {where}: {score.reason}")
    return FunctionReport(
        name=function.name,
        level=function.level,
        matched=len(mine),
        failed=len(mine) - len(values),
        mean=sum(values) / len(values) if values else math.nan,
        seconds=sum((one.seconds for call, one in zip(calls, returned, strict=True) if call.function is function), 0.0),
        reasons=tuple(reasons.values())[:_SHOWN_REASONS],
    )


def _mean(value: float | tuple[float, ...]) -> float:
    return sum(value) / len(value) if isinstance(value, tuple) else value
