"""A constant threshold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from creditflow.credit.thresholds.base import FINITE, KEY, MAPPING, BuiltIn, option, threshold_kind
from creditflow.errors import UnknownAgentError, did_you_mean


@threshold_kind("fixed")
@dataclass
class Fixed(BuiltIn):
    """A constant threshold, optionally another one for some agents. It has no target pass rate."""

    kind = "fixed"

    value: float = option(0.5, FINITE)
    agents: Mapping[str, float] = field(default_factory=dict, metadata={"check": MAPPING})
    """Values of single agents by name; all others have `value`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for agent, value in self.agents.items():
            FINITE.expect(f"{KEY}.agents.{agent}", value)
            if self.team is not None and agent not in self.team:
                hint = did_you_mean(str(agent), self.team)
                raise UnknownAgentError(f"{KEY}.agents: expected {' or '.join(self.team)}, got {agent!r}{hint}")

    def theta(self, agent: str) -> float:
        return float(self.agents.get(agent, self.value))
