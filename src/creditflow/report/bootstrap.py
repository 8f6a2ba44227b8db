"""How sure a difference between two arms is. Knows counts by seed and task; not what was counted.

Shape suffixes: R runs (seeds), V validation tasks, B resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from creditflow.trajectory import Floats

RESAMPLES = 10_000
COVERAGE = 0.95
_CHUNK = 1_000
"""Resamples drawn together: bounds the memory that many tasks take."""


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """So many of so many, in every run and on every task; the tasks are the same ones in every run."""

    part_RV: Floats
    """[R, V] how many were counted (passed plays, wrong steps)."""
    whole_RV: Floats
    """[R, V] out of how many."""

    def rates(self) -> Floats:
        """[R] each run's rate, over all its tasks; NaN where there was nothing to count."""
        return _ratio(self.part_RV.sum(axis=1), self.whole_RV.sum(axis=1))


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean over runs, with the interval that resampling gives it."""

    mean: float
    low: float
    high: float


def paired_difference(a: Counts, b: Counts, *, seed: int = 0) -> Difference:
    """Mean rate of `a` minus that of `b`, with a 95 % percentile bootstrap interval.

    `a` and `b` share seeds and tasks, row by row and column by column. Both factors are resampled, crossed: a resample
    draws R runs and V tasks with replacement, the same for both arms (Owen 2007, "The pigeonhole bootstrap", which
    shows this to be conservative). With one run only tasks vary, and the interval says nothing about other seeds.
    Raises ValueError where the two do not pair.
    """
    if a.part_RV.shape != b.part_RV.shape:
        raise ValueError(
            f"paired arms: expected as many runs and tasks in both, got {a.part_RV.shape}, {b.part_RV.shape}"
        )
    rng = np.random.Generator(np.random.Philox(seed))
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
    """How often each run [B, R] and each task [B, V] was drawn."""
    runs_BR, tasks_BV = (rng.multinomial(size, np.full(size, 1 / size), resamples) for size in shape)
    return runs_BR.astype(np.float64), tasks_BV.astype(np.float64)


def _resampled_rates(counts: Counts, runs_BR: Floats, tasks_BV: Floats) -> Floats:
    """[B] the mean of the drawn runs' rates over the drawn tasks."""
    rates_BR = _ratio(tasks_BV @ counts.part_RV.T, tasks_BV @ counts.whole_RV.T)
    drawn_BR = np.where(runs_BR > 0, rates_BR, 0.0)  # a run that was not drawn must not spread its NaN
    return np.asarray((drawn_BR * runs_BR).sum(axis=1) / runs_BR.sum(axis=1), dtype=np.float64)


def _ratio(part: Floats, whole: Floats) -> Floats:
    """`part / whole`, NaN where `whole` is 0."""
    ratio: Floats = np.full(part.shape, np.nan)
    np.divide(part, whole, out=ratio, where=whole > 0)
    return ratio
