"""The report of an audit of decisions: which ones mattered, and how faithful each rule's credit is to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from creditflow.credit import Assignment
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local.values import DecisionValues, Fidelity, fidelity

FALSE_DISCOVERIES = 0.05
"""The expected share of wrong signs among the known ones, at most."""
_MOST_SPLITS = 20_000
"""The largest number of splits of a decision's returns to compare: 8 + 8 returns have 12,870."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One measured decision, with values in units of the outcome; NaN: unknown."""

    step_id: str
    agent: str
    agrees: str
    """`yes` or `no`: whether the advantage has the sign of `value`; `unclear` if that sign is unknown or the advantage
    is 0; empty if the value is unknown."""
    value: float
    """Its value, from all continuations. Too large in the mean if the decision was selected by it."""
    error: float
    """The standard error of `value`."""
    selecting: float
    """The value from the first half of the continuations, by which decisions are selected."""
    confirmed: float
    """The value from the second half, which has no part in the selection: without bias."""
    confirmed_error: float
    """The standard error of `confirmed`."""
    advantage: float
    """The trained advantage."""


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
    """The decisions, largest `selecting` value first. `trained`: the assignment that was trained on."""
    half, advantage_D = values.after_DK.shape[1] // 2, trained.advantage.advantage_S[step_D]
    selecting, confirming = values.part(slice(half)), values.part(slice(half, None))
    columns = (values.value_D, values.error_D, selecting.value_D, confirming.value_D, confirming.error_D, advantage_D)
    number_DC, agent_D = np.stack(columns, axis=1), batch.agent_of_step[step_D]
    sign_D = np.sign(values.value_D) * np.sign(advantage_D) * discovered(p_values(values))
    agrees_D = [{1.0: "yes", -1.0: "no", 0.0: "unclear"}.get(sign, "") for sign in sign_D.tolist()]
    return [
        DecisionRow(batch.step_ids[step_D[d]], batch.agent_names[agent_D[d]], agrees_D[d], *number_DC[d].tolist())
        for d in np.argsort(-abs(selecting.value_D), kind="stable")  # NaN is last
    ]


def p_values(values: DecisionValues) -> Floats:
    """[D] two-sided p-values of a value of 0; NaN without a return on either side.

    Permutation tests of the difference of means: the share of the splits of all returns into two such sides whose
    difference is as large. All splits count if there are at most `_MOST_SPLITS`, else the recorded one and that number
    of random ones (Phipson and Smyth 2010, "Permutation p-values should never be zero"). The tests hold for few returns
    of 0 and 1, where the quantiles of Student's t reject equal sides too often.
    """
    rng, p_D = np.random.default_rng(0), np.full(len(values.task_D), np.nan)
    for d in np.flatnonzero(np.isfinite(values.value_D)):
        # The shorter side first: its mean determines that of the longer one.
        sides = sorted((side_K[np.isfinite(side_K)] for side_K in (values.after_DK[d], values.before_DK[d])), key=len)
        pooled, n = np.concatenate(sides), len(sides[0])
        if math.comb(len(pooled), n) <= _MOST_SPLITS:
            split_PX = pooled[_splits(len(pooled), n)]
        else:
            split_PX = np.vstack([pooled, rng.permuted(np.tile(pooled, (_MOST_SPLITS, 1)), axis=1)])[:, :n]
        gap_P = abs(split_PX.mean(axis=1) - pooled.mean())  # the first split is the recorded one
        p_D[d] = np.mean(gap_P >= gap_P[0] - 1e-9 * abs(pooled).max())  # equal but for rounding
    return p_D


@lru_cache
def _splits(total: int, n: int) -> Ints:
    """[P, n] each set of `n` of `total` indices; the first is 0 to n - 1."""
    return np.array(list(combinations(range(total), n)))


def discovered(p_D: Floats) -> Bools:
    """[D] the tests that reject at a false discovery rate of `FALSE_DISCOVERIES` (Benjamini and Hochberg 1995).

    It holds for independent tests, as those of separate continuations are. Control of the family-wise error (Holm 1979)
    would need p-values below 1 in 4,000 among 200 decisions; without any effect, both are the same.
    """
    known = np.sort(p_D[np.isfinite(p_D)])
    passing = known[known <= FALSE_DISCOVERIES * np.arange(1, len(known) + 1) / max(len(known), 1)]
    return np.asarray(p_D <= passing.max(initial=-1.0))


def rule_fidelities(assignments: Mapping[str, Assignment], step_D: Ints, values: DecisionValues) -> list[RuleFidelity]:
    """The fidelity of each rule's credit and advantage. Steps that a rule does not train do not count for it."""
    rows = []
    for rule, assignment in assignments.items():
        trained_D = assignment.groups.trained_S[step_D]
        columns = (assignment.credit.total_S, assignment.advantage.advantage_S)
        both = [fidelity(np.where(trained_D, column_S[step_D], np.nan), values) for column_S in columns]
        rows.append(RuleFidelity(rule, *both))
    return rows
