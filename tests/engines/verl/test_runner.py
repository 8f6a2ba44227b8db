"""Tests of the reports on trajectories that an agent-loop worker scores together."""

import asyncio
import math
import re
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from creditflow.data import Score, Trajectory
from creditflow.engines.verl.runner import RolloutRunner
from creditflow.rewards import RewardFunction, RewardManager, ScoringReport
from creditflow.rewards.values import NotApplicable
from tests.rewards.trajectories import a_trajectory

OWN = ("name", "level", "matched", "failed", "timeouts", "not_applicable")


def of_length(step, trajectory):
    if len(trajectory.steps) == 2:
        raise ValueError(f"bad step {step.index % 2}")
    return Score(0.0, status="timeout", reason="late") if len(trajectory.steps) == 4 else step.index / 10


def by_agent(trajectory):
    if len(trajectory.steps) == 1:
        return NotApplicable()
    values = {"p": 0.5, "e": 0.25} if len(trajectory.steps) > 2 else {"p": 0.5, "e": "none"}
    return values if len(trajectory.steps) != 5 else math.nan


class Clipped:
    """A function with a maximum and a sum, since the last call, as metrics."""

    requests = 7.0

    def metrics(self):
        requests, self.requests = self.requests, 0.0
        return {"wait_max": 3.0, "requests": requests}

    def __call__(self, step, trajectory):
        return 0.5


def functions() -> list[RewardFunction]:
    clipped = Clipped()
    return [
        RewardFunction("clipped", "step", clipped, re.compile("^e$"), instance=clipped),
        RewardFunction("odd", "step", lambda step, trajectory: NotApplicable() if step.index % 2 else 1.0),
        RewardFunction("long", "trajectory", lambda t: NotApplicable() if len(t.steps) < 3 else [1.0] * len(t.steps)),
        RewardFunction("length", "step", of_length),
        RewardFunction("tokens", "step", lambda step, trajectory: [0.25] * len(step.response_ids)),
        RewardFunction("all", "trajectory", lambda trajectory: [step.index / 5 for step in trajectory.steps]),
        RewardFunction("answer", "outcome", by_agent),
    ]


def runner() -> RolloutRunner:
    return RolloutRunner(SimpleNamespace(rewards=RewardManager(functions())))


def scored_together(trajectories: list[Trajectory]) -> list[ScoringReport]:
    async def score():
        one = runner()
        return await asyncio.gather(*(one.score(trajectory) for trajectory in trajectories))

    return asyncio.run(score())


def scored_alone(trajectory: Trajectory) -> ScoringReport:
    return asyncio.run(RewardManager(functions()).score([trajectory], max_failed_frac=1.0))


@pytest.fixture
def trajectories() -> list[Trajectory]:
    wrong = replace(a_trajectory(agents="pe"), info={"agent_error": "no such tool"})
    return [*(a_trajectory(agents=agents) for agents in ("pep", "pe", "pepe", "p", "pepep", "pep")), wrong]


def fields(report: ScoringReport, *names: str) -> list[list[object]]:
    """These fields of each function's report."""
    return [[getattr(function, name) for name in names] for function in report.functions]


def test_each_trajectory_gets_the_report_on_its_scores(trajectories):
    alone = [scored_alone(deepcopy(trajectory)) for trajectory in trajectories]
    whole = asyncio.run(RewardManager(functions()).score(deepcopy(trajectories), max_failed_frac=1.0))

    together = scored_together(trajectories)

    for own, part in zip(alone, together, strict=True):
        assert fields(part, *OWN, "reasons") == fields(own, *OWN, "reasons")
        np.testing.assert_allclose(fields(part, "mean", "sd"), fields(own, "mean", "sd"), rtol=1e-6)
    once = ("calls", "cached", "extra", "counted", *OWN)
    assert fields(ScoringReport.merge(together), *once) == fields(whole, *once)
    assert sum(f.calls for f in whole.functions) > 20
    assert sum(f.not_applicable for f in whole.functions) > 5
    assert whole.functions[0].counted == {"wait_max": 3.0, "requests": 7.0}


def test_rollout_without_its_scores_leaves_the_others(trajectories):
    """One is cancelled while it waits; another raises, as the first of those that are scored together."""

    async def score():
        one = runner()
        score_apart, batches = one.components.rewards.score_apart, []

        async def fail_in_the_second(batch):
            batches.append(len(batch))
            if len(batches) == 2:
                raise RuntimeError("out of order")
            return await score_apart(batch)

        one.components.rewards.score_apart = fail_in_the_second
        calls = [asyncio.create_task(one.score(trajectory)) for trajectory in trajectories[:5]]
        await asyncio.sleep(0)  # the first is scored, the others wait
        calls[1].cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert one._waiting == one._reports == {}
        return batches, results

    batches, (first, cancelled, failed, *parts) = asyncio.run(score())

    assert batches == [1, 3, 2]
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(failed, RuntimeError)
    assert [part.functions[0].calls for part in (first, *parts)] == [1, 2, 0]
