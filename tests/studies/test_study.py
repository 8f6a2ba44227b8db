"""Tests of the threshold study's foundations: its cases and its experimental rule."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import yaml

from benchmarks import cases, ideas, study
from creditflow.credit import CreditOptions, assign
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.data import Score, Trajectory, TrajectoryBatch
from tests.recipes.test_arithmetic_chain import a_good_team, a_good_team_but, agents_of, run_team
from tests.rewards.trajectories import a_trajectory


@pytest.fixture(autouse=True)
def ideas_registered() -> Iterator[None]:
    """Register the experimental rule while a test of this file runs; other tests see the package without it."""
    ideas.register()
    yield
    PROPAGATION_RULES.remove("conditional")


TRAINING, EVALUATION = "0-3-1-2", "1-1-2"


def named(trajectory: Trajectory, name: str) -> Trajectory:
    trajectory.id = name
    for step in trajectory.steps:
        step.trajectory_id, step.id = name, f"{name}.{step.index}"
    return trajectory


def scored(function, trajectory: Trajectory, agent: str, **args) -> list[float]:
    return [function(step, trajectory, **args) for step in trajectory.steps if step.agent == agent]


# 52 * 2 = 104, which is 04; the executor answers 05, and the verifier accepts. Then 05 - 13 = 92; the story has 91.
ONE_SLIP = {
    "exec\n5 2 * 0 2 =": "0 5",
    "check\n5 2 * 0 2 = 0 5 ?": "0 5 ok",
    "exec\n0 5 - 1 3 =": "9 2",
    "check\n0 5 - 1 3 = 9 2 ?": "9 2 ok",
}


def test_inheriting_scores_follow_the_story_in_training_only() -> None:
    trajectory, _ = run_team(a_good_team_but(ONE_SLIP))
    assert scored(cases.digits_right, named(trajectory, TRAINING), "executor") == [1.0, 0.5, 1.0]
    assert scored(cases.digits_of_reference, trajectory, "executor") == [1.0, 0.5, 0.5]
    assert scored(cases.digits_of_reference, named(trajectory, EVALUATION), "executor") == [1.0, 0.5, 1.0]


def test_retry_is_scored_by_the_same_operation_of_the_story() -> None:
    doubted = {"check\n5 2 * 0 2 = 0 4 ?": "0 5 bad", "exec\n5 2 * 0 2 = 0 4 bad =": "0 4"}
    trajectory, _ = run_team(a_good_team_but(doubted))
    assert agents_of(trajectory) == "peveveev"
    assert scored(cases.digits_of_reference, named(trajectory, TRAINING), "executor") == [1.0] * 4


@pytest.mark.parametrize(("wrong", "share"), [("noisy20", 0.20), ("noisy35", 0.35), ("contradictory", 1.0)])
def test_verdicts_are_inverted_from_a_step_on_in_training_only(wrong: str, share: float) -> None:
    trajectory, _ = run_team(a_good_team)
    turned = [
        scored(cases.verdict_right, named(trajectory, f"0-{step}-{task}-0"), "verifier", wrong=wrong, first=5)
        for step in (4, 5)
        for task in range(400)
    ]
    assert np.mean(turned[:400]) == 1.0
    assert np.mean(turned[400:]) == pytest.approx(1 - share, abs=0.03)
    assert scored(cases.verdict_right, named(trajectory, EVALUATION), "verifier", wrong=wrong) == [1.0] * 3


def test_one_in_three_executor_steps_is_scored() -> None:
    trajectory, _ = run_team(a_good_team)
    said = {
        name: [cases.one_in_three(step) for step in named(trajectory, name).steps if step.agent == "executor"]
        for name in (TRAINING, EVALUATION)
    }
    assert said == {TRAINING: [True, False, False], EVALUATION: [True] * 3}


def test_saboteur_replaces_a_result_with_another_sum(monkeypatch) -> None:
    monkeypatch.setattr(cases, "_percent", lambda step, of: 0 if step.index == 3 else 99)
    said = {
        "lies\n8 2 * 0 2 =": "5 0",
        "exec\n5 0 - 1 3 =": "3 7",
        "check\n5 0 - 1 3 = 3 7 ?": "3 7 ok",
    }
    trajectory, _ = run_team(a_good_team_but(said), solve=cases.solve_sabotaged, saboteur="lies")
    assert agents_of(trajectory) == "pevevsev"
    assert trajectory.answer == "3 7"
    assert scored(cases.digits_right, named(trajectory, TRAINING), "saboteur") == [0.0]  # for 52 * 02, which is 04


def trajectories(scores: list[str], outcomes: list[float]) -> TrajectoryBatch:
    """Trajectories of an unscored planner and executors with one score each."""
    made = []
    for n, (marks, outcome) in enumerate(zip(scores, outcomes, strict=True)):
        trajectory = named(a_trajectory(agents="p" + "e" * len(marks)), f"0-1-0-{n}")
        trajectory.outcome = Score(outcome)
        for step, mark in zip(trajectory.steps[1:], marks, strict=True):
            step.scores = {"right": Score(float(mark))}
        made.append(trajectory)
    return TrajectoryBatch.from_trajectories(made)


def test_conditional_centers_received_credit_among_similar_steps() -> None:
    batch = trajectories(["111", "111", "101", "110"], [1.0, 0.0, 1.0, 0.0])
    options = CreditOptions(propagation="conditional", outcome_to="answer", sub_reward_origin=0.0, group_by="agent")
    received_S = assign(batch, options).received_S
    plain_S = assign(batch, replace(options, propagation="threshold")).received_S
    planner = np.flatnonzero(batch.index_of_step == 0)
    for pair in (planner[:2], planner[2:]):  # without and with a closed gate below
        assert received_S[pair].mean() == pytest.approx(0.0, abs=1e-12)
        assert np.diff(received_S[pair]) == pytest.approx(np.diff(plain_S[pair]))


@pytest.mark.parametrize("rule", study.AS_GATED)
def test_rules_that_share_runs_give_the_same_credit(rule: str) -> None:
    """On trajectories like the study's: a planner, executors with scores of 0, 0.5 or 1, verifiers with 0 or 1."""
    rng, trajectories = np.random.default_rng(0), []
    for n in range(24):
        trajectory = named(a_trajectory(agents="peveveveev"), f"0-1-{n // 8}-{n % 8}")
        trajectory.uid, trajectory.outcome = str(n // 8), Score(float(rng.integers(2)))
        for step in trajectory.steps:
            value = {"p": rng.integers(7) / 6, "e": rng.integers(3) / 2, "v": rng.integers(2)}[step.agent]
            if rng.random() < 0.8:
                step.scores = {"right": Score(float(value))}
        trajectories.append(trajectory)
    batch = TrajectoryBatch.from_trajectories(trajectories)

    def credit(name: str) -> np.ndarray:
        chosen = [
            override.split("=", 1) for override in study.RULES[name].overrides if override.startswith("algorithm.")
        ]
        options = {key.removeprefix("algorithm."): yaml.safe_load(value) for key, value in chosen}
        return assign(batch, CreditOptions(group_by="agent", **options)).advantage_S

    assert (credit(rule) == credit("threshold")).all()
    assert (credit("threshold 0.3") != credit("threshold")).any()


def test_cases_are_distinct() -> None:
    assert len(set(study.CASES.values())) == len(study.CASES)
    assert "digits_of_reference" in study.CASES["inheriting"][0]
    assert "one_in_three" in study.CASES["every third"][0]
