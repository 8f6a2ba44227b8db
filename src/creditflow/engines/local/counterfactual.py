"""What the agents of a play added to its outcome: the play again, with others in their place.

For each trajectory the coalitions of a plan (`creditflow.credit.shapley`) are played; whoever is not in one is replaced
by the baseline of its policy. Same plays, policies and key: the same values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit import CreditOptions
from creditflow.credit.decompose import outcomes
from creditflow.credit.shapley import KEY, Plan, noted, plan, values
from creditflow.engines.local.policy import Policy
from creditflow.errors import ConfigError
from creditflow.parts import Parts
from creditflow.rollout import ChatClient, ModelClient, Play, Scheduler, play_again
from creditflow.trajectory import Floats, Trajectory, TrajectoryBatch

COUNTERFACTUAL = 2
"""First part of a play's random key; training has 0 and validation 1."""
_AT_ONCE = 4096
"""So many plays live together: bounds the memory that they take."""


def wants_values(options: CreditOptions) -> bool:
    """Whether credit is made of counterfactual values, in force or as shadow."""
    return "shapley" in (options.propagation, (options.shadow or {}).get("propagation"))


@dataclass(frozen=True, slots=True)
class _Game:
    """One trajectory, and what is played for it."""

    trajectory: Trajectory
    players: tuple[str, ...]
    plan: Plan


async def add_values(
    parts: Parts,
    policies: Mapping[str, Policy],
    baselines: Mapping[str, Policy],
    trajectories: Sequence[Trajectory],
    budget: int,
    key: tuple[int, ...],
    note: Callable[[int, int], None] = lambda done, wanted: None,
) -> int:
    """Measure the values of scored `trajectories`, at most `budget` plays for each, into `info[KEY]`; how many plays.

    `baselines`: by policy, who answers for an agent that is left out; agents of other policies always stay. Plays that
    have no known outcome are left alone. Where too many plays of a trajectory failed, a value is None. `note`: told how
    many plays of how many are done.

    Raises ConfigError where there is no outcome to be measured, or the budget is too small for the team.
    """
    games = _games(parts, baselines, trajectories, budget, key)
    clients: dict[str, ModelClient | ChatClient] = {**policies, **parts.chat_clients}
    clients |= {_baseline_of(name): policy for name, policy in baselines.items()}
    scheduler = Scheduler(clients, parts.recipe.config.actor_rollout_ref.rollout.max_num_seqs)
    wanted, done = sum(len(game.plan.coalition_P) for game in games), 0
    for some in _chunks(games):
        played = await _play(parts, scheduler, some, baselines, key)
        outcome_P, first = await _outcomes(parts, played), 0
        for game in some:
            own_P = outcome_P[first : (first := first + len(game.plan.coalition_P))]
            _note_values(game, own_P)
        done += len(played)
        note(done, wanted)
    return wanted


def _games(
    parts: Parts, baselines: Mapping[str, Policy], trajectories: Sequence[Trajectory], budget: int, key: tuple[int, ...]
) -> list[_Game]:
    if not any(function.level == "outcome" for function in parts.rewards.functions):
        raise ConfigError("reward.functions: expected an outcome function, of which values are measured, found none")
    games = []
    for place, trajectory in enumerate(trajectories):
        if not _known(trajectory):
            continue
        players = tuple(dict.fromkeys(s.agent for s in trajectory.steps if parts.agents[s.agent].policy in baselines))
        if not players:
            trajectory.info[KEY] = {"shapley": {}}
            continue
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence((*key, place))))
        try:
            games.append(_Game(trajectory, players, plan(len(players), budget, rng)))
        except ValueError as error:
            raise ConfigError(f"algorithm.counterfactual_plays: {error} ({', '.join(players)})") from error
    return games


def _chunks(games: Sequence[_Game]) -> list[list[_Game]]:
    chunks: list[list[_Game]] = []
    plays = _AT_ONCE
    for game in games:
        if plays + len(game.plan.coalition_P) > _AT_ONCE:
            chunks.append([])
            plays = 0
        chunks[-1].append(game)
        plays += len(game.plan.coalition_P)
    return chunks


def fail_unmeasured(trajectories: Sequence[Trajectory]) -> None:
    """Mask those whose values could not be told: what could not be measured is no value of 0."""
    for trajectory in trajectories:
        if None in trajectory.info.get(KEY, {"shapley": {}})["shapley"].values():
            trajectory.status = "failed"
            trajectory.info["error"] = f"of {trajectory.info[KEY]['plays']} counterfactual plays too many failed"


async def _play(
    parts: Parts, scheduler: Scheduler, games: Sequence[_Game], baselines: Mapping[str, Policy], key: tuple[int, ...]
) -> list[Trajectory]:
    others = {name: _baseline_of(name) for name in baselines}
    waiting = []
    for game in games:
        recorded = game.trajectory
        for p, coalition in enumerate(game.plan.coalition_P.tolist()):
            replaced = [player for a, player in enumerate(game.players) if not coalition >> a & 1]
            seed = (parts.recipe.config.data.seed, COUNTERFACTUAL, *key, *recorded.id.encode(), p)
            play = Play(recorded.task, recorded.uid, f"{recorded.id}~{p}", seed)
            waiting.append(
                play_again(recorded, play, replaced, others, parts.workflow, parts.agents, scheduler, parts.sampling)
            )
    try:
        played = await asyncio.gather(*waiting)
    finally:
        await scheduler.idle()
        for client in parts.chat_clients.values():
            await client.aclose()
    if scheduler.fault is not None:
        raise scheduler.fault
    return played


def _baseline_of(policy: str) -> str:
    """The name by which a scheduler knows a policy's baseline: none of the recipe's, which may not hold a blank."""
    return f"baseline of {policy}"


async def _outcomes(parts: Parts, played: Sequence[Trajectory]) -> Floats:
    """[P] NaN where a play failed, or its scoring."""
    await parts.rewards.score(played, outcome_only=True)
    found = outcomes(TrajectoryBatch.from_trajectories(played), parts.recipe.config.algorithm)
    return np.where(found.known_N, found.value_N, np.nan)


def _known(trajectory: Trajectory) -> bool:
    outcome = trajectory.outcome
    return trajectory.status != "failed" and outcome is not None and outcome.status == "ok" and bool(trajectory.steps)


def _note_values(game: _Game, outcome_P: Floats) -> None:
    trajectory = game.trajectory
    assert trajectory.outcome is not None
    assert isinstance(trajectory.outcome.value, int | float)
    found = values(game.plan, float(trajectory.outcome.value), outcome_P)
    trajectory.info[KEY] = noted(game.players, found, len(outcome_P))
