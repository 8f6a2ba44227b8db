"""The vectorised core against the recursive oracle, on random graphs and options; both against numbers by hand."""

import math

import numpy as np
import pytest
from hypothesis import given

from creditflow.credit import assign
from creditflow.credit.groups import LEVEL_NAMES
from tests.builders import batch_of, credit_options, examples, make_trajectory, step
from tests.credit.strategies import situations
from tests.oracle.credit_oracle import credit_rows

PRECISION = 1e-12

BOOLEANS = {"rewards": ("scored", "failed"), "credit": ("gate_open", "frozen"), "groups": ("trained", "tied")}
COLUMNS = {
    "rewards": ("sub_reward",),
    "credit": ("gate", "own", "received", "shared", "withheld"),
    "groups": ("spread",),
    "advantage": ("baseline", "weight"),
}
"""The columns of each record with the same name in both; NaN corresponds to the oracle's None."""


def size_of_sums(trajectories, rows, values_T):
    """The largest sum of absolute values added up in a trajectory, at least 1.

    Rounding is relative to it, not to the sum itself, which may be 0.
    """
    sums, row, at = [1.0], iter(rows), 0
    for trajectory in trajectories:
        total = 0.0
        for made in trajectory.steps:
            earned = next(row)
            total += abs(earned.own) + abs(earned.shared)
            if values_T is not None:
                n = len(made.response_ids)
                total += 2 * sum(map(abs, values_T[at : at + n]))
                at += n
        sums.append(total)
    return max(sums)


def assert_near(got, expected, tolerance, what):
    """Check that both are NaN or differ by at most `tolerance`, one number or one for each entry."""
    expected = np.array([math.nan if value is None else value for value in expected], dtype=float)
    got = np.asarray(got, dtype=float)
    assert got.shape == expected.shape, what
    near = (np.abs(got - expected) <= tolerance) | (np.isnan(got) & np.isnan(expected))
    assert near.all(), f"{what}: got {got[~near]}, the oracle says {expected[~near]}, at {np.flatnonzero(~near)}"


def assert_equals_oracle(situation):
    trajectories, chosen, values_T = situation
    rows = credit_rows(trajectories, chosen, values_T)
    got = assign(batch_of(*trajectories), chosen, values_T=None if values_T is None else np.array(values_T))
    added = size_of_sums(trajectories, rows, values_T)

    for record, names in BOOLEANS.items():
        for name in names:
            values_S, expected = getattr(getattr(got, record), f"{name}_S"), [getattr(row, name) for row in rows]
            assert values_S.tolist() == expected if values_S is not None else not any(expected), name
    assert got.groups.group_size_S.tolist() == [row.size for row in rows]
    assert [LEVEL_NAMES[level] if level >= 0 else None for level in got.groups.level_S] == [row.level for row in rows]

    assert_near(got.credit.total_S, [row.credit for row in rows], PRECISION * added, "credit")
    for record, names in COLUMNS.items():
        for name in names:
            values_S = getattr(getattr(got, record), f"{name}_S")
            values_S = np.full(len(rows), math.nan) if values_S is None else values_S
            assert_near(values_S, [getattr(row, name) for row in rows], PRECISION * added, name)

    # The dividend has the rounding of the sums; so has the divisor, relative to the quotient.
    relative_S = [PRECISION * added * (1 / row.divisor + 1 / row.token_divisor) for row in rows]
    expected_S = np.array([row.advantage for row in rows])
    assert_near(got.advantage.advantage_S, expected_S, relative_S * (1 + np.abs(expected_S)), "advantage")
    expected_T = np.array([advantage for row in rows for advantage in row.token_advantages])
    relative_T = np.repeat(relative_S, [len(row.token_advantages) for row in rows])
    assert_near(got.token_advantages(), expected_T, relative_T * (1 + np.abs(expected_T)), "token advantages")

    nothing_S = [not row.trained or row.level is None for row in rows]
    assert (got.advantage.advantage_S[nothing_S] == 0.0).all()
    if chosen.decomp_granularity != "token_level":  # there a tied group learns from its tokens
        assert (got.advantage.advantage_S[[row.tied for row in rows]] == 0.0).all()
    if values_T is not None:
        returns_T = [value if row.trained else None for row in rows for value in row.returns]
        known = [t for t, value in enumerate(returns_T) if value is not None]
        assert_near(got.returns_T[known], [returns_T[t] for t in known], PRECISION * added, "returns")


CORNERS = {
    "anything": {},
    "threshold": {"propagation": "threshold"},
    "freeze": {"propagation": "threshold", "on_closed_gate": "freeze"},
    "gae": {"adv_estimator": "gae"},
    "gae without flow": {"adv_estimator": "gae", "propagation": "own"},
    "token_level": {"decomp_granularity": "token_level", "reward_decomp": True},
}
"""Fixed options for the tests, so that every part is covered."""


def check(corner, number):
    examples(number)(given(situations(**CORNERS[corner]))(assert_equals_oracle))()


@pytest.mark.parametrize("corner", CORNERS)
def test_assign_equals_the_recursive_oracle(corner):
    check(corner, 600 if corner == "anything" else 150)


@pytest.mark.slow
@pytest.mark.parametrize("corner", CORNERS)
def test_assign_equals_the_oracle_on_ten_thousand_cases(corner):
    check(corner, 3_000 if corner == "anything" else 1_000)


# ---- by hand ---------------------------------------------------------------------------------------------------------


CHAIN, DIAMOND = [(), (0,), (1,)], [(), (0,), (0,), (1, 2)]


@pytest.mark.parametrize(
    ("parents_of", "rewards", "credit", "withheld"),
    [
        (DIAMOND, [0.25, 0.5, 0.75, 1.0], [0.25 + 0.5 * (0.75 + 1.0), 0.75, 1.0, 1.0], [0.0] * 4),
        (DIAMOND, [0.25, 0.5, 0.0, 1.0], [0.25 + 0.5 * 0.75, 0.75, 0.25, 1.0], [0.0, 0.0, 0.25, 0.0]),
        ([(), (), (0, 1)], [0.25, 0.5, 1.0], [0.25 + 0.5 * 0.5, 0.5 + 0.5 * 0.5, 1.0], [0.0] * 3),
        ([(), (0,), (0,)], [0.25, 0.5, 1.0], [0.25 + 0.5 * (0.5 + 1.0), 0.5, 1.0], [0.0] * 3),
        (CHAIN, [0.25, 0.0, 1.0], [0.25, 0.5, 1.0], [0.0, 0.5, 0.0]),
    ],
    ids=["open diamond", "closed arm", "fan-in", "fan-out", "closed chain"],
)
def test_oracle_and_core_equal_numbers_by_hand(parents_of, rewards, credit, withheld):
    """With gamma 1/2, origin 0 and a threshold of 0.1."""
    steps = [step("a", r, parents) for parents, r in zip(parents_of, rewards, strict=True)]
    trajectory = make_trajectory("t", steps, 0.0)
    chosen = credit_options(propagation="threshold", gamma=0.5, sub_reward_origin=0.0, propagation_threshold=0.1)
    rows, assignment = credit_rows([trajectory], chosen), assign(batch_of(trajectory), chosen)
    assert [row.credit for row in rows] == assignment.credit.total_S.tolist() == credit
    assert [row.withheld for row in rows] == assignment.credit.withheld_S.tolist() == withheld
