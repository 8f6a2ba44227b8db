"""Branches of a training step's trajectories: choose decisions, run the branches, and score them.

A branch is trained on (`creditflow.credit.trees`). The result depends only on trajectories, policies, key and the
tokens that earlier training steps generated.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from creditflow._utils.progress import phase
from creditflow.config import trained_agents
from creditflow.credit import CreditOptions, assign
from creditflow.credit.branch_points import BranchPoints, branch_cost, choose_branch_points
from creditflow.credit.decompose import outcomes
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.trees import KEY
from creditflow.data import Bools, Floats, Trajectory, TrajectoryBatch
from creditflow.engines.local.decisions import sampled_tokens
from creditflow.engines.local.outcomes import AT_ONCE
from creditflow.engines.local.rollouts import complete, fill_references, score
from creditflow.engines.local.run import RunState
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores
from creditflow.rollout import ChatClient, ModelClient, Rollout, Scheduler, together
from creditflow.rollout.branching import REFUSED, run_branch

BRANCH = 5
"""The first part of a branch's random key; 0 to 4, 6 and 7 belong to other rollouts."""


def wants_branches(options: CreditOptions) -> bool:
    """Whether the propagation rule trains on branches."""
    return PROPAGATION_RULES[options.propagation].branches


@dataclass(frozen=True, slots=True)
class BranchedStep:
    """The branches of one training step."""

    trajectories: list[Trajectory]
    tokens: int
    """Response tokens that were sampled."""
    metrics: dict[str, float]


async def add_branches(
    run: RunState, step: int, trajectories: Sequence[Trajectory], response_tokens: int
) -> BranchedStep:
    """Run and score branches of a training step's scored trajectories, and note their decisions in `info[KEY]`.

    `response_tokens`: those that the step's rollouts generated. At most `rollout.branching.budget` of all tokens of the
    run are expected to be in branches.

    Raises ConfigError if no reward function gives an outcome, CreditflowError if more branches fail than
    `rollout.max_failed_frac` allows, and TooManyFailedScores if too many scores do.
    """
    components, section = run.components, run.config.actor_rollout_ref.rollout.branching
    if not any(function.level == "outcome" for function in components.rewards.functions):
        raise ConfigError("reward.functions: expected an outcome function, the return of branches, found none")
    batch = TrajectoryBatch.from_trajectories(trajectories)
    points = _points(run, step, batch, response_tokens)
    planned = _plan(run, step, batch, trajectories, points)
    running = _RunningBranches(run)
    with phase("branches", unit="branches") as bar:
        first = [one for one in planned if one.alternative > 0]
        alternatives = {
            (one.root.id, one.alternative): made
            for one, made in zip(first, await running.run(first, bar.reach), strict=True)
        }
        later = [further for one in planned for further in _continuations(one, alternatives, section.continuations)]
        continued = await running.run(later, bar.reach)
    pairs = zip((*first, *later), (*alternatives.values(), *continued), strict=True)
    branches = [made for _, made in sorted(pairs, key=lambda pair: pair[0].order)]
    return await _scored(run, points, branches, running.tokens, response_tokens)


@dataclass(frozen=True, slots=True)
class _Branch:
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
        id = f"{self.root.id}~{self.alternative}.{self.number}"
        return Rollout(self.root.task, self.root.uid, id, (*self.key, self.alternative, self.number))


def _points(run: RunState, step: int, batch: TrajectoryBatch, response_tokens: int) -> BranchPoints:
    """Draw the decisions of a training step."""
    config, section = run.config, run.config.actor_rollout_ref.rollout.branching
    share = section.budget / (1.0 - section.budget)
    recorded = run.generated_tokens - run.branch_tokens + response_tokens - len(batch.response_ids)

    def tokens_of(batch_tokens: float) -> float:
        return share * (recorded + batch_tokens) - run.branch_tokens

    return choose_branch_points(
        batch,
        _candidates(batch, config.algorithm, trained_agents(config), section.first_step),
        section.at,
        branch_cost(batch, section.alternatives, section.continuations),
        tokens_of,
        np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, BRANCH, step)))),
        _posterior(run, batch) if section.at == "disputed" else None,
    )


def _candidates(batch: TrajectoryBatch, options: CreditOptions, agents: Sequence[str], first_step: int) -> Bools:
    """[S] sampled steps of trained agents from `first_step` on, in trajectories with a known outcome.

    A condition on later events, such as the number of steps, would bias the gradient, and no weight could correct it.
    """
    outcome = outcomes(batch, options)
    agent_A = np.array([name in agents for name in batch.agent_names], dtype=np.bool_)
    sampled_S = np.bincount(
        np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))[batch.response_mask], minlength=batch.n_steps
    )
    own_S = agent_A[batch.agent_of_step] & (sampled_S > 0) & (batch.index_of_step >= first_step)
    return np.asarray(outcome.known_S & ~outcome.masked_S & own_S)


