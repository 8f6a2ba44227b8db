"""Compositions of rewards: weighted sum, product, first score that succeeds, and a score behind a gate.

A composition yields calls, receives their results, and may yield more calls. A score behind a closed gate is never
computed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from creditflow.data import Score, Step
from creditflow.rewards.execution.calls import Returned, RewardCall
from creditflow.rewards.execution.inline import returned_by, run_on_loop
from creditflow.rewards.registry import Composition, RewardFunction
from creditflow.rewards.scores import failed_score, mean_value
from creditflow.rewards.values import NotApplicable

Plan = Generator[list[RewardCall], list[Returned], Returned]
Value = float | tuple[float, ...]


def plan(call: RewardCall) -> Plan:
    """The steps to a call's result: yields the calls that are needed next and receives their results."""
    composition = call.function.composition
    if composition is None:
        (returned,) = yield [call]
        return returned
    try:
        score: Score = yield from composition.rule(call)
    except _PartFailedError as failure:
        score = Score(0.0, status=failure.score.status, reason=failure.reason)
    except _NoPartAppliesError:
        return Returned()
    return returned_by(call, score)


def in_rounds(plans: Sequence[Plan]) -> Generator[list[RewardCall], list[Returned], list[Returned]]:
    """Run several plans together; each round yields the next calls of all of them."""
    done: dict[int, Returned] = {}
    pending = {i: next(part_plan) for i, part_plan in enumerate(plans)}
    while pending:
        results = iter((yield [call for calls in pending.values() for call in calls]))
        still: dict[int, list[RewardCall]] = {}
        for i, calls in pending.items():
            try:
                still[i] = plans[i].send([next(results) for _ in calls])
            except StopIteration as stop:
                done[i] = stop.value
        pending = still
    return [done[i] for i in range(len(plans))]


async def answer(
    calls: Sequence[RewardCall], run: Callable[[list[RewardCall]], Awaitable[list[Returned]]]
) -> list[Returned]:
    """The result of each call, compositions included; `run` runs calls of plain functions."""
    rounds = in_rounds([plan(call) for call in calls])
    try:
        pending = next(rounds)
        while True:
            pending = rounds.send(await run(pending))
    except StopIteration as stop:
        answers: list[Returned] = stop.value
        return answers


async def call_here(function: RewardFunction, *arguments: Any) -> object:
    """Call a composition like any other function, with all parts in this process; for use without a manager."""

    async def run(calls: list[RewardCall]) -> list[Returned]:
        return await run_on_loop(calls, timeout=math.inf, max_in_flight=len(calls))

    step = arguments[0] if len(arguments) > 1 else None
    (returned,) = await answer([RewardCall(function, arguments[-1], step)], run)
    return returned.scores[0].score if returned.scores else NotApplicable()


class _PartFailedError(Exception):
    """A required part of a composition could not be scored."""

    def __init__(self, function: RewardFunction, score: Score) -> None:
        self.score = score
        self.reason = f"{function.name}: {score.reason}"


class _NoPartAppliesError(Exception):
    """No part of a composition applies to the input, or not the one that it depends on."""


def _ask(
    parts: Sequence[RewardFunction], call: RewardCall
) -> Generator[list[RewardCall], list[Returned], list[Score | None]]:
    """The scores of several parts, None where one does not apply; their calls are yielded together."""
    of_parts = [RewardCall(part, call.trajectory, None if part.level == "trajectory" else call.step) for part in parts]
    returned = yield from in_rounds([plan(part_call) for part_call in of_parts])
    return [_score(part_call, result, call.step) for part_call, result in zip(of_parts, returned, strict=True)]


def _score(call: RewardCall, returned: Returned, step: Step | None) -> Score | None:
    if not returned.applies:
        return None
    scores = {placed.place: placed.score for placed in returned.scores}
    if any(isinstance(place, str) for place in scores):
        reason = "expected one number of a part, got outcomes by agent, which cannot be combined"
        return failed_score(call.function, Returned(error=reason))
    place = step.index if call.function.level == "trajectory" and step is not None else None
    return scores.get(place) or failed_score(call.function, returned)


def _needed(
    parts: Sequence[RewardFunction], call: RewardCall
) -> Generator[list[RewardCall], list[Returned], dict[int, Score]]:
    """The scores of the parts that apply, by their place.

    Raises _PartFailedError if one could not be scored, _NoPartAppliesError if none applies.
    """
    scores = yield from _ask(parts, call)
    applying = {i: score for i, score in enumerate(scores) if score is not None}
    for i, score in applying.items():
        if score.status != "ok":
            raise _PartFailedError(parts[i], score)
    if not applying:
        raise _NoPartAppliesError
    return applying


def _rescaled(score: Score) -> Value:
    """The value, or each token's value, rescaled from its range to [0, 1]."""
    low, high = score.range
    if isinstance(score.value, tuple):
        return tuple((value - low) / (high - low) for value in score.value)
    return (score.value - low) / (high - low)


def _combined(values: Sequence[Value], how: Callable[[Sequence[float]], float]) -> Value:
    """Apply `how` to the values; to token values, token by token (a single number holds for every token)."""
    lengths = {len(value) for value in values if isinstance(value, tuple)}
    if not lengths:
        return how([value for value in values if not isinstance(value, tuple)])
    (length,) = lengths  # each was checked to have one value per response token
    columns = [value if isinstance(value, tuple) else (value,) * length for value in values]
    return tuple(how(row) for row in zip(*columns, strict=True))


