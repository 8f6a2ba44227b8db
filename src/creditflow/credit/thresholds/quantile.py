"""A threshold that holds a target share of open gates for each agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from creditflow.credit.thresholds.base import (
    GATE_TOLERANCE,
    METRIC,
    ROUNDING,
    AgentNames,
    BatchStats,
    check_state,
    expect_number,
    expect_range,
    mean,
    read_agents,
    read_number,
    read_numbers,
    start,
    theta_metrics,
    threshold_kind,
)
from creditflow.data import Floats
from creditflow.errors import ConfigError


@dataclass(slots=True)
class _Tracked:
    """The state of the quantile threshold for one agent."""

    theta: float
    pass_rate: float
    """Smoothed share of steps above theta."""
    above: Floats
    """[POINTS] the same at every candidate threshold."""
    seen: int = 0
    """Scored steps since the start or the last jump."""
    surprise: float = 0.0
    """Recent mean difference of pass rates from the tracked one."""


@threshold_kind("quantile")
@dataclass(slots=True)
class Quantile:
    """For each agent, the threshold in `range` at which the share `target_pass_rate` of its scored steps passes.

    A streaming quantile. A running mean tracks the share of steps above each of POINTS candidates; it forgets after
    about MEMORY steps, and immediately when the pass rate jumps. theta is the candidate nearest to the target, with
    hysteresis: it moves only if another candidate is nearer by more than DEAD_BAND, among equally near ones to the
    one nearest to the current theta.

    The update `theta += rate * (pass rate - target)` of Robbins and Monro (1951) would be simpler. But with scores of
    few values (quarters, say) there may be no threshold that meets the target: that update then keeps crossing one of
    the values, and the gates of all steps with that score open and close with it.
    """

    team: AgentNames = None
    target_pass_rate: float = 0.8
    range: tuple[float, float] = (0.3, 0.7)
    floor: float = 0.1
    initial: float | None = None
    """The start of the first agents; None: the middle of the range. Later agents start at the mean of the known ones.
    """
    _tracked: dict[str, _Tracked] = field(init=False, default_factory=dict)

    POINTS: ClassVar[int] = 101
    MEMORY: ClassVar[int] = 768
    """In steps, not updates: 16 steps are too few to estimate a quantile, 1000 suffice."""
    RECENT: ClassVar[int] = 128
    """Approximate number of steps over which surprise is averaged; its standard deviation is then at most 0.03."""
    JUMP: ClassVar[float] = 0.1
    """More surprise than this indicates that the distribution of scores has changed."""
    DEAD_BAND: ClassVar[float] = 0.025
    MIN_STEPS: ClassVar[int] = 32
    """Steps that an agent needs before its threshold moves; fewer give no usable quantile."""
    OFF_TARGET: ClassVar[float] = 0.05
    """A threshold is saturated if every pass rate in the range is farther from the target than this."""

    def __post_init__(self) -> None:
        self.range = expect_range(self.range, self.initial)
        expect_number("target_pass_rate", self.target_pass_rate, 0.0, 1.0)
        expect_number("floor", self.floor, 0.0, 1.0)

    def theta(self, agent: str) -> float:
        return self._tracked[agent].theta if agent in self._tracked else self._team_estimate()

    def update(self, observed: BatchStats) -> None:
        start = self._team_estimate()  # the same for all new agents, in any order
        for agent, r in observed.sub_rewards.items():
            if len(r):
                tracked = self._tracked.setdefault(agent, _Tracked(start, 0.0, np.zeros(self.POINTS)))
                self._track(tracked, np.sort(np.asarray(r, dtype=np.float64)))
                self._move(tracked)

    def state_dict(self) -> dict[str, Any]:
        agents = {
            agent: {
                "theta": t.theta,
                "pass_rate": t.pass_rate,
                "above": t.above.tolist(),
                "seen": t.seen,
                "surprise": t.surprise,
            }
            for agent, t in self._tracked.items()
        }
        return {"kind": "quantile", "range": list(self.range), "agents": agents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "quantile", "range", "agents")
        # The tracked shares belong to the points of one range; for another range they would be silently wrong.
        if state["range"] != list(self.range):
            raise ConfigError(f"threshold state: range: expected {list(self.range)}, got {state['range']!r}")
        tracked = {}
        for agent, entry in read_agents(state, "theta", "pass_rate", "above", "seen", "surprise"):
            above = np.array(read_numbers(entry, "above"))
            if len(above) != self.POINTS:
                raise ConfigError(f"threshold state: above: expected {self.POINTS} numbers, got {len(above)}")
            if not (type(entry["seen"]) is int and entry["seen"] > 0):
                raise ConfigError(f"threshold state: seen: expected a whole number of steps, got {entry['seen']!r}")
            tracked[agent] = _Tracked(
                read_number(entry, "theta", *self.range),
                read_number(entry, "pass_rate", 0.0, 1.0),
                above,
                int(entry["seen"]),
                read_number(entry, "surprise", -self.JUMP, self.JUMP),
            )
        self._tracked = tracked

    def metrics(self) -> dict[str, float]:
        """Two metrics for each agent with at least MIN_STEPS steps, in addition to the thresholds.

        `propagation/threshold_pass_rate/<agent>`: the smoothed pass rate, before the floor opens any gate.
        `propagation/threshold_saturated/<agent>`: 1 if no threshold in the range comes within OFF_TARGET of the target.
        """
        result = theta_metrics(self, self._team_estimate(), {*(self.team or ()), *self._tracked})
        for agent, tracked in self._tracked.items():
            if tracked.seen >= self.MIN_STEPS:
                nearest = min(self._distances(tracked).min(), self._distance(tracked))
                result[f"{METRIC}_pass_rate/{agent}"] = tracked.pass_rate
                result[f"{METRIC}_saturated/{agent}"] = float(nearest > self.OFF_TARGET + ROUNDING)
        return result

    def _team_estimate(self) -> float:
        return mean((t.theta for t in self._tracked.values()), start(self.range, self.initial))

    def _points(self) -> Floats:
        return np.linspace(*self.range, self.POINTS)

    def _track(self, tracked: _Tracked, r: Floats) -> None:
        """Update the shares with a batch's sorted sub-rewards: a plain mean at first, later one that forgets."""
        n, passed = len(r), float(_share_above(r, tracked.theta))
        if tracked.seen:
            tracked.surprise += n / (n + self.RECENT) * (passed - tracked.pass_rate - tracked.surprise)
        if abs(tracked.surprise) > self.JUMP:
            tracked.seen, tracked.surprise = 0, 0.0
        tracked.seen += n
        weight = max(n / tracked.seen, n / (n + self.MEMORY))
        tracked.above += weight * (_share_above(r, self._points()) - tracked.above)
        tracked.pass_rate += weight * (passed - tracked.pass_rate)

    def _move(self, tracked: _Tracked) -> None:
        """Move to the candidate nearest to the target, if it is nearer by more than the dead band."""
        if tracked.seen < self.MIN_STEPS:
            return
        points, distances = self._points(), self._distances(tracked)
        if self._distance(tracked) > distances.min() + self.DEAD_BAND:
            nearest = np.flatnonzero(distances <= distances.min() + ROUNDING)
            best = nearest[np.abs(points[nearest] - tracked.theta).argmin()]
            tracked.theta, tracked.pass_rate = float(points[best]), float(tracked.above[best])

    def _distance(self, tracked: _Tracked) -> float:
        return abs(tracked.pass_rate - self.target_pass_rate)

    def _distances(self, tracked: _Tracked) -> Floats:
        return np.abs(tracked.above - self.target_pass_rate)


def _share_above(sorted_r: Floats, theta: Floats | float) -> Floats:
    """The share of `sorted_r` that passes the hard gate at each theta."""
    return 1.0 - np.searchsorted(sorted_r, np.asarray(theta) + GATE_TOLERANCE, side="right") / len(sorted_r)
