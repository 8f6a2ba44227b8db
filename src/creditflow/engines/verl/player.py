"""Plays and scores one trajectory at a time, hundreds at once: what an agent-loop worker does for the run.

The workflow, the team and the reward functions are those of the local engine. This module knows that somebody generates
and that plays are scored; not Ray, not verl's batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from creditflow.config import Config
from creditflow.parts import Parts, build_parts
from creditflow.reward import RewardManager, ScoringReport
from creditflow.rollout import Generator, Play
from creditflow.rollout.play import play_one
from creditflow.rollout.recorder import Sampling
from creditflow.trajectory import Trajectory


class Player:
    """The recipe's workflow and rewards in one process of many."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.scorer = Scorer(parts.rewards)

    async def play(self, play: Play, generator: Generator, sampling: Sampling) -> tuple[Trajectory, ScoringReport]:
        """The trajectory, scored and labelled, and what scoring it together with others took.

        Reports cover each scoring once: of plays that were scored together, one has it and the others an empty one.
        Raises ConfigError for a mistake in the recipe.
        """
        trajectory = await play_one(play, self.parts.workflow, self.parts.agents, generator, sampling)
        if trajectory.status == "failed":
            return trajectory, ScoringReport((), 0.0)
        self.parts.label([trajectory])
        return trajectory, await self.scorer.score(trajectory)

    async def close(self) -> None:
        """End what the rewards have started, and connections to endpoints."""
        try:
            await self.parts.rewards.aclose()
        finally:
            await asyncio.gather(*(client.aclose() for client in self.parts.chat_clients.values()))


class Scorer:
    """Scores plays as they come in; those that come while a scoring runs are scored together in the next one."""

    def __init__(self, manager: RewardManager) -> None:
        self.manager = manager
        self._waiting: list[tuple[Trajectory, asyncio.Future[ScoringReport]]] = []
        self._running: asyncio.Task[None] | None = None

    async def score(self, trajectory: Trajectory) -> ScoringReport:
        """Fills the trajectory's scores. How many may fail is not judged here, where few plays are seen."""
        future: asyncio.Future[ScoringReport] = asyncio.get_running_loop().create_future()
        self._waiting.append((trajectory, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                report = await self.manager.score([trajectory for trajectory, _ in batch], max_failed_frac=1.0)
            except Exception as error:  # handed to every caller: their plays are not scored
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for _, future in batch:
                if not future.done():
                    future.set_result(report)
                    report = ScoringReport((), 0.0)


def share_of(config: Config, n_players: int) -> Config:
    """`config` for one of `n_players` processes that each run the rewards: together as many workers as it asks for."""
    if config.reward.num_workers is None:
        return config
    share = max(1, math.ceil(config.reward.num_workers / n_players))
    return replace(config, reward=replace(config.reward, num_workers=share))


def build_player(recipe: Any, n_players: int) -> Player:
    """The player of one process of `n_players`; raises an InputError where the recipe does not fit together here."""
    return Player(build_parts(replace(recipe, config=share_of(recipe.config, n_players)), tasks=False))


def sampled_steps(trajectory: Trajectory, policies: Sequence[str] | Mapping[str, Any]) -> list[int]:
    """Indices of the steps that can be trained: a policy of `policies` sampled at least one token of them."""
    return [step.index for step in trajectory.steps if step.policy in policies and any(step.response_mask)]
