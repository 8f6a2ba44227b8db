"""Batches of any size for benchmarks, built as columns: too many steps to build one by one."""

from __future__ import annotations

import sys
from dataclasses import fields

import numpy as np

from creditflow.data import FAILED, NOT_MATCHED, OK, TRAJECTORY_STATUSES, Ints, Score, Task, TrajectoryBatch

PLANNER, EXECUTOR, VERIFIER = 0, 1, 2
FAILED_SHARE = 0.0
"""The share of the executor's steps with a failed score."""
TOOL_SHARE = 0.1
"""The share of a response's tokens, in its middle, that a tool wrote."""


def chain_batch(
    tasks: int, trajectories: int = 4, steps: int = 30, *, tokens: int | Ints = 0, tools: bool = False, seed: int = 0
) -> TrajectoryBatch:
    """Draw `trajectories` trajectories for each of `tasks` tasks.

    A planner, executors and a verifier act in a row, in `steps` steps. The executor's steps have graded scores in
    eighths, lower in a trajectory that fails; planner and verifier have none, and scorings fail at the rate
    `FAILED_SHARE`. The outcome is 0 or 1. `tokens`: per response, one number or one per step. All steps share their
    texts and the columns for ledgers alone (`raw_scores`, the infos).
    """
    rng = np.random.default_rng(seed)
    n, s = tasks * trajectories, tasks * trajectories * steps
    index_S = np.tile(np.arange(steps, dtype=np.int64), n)
    agent_S = np.full(s, EXECUTOR, dtype=np.int64)
    agent_S[index_S == 0] = PLANNER
    if steps > 1:
        agent_S[index_S == steps - 1] = VERIFIER

    right_N = rng.random(n) < 0.5
    quality_S = np.repeat(np.where(right_N, 0.8, 0.55), steps)
    value_S = np.clip(np.round(8 * (quality_S + rng.normal(0.0, 0.25, s))) / 8, 0.0, 1.0)
    matched_S = agent_S == EXECUTOR
    status_S = np.where(matched_S, np.where(rng.random(s) < FAILED_SHARE, FAILED, OK), NOT_MATCHED)

    lengths_S = np.broadcast_to(np.asarray(tokens, dtype=np.int64), (s,))
    offsets = np.concatenate([[0], np.cumsum(lengths_S)])
    n_tokens = int(offsets[-1])
    child_E = np.flatnonzero(index_S > 0)
    task = Task("synthetic", ({"role": "user", "content": "a question"},), None)
    said, outcome = {"digits": Score(0.5)}, Score(1.0)
    texts = tuple(f"a question, turn {turn}" for turn in range(steps))
    return TrajectoryBatch(
        trajectory_ids=tuple(map(str, range(n))),
        tasks=(task,) * n,
        group_names=tuple(map(str, range(tasks))),
        group_of_trajectory=np.repeat(np.arange(tasks), trajectories),
        outcome=right_N.astype(np.float64),
        outcome_scores=(outcome,) * n,
        status_of_trajectory=np.full(n, TRAJECTORY_STATUSES.index("ok")),
        answers=(None,) * n,
        trajectory_info=({},) * n,
        step_ids=tuple(map(str, range(s))),
        trajectory_of_step=np.repeat(np.arange(n), steps),
        index_of_step=index_S,
        agent_names=("planner", "executor", "verifier"),
        agent_of_step=agent_S,
        turn_of_step=np.where(agent_S == EXECUTOR, index_S - 1, 0),
        policy_names=("default",),
        policy_of_step=np.zeros(s, dtype=np.int64),
        policy_version=np.zeros(s, dtype=np.int64),
        temperature_of_step=np.ones(s),
        is_answer=index_S == steps - 1,
        stratum_names=(),
        stratum_of_step=np.full(s, -1),
        prompts=texts * n,
        responses=("an answer",) * s,
        step_info=({},) * s,
        edge_child=child_E,
        edge_parent=child_E - 1,
        score_names=("digits",),
        scores=np.where(status_S == OK, value_S, np.nan)[:, None],
        score_status=status_S[:, None],
        score_weights=matched_S.astype(np.float64)[:, None],
        raw_scores=(said,) * s,
        prompt_offsets=np.zeros(s + 1, dtype=np.int64),
        prompt_ids=np.zeros(0, dtype=np.int64),
        token_offsets=offsets,
        response_ids=np.zeros(n_tokens, dtype=np.int64),
        response_mask=_sampled(lengths_S, offsets) if tools else np.ones(n_tokens, dtype=np.bool_),
        logprobs=np.full(n_tokens, -1.0),
    )


def _sampled(lengths_S: Ints, offsets: Ints) -> np.ndarray:
    """[T] false for a stretch that begins in the middle of each response."""
    place_T = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths_S)
    length_T = np.repeat(lengths_S, lengths_S)
    return (place_T < length_T // 2) | (place_T >= length_T // 2 + (TOOL_SHARE * length_T).astype(np.int64))


def bytes_of(batch: TrajectoryBatch) -> tuple[int, int]:
    """Bytes of the batch's arrays, and of its tuples with their contents, each object counted once."""
    arrays, rest, seen = 0, 0, set[int]()
    waiting: list[object] = []
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            arrays += value.nbytes
        else:
            waiting.append(value)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        rest += sys.getsizeof(value)
        if isinstance(value, tuple):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend([*value, *value.values()])
        elif isinstance(value, Task | Score):
            waiting.extend(getattr(value, field.name) for field in fields(value))
    return arrays, rest
