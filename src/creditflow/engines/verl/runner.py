"""Run and score rollouts in an agent-loop worker, one per call and hundreds concurrently.

Workflow, team and reward functions are those of the local engine. Independent of Ray and of verl's batches.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from creditflow.config import Recipe
from creditflow.data import Score, Trajectory
from creditflow.engines.common.components import Components, build_components
from creditflow.rewards import FunctionReport, RewardFunction, RewardManager, ScoringReport
from creditflow.rewards.scores import mean_value, not_applicable
from creditflow.rollout import Generator, Rollout
from creditflow.rollout.recorder import Sampling
from creditflow.rollout.runner import run_rollout

_SHOWN_REASONS = 3
"""The maximum number of distinct reasons of failure per function and trajectory."""


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
        """Fill in the trajectory's scores; returns the report on them, see `split_report`.

        Does not limit failures, because a worker sees few trajectories.
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
                report = await self.manager.score([trajectory for trajectory, _ in batch], max_failed_frac=1.0)
                # A cancelled caller takes no part.
                batch = [(trajectory, future) for trajectory, future in batch if not future.done()]
                parts = split_report(report, self.manager.functions, [trajectory for trajectory, _ in batch])
            except Exception as error:  # passed to every caller, since none of the trajectories is scored
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), part in zip(batch, parts, strict=True):
                future.set_result(part)


def split_report(
    report: ScoringReport, functions: Sequence[RewardFunction], trajectories: Sequence[Trajectory]
) -> list[ScoringReport]:
    """Split the report on a joint scoring into one for each trajectory, since their training steps may differ.

    Each part counts the trajectory's own scores. The functions' own shares and maxima are the same in all parts. Only
    the first part has seconds, calls, cached answers, other own metrics, and extra numbers.
    """
    parts = []
    for n, trajectory in enumerate(trajectories):
        counted = []
        for whole, function in zip(report.functions, functions, strict=True):
            scores = _count_scores(function, trajectory)
            if n == 0:
                counts = {name: getattr(scores, name) for name in _COUNTS}
                scores = replace(whole, **counts)
            else:
                # Merging a share or a maximum with itself does not change it, but doubles a sum.
                merged = FunctionReport.merge([whole, whole]).counted
                kept = {name: value for name, value in whole.counted.items() if merged[name] == value}
                scores = replace(scores, counted=kept)
            counted.append(scores)
        parts.append(ScoringReport(tuple(counted), 0.0 if n else report.seconds))
    return parts


_COUNTS = ("matched", "failed", "mean", "sd", "timeouts", "not_applicable", "reasons")
"""Fields of a `FunctionReport` that follow from a trajectory and its scores."""


def _count_scores(function: RewardFunction, trajectory: Trajectory) -> FunctionReport:
    """Report on the function's scores of one trajectory, counted as in `RewardManager.score`."""
    name, label = function.name, f"trajectory {trajectory.id}"
    scored: list[tuple[str, Score]] = []
    not_applied = 0
    if function.level != "outcome":
        scored = [(f"step {step.id}", step.scores[name]) for step in trajectory.steps if name in step.scores]
        not_applied = sum(name not in step.scores and function.matches(step) for step in trajectory.steps)
        if function.level == "trajectory":  # one call
            not_applied = min(not_applied, 1)
    elif trajectory.outcome is not None:
        not_applied = int(trajectory.outcome == not_applicable(function))
        outcomes = [(label, trajectory.outcome)]
        outcomes += [(f"{label}, agent {agent}", score) for agent, score in trajectory.outcomes.items()]
        # A trajectory counts once: as failed if any of its outcomes failed.
        scored = [] if not_applied else [next((pair for pair in outcomes if pair[1].status != "ok"), outcomes[0])]
    failed = [(where, score) for where, score in scored if score.status != "ok"]
    values = [mean_value(score) for _, score in scored if score.status == "ok"]
    reasons: dict[str, str] = {}
    for where, score in failed:
        reasons.setdefault(score.reason, f"{name}, {where}: {score.reason}")
    return FunctionReport(
        name=name,
        level=function.level,
        matched=len(scored),
        failed=len(failed),
        mean=float(np.mean(values)) if values else math.nan,
        sd=float(np.std(values)) if values else 0.0,
        seconds=0.0,
        reasons=tuple(reasons.values())[:_SHOWN_REASONS],
        timeouts=sum(score.status == "timeout" for _, score in failed),
        not_applicable=not_applied,
    )


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
