"""Tests of the reports on trajectories that an agent-loop worker scores together."""

import asyncio
import math
from copy import deepcopy
from dataclasses import replace

import pytest

from creditflow.data import Score, Trajectory
from creditflow.engines.verl.runner import Scorer
from creditflow.rewards import RewardFunction, RewardManager, ScoringReport
from tests.rewards.trajectories import a_trajectory

OWN = ("name", "level", "matched", "failed", "timeouts")


def of_length(step, trajectory):
    if len(trajectory.steps) == 2:
        raise ValueError(f"bad step {step.index % 2}")
    return Score(0.0, status="timeout", reason="late") if len(trajectory.steps) == 4 else step.index / 10


def by_agent(trajectory):
    if len(trajectory.steps) == 1:
        return None
    values = {"p": 0.5, "e": 0.25} if len(trajectory.steps) > 2 else {"p": 0.5, "e": "none"}
    return values if len(trajectory.steps) != 5 else math.nan


def functions() -> list[RewardFunction]:
    return [
        RewardFunction("length", "step", of_length),
        RewardFunction("tokens", "step", lambda step, trajectory: [0.25] * len(step.response_ids)),
        RewardFunction("all", "trajectory", lambda trajectory: [step.index / 5 for step in trajectory.steps]),
        RewardFunction("answer", "outcome", by_agent),
    ]


def scored_together(trajectories: list[Trajectory]) -> list[ScoringReport]:
    async def score():
        scorer = Scorer(RewardManager(functions()))
        return await asyncio.gather(*(scorer.score(one) for one in trajectories))

    return asyncio.run(score())


def scored_alone(trajectory: Trajectory) -> ScoringReport:
    return asyncio.run(RewardManager(functions()).score([trajectory], max_failed_frac=1.0))


@pytest.fixture
def trajectories() -> list[Trajectory]:
    wrong = replace(a_trajectory(agents="pe"), info={"agent_error": "no such tool"})
    return [*(a_trajectory(agents=agents) for agents in ("pep", "pe", "pepe", "p", "pepep", "pep")), wrong]


def test_each_trajectory_gets_the_report_on_its_scores(trajectories):
    alone = [scored_alone(deepcopy(one)) for one in trajectories]

    together = scored_together(trajectories)

    for own, part in zip(alone, together, strict=True):
        assert [[getattr(f, name) for name in (*OWN, "reasons")] for f in part.functions] == [
            [getattr(f, name) for name in (*OWN, "reasons")] for f in own.functions
        ]
        for name in ("mean", "sd"):
            assert [getattr(f, name) for f in part.functions] == pytest.approx(
                [getattr(f, name) for f in own.functions], nan_ok=True
            )


def test_parts_of_a_report_have_its_calls_once(trajectories):
    whole = asyncio.run(RewardManager(functions()).score(deepcopy(trajectories), max_failed_frac=1.0))

    merged = ScoringReport.merge(scored_together(trajectories))

    for name in ("calls", "cached", "not_applicable", "extra", *OWN):
        assert [getattr(f, name) for f in merged.functions] == [getattr(f, name) for f in whole.functions]
    assert sum(f.calls for f in whole.functions) > 20
