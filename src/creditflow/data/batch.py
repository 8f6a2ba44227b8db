"""TrajectoryBatch: trajectories in columns, the input of credit, engines and run folders.

Shape suffixes: N trajectories, S steps, E edges, T response tokens, P prompt tokens, K reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from creditflow.data.trajectory import (
    CODE_OF_STATUS,
    NOT_MATCHED,
    OK,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Score,
    Step,
    Task,
    TokenIds,
    Trajectory,
    check_trajectory,
    clip_rounding,
)
from creditflow.errors import BatchError


def _turns(trajectory_S: Ints, agent_S: Ints) -> Ints:
    """[S] the number of earlier steps of the same agent in the same trajectory."""
    pair_S = trajectory_S * (int(agent_S.max(initial=0)) + 1) + agent_S
    order = np.argsort(pair_S, kind="stable")
    ordered = pair_S[order]
    turn_S = np.empty_like(order)
    turn_S[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return turn_S


def outcome_value(outcome: Score | None) -> float:
    """The value of an outcome, clipped if it is outside its range by rounding alone; NaN for none or a failed one."""
    if outcome is None or outcome.status != "ok":
        return math.nan
    return clip_rounding(cast(float, outcome.value), *outcome.range)


def _codes(values: Iterable[str]) -> tuple[Ints, tuple[str, ...]]:
    """Integer codes in order of first appearance, and the names that they index."""
    names: dict[str, int] = {}
    codes = [names.setdefault(value, len(names)) for value in values]
    return np.asarray(codes, dtype=np.int64), tuple(names)


class _FromTable:
    """A batch that keeps its table, in a slot rather than a field so that a copy with other columns drops it."""

    __slots__ = ("_table",)

    @property
    def table(self) -> Any:
        """The `pyarrow.Table` from which the batch was built (`table.batch_of`); None for any other batch."""
        return getattr(self, "_table", None)

    def remember(self, table: Any) -> None:
        """Keep `table`, which must hold the same data as the columns: `write_parquet` writes it instead."""
        object.__setattr__(self, "_table", table)


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryBatch(_FromTable):
    """N trajectories with S steps in columns, the input of credit, engine and ledger.

    Steps are grouped by trajectory, in the order in which they were made. Parents therefore come before children, and
    any propagation takes one reverse pass over the edges.
    """

    # Trajectories
    trajectory_ids: Sequence[str]
    tasks: Sequence[Task]
    group_names: tuple[str, ...]
    group_of_trajectory: Ints
    """[N] index into `group_names` (the `uid`)."""
    outcome: Floats
    """[N] outcome in its original range; NaN if missing or its scoring failed."""
    outcome_scores: Sequence[Score | None]
    status_of_trajectory: Ints
    """[N] index into TRAJECTORY_STATUSES."""
    answers: Sequence[str | None]
    trajectory_info: Sequence[dict[str, Any]]

    # Steps
    step_ids: Sequence[str]
    trajectory_of_step: Ints
    """[S] index of the trajectory, non-decreasing."""
    index_of_step: Ints
    """[S] position in the trajectory."""
    agent_names: tuple[str, ...]
    agent_of_step: Ints
    """[S] index into `agent_names`."""
    turn_of_step: Ints
    policy_names: tuple[str, ...]
    policy_of_step: Ints
    policy_version: Ints
    temperature_of_step: Floats
    is_answer: Bools
    """[S] whether the trajectory's answer came from this step."""
    stratum_names: tuple[str, ...]
    stratum_of_step: Ints
    """[S] index into `stratum_names`; -1 for steps without a label."""
    prompts: Sequence[str]
    responses: Sequence[str]
    step_info: Sequence[dict[str, Any]]

    # Edges, sorted by child
    edge_child: Ints
    """[E] step index of the child."""
    edge_parent: Ints
    """[E] step index of the parent: same trajectory, smaller than the child."""

    # Scores
    score_names: tuple[str, ...]
    scores: Floats
    """[S, K] scores rescaled to [0, 1] (the mean of scores per token); NaN unless the status is ok."""
    score_status: Ints
    """[S, K] NOT_MATCHED, OK, FAILED or TIMEOUT."""
    score_weights: Floats
    """[S, K] weight of the function; 0 if it did not match the step."""
    raw_scores: Sequence[dict[str, Score]]
    """[S] the original scores by function."""

    # Tokens
    prompt_offsets: Ints
    """[S+1] bounds of each step's prompt tokens in `prompt_ids`."""
    prompt_ids: TokenIds
    token_offsets: Ints
    """[S+1] bounds of each step's response tokens in the [T] columns."""
    response_ids: TokenIds
    response_mask: Bools
    logprobs: Floats
    ref_logprobs: Floats = field(default_factory=lambda: np.zeros(0))
    """[T] reference log-probabilities, NaN for steps without any; empty if no step has any."""

    # Rarely used: empty if no trajectory, or no step, has a value
    outcomes_of_agents: Sequence[Mapping[str, Score]] = ()
    """[N] `Trajectory.outcomes`."""
    version_spans: Sequence[tuple[tuple[int, int], ...]] = ()
    """[S] `Step.version_spans`."""
    branch_of: Sequence[str | None] = ()
    """[S] `Step.branch_of`."""

    @property
    def n_trajectories(self) -> int:
        """N."""
        return len(self.trajectory_ids)

    @property
    def n_steps(self) -> int:
        """S."""
        return len(self.step_ids)

    @property
    def outcome_of_step(self) -> Floats:
        """[S] the outcome of each step's agent, in its original range; NaN if it is missing or its scoring failed.

        An agent without an outcome of its own has the trajectory's.
        """
        outcome_S = self.outcome[self.trajectory_of_step]
        for n, outcomes in enumerate(self.outcomes_of_agents):
            if outcomes:
                start, stop = np.searchsorted(self.trajectory_of_step, [n, n + 1])
                for s in range(start, stop):
                    score = outcomes.get(self.agent_names[self.agent_of_step[s]])
                    if score is not None:
                        outcome_S[s] = outcome_value(score)
        return outcome_S

    @property
    def scored(self) -> Bools:
        """[S, K] whether the score exists and is ok."""
        return np.equal(self.score_status, OK)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TrajectoryBatch:
        """Build a batch from trajectories.

        Raises BatchError if a field has the wrong type, if a step's index, parents or token columns are inconsistent,
        or if a score's range is empty.
        """
        if isinstance(trajectories, Trajectory):
            raise BatchError("expected a list of trajectories, got one; put it in a list")
        for trajectory in trajectories:
            check_trajectory(trajectory)
        ids = [trajectory.id for trajectory in trajectories]
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise BatchError(f"trajectory {twice}: ids must be unique, but this one stands twice in the batch")
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        group_of_trajectory, group_names = _codes(t.uid for t in trajectories)
        agent_of_step, agent_names = _codes(s.agent for s in steps)
        policy_of_step, policy_names = _codes(s.policy for s in steps)
        strata, stratum_names = _codes(s.stratum for s in steps if s.stratum is not None)
        stratum_of_step = np.full(len(steps), -1, dtype=np.int64)
        stratum_of_step[[s.stratum is not None for s in steps]] = strata

        lengths = np.array([len(t.steps) for t in trajectories], dtype=np.int64)
        first_step = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(lengths) else lengths
        trajectory_of_step = np.repeat(np.arange(len(trajectories)), lengths).astype(np.int64)
        is_answer = np.zeros(len(steps), dtype=np.bool_)
        edges: list[tuple[int, int]] = []
        for first, trajectory in zip(first_step, trajectories, strict=True):
            for step in trajectory.steps:
                edges.extend((first + step.index, first + parent) for parent in step.parents)
            for index in trajectory.answer_steps:
                is_answer[first + index] = True
        edge_array = np.asarray(edges, dtype=np.int64).reshape(-1, 2)

        score_names = tuple(dict.fromkeys(name for step in steps for name in step.scores))
        column = {name: k for k, name in enumerate(score_names)}
        scores = np.full((len(steps), len(score_names)), np.nan)
        score_status = np.full(scores.shape, NOT_MATCHED, dtype=np.int64)
        score_weights = np.zeros_like(scores)
        for s, step in enumerate(steps):
            for name, score in step.scores.items():
                scores[s, column[name]] = score.rescaled_over(step.response_mask)
                score_status[s, column[name]] = CODE_OF_STATUS[score.status]
                score_weights[s, column[name]] = score.weight

        def flat(name: str, dtype: Any) -> NDArray[Any]:
            try:
                return np.asarray([value for step in steps for value in getattr(step, name)], dtype=dtype)
            except OverflowError as error:
                raise BatchError(f"column {name}: expected whole numbers of 32 bits: {error}") from error

        def offsets(name: str) -> Ints:
            return np.concatenate([[0], np.cumsum([len(getattr(step, name)) for step in steps])]).astype(np.int64)

        return cls(
            trajectory_ids=tuple(ids),
            tasks=tuple(t.task for t in trajectories),
            group_names=group_names,
            group_of_trajectory=group_of_trajectory,
            outcome=np.array([outcome_value(t.outcome) for t in trajectories], dtype=np.float64),
            outcome_scores=tuple(t.outcome for t in trajectories),
            status_of_trajectory=np.array([TRAJECTORY_STATUSES.index(t.status) for t in trajectories], dtype=np.int64),
            answers=tuple(t.answer for t in trajectories),
            trajectory_info=tuple(t.info for t in trajectories),
            step_ids=tuple(s.id for s in steps),
            trajectory_of_step=trajectory_of_step,
            index_of_step=np.array([s.index for s in steps], dtype=np.int64),
            agent_names=agent_names,
            agent_of_step=agent_of_step,
            turn_of_step=np.array([s.turn for s in steps], dtype=np.int64),
            policy_names=policy_names,
            policy_of_step=policy_of_step,
            policy_version=np.array([s.policy_version for s in steps], dtype=np.int64),
            temperature_of_step=np.array([s.temperature for s in steps], dtype=np.float64),
            is_answer=is_answer,
            stratum_names=stratum_names,
            stratum_of_step=stratum_of_step,
            prompts=tuple(s.prompt for s in steps),
            responses=tuple(s.response for s in steps),
            step_info=tuple(s.info for s in steps),
            edge_child=edge_array[:, 0].copy(),
            edge_parent=edge_array[:, 1].copy(),
            score_names=score_names,
            scores=scores,
            score_status=score_status,
            score_weights=score_weights,
            raw_scores=tuple(s.scores for s in steps),
            prompt_offsets=offsets("prompt_ids"),
            prompt_ids=flat("prompt_ids", np.int32),
            token_offsets=offsets("response_ids"),
            response_ids=flat("response_ids", np.int32),
            response_mask=flat("response_mask", np.bool_),
            logprobs=flat("logprobs", np.float64),
            ref_logprobs=_ref_logprobs(steps),
            outcomes_of_agents=tuple(t.outcomes for t in trajectories) if any(t.outcomes for t in trajectories) else (),
            version_spans=tuple(s.version_spans for s in steps) if any(s.version_spans for s in steps) else (),
            branch_of=tuple(s.branch_of for s in steps) if any(s.branch_of is not None for s in steps) else (),
        )

    @classmethod
    def from_arrays(
        cls,
        *,
        trajectory_of_step: Ints,
        group_of_trajectory: Ints,
        outcome: Floats,
        outcome_range: tuple[float, float] = (0.0, 1.0),
        agent_of_step: Ints | None = None,
        agent_names: Sequence[str] | None = None,
        scores: Floats | None = None,
        score_names: Sequence[str] | None = None,
        edges: Ints | None = None,
        is_answer: Bools | None = None,
        token_offsets: Ints | None = None,
        response_mask: Bools | None = None,
        prompts: Sequence[str] | None = None,
    ) -> TrajectoryBatch:
        """Build a batch from the arrays of another trainer, to assign credit without rollouts of this package.

        `trajectory_of_step`: [S] non-decreasing indices from 0 to N - 1. `group_of_trajectory`: [N] index of the task.
        `outcome`: [N] within `outcome_range`, NaN if unknown. `agent_of_step`: [S] index into `agent_names`; default:
        one agent. `scores`: [S, K] in [0, 1], NaN where a function gave no score. `edges`: [E, 2] child and parent
        step; default: each step has the one before it as its parent. `is_answer`: [S]; default: the last step of each
        trajectory. `token_offsets`: [S + 1] bounds of the steps in `response_mask` [T], which is true where the policy
        sampled the token; default: no tokens. `prompts`: [S] texts, read by `group_by: task_agent_state`.

        Raises BatchError for arrays that do not fit together.
        """
        trajectory_S = np.asarray(trajectory_of_step, dtype=np.int64)
        group_N, outcome_N = np.asarray(group_of_trajectory, dtype=np.int64), np.asarray(outcome, dtype=np.float64)
        n_steps, n = len(trajectory_S), len(outcome_N)
        if n_steps and (np.any(np.diff(trajectory_S) < 0) or trajectory_S[0] < 0 or trajectory_S[-1] >= n):
            raise BatchError(f"trajectory_of_step: expected non-decreasing indices from 0 to {n - 1}")
        agent_S = np.zeros(n_steps, dtype=np.int64) if agent_of_step is None else np.asarray(agent_of_step, np.int64)
        value_SK = np.empty((n_steps, 0)) if scores is None else np.asarray(scores, dtype=np.float64)
        offsets = np.zeros(n_steps + 1, np.int64) if token_offsets is None else np.asarray(token_offsets, np.int64)
        mask_T = np.zeros(0, np.bool_) if response_mask is None else np.asarray(response_mask, dtype=np.bool_)
        for name, got, expected in (
            ("group_of_trajectory", group_N.shape, (n,)),
            ("agent_of_step", agent_S.shape, (n_steps,)),
            ("scores", value_SK.shape, (n_steps, *value_SK.shape[1:2])),
            ("token_offsets", offsets.shape, (n_steps + 1,)),
            ("response_mask", mask_T.shape, (int(offsets[-1]),)),
        ):
            if got != expected:
                raise BatchError(f"{name}: expected shape {expected}, got {got}")
        low, high = outcome_range
        if np.any((outcome_N < low) | (outcome_N > high)):
            raise BatchError(f"outcome: expected values in outcome_range {outcome_range}")
        index_S = np.arange(n_steps) - np.searchsorted(trajectory_S, trajectory_S)
        last_S = np.append(np.diff(trajectory_S) > 0, True)[:n_steps]
        if edges is None:
            child_E = np.flatnonzero(index_S > 0)
            edges = np.stack([child_E, child_E - 1], axis=1)
        edges = np.asarray(edges, dtype=np.int64).reshape(-1, 2)
        names = tuple(score_names or (f"score_{k}" for k in range(value_SK.shape[1])))
        groups, code_N = np.unique(group_N, return_inverse=True)
        status_SK = np.where(np.isnan(value_SK), NOT_MATCHED, OK)
        return cls(
            trajectory_ids=tuple(map(str, range(n))),
            tasks=(Task("arrays", (), None),) * n,
            group_names=tuple(map(str, groups.tolist())),
            group_of_trajectory=code_N.astype(np.int64),
            outcome=outcome_N,
            outcome_scores=tuple(
                None if math.isnan(value) else Score(value, outcome_range) for value in outcome_N.tolist()
            ),
            status_of_trajectory=np.zeros(n, dtype=np.int64),
            answers=(None,) * n,
            trajectory_info=tuple({} for _ in range(n)),
            step_ids=tuple(f"{t}/{i}" for t, i in zip(trajectory_S.tolist(), index_S.tolist(), strict=True)),
            trajectory_of_step=trajectory_S,
            index_of_step=index_S,
            agent_names=tuple(agent_names or (f"agent_{a}" for a in range(int(agent_S.max(initial=0)) + 1))),
            agent_of_step=agent_S,
            turn_of_step=_turns(trajectory_S, agent_S),
            policy_names=("default",),
            policy_of_step=np.zeros(n_steps, dtype=np.int64),
            policy_version=np.zeros(n_steps, dtype=np.int64),
            temperature_of_step=np.ones(n_steps),
            is_answer=last_S if is_answer is None else np.asarray(is_answer, dtype=np.bool_),
            stratum_names=(),
            stratum_of_step=np.full(n_steps, -1, dtype=np.int64),
            prompts=tuple(prompts or ("",) * n_steps),
            responses=("",) * n_steps,
            step_info=tuple({} for _ in range(n_steps)),
            edge_child=edges[:, 0].copy(),
            edge_parent=edges[:, 1].copy(),
            score_names=names,
            scores=value_SK,
            score_status=status_SK.astype(np.int64),
            score_weights=np.where(status_SK == OK, 1.0, 0.0),
            raw_scores=tuple(
                {name: Score(value) for name, value in zip(names, values, strict=True) if not math.isnan(value)}
                for values in value_SK.tolist()
            ),
            prompt_offsets=np.zeros(n_steps + 1, dtype=np.int64),
            prompt_ids=np.zeros(0, dtype=np.int32),
            token_offsets=offsets,
            response_ids=np.zeros(len(mask_T), dtype=np.int32),
            response_mask=mask_T,
            logprobs=np.zeros(len(mask_T)),
        )

    def to_trajectories(self) -> list[Trajectory]:
        """Convert the columns back to trajectories."""
        trajectories = []
        parents: list[list[int]] = [[] for _ in range(self.n_steps)]
        for child, parent in zip(self.edge_child.tolist(), self.edge_parent.tolist(), strict=True):
            parents[child].append(int(self.index_of_step[parent]))
        for n in range(self.n_trajectories):
            start, stop = np.searchsorted(self.trajectory_of_step, [n, n + 1])
            trajectories.append(
                Trajectory(
                    id=self.trajectory_ids[n],
                    uid=self.group_names[self.group_of_trajectory[n]],
                    task=self.tasks[n],
                    steps=[self._step(s, tuple(parents[s])) for s in range(start, stop)],
                    answer_steps=tuple(int(i) for i in np.flatnonzero(self.is_answer[start:stop])),
                    answer=self.answers[n],
                    outcome=self.outcome_scores[n],
                    outcomes=dict(self.outcomes_of_agents[n]) if self.outcomes_of_agents else {},
                    status=TRAJECTORY_STATUSES[self.status_of_trajectory[n]],
                    info=self.trajectory_info[n],
                )
            )
        return trajectories

    def _step(self, s: int, parents: tuple[int, ...]) -> Step:
        prompt = slice(self.prompt_offsets[s], self.prompt_offsets[s + 1])
        response = slice(self.token_offsets[s], self.token_offsets[s + 1])
        stratum = int(self.stratum_of_step[s])
        ref_logprobs = self.ref_logprobs[response] if self.ref_logprobs.size else self.ref_logprobs
        return Step(
            id=self.step_ids[s],
            trajectory_id=self.trajectory_ids[self.trajectory_of_step[s]],
            index=int(self.index_of_step[s]),
            agent=self.agent_names[self.agent_of_step[s]],
            turn=int(self.turn_of_step[s]),
            parents=parents,
            prompt=self.prompts[s],
            response=self.responses[s],
            prompt_ids=tuple(self.prompt_ids[prompt].tolist()),
            response_ids=tuple(self.response_ids[response].tolist()),
            response_mask=tuple(self.response_mask[response].astype(int).tolist()),
            logprobs=tuple(self.logprobs[response].tolist()),
            temperature=float(self.temperature_of_step[s]),
            policy=self.policy_names[self.policy_of_step[s]],
            policy_version=int(self.policy_version[s]),
            version_spans=self.version_spans[s] if self.version_spans else (),
            branch_of=self.branch_of[s] if self.branch_of else None,
            scores=self.raw_scores[s],
            stratum=self.stratum_names[stratum] if stratum >= 0 else None,
            info=self.step_info[s],
            ref_logprobs=() if np.isnan(ref_logprobs).any() else tuple(ref_logprobs.tolist()),
        )


def _ref_logprobs(steps: Sequence[Step]) -> Floats:
    if not any(step.ref_logprobs for step in steps):
        return np.zeros(0)
    return np.concatenate(
        [np.asarray(step.ref_logprobs or (np.nan,) * len(step.response_ids), dtype=np.float64) for step in steps]
    )
