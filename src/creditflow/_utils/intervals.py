"""Means over independent units, with Student's t intervals.

Among runs the unit is the seed: tasks and trajectories of one run share its initial weights and its random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COVERAGE = 0.95
LEAST_SEEDS = 5
"""The least number of units for an interval: the spread of fewer is itself unknown to a factor of two."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean with its interval; NaN bounds without one."""

    mean: float
    low: float
    high: float


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of `a - b` over seeds, with a 95 % interval from `LEAST_SEEDS` seeds on.

    `a`, `b`: a value for each seed, in the same order. Raises ValueError for different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"paired seeds: expected as many values on both sides, got {len(a)}, {len(b)}")
    return mean_interval(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64))


def mean_interval(value_R: npt.NDArray[np.float64]) -> Difference:
    """The mean of R independent values, with a 95 % interval from `LEAST_SEEDS` values on."""
    n, mean, half = len(value_R), float(value_R.mean()), math.nan
    if n >= LEAST_SEEDS:
        half = _t_quantile(n - 1) * float(value_R.std(ddof=1)) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half)


def _t_quantile(degrees: int) -> float:
    """The half-width t of the interval in standard errors: Student's P(|T| <= t) equals `COVERAGE`, by bisection."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_probability(angle, degrees) < COVERAGE else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _t_probability(angle: float, degrees: int) -> float:
    """P(|T| <= sqrt(degrees) * tan(angle)) under Student's t (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4)."""
    odd, cosine = degrees % 2, math.cos(angle)
    total, term = 0.0, cosine if odd else 1.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
