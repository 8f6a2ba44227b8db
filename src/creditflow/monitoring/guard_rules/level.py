"""A metric beyond a limit."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from creditflow.errors import ConfigError
from creditflow.monitoring.guard_rules.base import BoundedRule, RuleResult, guard_rule, one_sided_p_value

_NEIGHBOURS = 20
_MANY, _KEPT = 8, 0.79
"""Number of differences from which the largest is dropped, and the share of the mean left (0.69 of 8, 0.80 of 19)."""


@guard_rule("level")
@dataclass(slots=True)
class Level(BoundedRule):
    """A metric has been beyond a limit over a window.

    For a share with known counts (`over`), the newest value is beyond the limit, and the pooled share of the window is
    beyond it by more than chance explains. This is a score test with the variance that the limit implies, or the
    variance of the last twenty values if larger (verdicts of one step are correlated). The latter comes from the
    differences of neighbours, which a trend does not affect (von Neumann et al. 1941, "The mean square successive
    difference").

    For any other metric, every value of the window is beyond the limit. If each value were beyond it with probability
    one half, that would happen once in `2 ** window` looks (a sign test, which assumes nothing of the distribution).
    """

    times_first: bool = False
    """Limits are multiples of the first positive value of the series, which begins there."""
    window: int = field(default=5, metadata={"ge": 1})
    shortest: int | None = field(default=None, metadata={"ge": 1})
    """For a share with known counts: the smallest number of newest values that may decide; default: the window.
    `p_value` is then divided among the widths."""
    p_value: float = field(default=1e-4, metadata={"gt": 0, "lt": 1})
    """Largest p-value at which the rule fires, per look."""
    recover_epochs: int = field(default=5, metadata={"ge": 1})
    """Number of newest values that must be on the recovered side; for a share with known counts, their mean must be."""
    first: float | None = field(init=False, default=None)
    values: list[tuple[float, float]] = field(init=False, default_factory=list)
    """The last values, each with its count; 0 without a count."""

    def __post_init__(self) -> None:
        BoundedRule.__post_init__(self)
        if self.shortest is not None and self.shortest > self.window:
            raise ConfigError(f"shortest: expected at most the window, {self.window}, got {self.shortest}")

    def look(self, value: float, over: float | None) -> RuleResult:
        self.first = self.first or max(value, 0.0)
        scale = self.first if self.times_first else 1.0
        if not scale:
            return RuleResult(False, False, {"value": value})
        self.values = [*self.values, (value, over or 0.0)][-max(self.window, self.recover_epochs, _NEIGHBOURS) :]
        bound, sign = self.limit
        limit, recover = scale * bound, scale * (bound if self.recover is None else self.recover)
        window = self.values[-self.window :]
        numbers = {"value": value, "limit": limit, "window": float(len(window))}
        counted = over is not None and min(n for _, n in window) > 0
        suspect = sign * (value - limit) > 0
        bad = False
        if counted and len(window) >= (self.shortest or self.window):
            test, widths = self._test(window, limit)
            numbers |= test
            bad = test["p"] < self.p_value / widths and suspect
        elif not counted and len(window) == self.window:
            bad = all(sign * (past - limit) > 0 for past, _ in window)
        newest = self.values[-self.recover_epochs :]
        levels = [_mean(newest)] if counted else [past for past, _ in newest]
        well = len(newest) == self.recover_epochs and all(sign * (level - recover) <= 0 for level in levels)
        return RuleResult(bad, well and not bad, numbers, suspect)

    def _test(self, window: list[tuple[float, float]], limit: float) -> tuple[dict[str, float], int]:
        """The test of the width with the smallest p-value, and the number of widths."""
        scatter = _scatter([value for value, _ in self.values[-_NEIGHBOURS:]])
        shortest = self.shortest or self.window
        tests = []
        for width in range(shortest, len(window) + 1):
            mean, spread = _pooled(window[-width:], limit, scatter)
            p = one_sided_p_value(self.limit[1] * (mean - limit), spread)
            tests.append({"window": float(width), "mean": mean, "over": sum(n for _, n in window[-width:]), "p": p})
        return min(tests, key=lambda test: test["p"]), self.window - shortest + 1


def _mean(counted: list[tuple[float, float]]) -> float:
    return sum(value * n for value, n in counted) / sum(n for _, n in counted)


def _pooled(counted: list[tuple[float, float]], limit: float, scatter: float) -> tuple[float, float]:
    """The pooled share, and its standard error if the true share is `limit`. `scatter`: the variance of one value."""
    implied = max(limit * (1 - limit), 0.0) / sum(n for _, n in counted)
    return _mean(counted), math.sqrt(max(implied, scatter / len(counted)))


def _scatter(values: list[float]) -> float:
    """The variance of one value around the series' level: half the mean square difference of neighbours.

    If the differences are many, the largest is dropped, since it may be the change to detect. The mean of the others is
    then divided by its expected share for normal values.
    """
    steps = sorted((after - before) ** 2 for before, after in itertools.pairwise(values))
    if len(steps) < _MANY:
        return sum(steps) / len(steps) / 2 if steps else 0.0
    return sum(steps[:-1]) / (len(steps) - 1) / 2 / _KEPT
