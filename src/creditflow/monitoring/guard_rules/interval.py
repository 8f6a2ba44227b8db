"""An estimate whose confidence interval lies beyond a limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from creditflow.errors import ConfigError
from creditflow.monitoring.guard_rules.base import Limit, RuleResult, expect_number, expect_whole, guard_rule


@guard_rule("interval")
@dataclass(slots=True)
class Interval:
    """An estimate is beyond a limit, and so is its whole confidence interval.

    `over` names the metric of the interval's far end: the upper end with `below`, the lower end with `above`. An
    estimate beyond the limit with an interval that contains the limit, or without an interval, is undecided.
    """

    above: float | None = None
    below: float | None = None
    window: int = 2
    """Number of newest intervals that must all be beyond the limit. If the true value is at the limit and the
    intervals hold 95 %, that happens by chance once in 40 looks for 1, and once in 1,600 for 2."""
    recover: float | None = None
    """Limit of the recovered side for the estimate; default: the limit of the rule."""
    ends: list[float] = field(init=False, default_factory=list)
    """The far ends of the newest intervals; the limit itself for a missing end."""

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ConfigError("above, below: expected one of them")
        expect_whole("window", self.window)
        bound = self.limit
        expect_number(bound.option, bound.value)
        if self.recover is not None:
            expect_number("recover", self.recover)
            if bound.sign * (self.recover - bound.value) > 0:
                raise ConfigError(
                    f"recover: {self.recover:g} lies where the rule fires ({bound.option} {bound.value:g}): it would "
                    "be well and ill at once"
                )

    @property
    def limit(self) -> Limit:
        if self.above is not None:
            return Limit("above", self.above, 1)
        assert self.below is not None
        return Limit("below", self.below, -1)

    def look(self, value: float, over: float | None) -> RuleResult:
        limit, sign = self.limit.value, self.limit.sign
        end = limit if over is None else over
        self.ends = [*self.ends, end][-self.window :]
        numbers = {"value": value, "interval_end": end, "limit": limit, "window": float(len(self.ends))}
        beyond = sign * (value - limit) > 0
        bad = beyond and len(self.ends) == self.window and all(sign * (end - limit) > 0 for end in self.ends)
        recover = limit if self.recover is None else self.recover
        undecided = beyond and sign * (end - limit) <= 0
        return RuleResult(bad, sign * (value - recover) <= 0, numbers, suspect=beyond, undecided=undecided)

    def state_dict(self) -> dict[str, Any]:
        return {"ends": list(self.ends)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ends = list(state["ends"])
