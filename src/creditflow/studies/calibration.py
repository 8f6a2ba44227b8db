"""Calibration of sub-rewards: how well the scores of steps predict the outcome of their trajectories.

Arrays in, numbers out; no files. A score without information about the outcome is noise at a gate, at any threshold; an
informative score has a threshold that separates right from wrong trajectories best.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from creditflow.credit.decompose import counting
from creditflow.credit.trees import rollouts_of
from creditflow.data import OK, RIGHT, Bools, Floats, Ints, TrajectoryBatch
from creditflow.monitoring.metrics import outcomes_of_steps

ALL = "sub-reward"
"""The name for a step's whole sub-reward, the weighted mean of its functions."""
BINS = 10
"""Number of equal-width bins of the reliability curve and its error (Guo et al. 2017, arXiv 1706.04599, eq. 3)."""
_LEVELS = 128
"""Scores with more distinct values are rounded to this number of quantiles."""
_RESAMPLES, _SEED = 400, 0


@dataclass(frozen=True, slots=True)
class Observations:
    """Scores of one function on one agent's steps, each with the outcome of its trajectory."""

    agent: str
    name: str
    score_X: Floats
    """Scores in [0, 1]."""
    right_X: Bools
    """Whether the outcome of the step's agent reached the top of its range."""
    task_X: Ints
    """Index of the task: trajectories of one task are not independent."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """How well the scores of one function on one agent's steps predict the outcome."""

    agent: str
    name: str
    steps: int
    mean_score: float
    mean_right: float
    """Share of those steps whose trajectory ended right."""
    auc: float
    """The probability that a step of a right trajectory has a higher score than a step of a wrong one; ties count half.
    0.5: no information; 1: perfect separation. NaN if all trajectories ended alike."""
    auc_low: float
    auc_high: float
    """95 % bootstrap interval over tasks."""
    auc_within: float
    """The same among trajectories of one task, which removes the effect of task difficulty. NaN if no task ended both
    ways."""
    error: float
    """Expected calibration error: mean |share right - mean score| over bins, weighted by their steps."""
    threshold: float
    """The threshold, midway between two scores, at which `score > threshold` separates right from wrong trajectories
    best; NaN if none exists."""
    separation: float
    """At the threshold: the share of open steps in right trajectories minus that in wrong ones (Youden's J)."""
    pass_rate: float
    """At the threshold: the share of open steps."""
    curve: tuple[tuple[float, float, int], ...]
    """(mean score, share of steps whose trajectory ended right, number of steps) of each non-empty bin."""


def observe(batches: Iterable[TrajectoryBatch]) -> list[Observations]:
    """Collect scores by agent and function, and by agent for the whole sub-reward if several functions make it up.

    Excludes failed scores, steps of trajectories without a scored outcome, and branches, which repeat the steps of
    their rollout; includes functions of weight 0.
    """
    columns_of: dict[tuple[str, str], list[tuple[Floats, Bools, Ints]]] = {}
    tasks: dict[str, int] = {}
    for batch in batches:
        rollout_S = rollouts_of(batch)[batch.trajectory_of_step]
        right_S = np.where(rollout_S, outcomes_of_steps(batch), np.nan)
        task_N = np.array([tasks.setdefault(name, len(tasks)) for name in batch.group_names], dtype=np.int64)
        task_S = task_N[batch.group_of_trajectory][batch.trajectory_of_step]
        for name, score_S in _scores(batch):
            has_S = ~np.isnan(score_S) & ~np.isnan(right_S)
            for a in np.unique(batch.agent_of_step[has_S]):
                at = has_S & (batch.agent_of_step == a)
                columns = (score_S[at], right_S[at] >= RIGHT, task_S[at])
                columns_of.setdefault((batch.agent_names[a], name), []).append(columns)
    return [
        Observations(agent, name, *(np.concatenate(column) for column in zip(*parts, strict=True)))
        for (agent, name), parts in columns_of.items()
    ]


def _scores(batch: TrajectoryBatch) -> Iterator[tuple[str, Floats]]:
    """(name, [S] scores; NaN without a score)."""
    for k, name in enumerate(batch.score_names):
        yield name, np.where(batch.score_status[:, k] == OK, batch.scores[:, k], np.nan)
    counts_SK = counting(batch)
    several_S = (counts_SK.sum(axis=1) > 1) & (~counts_SK | batch.scored).all(axis=1)
    weights_SK = np.where(counts_SK, batch.score_weights, 0.0)
    total_S = (weights_SK * np.where(counts_SK & batch.scored, batch.scores, 0.0)).sum(axis=1)
    if several_S.any():
        yield ALL, np.where(several_S, total_S / np.where(several_S, weights_SK.sum(axis=1), 1.0), np.nan)


