"""Bootstrap intervals of a difference between two arms, from counts by seed and task.

Shape suffixes: R runs (seeds), V validation tasks, B resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.data import Floats
from creditflow.studies.comparison.results import METRICS, ArmDifference, ArmResult, differences
from creditflow.studies.intervals import COVERAGE, Difference

RESAMPLES = 10_000
_CHUNK = 1_000
"""Number of resamples drawn together, which bounds the memory for many tasks."""


@dataclass(frozen=True, slots=True, eq=False)
class PassCounts:
    """Numerators and denominators of a rate, by run and task; every run has the same tasks."""

    part_RV: Floats
    """[R, V] numerators: passed trajectories or wrong steps."""
    whole_RV: Floats
    """[R, V] denominators: all trajectories or scored steps."""

    def rates(self) -> Floats:
        """[R] each run's rate over all tasks; NaN if the denominator is 0."""
        return _ratio(self.part_RV.sum(axis=1), self.whole_RV.sum(axis=1))


def counts(arm: ArmResult, metric: str) -> PassCounts:
    """Numerators and denominators of a rate, by seed and task."""
    if metric == "step_error_rate":
        pairs_RV2 = np.array([run.after.step_errors for run in arm.runs], dtype=np.float64)
        return PassCounts(pairs_RV2[..., 0], pairs_RV2[..., 1])
    field = "greedy" if metric == "pass_at_1_greedy" else "sampled"
    part_RV = np.array([getattr(run.after, field) for run in arm.runs], dtype=np.float64)
    return PassCounts(part_RV, np.ones_like(part_RV))


def arm_differences(arms: Sequence[ArmResult], more: Sequence[tuple[str, str]]) -> list[ArmDifference]:
    """The pairs of `compare`, with bootstrap intervals, which these benchmarks have for two seeds."""
    counted = {arm.name: {metric: counts(arm, metric) for metric in METRICS} for arm in arms}
    return [
        ArmDifference(
            pair.name,
            pair.against,
            {
                metric: paired_difference(counted[pair.name][metric], counted[pair.against][metric])
                for metric in METRICS
            },
        )
        for pair in differences(arms, more)
    ]


def paired_difference(a: PassCounts, b: PassCounts) -> Difference:
    """Mean rate of `a` minus that of `b`, with a 95 % percentile bootstrap interval.

    `a` and `b` share seeds and tasks, row by row and column by column. Both factors are resampled, crossed: a resample
    draws R runs and V tasks with replacement, the same for both arms (Owen 2007, "The pigeonhole bootstrap", which
    shows this to be conservative). With one run only tasks vary, and the interval does not cover other seeds.
    Raises ValueError if the shapes differ.
    """
    if a.part_RV.shape != b.part_RV.shape:
        raise ValueError(
            f"paired arms: expected as many runs and tasks in both, got {a.part_RV.shape}, {b.part_RV.shape}"
        )
    rng = np.random.Generator(np.random.Philox(0))
    chunks = [
        _resampled_rates(a, draws_R, draws_V) - _resampled_rates(b, draws_R, draws_V)
        for draws_R, draws_V in (_draws(rng, a.part_RV.shape, _CHUNK) for _ in range(RESAMPLES // _CHUNK))
    ]
    differences_B = np.concatenate(chunks)
    differences_B = differences_B[np.isfinite(differences_B)]
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(differences_B, [tail, 1 - tail]) if len(differences_B) else (np.nan, np.nan)
    return Difference(float(np.mean(a.rates() - b.rates())), float(low), float(high))


def _draws(rng: np.random.Generator, shape: tuple[int, ...], resamples: int) -> tuple[Floats, Floats]:
    """Draw counts of each run [B, R] and of each task [B, V]."""
    runs_BR, tasks_BV = (rng.multinomial(size, np.full(size, 1 / size), resamples) for size in shape)
    return runs_BR.astype(np.float64), tasks_BV.astype(np.float64)


def _resampled_rates(counts: PassCounts, runs_BR: Floats, tasks_BV: Floats) -> Floats:
    """[B] the mean of the drawn runs' rates over the drawn tasks."""
    rates_BR = _ratio(tasks_BV @ counts.part_RV.T, tasks_BV @ counts.whole_RV.T)
    drawn_BR = np.where(runs_BR > 0, rates_BR, 0.0)  # the NaN of a run without draws must not spread
    return np.asarray((drawn_BR * runs_BR).sum(axis=1) / runs_BR.sum(axis=1), dtype=np.float64)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """`part / whole`, NaN where `whole` is 0."""
    ratio: Floats = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio
