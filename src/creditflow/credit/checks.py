"""Refuses batches that no credit can be computed for, before anything is computed.

Knows what columns must agree on; nothing of options or rules. A batch made by `TrajectoryBatch.from_trajectories` is
sound but for its scores; one that came from a file or another system may be anything.
"""

from __future__ import annotations

import numpy as np

from creditflow.errors import BatchError
from creditflow.trajectory import OK, TIMEOUT, Bools, TrajectoryBatch

_RANGE_TOLERANCE = 1e-9
"""Rescaling a mean of token scores may overshoot its range by rounding."""


def check_batch(batch: TrajectoryBatch) -> None:
    """Raises BatchError, naming the first offender, what was expected and what came.

    Checked: lengths and indices of the columns, the order of steps, edges (same trajectory, parent before child, none
    twice), scores (finite and in [0, 1] where ok), weights (finite, at least 0), outcomes (finite where ok).
    """
    if batch.n_steps == 0:
        raise BatchError(f"batch of {batch.n_trajectories} trajectories: expected at least one step, got none")
    _check_lengths(batch)
    _check_indices(batch)
    _check_order(batch)
    _check_edges(batch)
    _check_scores(batch)
    _check_outcomes(batch)


def _first(wrong: Bools) -> int:
    return int(np.argmax(wrong))


def _check_lengths(batch: TrajectoryBatch) -> None:
    n, s, k = batch.n_trajectories, batch.n_steps, len(batch.score_names)
    for name, shape in (
        ("trajectory_of_step", (s,)),
        ("index_of_step", (s,)),
        ("agent_of_step", (s,)),
        ("turn_of_step", (s,)),
        ("policy_of_step", (s,)),
        ("policy_version", (s,)),
        ("is_answer", (s,)),
        ("stratum_of_step", (s,)),
        ("edge_parent", batch.edge_child.shape),
        ("scores", (s, k)),
        ("score_status", (s, k)),
        ("score_weights", (s, k)),
        ("token_offsets", (s + 1,)),
        ("group_of_trajectory", (n,)),
        ("status_of_trajectory", (n,)),
        ("outcome", (n,)),
    ):
        if (got := getattr(batch, name).shape) != shape:
            raise BatchError(f"column {name}: expected shape {shape}, got {got}")
    if len(batch.outcome_scores) != n:
        raise BatchError(f"column outcome_scores: expected {n} values, got {len(batch.outcome_scores)}")


def _check_indices(batch: TrajectoryBatch) -> None:
    for name, low, high in (
        ("trajectory_of_step", 0, batch.n_trajectories),
        ("agent_of_step", 0, len(batch.agent_names)),
        ("policy_of_step", 0, len(batch.policy_names)),
        ("stratum_of_step", -1, len(batch.stratum_names)),
        ("group_of_trajectory", 0, len(batch.group_names)),
        ("status_of_trajectory", 0, 3),
        ("score_status", 0, TIMEOUT + 1),
        ("edge_child", 0, batch.n_steps),
        ("edge_parent", 0, batch.n_steps),
    ):
        column = getattr(batch, name).ravel()
        if column.size and (column.min() < low or column.max() >= high):
            at = _first((column < low) | (column >= high))
            raise BatchError(f"column {name}, entry {at}: expected an index from {low} to {high - 1}, got {column[at]}")


def _check_order(batch: TrajectoryBatch) -> None:
    trajectory_S = batch.trajectory_of_step
    if (wrong := np.diff(trajectory_S) < 0).any():
        s = _first(wrong) + 1
        raise BatchError(
            f"step {batch.step_ids[s]}: expected steps to lie trajectory by trajectory, got one of "
            f"{batch.trajectory_ids[trajectory_S[s]]} after one of {batch.trajectory_ids[trajectory_S[s - 1]]}"
        )
    steps_N = np.bincount(trajectory_S, minlength=batch.n_trajectories)
    expected_S = np.arange(batch.n_steps) - (np.cumsum(steps_N) - steps_N)[trajectory_S]
    if (wrong := batch.index_of_step != expected_S).any():
        s = _first(wrong)
        raise BatchError(f"step {batch.step_ids[s]}: expected index {expected_S[s]}, got {batch.index_of_step[s]}")


def _check_edges(batch: TrajectoryBatch) -> None:
    child_E, parent_E = batch.edge_child, batch.edge_parent
    if not child_E.size:
        return
    if (wrong := parent_E >= child_E).any():
        e = _first(wrong)
        raise BatchError(
            f"step {batch.step_ids[child_E[e]]}: expected parents that came before it, "
            f"got {batch.step_ids[parent_E[e]]}"
        )
    if (wrong := batch.trajectory_of_step[child_E] != batch.trajectory_of_step[parent_E]).any():
        e = _first(wrong)
        raise BatchError(
            f"step {batch.step_ids[child_E[e]]}: expected parents in its own trajectory "
            f"{batch.trajectory_ids[batch.trajectory_of_step[child_E[e]]]}, got {batch.step_ids[parent_E[e]]} of "
            f"{batch.trajectory_ids[batch.trajectory_of_step[parent_E[e]]]}"
        )
    many_E = np.flatnonzero(np.bincount(child_E, minlength=batch.n_steps)[child_E] > 1)
    pair = np.sort(child_E[many_E] * batch.n_steps + parent_E[many_E])
    if (twice := np.diff(pair) == 0).any():
        child, parent = divmod(int(pair[_first(twice)]), batch.n_steps)
        raise BatchError(f"step {batch.step_ids[child]}: expected each parent once, got {batch.step_ids[parent]} twice")


def _check_scores(batch: TrajectoryBatch) -> None:
    ok_SK = batch.score_status == OK
    with np.errstate(invalid="ignore"):
        within_SK = (batch.scores >= -_RANGE_TOLERANCE) & (batch.scores <= 1 + _RANGE_TOLERANCE)
    for wrong_SK, values_SK, what in (
        (ok_SK & ~within_SK, batch.scores, "a value from 0 to 1 after rescaling from its range"),
        (
            ~(np.isfinite(batch.score_weights) & (batch.score_weights >= 0)),
            batch.score_weights,
            "a weight of 0 or more",
        ),
    ):
        if wrong_SK.any():
            s, k = divmod(_first(wrong_SK.ravel()), wrong_SK.shape[1])
            raise BatchError(
                f"step {batch.step_ids[s]}, score {batch.score_names[k]}: expected {what}, got {values_SK[s, k]}"
            )


def _check_outcomes(batch: TrajectoryBatch) -> None:
    if np.isfinite(batch.outcome).all():
        return
    ok_N = np.array([score is not None and score.status == "ok" for score in batch.outcome_scores], dtype=np.bool_)
    if (wrong := (ok_N & np.isnan(batch.outcome)) | np.isinf(batch.outcome)).any():
        n = _first(wrong)
        raise BatchError(
            f"trajectory {batch.trajectory_ids[n]}: expected a finite outcome where its scoring was ok, "
            f"got {batch.outcome[n]}"
        )