def calibrate(seen: Observations) -> Calibration:
    """Compute the calibration of one function on one agent's steps; at least one step is required."""
    level_L, level_X = _levels(seen.score_X)
    tasks, task_X = np.unique(seen.task_X, return_inverse=True)
    counts = np.zeros((len(tasks), len(level_L), 2))
    np.add.at(counts, (task_X, level_X, seen.right_X.astype(np.int64)), 1.0)
    wrong_L, right_L = counts.sum(axis=0).T
    low, high = _interval(counts)
    threshold, separation, pass_rate = _best_threshold(level_L, wrong_L, right_L)
    error, curve = _reliability(seen.score_X, seen.right_X)
    return Calibration(
        agent=seen.agent,
        name=seen.name,
        steps=len(seen.score_X),
        mean_score=float(seen.score_X.mean()),
        mean_right=float(seen.right_X.mean()),
        auc=_auc(wrong_L, right_L),
        auc_low=low,
        auc_high=high,
        auc_within=_auc_within(counts),
        error=error,
        threshold=threshold,
        separation=separation,
        pass_rate=pass_rate,
        curve=curve,
    )


def _levels(score_X: Floats) -> tuple[Floats, Ints]:
    """The distinct scores in order (quantiles if more than `_LEVELS`), and the index of each score among them."""
    level_L, level_X = np.unique(score_X, return_inverse=True)
    if len(level_L) <= _LEVELS:
        return level_L, level_X
    edges = np.unique(np.quantile(score_X, np.linspace(0, 1, _LEVELS)))
    return edges, np.searchsorted(edges, score_X, side="right") - 1


def _auc(wrong_L: Floats, right_L: Floats) -> float:
    """The Mann-Whitney statistic from counts by level."""
    below_L = np.cumsum(wrong_L) - wrong_L
    pairs = float(wrong_L.sum() * right_L.sum())
    return float((right_L * (below_L + wrong_L / 2)).sum()) / pairs if pairs else float("nan")


def _auc_within(counts: Floats) -> float:
    """The same over pairs within one task; `counts`: [tasks, levels, 2]."""
    wrong, right = counts[..., 0], counts[..., 1]
    below = np.cumsum(wrong, axis=1) - wrong
    pairs = float((wrong.sum(axis=1) * right.sum(axis=1)).sum())
    return float((right * (below + wrong / 2)).sum()) / pairs if pairs else float("nan")


def _interval(counts: Floats) -> tuple[float, float]:
    """95 % bootstrap interval of `_auc` over tasks."""
    tasks = len(counts)
    rng = np.random.default_rng(_SEED)
    flat = counts.reshape(tasks, -1)
    drawn = (rng.multinomial(tasks, np.full(tasks, 1 / tasks)) @ flat for _ in range(_RESAMPLES))  # one at a time
    auc_R = np.array([_auc(one[0::2], one[1::2]) for one in drawn])
    if tasks < 2 or np.isnan(auc_R).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(auc_R, [0.025, 0.975])
    return float(low), float(high)


def _best_threshold(level_L: Floats, wrong_L: Floats, right_L: Floats) -> tuple[float, float, float]:
    wrongs, rights = wrong_L.sum(), right_L.sum()
    if len(level_L) < 2 or not wrongs or not rights:
        return (float("nan"),) * 3
    open_right = 1 - np.cumsum(right_L)[:-1] / rights
    open_wrong = 1 - np.cumsum(wrong_L)[:-1] / wrongs
    best = int(np.argmax(open_right - open_wrong))
    passing = float((open_right[best] * rights + open_wrong[best] * wrongs) / (rights + wrongs))
    return float(level_L[best : best + 2].mean()), float(open_right[best] - open_wrong[best]), passing


def _reliability(score_X: Floats, right_X: Bools) -> tuple[float, tuple[tuple[float, float, int], ...]]:
    bin_X = np.minimum((score_X * BINS).astype(np.int64), BINS - 1)
    counts = np.bincount(bin_X, minlength=BINS)
    at = np.flatnonzero(counts)
    score = np.bincount(bin_X, score_X, BINS)[at] / counts[at]
    right = np.bincount(bin_X, right_X.astype(np.float64), BINS)[at] / counts[at]
    error = float((np.abs(right - score) * counts[at]).sum() / counts.sum())
    return error, tuple(zip(score.tolist(), right.tolist(), counts[at].tolist(), strict=True))
