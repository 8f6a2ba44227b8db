"""The report of an audit of decisions: which ones mattered, and how faithful each rule's credit is to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from creditflow.credit import Assignment
from creditflow.data import Ints, TrajectoryBatch
from creditflow.engines.local.values import DecisionValues, Fidelity, fidelity

_Z = 1.96
"""Standard errors of half a 95 % interval."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One measured decision."""

    step_id: str
    agent: str
    value: float
    """Its value, in units of the outcome; NaN: unknown."""
    error: float
    """The standard error of the value; NaN: unknown."""
    advantage: float
    """The trained advantage."""
    agrees: str
    """`yes` or `no`: whether the advantage has the sign of the value; `unclear` if the 95 % interval of the value
    contains 0, or the advantage is 0; empty if either is unknown."""


@dataclass(frozen=True, slots=True)
class RuleFidelity:
    """The fidelity of one rule."""

    rule: str
    credit: Fidelity
    advantage: Fidelity
    """Fidelity of the advantages, the input of the loss."""


def decision_rows(
    batch: TrajectoryBatch, step_D: Ints, values: DecisionValues, trained: Assignment
) -> list[DecisionRow]:
    """The decisions, the one with the largest absolute value first. `trained`: the assignment that was trained on."""
    rows = []
    for step, value, error in zip(step_D.tolist(), values.value_D.tolist(), values.error_D.tolist(), strict=True):
        advantage = float(trained.advantage.advantage_S[step])
        agent = batch.agent_names[batch.agent_of_step[step]]
        rows.append(
            DecisionRow(batch.step_ids[step], agent, value, error, advantage, _agreement(value, error, advantage))
        )
    return sorted(rows, key=lambda row: -abs(row.value) if math.isfinite(row.value) else math.inf)


def _agreement(value: float, error: float, advantage: float) -> str:
    if not math.isfinite(value) or not math.isfinite(error):
        return ""
    if abs(value) <= _Z * error or advantage == 0:
        return "unclear"
    return "yes" if np.sign(value) == np.sign(advantage) else "no"


def rule_fidelities(assignments: Mapping[str, Assignment], step_D: Ints, values: DecisionValues) -> list[RuleFidelity]:
    """The fidelity of each rule's credit and advantage. Steps that a rule does not train do not count for it."""
    rows = []
    for rule, assignment in assignments.items():
        trained_D = assignment.groups.trained_S[step_D]
        credit_D, advantage_D = (
            np.where(trained_D, column_S[step_D], np.nan)
            for column_S in (assignment.credit.total_S, assignment.advantage.advantage_S)
        )
        rows.append(RuleFidelity(rule, fidelity(credit_D, values), fidelity(advantage_D, values)))
    return rows
