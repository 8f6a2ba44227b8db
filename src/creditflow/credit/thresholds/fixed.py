"""A constant threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from creditflow.credit.thresholds.base import (
    KEY,
    AgentNames,
    BatchStats,
    check_state,
    expect_threshold,
    theta_metrics,
    threshold_kind,
)
from creditflow.errors import ConfigError, UnknownAgentError, did_you_mean


@threshold_kind("fixed")
@dataclass(slots=True)
class Fixed:
    """A constant threshold, optionally another one for some agents. It has no target pass rate."""

    team: AgentNames = None
    value: float = 0.5
    agents: Mapping[str, float] = field(default_factory=dict)
    """Values of single agents by name; all others have `value`."""
    floor: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        expect_threshold("value", self.value)
        if not isinstance(self.agents, Mapping):
            raise ConfigError(f"{KEY}.agents: expected a mapping from agent to number, got {self.agents!r}")
        for agent, value in self.agents.items():
            expect_threshold(f"agents.{agent}", value)
            if self.team is not None and agent not in self.team:
                hint = did_you_mean(str(agent), self.team)
                raise UnknownAgentError(f"{KEY}.agents: expected {' or '.join(self.team)}, got {agent!r}{hint}")

    def theta(self, agent: str) -> float:
        return float(self.agents.get(agent, self.value))

    def update(self, observed: BatchStats) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "fixed")

    def metrics(self) -> dict[str, float]:
        return theta_metrics(self, self.value, {*(self.team or ()), *self.agents})
