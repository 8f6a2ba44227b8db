import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Score
from creditflow.data.table import batch_of as batch_of_table
from creditflow.data.table import table_of
from creditflow.monitoring.evaluation import Evaluation
from creditflow.monitoring.metrics import (
    error_metrics,
    evaluation_metrics,
    passes,
    rollout_metrics,
    step_errors,
    sub_reward_metrics,
)
from tests.builders import batch_of, examples, make_trajectory, step
from tests.oracle import plain_metrics
from tests.strategies import trajectories


def batch_of_outcomes(outcomes: dict[str, list[float | None]]):
    return batch_of(
        *(
            make_trajectory(f"{uid}{n}", [], outcome, uid)
            for uid, given in outcomes.items()
            for n, outcome in enumerate(given)
        )
    )


def close(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


@examples(60)
@given(trajectories().filter(len), trajectories().filter(len), st.integers(1, 5))
def test_column_metrics_equal_per_object_metrics(sampled, greedy, n):
    here = batch_of(*sampled)
    for batch in (here, batch_of_table(table_of(sampled))):
        close(rollout_metrics(batch), plain_metrics.rollout_metrics(sampled))
        close(sub_reward_metrics(batch), plain_metrics.sub_reward_metrics(sampled))
        close(error_metrics(batch), plain_metrics.error_metrics(sampled))
        close(evaluation_metrics(batch, n), plain_metrics.evaluation_metrics(sampled, n))
        wrong_S, scored_S = step_errors(batch)
        every = [plain_metrics.is_wrong(made) for trajectory in sampled for made in trajectory.steps]
        assert [wrong if scored else None for wrong, scored in zip(wrong_S, scored_S, strict=True)] == every
    assert [passes(trajectory.outcome) for trajectory in sampled] == list(map(plain_metrics.passes, sampled))

    found, expected = Evaluation.from_batches(here, batch_of(*greedy), n), plain_metrics.evaluation(sampled, greedy, n)
    close(found.metrics, expected[0])
    assert (found.sampled, found.greedy) == (pytest.approx(expected[1]), pytest.approx(expected[2]))
    assert found.step_errors == expected[3]


def test_unscored_outcomes_count_as_not_passed() -> None:
    failed = Score(1.0, status="failed", reason="no judge")
    metrics = evaluation_metrics(batch_of_outcomes({"a": [1.0, failed, None, 0.5]}), n=4)
    assert metrics["pass_at_1"] == 0.25
    assert metrics["unscored_frac"] == 0.5
    assert metrics["outcome_mean"] == 0.75


def test_step_is_wrong_if_any_score_is_below_its_maximum() -> None:
    steps = [
        step("a", {"f": Score(1.0), "g": Score(0.5, weight=0.0)}),
        step("a", {"f": Score(1.0)}),
        step("a", "failed"),
        step("b", Score(3.0, range=(-1.0, 3.0))),
        step("b"),
    ]
    batch = batch_of(make_trajectory("t", steps, 1.0))
    wrong_S, scored_S = step_errors(batch)
    assert wrong_S.tolist() == [True, False, False, False, False]
    assert scored_S.tolist() == [True, True, False, True, False]
    metrics = sub_reward_metrics(batch)
    assert metrics["reward/step_error_rate"] == pytest.approx(1 / 3)
    assert metrics["reward/step_error_rate/a"] == 0.5
    assert metrics["reward/sub_reward/a"] == 1.0  # scores of weight 0 are left out
    assert metrics["reward/sub_reward/b"] == 1.0


def test_agents_and_strata_without_scores_have_no_metrics() -> None:
    steps = [step("a", "failed", stratum="x"), step("b", 1.0, stratum="y")]
    assert set(sub_reward_metrics(batch_of(make_trajectory("t", steps)))) == {
        "reward/sub_reward/b",
        "reward/sub_reward/b/y",
        "reward/sub_reward_var/b",
        "reward/sub_reward_excess_var/b",
        "reward/step_error_rate/b",
        "reward/step_error_rate",
    }
    assert sub_reward_metrics(batch_of(make_trajectory("t", steps[:1]), make_trajectory("u", []))) == {}


@pytest.mark.parametrize(
    ("scores", "excess"), [([0.0, 1.0] * 5, 0.0), ([0.0, 0.0, 1.0], 0.0), ([0.0, 1.0, 0.5], 1 / 6)]
)
def test_excess_variance_of_scores_of_0_and_1_is_0(scores: list[float], excess: float) -> None:
    metrics = sub_reward_metrics(batch_of(make_trajectory("t", [step("a", score) for score in scores])))
    assert metrics["reward/sub_reward_excess_var/a"] == pytest.approx(excess, abs=1e-12)


def test_agent_errors_are_counted_and_missing_actions_left_out() -> None:
    wrong, right = (make_trajectory(f"t{outcome}", [step("a")], outcome) for outcome in (0.0, 1.0))
    wrong.info["agent_error"] = "x"
    metrics = rollout_metrics(batch_of(wrong, right))
    assert metrics["rollout/agent_error_frac"] == 0.5
    assert "rollout/illegal_frac" not in metrics


def test_illegal_frac_counts_steps_without_a_legal_action() -> None:
    infos = ({"action": 1}, {"action": 1, "illegal": "no number"}, {"illegal": "no number"}, {})
    acted = [step("a", tokens=1, info=info) for info in infos]
    assert rollout_metrics(batch_of(make_trajectory("a", acted, 1.0)))["rollout/illegal_frac"] == pytest.approx(2 / 3)


def errors(*trajectories):
    return error_metrics(batch_of(*trajectories))


def test_error_rate_counts_failures_and_skips_weight_zero() -> None:
    steps = [step("a", {"f": 1.0, "g": "failed"}), step("b", {"f": 0.2, "h": Score(0.0, weight=0.0)})]
    assert errors(make_trajectory("p", steps, 0.0)) == {
        "reward/error_rate": 1 / 3,
        "reward/verdicts": 3,
        "reward/judged_trajectories": 1,
    }


@pytest.mark.parametrize(
    ("scores", "outcome", "contradict"),
    [
        ([1.0, 1.0], 0.0, True),
        ([1.0, 1.0], 0.9, False),
        ([1.0, 1.0], 0.4, True),
        ([1.0, 0.9], 0.0, False),
        ([0.4, 0.0], 1.0, True),
        ([0.4, 0.5], 1.0, False),
        ([0.4, 0.0], 0.0, False),
        ([1.0, 1.0], 1.0, False),
        ([1.0, 1.0], None, False),
        ([1.0, 1.0], "failed", False),
        ([1.0, None], 0.0, False),  # the unscored step may explain the outcome
    ],
)
def test_error_rate_counts_contradictions_of_the_outcome(scores, outcome, contradict) -> None:
    made = errors(make_trajectory("p", [step("a", score) for score in scores], outcome))
    assert made["reward/error_rate"] == float(contradict)


@pytest.mark.parametrize(
    ("right", "wrong", "agreement"),
    [([0.9, 0.8], [0.1, 0.2], 1.0), ([0.1], [0.2, 0.9], 0.0), ([0.5, 0.5], [0.5], 0.5), ([0.6, 0.2], [0.4], 0.5)],
)
def test_agreement_is_the_share_of_correctly_ordered_pairs(right, wrong, agreement) -> None:
    trajectories = [make_trajectory(f"r{i}", [step("a", score)], 1.0, task="t") for i, score in enumerate(right)]
    trajectories += [make_trajectory(f"w{i}", [step("a", score)], 0.0, task="t") for i, score in enumerate(wrong)]
    alone = make_trajectory("alone", [step("a", 0.0)], 1.0, task="another")  # no pair: the task has no wrong trajectory
    made = errors(*trajectories, alone)
    assert made["reward/agreement"] == agreement
    n, m = len(right), len(wrong)
    assert made["reward/agreement_over"] == pytest.approx(0.25 / ((n + m + 1) / (12 * n * m)))
