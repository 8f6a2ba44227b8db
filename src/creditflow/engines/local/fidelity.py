"""Measure the fidelity of credit during training, within a share of the run's tokens."""

from __future__ import annotations

import math

import numpy as np

from creditflow._utils.progress import phase
from creditflow.config import trained_agents
from creditflow.credit import Assignment
from creditflow.data import Bools, Trajectory
from creditflow.engines.local.decisions import (
    FIDELITY,
    MeasuredDecisions,
    MeasuringRollouts,
    choose_decisions,
    measure_decisions,
)
from creditflow.engines.local.run import RunState
from creditflow.engines.local.values import Fidelity, fidelity

_MAX_DECISIONS = 256
"""The largest number of decisions of one measurement."""


def decision_candidates(assignment: Assignment, agents: list[str]) -> Bools:
    """[S] steps whose value can be measured: trained, of one of `agents`, with a known outcome."""
    batch = assignment.batch
    agent_A = np.array([name in agents for name in batch.agent_names], dtype=np.bool_)
    return np.asarray(assignment.groups.trained_S & assignment.rewards.known_S & agent_A[batch.agent_of_step])


async def fidelity_metrics(
    run: RunState, step: int, assignment: Assignment, trajectories: list[Trajectory]
) -> dict[str, float]:
    """Measure the fidelity of a training step's advantages before its update; returns metrics.

    The measurement uses at most `audit.max_token_frac` of the response tokens that the run has generated. It changes no
    random number of the training. Undefined metrics are left out.
    """
    config, batch = run.config, assignment.batch
    section = config.audit
    chosen = choose_decisions(
        batch,
        decision_candidates(assignment, trained_agents(config)),
        section.continuations,
        _MAX_DECISIONS,
        section.max_token_frac * run.generated_tokens - run.audit_tokens,
        np.random.Generator(np.random.Philox(np.random.SeedSequence((config.data.seed, FIDELITY, step)))),
    )
    with phase("measuring fidelity", unit="continuations") as bar:
        rollouts = MeasuringRollouts(run.components, run.policy_set)
        measured = await measure_decisions(
            rollouts, batch, trajectories, chosen, section.continuations, (FIDELITY, step), bar.reach
        )
    run.audit_tokens += measured.tokens
    result = fidelity(assignment.advantage.advantage_S[chosen.step_D], measured.values)
    if note := _note(measured, result):
        run.reporter.say(f"training step {step}: fidelity of credit: {note}")
    return _metrics(result, measured, run)


def _metrics(result: Fidelity, measured: MeasuredDecisions, run: RunState) -> dict[str, float]:
    metrics = {
        "credit/fidelity": result.correlation.value,
        "credit/fidelity_low": result.correlation.low,
        "credit/fidelity_high": result.correlation.high,
        "credit/fidelity_ceiling": result.ceiling.value,
        "audit/decisions": float(result.decisions),
        "audit/refused_frac": measured.refused / max(measured.continuations, 1),
        "audit/failed_frac": measured.failed / max(measured.continuations, 1),
        "audit/tokens": float(measured.tokens),
        "audit/tokens_frac": run.audit_tokens / max(run.generated_tokens, 1),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _note(measured: MeasuredDecisions, result: Fidelity) -> str:
    """The reason why a measurement is incomplete; empty if it is not."""
    if not len(measured.chosen.step_D):
        return "no decision fits into audit.max_token_frac yet, or none is trained"
    return "; ".join(measured.losses) or ("" if result.decisions else "no decision has a known value")
