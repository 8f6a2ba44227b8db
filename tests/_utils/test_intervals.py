"""Student's t intervals against scipy, and their coverage."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from creditflow._utils.intervals import LEAST_SEEDS, paired_difference

VALUES = st.lists(st.tuples(*[st.floats(0, 1)] * 2), min_size=LEAST_SEEDS, max_size=40)


@given(VALUES)
def test_interval_is_that_of_a_paired_t_test(pairs):
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    found = paired_difference(a.tolist(), b.tolist())
    half = stats.t.ppf(0.975, len(a) - 1) * (a - b).std(ddof=1) / math.sqrt(len(a))
    assert found.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert found.high - found.mean == pytest.approx(half, rel=1e-9, abs=1e-12)
    assert found.mean - found.low == pytest.approx(half, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_interval_covers_the_difference_in_95_percent(n):
    """The block effect of a seed is shared by both arms, and cancels."""
    rng, covered, repeats = np.random.default_rng(n), 0, 4000
    for _ in range(repeats):
        seed_R = rng.normal(0, 0.3, n)
        a, b = 0.1 + seed_R + rng.normal(0, 0.05, n), seed_R + rng.normal(0, 0.1, n)
        found = paired_difference(a.tolist(), b.tolist())
        covered += found.low <= 0.1 <= found.high
    assert covered == 0 if n < LEAST_SEEDS else 0.94 < covered / repeats < 0.96


def test_unknown_values_have_no_interval():
    found = paired_difference([math.nan] * 5, [0.0] * 5)
    assert all(math.isnan(value) for value in (found.mean, found.low, found.high))


def test_seeds_of_different_number_do_not_pair():
    with pytest.raises(ValueError, match="paired seeds: expected as many values on both sides, got 2, 1"):
        paired_difference([0.0, 1.0], [0.0])
