"""Slow, obvious computation of rank correlations and their jackknife, one row at a time."""

import math
from collections.abc import Sequence

from scipy.stats import spearmanr, t


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's correlation by scipy; NaN without variance."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return float(spearmanr(a, b).statistic)


def jackknife_half_width(a: Sequence[float], b: Sequence[float], tasks: Sequence[int]) -> float:
    """Half of the 95 % interval of `correlation`: Student's t times the jackknife's standard error over tasks."""
    without = []
    for left_out in sorted(set(tasks)):
        rows = [i for i, task in enumerate(tasks) if task != left_out]
        without.append(correlation([a[i] for i in rows], [b[i] for i in rows]))
    n = len(without)
    center = sum(without) / n
    squared_error = (n - 1) / n * sum((value - center) ** 2 for value in without)
    return float(t.ppf(0.975, n - 1)) * math.sqrt(squared_error)


def mean_and_squared_error(returns: Sequence[float]) -> tuple[float, float]:
    """The mean of the known returns and its squared standard error; NaN where there are too few."""
    known = [value for value in returns if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    mean = sum(known) / len(known)
    if len(known) < 2:
        return mean, math.nan
    return mean, sum((value - mean) ** 2 for value in known) / (len(known) - 1) / len(known)
