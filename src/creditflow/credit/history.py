"""Statistics of earlier batches, from which parts of credit are fitted.

Calibrated score weights and the score model keep sums over trajectories, one array for each agent,
which fade from batch to batch. The rule `posterior` keeps the observations of recent batches. Both are small, so that a
checkpoint and every step file can hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from creditflow.data import Floats, Ints
from creditflow.errors import DataError

DECAY = 0.8
"""The weight of a batch relative to the next one: in the long run the sums weigh as much as five batches."""

Sums = Mapping[str, Floats]
"""Sums over trajectories by agent."""
WINDOW = 8
"""The number of batches whose observations count, with the newest."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Scores and outcomes of C trajectories, or of the agents in them that have own outcomes, with S steps."""

    agents: tuple[str, ...]
    """The names behind `agent_S`."""
    cell_S: Ints
    """[S] the trajectory of each step, from 0."""
    agent_S: Ints
    """[S] the agent of each step."""
    bin_S: Ints
    """[S] the bin of its score (`creditflow.credit.fits.posteriors.BINS`); -1: unscored."""
    success_C: Floats
    """[C] the outcome, from 0 to 1; -1: unknown."""

    def to_json(self) -> dict[str, Any]:
        """Plain lists, which `from_json` restores."""
        arrays = {name: getattr(self, name).tolist() for name in ("cell_S", "agent_S", "bin_S", "success_C")}
        return {"agents": list(self.agents), **arrays}

    @classmethod
    def from_json(cls, state: Any) -> Observations:
        """Restore the result of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        cell_S, agent_S, bin_S = (np.array(state[name], dtype=np.int64) for name in ("cell_S", "agent_S", "bin_S"))
        agents, success_C = tuple(map(str, state["agents"])), np.array(state["success_C"], np.float64)
        limits = ((cell_S, len(success_C)), (agent_S, len(agents)), (bin_S + 1, _LARGEST_BIN + 2))
        if any(len(of_S) != len(cell_S) or not ((of_S >= 0) & (of_S < end)).all() for of_S, end in limits):
            raise ValueError("expected a trajectory, an agent and a bin for each step")
        return cls(agents, cell_S, agent_S, bin_S, success_C)


_LARGEST_BIN = 3


@dataclass(frozen=True, slots=True)
class History:
    """Faded sums over earlier batches, by fitted part and agent. Immutable."""

    parts: Mapping[str, Sums] = field(default_factory=dict)
    shadow: History | None = None
    """The history of the shadow's fitted parts."""
    observations: tuple[Observations, ...] = ()
    """The last WINDOW - 1 batches of the rule `posterior`, the newest last."""

    def sums(self, part: str) -> Sums:
        """The sums of a part; empty before its first batch."""
        return self.parts.get(part, {})

    def earlier(self, part: str, agents: Sequence[str], shape: tuple[int, ...]) -> Floats:
        """[A, *shape] the sums of a part by agent; zeros for an agent without any of this shape."""
        sums, zeros = self.sums(part), np.zeros(shape)
        return np.stack([sums[name] if name in sums and sums[name].shape == shape else zeros for name in agents])

    def after(self, parts: Mapping[str, Sums], observed: Observations | None = None) -> History:
        """The history after a batch with the sums `parts` and the observations `observed`.

        An array of another shape replaces the earlier one. Sums that overflowed are left out.
        """
        later = dict(self.parts)
        for part, batch_sums in parts.items():
            before = self.sums(part)
            finite = {agent: sums for agent, sums in batch_sums.items() if np.isfinite(sums).all()}  # inf never fades
            later[part] = {agent: DECAY * sums for agent, sums in before.items() if agent not in finite} | {
                agent: sums + DECAY * before[agent] if agent in before and before[agent].shape == sums.shape else sums
                for agent, sums in finite.items()
            }
        observations = self.observations if observed is None else (*self.observations, observed)[1 - WINDOW :]
        return History(later, self.shadow, observations)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, which `from_json` restores bit for bit."""
        parts = {name: {agent: sums.tolist() for agent, sums in part.items()} for name, part in self.parts.items()}
        return {
            "parts": parts,
            "shadow": None if self.shadow is None else self.shadow.to_json(),
            "observations": [batch.to_json() for batch in self.observations],
        }

    @classmethod
    def from_json(cls, state: Any) -> History:
        """Restore the result of `to_json`. Raises DataError for anything else."""
        try:
            parts = {
                str(name): {str(agent): np.array(sums, dtype=np.float64) for agent, sums in part.items()}
                for name, part in state["parts"].items()
            }
            shadow = None if state["shadow"] is None else cls.from_json(state["shadow"])
            observations = tuple(map(Observations.from_json, state.get("observations", ())))  # older files have none
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"history of credit: expected parts and shadow, got {str(state)[:80]!r}") from error
        return cls(parts, shadow, observations)
