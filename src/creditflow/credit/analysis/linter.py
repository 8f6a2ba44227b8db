"""Warnings about a batch under given options: agents and steps that will not learn, and the reasons.

Findings are messages for the user. They are computed from an assignment and do not change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from creditflow.credit.analysis.metrics import reach, unreached_agents
from creditflow.credit.assignment import Assignment, assign
from creditflow.credit.records import OUTCOME, CreditOptions
from creditflow.credit.rules.base import OutcomeRule
from creditflow.data import TRAJECTORY_STATUSES, Floats, TrajectoryBatch


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A problem of a batch, or an effect that may surprise."""

    code: str
    """A short identifier: `singletons`, `no_variance`, `mixed_prompts`, `never_scored`, `unreached`, ..."""
    message: str
    """The text, with numbers, an example and advice."""

    def __str__(self) -> str:
        return self.message


def check_groups(batch: TrajectoryBatch, options: CreditOptions | None = None) -> list[LintFinding]:
    """Find problems of `batch` under `options` (default: `CreditOptions()`).

    Raises the errors of `assign`. An estimator that needs a critic is replaced by the default one, which needs no
    values.
    """
    options = options or CreditOptions()
    if options.estimator.critic:
        options = replace(options, adv_estimator=CreditOptions.adv_estimator, shadow=None)
    return lint(assign(batch, options))


def lint(assignment: Assignment) -> list[LintFinding]:
    """Find problems of an existing assignment."""
    checks = (_unreached, _never_scored, _groups, _mixed_prompts, _masked, _missing_outcomes, _outcomes_of_others)
    idle = idle_gate(assignment)
    findings = [] if idle is None or idle.code == "gates_open" else [idle]  # open gates need no warning
    return findings + [LintFinding(code, message) for check in checks for code, message in check(assignment)]


Problems = Iterator[tuple[str, str]]
"""The codes and messages of findings."""


def _unreached(a: Assignment) -> Problems:
    silent, rule = unreached_agents(a), a.options.propagation
    entry = f" and outcome_to {rule.outcome_to}" if isinstance(rule, OutcomeRule) else ""
    for agent in silent:
        yield (
            "unreached",
            f"no signal reaches {agent}: with propagation {rule}{entry} it does not learn. Score it, or let the "
            "outcome reach it (outcome_to: all)",
        )
    has_outcome = any(score is not None for score in a.batch.outcome_scores) or any(a.batch.outcomes_of_agents)
    for agent, share in reach(a, OUTCOME).items():
        if has_outcome and share == 0.0 and agent not in silent:
            yield "no_outcome", f"the outcome never reaches {agent}: it learns from sub-rewards alone"


def _never_scored(a: Assignment) -> Problems:
    rule, matched_S = a.options.propagation, a.rewards.scored_S | a.rewards.failed_S
    if a.options.decomposed and rule.pays_scores and matched_S.any():
        gates = "its gates are always open, and " if rule.gated else ""
        paid_S = matched_S if a.credit.paid_S is None else matched_S | (a.credit.paid_S != 0.0)
        paid = set(a.batch.agent_of_step[paid_S].tolist())
        for i in sorted(set(range(len(a.batch.agent_names))) - paid):
            yield "never_scored", f"{a.batch.agent_names[i]} is never scored: {gates}it has no reward of its own"


def idle_gate(a: Assignment) -> LintFinding | None:
    """The reason why gates change no credit in this batch; None if they do, or if the rule moves no credit.

    The comparison is exact. Credit equals that of `own` if no step receives any; it equals that of `discounted` if no
    gate stops any.
    """
    if a.credit.gate_S is None or not a.batch.edge_child.size or a.credit.frozen_S is not None:
        return None
    rule, withheld_S = a.options.propagation, a.credit.withheld_S
    gated = withheld_S is not None
    effect = f"this {'gate changes' if gated else 'rule moves'} no credit: propagation {rule} equals"
    if not a.credit.received_S.any():
        return LintFinding("nothing_flows", f"{effect} own on these trajectories. {_why_idle(a, a.credit.gate_S)}")
    if withheld_S is not None and not withheld_S.any():
        return LintFinding("gates_open", f"{effect} discounted on these trajectories. {_why_open(a)}")
    return None


def _why_idle(a: Assignment, gate_S: Floats) -> str:
    """Count the steps with a parent by the reason why they pass no credit to it."""
    if a.options.gamma == 0:
        return "algorithm.gamma is 0, so no credit reaches a parent"
    b = getattr(a.options.propagation, "sub_reward_origin", 0.0)
    child_S = a.batch.parents_of_step > 0
    open_S = child_S & (gate_S > 0)
    even_S = open_S & a.rewards.scored_S & (a.credit.own_S == 0)
    counts = (
        (child_S & (gate_S == 0), "have a closed gate"),
        (even_S, f"are open and pass 0, as their sub-reward equals sub_reward_origin={b:g}"),
        (open_S & ~a.rewards.scored_S, "have no score of their own, and nothing to pass"),
    )
    reasons = ", ".join(f"{at_S.sum()} {reason}" for at_S, reason in counts if at_S.any())
    hint = "; scores between 0 and 1, or another sub_reward_origin, would move credit" if even_S.any() else ""
    return f"Of {child_S.sum()} steps with a parent {reasons}{hint}"


