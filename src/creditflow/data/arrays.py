"""The columns of a batch from the arrays, lists or tensors of another trainer.

Each function checks one argument of `TrajectoryBatch.from_arrays`; its messages name the argument and the repair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from creditflow.data.assembly import codes_of
from creditflow.data.trajectory import Bools, Floats, Ints, Score
from creditflow.data.validation import as_column, check_range, first_true, shown
from creditflow.errors import BatchError, ShapeError


def texts_of(values: Any, name: str = "") -> list[str] | None:
    """`values` as a list if they are texts, else None. With the `name` of an argument: raises BatchError instead."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        return list(map(str, values))
    if name and values is not None:
        raise BatchError(f"{name}: expected a list of texts, got {shown(values)}")
    return None


def outcomes_of(outcome: ArrayLike, allowed: tuple[float, float]) -> Floats:
    """[N] the outcomes. Raises BatchError for one outside the `allowed` range."""
    outcome_N = as_column("outcome", outcome, np.float64, words="numbers, NaN for an unknown one")
    check_range("outcome_range", Score(0.0, allowed))
    outside_N = (outcome_N < allowed[0]) | (outcome_N > allowed[1])
    if outside_N.any():
        raise BatchError(
            f"outcome: expected values in outcome_range {allowed}, got {outcome_N[outside_N][0]}; pass the lowest and "
            "the highest possible one as outcome_range"
        )
    return outcome_N


def trajectories_of(trajectory_of_step: ArrayLike, n: int) -> tuple[Ints, Ints]:
    """[S] the trajectory of each step, and its place in it. Raises BatchError unless they are the `n` in order."""
    words = "indices of trajectories such as 0, 0, 1"
    trajectory_S = as_column("trajectory_of_step", trajectory_of_step, np.int64, words=words)
    first_S = np.diff(trajectory_S, prepend=n) != 0
    wrong_S = np.cumsum(first_S) - 1 != trajectory_S
    wrong_S[-1:] |= trajectory_S[-1:] != n - 1
    if wrong_S.any() or len(wrong_S) < n:
        at = f"{trajectory_S[first_true(wrong_S)]} at step {first_true(wrong_S)}" if len(wrong_S) else "no steps"
        raise BatchError(
            f"trajectory_of_step: expected non-decreasing indices from 0 to {n - 1}, none left out, for {n} outcomes, "
            f"got {at}; order the steps by trajectory, and leave out trajectories without steps"
        )
    return trajectory_S, np.arange(len(first_S)) - np.flatnonzero(first_S)[trajectory_S]


def groups_of(group_of_trajectory: ArrayLike) -> tuple[Ints, tuple[str, ...]]:
    """[N] the group of each trajectory as an index into the names, which are sorted."""
    words = "whole numbers or texts"
    groups: list[Any] | None = texts_of(group_of_trajectory)
    groups = groups or as_column("group_of_trajectory", group_of_trajectory, np.int64, words=words).tolist()
    code_of = {group: code for code, group in enumerate(sorted(set(groups)))}
    return np.array([code_of[group] for group in groups], dtype=np.int64), tuple(map(str, code_of))


def agents_of(agent_of_step: ArrayLike | None, names: Sequence[str] | None, n_steps: int) -> tuple[Ints, Sequence[str]]:
    """[S] the agent of each step as an index into the names."""
    if agents := texts_of(agent_of_step):
        if names is not None:
            raise BatchError("agent_names: expected none, since agent_of_step has the names")
        return codes_of(agents)
    indices = np.zeros(n_steps, dtype=np.int64) if agent_of_step is None else agent_of_step
    agent_S = as_column("agent_of_step", indices, np.int64, words="indices into agent_names, or names")
    return agent_S, names or [f"agent_{a}" for a in range(agent_S.max(initial=0) + 1)]


def scores_of(scores: ArrayLike | None, n_steps: int) -> Floats:
    """[S, K] the scores."""
    words, none_SK = "numbers, NaN for a step without a score", np.empty((n_steps, 0))
    value_SK = as_column("scores", none_SK if scores is None else scores, np.float64, 1, 2, words=words)
    return value_SK[:, None] if value_SK.ndim == 1 else value_SK


def edges_of(edges: ArrayLike | None, index_S: Ints) -> tuple[Ints, Ints]:
    """[E] the child and the parent of each edge, sorted by child."""
    if edges is None:
        child_E = np.flatnonzero(index_S)
        return child_E, child_E - 1
    pair_E2 = as_column("edges", edges, np.int64, 2)
    if pair_E2.size and pair_E2.shape[1] != 2:
        raise BatchError(f"edges: expected shape ({len(pair_E2)}, 2), got {pair_E2.shape}")
    child_E, parent_E = pair_E2.reshape(-1, 2).T
    order = np.argsort(child_E, kind="stable")
    return child_E[order], parent_E[order]


def tokens_of(response_mask: ArrayLike | None, token_offsets: ArrayLike | None, n_steps: int) -> tuple[Bools, Ints]:
    """[T] the mask, and [S + 1] the bounds of the steps in it. Raises ShapeError for a mask of another length."""
    if token_offsets is not None:
        mask_T = as_column("response_mask", () if response_mask is None else response_mask, np.bool_)
        return mask_T, as_column("token_offsets", token_offsets, np.int64)
    words, none_SL = f"a row of 1 and 0 for each of {n_steps} steps, or token_offsets beside it", np.zeros((n_steps, 0))
    mask_SL = as_column("response_mask", none_SL if response_mask is None else response_mask, np.bool_, 2, words=words)
    if len(mask_SL) != n_steps:
        raise ShapeError(f"response_mask: expected {words}, got shape {mask_SL.shape}")
    return mask_SL.ravel(), np.arange(n_steps + 1) * mask_SL.shape[1]
