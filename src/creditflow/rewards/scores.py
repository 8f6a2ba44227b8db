"""Make scores from the return values of reward functions; an invalid value becomes a failed score with a reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from creditflow.data import Score, Step, into_range
from creditflow.errors import ScoreRangeError, did_you_mean
from creditflow.rewards.execution.calls import Returned, RewardCall
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.values import REASON_CHARACTERS, ByAgent, DetailedScore, NotApplicable, Plain, UnknownValue

COMMON = "*"
"""The name of the common outcome among outcomes by agent."""


class _UnusableError(Exception):
    """A value that cannot be a score; the message is the score's reason."""


class _OutsideError(_UnusableError):
    """A finite value outside of its range."""


def scores_of(call: RewardCall, returned: Returned) -> list[tuple[RewardCall, Score]]:
    """The scores that one call made, each with its step or agent (neither: the trajectory).

    The common outcome comes before those of agents. No score if the function does not apply.
    """
    function, trajectory = call.function, call.trajectory
    if isinstance(returned.value, NotApplicable):
        return []
    if function.level == "outcome" and isinstance(returned.value, ByAgent):
        return _outcomes_of(call, returned.value)
    if function.level != "trajectory":
        return [(call, to_score(function, returned, call.step))]
    steps = trajectory.steps if call.steps is None else call.steps
    return [
        (RewardCall(function, trajectory, step), to_score(function, of_step(call, returned, step), step))
        for step in steps
    ]


def _outcomes_of(call: RewardCall, outcomes: ByAgent) -> list[tuple[RewardCall, Score]]:
    """The common outcome, then those of single agents. If a name is wrong, the common outcome alone, failed."""
    function, trajectory = call.function, call.trajectory
    try:
        _expect_agents(call, outcomes)
    except _UnusableError as error:
        return [(call, to_score(function, Returned(error=str(error)), None))]
    scores = {str(name): to_score(function, Returned(value), None) for name, value in outcomes.values}
    common = scores.pop(COMMON, None) or _mean(function, scores)
    return [(call, common), *((RewardCall(function, trajectory, agent=agent), scores[agent]) for agent in scores)]


def _expect_agents(call: RewardCall, outcomes: ByAgent) -> None:
    """Raise _UnusableError unless outcomes by agent have the names of agents of the team, and at least one."""
    agents = sorted({*call.function.agents, *(step.agent for step in call.trajectory.steps)})
    if not outcomes.values:
        raise _UnusableError("expected an outcome for at least one agent, got none")
    for name, _ in outcomes.values:
        if not isinstance(name, str):
            raise _UnusableError(f"expected outcomes by the names of agents, got a name of type {name.kind}")
        if name not in agents and name != COMMON:
            reason = f"expected outcomes of agents of the team, got one of {name!r}{did_you_mean(name, agents)}"
            raise _UnusableError(reason[:REASON_CHARACTERS])


def _mean(function: RewardFunction, scores: dict[str, Score]) -> Score:
    """The mean outcome of the agents; failed if one of them failed."""
    for agent, score in scores.items():
        if score.status != "ok":
            return replace(score, reason=f"{agent}: {score.reason}"[:REASON_CHARACTERS])
    ranges = {score.range for score in scores.values()}
    mean = make_score(function, fmean(mean_value(score) for score in scores.values()), "the mean of the agents")
    if len(ranges) == 1:
        return replace(mean, range=ranges.pop())
    return replace(mean, value=fmean(score.rescaled for score in scores.values()), range=(0.0, 1.0))


def of_step(call: RewardCall, returned: Returned, step: Step) -> Returned:
    """One step's entry in the return value of a trajectory function; a failed call fails every step."""
    values, n_steps = returned.value, len(call.trajectory.steps)
    if returned.error:
        return replace(returned, value=None)
    if not isinstance(values, tuple):
        return Returned(error=f"expected a list with one value per step, got {_kind(values)}")
    if len(values) != n_steps:
        return Returned(error=f"expected one value for each of {n_steps} steps, got {len(values)}")
    return Returned(values[step.index])


