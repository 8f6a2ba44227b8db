from itertools import combinations

import numpy as np
import pytest

from creditflow.monitor import evaluation_metrics, rollout_metrics, step_errors, sub_reward_metrics
from creditflow.trajectory import Score, Step, Task, Trajectory


def step(agent: str, index: int, scores: dict[str, Score], stratum: str | None = None) -> Step:
    return Step(
        f"t/{index}", "t", index, agent, 0, (), "p", "r", (1, 2), (3,), (1,), (-0.5,), scores=scores, stratum=stratum
    )


def play(uid: str, outcome: float | None, steps: tuple[Step, ...] = (), **more: object) -> Trajectory:
    score = None if outcome is None else Score(outcome)
    return Trajectory("t", uid, Task("d", (), None), list(steps), outcome=score, **more)  # type: ignore[arg-type]


def test_pass_at_k_is_the_share_of_draws_of_k_plays_that_hold_a_pass() -> None:
    plays = {"a": [1.0, 0.0, 0.0, 1.0], "b": [0.0, 0.0, 0.0, 0.0], "c": [0.0, 1.0, 0.0, 0.0]}
    metrics = evaluation_metrics([play(uid, outcome) for uid, outcomes in plays.items() for outcome in outcomes], n=4)
    assert metrics["pass_at_1"] == pytest.approx(np.mean([0.5, 0.0, 0.25]))
    for k in (2, 4):
        draws = [np.mean([any(draw) for draw in combinations(outcomes, k)]) for outcomes in plays.values()]
        assert metrics[f"pass_at_{k}"] == pytest.approx(np.mean(draws))


def test_a_play_without_an_outcome_or_with_a_failed_one_has_not_passed_and_is_counted() -> None:
    failed = play("a", None)
    failed.outcome = Score(1.0, status="failed", reason="no judge")
    metrics = evaluation_metrics([play("a", 1.0), failed, play("a", None), play("a", 0.5)], n=4)
    assert metrics["pass_at_1"] == 0.25
    assert metrics["unscored_frac"] == 0.5
    assert metrics["outcome_mean"] == 0.75


def test_a_step_is_wrong_if_any_score_of_whatever_weight_is_short_and_unscored_steps_do_not_count() -> None:
    steps = [
        step("a", 0, {"f": Score(1.0), "g": Score(0.5, weight=0.0)}),
        step("a", 1, {"f": Score(1.0)}),
        step("a", 2, {"f": Score(0.0, status="failed")}),
        step("b", 3, {"f": Score(3.0, range=(-1.0, 3.0))}),
        step("b", 4, {}),
    ]
    assert step_errors(steps) == [True, False, False]
    metrics = sub_reward_metrics([play("a", 1.0, tuple(steps))])
    assert metrics["reward/step_error_rate"] == pytest.approx(1 / 3)
    assert metrics["reward/step_error_rate/a"] == 0.5
    assert metrics["reward/sub_reward/a"] == 1.0  # a score of weight 0 is no part of it
    assert metrics["reward/sub_reward/b"] == 1.0


def test_scores_are_told_by_stratum_so_that_a_verifier_that_says_ok_to_all_is_seen() -> None:
    steps = [
        step("v", 0, {"f": Score(1.0)}, "right"),
        step("v", 1, {"f": Score(1.0)}, "right"),
        step("v", 2, {"f": Score(0.0)}, "wrong"),
    ]
    metrics = sub_reward_metrics([play("a", 1.0, tuple(steps))])
    assert metrics["reward/sub_reward/v/right"] == 1.0
    assert metrics["reward/sub_reward/v/wrong"] == 0.0


def test_rollout_metrics_count_steps_tokens_and_what_went_wrong() -> None:
    plays = [
        play("a", 1.0, (step("a", 0, {}), step("a", 1, {}))),
        play("a", None, status="failed"),
        play("b", 0.0, (step("a", 0, {}),), status="truncated"),
        play("b", 0.0, (step("a", 0, {}),), info={"agent_error": "x"}),
    ]
    metrics = rollout_metrics(plays)
    assert metrics["rollout/steps_per_trajectory"] == 1.0
    assert metrics["rollout/response_tokens"] == 4
    assert metrics["rollout/tokens"] == 12
    assert metrics["rollout/failed_frac"] == metrics["rollout/truncated_frac"] == 0.25
    assert metrics["rollout/agent_error_frac"] == 0.25
