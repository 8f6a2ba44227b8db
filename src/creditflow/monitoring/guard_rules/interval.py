"""An estimate whose confidence interval lies beyond a limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from creditflow.monitoring.guard_rules.base import BoundedRule, RuleResult, guard_rule


@guard_rule("interval")
@dataclass(slots=True)
class Interval(BoundedRule):
    """An estimate is beyond a limit, and so is its whole confidence interval.

    `over` names the metric of the interval's far end: the upper end with `below`, the lower end with `above`. An
    estimate beyond the limit with an interval that contains the limit, or without an interval, is undecided.
    """

    window: int = field(default=2, metadata={"ge": 1})
    """Number of newest intervals that must all be beyond the limit. If the true value is at the limit and the
    intervals hold 95 %, that happens by chance once in 40 looks for 1, and once in 1,600 for 2."""
    ends: list[float] = field(init=False, default_factory=list)
    """The far ends of the newest intervals; the limit itself for a missing end."""

    def look(self, value: float, over: float | None) -> RuleResult:
        limit, sign = self.limit
        end = limit if over is None else over
        self.ends = [*self.ends, end][-self.window :]
        numbers = {"value": value, "interval_end": end, "limit": limit, "window": float(len(self.ends))}
        beyond = sign * (value - limit) > 0
        bad = beyond and len(self.ends) == self.window and all(sign * (end - limit) > 0 for end in self.ends)
        recover = limit if self.recover is None else self.recover
        undecided = beyond and sign * (end - limit) <= 0
        return RuleResult(bad, sign * (value - recover) <= 0, numbers, suspect=beyond, undecided=undecided)
