"""A threshold that holds a target share of open gates for each agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from typing import ClassVar

import numpy as np

from creditflow.credit.thresholds.base import (
    GATE_TOLERANCE,
    METRIC,
    NEW_AGENT,
    ROUNDING,
    SHARE,
    WHOLE,
    BatchStats,
    ByAgent,
    between,
    option,
    shares,
    threshold_kind,
)
from creditflow.data import Floats

POINTS = 101
JUMP = 0.1
"""More surprise than this indicates that the distribution of scores has changed."""


@dataclass(slots=True)
class _Tracked:
    """The state of the quantile threshold for one agent."""

    theta: float = option(MISSING, SHARE)
    pass_rate: float = option(0.0, SHARE)
    """Smoothed share of steps above theta."""
    above: Sequence[float] = option((0.0,) * POINTS, shares(POINTS))
    """The same at every candidate threshold."""
    seen: int = option(0, WHOLE)
    """Scored steps since the start or the last jump."""
    surprise: float = option(0.0, between(-JUMP, JUMP))
    """Recent mean difference of pass rates from the tracked one."""


@threshold_kind("quantile")
@dataclass
class Quantile(ByAgent[_Tracked]):
    """For each agent, the threshold in `range` at which the share `target_pass_rate` of its scored steps passes.

    A streaming quantile. A running mean tracks the share of steps above each of POINTS candidates; it forgets after
    about MEMORY steps, and immediately when the pass rate jumps. theta is the candidate nearest to the target, with
    hysteresis: it moves only if another candidate is nearer by more than DEAD_BAND, among equally near ones to the
    one nearest to the current theta.

    The update `theta += rate * (pass rate - target)` of Robbins and Monro (1951) would be simpler. But with scores of
    few values (quarters, say) there may be no threshold that meets the target: that update then keeps crossing one of
    the values, and the gates of all steps with that score open and close with it.
    """

    kind = "quantile"
    same = ("kind", "range")  # the tracked shares belong to the points of one range
    state = _Tracked

    target_pass_rate: float = option(0.8, SHARE)
    floor: float = option(0.1, SHARE)

    MEMORY: ClassVar[int] = 768
    """In steps, not updates: 16 steps are too few to estimate a quantile, 1000 suffice."""
    RECENT: ClassVar[int] = 128
    """Approximate number of steps over which surprise is averaged; its standard deviation is then at most 0.03."""
    DEAD_BAND: ClassVar[float] = 0.025
    MIN_STEPS: ClassVar[int] = 32
    """Steps that an agent needs before its threshold moves; fewer give no usable quantile."""
    OFF_TARGET: ClassVar[float] = 0.05
    """A threshold is saturated if every pass rate in the range is farther from the target than this."""

    def known(self, state: _Tracked) -> float:
        return state.theta

    def update(self, observed: BatchStats) -> None:
        start = self.theta(NEW_AGENT)  # the same for all new agents, in any order
        for agent, r in observed.sub_rewards.items():
            if len(r):
                tracked = self.agents.setdefault(agent, _Tracked(start))
                self._track(tracked, np.sort(np.asarray(r, dtype=np.float64)))
                self._move(tracked)

    def metrics(self) -> dict[str, float]:
        """Two metrics for each agent with at least MIN_STEPS steps, in addition to the thresholds.

        `propagation/threshold_pass_rate/<agent>`: the smoothed pass rate, before the floor opens any gate.
        `propagation/threshold_saturated/<agent>`: 1 if no threshold in the range comes within OFF_TARGET of the target.
        """
        result = super().metrics()
        for agent, tracked in self.agents.items():
            if tracked.seen >= self.MIN_STEPS:
                nearest = min(self._distances(tracked).min(), self._distance(tracked))
                result[f"{METRIC}_pass_rate/{agent}"] = tracked.pass_rate
                result[f"{METRIC}_saturated/{agent}"] = float(nearest > self.OFF_TARGET + ROUNDING)
        return result

    def _points(self) -> Floats:
        low, high = self.range
        return np.linspace(low, high, POINTS)

    def _track(self, tracked: _Tracked, r: Floats) -> None:
        """Update the shares with a batch's sorted sub-rewards: a plain mean at first, later one that forgets."""
        n, passed = len(r), float(_share_above(r, tracked.theta))
        if tracked.seen:
            tracked.surprise += n / (n + self.RECENT) * (passed - tracked.pass_rate - tracked.surprise)
        if abs(tracked.surprise) > JUMP:
            tracked.seen, tracked.surprise = 0, 0.0
        tracked.seen += n
        weight = max(n / tracked.seen, n / (n + self.MEMORY))
        above = np.array(tracked.above)
        tracked.above = (above + weight * (_share_above(r, self._points()) - above)).tolist()
        tracked.pass_rate += weight * (passed - tracked.pass_rate)

    def _move(self, tracked: _Tracked) -> None:
        """Move to the candidate nearest to the target, if it is nearer by more than the dead band."""
        if tracked.seen < self.MIN_STEPS:
            return
        points, distances = self._points(), self._distances(tracked)
        if self._distance(tracked) > distances.min() + self.DEAD_BAND:
            nearest = np.flatnonzero(distances <= distances.min() + ROUNDING)
            best = nearest[np.abs(points[nearest] - tracked.theta).argmin()]
            tracked.theta, tracked.pass_rate = float(points[best]), tracked.above[best]

    def _distance(self, tracked: _Tracked) -> float:
        return abs(tracked.pass_rate - self.target_pass_rate)

    def _distances(self, tracked: _Tracked) -> Floats:
        return np.abs(np.array(tracked.above) - self.target_pass_rate)


def _share_above(sorted_r: Floats, theta: Floats | float) -> Floats:
    """The share of `sorted_r` that passes the hard gate at each theta."""
    return 1.0 - np.searchsorted(sorted_r, np.asarray(theta) + GATE_TOLERANCE, side="right") / len(sorted_r)
