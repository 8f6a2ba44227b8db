"""A lower threshold for agents with noisier sub-rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from creditflow.credit.thresholds.base import (
    KEY,
    METRIC,
    AgentNames,
    BatchStats,
    check_state,
    expect_number,
    expect_range,
    mean,
    read_agents,
    read_number,
    start,
    theta_metrics,
    threshold_kind,
)
from creditflow.errors import ConfigError


@dataclass(slots=True)
class _Spread:
    """An exponentially weighted mean: the unnormalised sum and its weight (1 - smoothing^updates)."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / self.weight


@threshold_kind("noise")
@dataclass(slots=True)
class Noise:
    """A lower threshold for agents with noisier sub-rewards: `hi - (hi - lo) * min(1, 2 * sd)`.

    sd is the spread of sub-rewards within groups, smoothed exponentially with bias correction, so that the first update
    counts fully. The factor 2: the largest standard deviation of numbers in [0, 1] is 0.5, a coin's. If scores within
    a group differ that much, a strict gate closes by chance. The kind has no target pass rate.
    """

    team: AgentNames = None
    range: tuple[float, float] = (0.3, 0.7)
    smoothing: float = 0.9
    """Weight of the past at every update, from 0 (the last batch alone) to below 1."""
    initial: float | None = None
    """The threshold before the first spread is known; None: the middle of the range."""
    floor: ClassVar[float] = 0.0
    _spreads: dict[str, _Spread] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.range = expect_range(self.range, self.initial)
        expect_number("smoothing", self.smoothing, 0.0, 1.0)
        if self.smoothing == 1:
            raise ConfigError(f"{KEY}.smoothing: expected a number below 1, got {self.smoothing!r}")

    def theta(self, agent: str) -> float:
        if agent not in self._spreads:
            return self._team_estimate()
        low, high = self.range
        return max(low, high - (high - low) * min(1.0, 2.0 * self._spreads[agent].mean))

    def update(self, observed: BatchStats) -> None:
        for agent, sd in observed.spread.items():
            spread = self._spreads.setdefault(agent, _Spread())
            spread.total = self.smoothing * spread.total + (1 - self.smoothing) * float(sd)
            spread.weight = self.smoothing * spread.weight + (1 - self.smoothing)

    def state_dict(self) -> dict[str, Any]:
        spreads = {agent: {"total": spread.total, "weight": spread.weight} for agent, spread in self._spreads.items()}
        return {"kind": "noise", "agents": spreads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "noise", "agents")
        spreads = {}
        for agent, entry in read_agents(state, "total", "weight"):
            spread = _Spread(read_number(entry, "total", 0.0), read_number(entry, "weight", 0.0, 1.0))
            if not spread.weight:
                raise ConfigError(f"threshold state: weight of agent {agent!r}: expected a number above 0, got 0")
            spreads[agent] = spread
        self._spreads = spreads

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_spread/<agent>`: the smoothed sd."""
        result = theta_metrics(self, self._team_estimate(), {*(self.team or ()), *self._spreads})
        return result | {f"{METRIC}_spread/{agent}": spread.mean for agent, spread in self._spreads.items()}

    def _team_estimate(self) -> float:
        return mean(map(self.theta, self._spreads), start(self.range, self.initial))
