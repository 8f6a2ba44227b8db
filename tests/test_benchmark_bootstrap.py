"""The bootstrap of committed benchmarks, whose rules have two or three seeds."""

import math
import random
import statistics

import numpy as np
import pytest

from benchmarks.bootstrap import PassCounts, paired_difference


def slow_interval(a, b, seed, resamples=3000):
    """Compute the same bootstrap in the most obvious way. `a`, `b`: [run][task] = (part, whole)."""
    rng = random.Random(seed)
    runs, tasks = range(len(a)), range(len(a[0]))

    def rate(arm, run, drawn):
        return sum(arm[run][t][0] for t in drawn) / sum(arm[run][t][1] for t in drawn)

    found = []
    for _ in range(resamples):
        drawn_runs, drawn_tasks = rng.choices(runs, k=len(runs)), rng.choices(tasks, k=len(tasks))
        found.append(statistics.mean(rate(a, r, drawn_tasks) - rate(b, r, drawn_tasks) for r in drawn_runs))
    cuts = statistics.quantiles(found, n=40, method="inclusive")
    mean = statistics.mean(rate(a, r, tasks) - rate(b, r, tasks) for r in runs)
    return mean, cuts[0], cuts[-1]


def simulated(rng, runs, tasks, right):
    return [
        [(sum(rng.random() < right for _ in range(n)), n) for n in rng.choices([1, 4], k=tasks)] for _ in range(runs)
    ]


def counts(arm):
    array = np.array(arm, dtype=np.float64)
    return PassCounts(array[..., 0], array[..., 1])


@pytest.mark.parametrize("runs", [1, 3])
def test_interval_matches_a_slow_bootstrap(runs):
    rng = random.Random(runs)
    a, b = simulated(rng, runs, 60, 0.8), simulated(rng, runs, 60, 0.6)

    found = paired_difference(counts(a), counts(b))
    mean, low, high = slow_interval(a, b, seed=7)

    assert found.mean == pytest.approx(mean)
    width = high - low
    assert found.low == pytest.approx(low, abs=0.08 * width)
    assert found.high == pytest.approx(high, abs=0.08 * width)


def test_difference_is_nan_without_counts():
    nothing = PassCounts(np.zeros((2, 3)), np.zeros((2, 3)))

    found = paired_difference(nothing, nothing)

    assert all(math.isnan(value) for value in (found.mean, found.low, found.high))


def test_arms_of_different_shape_do_not_pair():
    with pytest.raises(ValueError, match="expected as many runs and tasks in both"):
        paired_difference(PassCounts(np.ones((2, 3)), np.ones((2, 3))), PassCounts(np.ones((1, 3)), np.ones((1, 3))))
