"""Calibrated score weights: slope, standard error, reliability, prior."""

import random
from dataclasses import replace

import numpy as np
import pytest

from creditflow.credit import assign
from creditflow.credit.fits.score_weights import FOLDS, PART, posterior_weight
from creditflow.credit.history import DECAY, History
from creditflow.data import Score
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.oracle import fitted as oracle

CALIBRATED = credit_options("calibrated", w_m=0.0, group_by="task_agent", adv_estimator="rloo")


def judged(tasks: int, flip: float, seed: int = 0, n: int = 8) -> list:
    """Trajectories of one step, right with probability 1/2, as is the outcome; a share of the verdicts is flipped."""
    drawn, trajectories = random.Random(seed), []
    for task in range(tasks):
        for i in range(n):
            right = drawn.random() < 0.5
            verdict = right != (drawn.random() < flip)
            trajectories.append(
                make_trajectory(f"{task}-{i}", [step("solver", float(verdict))], float(right), task=f"q{task}")
            )
    return trajectories


def test_slope_and_error_equal_weighted_least_squares():
    n, trajectories = 8, judged(6, 0.2)
    weights = assign(batch_of(*trajectories), CALIBRATED).fit.facts["weights"]["solver"]
    value_NK = np.array([(t.steps[0].scores["f"].value, t.outcome.value) for t in trajectories])
    task_N = np.repeat(np.arange(6), n)
    sum_NK = np.array([value_NK[task_N == task].sum(axis=0) for task in task_N])
    difference_NK = value_NK - (sum_NK - value_NK) / (n - 1)  # from the mean of the task's other trajectories
    for fold in range(6):
        left_N = task_N % FOLDS != fold
        slope, error = oracle.slope_and_error(*difference_NK[left_N].T.tolist(), [1.0] * left_N.sum())
        score, outcome = value_NK[left_N].mean(axis=0)
        got = [weights[key][fold] for key in ("slopes", "errors", "full")]
        assert got == pytest.approx([slope, error, outcome + slope * (1 - score)], rel=1e-9)


def test_weight_follows_the_reliability_of_scores():
    exact, noisy, random_, wrong = (assign(batch_of(*judged(64, flip)), CALIBRATED) for flip in (0.0, 0.2, 0.5, 1.0))
    few = assign(batch_of(*judged(2, 0.5, n=2)), CALIBRATED)
    assert exact.fit.score_weight_S == pytest.approx(1.0)
    assert noisy.fit.score_weight_S.mean() == pytest.approx(0.75, abs=0.1)  # slope .6, outcome .8 at a full score
    assert random_.fit.score_weight_S.mean() == pytest.approx(0.0, abs=0.1)
    assert (wrong.fit.score_weight_S == 0.0).all()
    assert (few.fit.score_weight_S == 1.0).all()  # the prior


def test_weight_of_exact_scores_ignores_how_rare_success_is():
    drawn, trajectories = random.Random(0), []
    for task in range(96):
        for i in range(8):
            right, luck = drawn.random() < 0.5, drawn.random() < 0.15
            steps = [step("solver", float(right)), step("other")]
            trajectories.append(make_trajectory(f"{task}-{i}", steps, float(right and luck), task=f"q{task}"))
    weight_S = assign(batch_of(*trajectories), CALIBRATED).fit.score_weight_S
    assert np.nanmean(weight_S) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (1.0, 2.0), (-11.0, -10.0)])
def test_weight_does_not_depend_on_the_range_of_the_outcome(low, high):
    plain = judged(32, 0.2)
    games = [
        replace(trajectory, outcome=Score(low + (high - low) * trajectory.outcome.value, range=(low, high)))
        for trajectory in plain
    ]
    weights = [assign(batch_of(*of), CALIBRATED).fit.score_weight_S for of in (plain, games)]
    assert weights[1] == pytest.approx(weights[0], abs=1e-12)


def test_weight_multiplies_the_own_reward():
    assigned = assign(batch_of(*judged(16, 0.2)), CALIBRATED)
    assert (assigned.credit.own_S == assigned.fit.score_weight_S * (assigned.rewards.sub_reward_S - 1.0)).all()


@pytest.mark.parametrize(
    ("slope", "error", "full", "prior", "weight"),
    [
        (0.2, 1e-9, 0.5, 2.0, 0.8),  # w_r times the reliability, 0.2 / 0.5
        (0.2, 0.25, 0.5, 2.0, 1.4),
        (0.2, 1e9, 0.5, 2.0, 2.0),
        (0.2, np.inf, 0.5, 2.0, 2.0),
        (-3.0, 0.01, 0.5, 1.0, 0.0),
        (0.0, 0.0, 0.0, 1.0, 1.0),  # no success at all
    ],
)
def test_posterior_weight_moves_from_prior_to_reliability(slope, error, full, prior, weight):
    assert posterior_weight(slope, error, full, prior) == pytest.approx(weight)


def test_weight_of_a_group_ignores_its_own_outcomes():
    def weights(outcome: float) -> np.ndarray:
        trajectories = judged(8, 0.2)
        for trajectory in trajectories[:8]:  # the first task
            trajectory.outcome = replace(trajectory.outcome, value=outcome)
        return assign(batch_of(*trajectories), CALIBRATED).fit.score_weight_S

    before, after = weights(0.0), weights(1.0)
    assert (before[:8] == after[:8]).all()
    assert (before[8:] != after[8:]).any()


# ---- earlier batches -------------------------------------------------------------------------------------------------


def test_history_fades_and_reaches_the_next_fit():
    first, second = (batch_of(*judged(4, flip, seed=seed)) for flip, seed in ((0.2, 1), (0.4, 2)))
    after, alone = assign(first, CALIBRATED).history_after, assign(second, CALIBRATED)
    both = assign(second, CALIBRATED, history=after)
    assert not np.array_equal(alone.fit.score_weight_S, both.fit.score_weight_S)
    whole = DECAY * after.sums(PART)["solver"] + alone.history_after.sums(PART)["solver"]
    assert both.history_after.sums(PART)["solver"] == pytest.approx(whole, rel=1e-12)


def test_history_survives_json_bit_for_bit():
    after = assign(batch_of(*judged(4, 0.2)), CALIBRATED).history_after
    restored = History.from_json(after.to_json())
    assert restored.to_json() == after.to_json()
    batch = batch_of(*judged(4, 0.4, seed=6))
    found, again = (assign(batch, CALIBRATED, history=earlier).fit.score_weight_S for earlier in (after, restored))
    assert (found == again).all()


def test_sums_that_overflow_leave_the_history_as_it_was():
    after = assign(batch_of(*judged(4, 0.2)), CALIBRATED).history_after
    before = after.sums(PART)["solver"]
    later = after.after({PART: {"solver": np.full_like(before, np.inf)}})
    assert later.sums(PART)["solver"] == pytest.approx(DECAY * before)


def test_history_of_an_agent_that_left_fades():
    after = assign(batch_of(*judged(4, 0.2)), CALIBRATED).history_after
    alone = batch_of(*(make_trajectory(f"t{i}", [step("other", i % 2)], float(i % 2)) for i in range(4)))
    later = assign(alone, CALIBRATED, history=after).history_after
    assert set(later.sums(PART)) == {"solver", "other"}
    assert later.sums(PART)["solver"] == pytest.approx(DECAY * after.sums(PART)["solver"])
