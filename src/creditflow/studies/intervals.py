"""Differences over paired seeds, with Student's t intervals.

The seed is the unit: tasks and trajectories of one run share its initial weights and its random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

COVERAGE = 0.95
LEAST_SEEDS = 5
"""Seeds below which there is no interval: the spread of fewer runs is itself unknown to a factor of two."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean over seeds with its interval; NaN bounds without one."""

    mean: float
    low: float
    high: float


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """The mean of `a - b` over seeds, with a 95 % interval from `LEAST_SEEDS` seeds on.

    `a`, `b`: a value for each seed, in the same order. Raises ValueError for different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"paired seeds: expected as many values on both sides, got {len(a)}, {len(b)}")
    difference_R = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    n, mean, half = len(difference_R), float(difference_R.mean()), math.nan
    if n >= LEAST_SEEDS:
        half = _t_quantile((1 + COVERAGE) / 2, n - 1) * float(difference_R.std(ddof=1)) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half)


def _t_quantile(p: float, degrees: int) -> float:
    """Student's t quantile by its expansion around the normal one (Abramowitz and Stegun 1964, 26.7.5).

    For 4 or more degrees of freedom and p = .975 it is right to 4 parts in 10,000.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92_160,
    )
    return float(sum(term / degrees**k for k, term in enumerate(terms)))
