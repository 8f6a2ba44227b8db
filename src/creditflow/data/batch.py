"""TrajectoryBatch: trajectories in columns, the input of credit, engines and run folders.

Shape suffixes: N trajectories, S steps, E edges, T response tokens, P prompt tokens, K reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from creditflow.data.assembly import Lists, Places, codes_of, columns_of_lists, columns_of_records, lists_of_records
from creditflow.data.columns import Columns, column_specs
from creditflow.data.trajectory import (
    CODE_OF_STATUS,
    NOT_MATCHED,
    OK,
    Bools,
    Floats,
    Ints,
    Score,
    Step,
    Task,
    Trajectory,
    clip_rounding,
)
from creditflow.data.validation import INDICES, as_column, check_range, check_trajectory, shown, validate
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


@dataclass(frozen=True, eq=False)
class TrajectoryBatch(Columns):
    """N trajectories with S steps in columns, the input of credit, engine and ledger.

    Steps are grouped by trajectory, in the order in which they were made. Parents therefore come before children, and
    any propagation takes one reverse pass over the edges.
    """

    @property
    def scored(self) -> Bools:
        """[S, K] whether the score exists and is ok."""
        return np.equal(self.score_status, OK)

    @cached_property
    def sampled_of_step(self) -> Ints:
        """[S] the number of sampled response tokens."""
        others = np.flatnonzero(~self.response_mask)  # usually few, so that this is faster than sums
        return np.diff(self.token_offsets) - np.diff(np.searchsorted(others, self.token_offsets))

    @cached_property
    def parents_of_step(self) -> Ints:
        """[S] the number of parents."""
        return np.bincount(self.edge_child, minlength=self.n_steps)

    @cached_property
    def share_of_step(self) -> Floats:
        """[S] the share of the credit that the step passes which each parent gets: it is divided evenly."""
        return 1.0 / np.maximum(self.parents_of_step, 1)

    @cached_property
    def is_answer_step(self) -> Bools:
        """[S] the answer steps: those named by the workflow, else the last of the trajectory."""
        trajectory_S = self.trajectory_of_step
        named_N = np.bincount(trajectory_S[self.is_answer], minlength=self.n_trajectories) > 0
        last_S = np.append(trajectory_S[1:] != trajectory_S[:-1], True)
        answer_S: Bools = self.is_answer | (last_S & ~named_N[trajectory_S])
        return answer_S

    @cached_property
    def answers_of_step(self) -> Ints:
        """[S] the number of answer steps of the step's trajectory, at least 1."""
        answers_N = np.bincount(self.trajectory_of_step[self.is_answer_step], minlength=self.n_trajectories)
        return np.maximum(answers_N, 1)[self.trajectory_of_step]

    def sampled_by(self, *policies: str) -> Bools:
        """[S] whether a policy of these names generated the step."""
        return np.isin(self.policy_names, policies)[self.policy_of_step]

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> TrajectoryBatch:
        """Build a batch from trajectories. Raises BatchError for fields of the wrong type, and as `validate` does."""
        if not isinstance(trajectories, Iterable):
            raise BatchError(f"expected a list of trajectories, got {shown(trajectories)}")
        trajectories = list(trajectories)
        for trajectory in trajectories:
            check_trajectory(trajectory)
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        trajectory_S = np.repeat(np.arange(len(trajectories)), [len(trajectory.steps) for trajectory in trajectories])
        places = Places([t.id for t in trajectories], [s.id for s in steps], trajectory_S)
        scores_S = np.array([len(step.scores) for step in steps], dtype=np.int64)
        scored = [(step, score) for step in steps for score in step.scores.values()]
        codes, score_names = codes_of(name for step in steps for name in step.scores)
        values = np.array([score.rescaled_over(step.response_mask) for step, score in scored], dtype=np.float64)
        status = np.array([CODE_OF_STATUS[score.status] for _, score in scored], dtype=np.int64)
        weights = np.array([score.weight for _, score in scored], dtype=np.float64)
        lists = {
            "parents": Lists.join([s.parents for s in steps], np.int64, places.field("parents"), INDICES),
            **lists_of_records(steps, places),
            "score_names": Lists(scores_S, codes),
            "score_values": Lists(scores_S, values),
            "score_status": Lists(scores_S, status),
            "score_weights": Lists(scores_S, weights),
        }
        answers = [trajectory.answer_steps for trajectory in trajectories]
        answer_steps = Lists.join(
            answers, np.int64, lambda n: f"trajectory {places.trajectory_ids[n]}: answer_steps", INDICES
        )
        batch = cls(
            **columns_of_records("N", trajectories, places),
            **columns_of_records("S", steps, places),
            **columns_of_lists(places, lists, answer_steps, score_names),
            outcome=np.array([outcome_value(t.outcome) for t in trajectories], dtype=np.float64),
            trajectory_of_step=trajectory_S,
        )
        validate(batch)
        return batch

    @classmethod
    def from_arrays(
        cls,
        *,
        trajectory_of_step: Ints,
        group_of_trajectory: NDArray[Any] | Sequence[int] | Sequence[str],
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

        `trajectory_of_step`: [S] non-decreasing indices from 0 to N - 1, none left out. `group_of_trajectory`: [N]
        the task, as a number or a text (`uid`). `outcome`: [N] within `outcome_range`, NaN if unknown. `agent_of_step`:
        [S] index into `agent_names`; default: one agent. `scores`: [S, K] in [0, 1], NaN where a function gave no
        score. `edges`: [E, 2] child and parent step; default: each step has the one before it as its parent.
        `is_answer`: [S]; default: the last step of each trajectory. `token_offsets`: [S + 1] bounds of the steps in
        `response_mask` [T], which is true where the policy sampled the token; default: no tokens. `prompts`: [S] texts,
        read by `group_by: task_agent_state`.

        Raises BatchError for arrays that do not fit together.
        """
        trajectory_S = as_column("trajectory_of_step", trajectory_of_step, np.int64)
        group_N = np.asarray(group_of_trajectory, dtype=object)
        if group_N.ndim != 1 or not all(isinstance(group, str) for group in group_N):
            group_N = as_column("group_of_trajectory", group_of_trajectory, np.int64, words="whole numbers or texts")
        outcome_N = as_column("outcome", outcome, np.float64)
        n_steps, n = len(trajectory_S), len(outcome_N)
        if np.any(np.diff(trajectory_S) < 0) or not np.array_equal(np.unique(trajectory_S), np.arange(n)):
            raise BatchError(f"trajectory_of_step: expected non-decreasing indices from 0 to {n - 1}, none left out")
        check_range("outcome_range", Score(0.0, outcome_range))
        low, high = outcome_range
        if np.any((outcome_N < low) | (outcome_N > high)):
            raise BatchError(f"outcome: expected values in outcome_range {outcome_range}")
        zeros_S = np.zeros(n_steps, dtype=np.int64)
        agent_S = zeros_S if agent_of_step is None else as_column("agent_of_step", agent_of_step, np.int64)
        value_SK = np.empty((n_steps, 0)) if scores is None else as_column("scores", scores, np.float64, ndim=2)
        index_S = np.arange(n_steps) - np.searchsorted(trajectory_S, trajectory_S)
        child_E = np.flatnonzero(index_S > 0)
        pair_E2 = (
            np.stack([child_E, child_E - 1], axis=1) if edges is None else as_column("edges", edges, np.int64, ndim=2)
        )
        if pair_E2.size and pair_E2.shape[1] != 2:
            raise BatchError(f"edges: expected shape ({len(pair_E2)}, 2), got {pair_E2.shape}")
        child_E, parent_E = pair_E2.reshape(-1, 2).T.copy()
        names = tuple((f"score_{k}" for k in range(value_SK.shape[1])) if score_names is None else score_names)
        groups, code_N = np.unique(group_N, return_inverse=True)
        known_SK = ~np.isnan(value_SK)
        if n and np.isnan(outcome_N).all() and not known_SK.any():
            raise BatchError("outcome: expected a known value of at least one trajectory, or scores, got NaN for all")
        last_S = np.append(np.diff(trajectory_S) > 0, True)[:n_steps]
        offsets = np.zeros(n_steps + 1, np.int64) if token_offsets is None else token_offsets
        mask_T = as_column("response_mask", () if response_mask is None else response_mask, np.bool_)
        batch = cls(
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
            agent_names=tuple(
                (f"agent_{a}" for a in range(int(agent_S.max(initial=0)) + 1)) if agent_names is None else agent_names
            ),
            agent_of_step=agent_S,
            turn_of_step=zeros_S if agent_S.shape != zeros_S.shape else _turns(trajectory_S, agent_S),
            policy_names=("default",),
            policy_of_step=zeros_S,
            policy_version=zeros_S,
            temperature_of_step=np.ones(n_steps),
            is_answer=last_S if is_answer is None else as_column("is_answer", is_answer, np.bool_),
            stratum_names=(),
            stratum_of_step=zeros_S - 1,
            prompts=("",) * n_steps if prompts is None else tuple(prompts),
            responses=("",) * n_steps,
            step_info=tuple({} for _ in range(n_steps)),
            edge_child=child_E,
            edge_parent=parent_E,
            score_names=names,
            scores=value_SK,
            score_status=np.where(known_SK, OK, NOT_MATCHED),
            score_weights=known_SK.astype(np.float64),
            raw_scores=tuple(
                {name: Score(value) for name, value in zip(names, values, strict=False) if not math.isnan(value)}
                for values in value_SK.tolist()
            ),
            prompt_offsets=np.zeros(n_steps + 1, dtype=np.int64),
            prompt_ids=np.zeros(0, dtype=np.int32),
            token_offsets=as_column("token_offsets", offsets, np.int64),
            response_ids=np.zeros(len(mask_T), dtype=np.int32),
            response_mask=mask_T,
            logprobs=np.zeros(len(mask_T)),
        )
        validate(batch)
        return batch

    def step_infos_with(self, keys: AbstractSet[str]) -> dict[int, Mapping[str, Any]]:
        """The infos of the steps that have one of `keys`, by the index of the step."""
        return {s: info for s, info in enumerate(self.step_info) if not keys.isdisjoint(info)}

    def to_trajectories(self) -> list[Trajectory]:
        """Convert the columns back to trajectories."""
        parents: list[list[int]] = [[] for _ in range(self.n_steps)]
        for child, parent in zip(self.edge_child.tolist(), self.edge_parent.tolist(), strict=True):
            parents[child].append(int(self.index_of_step[parent]))
        trajectories = []
        for n in range(self.n_trajectories):
            start, stop = np.searchsorted(self.trajectory_of_step, [n, n + 1])
            trajectory = Trajectory(
                **self._record("N", n), answer_steps=tuple(np.flatnonzero(self.is_answer[start:stop]).tolist())
            )
            for s in range(start, stop):
                step = {**self._record("S", s), **self._tokens("P", self.prompt_offsets, s)}
                step |= self._tokens("T", self.token_offsets, s)
                trajectory.steps.append(Step(**step, trajectory_id=trajectory.id, parents=tuple(parents[s])))
            trajectories.append(trajectory)
        return trajectories

    def _record(self, shape: str, i: int) -> dict[str, Any]:
        """The fields of trajectory (shape N) or step (S) `i`."""
        values = {}
        for spec in column_specs():
            column = getattr(self, spec.name)
            if spec.per.record and spec.per.shape == shape and len(column):
                value = column[i] if spec.dtype is None else column[i].item()
                if spec.per.into:
                    value = spec.per.names(self)[value] if value >= 0 else None
                values[spec.per.record] = value
        return values

    def _tokens(self, shape: str, offsets: Ints, s: int) -> dict[str, tuple[Any, ...]]:
        """The fields of step `s` with one value per token; empty where the values are missing."""
        bounds, values = slice(offsets[s], offsets[s + 1]), {}
        for spec in column_specs():
            if spec.per.record and spec.per.shape == shape and (column := getattr(self, spec.name)).size:
                tokens = column[bounds] if column.dtype != np.bool_ else column[bounds].astype(np.int8)
                missing = spec.per.optional and np.isnan(tokens).any()
                values[spec.per.record] = () if missing else tuple(tokens.tolist())
        return values