def _posterior(run: RunState, batch: TrajectoryBatch) -> Floats:
    """[S] the probability that a step did no harm, given its score and the outcome (`algorithm.score_model`).

    Raises ConfigError if no step has one.
    """
    options = replace(run.config.algorithm, propagation="none", score_model="noisy_and", shadow=None)
    posterior_S = assign(batch, options, history=run.history).harmless_S
    if np.isnan(posterior_S).all():
        raise ConfigError(
            "actor_rollout_ref.rollout.branching.at: disputed reads scores and outcomes, and credit ignores scores "
            "(algorithm.reward_decomp, reward.decomp_granularity); use random, agents or uncertain"
        )
    return posterior_S


def _plan(
    run: RunState, step: int, batch: TrajectoryBatch, trajectories: Sequence[Trajectory], points: BranchPoints
) -> list[_Branch]:
    """The first branch of each alternative, the recorded one included as number 0 of alternative 0."""
    planned = []
    for n in np.flatnonzero(points.step_N >= 0).tolist():
        s, root = int(points.step_N[n]), trajectories[n]
        at = int(batch.index_of_step[s])
        root.info[KEY] = {
            "at": at,
            "probability": float(points.probability_S[s]),
            "weight": float(points.weight_S[s]),
        }
        key = (run.config.data.seed, BRANCH, step, *root.id.encode())
        count = run.config.actor_rollout_ref.rollout.branching.alternatives
        planned += [_Branch(n, root, root, at, alternative, 0, key) for alternative in range(count)]
    return planned


def _continuations(
    first: _Branch, alternatives: Mapping[tuple[str, int], Trajectory], continuations: int
) -> list[_Branch]:
    """The further continuations of an alternative; none if it failed or was the last step."""
    record = first.root if first.alternative == 0 else alternatives[first.root.id, first.alternative]
    at = first.at + 1
    if record.status == "failed" or len(record.steps) <= at:
        return []
    return [replace(first, record=record, at=at, number=number) for number in range(1, continuations)]


class _RunningBranches:
    """Runs branches on one scheduler."""

    def __init__(self, run: RunState) -> None:
        components, self.policy_set = run.components, run.policy_set
        clients: dict[str, ModelClient | ChatClient] = {**self.policy_set.policies, **components.chat_clients}
        self.components = components
        self.scheduler = Scheduler(clients, run.config.actor_rollout_ref.rollout.max_num_seqs)
        self.tokens = 0

    async def run(self, branches: Sequence[_Branch], note: Callable[[int, int], None]) -> list[Trajectory]:
        """Run branches, and note in each the recorded trajectory that it continues."""
        made: list[Trajectory] = []
        for begin in range(0, len(branches), AT_ONCE):
            some = branches[begin : begin + AT_ONCE]
            made += await complete(together([self._run(one) for one in some], self.scheduler), self.components)
            note(len(made), len(branches))
        for one, trajectory in zip(branches, made, strict=True):
            self.tokens += sum(sampled_tokens(trajectory, one.at))
            trajectory.info[KEY] = {"of": one.root.id, "alternative": one.alternative, "continuation": one.number}
        self.policy_set.freeze(made)
        return made

    def _run(self, one: _Branch) -> Awaitable[Trajectory]:
        components = self.components
        return run_branch(
            one.record,
            one.at,
            one.rollout,
            components.workflow,
            components.agents,
            self.scheduler,
            components.sampling,
        )


async def _scored(
    run: RunState, points: BranchPoints, branches: list[Trajectory], tokens: int, response_tokens: int
) -> BranchedStep:
    """Score branches and count them."""
    components, policy_set = run.components, run.policy_set
    refused = [one for one in branches if REFUSED in one.info]
    failed = [one for one in branches if one.status == "failed" and REFUSED not in one.info]
    most = run.config.actor_rollout_ref.rollout.max_failed_frac
    if len(failed) > most * len(branches):
        error = CreditflowError(
            f"{len(failed)} of {len(branches)} branches failed, more than actor_rollout_ref.rollout.max_failed_frac="
            f"{most:g} allows; the first: {failed[0].info['error']}"
        )
        error.trajectories = branches
        raise error
    if branches:
        fill_references(policy_set.references, branches, components, policy_set.max_tokens)
        components.label(branches)
        try:
            await score(components, branches)
        except TooManyFailedScores as error:
            error.trajectories = branches
            raise
    drawn = points.step_N[points.step_N >= 0]
    metrics = {
        "rollout/branch_decisions": float(len(drawn)),
        "rollout/branches": float(len(branches)),
        "rollout/branch_tokens": float(tokens),
        "rollout/branch_tokens_frac": (run.branch_tokens + tokens)
        / max(run.generated_tokens + response_tokens + tokens, 1),
        "rollout/branch_refused_frac": len(refused) / max(len(branches), 1),
        "rollout/branch_failed_frac": len(failed) / max(len(branches), 1),
    }
    if len(drawn):
        metrics["rollout/branch_weight_max"] = float(points.weight_S[drawn].max())
    return BranchedStep(branches, tokens, metrics)
