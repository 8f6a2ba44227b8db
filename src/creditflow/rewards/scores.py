"""Make scores from the return values of reward functions; an invalid value becomes a failed score with a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from statistics import fmean
from typing import Any

from creditflow.data import Score, ScoreStatus, Step, into_range
from creditflow.errors import ScoreRangeError, did_you_mean
from creditflow.rewards.calls import PlacedScore, Returned, RewardCall
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.values import (
    REASON_CHARACTERS,
    DetailedScore,
    NotApplicable,
    as_float,
    numbers_of,
    plain,
    shown,
)

COMMON = "*"
"""The name of the common outcome among outcomes by agent."""
_OK_CHARACTERS = 10_000


class UnusableError(Exception):
    """A value that cannot be a score; the message is the score's reason. `fault`: see `PlacedScore`."""

    def __init__(self, reason: str, fault: str = "shape") -> None:
        super().__init__(reason)
        self.fault = fault


# ---- where the function ran


def scores_in(call: RewardCall, value: object) -> tuple[PlacedScore, ...]:
    """The scores in a function's return value; none if the function does not apply.

    Raises UnusableError for a value in which no single score is at fault, and any exception that an unusual object
    raises on access.
    """
    value = plain(value)
    if isinstance(value, NotApplicable):
        return ()
    if call.function.level == "outcome" and isinstance(value, Mapping) and "score" not in value:
        return _outcomes_in(call, value)
    if call.function.level != "trajectory":
        return (_placed(call.function, value, call.step),)
    steps = call.trajectory.steps
    if not isinstance(value, list | tuple):
        raise UnusableError(f"expected a list with one value per step, got {_kind(value)}; an outcome has `@outcome`")
    if len(value) != len(steps):
        raise UnusableError(f"expected one value for each of {len(steps)} steps, got {len(value)}")
    return tuple(_placed(call.function, item, step, step.index) for item, step in zip(value, steps, strict=True))


def _outcomes_in(call: RewardCall, outcomes: Mapping[Any, object]) -> tuple[PlacedScore, ...]:
    """The common outcome, then those of single agents."""
    agents = sorted({*call.function.agents, *(step.agent for step in call.trajectory.steps)})
    if not outcomes:
        raise UnusableError("expected an outcome for at least one agent, got none")
    for name in outcomes:
        if not isinstance(name, str):
            raise UnusableError(f"expected outcomes by the names of agents, got a name of type {type(name).__name__}")
        if name not in agents and name != COMMON:
            reason = f"expected outcomes of agents of the team, got one of {name!r}{did_you_mean(name, agents)}"
            raise UnusableError(reason[:REASON_CHARACTERS])
    placed = {str(name): _placed(call.function, value, None, str(name)) for name, value in outcomes.items()}
    common = placed.pop(COMMON, None)
    score = _mean_outcome({name: each.score for name, each in placed.items()}) if common is None else common.score
    return PlacedScore(score), *placed.values()


def _mean_outcome(scores: Mapping[str, Score]) -> Score:
    """The mean outcome of the agents; failed if one of them failed."""
    for agent, score in scores.items():
        if score.status != "ok":
            return replace(score, reason=f"{agent}: {score.reason}"[:REASON_CHARACTERS])
    ranges = {score.range for score in scores.values()}
    if len(ranges) == 1:
        return Score(fmean(map(mean_value, scores.values())), range=ranges.pop(), reason="the mean of the agents")
    return Score(fmean(score.rescaled for score in scores.values()), reason="the mean of the agents")


def _placed(function: RewardFunction, value: object, step: Step | None, place: int | str | None = None) -> PlacedScore:
    """The score of a step, or of a trajectory without one."""
    value, numbers, fault = plain(value), numbers_of(()), ""
    if isinstance(value, Mapping) and "score" in value:  # as verl's reward functions return it
        others = [(str(name), item) for name, item in value.items() if name != "score"]
        value, numbers = plain(value["score"]), numbers_of(others)
        score = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]
        value = replace(score, reason=score.reason or "; ".join(f"{name}: {shown(item)}" for name, item in others))
    if isinstance(value, DetailedScore) and not numbers:
        numbers = numbers_of(value.numbers)
    try:
        if not isinstance(value, Score):
            value = Score(value, function.range)  # type: ignore[arg-type]
        score = _checked_score(value, function.range, step)
    except UnusableError as error:
        fault = error.fault
        unset = fault == "range" and not function.declares_range
        hint = "; if the function has another range, set the entry's `range`" if unset else ""
        score = Score(0.0, function.range, status="failed", reason=f"{error}{hint}")
    return PlacedScore(score, place, numbers, fault)


