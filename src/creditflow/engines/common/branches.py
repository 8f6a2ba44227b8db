"""Branches of a training step's trajectories: choose decisions and plan the branches.

A branch is trained on (`creditflow.credit.trees`). The plan depends only on trajectories, recipe, training step and the
tokens that earlier training steps generated. Running and scoring belong to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from creditflow.config import Config
from creditflow.credit import CreditOptions, assign
from creditflow.credit.branch_points import BranchPoints, branch_cost, choose_branch_points
from creditflow.credit.decompose import outcomes
from creditflow.credit.history import History
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.trees import KEY
from creditflow.data import Bools, Floats, Trajectory, TrajectoryBatch
from creditflow.errors import ConfigError, CreditflowError
from creditflow.rewards import RewardFunction
from creditflow.rollout import Rollout
from creditflow.rollout.branching import REFUSED

BRANCH = 5
"""Follows the seed in the random key of a branch; other rollouts have 0 to 4, 6 and 7 there."""


def wants_branches(options: CreditOptions) -> bool:
    """Whether the propagation rule trains on branches."""
    return PROPAGATION_RULES[options.propagation].branches


@dataclass(frozen=True, slots=True)
class PlannedBranch:
    """One branch to run: a continuation of `record` that keeps its steps below `at`."""

    place: int
    """Index of the root in the training step."""
    root: Trajectory
    record: Trajectory
    at: int
    alternative: int
    number: int
    """0 for the first continuation of an alternative."""
    key: tuple[int, ...]

    @property
    def order(self) -> tuple[int, int, int]:
        """The place of the branch among those of the training step."""
        return self.place, self.alternative, self.number

    @property
    def rollout(self) -> Rollout:
        """The rollout that the branch is."""
        id = f"{self.root.id}~{self.alternative}.{self.number}"
        return Rollout(self.root.task, self.root.uid, id, (*self.key, self.alternative, self.number))

    def mark(self, made: Trajectory) -> None:
        """Note in the finished branch which trajectory it continues."""
        made.info[KEY] = {"of": self.root.id, "alternative": self.alternative, "continuation": self.number}


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Response tokens that a run has generated before this training step."""

    total: int
    """Those of branches included."""
    branches: int


@dataclass(frozen=True, slots=True)
class BranchPlan:
    """The branches of a training step."""

    points: BranchPoints
    recorded: list[PlannedBranch]
    """The recorded alternative of each decision, which needs no first branch."""
    first: list[PlannedBranch]
    """The first branch of each other alternative."""
    continuations: int
    before: GeneratedTokens
    response_tokens: int
    """Those of the training step's rollouts."""

    def further(self, made: Sequence[Trajectory]) -> list[PlannedBranch]:
        """The further continuations of each alternative, from the finished branches of `first`."""
        alternatives = {one.order: branch for one, branch in zip(self.first, made, strict=True)}
        every = sorted([*self.recorded, *self.first], key=lambda one: one.order)
        return [more for one in every for more in _continuations(one, alternatives, self.continuations)]

    def metrics(self, branches: Sequence[Trajectory], tokens: int) -> dict[str, float]:
        """Count the finished branches. `tokens`: the response tokens that they sampled."""
        refused = sum(REFUSED in one.info for one in branches)
        failed = sum(one.status == "failed" for one in branches) - refused
        drawn = self.points.step_N[self.points.step_N >= 0]
        metrics = {
            "rollout/branch_decisions": float(len(drawn)),
            "rollout/branches": float(len(branches)),
            "rollout/branch_tokens": float(tokens),
            "rollout/branch_tokens_frac": (self.before.branches + tokens)
            / max(self.before.total + self.response_tokens + tokens, 1),
            "rollout/branch_refused_frac": refused / max(len(branches), 1),
            "rollout/branch_failed_frac": failed / max(len(branches), 1),
        }
        if len(drawn):
            metrics["rollout/branch_weight_max"] = float(self.points.weight_S[drawn].max())
        return metrics


def in_order(pairs: Iterable[tuple[PlannedBranch, Trajectory]]) -> list[Trajectory]:
    """The finished branches, tree by tree."""
    return [made for _, made in sorted(pairs, key=lambda pair: pair[0].order)]


