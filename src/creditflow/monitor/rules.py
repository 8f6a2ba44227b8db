"""Kinds of rule: how a series of one metric becomes a finding that something is wrong, and that it is well again.

Each kind weighs what it sees against chance, since a rule that acts on noise does more harm than none. A kind knows
numbers and how many observations stand behind them; not what they are of, nor what is done about them.
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
class Finding:
    """What a rule makes of a series after its newest value."""

    bad: bool
    """What the rule looks for is there, and chance does not explain it."""
    well: bool
    """It has been on the right side of `recover` for as long as was asked."""
    numbers: Mapping[str, float]
    """What decided: for people, and for the event's record."""
    suspect: bool = False
    """The newest value alone is on the wrong side: what is saved now may be no good to go back to."""


class Rule(Protocol):
    """What every kind does, built-in or a user's own. One rule watches one metric."""

    def look(self, value: float, over: float | None) -> Finding:
        """Take in the next value, which is finite. `over`: of how many observations it is a share, if known."""

    def state_dict(self) -> dict[str, Any]:
        """All that the future depends on, beside the options, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`."""


Kind = TypeVar("Kind", bound=Callable[..., Rule])

RULES: Registry[Callable[..., Rule]] = Registry(f"{KEY}.<rule>.kind")
"""`{kind: name, key: value, ...}` calls the entry with the other keys as keywords, once for each metric it watches."""


def guard_rule(name: str) -> Callable[[Kind], Kind]:
    """Register a kind of rule: a callable of options that makes one. Raises ConfigError from there for bad options."""

    def register(kind: Kind) -> Kind:
        RULES.add(name, kind)
        return kind

    return register


@guard_rule("level")
@dataclass(slots=True)
class Level:
    """A metric has been beyond a limit, over a window.

    Of a share whose counts are known (`over`), the pooled share of the window is beyond the limit by more than chance
    explains, and so is the newest value: a score test with the variance that the limit implies, or that of the last
    twenty values where it is larger (verdicts of one step stand and fall together), taken from the differences of
    neighbours, which a trend leaves alone (von Neumann et al. 1941, "The mean square successive difference"). Of any
    other metric, every value of the window is beyond:
    were it there by chance half of the time, that would happen once in `2 ** window` looks (a sign test, which asks
    nothing of the distribution).
    """

    above: float | None = None
    below: float | None = None
    times_first: bool = False
    """Limits are multiples of the first value that was seen."""
    window: int = 5
    shortest: int | None = None
    """Of a share whose counts are known: the newest values alone may decide, so many of them at least; default: all of
    the window. `p_value` is then divided among the widths."""
    p_value: float = 1e-4
    """How rarely chance may explain it, at one look."""
    recover: float | None = None
    """On the other side of this it is well again; default: the limit."""
    recover_epochs: int = 5
    """For so many values in a row."""
    first: float | None = field(init=False, default=None)
    values: list[tuple[float, float]] = field(init=False, default_factory=list)
    """Of the last values, each with its count, 0 where there is none."""

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

    def look(self, value: float, over: float | None) -> Finding:
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
        return Finding(bad, well and not bad, numbers, suspect)

    def _of_widths(self, window: list[tuple[float, float]], limit: float) -> tuple[dict[str, float], int]:
        """What the newest values say, in the width that chance explains least; and how many widths were tried."""
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
    """A metric fell over a window of validations, by more than a margin and more than chance explains.

    The fall is that of the least-squares line through the window's `window + 1` values. Its standard error is the
    binomial one of the shares, or the line's own residuals' where those are larger. The latter comes from few values:
    where accuracy wanders by more than its counts explain, `p_value` is only a rough promise, and `by` the guard.
    """

    by: float = 0.05
    window: int = 5
    """Validations that it is the fall over: as many steps from one to the next."""
    p_value: float = 2e-3
    recover: float | None = None
    """A fall of at most so much over the window is none any more; default: half of `by`."""
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

    def look(self, value: float, over: float | None) -> Finding:
        assert self.recover is not None
        self.values = [*self.values, (value, over or 0.0)][-(self.window + 1) :]
        numbers = {"value": value, "limit": self.by, "window": float(len(self.values) - 1)}
        if len(self.values) <= self.window:
            return Finding(False, False, numbers)
        fall, spread = _fall(self.values)
        p = _beyond(fall, spread)
        numbers |= {"fall": fall, "standard_error": spread, "p": p}
        bad = fall > self.by and p < self.p_value
        return Finding(bad, fall <= self.recover, numbers, suspect=fall > self.by)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [list(pair) for pair in self.values]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = [(value, over) for value, over in state["values"]]


_LINE = 3
_NEIGHBOURS = 20
_MANY, _KEPT = 8, 0.79
"""From so many differences on; and the share of their mean that is left without the largest (0.69 of 8, 0.80 of 19)."""


def _mean(counted: list[tuple[float, float]]) -> float:
    return sum(value * n for value, n in counted) / sum(n for _, n in counted)


def _pooled(counted: list[tuple[float, float]], limit: float, scatter: float) -> tuple[float, float]:
    """The pooled share, and its standard error if the true one were `limit`. `scatter`: the variance of one value."""
    implied = max(limit * (1 - limit), 0.0) / sum(n for _, n in counted)
    return _mean(counted), math.sqrt(max(implied, scatter / len(counted)))


def _scatter(values: list[float]) -> float:
    """The variance of one value about where the series is: half the mean square difference of neighbours.

    Of many, without the largest one, which may be the very change that is looked for; the others count for it as they
    would on average if values were normal.
    """
    steps = sorted((after - before) ** 2 for before, after in itertools.pairwise(values))
    if len(steps) < _MANY:
        return sum(steps) / len(steps) / 2 if steps else 0.0
    return sum(steps[:-1]) / (len(steps) - 1) / 2 / _KEPT


def _fall(counted: list[tuple[float, float]]) -> tuple[float, float]:
    """How far the least-squares line falls from the first value to the last, and the standard error of that."""
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
    """How likely chance alone would lead so far, one-sided."""
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
