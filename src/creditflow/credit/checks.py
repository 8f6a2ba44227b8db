"""Validation of batches before credit is computed, independent of options and rules.

A batch made by `TrajectoryBatch.from_trajectories` can only have invalid scores. A batch read from a file or taken
from another system can have any defect.
"""

from __future__ import annotations

from graphlib import CycleError as GraphlibCycleError
from graphlib import TopologicalSorter
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from creditflow.data import OK, TIMEOUT, Bools, Floats, TrajectoryBatch
from creditflow.errors import (
    BatchError,
    ConfigError,
    CycleError,
    EmptyBatchError,
    NotFiniteError,
    OrderError,
    ScoreRangeError,
    ShapeError,
)

_COLUMN_TOLERANCE = 1e-9
"""Columns hold rescaled, clipped scores; the mean of several may still leave [0, 1] by rounding."""

_PER_TRAJECTORY = (
    "tasks",
    "group_of_trajectory",
    "outcome",
    "outcome_scores",
    "status_of_trajectory",
    "answers",
    "trajectory_info",
)
_PER_STEP = (
    "trajectory_of_step",
    "index_of_step",
    "agent_of_step",
    "turn_of_step",
    "policy_of_step",
    "policy_version",
    "temperature_of_step",
    "is_answer",
    "stratum_of_step",
    "prompts",
    "responses",
    "step_info",
    "raw_scores",
)
_PER_TRAJECTORY_OR_EMPTY, _PER_STEP_OR_EMPTY = ("outcomes_of_agents",), ("version_spans", "branch_of")
_INTEGERS = (
    "group_of_trajectory",
    "status_of_trajectory",
    "trajectory_of_step",
    "index_of_step",
    "agent_of_step",
    "turn_of_step",
    "policy_of_step",
    "policy_version",
    "stratum_of_step",
    "edge_child",
    "edge_parent",
    "score_status",
    "prompt_offsets",
    "prompt_ids",
    "token_offsets",
    "response_ids",
)
_FLOATS = ("outcome", "temperature_of_step", "scores", "score_weights", "logprobs", "ref_logprobs")
_BOOLS = ("is_answer", "response_mask")


def check_batch(batch: TrajectoryBatch) -> None:
    """Raise a BatchError (or a subclass) for the first problem, with its place, the expected and the actual value.

    Checked: types, lengths and indices of the columns, the order of steps, edges (sorted by child, same trajectory,
    parent before child, no duplicates), scores (finite and in [0, 1] if ok), weights (finite, at least 0), outcomes
    (finite if ok). Token values are checked when they are read, see `token_rewards`.
    """
    if batch.n_steps == 0:
        raise EmptyBatchError(f"batch of {batch.n_trajectories} trajectories: expected at least one step, got none")
    _check_types(batch)
    _check_lengths(batch)
    _check_indices(batch)
    _check_order(batch)
    _check_edges(batch)
    _check_scores(batch)
    _check_outcomes(batch)


def _first(wrong: Bools) -> int:
    return int(np.argmax(wrong))


def _check_types(batch: TrajectoryBatch) -> None:
    for name in (*_INTEGERS, *_FLOATS, *_BOOLS):
        column = getattr(batch, name)
        dtype = column.dtype if isinstance(column, np.ndarray) else None
        if name in _INTEGERS:
            # Unsigned integers would wrap around in differences, and cannot hold -1 (none).
            expected, fits = "signed integers", dtype is not None and dtype.kind == "i" and dtype.isnative
        elif name in _FLOATS:
            expected, fits = "float64 or float32", dtype in (np.float64, np.float32)
        else:
            expected, fits = "true or false", dtype == np.bool_
        if not fits:
            got = type(column).__name__ if dtype is None else dtype
            raise ShapeError(f"column {name}: expected an array of {expected}, got {got}")


