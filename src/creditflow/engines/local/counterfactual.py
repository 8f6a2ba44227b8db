"""Counterfactual rollouts: measure each agent's contribution to the outcome by replacing agents.

For each trajectory, the rollout is repeated for the coalitions of a plan (`creditflow.credit.shapley`), with each agent
outside the coalition replaced by the baseline of its policy. The values depend only on trajectories, policies and key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow._utils.progress import phase
from creditflow.config import Config, trained_agents
from creditflow.credit import CreditOptions
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.shapley import KEY, Plan, Values, least_rollouts, plan, values_of_agents
from creditflow.data import Floats, Trajectory
from creditflow.data.batch import outcome_value
from creditflow.engines.common.components import Components
from creditflow.engines.local.outcomes import AT_ONCE, MeasuringRollouts
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import ConfigError, TooManyFailedScores
from creditflow.rollout import Rollout, replay_rollout

COUNTERFACTUAL, AUDIT = 3, 4
"""The first part of a counterfactual rollout's random key, in training and in an audit.

Training rollouts use 0, validation 1, a check 2.
"""
Note = Callable[[int, int], None]
"""A progress callback: rollouts done, rollouts in total."""


@dataclass(frozen=True, slots=True)
class CounterfactualResult:
    """The result of counterfactual rollouts."""

    by_id: dict[str, Values]
    """Values by trajectory id, without trajectories that have no known outcome or no replaceable agent."""
    rollouts: int
    failed: int
    """The number of rollouts without an outcome."""


def wants_values(options: CreditOptions) -> bool:
    """Whether the propagation rule uses counterfactual values."""
    return PROPAGATION_RULES[options.propagation].needs_replays


def expect_enough_rollouts(config: Config) -> None:
    """Raise ConfigError if the budget is too small for a trajectory with all trained agents."""
    agents = trained_agents(config)
    least, given = least_rollouts(len(agents)), config.algorithm.counterfactual_rollouts
    if given < least:
        raise ConfigError(
            f"algorithm.counterfactual_rollouts: expected at least {least} rollouts for {len(agents)} agents "
            f"({', '.join(agents)}), got {given}"
        )


async def add_values(
    components: Components,
    policy_set: PolicySet,
    trajectories: Sequence[Trajectory],
    step: int,
) -> dict[str, float]:
    """Store the values of a training step's scored trajectories in their `info[KEY]`; returns metrics.

    A trajectory with too many failed counterfactual rollouts becomes failed itself and is masked: a value that could
    not be measured is not 0. Raises TooManyFailedScores if more rollouts failed than `rollout.max_failed_frac` allows.
    """
    baselines = {name: policy_set.references[name] for name in policy_set.actors}
    try:
        with phase("counterfactual rollouts", unit="rollouts") as bar:
            result = await measure(
                components,
                policy_set,
                baselines,
                trajectories,
                components.recipe.config.algorithm.counterfactual_rollouts,
                (COUNTERFACTUAL, step),
                bar.reach,
            )
    except TooManyFailedScores as error:
        error.trajectories = trajectories
        raise
    for trajectory in trajectories:
        agent_values = result.by_id.get(trajectory.id)
        if agent_values is None and _is_known(trajectory):  # none of its agents is trained
            agent_values = Values(*(np.zeros(0),) * 4, rollouts=0)
        if agent_values is not None:
            trajectory.info[KEY] = agent_values.to_json()
            if not agent_values.known:
                trajectory.status = "failed"
                trajectory.info["error"] = f"of {agent_values.rollouts} counterfactual rollouts too many failed"
    return {
        "rollout/counterfactual_rollouts": float(result.rollouts),
        "rollout/counterfactual_failed_frac": result.failed / max(result.rollouts, 1),
    }


async def measure(
    components: Components,
    policy_set: PolicySet,
    baselines: Mapping[str, Policy],
    trajectories: Sequence[Trajectory],
    budget: int,
    key: tuple[int, ...],
    note: Note = lambda done, total: None,
) -> CounterfactualResult:
    """Measure the values of scored `trajectories` with at most `budget` rollouts for each.

    `baselines`: by policy, the replacement for its agents outside a coalition. Agents of other policies always stay.

    Raises ConfigError if no reward function gives an outcome, or the budget is too small, and TooManyFailedScores if
    more rollouts have no outcome than `rollout.max_failed_frac` allows.
    """
    games = _games(components, baselines, trajectories, budget, key)
    replays = _Replays(components, policy_set, baselines)
    seats = [(game, p) for game in games for p in range(len(game.plan.coalition_P))]
    by_rollout: list[Floats] = []
    note(0, len(seats))
    for first in range(0, len(seats), AT_ONCE):
        by_rollout += await replays.run(seats[first : first + AT_ONCE])
        note(len(by_rollout), len(seats))
    failed = sum(bool(np.isnan(outcome_A).any()) for outcome_A in by_rollout)
    most = components.recipe.config.actor_rollout_ref.rollout.max_failed_frac
    if failed > most * len(seats):
        raise TooManyFailedScores(
            f"{failed} of {len(seats)} counterfactual rollouts failed, more than "
            f"actor_rollout_ref.rollout.max_failed_frac={most:g} allows; the first: {replays.rollouts.first_failure}"
        )
    rows = iter(by_rollout)
    by_id = {game.trajectory.id: game.values([next(rows) for _ in game.plan.coalition_P]) for game in games}
    return CounterfactualResult(by_id, len(seats), failed)


@dataclass(frozen=True, slots=True)
class _Game:
    """One trajectory and the coalitions to measure for it."""

    trajectory: Trajectory
    players: tuple[str, ...]
    plan: Plan
    key: tuple[int, ...]
    """The random key of its plan; the key of rollout `p` ends with `p`."""

    def replaced(self, p: int) -> list[str]:
        """The agents outside the coalition of rollout `p`."""
        coalition = int(self.plan.coalition_P[p])
        return [player for a, player in enumerate(self.players) if not coalition >> a & 1]

    def rollout(self, p: int) -> Rollout:
        """The rollout of coalition `p`."""
        recorded = self.trajectory
        return Rollout(recorded.task, recorded.uid, f"{recorded.id}~{p}", (*self.key, p))

    def outcomes(self, trajectory: Trajectory, common: float) -> Floats:
        """[A] the outcome of each player in a trajectory: its own, else the common one; NaN if it failed."""
        own = trajectory.outcomes
        return np.array([outcome_value(own[player]) if player in own else common for player in self.players])

    def values(self, by_rollout: Sequence[Floats]) -> Values:
        """The values from the outcomes [A] of the players in all rollouts."""
        whole_A = self.outcomes(self.trajectory, outcome_value(self.trajectory.outcome))
        return values_of_agents(self.plan, whole_A, np.stack(by_rollout), self.players)


def _games(
    components: Components,
    baselines: Mapping[str, Policy],
    trajectories: Sequence[Trajectory],
    budget: int,
    key: tuple[int, ...],
) -> list[_Game]:
    if not any(function.level == "outcome" for function in components.rewards.functions):
        raise ConfigError("reward.functions: expected an outcome function, of which values are measured, found none")
    games = []
    for trajectory in filter(_is_known, trajectories):
        own_key = (components.recipe.config.data.seed, *key, *trajectory.id.encode())
        trained = (s.agent for s in trajectory.steps if components.agents[s.agent].policy in baselines)
        if players := tuple(dict.fromkeys(trained)):
            rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(own_key)))
            try:
                games.append(_Game(trajectory, players, plan(len(players), budget, rng), own_key))
            except ValueError as error:
                raise ConfigError(f"{error} ({', '.join(players)})") from error
    return games


def _is_known(trajectory: Trajectory) -> bool:
    """Whether the trajectory did not fail and the outcome of one of its steps' agents is known."""
    outcomes = (trajectory.outcomes.get(step.agent, trajectory.outcome) for step in trajectory.steps)
    return trajectory.status != "failed" and any(one is not None and one.status == "ok" for one in outcomes)


class _Replays:
    """Runs and scores the rollouts of coalitions."""

    def __init__(self, components: Components, policy_set: PolicySet, baselines: Mapping[str, Policy]) -> None:
        self.components = components
        self.stand_ins = {name: f"baseline of {name}" for name in baselines}
        self.rollouts = MeasuringRollouts(
            components, policy_set, {name: (own, baselines[name]) for name, own in self.stand_ins.items()}
        )

    async def run(self, seats: Sequence[tuple[_Game, int]]) -> list[Floats]:
        """Run rollouts; returns the outcomes [A] of the players in each, NaN where it or its scoring failed."""
        running = [
            replay_rollout(
                game.trajectory,
                game.rollout(p),
                game.replaced(p),
                self.stand_ins,
                self.components.workflow,
                self.components.agents,
                self.rollouts.scheduler,
                self.components.sampling,
            )
            for game, p in seats
        ]
        trajectories, common_P = await self.rollouts.run(running)
        return [
            game.outcomes(trajectory, common)
            for (game, _), trajectory, common in zip(seats, trajectories, common_P.tolist(), strict=True)
        ]
