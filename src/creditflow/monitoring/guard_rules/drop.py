"""A fall of a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from creditflow.monitoring.guard_rules.base import (
    RuleResult,
    SeriesRule,
    expect_recovery,
    guard_rule,
    one_sided_p_value,
)


@guard_rule("drop")
@dataclass(slots=True)
class Drop(SeriesRule):
    """A metric fell over a window of validations, by more than a margin and by more than chance explains.

    The fall is that of the least-squares line through the window's `window + 1` values. Its standard error is the
    binomial error of the shares, or that of the line's residuals if larger. The latter is estimated from few values: if
    accuracy varies by more than its counts explain, `p_value` holds only roughly, and `by` is the safeguard.
    """

    by: float = field(default=0.05, metadata={"gt": 0})
    window: int = field(default=5, metadata={"ge": 3})  # for a line and its residuals
    """Number of intervals between validations over which the fall is measured."""
    p_value: float = field(default=2e-3, metadata={"gt": 0, "lt": 1})
    recover: float | None = None
    """Largest fall over the window that counts as recovered; default: half of `by`."""
    values: list[tuple[float, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.recover is None:
            self.recover = self.by / 2
        expect_recovery(self.recover, "by", self.by, 1)

    def look(self, value: float, over: float | None) -> RuleResult:
        assert self.recover is not None
        self.values = [*self.values, (value, over or 0.0)][-(self.window + 1) :]
        numbers = {"value": value, "limit": self.by, "window": float(len(self.values) - 1)}
        if len(self.values) <= self.window:
            return RuleResult(False, False, numbers)
        fall, spread = _fall(self.values)
        p = one_sided_p_value(fall, spread)
        numbers |= {"fall": fall, "standard_error": spread, "p": p}
        bad = fall > self.by and p < self.p_value
        return RuleResult(bad, fall <= self.recover, numbers, suspect=fall > self.by)


def _fall(counted: list[tuple[float, float]]) -> tuple[float, float]:
    """The fall of the least-squares line from the first value to the last, and its standard error."""
    last = len(counted) - 1
    values = [value for value, _ in counted]
    middle, mean = last / 2, sum(values) / len(values)
    squares = sum((x - middle) ** 2 for x in range(len(values)))
    slope = sum((x - middle) * value for x, value in enumerate(values)) / squares
    residuals = [value - mean - slope * (x - middle) for x, value in enumerate(values)]
    among = sum(r * r for r in residuals) / max(1, len(values) - 2)
    shares = [value * (1 - value) / n for value, n in counted if n > 0]
    implied = max(sum(shares) / len(shares), 0.0) if shares else 0.0
    return -slope * last, last * math.sqrt(max(among, implied) / squares)
