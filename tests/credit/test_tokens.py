"""Rewards and terms of token scores, and errors for invalid token scores."""

import tracemalloc
from dataclasses import replace

import pytest

from creditflow.credit import assign
from creditflow.credit.rewards import read_rewards
from creditflow.credit.tokens import token_terms
from creditflow.data import Score
from creditflow.errors import BatchError, NotFiniteError, ScoreRangeError, ShapeError
from tests.builders import batch_of, credit_options, make_trajectory, step

BY_TOKEN = credit_options(propagation="threshold", decomp_granularity="token_level")


def rho(batch):
    return read_rewards(batch, BY_TOKEN).token_score_T


def refusal(kind, batch):
    with pytest.raises(BatchError) as error:
        assign(batch, BY_TOKEN)
    assert type(error.value) is kind
    return str(error.value)


def two_trajectories(value, **more):
    """Two steps of two tokens each; the last has the score `value`."""
    return batch_of(
        make_trajectory("t0", [step("a", Score((0.0, 1.0)), tokens=2)], 1.0),
        make_trajectory("t1", [step("a", {"f": Score(value, **more)}, tokens=2)], 0.0),
    )


def test_token_value_outside_its_range_raises():
    message = refusal(ScoreRangeError, two_trajectories((5.0, -4.0)))
    assert message == "step t1.0, score f, token 0: expected a value from 0.0 to 1.0, got 5.0"
    message = refusal(ScoreRangeError, two_trajectories((1.0, -2.0), range=(-1.0, 3.0)))
    assert message == "step t1.0, score f, token 1: expected a value from -1.0 to 3.0, got -2.0"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_token_value_raises(value):
    scored = step("a", Score((0.5, value)), tokens=2, response_mask=(1, 0))
    message = refusal(NotFiniteError, batch_of(make_trajectory("t0", [scored], 1.0)))
    assert message == f"step t0.0, score f, token 1: expected a value from 0.0 to 1.0, got {value}"


def test_token_range_check_allows_rounding_and_weight_0():
    assign(two_trajectories((1.0 + 1e-12, -1e-12)), BY_TOKEN)
    assign(two_trajectories((5.0, -4.0), weight=0.0), BY_TOKEN)
    assign(two_trajectories((5.0, -4.0), status="failed"), BY_TOKEN)


def test_token_value_outside_by_rounding_is_clipped():
    values = (1.0000009, -0.0000009)
    batch = batch_of(make_trajectory("a", [step("a", Score(values), tokens=2)], 1.0000009))
    assert rho(batch).tolist() == [1.0, 0.0]
    assert (batch.scores[0, 0], batch.outcome[0]) == (0.5, 1.0)
    with pytest.raises(ScoreRangeError):
        rho(batch_of(make_trajectory("a", [step("a", Score((1.0000021, 0.0)), tokens=2)], 1.0)))


@pytest.mark.parametrize(
    ("kind", "score", "message"),
    [
        (
            ShapeError,
            {"f": Score((0.0, 0.5, 1.0))},
            "step t1.0, score f: expected one value for each of 2 response tokens, got 3",
        ),
        (BatchError, {"g": Score(1.0)}, "step t1.0: expected score f in raw_scores, got ['g']"),
        (
            ScoreRangeError,
            {"f": Score((1.0, 1.0), (1.0, 1.0))},
            "step t1.0, score f, token 0: expected a value from 1.0 to 1.0, got 1.0",
        ),
    ],
)
def test_raw_score_unlike_its_column_raises(kind, score, message):
    batch = two_trajectories((0.0, 1.0))
    assert refusal(kind, replace(batch, raw_scores=(batch.raw_scores[0], score))) == message


def test_equal_token_scores_add_nothing():
    alike = [make_trajectory(f"t{n}", [step("a", Score((0.3, 0.3)), tokens=2)], float(n)) for n in range(3)]
    assert assign(batch_of(*alike), BY_TOKEN).advantage.token_term_T.tolist() == [0.0] * 6


def test_token_terms_use_little_temporary_memory():
    trajectories = [
        make_trajectory(f"t{n}", [step("a", Score((0.1 * n,) * 1000), tokens=1000)], 1.0) for n in range(10)
    ]
    assigned = assign(batch_of(*trajectories), BY_TOKEN)  # compiles
    tracemalloc.start()
    token_terms(assigned.rewards, assigned.groups, BY_TOKEN, scaled=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * assigned.rewards.token_score_T.nbytes
