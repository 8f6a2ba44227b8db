"""Number of training steps of a run, and limit of failed rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from creditflow.errors import CreditflowError


def total_steps(n_tasks: int, config: Any) -> int:
    """The training steps of a run over `n_tasks` tasks; an epoch drops its last incomplete batch.

    `config`: the recipe's options, or verl's, which have the same names.
    """
    if config.trainer.total_training_steps is not None:
        return int(config.trainer.total_training_steps)
    return int(n_tasks // config.data.train_batch_size * config.trainer.total_epochs)


def expect_few_failed_rollouts(
    reasons: Sequence[str], n_rollouts: int, n_steps: int, first: Mapping[str, Any], max_failed_frac: float
) -> None:
    """Raise CreditflowError if too many rollouts failed, or if no rollout made a step.

    `reasons`: one for each failed rollout. `n_steps`: the steps of all rollouts. `first`: the `info` of the first
    trajectory. `max_failed_frac`: `actor_rollout_ref.rollout.max_failed_frac`, in [0, 1].
    """
    if len(reasons) > max_failed_frac * n_rollouts:
        raise CreditflowError(
            f"{len(reasons)} of {n_rollouts} rollouts failed, more than actor_rollout_ref.rollout.max_failed_frac="
            f"{max_failed_frac:g} allows; the first: {reasons[0]}"
        )
    if not n_steps:
        reason = first.get("truncated") or first.get("agent_error") or first.get("error")
        reason = reason or "the workflow calls no agent"
        raise CreditflowError(f"none of {n_rollouts} rollouts made a step; the first: {reason}")
