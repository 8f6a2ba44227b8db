"""Advantages of custom estimators, and pay for scores under a critic."""

import numpy as np
import pytest

from creditflow.credit import Estimate, EstimatorInput, advantage_estimator, assign
from creditflow.credit.records import ADVANTAGE_ESTIMATORS
from creditflow.data import Score
from creditflow.errors import ConfigError
from tests.builders import batch_of, credit_options, credited, make_trajectory, step
from tests.credit.strategies import registered


@pytest.mark.parametrize("score", [1.0, 0.0, "failed", {"f": Score((0.0, 1.0, 0.5, 0.25), (0.0, 1.0))}])
@pytest.mark.parametrize("granularity", ["step", "token_level"])
def test_gae_keeps_the_pay_for_scores_at_their_step(granularity, score):
    plan = step("plan", tokens=2)
    rows = [[plan, step("write", score, tokens=4)], [plan, step("write", 0.5, tokens=0)]]
    batch = batch_of(*(make_trajectory(f"t{n}", steps, 0.0) for n, steps in enumerate(rows)))
    chosen = credit_options(
        w_o=0.0, adv_estimator="gae", gamma=1.0, lam=1.0, gamma_token=0.5, decomp_granularity=granularity
    )
    assigned = assign(batch, chosen, values_T=np.zeros(batch.response_mask.size))
    assert assigned.advantage.critic.down_S == pytest.approx(0.0, abs=1e-12)


def test_custom_estimator_masks_like_built_in_ones():
    @advantage_estimator("plain_credit")
    def plain_credit(given: EstimatorInput):
        return Estimate(np.zeros_like(given.credit.total_S))

    with registered(ADVANTAGE_ESTIMATORS, "plain_credit"):
        batch = batch_of(
            make_trajectory("t0", [step()], 1.0),
            make_trajectory("t1", [step()], 0.25),
            make_trajectory("t2", [step()], 1.0, status="failed"),
        )
        assert assign(
            batch, credit_options(propagation="threshold", adv_estimator="plain_credit")
        ).advantage.advantage_S.tolist() == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("grouped", [False, True])
def test_custom_token_values_are_whitened_over_tokens(grouped):
    @advantage_estimator("by_position", grouped=grouped, whitened=True)
    def by_position(given: EstimatorInput):
        baseline_S = given.groups.mean_S if grouped else np.zeros_like(given.credit.total_S)
        return Estimate(baseline_S, unscaled_T=np.arange(given.batch.response_mask.size) ** 2.0)

    with registered(ADVANTAGE_ESTIMATORS, "by_position"):
        batch = batch_of(
            make_trajectory("t0", [step(tokens=3)], 1.0),
            make_trajectory("t1", [step(tokens=4, response_mask=(1, 0, 1, 1))], 0.5),
        )
        a = assign(batch, credit_options(adv_estimator="by_position", propagation="identical")).token_advantages()
        sampled = a[batch.response_mask]
        assert sampled.mean() == pytest.approx(0.0, abs=1e-12)
        assert sampled.std(ddof=1) == pytest.approx(1.0, rel=1e-6)
        assert (a[~batch.response_mask] == 0.0).all()


def test_whitened_estimator_rejects_its_own_divisor():
    @advantage_estimator("twice", whitened=True)
    def twice(given: EstimatorInput):
        return Estimate(given.groups.mean_S, given.groups.spread_S)

    two = (make_trajectory(f"t{n}", [step()], float(n)) for n in range(2))
    message = r"adv_estimator: twice is whitened, .*expected divisor_S None"
    with registered(ADVANTAGE_ESTIMATORS, "twice"), pytest.raises(ConfigError, match=message):
        credited(*two, adv_estimator="twice")
