"""Calibrated score weights: slope, standard error, prior."""

import random

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign, explain
from creditflow.credit.outcome_baseline import FOLDS
from creditflow.credit.score_weights import posterior_weight
from tests.builders import batch_of, make_trajectory, step
from tests.oracle import fitted as oracle

CALIBRATED = CreditOptions(propagation="none", score_weight="calibrated", group_by="task_agent", adv_estimator="rloo")


def judged(tasks: int, flip: float, seed: int = 0, n: int = 8) -> list:
    """Trajectories of one step, right with probability 1/2, as is the outcome; a share of the verdicts is flipped."""
    drawn, made = random.Random(seed), []
    for task in range(tasks):
        for i in range(n):
            right = drawn.random() < 0.5
            verdict = right != (drawn.random() < flip)
            made.append(make_trajectory(f"{task}-{i}", [step("solver", float(verdict))], float(right), task=f"q{task}"))
    return made


def test_slope_and_error_equal_weighted_least_squares():
    trajectories = judged(6, 0.2)
    assigned = assign(batch_of(*trajectories), CALIBRATED)
    found = assigned.fitted["weights"]["solver"]
    tasks = [f"q{task}" for task in range(6)]
    for fold in range(6):
        scores, outcomes = [], []
        for one in trajectories:
            if tasks.index(one.task.prompt[0]["content"]) % FOLDS != fold:
                others = [o for o in trajectories if o.uid == one.uid and o is not one]
                scores.append(one.steps[0].scores["f"].value - np.mean([o.steps[0].scores["f"].value for o in others]))
                outcomes.append(one.outcome.value - np.mean([o.outcome.value for o in others]))
        slope, error = oracle.slope_and_error(scores, outcomes, [1.0] * len(scores))
        assert (found["slopes"][fold], found["errors"][fold]) == pytest.approx((slope, error), rel=1e-9)


def test_weight_follows_the_reliability_of_scores():
    exact, noisy, random_ = (assign(batch_of(*judged(64, flip)), CALIBRATED) for flip in (0.0, 0.2, 0.5))
    assert exact.score_weight_S == pytest.approx(1.0)
    assert noisy.score_weight_S.mean() == pytest.approx(0.6, abs=0.1)
    assert random_.score_weight_S.mean() == pytest.approx(0.0, abs=0.1)


def test_weight_with_few_data_stays_near_its_prior():
    few = assign(batch_of(*judged(2, 0.5, n=2)), CALIBRATED)
    assert (few.score_weight_S == 1.0).all()


def test_scores_that_contradict_the_outcome_get_weight_0():
    assert (assign(batch_of(*judged(64, 1.0)), CALIBRATED).score_weight_S == 0.0).all()


def test_weight_multiplies_the_own_reward():
    assigned = assign(batch_of(*judged(16, 0.2)), CALIBRATED)
    assert (assigned.own_S == assigned.score_weight_S * (assigned.sub_reward_S - 1.0)).all()
    assert "the outcome rises by" in str(explain(assigned, 0))


@pytest.mark.parametrize(("error", "weight"), [(1e-9, 0.4), (0.5, 0.7), (1e9, 1.0), (np.inf, 1.0)])
def test_posterior_weight_moves_from_prior_to_slope(error: float, weight: float):
    assert posterior_weight(0.4, error, 1.0) == pytest.approx(weight)


def test_posterior_weight_is_never_negative():
    assert posterior_weight(-3.0, 0.01, 1.0) == 0.0
