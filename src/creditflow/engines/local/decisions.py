"""Measure the values of decisions: continue recorded trajectories with a step kept, and with it sampled anew.

A decision is a step of a recorded trajectory. Its value is `E[R | prefix with the step] - E[R | prefix before it]`, the
expectations over continuations by the acting policies. The continuations have their own seeds, so they are independent
of every rollout that credit was computed from. The values depend only on trajectories, policies and key.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.credit.rewards import common_outcomes
from creditflow.data import Bools, Floats, Ints, Trajectory, TrajectoryBatch
from creditflow.data.trajectory import outcome_value
from creditflow.engines.common.components import Components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import complete, fill_references
from creditflow.engines.local.values import DecisionValues
from creditflow.errors import ConfigError, TooManyFailedScores
from creditflow.rollout import ChatClient, ModelClient, Rollout, Scheduler, together
from creditflow.rollout.branching import REFUSED, run_branch

FIDELITY, DECISION_AUDIT = 6, 7
"""The first part of a continuation's random key, in training and in `creditflow audit`.

The smaller numbers belong to the rollouts of training, validation and checks.
"""
_MARGIN = 0.9
"""Share of a token budget to plan for: continuations may be longer than the recorded steps that they replace."""
AT_ONCE = 1024
"""The largest number of concurrent rollouts: bounds their memory and sets the interval of progress updates."""
AFTER, BEFORE = 0, 1
"""The two prefixes of a decision: with its step, and without it."""


class MeasuringRollouts:
    """Runs rollouts on one scheduler and scores their outcomes. They only measure, and are not trained on."""

    def __init__(self, components: Components, policy_set: PolicySet) -> None:
        self.components, self._policy_set = components, policy_set
        clients: dict[str, ModelClient | ChatClient] = {**policy_set.policies, **components.chat_clients}
        self.scheduler = Scheduler(clients, components.recipe.config.actor_rollout_ref.rollout.max_num_seqs)
        self.first_failure = ""
        """The reason of the first rollout or score that failed."""

    def branch(self, recorded: Trajectory, at: int, rollout: Rollout) -> Awaitable[Trajectory]:
        """Run the workflow again: repeat the recorded steps below `at`, and sample the others."""
        parts = self.components
        return run_branch(recorded, at, rollout, parts.workflow, parts.agents, self.scheduler, parts.sampling)

    async def run(self, running: Sequence[Awaitable[Trajectory]]) -> tuple[list[Trajectory], Floats]:
        """Run and score P rollouts; returns them and their common outcomes [P], NaN where one failed."""
        components = self.components
        trajectories = await complete(together(running, self.scheduler), components)
        fill_references(components, self._policy_set, trajectories)
        report = await components.rewards.score(trajectories, outcome_only=True, max_failed_frac=1.0)
        # A truncated rollout has an outcome, whether or not truncated trajectories are trained.
        outcome_N = common_outcomes(TrajectoryBatch.from_trajectories(trajectories), mask_truncated=False)
        errors = [*(t.info["error"] for t in trajectories if t.status == "failed"), *report.reasons]
        self.first_failure = self.first_failure or next(iter(errors), "")
        return trajectories, outcome_N


@dataclass(frozen=True, slots=True)
class ChosenDecisions:
    """D decisions, drawn with known probabilities."""

    step_D: Ints
    """[D] their rows in the batch, ascending."""
    probability: float
    """The probability with which each candidate is drawn."""


@dataclass(frozen=True, slots=True)
class MeasuredDecisions:
    """The values of D decisions and their cost."""

    chosen: ChosenDecisions
    values: DecisionValues
    tokens: int
    """Response tokens that were sampled."""
    continuations: int
    refused: int
    """Continuations whose replay differed from the record."""
    failed: int
    """Other continuations without an outcome."""
    first_refusal: str
    first_failure: str

    @property
    def losses(self) -> list[str]:
        """One line for refused and one for failed continuations, with the first reason of each."""
        losses = ((self.refused, "refused", self.first_refusal), (self.failed, "failed", self.first_failure))
        return [f"{n:,} of {self.continuations:,} continuations {how}; the first: {why}" for n, how, why in losses if n]

    def expect_few_failures(self, max_failed_frac: float) -> None:
        """Raise TooManyFailedScores if more continuations failed than `rollout.max_failed_frac` allows."""
        if self.failed > max_failed_frac * self.continuations:
            raise TooManyFailedScores(
                f"{self.failed} of {self.continuations} continuations failed, more than "
                f"actor_rollout_ref.rollout.max_failed_frac={max_failed_frac:g} allows; the first: {self.first_failure}"
            )


def choose_decisions(
    batch: TrajectoryBatch,
    candidate_S: Bools,
    continuations: int,
    most: int,
    max_tokens: float,
    rng: np.random.Generator,
) -> ChosenDecisions:
    """Draw at most `most` of the candidates, all with the same probability, within a budget of sampled tokens.

    The number follows from the mean cost of a candidate, so it is known before the draw. The draw is systematic
    (Madow 1949): candidates in the order of their cost, every n-th from a random start. Then the cost of the draw is
    close to its expectation, and early and late steps are drawn in proportion.
    """
    (candidate_C,) = np.nonzero(candidate_S)
    if not len(candidate_C):
        return ChosenDecisions(candidate_C, 0.0)
    cost_C = continuations * _tokens_replaced(batch)[candidate_C]
    affordable = math.inf if math.isinf(max_tokens) else _MARGIN * max(max_tokens, 0.0) / max(cost_C.mean(), 1.0)
    count = int(min(most, len(candidate_C), affordable))
    # The order of equal costs is random, so that the draw does not depend on the order of the batch.
    order_C = np.lexsort((rng.permutation(len(candidate_C)), cost_C))
    places = (np.arange(count) + rng.random()) * (len(candidate_C) / max(count, 1))
    return ChosenDecisions(np.sort(candidate_C[order_C[places.astype(np.int64)]]), count / len(candidate_C))


def _tokens_replaced(batch: TrajectoryBatch) -> Floats:
    """[S] recorded response tokens that one continuation of each prefix replaces: before the step, and after it."""
    length_S = np.diff(batch.token_offsets).astype(np.float64)
    total_N = np.bincount(batch.trajectory_of_step, length_S, batch.n_trajectories)
    begin_S = np.cumsum(length_S) - length_S  # steps are ordered by trajectory
    first_N = np.concatenate([[0.0], np.cumsum(total_N)[:-1]])
    rest_S = (first_N + total_N)[batch.trajectory_of_step] - begin_S
    return np.asarray(2 * rest_S - length_S)


@dataclass(frozen=True, slots=True)
class _Continuation:
    """One rollout that keeps the steps of `trajectory` below `at`."""

    decision: int
    """Index into the chosen decisions."""
    side: int
    number: int
    trajectory: Trajectory
    at: int
    key: tuple[int, ...]

    @property
    def rollout(self) -> Rollout:
        recorded, name = self.trajectory, "with" if self.side == AFTER else "without"
        id = f"{recorded.id}~{name}{self.at - (self.side == AFTER)}~{self.number}"
        return Rollout(recorded.task, recorded.uid, id, (*self.key, self.at, self.side, self.number))


async def measure_decisions(
    rollouts: MeasuringRollouts,
    batch: TrajectoryBatch,
    trajectories: Sequence[Trajectory],
    chosen: ChosenDecisions,
    continuations: int,
    key: tuple[int, ...],
    note: Callable[[int, int], None] = lambda done, total: None,
) -> MeasuredDecisions:
    """Measure the values of the chosen decisions of a batch with `continuations` of each prefix.

    `trajectories`: those of the batch, in its order. `note`: a progress callback (rollouts done, rollouts in total).
    A prefix that is the whole trajectory is replayed once: nothing is sampled after it.
    Raises ConfigError if no reward function gives an outcome.
    """
    if not any(function.level == "outcome" for function in rollouts.components.rewards.functions):
        raise ConfigError("reward.functions: expected an outcome function, of which values are measured, found none")
    seed, planned = rollouts.components.recipe.config.data.seed, list[_Continuation]()
    first_N = np.searchsorted(batch.trajectory_of_step, np.arange(batch.n_trajectories))
    for d, row in enumerate(chosen.step_D.tolist()):
        n = int(batch.trajectory_of_step[row])
        recorded, index = trajectories[n], row - int(first_N[n])
        own_key = (seed, *key, *recorded.id.encode())
        for side, at in ((AFTER, index + 1), (BEFORE, index)):
            times = 1 if at == len(recorded.steps) else continuations
            planned += [_Continuation(d, side, k, recorded, at, own_key) for k in range(times)]
    return_DK = np.full((2, len(chosen.step_D), continuations), np.nan)
    tokens = refused = failed = 0
    first_refusal = ""
    note(0, len(planned))
    for first in range(0, len(planned), AT_ONCE):
        some = planned[first : first + AT_ONCE]
        continued, common_P = await rollouts.run([rollouts.branch(p.trajectory, p.at, p.rollout) for p in some])
        for plan, trajectory, common in zip(some, continued, common_P.tolist(), strict=True):
            agent = batch.agent_names[batch.agent_of_step[chosen.step_D[plan.decision]]]
            value = outcome_value(trajectory.outcomes[agent]) if agent in trajectory.outcomes else common
            ks = slice(None) if plan.at == len(plan.trajectory.steps) else plan.number
            return_DK[plan.side, plan.decision, ks] = value
            tokens += sum(sampled_tokens(trajectory, plan.at))
            if REFUSED in trajectory.info:
                refused += 1
                first_refusal = first_refusal or str(trajectory.info["error"])
            elif math.isnan(value):
                failed += 1
        note(first + len(some), len(planned))
    values = DecisionValues(
        batch.group_of_trajectory[batch.trajectory_of_step[chosen.step_D]].astype(np.int64), *return_DK
    )
    return MeasuredDecisions(
        chosen, values, tokens, len(planned), refused, failed, first_refusal, rollouts.first_failure
    )


def sampled_tokens(trajectory: Trajectory, at: int) -> list[int]:
    """The response tokens of each step from index `at` on, as the server counts them where tokens are unknown."""
    return [
        len(step.response_ids) or int(step.info.get("completion_tokens") or 0)
        for step in trajectory.steps
        if step.index >= at
    ]
