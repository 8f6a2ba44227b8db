"""How two assignments of the same plays differ, agent by agent. Arrays in, numbers out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from creditflow.errors import BatchError

if TYPE_CHECKING:
    from creditflow.credit.assignment import Assignment
    from creditflow.trajectory import Bools, Floats


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of an agent's steps under another assignment. Of several batches: add them up."""

    steps: int = 0
    both: int = 0
    """Steps that both train."""
    credit_moved: float = 0.0
    """Sum of |c' - c| over steps that both train."""
    credit: float = 0.0
    """Sum of |c'| + |c| over those steps: the most that `credit_moved` can be."""
    flipped: int = 0
    """Steps that both train, whose advantage has the other sign."""
    gates: int = 0
    """Steps whose gate is open under one and closed under the other."""
    masked: int = 0
    """Steps that only the first trains."""
    unmasked: int = 0
    """Steps that only the second trains."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def share_moved(self) -> float:
        """`sum |c' - c| / sum (|c'| + |c|)`, in [0, 1]; NaN without any credit.

        0: the same credit. 1: no step has credit of one sign under both (it was 0 under one, or changed its sign).
        This is the Bray-Curtis dissimilarity, for signed values.
        """
        return self.credit_moved / self.credit if self.credit else float("nan")

    @property
    def share_flipped(self) -> float:
        """`flipped / both`; NaN where no step is trained by both."""
        return self.flipped / self.both if self.both else float("nan")


def moved(before: Assignment, after: Assignment) -> dict[str, Moved]:
    """By agent, for agents that play; `before` and `after` are of the same plays.

    Raises BatchError where they are not: where the ids of the steps differ.
    """
    one, two = before.batch, after.batch
    if one is not two and (one.n_steps != two.n_steps or one.step_ids != two.step_ids):
        raise BatchError("two assignments: expected the same steps in the same order")
    both_S = before.trained_S & after.trained_S
    flipped_S = np.sign(before.advantage_S) * np.sign(after.advantage_S) < 0
    names = one.agent_names

    def sums(values_S: Floats | Bools) -> list[float]:
        return np.bincount(one.agent_of_step, values_S.astype(np.float64), len(names)).tolist()  # type: ignore[no-any-return]

    columns = (
        sums(np.ones(one.n_steps)),
        sums(both_S),
        sums(both_S * np.abs(after.credit_S - before.credit_S)),
        sums(both_S * (np.abs(after.credit_S) + np.abs(before.credit_S))),
        sums(both_S & flipped_S),
        sums(before.gate_open_S != after.gate_open_S),
        sums(before.trained_S & ~after.trained_S),
        sums(~before.trained_S & after.trained_S),
    )
    counts = [f.type == "int" for f in fields(Moved)]
    found = {
        name: Moved(*(int(value) if whole else value for value, whole in zip(of_agent, counts, strict=True)))
        for name, of_agent in zip(names, zip(*columns, strict=True), strict=True)
    }
    return {name: of_agent for name, of_agent in found.items() if of_agent.steps}


def added(total: Mapping[str, Moved], more: Mapping[str, Moved]) -> dict[str, Moved]:
    """What moved in two batches, by agent."""
    return {name: total.get(name, Moved()) + more.get(name, Moved()) for name in {**total, **more}}
