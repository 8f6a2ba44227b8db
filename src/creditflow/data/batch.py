"""TrajectoryBatch: trajectories in columns, the input of credit, engines and run folders.

Shape suffixes: N trajectories, S steps, E edges, T response tokens, P prompt tokens, K reward functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from creditflow.data import arrays
from creditflow.data.assembly import Lists, Places, codes_of, columns_of_lists, columns_of_records, lists_of_records
from creditflow.data.columns import Columns, Made, column_specs
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
    outcome_value,
)
from creditflow.data.validation import INDICES, as_column, check_trajectory, shown, validate
from creditflow.errors import BatchError


def _turns(trajectory_S: Ints, agent_S: Ints) -> Ints:
    """[S] the number of earlier steps of the same agent in the same trajectory."""
    pair_S = trajectory_S * (int(agent_S.max(initial=0)) + 1) + agent_S
    order = np.argsort(pair_S, kind="stable")
    ordered = pair_S[order]
    turn_S = np.empty_like(order)
    turn_S[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return turn_S


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
        trajectory_of_step: ArrayLike,
        group_of_trajectory: ArrayLike,
        outcome: ArrayLike,
        outcome_range: tuple[float, float] = (0.0, 1.0),
        agent_of_step: ArrayLike | None = None,
        agent_names: Sequence[str] | None = None,
        scores: ArrayLike | None = None,
        score_names: Sequence[str] | None = None,
        edges: ArrayLike | None = None,
        is_answer: ArrayLike | None = None,
        token_offsets: ArrayLike | None = None,
        response_mask: ArrayLike | None = None,
        prompts: Sequence[str] | None = None,
    ) -> TrajectoryBatch:
        """Build a batch from the arrays of another trainer, to assign credit without rollouts of this package.

        An array may also be a list, or a tensor on the CPU.

        `trajectory_of_step`: [S] non-decreasing indices from 0 to N - 1, none left out. `group_of_trajectory`: [N]
        the task, as a number or a text (`uid`). `outcome`: [N] within `outcome_range`, NaN if unknown. `agent_of_step`:
        [S] names, or indices into `agent_names`; default: one agent. `scores`: [S] or [S, K] in [0, 1], NaN where a
        function gave no score. `edges`: [E, 2] child and parent, as indices of steps; default: each step has the one
        before it as its parent. `is_answer`: [S]; default: the last step of each trajectory. `response_mask`: true
        where the policy sampled the token: [S, L], a row for each step, or [T] with the bounds of the steps in
        `token_offsets` [S + 1]; default: no tokens. `prompts`: [S] texts, read by `group_by: task_agent_state`.

        Raises BatchError for arrays that do not fit together.
        """
        outcome_N = arrays.outcomes_of(outcome, outcome_range)
        n = len(outcome_N)
        trajectory_S, index_S = arrays.trajectories_of(trajectory_of_step, n)
        group_N, group_names = arrays.groups_of(group_of_trajectory)
        n_steps, zeros_S = len(trajectory_S), np.zeros_like(trajectory_S)
        agent_S, agents = arrays.agents_of(agent_of_step, arrays.texts_of(agent_names, "agent_names"), n_steps)
        value_SK = arrays.scores_of(scores, n_steps)
        known_SK = ~np.isnan(value_SK)
        if n and np.isnan(outcome_N).all() and not known_SK.any():
            raise BatchError("outcome: expected a known value of at least one trajectory, or scores, got NaN for all")
        functions = arrays.texts_of(score_names, "score_names") or [f"score_{k}" for k in range(value_SK.shape[1])]
        child_E, parent_E = arrays.edges_of(edges, index_S)
        mask_T, token_offsets = arrays.tokens_of(response_mask, token_offsets, n_steps)

        def outcome_score(i: int) -> Score | None:
            return None if np.isnan(outcome_N[i]) else Score(outcome_N[i].item(), outcome_range)

        def scores_by_name(s: int) -> dict[str, Score]:
            return {functions[k]: Score(value_SK[s, k].item()) for k in np.flatnonzero(known_SK[s]).tolist()}

        batch = cls(
            trajectory_ids=tuple(map(str, range(n))),
            tasks=(Task("arrays", (), None),) * n,
            group_names=group_names,
            group_of_trajectory=group_N,
            outcome=outcome_N,
            outcome_scores=Made(n, outcome_score),
            status_of_trajectory=np.zeros(n, dtype=np.int64),
            answers=(None,) * n,
            trajectory_info=Made(n, lambda _: {}),
            step_ids=tuple(map("{}/{}".format, trajectory_S.tolist(), index_S.tolist())),
            trajectory_of_step=trajectory_S,
            index_of_step=index_S,
            agent_names=tuple(agents),
            agent_of_step=agent_S,
            turn_of_step=zeros_S if agent_S.shape != zeros_S.shape else _turns(trajectory_S, agent_S),
            policy_names=("default",),
            policy_of_step=zeros_S,
            policy_version=zeros_S,
            temperature_of_step=np.ones(n_steps),
            is_answer=zeros_S > 0 if is_answer is None else as_column("is_answer", is_answer, np.bool_),
            stratum_names=(),
            stratum_of_step=zeros_S - 1,
            prompts=tuple(arrays.texts_of(prompts, "prompts") or ("",) * n_steps),
            responses=("",) * n_steps,
            step_info=Made(n_steps, lambda _: {}),
            edge_child=child_E,
            edge_parent=parent_E,
            score_names=tuple(functions),
            scores=value_SK,
            score_status=np.where(known_SK, OK, NOT_MATCHED),
            score_weights=known_SK.astype(np.float64),
            raw_scores=Made(n_steps, scores_by_name),
            prompt_offsets=np.zeros(n_steps + 1, dtype=np.int64),
            prompt_ids=np.zeros(0, dtype=np.int32),
            token_offsets=token_offsets,
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
