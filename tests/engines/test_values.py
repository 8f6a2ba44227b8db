"""Fidelity of credit against scipy, a slow bootstrap, and simulated decisions with known values."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.engines.local.values import DecisionValues, Share, fidelity, leave_one_out, spearman
from tests.builders import examples
from tests.oracle.fidelity import correlation, jackknife_half_width, mean_and_squared_error

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


def test_interval_matches_a_slow_jackknife_over_tasks() -> None:
    rng = np.random.default_rng(3)
    tasks = np.repeat(np.arange(6), 5)
    value, credit = rng.normal(size=(2, 30)) + rng.normal(size=6)[tasks]
    found = fidelity(credit, measured(value[:, None], np.zeros((30, 1)), tasks)).correlation
    half = jackknife_half_width(credit.tolist(), value.tolist(), tasks.tolist())
    assert found.low == pytest.approx(max(found.value - half, -1.0), abs=1e-9)
    assert found.high == pytest.approx(min(found.value + half, 1.0), abs=1e-9)


def test_interval_covers_the_correlation_with_few_tasks() -> None:
    """Percentiles of a bootstrap over tasks cover 86 to 92 % with 5 to 8 tasks."""
    rng, covered = np.random.default_rng(0), 0
    tasks = np.repeat(np.arange(8), 20)

    def drawn(tasks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shared = rng.normal(0, 0.5, tasks.max() + 1)[tasks]
        value = rng.normal(size=len(tasks)) + shared
        return 0.4 * value + rng.normal(size=len(tasks)) + rng.normal(0, 0.5, tasks.max() + 1)[tasks], value

    true = correlation(*(side.tolist() for side in drawn(np.arange(40_000) // 20)))
    for _ in range(300):
        credit, value = drawn(tasks)
        found = fidelity(credit, measured(value[:, None], np.zeros((160, 1)), tasks)).correlation
        covered += found.low <= true <= found.high
    assert covered / 300 > 0.91


@pytest.mark.parametrize("scale", [1e-200, 1e-10, 1e10])
def test_fidelity_is_independent_of_the_scale(scale) -> None:
    rng = np.random.default_rng(1)
    credit, after, before = rng.normal(size=60), rng.integers(0, 3, (60, 8)), rng.integers(0, 3, (60, 8))
    expected = fidelity(credit, measured(after, before, np.arange(60) // 6))
    assert math.isfinite(expected.correlation.value)
    found = fidelity(scale * credit, measured(scale * after, scale * before, np.arange(60) // 6))
    assert found == expected


@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
def test_values_of_rounding_alone_have_no_rank(scale) -> None:
    rng = np.random.default_rng(0)
    after = scale * rng.random((30, 8))
    before = rng.permuted(after, axis=1)
    assert (after.mean(axis=1) != before.mean(axis=1)).any()
    assert math.isnan(fidelity(np.arange(30.0), measured(after, before, np.arange(30) // 5)).correlation.value)


def test_fidelity_without_a_known_value_is_undefined() -> None:
    found = fidelity(np.ones(2), measured(np.full((2, 2), math.nan), np.zeros((2, 2)), [0, 1]))
    assert (found.decisions, found.tasks) == (0, 0)
    assert math.isnan(found.correlation.value)


WORLDS = {
    "no effect": lambda rng, before: np.zeros(len(before)),
    "few, equal": lambda rng, before: np.where(rng.random(len(before)) < 0.1, np.where(before > 0.5, -0.5, 0.5), 0.0),
    "few, spread": lambda rng, before: np.where(rng.random(len(before)) < 0.2, rng.normal(0, 0.4, len(before)), 0.0),
    "normal": lambda rng, before: rng.normal(0, 0.3, len(before)),
}
"""Draws of true values: their number is that of `before`, the mean returns with the decision sampled anew."""


def drawn_values(world: str, rng: np.random.Generator, decisions: int, k: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """True values, and the returns of 0 or 1 of two sets of `k` continuations of each prefix."""
    before = rng.uniform(0.2, 0.8, decisions)
    after = np.clip(before + WORLDS[world](rng, before), 0, 1)
    sides = (after, before)
    return after - before, [(rng.random((decisions, k)) < p[:, None]).astype(float) for p in sides * 2]


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("world", ["few, equal", "few, spread", "normal"])
def test_ceiling_is_what_perfect_knowledge_reaches(world: str, k: int) -> None:
    """The oracle has what no audit has: a second, independent set of continuations, and many decisions.

    The correlation of two sets is the squared correlation of one with all that can be known of it. Where the values are
    of two sizes, the true values themselves reach it.
    """
    rng = np.random.default_rng(k)
    true, (after, before, *others) = drawn_values(world, rng, 40_000, k)
    value, again = measured(after, before, [0] * 40_000).value_D, measured(*others, [0] * 40_000).value_D
    possible = math.sqrt(correlation(value.tolist(), again.tolist()))
    reached = correlation(true.tolist(), value.tolist())
    assert reached == pytest.approx(possible, abs=0.05 if world == "few, spread" else 0.015)
    ceilings = []
    for _ in range(24):
        _, (after, before, *_) = drawn_values(world, rng, 800, k)
        ceilings.append(fidelity(np.arange(800.0), measured(after, before, np.arange(800) // 8)).ceiling)
    seen = [ceiling.value for ceiling in ceilings if not math.isnan(ceiling.value)]
    assert len(seen) >= (17 if k == 4 else 24)
    assert np.mean(seen) == pytest.approx(possible, abs=0.03)
    covered = [ceiling.low <= possible <= ceiling.high for ceiling in ceilings if ceiling.low >= 0]
    assert np.mean(covered) > 0.7  # of 24; over more, 0.85 to 0.98


def test_ceiling_without_an_effect_is_unknown() -> None:
    rng = np.random.default_rng(0)
    ceilings = []
    for _ in range(120):
        _, (after, before, *_) = drawn_values("no effect", rng, 200, 8)
        ceilings.append(fidelity(np.arange(200.0), measured(after, before, np.arange(200) // 8)).ceiling)
    assert sum(not math.isnan(ceiling.value) for ceiling in ceilings) <= 0.06 * 120  # 2.5 % are expected
    assert all(0 <= ceiling.high < 0.8 for ceiling in ceilings)


@pytest.mark.parametrize(
    ("decisions", "k", "note"),
    [(800, 3, "4 continuations or more, got 3"), (32, 8, "decisions of 5 tasks or more, got 4"), (800, 8, "")],
)
def test_missing_ceiling_has_a_reason(decisions: int, k: int, note: str) -> None:
    _, (after, before, *_) = drawn_values("normal", np.random.default_rng(0), decisions, k)
    found = fidelity(np.arange(decisions), measured(after, before, np.arange(decisions) // 8))
    assert found.ceiling_note == (note and f"no noise ceiling: expected {note}")
    assert math.isnan(found.ceiling.value) == math.isnan(found.ceiling.high) == bool(note)


def test_ceiling_of_equal_values_is_undefined() -> None:
    found = fidelity(np.arange(20.0), measured(np.ones((20, 4)), np.ones((20, 4)), np.arange(20) // 2))
    assert found.ceiling_note == "no noise ceiling: no difference between values is seen"
    assert math.isnan(found.ceiling.high)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_leave_one_out_drops_each_task_once(tasks: list[int]) -> None:
    whole, *others = leave_one_out(np.array(tasks)).tolist()
    assert whole == [1.0] * len(tasks)
    assert others == [[float(own != task) for own in tasks] for task in sorted(set(tasks))]


def test_interval_needs_every_sample() -> None:
    share = Share.from_jackknife(np.array([0.5, 0.4, math.nan, 0.6, 0.5, 0.5]))
    assert share.value == 0.5
    assert math.isnan(share.low)
    assert math.isnan(Share.from_jackknife(np.array([0.5, 0.4, 0.5, 0.6, 0.5])).low)  # four tasks
