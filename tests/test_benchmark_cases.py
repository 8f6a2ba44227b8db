"""Tests of the faulty rewards and teams that benchmarks train with."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import cases
from creditflow.data import Trajectory
from creditflow.engines.local.decisions import AFTER, BEFORE, _Continuation
from creditflow.rollout import AgentSpec
from tests.builders import Scripted, make_trajectory, step
from tests.recipes.team import agents_of, functions_of, scored_rollout
from tests.recipes.test_arithmetic_chain import PLAN, SYSTEM, TASK, a_good_team, a_good_team_but, run_team

TRAINING, EVALUATION = "0-3-1-2", "1-1-2"


def named(trajectory: Trajectory, name: str) -> Trajectory:
    trajectory.id = name
    for own in trajectory.steps:
        own.trajectory_id, own.id = name, f"{name}.{own.index}"
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


RESPONSES = {
    "planner": (PLAN, PLAN.replace("1 3", "3 1"), PLAN.replace("*", "+").replace("1 3", "3 1"), "9 9"),
    "executor": ("0 4", "0 5", "9 4", "9 9"),
    "verifier": ("0 4 ok", "0 4 bad"),
}
"""A right response to each agent's prompt, and wrong ones with several shares of right parts."""
FUNCTIONS = {"planner": cases.plan_right, "executor": cases.digits_right, "verifier": cases.verdict_right}


def noisy_scores(agent: str, wrong: str, rollouts: int) -> list[tuple[float, float]]:
    """The recipe's score and the noisy one, for each response in many rollouts of many training steps."""
    pairs = []
    for response in RESPONSES[agent]:
        for k in range(rollouts):
            spec = step(agent, response=response, info={"sum": "5 2 * 0 2 =", "candidate": "0 4"})
            trajectory = make_trajectory(f"0-{k % 48 + 1}-{k // 48 % 8}-{k // 384}", [spec])
            trajectory.task = TASK
            (made,) = trajectory.steps
            pairs.append((FUNCTIONS[agent](made, trajectory), FUNCTIONS[agent](made, trajectory, wrong=wrong)))
    return pairs


def right_guesses(pairs: list[tuple[float, float]], ones: set[float], others: set[float]) -> float:
    """The best share of right guesses from a noisy score alone, whether the own score is one of `ones` or `others`.

    Both kinds count as equally frequent. The best guess for a noisy score is the kind that has it more often.
    """
    by_kind = [Counter(noisy for own, noisy in pairs if own in kind) for kind in (ones, others)]
    return sum(max(counts[noisy] / counts.total() for counts in by_kind) for noisy in by_kind[0] | by_kind[1]) / 2


@pytest.mark.parametrize("agent", RESPONSES)
@pytest.mark.parametrize("wrong", cases.NOISE)
def test_noisy_score_predicts_the_truth_at_its_stated_rate(wrong: str, agent: str) -> None:
    pairs = noisy_scores(agent, wrong, 2000)
    wrong_scores = {own for own, _ in pairs} - {1.0}
    assert len(wrong_scores) == {"planner": 3, "executor": 2, "verifier": 1}[agent]
    assert right_guesses(pairs, {1.0}, wrong_scores) == pytest.approx(cases.NOISE[wrong], abs=0.02)
    for own in wrong_scores:  # half-right and wholly wrong steps look alike
        assert right_guesses(pairs, {1.0}, {own}) == pytest.approx(cases.NOISE[wrong], abs=0.025)
        assert right_guesses(pairs, {own}, wrong_scores) < 0.525


@pytest.mark.parametrize(("wrong", "share"), [("binary20", 0.20), ("binary35", 0.35), ("contradictory", 1.0)])
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


def test_saboteur_replaces_a_result_with_another_sum(monkeypatch) -> None:
    monkeypatch.setattr(cases, "_percent", lambda step, of: 0 if step.index == 3 else 99)
    replies = {"lies\n8 2 * 0 2 =": "5 0", "exec\n5 0 - 1 3 =": "3 7", "check\n5 0 - 1 3 = 3 7 ?": "3 7 ok"}
    model = Scripted(lambda prompt: a_good_team_but(replies)(prompt).encode())
    agents = {name: AgentSpec(system=system) for name, system in {**SYSTEM, "saboteur": "lies"}.items()}
    functions = functions_of("arithmetic_chain")
    trajectory = scored_rollout(cases.solve_sabotaged, TASK, agents, {"default": model}, functions)
    assert agents_of(trajectory) == "pevevsev"
    assert trajectory.answer == "3 7"
    assert scored(cases.digits_right, named(trajectory, TRAINING), "saboteur") == [0.0]  # for 52 * 02, which is 04


@pytest.mark.parametrize(("side", "kept"), [(AFTER, 3), (BEFORE, 2)], ids=["with the decision", "without it"])
def test_saboteur_repeats_its_draws_in_kept_steps(side: int, kept: int) -> None:
    recorded = make_trajectory("0-1-2-3", [step() for _ in range(4)])
    rollout = _Continuation(0, side, 1, recorded, kept, (0,)).rollout
    ids = [rollout.id + one.id.removeprefix(recorded.id) for one in recorded.steps]
    steps = [replace(one, id=id, trajectory_id=rollout.id) for one, id in zip(recorded.steps, ids, strict=True)]
    assert [cases.recorded_step_id(one) for one in steps] == [one.id for one in recorded.steps[:kept]] + ids[kept:]
