"""Rewards of verifiers' traces, from their record in the trajectory."""

import asyncio
from pathlib import Path

import pytest

from creditflow.data import Trajectory
from creditflow.errors import RewardError
from creditflow.plugins.verifiers.record import RECORD, TraceRecord
from creditflow.rewards import RewardManager, load_reward_functions
from creditflow.rewards.entries import RewardFunctionConfig
from tests.builders import make_trajectory, step


def recorded(*traces: TraceRecord) -> Trajectory:
    trajectory = make_trajectory("t", [step(trace.agent) for trace in traces for _ in trace.steps])
    trajectory.info[RECORD] = [trace.to_json() for trace in traces]
    for trace in traces:
        trajectory.steps[trace.steps[-1]].info[RECORD] = trace.scores()
    return trajectory


def trace(agent: str, steps: tuple[int, ...], **rewards: tuple[float, float] | None) -> TraceRecord:
    return TraceRecord(agent, steps, rewards, {"calls": 2.0}, True, "agent_completed")


def scored(trajectory: Trajectory, *entries: RewardFunctionConfig) -> Trajectory:
    functions = load_reward_functions(entries, Path(), sorted({s.agent for s in trajectory.steps}))
    asyncio.run(RewardManager(functions, 1.0).score([trajectory]))
    return trajectory


OUTCOME = RewardFunctionConfig(fn="verifiers", args={"range": [0.0, 3.0]})


def test_outcome_is_the_weighted_sum_of_the_trace() -> None:
    trajectory = scored(recorded(trace("desk", (0, 1), right=(1.0, 1.0), brief=(0.5, 0.5))), OUTCOME)
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, trajectory.outcome.range) == (1.25, (0.0, 3.0))
    assert trajectory.outcomes == {}


def test_roles_with_rewards_have_outcomes_of_their_own() -> None:
    players = (trace("white", (0,), won=(1.0, 1.0)), trace("black", (1,), won=(0.0, 1.0)), trace("clock", (2,)))
    trajectory = scored(recorded(*players), OUTCOME)
    assert {agent: score.value for agent, score in trajectory.outcomes.items()} == {"white": 1.0, "black": 0.0}
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 0.5


def test_several_runs_of_a_role_count_by_their_mean() -> None:
    trajectory = scored(recorded(trace("agent", (0,), won=(1.0, 1.0)), trace("agent", (1,), won=(0.0, 1.0))), OUTCOME)
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, trajectory.outcomes) == (0.5, {})


def test_scoring_that_did_not_run_is_a_failure() -> None:
    for missing in (trace("desk", (0,), right=None), trace("desk", (0,))):
        trajectory = scored(recorded(missing), OUTCOME)
        assert trajectory.outcome is not None
        assert trajectory.outcome.status == "failed"


def test_part_scores_the_last_step_of_traces_that_have_it() -> None:
    trajectory = recorded(trace("desk", (0, 1), right=(0.25, 2.0)), trace("customer", (2,)))
    entries = [
        RewardFunctionConfig(fn="verifiers_part", name="right", args={"part": "right"}),
        RewardFunctionConfig(
            fn="verifiers_part", name="calls", args={"part": "calls", "metric": True, "range": [0, 4]}
        ),
    ]
    scored(trajectory, *entries)
    assert [{name: score.rescaled for name, score in one.scores.items()} for one in trajectory.steps] == [
        {},
        {"right": 0.25, "calls": 0.5},
        {"calls": 0.5},
    ]


def test_part_outside_its_range_fails() -> None:
    entry = RewardFunctionConfig(fn="verifiers_part", args={"part": "right"})
    trajectory = scored(recorded(trace("desk", (0,), right=(7.0, 1.0))), entry)
    score = trajectory.steps[0].scores["verifiers_part"]
    assert (score.status, "expected a value in [0, 1], got 7" in score.reason) == ("failed", True)


def test_range_that_is_none_is_refused() -> None:
    with pytest.raises(RewardError, match="finite numbers with low < high"):
        scored(recorded(), RewardFunctionConfig(fn="verifiers", args={"range": [1.0, 1.0]}))