def _check_lengths(batch: TrajectoryBatch) -> None:
    n, s, k = batch.n_trajectories, batch.n_steps, len(batch.score_names)
    given = [name for name in (*_PER_TRAJECTORY_OR_EMPTY, *_PER_STEP_OR_EMPTY) if len(getattr(batch, name))]
    _expect_shapes(batch, (*_PER_TRAJECTORY, *(name for name in given if name in _PER_TRAJECTORY_OR_EMPTY)), (n,))
    _expect_shapes(batch, (*_PER_STEP, *(name for name in given if name in _PER_STEP_OR_EMPTY)), (s,))
    _expect_shapes(batch, ("scores", "score_status", "score_weights"), (s, k))
    _expect_shapes(batch, ("edge_child", "edge_parent"), (batch.edge_child.size,))
    for offsets, columns in (
        ("prompt_offsets", ("prompt_ids",)),
        ("token_offsets", ("response_mask", "response_ids", "logprobs")),
    ):
        _expect_shapes(batch, (offsets,), (s + 1,))
        bound = getattr(batch, offsets)
        if bound[0] != 0:
            raise ShapeError(f"column {offsets}: expected 0 as the first, got {bound[0]}")
        if (wrong := bound[1:] < bound[:-1]).any():
            at = _first(wrong)
            raise ShapeError(
                f"step {batch.step_ids[at]}: expected {offsets} that do not decrease, got {bound[at + 1]} after "
                f"{bound[at]}"
            )
        _expect_shapes(batch, columns, (int(bound[-1]),))
    if batch.ref_logprobs.size:  # optional: few engines return them
        _expect_shapes(batch, ("ref_logprobs",), batch.logprobs.shape)


