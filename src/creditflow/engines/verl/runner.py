"""Run and score rollouts in an agent-loop worker, one per call and hundreds concurrently.

Workflow, team and reward functions are those of the local engine. Independent of Ray and of verl's batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.config import Recipe, with_options
from creditflow.data import Trajectory
from creditflow.engines.common.components import Components, build_components
from creditflow.rewards import ScoringReport
from creditflow.rollout import Generator, Rollout
from creditflow.rollout.recorder import Sampling
from creditflow.rollout.runner import run_rollout


class RolloutRunner:
    """The recipe's workflow and rewards in one of several processes."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self._scoring = asyncio.Lock()
        self._waiting: dict[int, Trajectory] = {}
        self._reports: dict[int, ScoringReport] = {}

    async def run(self, rollout: Rollout, generator: Generator, sampling: Sampling) -> tuple[Trajectory, ScoringReport]:
        """Run, score and label one rollout; returns its trajectory and the report on its scores.

        Raises ConfigError for a mistake in the recipe.
        """
        components = self.components
        trajectory = await run_rollout(rollout, components.workflow, components.agents, generator, sampling)
        if trajectory.status == "failed":
            return trajectory, ScoringReport((), 0.0)
        components.label([trajectory])
        return trajectory, await self.score(trajectory)

    async def score(self, trajectory: Trajectory) -> ScoringReport:
        """Fill in the trajectory's scores; returns the report on them.

        Trajectories that arrive during a scoring are scored together in the next. The report on the first one also has
        their shared part (`RewardManager.score_apart`).
        """
        key = id(trajectory)
        self._waiting[key] = trajectory
        try:
            async with self._scoring:
                if key not in self._reports:
                    batch = {k: waiting for k, waiting in self._waiting.items() if k not in self._reports}
                    parts, shared = await self.components.rewards.score_apart([*batch.values()])
                    self._reports |= zip(batch, [ScoringReport.merge([parts[0], shared]), *parts[1:]], strict=True)
            return self._reports[key]
        finally:
            del self._waiting[key]
            self._reports.pop(key, None)

    async def close(self) -> None:
        """Close the rewards and the connections to endpoints."""
        try:
            await self.components.rewards.aclose()
        finally:
            await asyncio.gather(*(client.aclose() for client in self.components.chat_clients.values()))


def build_runner(recipe: Recipe, n_runners: int) -> RolloutRunner:
    """Build the runner of one of `n_runners` processes, with its share of `reward.num_workers`.

    Raises InputError if the recipe is inconsistent.
    """
    if (workers := recipe.config.reward.num_workers) is not None:
        recipe = with_options(recipe, {"reward.num_workers": max(1, math.ceil(workers / n_runners))})
    return RolloutRunner(build_components(recipe, tasks=False))


def sampled_steps(trajectory: Trajectory, policies: Sequence[str] | Mapping[str, Any]) -> list[int]:
    """Indices of trainable steps, with at least one token sampled by a policy of `policies`."""
    return [step.index for step in trajectory.steps if step.policy in policies and any(step.response_mask)]
