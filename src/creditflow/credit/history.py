"""Statistics of earlier batches, from which parts of credit are fitted.

Fitted parts are the prefix baseline, calibrated score weights and the score model. Each keeps sums over trajectories,
one array for each agent, which fade from batch to batch. The arrays are small, so that a checkpoint and every step file
can hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from creditflow.data import Floats
from creditflow.errors import DataError

DECAY = 0.8
"""The weight of a batch relative to the next one: in the long run the sums weigh as much as five batches."""

Sums = Mapping[str, Floats]
"""Sums over trajectories by agent."""


@dataclass(frozen=True, slots=True)
class History:
    """Faded sums over earlier batches, by fitted part and agent. Immutable."""

    parts: Mapping[str, Sums] = field(default_factory=dict)
    shadow: History | None = None
    """The history of the shadow's fitted parts."""

    def sums(self, part: str) -> Sums:
        """The sums of a part; empty before its first batch."""
        return self.parts.get(part, {})

    def after(self, parts: Mapping[str, Sums], shadow: History | None) -> History:
        """The history after a batch with the sums `parts`.

        An array of another shape replaces the earlier one. Sums that overflowed are left out.
        """
        made = dict(self.parts)
        for part, given in parts.items():
            before = self.sums(part)
            by_agent = {agent: sums for agent, sums in given.items() if np.isfinite(sums).all()}  # inf never fades
            faded = {agent: DECAY * sums for agent, sums in before.items() if agent not in by_agent}
            made[part] = faded | {
                agent: sums + DECAY * before[agent] if _same_shape(before.get(agent), sums) else sums
                for agent, sums in by_agent.items()
            }
        return History(made, shadow)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, which `from_json` restores bit for bit."""
        parts = {name: {agent: sums.tolist() for agent, sums in part.items()} for name, part in self.parts.items()}
        return {"parts": parts, "shadow": None if self.shadow is None else self.shadow.to_json()}

    @classmethod
    def from_json(cls, state: Any) -> History:
        """Restore the result of `to_json`. Raises DataError for anything else."""
        try:
            parts = {
                str(name): {str(agent): np.array(sums, dtype=np.float64) for agent, sums in part.items()}
                for name, part in state["parts"].items()
            }
            shadow = None if state["shadow"] is None else cls.from_json(state["shadow"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"history of credit: expected parts and shadow, got {str(state)[:80]!r}") from error
        return cls(parts, shadow)


def _same_shape(before: Floats | None, sums: Floats) -> bool:
    return before is not None and before.shape == sums.shape
