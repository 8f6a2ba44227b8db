"""The report of an audit of decisions: which ones mattered, and how faithful each rule's credit is to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from creditflow.credit import Assignment
from creditflow.credit.rewards import outcome_of
from creditflow.data import Bools, Floats, Ints, TrajectoryBatch
from creditflow.engines.local.values import DecisionValues, Fidelity, fidelity

FALSE_DISCOVERIES = 0.05
"""The expected share of wrong signs among the known ones, at most."""


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
    scores = filter(None, (outcome_of(batch, s) for s in step_D))
    bounds = [bound for score in scores for bound in (0.0, *score.range)] or [0.0, 1.0]  # 0: truncated and unscored
    sign_D = np.sign(values.value_D) * np.sign(advantage_D) * discovered(p_values(values, min(bounds), max(bounds)))
    agrees_D = [{1.0: "yes", -1.0: "no", 0.0: "unclear"}.get(sign, "") for sign in sign_D.tolist()]
    return [
        DecisionRow(batch.step_ids[step_D[d]], batch.agent_names[agent_D[d]], agrees_D[d], *number_DC[d].tolist())
        for d in np.argsort(-abs(selecting.value_D), kind="stable")  # NaN is last
    ]


def p_values(values: DecisionValues, low: float = 0.0, high: float = 1.0) -> Floats:
    """[D] two-sided p-values of a value of 0 of outcomes in [low, high]; NaN without a return on either side.

    Each return is rounded at random to `low` or `high`, which keeps its mean (Schlag 2008, "A new method for
    constructing exact tests without making any assumptions"): sides of equal means become equal distributions. For
    those, the permutation test of the difference of means is exact: the probability, given the number of `high`, of one
    as large (Fisher 1935). The one return of a whole trajectory counts as the mean of its side.
    """
    rng, p_D = np.random.default_rng(0), np.full(len(values.task_D), np.nan)
    for d in np.flatnonzero(np.isfinite(values.value_D)):
        sides = [side_K[np.isfinite(side_K)] for side_K in (values.after_DK[d], values.before_DK[d])]
        share_P = (np.concatenate(sides) - low) / (high - low)
        high_P, n, total = rng.random(len(share_P)) < share_P, len(sides[0]), len(share_P)
        n_high = int(high_P.sum())
        gaps = [abs(k * total - n * n_high) for k in range(n + 1)]
        ways = [math.comb(n_high, k) * math.comb(total - n_high, n - k) for k in range(n + 1)]
        least = gaps[high_P[:n].sum()]
        p_D[d] = sum(way for way, gap in zip(ways, gaps, strict=True) if gap >= least) / math.comb(total, n)
    return p_D


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
