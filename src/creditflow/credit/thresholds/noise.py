"""A lower threshold for agents with noisier sub-rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass

from creditflow.credit.thresholds.base import METRIC, SHARE, BatchStats, ByAgent, Check, between, option, threshold_kind


@dataclass(slots=True)
class _Spread:
    """An exponentially weighted mean: the unnormalised sum and its weight (1 - smoothing^updates)."""

    total: float = option(0.0, between(0, math.inf))
    weight: float = option(0.0, Check("a number above 0, at most 1", lambda value: SHARE.holds(value) and value > 0))

    @property
    def mean(self) -> float:
        return self.total / self.weight


@threshold_kind("noise")
@dataclass
class Noise(ByAgent[_Spread]):
    """A lower threshold for agents with noisier sub-rewards: `hi - (hi - lo) * min(1, 2 * sd)`.

    sd is the spread of sub-rewards within groups, smoothed exponentially with bias correction, so that the first update
    counts fully. The factor 2: the largest standard deviation of numbers in [0, 1] is 0.5, a coin's. If scores within
    a group differ that much, a strict gate closes by chance. The kind has no target pass rate.
    """

    kind = "noise"
    state = _Spread

    smoothing: float = option(0.9, Check("a number from 0 to below 1", lambda value: SHARE.holds(value) and value < 1))
    """Weight of the past at every update, from 0 (the last batch alone) to below 1."""

    def known(self, state: _Spread) -> float:
        low, high = self.range
        return max(low, high - (high - low) * min(1.0, 2.0 * state.mean))

    def update(self, observed: BatchStats) -> None:
        for agent, sd in observed.spread.items():
            spread = self.agents.setdefault(agent, _Spread())
            spread.total = self.smoothing * spread.total + (1 - self.smoothing) * float(sd)
            spread.weight = self.smoothing * spread.weight + (1 - self.smoothing)

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_spread/<agent>`: the smoothed sd."""
        return super().metrics() | {f"{METRIC}_spread/{agent}": spread.mean for agent, spread in self.agents.items()}
