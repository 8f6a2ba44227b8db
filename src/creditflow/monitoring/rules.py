"""Kinds of guard rule: decide from the series of a metric whether something is wrong or has recovered.

Each kind tests the series against chance, since a rule that acts on noise does more harm than no rule. A kind receives
numbers with their observation counts; the meaning of the metric and the action are outside of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Protocol, TypeVar

from creditflow.credit.registry import Registry
from creditflow.errors import ConfigError

KEY = "guard.rules"


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result of a rule after the newest value of a series."""

    bad: bool
    """The rule's condition holds, and chance does not explain it."""
    well: bool
    """The series has met the rule's condition for recovery."""
    numbers: Mapping[str, float]
    """The numbers behind the decision, for display and for the event."""
    suspect: bool = False
    """The newest value is on the wrong side, so a checkpoint saved now may be unfit for a rollback."""


class GuardRule(Protocol):
    """The interface of every kind, built-in or user-defined. One rule watches one metric."""

    def look(self, value: float, over: float | None) -> RuleResult:
        """Process the next value, which is finite. `over`: the observation count of a share, if known."""

    def state_dict(self) -> dict[str, Any]:
        """The state for later findings, without the options, as JSON types."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""


Kind = TypeVar("Kind", bound=Callable[..., GuardRule])

RULES: Registry[Callable[..., GuardRule]] = Registry(f"{KEY}.<rule>.kind")
"""`{kind: name, key: value, ...}` calls the entry with the other keys as keywords, once per watched metric."""


def guard_rule(name: str) -> Callable[[Kind], Kind]:
    """Register a kind: a callable that takes the options and returns a rule, or raises ConfigError for bad options."""

    def register(kind: Kind) -> Kind:
        RULES.add(name, kind)
        return kind

    return register


@guard_rule("level")
@dataclass(slots=True)
class Level:
    """A metric has been beyond a limit over a window.

    For a share with known counts (`over`), the newest value is beyond the limit, and the pooled share of the window is
    beyond it by more than chance explains. This is a score test with the variance that the limit implies, or the
    variance of the last twenty values if larger (verdicts of one step are correlated). The latter comes from the
    differences of neighbours, which a trend does not affect (von Neumann et al. 1941, "The mean square successive
    difference").

    For any other metric, every value of the window is beyond the limit. If each value were beyond it with probability
    one half, that would happen once in `2 ** window` looks (a sign test, which assumes nothing of the distribution).
    """

    above: float | None = None
    below: float | None = None
    times_first: bool = False
    """Limits are multiples of the first value of the series."""
    window: int = 5
    shortest: int | None = None
    """For a share with known counts: the smallest number of newest values that may decide; default: the window.
    `p_value` is then divided among the widths."""
    p_value: float = 1e-4
    """Largest p-value at which the rule fires, per look."""
    recover: float | None = None
    """Limit of the recovered side; default: the limit of the rule."""
    recover_epochs: int = 5
    """Number of newest values that must be on the recovered side; for a share with known counts, their mean must be."""
    first: float | None = field(init=False, default=None)
    values: list[tuple[float, float]] = field(init=False, default_factory=list)
    """The last values, each with its count; 0 without a count."""

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ConfigError("above, below: expected one of them")
        if not isinstance(self.times_first, bool):
            raise ConfigError(f"times_first: expected true or false, got {self.times_first!r}")
        _expect_whole("window", self.window)
        if self.shortest is not None:
            _expect_whole("shortest", self.shortest)
            if self.shortest > self.window:
                raise ConfigError(f"shortest: expected at most the window, {self.window}, got {self.shortest}")
        _expect_whole("recover_epochs", self.recover_epochs)
        _expect_p_value(self.p_value)
        _expect_number("above" if self.below is None else "below", self._limit)
        if self.recover is not None:
            _expect_number("recover", self.recover)
            if self._sign * (self.recover - self._limit) > 0:
                side = "above" if self.below is None else "below"
                raise ConfigError(
                    f"recover: {self.recover:g} lies where the rule fires ({side} {self._limit:g}): it would be well "
                    f"and ill at once; expected at {'most' if self.below is None else 'least'} {self._limit:g}"
                )

    @property
    def _limit(self) -> float:
        limit = self.above if self.below is None else self.below
        assert limit is not None
        return limit

    @property
    def _sign(self) -> float:
        return 1.0 if self.below is None else -1.0

    def look(self, value: float, over: float | None) -> RuleResult:
        if self.first is None:
            self.first = value
        self.values = [*self.values, (value, over or 0.0)][-max(self.window, self.recover_epochs, _NEIGHBOURS) :]
        scale = self.first if self.times_first else 1.0
        limit, recover = scale * self._limit, scale * (self._limit if self.recover is None else self.recover)
        window = self.values[-self.window :]
        numbers = {"value": value, "limit": limit, "window": float(len(window))}
        counted = over is not None and min(n for _, n in window) > 0
        suspect = self._sign * (value - limit) > 0
        bad = False
        if counted and len(window) >= (self.shortest or self.window):
            of_widths, widths = self._of_widths(window, limit)
            numbers |= of_widths
            bad = of_widths["p"] < self.p_value / widths and suspect
        elif not counted and len(window) == self.window:
            bad = all(self._sign * (seen - limit) > 0 for seen, _ in window)
        since = self.values[-self.recover_epochs :]
        back = [_mean(since)] if counted else [seen for seen, _ in since]
        well = len(since) == self.recover_epochs and all(self._sign * (seen - recover) <= 0 for seen in back)
        return RuleResult(bad, well and not bad, numbers, suspect)

    def _of_widths(self, window: list[tuple[float, float]], limit: float) -> tuple[dict[str, float], int]:
        """Test numbers of the width with the smallest p-value, and the number of widths."""
        scatter = _scatter([seen for seen, _ in self.values[-_NEIGHBOURS:]])
        shortest = self.shortest or self.window
        found = []
        for width in range(shortest, len(window) + 1):
            mean, spread = _pooled(window[-width:], limit, scatter)
            p = _beyond(self._sign * (mean - limit), spread)
            found.append({"window": float(width), "mean": mean, "over": sum(n for _, n in window[-width:]), "p": p})
        return min(found, key=lambda one: one["p"]), self.window - shortest + 1

    def state_dict(self) -> dict[str, Any]:
        return {"first": self.first, "values": [list(pair) for pair in self.values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first, self.values = state["first"], [(value, over) for value, over in state["values"]]


@guard_rule("drop")
@dataclass(slots=True)
class Drop:
    """A metric fell over a window of validations, by more than a margin and by more than chance explains.

    The fall is that of the least-squares line through the window's `window + 1` values. Its standard error is the
    binomial error of the shares, or that of the line's residuals if larger. The latter is estimated from few values: if
    accuracy varies by more than its counts explain, `p_value` holds only roughly, and `by` is the safeguard.
    """

    by: float = 0.05
    window: int = 5
    """Number of intervals between validations over which the fall is measured."""
    p_value: float = 2e-3
    recover: float | None = None
    """Largest fall over the window that counts as recovered; default: half of `by`."""
    values: list[tuple[float, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        _expect_whole("window", self.window)
        if self.window < _LINE:
            raise ConfigError(f"window: expected at least {_LINE}, for a line and what it leaves, got {self.window}")
        _expect_p_value(self.p_value)
        _expect_number("by", self.by)
        if self.by <= 0:
            raise ConfigError(f"by: expected a number above 0, got {self.by!r}")
        if self.recover is None:
            self.recover = self.by / 2
        _expect_number("recover", self.recover)
        if self.recover > self.by:
            raise ConfigError(
                f"recover: {self.recover:g} lies where the rule fires (a fall of more than {self.by:g}): it would be "
                "well and ill at once"
            )

    def look(self, value: float, over: float | None) -> RuleResult:
        assert self.recover is not None
        self.values = [*self.values, (value, over or 0.0)][-(self.window + 1) :]
        numbers = {"value": value, "limit": self.by, "window": float(len(self.values) - 1)}
        if len(self.values) <= self.window:
            return RuleResult(False, False, numbers)
        fall, spread = _fall(self.values)
        p = _beyond(fall, spread)
        numbers |= {"fall": fall, "standard_error": spread, "p": p}
        bad = fall > self.by and p < self.p_value
        return RuleResult(bad, fall <= self.recover, numbers, suspect=fall > self.by)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [list(pair) for pair in self.values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = [(value, over) for value, over in state["values"]]


_LINE = 3
_NEIGHBOURS = 20
_MANY, _KEPT = 8, 0.79
"""Number of differences from which the largest is dropped, and the share of the mean left (0.69 of 8, 0.80 of 19)."""


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


def _beyond(distance: float, spread: float) -> float:
    """One-sided p-value of `distance` under a normal error of standard deviation `spread`."""
    if spread == 0.0:
        return 0.0 if distance > 0 else 1.0
    return 1.0 - NormalDist().cdf(distance / spread)


def _expect_number(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {value!r}")


def _expect_whole(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: expected a whole number of at least 1, got {value!r}")


def _expect_p_value(value: object) -> None:
    _expect_number("p_value", value)
    assert isinstance(value, int | float)
    if not 0 < value < 1:
        raise ConfigError(f"p_value: expected a number between 0 and 1, got {value!r}")
