"""Outcomes of single agents from an outcome function: a dict by agent, checked one by one."""

import pytest

from creditflow.data import Score
from creditflow.rewards import RewardFunction
from creditflow.testing import ConformanceError, check_reward_function
from tests.rewards import trajectories
from tests.rewards.trajectories import a_trajectory, load


def score(value, trajectory=None, *, range=(-1.0, 1.0), **more):
    """Score a trajectory of the agents p, e and v with an outcome function that returns `value`."""
    trajectory = trajectory or a_trajectory()
    function = RewardFunction("o", "outcome", lambda trajectory: value, range=range, **more)
    return trajectory, trajectories.score([function], [trajectory]).functions[0]


def test_dict_by_agent_fills_the_outcomes_of_agents():
    trajectory, report = score({"p": 1, "e": Score(-1.0, range=(-1.0, 1.0), reason="lost")}, version="v1")
    assert trajectory.outcomes == {
        "p": Score(1.0, (-1.0, 1.0), version="v1"),
        "e": Score(-1.0, (-1.0, 1.0), reason="lost", version="v1"),
    }
    assert trajectory.outcome == Score(0.0, (-1.0, 1.0), reason="the mean of the agents", version="v1")
    assert (report.matched, report.failed, report.mean) == (1, 0, 0.0)


@pytest.mark.parametrize(
    ("value", "info", "outcome", "agents"),
    [
        ({"p": Score(1.0, range=(0.0, 2.0)), "e": Score(-1.0, range=(-1.0, 1.0))}, {}, (0.25, (0.0, 1.0)), ["p", "e"]),
        ({"*": 0.5, "p": 1.0}, {}, (0.5, (-1.0, 1.0)), ["p"]),
        ({"score": 0.5, "note": "as in verl"}, {}, (0.5, (-1.0, 1.0)), []),
        ({"p": 1.0}, {"agent_error": "illegal"}, (-1.0, (-1.0, 1.0)), []),
    ],
    ids=["mean", "star", "score", "agent error"],
)
def test_outcomes_of_agents_have_a_common_outcome(value, info, outcome, agents):
    trajectory, _ = score(value, a_trajectory(info=info))
    assert (trajectory.outcome.value, trajectory.outcome.range, list(trajectory.outcomes)) == (*outcome, agents)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "expected a value in [-1, 1], got nan"),
        (2.0, "expected a value in [-1, 1], got 2"),
        (None, "expected a number, got nothing (None); some path through the function returns no value"),
        ([0.5], "expected one number for the whole trajectory, got a list"),
        ("1", "expected a number, got a str; return float(...) of it"),
        (Score(0.0, status="failed", reason="crashed"), "crashed"),
    ],
)
def test_invalid_outcome_of_an_agent_fails_alone(value, reason):
    trajectory, report = score({"p": value, "e": 1.0})
    assert (trajectory.outcomes["p"].status, trajectory.outcomes["p"].reason) == ("failed", reason)
    assert trajectory.outcomes["e"].value == 1.0
    assert (trajectory.outcome.status, trajectory.outcome.reason) == ("failed", f"p: {reason}")
    assert (report.matched, report.failed) == (1, 1)
    assert report.reasons == (f"o, trajectory t: p: {reason}",)


def test_failed_agent_counts_although_the_common_outcome_is_ok():
    trajectory, report = score({"*": 1.0, "p": 3.0, "e": 4.0})
    assert trajectory.outcome.value == 1.0
    assert (report.matched, report.failed) == (1, 1)
    assert report.reasons == ("o, trajectory t, agent p: expected a value in [-1, 1], got 3",)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"plan": 1.0}, "expected outcomes of agents of the team, got one of 'plan' (did you mean 'planner'?)"),
        ({1: 1.0}, "expected outcomes by the names of agents, got a name of type int"),
        ({}, "expected an outcome for at least one agent, got none"),
    ],
)
def test_wrong_names_fail_the_whole_outcome(value, reason):
    trajectory, report = score(value, agents=("planner",))
    assert (trajectory.outcome.status, trajectory.outcome.reason, trajectory.outcomes) == ("failed", reason, {})
    assert report.failed == 1


def test_agents_of_the_team_without_a_step_may_be_named():
    trajectory, _ = score({"p": 1.0, "absent": 0.0}, agents=("absent",))
    assert list(trajectory.outcomes) == ["p", "absent"]
    function = load("tests.rewards.test_outcomes_by_agent:winner", level="outcome", agents=("white", "black"))
    assert function.agents == ("white", "black")


def test_another_scoring_replaces_outcomes_of_agents():
    trajectory, _ = score({"p": 1.0})
    score(0.5, trajectory)
    assert (trajectory.outcome.value, trajectory.outcomes) == (0.5, {})


def winner(trajectory):
    """White wins if its last move is higher."""
    white, black = (max(step.index for step in trajectory.steps if step.agent == agent) for agent in ("p", "e"))
    return {"p": float(white > black), "e": float(black > white)}


def test_sum_of_outcomes_by_agent_fails():
    part = {"fn": "tests.rewards.test_outcomes_by_agent:winner", "level": "outcome"}
    trajectory = a_trajectory(agents="pe")
    trajectories.score([load("sum", level="outcome", args={"parts": [part]})], [trajectory])
    reason = "winner: expected one number of a part, got outcomes by agent, which cannot be combined"
    assert (trajectory.outcome.status, trajectory.outcome.reason) == ("failed", reason)


def test_conformance_accepts_outcomes_by_agent():
    function = lambda trajectory: {step.agent: 1.0 / (1 + step.index) for step in trajectory.steps}  # noqa: E731
    assert "has_the_right_shape" in check_reward_function(function, level="outcome").passed


@pytest.mark.parametrize(
    ("value", "check", "finding"),
    [
        ({"planer": 1.0}, "has_the_right_shape", "got one of 'planer' (did you mean 'planner'?)"),
        ({"executor": 2.0}, "stays_in_its_range", "agent executor: expected a value in [0, 1], got 2"),
        ({"*": 1.0, "planner": float("inf")}, "is_finite", "agent planner: expected a value in [0, 1], got inf"),
    ],
)
def test_conformance_finds_invalid_outcomes_by_agent(value, check, finding):
    with pytest.raises(ConformanceError) as caught:
        check_reward_function(lambda trajectory: value, level="outcome")
    assert [failure.check for failure in caught.value.report.failures] == [check]
    assert finding in str(caught.value)
