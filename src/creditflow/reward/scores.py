"""Makes scores of what reward functions return: a value that cannot be one becomes a failed score that says why.

It must not know where the functions ran, nor what the scores are for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

from creditflow.reward.calls import REASON_CHARACTERS, Call, Returned
from creditflow.reward.registry import RewardFunction
from creditflow.trajectory import Score, Step


@dataclass(frozen=True, slots=True)
class Other:
    """Stands for a value of a type that is no score, which came from another process."""

    kind: str


class _UnusableError(Exception):
    """A value that cannot be a score; the message is the score's reason."""


def scores_of(call: Call, returned: Returned) -> list[tuple[Call, Score]]:
    """The scores that one call made, each with the step that it is for (None: the trajectory)."""
    function, trajectory = call.function, call.trajectory
    if function.level != "trajectory":
        return [(call, to_score(function, returned, call.step))]
    steps = [step for step in trajectory.steps if function.matches(step.agent)]
    of_step = of_each_step(returned, len(trajectory.steps))
    return [(Call(function, trajectory, step), to_score(function, of_step[step.index], step)) for step in steps]


def of_each_step(returned: Returned, n_steps: int) -> list[Returned]:
    """A trajectory function's list, taken apart; its failure is every step's."""
    values = _plain(returned.value)
    if returned.error:
        return [replace(returned, value=None)] * n_steps
    if not isinstance(values, list | tuple):
        error = f"expected a list with one value per step, got {_kind(values)}"
    elif len(values) != n_steps:
        error = f"expected one value for each of {n_steps} steps, got {len(values)}"
    else:
        return [Returned(value) for value in values]
    return [Returned(error=error)] * n_steps


def to_score(function: RewardFunction, returned: Returned, step: Step | None) -> Score:
    """The score that a call made of a step (None: of a trajectory), with its function's range, weight and version."""
    try:
        if returned.error:
            raise _UnusableError(returned.error)
        if not isinstance(returned.value, Score):
            return make_score(function, _checked(returned.value, function.range, step))
        given = returned.value
        if given.status != "ok":
            reason = str(given.reason)[:REASON_CHARACTERS] or "the function said so, without a reason"
            status = given.status if given.status == "timeout" else "failed"
            return replace(make_score(function, 0.0, reason), status=status)
        # A Score made without a range has the default one: it is the function's that counts then.
        allowed = function.range if given.range == (0.0, 1.0) else _range(given.range)
        value = _checked(given.value, allowed, step)
        return replace(make_score(function, value, str(given.reason)), range=allowed)
    except _UnusableError as error:
        status = "timeout" if returned.timed_out else "failed"
        return replace(make_score(function, 0.0, str(error)), status=status)


def make_score(function: RewardFunction, value: float | tuple[float, ...], reason: str = "") -> Score:
    """A score of the function's, status ok."""
    return Score(value, range=function.range, weight=function.weight, reason=reason, version=function.version)


def mean_value(score: Score) -> float:
    """In the function's own range; of token values, the mean."""
    return sum(score.value) / len(score.value) if isinstance(score.value, tuple) else score.value


def _range(given: object) -> tuple[float, float]:
    if isinstance(given, list | tuple) and len(given) == 2 and all(isinstance(bound, Real) for bound in given):
        low, high = float(given[0]), float(given[1])
        if math.isfinite(low) and math.isfinite(high) and low < high:
            return low, high
    raise _UnusableError(
        f"expected a Score with a range of finite numbers, low < high, got {given}"[:REASON_CHARACTERS]
    )


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
    if isinstance(value, Other):
        return f"a {value.kind}"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
