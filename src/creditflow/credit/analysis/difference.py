"""The difference between two assignments of the same batch, by agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from creditflow.credit.assignment import Assignment
from creditflow.data import Bools, Floats
from creditflow.errors import BatchError


@dataclass(frozen=True, slots=True)
class CreditChange:
    """Changes in an agent's steps between two assignments. Add instances to combine batches."""

    steps: int = 0
    both: int = 0
    """Steps trained by both assignments."""
    credit_moved: float = 0.0
    """Sum of |c' - c| over steps trained by both."""
    credit: float = 0.0
    """Sum of |c'| + |c| over those steps: the upper bound of `credit_moved`."""
    flipped: int = 0
    """Steps trained by both, with advantages of opposite signs."""
    gates: int = 0
    """Steps whose gate is open in one assignment and closed in the other; 0 unless both rules have gates."""
    masked: int = 0
    """Steps trained by the first only."""
    unmasked: int = 0
    """Steps trained by the second only."""

    def __add__(self, other: CreditChange) -> CreditChange:
        return CreditChange(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def share_moved(self) -> float:
        """`sum |c' - c| / sum (|c'| + |c|)`, in [0, 1]; NaN without any credit.

        The Bray-Curtis dissimilarity, for signed values. 0: the credit is the same. 1: every step's credit is 0 under
        one assignment or has opposite signs under the two.
        """
        return self.credit_moved / self.credit if self.credit else float("nan")

    @property
    def share_flipped(self) -> float:
        """`flipped / both`, in [0, 1]; NaN if no step is trained by both."""
        return self.flipped / self.both if self.both else float("nan")


def moved(before: Assignment, after: Assignment) -> dict[str, CreditChange]:
    """The changes from `before` to `after`, two assignments of the same batch, for each agent that has steps.

    Raises BatchError if the ids of their steps differ.
    """
    batch, other = before.batch, after.batch
    if batch is not other and (batch.n_steps != other.n_steps or batch.step_ids != other.step_ids):
        raise BatchError("two assignments: expected the same steps in the same order")
    both_S = before.groups.trained_S & after.groups.trained_S
    flipped_S = np.sign(before.advantage.advantage_S) * np.sign(after.advantage.advantage_S) < 0
    open_S, opened_S = before.credit.gate_open_S, after.credit.gate_open_S
    none_S = np.zeros(batch.n_steps, dtype=np.bool_)
    changed_S = none_S if open_S is None or opened_S is None else open_S != opened_S
    names = batch.agent_names

    def sums(values_S: Floats | Bools) -> list[float]:
        return np.bincount(batch.agent_of_step, values_S.astype(np.float64), len(names)).tolist()  # type: ignore[no-any-return]

    columns = (
        sums(np.ones(batch.n_steps)),
        sums(both_S),
        sums(both_S * np.abs(after.credit.total_S - before.credit.total_S)),
        sums(both_S * (np.abs(after.credit.total_S) + np.abs(before.credit.total_S))),
        sums(both_S & flipped_S),
        sums(changed_S),
        sums(before.groups.trained_S & ~after.groups.trained_S),
        sums(~before.groups.trained_S & after.groups.trained_S),
    )
    types: list[type] = [int if f.type == "int" else float for f in fields(CreditChange)]
    return {
        name: CreditChange(*(kind(value) for kind, value in zip(types, values, strict=True)))
        for name, values in zip(names, zip(*columns, strict=True), strict=True)
        if values[0]
    }


def added(total: Mapping[str, CreditChange], more: Mapping[str, CreditChange]) -> dict[str, CreditChange]:
    """Add up the changes in two batches, by agent."""
    return {name: total.get(name, CreditChange()) + more.get(name, CreditChange()) for name in {**total, **more}}
