"""Run and score rollouts in an agent-loop worker, one per call and hundreds concurrently.

Workflow, team and reward functions are those of the local engine. Independent of Ray and of verl's batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from creditflow.config import Recipe
from creditflow.data import Trajectory
from creditflow.engines.common.components import Components, build_components
from creditflow.rewards import RewardManager, ScoringReport
from creditflow.rollout import Generator, Rollout
from creditflow.rollout.recorder import Sampling
from creditflow.rollout.runner import run_rollout


class RolloutRunner:
    """The recipe's workflow and rewards in one of several processes."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.scorer = Scorer(components.rewards)

    async def run(self, rollout: Rollout, generator: Generator, sampling: Sampling) -> tuple[Trajectory, ScoringReport]:
        """Run, score and label one rollout; returns its trajectory and the report on its scores.

        Raises ConfigError for a mistake in the recipe.
        """
        components = self.components
        trajectory = await run_rollout(rollout, components.workflow, components.agents, generator, sampling)
        if trajectory.status == "failed":
            return trajectory, ScoringReport((), 0.0)
        components.label([trajectory])
        return trajectory, await self.scorer.score(trajectory)

    async def close(self) -> None:
        """Close the rewards and the connections to endpoints."""
        try:
            await self.components.rewards.aclose()
        finally:
            await asyncio.gather(*(client.aclose() for client in self.components.chat_clients.values()))


class Scorer:
    """Scores trajectories on arrival.

    Those that arrive during a scoring are scored together in the next.
    """

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager
        self._waiting: list[tuple[Trajectory, asyncio.Future[ScoringReport]]] = []
        self._running: asyncio.Task[None] | None = None

    async def score(self, trajectory: Trajectory) -> ScoringReport:
        """Fill in the trajectory's scores; returns the report on them.

        The first of those scored together also has what they share (`RewardManager.score_apart`).
        """
        future: asyncio.Future[ScoringReport] = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                parts, shared = await self.manager.score_apart([trajectory for trajectory, _ in batch])
            except Exception as error:  # passed to every caller, since none of the trajectories is scored
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), part in zip(batch, parts, strict=True):
                if not future.done():  # a cancelled caller takes no part
                    future.set_result(ScoringReport.merge([part, shared]))
                    shared = ScoringReport((), 0.0)


def build_runner(recipe: Recipe, n_runners: int) -> RolloutRunner:
    """Build the runner of one of `n_runners` processes, with its share of `reward.num_workers`.

    Raises InputError if the recipe is inconsistent.
    """
    config = recipe.config
    if config.reward.num_workers is not None:
        share = {"num_workers": max(1, math.ceil(config.reward.num_workers / n_runners))}
        config = config.model_copy(update={"reward": config.reward.model_copy(update=share)})
    return RolloutRunner(build_components(replace(recipe, config=config), tasks=False))


def sampled_steps(trajectory: Trajectory, policies: Sequence[str] | Mapping[str, Any]) -> list[int]:
    """Indices of trainable steps, with at least one token sampled by a policy of `policies`."""
    return [step.index for step in trajectory.steps if step.policy in policies and any(step.response_mask)]
