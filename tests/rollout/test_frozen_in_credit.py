"""Steps of a frozen model in credit: they are scored and pass credit on, but change no trained baseline."""

import numpy as np
import pytest

from creditflow.credit import CreditOptions, assign
from creditflow.credit.analysis.linter import lint
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.credit.groups import LEVELS
from creditflow.credit.records import ADVANTAGE_ESTIMATORS, PROPAGATION_RULES
from creditflow.data import TrajectoryBatch
from creditflow.monitoring.metrics import rollout_metrics
from tests.builders import batch_of, credit_options, make_trajectory, step

FROZEN = {"policy": "far", "tokens": 0}


def team_of_two(frozen_scores: list[float], tokens: int = 3) -> TrajectoryBatch:
    """Return four trajectories of two tasks: a trained writer, a frozen critic, the writer again."""
    return batch_of(
        *(
            make_trajectory(
                f"t{k}",
                [
                    step("writer", 0.1 * k, tokens=tokens + k),
                    step("critic", frozen_scores[k], **FROZEN),
                    step("writer", 0.9 - 0.2 * k, tokens=tokens),
                ],
                outcome=float(k % 2),
                task=f"q{k // 2}",
            )
            for k in range(4)
        )
    )


WAYS = [
    (name, group_by)
    for name in ADVANTAGE_ESTIMATORS.names()
    for group_by in LEVELS
    if not ADVANTAGE_ESTIMATORS[name].critic and not ADVANTAGE_ESTIMATORS[name].relative
]


@pytest.mark.parametrize(("estimator", "group_by"), WAYS)
def test_frozen_credit_does_not_change_trained_baselines(estimator: str, group_by: str) -> None:
    expect_trained_baselines(credit_options(adv_estimator=estimator, group_by=group_by))


@pytest.mark.parametrize("rule", [name for name in PROPAGATION_RULES.names() if PROPAGATION_RULES[name].relative])
def test_frozen_credit_does_not_change_trained_comparisons(rule: str) -> None:
    # Frozen steps have no parents here, because a rule may pass their rewards on.
    expect_trained_baselines(credit_options(propagation=rule, adv_estimator="relative", group_by="task", gamma=0.0))


def expect_trained_baselines(options: CreditOptions) -> None:
    one, other = (assign(team_of_two(scores), options) for scores in ([0.0, 0.1, 0.2, 0.3], [1.0, 0.0, 0.7, 0.2]))
    frozen_S = np.array(one.batch.policy_names)[one.batch.policy_of_step] == "far"
    assert not np.array_equal(one.credit.total_S[frozen_S], other.credit.total_S[frozen_S])
    np.testing.assert_array_equal(one.token_advantages(), other.token_advantages())
    np.testing.assert_array_equal(one.advantage.advantage_S[~frozen_S], other.advantage.advantage_S[~frozen_S])
    assert np.isfinite(one.advantage.advantage_S).all()
    assert np.abs(one.advantage.advantage_S[~frozen_S]).max() > 0
    groups = one.groups.group_S[one.groups.group_S >= 0], frozen_S[one.groups.group_S >= 0]
    assert not set(groups[0][groups[1]]) & set(groups[0][~groups[1]])


@pytest.mark.parametrize("granularity", ["trajectory", "agent", "step", "token_level"])
def test_frozen_step_passes_credit_through_its_gate(granularity: str) -> None:
    options = credit_options(propagation="threshold", outcome_to="answer", decomp_granularity=granularity)
    open_, closed = (assign(team_of_two([score] * 4), options) for score in (0.9, 0.1))
    first_S = np.flatnonzero(open_.batch.index_of_step == 0)
    if granularity != "trajectory":
        assert (open_.credit.received_S[first_S] != 0).all()
        assert (closed.credit.received_S[first_S] == 0).all()
    assert len(open_.token_advantages()) == len(open_.batch.response_ids)
    assert np.isfinite(open_.token_advantages()).all()


def test_batch_of_frozen_steps_has_finite_metrics() -> None:
    batch = batch_of(
        make_trajectory("a", [step("critic", 0.2, **FROZEN)], 1.0),
        make_trajectory("b", [step("critic", 0.8, **FROZEN)], 0.0),
    )
    assignment = assign(batch, credit_options())
    assert assignment.token_advantages().size == 0
    assert all(np.isfinite(value) for value in credit_metrics(assignment).values())
    lint(assignment)
    metrics = rollout_metrics(batch)
    assert metrics["rollout/response_tokens"] == metrics["rollout/tokens"] == 0
