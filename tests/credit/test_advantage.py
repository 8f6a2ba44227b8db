"""Advantages: scaling, the balance of strata, and custom estimators."""

import numpy as np
import pytest

from creditflow.credit import CreditOptions, Estimate, EstimatorInput, advantage_estimator, assign
from creditflow.credit.records import ADVANTAGE_ESTIMATORS
from creditflow.errors import ConfigError
from tests.builders import batch_of, credited, make_trajectory, step
from tests.credit.strategies import registered


def test_advantage_divides_by_spread_plus_epsilon():
    two = [make_trajectory(f"t{n}", [step()], 1.0 - n) for n in range(2)]
    scaled = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert credited(*two).advantage_S.tolist() == pytest.approx([scaled, -scaled])
    assert credited(*two, norm_adv_by_std_in_grpo=False).advantage_S.tolist() == [0.5, -0.5]


def labelled(labels, **more):
    scores = more.pop("scores", [0.5] * len(labels))
    return batch_of(
        *(
            make_trajectory(f"t{n}", [step("v", r, stratum=s, **more)], 1.0)
            for n, (s, r) in enumerate(zip(labels, scores, strict=True))
        )
    )


def test_stratum_weights_have_equal_totals_and_mean_1():
    labels = ["good"] * 6 + ["bad"] * 4 + ["odd"] * 2
    weight = assign(labelled(labels), CreditOptions(propagation="threshold")).weight_S
    for label, count in (("good", 6), ("bad", 4), ("odd", 2)):
        of_label = weight[[at == label for at in labels]]
        assert of_label.tolist() == pytest.approx([12 / (3 * count)] * count)
    assert weight.mean() == pytest.approx(1.0)


def test_stratum_weight_has_a_cap():
    weight = assign(labelled(["good"] * 99 + ["bad"]), CreditOptions(propagation="threshold")).weight_S
    assert weight[-1] == 2.0
    assert weight[0] == pytest.approx(100 / (2 * 99))


def test_strata_balance_within_an_agent_and_policy():
    trajectories = [
        make_trajectory(f"t{n}", [step("v", 0.5, stratum=label, policy=policy), step("w", 0.5, stratum="good")], 1.0)
        for n, (label, policy) in enumerate([("good", "p"), ("good", "p"), ("bad", "p"), ("good", "q")])
    ]
    weight = credited(*trajectories).weight_S
    assert weight.tolist() == pytest.approx([0.75, 1, 0.75, 1, 1.5, 1, 1, 1])


def test_stratum_weights_ignore_unlabelled_and_masked_steps():
    labels, scores = ["good", "good", "bad", None, "bad"], [0.5, 0.5, 0.5, 0.5, "failed"]
    weight = assign(labelled(labels, scores=scores), CreditOptions(propagation="threshold")).weight_S
    assert weight.tolist() == pytest.approx([0.75, 0.75, 1.5, 1.0, 1.0])


@pytest.mark.parametrize("scores", [None, "failed"])
def test_unscored_step_ignores_its_stratum(scores):
    a = assign(labelled(["good", "good", "bad"], scores=[scores] * 3), CreditOptions(propagation="identical"))
    assert a.stratum_S.tolist() == [-1, -1, -1]
    assert a.weight_S.tolist() == [1.0, 1.0, 1.0]
    assert a.group_size_S.tolist() == [3, 3, 3]


def test_advantage_includes_the_stratum_weight():
    labels, scores = ["good", "good", "good", "bad", "bad"], [1.0, 0.5, 0.0, 1.0, 0.0]
    chosen = CreditOptions(propagation="threshold", norm_adv_by_std_in_grpo=False)
    a = assign(labelled(labels, scores=scores), chosen)
    assert a.advantage_S.tolist() == pytest.approx([0.5 * 5 / 6, 0.0, -0.5 * 5 / 6, 0.5 * 5 / 4, -0.5 * 5 / 4])


def test_custom_estimator_masks_like_built_in_ones():
    @advantage_estimator("plain_credit")
    def plain_credit(given: EstimatorInput):
        return Estimate(np.zeros_like(given.credit_S))

    with registered(ADVANTAGE_ESTIMATORS, "plain_credit"):
        batch = batch_of(
            make_trajectory("t0", [step()], 1.0),
            make_trajectory("t1", [step()], 0.25),
            make_trajectory("t2", [step()], 1.0, status="failed"),
        )
        assert assign(
            batch, CreditOptions(propagation="threshold", adv_estimator="plain_credit")
        ).advantage_S.tolist() == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("grouped", [False, True])
def test_custom_token_values_are_whitened_over_tokens(grouped):
    @advantage_estimator("by_position", grouped=grouped, whitened=True)
    def by_position(given: EstimatorInput):
        baseline_S = given.groups.mean_S if grouped else np.zeros_like(given.credit_S)
        return Estimate(baseline_S, unscaled_T=np.arange(given.batch.response_mask.size) ** 2.0)

    with registered(ADVANTAGE_ESTIMATORS, "by_position"):
        batch = batch_of(
            make_trajectory("t0", [step(tokens=3)], 1.0),
            make_trajectory("t1", [step(tokens=4, response_mask=(1, 0, 1, 1))], 0.5),
        )
        a = assign(batch, CreditOptions(adv_estimator="by_position", propagation="identical")).token_advantages()
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