def to_score(function: RewardFunction, returned: Returned, step: Step | None) -> Score:
    """The score of a step (None: of a trajectory) by a call, with its function's range, weight and version."""
    try:
        if returned.error:
            raise _UnusableError(returned.error)
        if step is None and isinstance(returned.value, ByAgent):
            raise _UnusableError("expected one number of a part, got outcomes by agent, which cannot be combined")
        if not isinstance(returned.value, Score):
            return make_score(function, _checked(returned.value, function.range, step))
        score = returned.value
        if score.status != "ok":
            reason = score.reason[:REASON_CHARACTERS] or "the function said so, without a reason"
            status = score.status if score.status == "timeout" else "failed"
            return replace(make_score(function, 0.0, reason), status=status)
        # A Score made without a range has the default one: the function's range applies then.
        allowed = function.range if score.range == (0.0, 1.0) else _range(score.range)
        value = _checked(score.value, allowed, step)
        return replace(make_score(function, value, score.reason), range=allowed)
    except _UnusableError as error:
        status = "timeout" if returned.timed_out else "failed"
        unset = isinstance(error, _OutsideError) and not function.declares_range
        reason = f"{error}; if the function has another range, set the entry's `range`" if unset else str(error)
        return replace(make_score(function, 0.0, reason), status=status)


def not_applicable(function: RewardFunction) -> Score:
    """The outcome of a trajectory to which the function does not apply: it is masked, since 0 would be a reward."""
    return replace(make_score(function, 0.0, "does not apply: the function returned None"), status="failed")


def numbers_of(call: RewardCall, returned: Returned) -> Iterator[tuple[str, float]]:
    """The numbers that the function returned beside its scores."""
    values = (returned.value,)
    if call.function.level == "trajectory" and isinstance(returned.value, tuple):
        indices = None if call.steps is None else {step.index for step in call.steps}
        values = tuple(value for i, value in enumerate(returned.value) if indices is None or i in indices)
    for value in values:
        if isinstance(value, DetailedScore):
            yield from value.numbers


def make_score(function: RewardFunction, value: float | tuple[float, ...], reason: str = "") -> Score:
    """A score by the function, with status ok."""
    return Score(value, range=function.range, weight=function.weight, reason=reason, version=function.version)


def mean_value(score: Score) -> float:
    """The value in the function's own range; for token values, their mean."""
    return sum(score.value) / len(score.value) if isinstance(score.value, tuple) else score.value


def _range(bounds: Plain) -> tuple[float, float]:
    if isinstance(bounds, tuple) and len(bounds) == 2 and all(isinstance(bound, int | float) for bound in bounds):
        low, high = float(bounds[0]), float(bounds[1])
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    shown = _kind(bounds) if isinstance(bounds, UnknownValue) else bounds
    raise _UnusableError(
        f"expected a Score with a range of finite numbers, low < high, got {shown}"[:REASON_CHARACTERS]
    )


def _checked(value: Plain, allowed: tuple[float, float], step: Step | None) -> float | tuple[float, ...]:
    if not isinstance(value, tuple):
        return _number(value, allowed)
    if len(value) == 2 and isinstance(value[0], int | float) and value[1:] == (UnknownValue("str"),):
        raise _UnusableError(
            "expected a number, got a number with a text; to give a reason, return Score(value, reason=...)"
        )
    if step is None:
        raise _UnusableError(f"expected one number for the whole trajectory, got {_kind(value)}")
    if len(value) != len(step.response_ids) or not value:
        hint = "; to give the step one number, return it without a list" if len(value) == 1 else ""
        raise _UnusableError(
            f"expected one value for each of {len(step.response_ids)} response tokens, got {len(value)}{hint}"
        )
    return tuple(_number(number, allowed) for number in value)


def _number(value: Plain, allowed: tuple[float, float]) -> float:
    if not isinstance(value, int | float):
        raise _UnusableError(f"expected a number, got {_kind(value)}{_HINTS.get(_type_name(value), '')}")
    try:
        return into_range(float(value), allowed)
    except ScoreRangeError as error:
        raise (_OutsideError if math.isfinite(value) else _UnusableError)(str(error)) from None


_HINTS = {
    "NoneType": "; some path through the function returns no value",
    "str": "; return float(...) of it",
    "coroutine": "; an `await` or an `async def` is missing",
    "dict": "; of a dict, the number under 'score' is read",
}
"""Hints for a returned value, by its type."""


def _type_name(value: Plain) -> str:
    return value.kind if isinstance(value, UnknownValue) else type(value).__name__


def _kind(value: Plain) -> str:
    if isinstance(value, tuple):
        return "a list"
    return "nothing (None)" if value is None else f"a {_type_name(value)}"
