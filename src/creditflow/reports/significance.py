"""Tests and intervals behind the findings of a report. Each keeps its error rate without normal data.

That of a trend needs independent values too: values that drift, or depend on those before, have trends more often.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_POINTS = 400
"""Maximum points of a trend test, which compares all pairs; longer series are averaged over neighbours."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A monotone trend of a series."""

    slope: float
    """Median change per unit of time."""
    low: float
    high: float
    p: float
    """Two-sided probability of a trend this strong without one."""
    rises: bool
    first: float
    last: float
    """Means of the first and the last quarter."""


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """The Mann-Kendall test with the Theil-Sen slope and its 95 % interval (Mann 1945; Kendall 1975; Sen 1968).

    `points`: (time, value) by time. The null hypothesis is that the values are independent and of one distribution.
    Ties are corrected for.

    Raises ValueError for fewer than 4 points.
    """
    if len(points) < 4:
        raise ValueError(f"trend: expected at least 4 points, got {len(points)}")
    at = np.asarray(points, dtype=np.float64)
    if len(at) > _POINTS:
        at = np.array([part.mean(axis=0) for part in np.array_split(at, _POINTS)])
    n = len(at)
    later, earlier = np.tril_indices(n, -1)
    rise = at[later, 1] - at[earlier, 1]
    slopes = np.sort(rise / (at[later, 0] - at[earlier, 0]))
    score = float(np.sign(rise).sum())
    ties = np.unique(at[:, 1], return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    p = 1.0
    if variance > 0 and score != 0:
        p = 2 * _above((abs(score) - 1) / math.sqrt(variance))
    half = NormalDist().inv_cdf(0.975) * math.sqrt(max(variance, 0.0))
    low = slopes[max(math.floor((len(slopes) - half) / 2) - 1, 0)]
    high = slopes[min(math.ceil((len(slopes) + half) / 2), len(slopes) - 1)]
    quarter = max(n // 4, 1)
    first, last = float(at[:quarter, 1].mean()), float(at[-quarter:, 1].mean())
    return Trend(float(np.median(slopes)), float(low), float(high), min(p, 1.0), score > 0, first, last)


def association(strata: Iterable[tuple[int, int, int, int]]) -> tuple[float, float]:
    """The one-sided Mantel-Haenszel test (Mantel and Haenszel 1959): `(p, variance)` over 2 x 2 tables.

    Each table is (exposed and failed, exposed, failed, all). The null hypothesis is that within no stratum exposure
    goes with failure. `variance` is that of the number of exposed failures; the approximation needs about 5.
    """
    excess = variance = 0.0
    for both, exposed, failed, n in strata:
        if n < 2:
            continue
        excess += both - exposed * failed / n
        variance += exposed * (n - exposed) * failed * (n - failed) / (n * n * (n - 1))
    if variance == 0:
        return 1.0, 0.0
    return _above((excess - 0.5) / math.sqrt(variance)), variance


def at_least(successes: int, n: int, rate: float) -> float:
    """The probability of `successes` or more of `n` at `rate`, in (0, 1): the exact one-sided binomial test.

    Terms over 40 standard deviations from the mean, which add nothing, are left out.
    """
    if successes <= 0:
        return 1.0
    wide = 40 * math.sqrt(n * rate * (1 - rate)) + 100
    first, last = max(successes, int(n * rate - wide)), min(n, int(max(successes, n * rate) + wide))
    yes, no = math.log(rate), math.log(1 - rate)
    logs = [k * yes + (n - k) * no - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(first, last + 1)]
    most = max(logs)
    return min(1.0, math.exp(most + math.lgamma(n + 1)) * math.fsum(math.exp(log - most) for log in logs))


def _above(z: float) -> float:
    return 0.5 * math.erfc(z / math.sqrt(2))