def _checked_score(score: Score, allowed: tuple[float, float], step: Step | None) -> Score:
    reason = str(score.reason)
    if not isinstance(score.status, str) or score.status != "ok":
        status: ScoreStatus = "timeout" if score.status == "timeout" else "failed"
        reason = reason[:REASON_CHARACTERS] or "the function said so, without a reason"
        return Score(0.0, allowed, status=status, reason=reason)
    bounds = plain(score.range)
    if bounds not in ((0.0, 1.0), [0.0, 1.0]):  # a Score without a range has the range of the function
        allowed = _range(bounds)
    return Score(_checked(score.value, allowed, step), allowed, reason=reason[:_OK_CHARACTERS])


def _range(bounds: object) -> tuple[float, float]:
    pair = [plain(bound) for bound in bounds] if isinstance(bounds, list | tuple) else []
    numbers = [as_float(bound) for bound in pair if isinstance(bound, Real | Decimal)]
    if len(numbers) == len(pair) == 2 and all(map(math.isfinite, numbers)) and numbers[0] < numbers[1]:
        return numbers[0], numbers[1]
    got = tuple(numbers) if pair and len(numbers) == len(pair) else _kind(bounds)
    raise UnusableError(f"expected a Score with a range of finite numbers, low < high, got {got}"[:REASON_CHARACTERS])


def _checked(value: object, allowed: tuple[float, float], step: Step | None) -> float | tuple[float, ...]:
    value = plain(value)
    if not isinstance(value, list | tuple):
        return _number(value, allowed)
    if len(value) == 2 and isinstance(plain(value[0]), Real) and isinstance(value[1], str):
        raise UnusableError(
            "expected a number, got a number with a text; to give a reason, return Score(value, reason=...)"
        )
    if step is None:
        raise UnusableError(f"expected one number for the whole trajectory, got {_kind(value)}")
    if len(value) != len(step.response_ids) or not value:
        hint = "; to give the step one number, return it without a list" if len(value) == 1 else ""
        raise UnusableError(
            f"expected one value for each of {len(step.response_ids)} response tokens, got {len(value)}{hint}"
        )
    return tuple(_number(plain(number), allowed) for number in value)


def _number(value: object, allowed: tuple[float, float]) -> float:
    if not isinstance(value, Real | Decimal):
        raise UnusableError(f"expected a number, got {_kind(value)}{_HINTS.get(type(value).__name__, '')}")
    number = as_float(value)
    try:
        return into_range(number, allowed)
    except ScoreRangeError as error:
        raise UnusableError(str(error), "range" if math.isfinite(number) else "finite") from None


_HINTS = {
    "NoneType": "; some path through the function returns no value",
    "str": "; return float(...) of it",
    "coroutine": "; an `await` or an `async def` is missing",
    "dict": "; of a dict, the number under 'score' is read",
}
"""Hints for a returned value, by its type."""


def _kind(value: object) -> str:
    if isinstance(value, list | tuple):
        return "a list"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


# ---- in the manager


def scores_of(call: RewardCall, returned: Returned) -> list[tuple[RewardCall, Score]]:
    """The scores of one call with the function's weight and version, each with its step or agent.

    A failed call fails each of its steps. The common outcome comes before those of agents. No score if the function
    does not apply.
    """
    if not returned.applies:
        return []
    function, trajectory = call.function, call.trajectory
    placed = {each.place: each.score for each in returned.scores}
    calls: dict[int | str | None, RewardCall]
    if function.level == "trajectory":
        steps = trajectory.steps if call.steps is None else call.steps
        calls = {step.index: RewardCall(function, trajectory, step) for step in steps}
    else:
        agents = [place for place in placed if isinstance(place, str)]
        calls = {None: call, **{agent: RewardCall(function, trajectory, agent=agent) for agent in agents}}
    scores = {place: placed.get(place) or failed_score(function, returned) for place in calls}
    return [
        (own, replace(scores[place], weight=function.weight, version=function.version)) for place, own in calls.items()
    ]


def failed_score(function: RewardFunction, returned: Returned) -> Score:
    """The score of a call that returned an error."""
    reason = returned.error or "its answer could not be read (a score is missing)"
    status: ScoreStatus = "timeout" if returned.timed_out else "failed"
    return Score(0.0, function.range, function.weight, status, reason, version=function.version)


def worst_score(function: RewardFunction, reason: str) -> Score:
    """The lowest score that a function can return, given without a call."""
    return Score(function.range[0], function.range, function.weight, reason=reason, version=function.version)


def mean_value(score: Score) -> float:
    """The value in the function's own range; for token values, their mean."""
    return sum(score.value) / len(score.value) if isinstance(score.value, tuple) else score.value
