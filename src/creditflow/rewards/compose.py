"""The ready-made `sum` of several rewards. Its parts are called like other functions, where each would run alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from creditflow.data import Score
from creditflow.rewards.calls import Returned, RewardCall
from creditflow.rewards.execution.inline import returned_by, run_on_loop
from creditflow.rewards.registry import RewardFunction
from creditflow.rewards.scores import failed_score, mean_value
from creditflow.rewards.values import NotApplicable


def calls_for(call: RewardCall) -> list[RewardCall]:
    """The calls that a call needs: those of the parts of a sum, or itself."""
    parts = call.function.parts
    needed = [RewardCall(part, call.trajectory, None if part.level == "trajectory" else call.step) for part in parts]
    return needed or [call]


def combined(call: RewardCall, returned: Sequence[Returned]) -> Returned:
    """The result of a call from those of `calls_for`.

    A sum adds its parts, each rescaled to [0, 1], times their weights. It fails if a part cannot be scored. The sum of
    the parts that apply is stretched to the whole range. It does not apply if none of them has a weight.
    """
    parts = call.function.parts
    if not parts:
        return returned[0]
    scores = {i: _part_score(call, part, returned[i]) for i, part in enumerate(parts) if returned[i].applies}
    for i, score in scores.items():
        if score.status != "ok":
            failed = Score(0.0, status=score.status, reason=f"{parts[i].name}: {score.reason}")
            return returned_by(call, failed)
    low, high = sum_range([parts[i] for i in scores])
    if low == high:
        return Returned()
    (lowest, highest), is_whole = call.function.range, len(scores) == len(parts)

    def weighed(row: Sequence[float]) -> float:
        total = sum(value * parts[i].weight for i, value in zip(scores, row, strict=True))
        return total if is_whole else lowest + (total - low) * ((highest - lowest) / (high - low))

    values = [_rescaled(score) for score in scores.values()]
    n_tokens = max(map(len, values))
    columns = (value if len(value) == n_tokens else value * n_tokens for value in values)  # a number holds for all
    totals = tuple(weighed(row) for row in zip(*columns, strict=True))
    is_by_token = any(isinstance(score.value, tuple) for score in scores.values())
    texts = (
        f"{part.name} {mean_value(scores[i]):.3g}" if i in scores else f"{part.name} does not apply"
        for i, part in enumerate(parts)
    )
    value = totals if is_by_token else totals[0]
    return returned_by(call, Score(value, range=call.function.range, reason=", ".join(texts)))


def sum_range(parts: Sequence[RewardFunction]) -> tuple[float, float]:
    """The range of the weighted sum of values in [0, 1]."""
    # Added in the order of the parts, as their values are. Rounding is monotone, so no sum leaves the bounds.
    return sum(min(part.weight, 0.0) for part in parts), sum(max(part.weight, 0.0) for part in parts)


def _part_score(call: RewardCall, part: RewardFunction, returned: Returned) -> Score:
    scores = {placed.place: placed.score for placed in returned.scores}
    if any(isinstance(place, str) for place in scores):
        reason = "expected one number of a part, got outcomes by agent, which cannot be combined"
        return failed_score(part, Returned(error=reason))
    place = call.step.index if part.level == "trajectory" and call.step is not None else None
    return scores.get(place) or failed_score(part, returned)


def _rescaled(score: Score) -> tuple[float, ...]:
    """The value, or each token's value, rescaled from its range to [0, 1]."""
    low, high = score.range
    values = score.value if isinstance(score.value, tuple) else (score.value,)
    return tuple((value - low) / (high - low) for value in values)


async def call_here(function: RewardFunction, *arguments: Any) -> object:
    """Call a sum like any other function, with all parts in this process; for use without a manager."""
    call = RewardCall(function, arguments[-1], arguments[0] if len(arguments) > 1 else None)
    needed = calls_for(call)
    returned = combined(call, await run_on_loop(needed, timeout=math.inf, max_in_flight=len(needed)))
    return returned.scores[0].score if returned.scores else NotApplicable()
