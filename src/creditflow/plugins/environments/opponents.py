"""Self-play: a pool of a policy's earlier versions as frozen opponents, and their ratings.

In each group of rollouts one snapshot acts, drawn uniformly from the pool (Bansal et al. 2018, arXiv 1710.03748,
section 4.2, draw opponents uniformly from earlier versions). `Step.policy_version` records which one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_model, save_model

from creditflow.config import Recipe
from creditflow.data import Trajectory
from creditflow.engines.local.hooks import EngineHook
from creditflow.engines.local.policy import Policy
from creditflow.errors import ConfigError
from creditflow.plugins.environments.config import PoolConfig
from creditflow.plugins.environments.ratings import bradley_terry
from creditflow.rollout.client import Generation, GenerationRequest

_PREFIX = "pool"


class SelfPlay(EngineHook):
    """The pools of a recipe."""

    def __init__(self, pools: Mapping[str, OpponentPool]) -> None:
        self.policies = self.pools = pools

    def reserved_models(self) -> list[Any]:
        """A model for each further snapshot."""
        return [pool.model for pool in self.pools.values() for _ in range(pool.config.size - 1)]

    def after_batch(self, step: int, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Count the games against the pools; returns metrics."""
        return {key: value for pool in self.pools.values() for key, value in pool.record(trajectories).items()}

    def after_update(self, step: int, policies: Mapping[str, Policy]) -> None:
        """Take the snapshots that are due."""
        for pool in self.pools.values():
            if step % pool.config.every == 0:
                pool.add(policies[pool.config.of])

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the snapshots; returns the rest of the state by pool."""
        return {name: pool.save_snapshots(folder) for name, pool in self.pools.items()}

    def load(self, folder: Path, state: Any) -> None:
        """Load the snapshots. Raises ConfigError if a pool has none."""
        for name, pool in self.pools.items():
            if name not in (state or {}):
                raise ConfigError(f"policies.{name}.pool: {folder.parent}: has no snapshots of it")
            pool.load_snapshots(folder, state[name])


def self_play(recipe: Recipe, policies: Mapping[str, Policy]) -> SelfPlay | None:
    """The pools of a recipe; None without `policies.<name>.pool`."""
    sources = {name: policy.source[1] for name, policy in recipe.config.policies.items() if policy.source is not None}
    pools = {
        name: OpponentPool(name, policies[pool.of], pool)
        for name, pool in sources.items()
        if isinstance(pool, PoolConfig)
    }
    return SelfPlay(pools) if pools else None


class OpponentPool(Policy):
    """Frozen snapshots of a trained policy, as one policy; outside of generation it is the first snapshot.

    A player is a snapshot, or the learner since its last snapshot. The learner's games against snapshots rate them all.
    """

    def __init__(self, name: str, learner: Policy, config: PoolConfig) -> None:
        self.name, self.config = name, config
        self.snapshots: dict[int, Policy] = {}
        """The snapshots by their version, the oldest first."""
        self.taken: list[int] = []
        """The versions of all snapshots, with those that were dropped."""
        self.points: dict[tuple[int, int], tuple[float, float]] = {}
        """Points of the learner and of the snapshot, by the learner's last snapshot and the opponent's version."""
        self.add(learner)
        self.__dict__.update({key: value for key, value in vars(self._first).items() if key not in self.__dict__})

    @property
    def _first(self) -> Policy:
        return self.snapshots[self.taken[0]]

    def add(self, learner: Policy) -> None:
        """Take a snapshot of the learner, unless the pool has one of its version."""
        if learner.version in self.snapshots:
            return
        self.snapshots[learner.version] = _copy(learner, learner.version)
        self.taken.append(learner.version)
        if len(self.snapshots) > self.config.size:
            del self.snapshots[list(self.snapshots)[1]]

    def chosen(self, rollout: Sequence[int]) -> int:
        """The version of the snapshot that acts in a rollout. Rollouts of a group have the same one."""
        digest = hashlib.sha256(json.dumps([self.name, *rollout[:-1]]).encode()).digest()
        return list(self.snapshots)[int.from_bytes(digest[:8]) % len(self.snapshots)]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate each response with the snapshot of its rollout."""
        by_version = defaultdict[int, list[int]](list)
        for place, request in enumerate(requests):
            by_version[self.chosen(request.rollout)].append(place)
        generation_of: dict[int, Generation] = {}
        for version, places in by_version.items():
            generations = self.snapshots[version].generate([requests[place] for place in places])
            for place, generation in zip(places, generations, strict=True):
                generation_of[place] = replace(generation, version=version)
        return [generation_of[place] for place in range(len(requests))]

    def record(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Count the games of the learner against snapshots; returns metrics.

        A game is a trajectory in which both acted, with an outcome for each. The higher outcome wins.
        """
        results = [result for trajectory in trajectories if (result := self._result(trajectory)) is not None]
        for pair, won in results:
            before = self.points.get(pair, (0.0, 0.0))
            self.points[pair] = (before[0] + won, before[1] + 1 - won)
        key = f"{_PREFIX}/{self.name}"
        metrics = {f"{key}/size": float(len(self.snapshots)), f"{key}/games": float(len(results))}
        if results:
            metrics[f"{key}/win_rate"] = float(np.mean([won for _, won in results]))
        snapshots, learner = self.ratings()
        if learner is not None:
            metrics[f"{key}/rating"] = learner
        return metrics | {f"{key}/rating/{version}": rating for version, rating in snapshots.items()}

    def ratings(self) -> tuple[dict[int, float], float | None]:
        """The ratings of the pool's snapshots that have played, and the learner's; the first snapshot has 0."""
        points = {(("learner", since), ("snapshot", version)): both for (since, version), both in self.points.items()}
        rated = bradley_terry(points, ("snapshot", self.taken[0]))
        snapshots = {
            version: rated["snapshot", version] for version in self.snapshots if ("snapshot", version) in rated
        }
        latest = max((since for since, _ in self.points), default=None)
        return snapshots, None if latest is None else rated.get(("learner", latest))

    def _result(self, trajectory: Trajectory) -> tuple[tuple[int, int], float] | None:
        """The players of a game, and the learner's points; None without a game between them."""
        own, versions = dict[str, float](), dict[str, Counter[int]]()
        for step in trajectory.steps:
            if step.policy not in (self.name, self.config.of):
                continue
            score = trajectory.outcomes.get(step.agent)
            if score is None or score.status != "ok":
                return None
            own[step.policy] = score.rescaled
            versions.setdefault(step.policy, Counter())[step.policy_version] += 1
        if len(own) < 2:
            return None
        (learner, _), (opponent, _) = (versions[name].most_common(1)[0] for name in (self.config.of, self.name))
        since = max((version for version in self.taken if version <= learner), default=self.taken[0])
        difference = own[self.config.of] - own[self.name]
        return (since, opponent), 0.5 if abs(difference) <= 1e-9 else float(difference > 0)

    def save_snapshots(self, folder: Path) -> dict[str, Any]:
        """Write the snapshots' weights into a checkpoint's folder; returns the rest of the state, as JSON values."""
        for version, snapshot in self.snapshots.items():
            save_model(snapshot.model, str(folder / f"{_PREFIX}-{self.name}-{version}.safetensors"))
        points = [[*pair, *points] for pair, points in self.points.items()]
        return {"versions": list(self.snapshots), "taken": self.taken, "points": points}

    def load_snapshots(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Load what `save_snapshots` wrote."""
        template = self._first
        self.snapshots = {}
        for version in state["versions"]:
            self.snapshots[version] = _copy(template, version)
            load_model(self.snapshots[version].model, folder / f"{_PREFIX}-{self.name}-{version}.safetensors")
        self.taken = list(state["taken"])
        self.points = {(since, version): (own, others) for since, version, own, others in state["points"]}
        self.model, self.forward = self._first.model, self._first.forward


def _copy(policy: Policy, version: int) -> Policy:
    copied = policy.reference()
    copied.version, copied.sampler = version, None
    return copied
