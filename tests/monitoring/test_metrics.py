import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.credit.strategies import trajectories as of_coarse_values
from tests.oracle import plain_metrics
from tests.strategies import trajectories


def close(got, expected):
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


def graded(rows):
    """Trajectories of one task from rows of sub-rewards and an outcome."""
    return [
        make_trajectory(f"t{n}", [step("a", value) for value in scores], outcome)
        for n, (scores, outcome) in enumerate(rows)
    ]


grades = st.sampled_from([0.0, 0.4, 0.5, 1.0, 1.0, None, "failed"])
"""Few values, so that scores tie with others, and contradict the outcome."""
rows = st.tuples(st.lists(grades, min_size=1, max_size=2), grades)
any_batch = trajectories().filter(len) | of_coarse_values() | st.lists(rows, min_size=1, max_size=6).map(graded)


@examples(500)
@given(any_batch, any_batch, st.integers(1, 5))
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
