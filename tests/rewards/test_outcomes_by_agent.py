"""Outcomes of single agents from an outcome function: a dict by agent, checked one by one."""

import asyncio

import pytest

from creditflow.data import Score
from creditflow.errors import TooManyFailedScores
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rewards.execution.backends import make_backend
from creditflow.rewards.execution.calls import BackendOptions, Returned
from creditflow.rewards.execution.wire import pack_returned, unpack_returned
from creditflow.rewards.values import taken
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


def test_mean_of_agents_with_different_ranges_is_rescaled():
    trajectory, _ = score({"p": Score(1.0, range=(0.0, 2.0)), "e": Score(-1.0, range=(-1.0, 1.0))})
    assert (trajectory.outcome.value, trajectory.outcome.range) == (0.25, (0.0, 1.0))


def test_star_is_the_common_outcome():
    trajectory, report = score({"*": 0.5, "p": 1.0})
    assert (trajectory.outcome.value, list(trajectory.outcomes), report.mean) == (0.5, ["p"], 0.5)


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


def test_too_many_failed_outcomes_of_agents_stop():
    function = RewardFunction("o", "outcome", lambda trajectory: {"*": 1.0, "p": None})
    with pytest.raises(TooManyFailedScores, match="1 of 1 outcomes failed"):
        trajectories.score([function], [a_trajectory()], max_failed_frac=0.2)


def test_another_scoring_replaces_outcomes_of_agents():
    trajectory, _ = score({"p": 1.0})
    score(0.5, trajectory)
    assert (trajectory.outcome.value, trajectory.outcomes) == (0.5, {})


def test_agents_error_gives_all_agents_the_worst_outcome():
    trajectory, _ = score({"p": 1.0}, a_trajectory(info={"agent_error": "illegal"}))
    assert (trajectory.outcome.value, trajectory.outcomes) == (-1.0, {})


def test_dict_with_a_score_stays_one_outcome():
    trajectory, _ = score({"score": 0.5, "note": "as in verl"})
    assert (trajectory.outcome.value, trajectory.outcome.reason, trajectory.outcomes) == (0.5, "note: as in verl", {})


def test_dict_by_agent_is_no_score_of_a_step():
    trajectory = a_trajectory(agents="e")
    trajectories.score([RewardFunction("f", "step", lambda s, t: {"e": 1.0})], [trajectory])
    reason = "expected a number, got a dict; of a dict, the number under 'score' is read"
    assert trajectory.steps[0].scores["f"].reason == reason


def test_outcomes_by_agent_travel_between_processes():
    for value in ({"p": 1.0, "e": Score(0.5, reason="half")}, {1: None, "e": "x"}, {}):
        returned = Returned(taken(value))
        assert unpack_returned(pack_returned(returned)) == returned


def winner(trajectory):
    """White wins if its last move is higher."""
    white, black = (max(step.index for step in trajectory.steps if step.agent == agent) for agent in ("p", "e"))
    return {"p": float(white > black), "e": float(black > white)}


def test_worker_processes_return_outcomes_by_agent():
    function = RewardFunction("o", "outcome", winner, agents=("p", "e"))
    backend = make_backend("process", [function], BackendOptions(num_workers=1))
    trajectory = a_trajectory(agents="pe")
    trajectories.score([function], [trajectory], backend=backend)
    backend.close()
    assert {agent: score.value for agent, score in trajectory.outcomes.items()} == {"p": 0.0, "e": 1.0}


def test_repeated_call_is_answered_from_the_cache():
    calls = []

    def counted(trajectory):
        calls.append(trajectory.id)
        return {"p": 1.0, "e": 0.0}

    function = RewardFunction("o", "outcome", counted, identity="here", version="1")
    manager, both = RewardManager([function]), [a_trajectory("t"), a_trajectory("u")]
    for trajectory in both:
        asyncio.run(manager.score([trajectory]))
    assert calls == ["t"]
    assert both[0].outcomes == both[1].outcomes


def test_composition_of_outcomes_by_agent_fails():
    part = {"fn": "tests.rewards.test_outcomes_by_agent:winner", "level": "outcome"}
    trajectory = a_trajectory(agents="pe")
    trajectories.score([load("sum", level="outcome", args={"parts": [part]})], [trajectory])
    reason = "winner: expected one number of a part, got outcomes by agent, which cannot be combined"
    assert (trajectory.outcome.status, trajectory.outcome.reason) == ("failed", reason)


def by_index(trajectory):
    return {step.agent: 1.0 / (1 + step.index) for step in trajectory.steps}


def misspelt(trajectory):
    return {"planer": 1.0}


def out_of_range(trajectory):
    return {"planner": 1.0, "executor": 2.0}


def not_finite(trajectory):
    return {"*": 1.0, "planner": float("inf")}


def test_conformance_accepts_outcomes_by_agent():
    assert "has_the_right_shape" in check_reward_function(by_index, level="outcome").passed


@pytest.mark.parametrize(
    ("function", "check", "finding"),
    [
        (misspelt, "has_the_right_shape", "got one of 'planer' (did you mean 'planner'?)"),
        (out_of_range, "stays_in_its_range", "agent executor: expected a value in [0, 1], got 2"),
        (not_finite, "is_finite", "agent planner: expected a value in [0, 1], got inf"),
    ],
)
def test_conformance_finds_invalid_outcomes_by_agent(function, check, finding):
    with pytest.raises(ConformanceError) as caught:
        check_reward_function(function, level="outcome")
    assert [failure.check for failure in caught.value.report.failures] == [check]
    assert finding in str(caught.value)
