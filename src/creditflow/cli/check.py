"""`creditflow check`: roll out a few tasks, assign credit without training, and report problems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from creditflow._utils.progress import Reporter
from creditflow.config import Recipe, load_recipe
from creditflow.credit import Assignment, assign
from creditflow.credit.analysis.linter import idle_gate, lint
from creditflow.credit.analysis.metrics import reach
from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.common.guard import build_guard
from creditflow.engines.local.counterfactual import add_values, expect_enough_rollouts, wants_values
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import sample_trajectories
from creditflow.errors import TooManyFailedScores
from creditflow.monitoring.notices import failure_text
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import number
from creditflow.rewards.manager import ScoringReport, expect_few_failures

_CHECK = 2
"""First part of a rollout's random key; training uses 0, validation 1."""


def check(path: Path, overrides: Sequence[str], tasks: int, reporter: Reporter, *, verbose: bool) -> None:
    """Print per-agent statistics of a few rollouts, then warnings; `verbose`: also the resolved recipe."""
    recipe = load_recipe(path, overrides)
    components = build_components(recipe)
    build_guard(
        recipe.config, recipe.folder, components.rewards.functions
    )  # raises the errors that training would raise
    if wants_values(recipe.config.algorithm):
        expect_enough_rollouts(recipe.config)
    policy_set = PolicySet.from_recipe(recipe, steps=1, keep_reference=False)
    console = results_console()
    trajectories, report = asyncio.run(_trajectory(components, policy_set, tasks))
    batch = TrajectoryBatch.from_trajectories(trajectories)
    assignment = assign(batch, recipe.config.algorithm, values_T=policy_set.values(batch))

    n = recipe.config.actor_rollout_ref.rollout.n
    counts = f"{len(trajectories) // n} tasks x {n} rollouts"
    table = new_table("agent", "steps", "share scored", "failed", "mean sub-reward", "gate open", "signal reaches")
    reached, gated = reach(assignment), "propagation_threshold" not in recipe.config.algorithm.ignored()
    for i, agent in enumerate(assignment.batch.agent_names):
        mine_S = assignment.batch.agent_of_step == i
        judged_S = mine_S & (assignment.scored_S | assignment.failed_S)
        table.add_row(
            agent,
            str(mine_S.sum()),
            _mean(assignment.scored_S[mine_S]),
            str((assignment.failed_S & mine_S).sum()),
            _mean(assignment.sub_reward_S[mine_S & assignment.scored_S]),
            _mean(assignment.gate_open_S[judged_S]) if gated else "-",
            number(reached.get(agent, 0.0)),
        )
    show(console, f"agents, in {counts}", table)
    table = new_table("function", "level", "weight", "calls", "failed", "mean")
    for function, said in zip(components.rewards.functions, report.functions, strict=True):
        table.add_row(
            said.name, said.level, f"{function.weight:g}", str(said.matched), str(said.failed), number(said.mean)
        )
    show(console, "reward functions", table)
    console.print(f"validation uses {recipe.validation_words(len(components.val_tasks))}", soft_wrap=True)
    warnings = _warnings(recipe, trajectories, report, assignment)
    for warning in warnings:
        console.print(f"warning: {warning}", soft_wrap=True)
    if verbose:
        console.print("\nresolved configuration", style="bold")
        console.print(recipe.to_yaml(), soft_wrap=True)
    try:
        expect_few_failures(report, recipe.config.reward.max_failed_frac)
    except TooManyFailedScores as error:
        raise TooManyFailedScores(f"training would stop: {error}") from None
    reporter.say("the recipe can be trained" + (", with the warnings above" if warnings else ""))


async def _trajectory(
    components: Components, policy_set: PolicySet, tasks: int
) -> tuple[list[Trajectory], ScoringReport]:
    config = components.recipe.config.actor_rollout_ref.rollout
    trajectories = await sample_trajectories(
        components, policy_set, components.train_tasks[:tasks], config.n, config.temperature, (_CHECK,)
    )
    async with components.rewards.open(policy_set.policies):
        report = await components.rewards.score(
            trajectories, max_failed_frac=1.0
        )  # the limit is checked after printing
        if wants_values(components.recipe.config.algorithm):
            await add_values(components, policy_set, trajectories, 0)
    components.label(trajectories)
    return trajectories, report


def _warnings(
    recipe: Recipe, trajectories: Sequence[Trajectory], report: ScoringReport, assignment: Assignment
) -> list[str]:
    """Warnings about the rollouts and their credit, one sentence each."""
    found = list(recipe.notices)
    found += [str(finding) for finding in lint(assignment)]
    if (idle := idle_gate(assignment)) is not None and str(idle) not in found:
        found.append(str(idle))
    acting = set(assignment.batch.agent_names)
    found += [f"{agent} made no step" for agent in recipe.config.team.agents if agent not in acting]
    for status, key in (("failed", "error"), ("truncated", "truncated")):
        such = [trajectory for trajectory in trajectories if trajectory.status == status]
        if such:
            reason = next((str(t.info[key]) for t in such if key in t.info), "no reason given")
            found.append(f"{len(such)} of {len(trajectories)} trajectories {status}; the first: {reason}")
    errors = [str(t.info["agent_error"]) for t in trajectories if "agent_error" in t.info]
    if errors:
        found.append(
            f"in {len(errors)} of {len(trajectories)} trajectories the agents went wrong (outcome 0); the first: "
            f"{errors[0]}"
        )
    acted = [step for trajectory in trajectories for step in trajectory.steps if "action" in step.info]
    replaced = [step for step in acted if "illegal" in step.info]
    if replaced:
        found.append(
            f"in {len(replaced)} of {len(acted)} steps of environments the action was illegal, and another was drawn "
            f"in its place; the first: step {replaced[0].id}, {replaced[0].agent}: {replaced[0].info['illegal']}"
        )
    for function in report.functions:
        if function.failed:
            found.append(failure_text(function))
            found += [f"scoring failed: {reason}" for reason in function.reasons[1:]]
    return found


def _mean(values: np.ndarray) -> str:
    return number(float(values.mean())) if len(values) else "-"