def _why_open(a: Assignment) -> str:
    rewards, open_S, threshold_S = a.rewards, a.credit.gate_open_S, a.credit.threshold_S
    if open_S is None or threshold_S is None:
        return "No gate stops any"
    if closed := int((~open_S).sum()):
        return f"The {closed} closed gates stop nothing: no credit comes to them"
    if not rewards.scored_S.any():
        return "No step has a score, so every gate is open"
    least, theta = rewards.sub_reward_S[rewards.scored_S].min(), threshold_S[rewards.scored_S].max()
    return f"Every gate is open: the lowest sub-reward is {least:g}, the highest threshold {theta:g}"


def _groups(a: Assignment) -> Problems:
    """Report steps that are compared with a wider group, with none, or with equal credits alone."""
    trained_S, group_S, tied_S = a.groups.trained_S, a.groups.group_S, a.groups.tied_S
    if a.groups.singletons:
        alone = [a.batch.step_ids[s] for s in np.flatnonzero(trained_S & (group_S < 0)).tolist()]
        none = f" or, without one, train on 0 (steps: {len(alone)}; one is {alone[0]})" if alone else ""
        yield (
            "singletons",
            f"groups of a single trajectory (group_by {a.options.group_by}): {a.groups.singletons}; their steps are "
            f"compared with a wider group{none}. More rollouts of each task (rollout.n) or a coarser group_by help",
        )
    if (tied := np.flatnonzero(trained_S & (group_S >= 0) & tied_S)).size:
        n_tied, n_groups = len(np.unique(group_S[tied])), len(np.unique(group_S[trained_S & (group_S >= 0)]))
        yield (
            "no_variance",
            f"{n_tied} of {n_groups} groups have no variance: all their credits are the same, so they teach nothing; "
            f"one is {a.group_name(tied[0])}, where all have {a.credit.total_S[tied[0]]:g}",
        )


def _mixed_prompts(a: Assignment) -> Problems:
    """Report tasks whose first steps have different prompts: a `uid` shared by several tasks, or a random prompt.

    Later prompts are not compared; they differ between trajectories.
    """
    batch = a.batch
    task_S = batch.group_of_trajectory[batch.trajectory_of_step]
    prompts: dict[tuple[int, int], str] = {}
    mixed: dict[int, tuple[str, str]] = {}
    for s in np.flatnonzero(batch.index_of_step == 0).tolist():
        before = prompts.setdefault((task_S[s], batch.agent_of_step[s]), batch.prompts[s])
        if before != batch.prompts[s]:
            mixed.setdefault(task_S[s], (before, batch.prompts[s]))
    if mixed:
        task, (first, other) = next(iter(mixed.items()))
        yield (
            "mixed_prompts",
            f"{len(mixed)} of {len(batch.group_names)} tasks begin with different prompts in one group: trajectories "
            f"of different questions are compared. Task {batch.group_names[task]}: {first[:60]!r} and {other[:60]!r}",
        )


def _masked(a: Assignment) -> Problems:
    batch, masked_N, trajectory_S = a.batch, a.rewards.masked_N, a.batch.trajectory_of_step
    if (masked := np.flatnonzero(masked_N)).size:
        first = batch.trajectory_ids[masked[0]]
        yield (
            "masked_trajectories",
            f"{masked.size} of {len(masked_N)} trajectories are left out of training; one is {first}",
        )
    steps_A = np.bincount(batch.agent_of_step[a.rewards.masked_S & ~masked_N[trajectory_S]])
    for agent in np.flatnonzero(steps_A):
        name = batch.agent_names[agent]
        yield "masked_agents", f"{steps_A[agent]} steps of {name} do not train: its own outcome could not be scored"


def _missing_outcomes(a: Assignment) -> Problems:
    """Report trajectories without an outcome in a batch with outcomes: a missing one counts as 0."""
    batch = a.batch
    missing_N = ~a.rewards.masked_N & np.array([score is None for score in batch.outcome_scores], dtype=np.bool_)
    missing_N &= batch.status_of_trajectory == TRAJECTORY_STATUSES.index("ok")
    if any(batch.outcomes_of_agents):  # each agent may have its own
        without_S = ~a.rewards.known_S & ~a.rewards.masked_S
        missing_N &= np.bincount(batch.trajectory_of_step[without_S], minlength=batch.n_trajectories) > 0
    if missing_N.any() and not missing_N[~a.rewards.masked_N].all():
        first = batch.trajectory_ids[int(np.flatnonzero(missing_N)[0])]
        yield (
            "missing_outcomes",
            f"{missing_N.sum()} trajectories have no outcome and others have: they are compared as if theirs were 0; "
            f"one is {first}. An outcome that could not be had is a Score of status failed",
        )


def _outcomes_of_others(a: Assignment) -> Problems:
    """Report outcomes that flow along edges to agents whose own outcome differs."""
    batch, rule, gate_S = a.batch, a.options.propagation, a.credit.gate_S
    if gate_S is None or not any(batch.outcomes_of_agents):
        return
    if not isinstance(rule, OutcomeRule) or not rule.at_answer(a.options):
        return
    child_E, parent_E, outcome_S = batch.edge_child, batch.edge_parent, a.rewards.outcome_S
    passes_E = (a.credit.reached_S[child_E] & OUTCOME > 0) & (gate_S[child_E] > 0)
    differs_E = a.rewards.known_S[parent_E] & (outcome_S[child_E] != outcome_S[parent_E])
    edges = np.flatnonzero(passes_E & differs_E)
    if edges.size:
        child, parent = (batch.agent_names[batch.agent_of_step[steps_E[edges[0]]]] for steps_E in (child_E, parent_E))
        yield (
            "outcome_of_another",
            f"the outcome of {child} flows to {parent}, whose outcome differs ({edges.size} edges join such agents): "
            "with outcome_to: answer it follows every edge. Use outcome_to: all, or let the parents of a step be "
            "steps of the same side",
        )