def _expect_shapes(batch: TrajectoryBatch, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    for name in names:
        column = getattr(batch, name)
        got = np.shape(column) if isinstance(column, np.ndarray) else (len(column),) if column is not None else None
        if got != shape:
            raise ShapeError(f"column {name}: expected shape {shape}, got {got}")


def _check_indices(batch: TrajectoryBatch) -> None:
    from creditflow.credit import kernels

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
        least, largest = kernels.bounds(column) if column.size else (low, low)
        if least < low or largest >= high:
            at = _first((column < low) | (column >= high))
            raise BatchError(f"column {name}, entry {at}: expected an index from {low} to {high - 1}, got {column[at]}")


def _check_order(batch: TrajectoryBatch) -> None:
    trajectory_S = batch.trajectory_of_step
    if (wrong := np.diff(trajectory_S) < 0).any():
        s = _first(wrong) + 1
        raise OrderError(
            f"step {batch.step_ids[s]}: expected steps to lie trajectory by trajectory, got one of "
            f"{batch.trajectory_ids[trajectory_S[s]]} after one of {batch.trajectory_ids[trajectory_S[s - 1]]}"
        )
    steps_N = np.bincount(trajectory_S, minlength=batch.n_trajectories)
    expected_S = np.arange(batch.n_steps) - (np.cumsum(steps_N) - steps_N)[trajectory_S]
    if (wrong := batch.index_of_step != expected_S).any():
        s = _first(wrong)
        raise OrderError(f"step {batch.step_ids[s]}: expected index {expected_S[s]}, got {batch.index_of_step[s]}")


def _check_edges(batch: TrajectoryBatch) -> None:
    child_E, parent_E = batch.edge_child, batch.edge_parent
    if not child_E.size:
        return
    if (wrong := parent_E >= child_E).any():
        _refuse_cycle(batch)
        e = _first(wrong)
        raise OrderError(
            f"step {batch.step_ids[child_E[e]]}: expected parents that came before it, "
            f"got {batch.step_ids[parent_E[e]]}"
        )
    if (wrong := np.diff(child_E) < 0).any():
        e = _first(wrong) + 1
        raise OrderError(
            f"edge {e}: expected edges sorted by child, got one of {batch.step_ids[child_E[e]]} after one of "
            f"{batch.step_ids[child_E[e - 1]]}"
        )
    if (wrong := batch.trajectory_of_step[child_E] != batch.trajectory_of_step[parent_E]).any():
        e = _first(wrong)
        raise BatchError(
            f"step {batch.step_ids[child_E[e]]}: expected parents in its own trajectory "
            f"{batch.trajectory_ids[batch.trajectory_of_step[child_E[e]]]}, got {batch.step_ids[parent_E[e]]} of "
            f"{batch.trajectory_ids[batch.trajectory_of_step[parent_E[e]]]}"
        )
    many_E = np.flatnonzero(np.bincount(child_E, minlength=batch.n_steps)[child_E] > 1)
    pair = np.sort(child_E[many_E].astype(np.int64) * batch.n_steps + parent_E[many_E])
    if (twice := np.diff(pair) == 0).any():
        child, parent = divmod(int(pair[_first(twice)]), batch.n_steps)
        raise BatchError(f"step {batch.step_ids[child]}: expected each parent once, got {batch.step_ids[parent]} twice")


def _refuse_cycle(batch: TrajectoryBatch) -> None:
    """Raise CycleError if the edges contain a cycle. Called after an edge from a later to an earlier step was found."""
    parents: dict[int, list[int]] = {}
    for child, parent in zip(batch.edge_child.tolist(), batch.edge_parent.tolist(), strict=True):
        parents.setdefault(child, []).append(parent)
    try:
        TopologicalSorter(parents).prepare()
    except GraphlibCycleError as error:
        circle = " <- ".join(batch.step_ids[s] for s in error.args[1])
        raise CycleError(
            f"step {batch.step_ids[error.args[1][0]]}: expected no step to use its own output, got {circle}"
        ) from None


def _check_scores(batch: TrajectoryBatch) -> None:
    ok_SK = batch.score_status == OK
    with np.errstate(invalid="ignore"):
        within_SK = (batch.scores >= -_COLUMN_TOLERANCE) & (batch.scores <= 1 + _COLUMN_TOLERANCE)
        weighable_SK = np.isfinite(batch.score_weights) & (batch.score_weights >= 0)
    for wrong_SK, values_SK, what in (
        (ok_SK & ~within_SK, batch.scores, "a value from 0 to 1 after rescaling from its range"),
        (~weighable_SK, batch.score_weights, "a finite weight of 0 or more"),
    ):
        if wrong_SK.any():
            s, k = divmod(_first(wrong_SK.ravel()), wrong_SK.shape[1])
            kind = ScoreRangeError if np.isfinite(values_SK[s, k]) else NotFiniteError
            raise kind(
                f"step {batch.step_ids[s]}, score {batch.score_names[k]}: expected {what}, got {values_SK[s, k]}"
            )


def _check_outcomes(batch: TrajectoryBatch) -> None:
    if np.isfinite(batch.outcome).all():
        return
    ok_N = np.array([score is not None and score.status == "ok" for score in batch.outcome_scores], dtype=np.bool_)
    if (wrong := (ok_N & np.isnan(batch.outcome)) | np.isinf(batch.outcome)).any():
        n = _first(wrong)
        raise NotFiniteError(
            f"trajectory {batch.trajectory_ids[n]}: expected a finite outcome where its scoring was ok, "
            f"got {batch.outcome[n]}"
        )


def check_values(batch: TrajectoryBatch, values_T: NDArray[Any] | None, estimator: str) -> Floats:
    """[T] the critic's values as floats. Raises ConfigError if missing, ShapeError for the wrong shape.

    Non-finite values are found when they are used, see `refuse_values`.
    """
    if values_T is None:
        raise ConfigError(f"algorithm.adv_estimator: {estimator} expects a critic's values for each token, got none")
    values_T = np.asarray(values_T)
    if values_T.shape != batch.response_mask.shape:
        raise ShapeError(f"values: expected shape {batch.response_mask.shape}, got {values_T.shape}")
    return values_T if values_T.dtype in (np.float32, np.float64) else values_T.astype(np.float64)


def refuse_values(batch: TrajectoryBatch, values_T: Floats) -> NoReturn:
    """Raise NotFiniteError for values that led to advantages that are not finite."""
    wrong_T = batch.response_mask & ~np.isfinite(values_T)
    if not wrong_T.any():
        raise NotFiniteError(
            f"values: expected numbers that advantages can be made of, got up to {np.abs(values_T).max()}"
        )
    token = _first(wrong_T)
    s = int(np.searchsorted(batch.token_offsets, token, side="right")) - 1
    raise NotFiniteError(
        f"step {batch.step_ids[s]}, token {token - batch.token_offsets[s]}: expected a finite value, "
        f"got {values_T[token]}"
    )
