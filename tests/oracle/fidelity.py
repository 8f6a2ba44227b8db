"""Slow, obvious computation of rank correlations, their bootstrap, and a noise ceiling, one row at a time."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import spearmanr


def correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's correlation by scipy; NaN without variance."""
    if len(set(a)) < 2 or len(set(b)) < 2:
        return math.nan
    return float(spearmanr(a, b).statistic)


def bootstrap(a: Sequence[float], b: Sequence[float], tasks: Sequence[int], resamples: int, seed: int) -> list[float]:
    """Correlations of resampled data: tasks are drawn with replacement, and each brings all its rows."""
    rng, names = np.random.default_rng(seed), sorted(set(tasks))
    rows = {task: [i for i, own in enumerate(tasks) if own == task] for task in names}
    correlations = []
    for _ in range(resamples):
        drawn = [i for task in rng.choice(names, len(names)) for i in rows[task]]
        correlations.append(correlation([a[i] for i in drawn], [b[i] for i in drawn]))
    return [value for value in correlations if not math.isnan(value)]


def mean_and_squared_error(returns: Sequence[float]) -> tuple[float, float]:
    """The mean of the known returns and its squared standard error; NaN where there are too few."""
    known = [value for value in returns if not math.isnan(value)]
    if not known:
        return math.nan, math.nan
    mean = sum(known) / len(known)
    if len(known) < 2:
        return mean, math.nan
    return mean, sum((value - mean) ** 2 for value in known) / (len(known) - 1) / len(known)
