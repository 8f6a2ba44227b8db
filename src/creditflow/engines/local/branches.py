"""Run and score the branches of a training step on the embedded engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from creditflow._utils.progress import phase
from creditflow.config import policies_in_use, trained_policies
from creditflow.data import Trajectory
from creditflow.engines.common.branches import (
    GeneratedTokens,
    PlannedBranch,
    expect_few_failed_branches,
    in_order,
    new_tokens,
    plan_branches,
)
from creditflow.engines.local.outcomes import AT_ONCE
from creditflow.engines.local.rollouts import complete, fill_references, score
from creditflow.engines.local.run import RunState
from creditflow.errors import TooManyFailedScores
from creditflow.rollout import ChatClient, ModelClient, Scheduler, together
from creditflow.rollout.branching import run_branch


@dataclass(frozen=True, slots=True)
class BranchedStep:
    """The branches of one training step."""

    trajectories: list[Trajectory]
    tokens: int
    """Response tokens that were sampled, without those of endpoints."""
    prompt_tokens: int
    """Prompt tokens of the sampled steps."""
    metrics: dict[str, float]


async def add_branches(
    run: RunState, step: int, trajectories: Sequence[Trajectory], response_tokens: int
) -> BranchedStep:
    """Run and score branches of a training step's scored trajectories (`common.branches.plan_branches`).

    Raises ConfigError if no reward function gives an outcome, CreditflowError if more branches fail than
    `rollout.max_failed_frac` allows, and TooManyFailedScores if too many scores do.
    """
    plan = plan_branches(
        run.config,
        run.components.rewards.functions,
        step,
        _agents_due(run, step),
        trajectories,
        response_tokens,
        GeneratedTokens(run.generated_tokens, run.branch_tokens),
        run.history,
    )
    running = _RunningBranches(run)
    with phase("branches", unit="branches") as bar:
        made = await running.run(plan.first, bar.reach)
        further = plan.further(made)
        made += await running.run(further, bar.reach)
    branches = in_order(zip((*plan.first, *further), made, strict=True))
    await _score(run, trajectories, branches)
    return BranchedStep(branches, running.tokens, running.prompt_tokens, plan.metrics(branches, running.tokens))


def _agents_due(run: RunState, step: int) -> list[str]:
    """The agents whose policies this training step updates. A decision of another agent would hardly be trained."""
    config = run.config
    due = trained_policies(config) if step > config.trainer.critic_warmup else ()
    return [agent for policy in due for agent in policies_in_use(config)[policy]]


class _RunningBranches:
    """Runs branches on one scheduler."""

    def __init__(self, run: RunState) -> None:
        components, self.policy_set = run.components, run.policy_set
        clients: dict[str, ModelClient | ChatClient] = {**self.policy_set.policies, **components.chat_clients}
        self.components = components
        self.scheduler = Scheduler(clients, run.config.actor_rollout_ref.rollout.max_num_seqs)
        self.tokens = self.prompt_tokens = 0

    async def run(self, branches: Sequence[PlannedBranch], note: Callable[[int, int], None]) -> list[Trajectory]:
        """Run branches, and note in each the recorded trajectory that it continues."""
        made: list[Trajectory] = []
        for begin in range(0, len(branches), AT_ONCE):
            some = branches[begin : begin + AT_ONCE]
            made += await complete(together([self._run(one) for one in some], self.scheduler), self.components)
            note(len(made), len(branches))
        for one, trajectory in zip(branches, made, strict=True):
            self.tokens += new_tokens(trajectory, one.at)
            self.prompt_tokens += sum(len(step.prompt_ids) for step in trajectory.steps[one.at :])
            one.mark(trajectory)
        self.policy_set.freeze(made)
        return made

    def _run(self, one: PlannedBranch) -> Awaitable[Trajectory]:
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


async def _score(run: RunState, rollouts: Sequence[Trajectory], branches: list[Trajectory]) -> None:
    """Score finished branches. Raises CreditflowError if too many of them, or of their scores, failed."""
    components, policy_set = run.components, run.policy_set
    expect_few_failed_branches(branches, run.config.actor_rollout_ref.rollout.max_failed_frac)
    if not branches:
        return
    fill_references(policy_set.references, branches, components, policy_set.max_tokens)
    components.label(branches)
    try:
        await score(components, branches)
    except TooManyFailedScores as error:
        error.trajectories = [*rollouts, *branches]  # a step file has the rollout of each branch
        raise