def _dot(row: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(row, weights, strict=True))


def _listed(parts: Sequence[RewardFunction], scores: Mapping[int, Score]) -> str:
    """The values of the parts, by their place, as the composition's reason."""
    named = (
        f"{part.name} {mean_value(scores[i]):.3g}" if i in scores else f"{part.name} does not apply"
        for i, part in enumerate(parts)
    )
    return ", ".join(named)


def _bounds(weights: Sequence[float]) -> tuple[float, float]:
    """The range of a weighted sum of values in [0, 1]."""
    # Added in the order of the parts, as their values are. Rounding is monotone, so no sum leaves the bounds.
    return sum(min(weight, 0.0) for weight in weights), sum(max(weight, 0.0) for weight in weights)


def weighted_sum(parts: Sequence[RewardFunction], weights: Sequence[float]) -> Composition:
    """The sum of the parts, each rescaled to [0, 1], times their `weight`s, which may be negative.

    Range: from the sum of the negative weights to the sum of the positive ones. Credit rescales it, so with positive
    weights it is their weighted mean. The composition fails if a part cannot be scored. The sum of the parts that apply
    is stretched to the whole range.
    """

    def rule(call: RewardCall) -> Generator[list[RewardCall], list[Returned], Score]:
        scores = yield from _needed(parts, call)
        own = [weights[i] for i in scores]
        total = _combined([_rescaled(score) for score in scores.values()], lambda row: _dot(row, own))
        if len(scores) < len(parts):
            low, high = _bounds(own)
            if low == high:
                raise _NoPartAppliesError
            width = (bounds[1] - bounds[0]) / (high - low)
            total = _combined([total], lambda row: bounds[0] + (row[0] - low) * width)
        return Score(total, range=bounds, reason=_listed(parts, scores))

    bounds = _bounds(weights)

    return Composition(rule, bounds)


def product(parts: Sequence[RewardFunction], weights: Sequence[float]) -> Composition:
    """The product of the parts, each rescaled to [0, 1]: 0 if any part is 0.

    Range: [0, 1]. The composition fails if a part cannot be scored, even if another part is 0. A part that does not
    apply is left out. Weights are refused.
    """

    def rule(call: RewardCall) -> Generator[list[RewardCall], list[Returned], Score]:
        scores = yield from _needed(parts, call)
        values = [_rescaled(score) for score in scores.values()]
        return Score(_combined(values, math.prod), reason=_listed(parts, scores))

    return Composition(rule, (0.0, 1.0))


def first_ok(parts: Sequence[RewardFunction], weights: Sequence[float]) -> Composition:
    """The first part that can be scored, rescaled to [0, 1]: a judge, for example, with a fallback.

    A part is called only if all parts before it failed or do not apply. Range: [0, 1].
    """

    def rule(call: RewardCall) -> Generator[list[RewardCall], list[Returned], Score]:
        reasons: list[str] = []
        failure: Score | None = None
        for part in parts:
            (score,) = yield from _ask([part], call)
            if score is None:
                reasons.append(f"{part.name} does not apply")
            elif score.status == "ok":
                return Score(_rescaled(score), reason="; ".join([*reasons, _listed([part], {0: score})]))
            else:
                failure = score
                reasons.append(f"{part.name}: {score.reason}")
        if failure is None:
            raise _NoPartAppliesError
        return Score(0.0, status=failure.status, reason="; ".join(reasons))

    return Composition(rule, (0.0, 1.0))


def gate(
    parts: Sequence[RewardFunction], weights: Sequence[float], above: float = 0.5, otherwise: float = 0.0
) -> Composition:
    """`score` if `by`, rescaled to [0, 1], is above `above`; else `otherwise`, without a call of `score`.

    Range: [0, 1]; `score` is rescaled to it, and `otherwise` must be in it. The composition does not apply where `by`
    does not, or where the gate is open and `score` does not.
    """
    score_part, by_part = parts
    if not 0 <= above <= 1 or not 0 <= otherwise <= 1:
        raise ValueError(f"expected `above` and `otherwise` from 0 to 1, got {above} and {otherwise}")

    def rule(call: RewardCall) -> Generator[list[RewardCall], list[Returned], Score]:
        by = (yield from _needed([by_part], call))[0]
        height = by.rescaled_over(() if call.step is None else call.step.response_mask)
        reason = _listed([by_part], {0: by})
        if not height > above + 1e-9:
            return Score(otherwise, reason=f"closed: {reason}")
        score = (yield from _needed([score_part], call))[0]
        return Score(_rescaled(score), reason=f"open: {reason}; {_listed([score_part], {0: score})}")

    return Composition(rule, (0.0, 1.0))


class Combinator(NamedTuple):
    """A way to make one reward of several."""

    make: Callable[..., Composition]
    """Called with the parts, their weights, and the entry's other args."""
    names: tuple[str, ...] = ()
    """The args that hold the parts; empty: `parts`, a list of any length."""


COMBINATORS = {
    "sum": Combinator(weighted_sum),
    "product": Combinator(product),
    "first_ok": Combinator(first_ok),
    "gate": Combinator(gate, ("score", "by")),
}
"""The ways to make one reward of several, by their names in recipes."""
