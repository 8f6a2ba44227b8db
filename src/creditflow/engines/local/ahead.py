"""Rollouts of the next training step that begin while the last ones of the present step run.

A few rollouts that wait for a tool would leave the sampler idle. With `rollout.overlap` the rollouts of the next step
use it, so they are sampled from policies one version behind those that they train. They wait while policies are updated
and evaluated, and go on with the new version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from creditflow._utils.progress import phase
from creditflow.config import Config
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.data import Task, Trajectory
from creditflow.engines.common.components import Components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import build_rollouts, build_scheduler, check_and_complete, close_clients
from creditflow.errors import ConfigError
from creditflow.rollout import run_rollouts

_START_SHARE = 0.5
"""The share of a step's rollouts that must be finished before those of the next step begin."""


@dataclass(slots=True)
class _Batch:
    """The rollouts of one training step."""

    size: int
    finished: list[Trajectory] = field(default_factory=list)
    running: asyncio.Task[list[Trajectory]] | None = None
    note: Callable[[Trajectory], None] = lambda _: None
    """Called with each trajectory that finishes from now on."""

    def finish(self, trajectory: Trajectory) -> None:
        """Note a finished trajectory."""
        self.finished.append(trajectory)
        self.note(trajectory)


class RolloutsAhead:
    """Samples the rollouts of each training step, those of the next one ahead."""

    def __init__(self, components: Components, policy_set: PolicySet) -> None:
        self.components, self.policy_set = components, policy_set
        self.scheduler = build_scheduler(components, policy_set)
        self._next: dict[tuple[int, ...], _Batch] = {}

    async def sample(
        self, key: tuple[int, ...], tasks: Sequence[Task], next_key: tuple[int, ...], next_tasks: Sequence[Task]
    ) -> list[Trajectory]:
        """Finish the rollouts of `tasks`, and begin those of `next_tasks`, if there are any, when half are finished.

        `key`, `next_key`: as in `sample_trajectories`. No generation runs when this returns.
        """
        batch = self._next.pop(key, None) or self._begin(key, tasks)
        self.scheduler.release()
        with phase("sampling", batch.size, "trajectories") as bar:

            def note(trajectory: Trajectory) -> None:
                bar.advance(tokens=sum(len(step.response_ids) for step in trajectory.steps))
                if next_tasks and not self._next and len(batch.finished) >= _START_SHARE * batch.size:
                    self._next[next_key] = self._begin(next_key, next_tasks)
                if len(batch.finished) == batch.size:  # the last one: no generation may run during the update
                    self.scheduler.hold()

            for trajectory in batch.finished:
                note(trajectory)
            batch.note = note
            assert batch.running is not None
            trajectories = await batch.running
        await self.scheduler.idle()
        return check_and_complete(self.components, self.policy_set, trajectories)

    def _begin(self, key: tuple[int, ...], tasks: Sequence[Task]) -> _Batch:
        components = self.components
        rollouts = build_rollouts(components, tasks, components.recipe.config.actor_rollout_ref.rollout.n, key)
        batch = _Batch(len(rollouts))
        batch.running = asyncio.create_task(
            run_rollouts(
                rollouts,
                components.workflow,
                components.agents,
                self.scheduler,
                components.sampling,
                batch.finish,
            )
        )
        return batch

    async def cancel_next(self) -> None:
        """Cancel the rollouts of the next step, for example after a rollback."""
        running = [batch.running for batch in self._next.values() if batch.running is not None]
        self._next.clear()
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        """Cancel running rollouts, and close the connections to endpoints."""
        await self.cancel_next()
        await close_clients(self.components)


def expect_overlap_possible(config: Config) -> None:
    """Raise ConfigError if `rollout.overlap` contradicts another option."""
    if not config.actor_rollout_ref.rollout.overlap:
        return
    rule, lag = PROPAGATION_RULES[config.algorithm.propagation], config.algorithm.max_version_lag
    why = "actor_rollout_ref.rollout.overlap samples from policies one version behind"
    if lag < 1:
        raise ConfigError(f"algorithm.max_version_lag: {lag}, but {why}; expected at least 1")
    if rule.branches or rule.needs_replays:
        raise ConfigError(
            f"algorithm.propagation: {config.algorithm.propagation}, but {why}, and this rule samples again from the "
            "policies of the rollouts; expected another rule, or overlap: false"
        )
    if config.audit.every:
        raise ConfigError(
            f"audit.every: {config.audit.every}, but {why}, and an audit continues recorded rollouts; expected 0"
        )
    if config.guard.fallback.trainable == "lora":
        raise ConfigError(
            "guard.fallback.trainable: lora, but with actor_rollout_ref.rollout.overlap rollouts go on while the guard "
            "would replace their policy; expected all, or overlap: false"
        )
    if config.data.curriculum is not None:
        raise ConfigError(
            "data.curriculum: given, but with actor_rollout_ref.rollout.overlap the next tasks are known before the "
            "outcomes that move its levels; expected none, or overlap: false"
        )
    if config.algorithm.filter_groups.enable:
        raise ConfigError(
            "algorithm.filter_groups.enable: true, but with actor_rollout_ref.rollout.overlap the next tasks are "
            "known before the outcomes; expected false"
        )