def plan_branches(
    config: Config,
    functions: Sequence[RewardFunction],
    step: int,
    agents: Sequence[str],
    trajectories: Sequence[Trajectory],
    response_tokens: int,
    before: GeneratedTokens,
    history: History,
) -> BranchPlan:
    """Draw the decisions of a training step's scored trajectories, and note them in `info[KEY]`.

    `agents`: those whose steps may branch. `response_tokens`: those that the step's rollouts generated. At most
    `rollout.branching.budget` of all tokens of the run are expected to be in branches. Raises ConfigError if no reward
    function gives an outcome.
    """
    if not any(function.level == "outcome" for function in functions):
        raise ConfigError("reward.functions: expected an outcome function, the return of branches, found none")
    section, batch = config.actor_rollout_ref.rollout.branching, TrajectoryBatch.from_trajectories(trajectories)
    points = _points(config, step, agents, batch, response_tokens, before, history)
    recorded, first = [], []
    for n in np.flatnonzero(points.step_N >= 0).tolist():
        s, root = int(points.step_N[n]), trajectories[n]
        at = int(batch.index_of_step[s])
        root.info[KEY] = {
            "at": at,
            "probability": float(points.probability_S[s]),
            "weight": float(points.weight_S[s]),
        }
        key = (config.data.seed, BRANCH, step, *root.id.encode())
        own = [PlannedBranch(n, root, root, at, i, 0, key) for i in range(section.alternatives)]
        recorded.append(own[0])
        first += own[1:]
    return BranchPlan(points, recorded, first, section.continuations, before, response_tokens)


def expect_few_failed_branches(branches: Sequence[Trajectory], max_failed_frac: float) -> None:
    """Raise CreditflowError if more branches failed than `rollout.max_failed_frac`. Refused ones do not count."""
    failed = [one for one in branches if one.status == "failed" and REFUSED not in one.info]
    if len(failed) > max_failed_frac * len(branches):
        error = CreditflowError(
            f"{len(failed)} of {len(branches)} branches failed, more than actor_rollout_ref.rollout.max_failed_frac="
            f"{max_failed_frac:g} allows; the first: {failed[0].info['error']}"
        )
        error.trajectories = list(branches)
        raise error


def new_tokens(branch: Trajectory, at: int) -> int:
    """The response tokens from index `at` on. Tokens of endpoints do not count, as in rollouts and the budget."""
    return sum(len(step.response_ids) for step in branch.steps[at:])


def _points(
    config: Config,
    step: int,
    agents: Sequence[str],
    batch: TrajectoryBatch,
    response_tokens: int,
    before: GeneratedTokens,
    history: History,
) -> BranchPoints:
    """Draw the decisions of a training step."""
    section = config.actor_rollout_ref.rollout.branching
    share = section.budget / (1.0 - section.budget)
    recorded = before.total - before.branches + response_tokens - len(batch.response_ids)

    def tokens_of(batch_tokens: float) -> float:
        return share * (recorded + batch_tokens) - before.branches

    return choose_branch_points(
        batch,
        _candidates(batch, config.algorithm, agents, section.first_step),
        section.at,
        branch_cost(batch, section.alternatives, section.continuations),
        tokens_of,
        np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, BRANCH, step)))),
        _posterior(config, history, batch) if section.at == "disputed" else None,
    )


def _candidates(batch: TrajectoryBatch, options: CreditOptions, agents: Sequence[str], first_step: int) -> Bools:
    """[S] sampled steps of the given agents from `first_step` on, in trajectories with a known outcome.

    A condition on later events, such as the number of steps, would bias the gradient, and no weight could correct it.
    """
    from creditflow.credit import kernels

    outcome = outcomes(batch, options)
    agent_A = np.array([name in agents for name in batch.agent_names], dtype=np.bool_)
    sampled_S = kernels.sampled_tokens(batch.token_offsets, batch.response_mask) > 0
    own_S = agent_A[batch.agent_of_step] & sampled_S & (batch.index_of_step >= first_step)
    return np.asarray(outcome.known_S & ~outcome.masked_S & own_S)


def _posterior(config: Config, history: History, batch: TrajectoryBatch) -> Floats:
    """[S] the probability that a step did no harm, given all scores and the outcome (`algorithm.score_model`)."""
    options = replace(config.algorithm, propagation="none", score_model="noisy_and", shadow=None)
    return assign(batch, options, history=history).harmless_S


def _continuations(
    first: PlannedBranch, alternatives: Mapping[tuple[int, int, int], Trajectory], continuations: int
) -> list[PlannedBranch]:
    """The further continuations of an alternative; none if it failed or was the last step."""
    record = first.root if first.alternative == 0 else alternatives[first.order]
    at = first.at + 1
    if record.status == "failed" or len(record.steps) <= at:
        return []
    return [replace(first, record=record, at=at, number=number) for number in range(1, continuations)]
