import asyncio
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Score, Trajectory
from creditflow.engines.local.loss import KL_ESTIMATORS
from creditflow.rewards.builtin.kl import ESTIMATORS, KlToReference
from creditflow.rewards.values import DetailedScore, neutral_where_not_sampled
from tests.builders import make_trajectory, step
from tests.rewards import trajectories
from tests.rewards.trajectories import load

LOGPROBS, REFERENCE = (-1.0, -2.0, -0.5), (-1.25, -1.5, -0.5)


def a_trajectory(**fields: object) -> Trajectory:
    return make_trajectory("t", [step("a", tokens=3, **{"logprobs": LOGPROBS, "ref_logprobs": REFERENCE, **fields})])


def score(function: KlToReference, trajectory: Trajectory) -> Score:
    return asyncio.run(function(trajectory.steps[0], trajectory))


@given(st.floats(-15, 15))
def test_estimators_equal_those_of_the_kl_loss(difference: float) -> None:
    assert ESTIMATORS.keys() == KL_ESTIMATORS.keys() - {"k1", "k2", "k3"}
    for name, estimate in ESTIMATORS.items():
        theirs = float(KL_ESTIMATORS[name](torch.tensor(difference, dtype=torch.float64)))
        assert max(-10.0, min(10.0, estimate(difference))) == pytest.approx(max(-10.0, min(10.0, theirs)), abs=1e-9)


@pytest.mark.parametrize(
    ("estimator", "allowed"), [("kl", (-0.1, 0.1)), ("mse", (-0.1, 0.0)), ("low_var_kl", (-0.1, 0.0))]
)
def test_values_are_clipped_and_the_share_is_reported(estimator: str, allowed: tuple[float, float]) -> None:
    function = KlToReference(estimator, limit=0.1)
    assert function.range == allowed
    result = score(function, a_trajectory())
    assert result.range == allowed
    assert isinstance(result.value, tuple)
    assert all(allowed[0] <= value <= allowed[1] for value in result.value)
    clipped = {"kl": 2, "mse": 1, "low_var_kl": 1}[estimator]
    assert isinstance(result, DetailedScore)
    assert result.numbers == (("clipped", pytest.approx(clipped / 3)),)


def test_step_gets_the_mean_of_its_sampled_tokens() -> None:
    masked = a_trajectory(response_mask=(1, 0, 1))
    assert score(KlToReference("kl", per="step"), masked).value == pytest.approx(-0.125)
    assert score(KlToReference("kl"), masked).value == pytest.approx((-0.25, -0.125, 0.0))


def test_step_mean_is_clipped_after_averaging() -> None:
    far = a_trajectory(logprobs=(-1.0, -1.0, -1.0), ref_logprobs=(-2.5, -1.0, -1.0))
    assert score(KlToReference("kl", per="step", limit=1.0), far).value == pytest.approx(-0.5)
    assert score(KlToReference("kl", per="token", limit=1.0), far).value == pytest.approx((-1.0, 0.0, 0.0))


def test_greedy_step_scores_zero() -> None:
    result = score(KlToReference(), a_trajectory(response_mask=(0, 0, 0), logprobs=(0.0, 0.0, 0.0), temperature=0.0))
    assert (result.value, result.status, result.reason) == (0.0, "ok", "no token was sampled")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ref_logprobs": ()}, "the engine hands over no reference log-probabilities: the local engine"),
        ({"ref_logprobs": (-1.0, -math.inf, -1.0)}, "ValueError: a log-probability is not a finite number"),
    ],
)
def test_missing_log_probabilities_fail_with_a_hint(fields: dict[str, object], reason: str) -> None:
    trajectory = a_trajectory(**fields)
    trajectories.score([load("kl_to_reference")], [trajectory])
    failed = trajectory.steps[0].scores["kl_to_reference"]
    assert failed.status == "failed"
    assert failed.reason.startswith(reason)


def test_recipe_sets_the_range_and_scores_tokens() -> None:
    trajectory = a_trajectory()
    function = load("kl_to_reference", args={"estimator": "kl", "limit": 0.4})
    assert function.range == (-0.4, 0.4)
    assert function.instance.needs_reference is True  # type: ignore[attr-defined]
    trajectories.score([function], [trajectory])
    scored = trajectory.steps[0].scores["kl_to_reference"]
    assert scored.value == pytest.approx((-0.25, 0.4, 0.0))
    assert scored.rescaled == pytest.approx((0.15 / 0.8 + 1 + 0.5) / 3)


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=20))
def test_neutral_values_preserve_the_mean_of_the_sampled(pairs: list[tuple[float, bool]]) -> None:
    values, mask = [value for value, _ in pairs], [int(sampled) for _, sampled in pairs]
    result = neutral_where_not_sampled(values, mask)
    if not any(mask):
        assert result == values
        return
    sampled = [value for value, one in pairs if one]
    assert [value for value, one in zip(result, mask, strict=True) if one] == sampled
    assert np.mean(result) == pytest.approx(np.mean(sampled), abs=1e-9)
