"""Fidelity of credit against scipy, a slow bootstrap, and simulated decisions with known values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.engines.local.values import DecisionValues, Share, fidelity, spearman, task_weights
from tests.builders import examples
from tests.oracle.fidelity import bootstrap, correlation, mean_and_squared_error

weighted_rows = st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3), st.integers(0, 3)), min_size=2, max_size=20)


@given(weighted_rows)
def test_spearman_matches_scipy_on_repeated_rows(rows) -> None:
    a, b, times = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    expected = correlation(*(np.repeat(column, times.astype(int)).tolist() for column in (a, b)))
    np.testing.assert_allclose(spearman(a, b, times[None])[0], expected, atol=1e-9)


def measured(after, before, tasks) -> DecisionValues:
    return DecisionValues(np.array(tasks), np.array(after, dtype=np.float64), np.array(before, dtype=np.float64))


returns = st.lists(st.sampled_from([0.0, 0.5, 1.0, math.nan]), min_size=3, max_size=3)


@given(st.lists(st.tuples(returns, returns), min_size=1, max_size=12))
def test_values_and_errors_match_plain_means(rows) -> None:
    after, before = zip(*rows, strict=True)
    values = measured(after, before, range(len(rows)))
    for d, sides in enumerate(rows):
        (mean, error), (other, other_error) = map(mean_and_squared_error, sides)
        np.testing.assert_allclose(values.value_D[d], mean - other, atol=1e-12)
        np.testing.assert_allclose(values.error_D[d], math.sqrt(error + other_error), atol=1e-12)


@examples(30)
@given(st.lists(st.tuples(returns, returns, st.integers(0, 3), st.integers(-2, 2)), min_size=1, max_size=12))
def test_fidelity_is_the_correlation_of_known_decisions(rows) -> None:
    after, before, tasks, credit = zip(*rows, strict=True)
    found = fidelity(np.array(credit, dtype=np.float64), measured(after, before, tasks))
    values = [mean_and_squared_error(a)[0] - mean_and_squared_error(b)[0] for a, b in zip(after, before, strict=True)]
    known = [d for d, value in enumerate(values) if not math.isnan(value)]
    assert found.decisions == len(known)
    assert found.tasks == len({tasks[d] for d in known})
    expected = correlation([credit[d] for d in known], [round(values[d], 9) for d in known])
    np.testing.assert_allclose(found.correlation.value, expected, atol=1e-9)
    for number in (found.correlation.low, found.correlation.high):
        assert math.isnan(number) or -1 - 1e-9 <= number <= 1 + 1e-9
    assert math.isnan(found.ceiling.value) or 0 <= found.ceiling.value <= 1


def test_interval_matches_a_slow_bootstrap_over_tasks() -> None:
    rng = np.random.default_rng(3)
    tasks = np.repeat(np.arange(20), 5)
    value = rng.normal(size=100) + rng.normal(size=20)[tasks]
    credit = value + rng.normal(0, 1.0, 100) + rng.normal(size=20)[tasks]
    found = fidelity(credit, measured(value[:, None], np.zeros((100, 1)), tasks)).correlation
    low, high = np.quantile(bootstrap(credit.tolist(), value.tolist(), tasks.tolist(), 1500, 0), [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.03)
    assert found.high == pytest.approx(high, abs=0.03)


def test_fidelity_of_one_task_has_no_interval() -> None:
    found = fidelity(np.arange(3.0), measured([[0.0], [0.5], [1.0]], np.zeros((3, 1)), [7, 7, 7]))
    assert found.correlation.value == pytest.approx(1.0)
    assert math.isnan(found.correlation.low)
    assert math.isnan(found.correlation.high)
    assert math.isnan(found.ceiling.value)  # one continuation cannot be halved


def test_fidelity_without_a_known_value_is_undefined() -> None:
    found = fidelity(np.ones(2), measured(np.full((2, 2), math.nan), np.zeros((2, 2)), [0, 1]))
    assert (found.decisions, found.tasks) == (0, 0)
    assert math.isnan(found.correlation.value)


def drawn_values(rng: np.random.Generator, decisions: int, k: int, spread: float) -> tuple[np.ndarray, DecisionValues]:
    """True values, and the same measured by `k` continuations with 0 or 1 as return."""
    before = rng.uniform(0.2, 0.8, decisions)
    after = np.clip(before + rng.normal(0, spread, decisions), 0, 1)
    draws = (rng.random((decisions, k)) < p[:, None] for p in (after, before))
    return after - before, measured(*draws, np.arange(decisions) // 4)


@pytest.mark.parametrize("k", [2, 5])
def test_ceiling_is_what_perfect_credit_reaches(k: int) -> None:
    rng = np.random.default_rng(k)
    reached, ceilings = [], []
    for _ in range(5):
        true, values = drawn_values(rng, 240, k, 0.3)
        found = fidelity(true, values)
        reached.append(found.correlation.value)
        ceilings.append(found.ceiling.value)
    assert np.mean(ceilings) == pytest.approx(np.mean(reached), abs=0.05)


def test_ceiling_of_pure_noise_is_low() -> None:
    true, values = drawn_values(np.random.default_rng(0), 400, 4, 0.0)
    assert not true.any()
    found = fidelity(np.arange(400.0), values)
    assert found.ceiling.low < 0.1
    assert found.ceiling.value < 0.4
    assert abs(found.correlation.value) < 0.15


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_task_weights_draw_every_task_as_often(tasks: list[int]) -> None:
    weight_RV = task_weights(np.array(tasks))
    there = sorted(set(tasks))
    assert (weight_RV.sum(axis=1) == len(there)).all()
    assert (weight_RV[0, there] == 1).all()
    assert len(weight_RV) == (1001 if len(there) > 1 else 1)


def test_interval_ignores_undefined_resamples() -> None:
    share = Share.from_resamples(np.array([0.5, 0.4, math.nan, 0.6]))
    assert share.value == 0.5
    assert (share.low, share.high) == pytest.approx((0.405, 0.595))
    assert math.isnan(Share.from_resamples(np.array([math.nan, 0.4])).low)
