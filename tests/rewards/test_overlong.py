"""Tests of DAPO's soft overlong punishment; expected values were computed by hand from equation 13."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.rewards.builtin.overlong import Overlong
from tests.builders import batch_of, make_trajectory, step
from tests.rewards.trajectories import load, score


def penalty(n_tokens: int, max_length: int = 20480, cache_length: int = 4096) -> float:
    trajectory = make_trajectory("a", [step("solver", tokens=n_tokens)])
    return Overlong(max_length, cache_length)(trajectory.steps[0], trajectory)


@pytest.mark.parametrize(
    ("n_tokens", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (60000, -1.0)],
)
def test_penalty_follows_the_paper(n_tokens, expected):
    assert penalty(n_tokens) == pytest.approx(expected, abs=1e-12)


def test_penalty_without_a_cache_is_a_step_function():
    assert [penalty(n, 10, 0) for n in (9, 10, 11)] == [0.0, 0.0, -1.0]


def test_full_length_cache_penalizes_the_first_token():
    assert [penalty(n, 4, 4) for n in range(6)] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


def test_tokens_of_a_tool_do_not_count():
    mask = (1,) * 6 + (0,) * 90 + (1,) * 2
    trajectory = make_trajectory(
        "a", [step("solver", response_ids=(7,) * 98, response_mask=mask, logprobs=(0.0,) * 98)]
    )
    assert Overlong(10, 4)(trajectory.steps[0], trajectory) == -0.5


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100))
def test_penalty_stays_in_range_and_never_rises(n_tokens, max_length, cache_length):
    cache_length = min(cache_length, max_length)
    assert -1.0 <= penalty(n_tokens + 1, max_length, cache_length) <= penalty(n_tokens, max_length, cache_length) <= 0.0


def test_credit_sees_the_penalty_between_zero_and_one():
    trajectory = make_trajectory("a", [step("solver", tokens=1), step("solver", tokens=9)])
    score([load("overlong", args={"max_length": 4, "cache_length": 4})], [trajectory])
    assert [s.scores["overlong"].value for s in trajectory.steps] == [-0.25, -1.0]
    assert [s.scores["overlong"].rescaled for s in trajectory.steps] == [0.75, 0.0]
    batch_of(trajectory)
