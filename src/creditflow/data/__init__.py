"""The data types of creditflow: Task, Score, Step, Trajectory, and TrajectoryBatch, the same in columns.

This module is independent of models, rewards and credit. It imports pyarrow only to read or write a file.

Shape suffixes: N trajectories, S steps, E edges, T response tokens, P prompt tokens, K reward functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from creditflow.errors import BatchError, ScoreRangeError, did_you_mean

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
TokenIds = NDArray[np.int32]
Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""

ScoreStatus = Literal["ok", "failed", "timeout"]
TrajectoryStatus = Literal["ok", "failed", "truncated"]
TRAJECTORY_STATUSES: tuple[TrajectoryStatus, ...] = ("ok", "failed", "truncated")

NOT_MATCHED, OK, FAILED, TIMEOUT = 0, 1, 2, 3
"""Codes of `TrajectoryBatch.score_status`. NOT_MATCHED: the function did not match the step."""
RIGHT = 1.0 - 1e-9
"""The lowest rescaled score in [0, 1] at which a step or an answer counts as right."""
RANGE_TOLERANCE = 1e-6
"""Tolerance for rounding, as a share of a range's width: a value this far beyond a bound counts as the bound."""
CODE_OF_STATUS: dict[ScoreStatus, int] = {"ok": OK, "failed": FAILED, "timeout": TIMEOUT}


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set, with verl's columns."""

    data_source: str
    prompt: tuple[Message, ...]
    """Chat messages; `text` is the content of the last one, the only one that most workflows need."""
    ground_truth: Any
    """verl's `reward_model.ground_truth`, any JSON value."""
    extra_info: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The content of the last message; empty for an empty prompt."""
        return str(self.prompt[-1]["content"]) if self.prompt else ""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward function for one step, or of the outcome function for one trajectory."""

    value: float | tuple[float, ...]
    """One number, or one per response token. Meaningless unless `status` is ok."""
    range: tuple[float, float] = (0.0, 1.0)
    """Range of the function's values; gates and credit use the value rescaled from it to [0, 1]."""
    weight: float = 1.0
    """Weight in the step's weighted mean. 0: measured and reported, but never part of credit."""
    status: ScoreStatus = "ok"
    reason: str = ""
    seconds: float = 0.0
    version: str = ""
    """A hash of the function's source and arguments."""

    @property
    def rescaled(self) -> float:
        """The (mean) value, rescaled from `range` to [0, 1]; NaN if the scoring failed."""
        return self.rescaled_over(())

    def rescaled_over(self, response_mask: Sequence[int]) -> float:
        """Like `rescaled`, but the mean of token values covers only the tokens that the policy sampled, if any."""
        if self.status != "ok":
            return float("nan")
        value = self.value
        low, high = self.range
        if isinstance(value, tuple):
            if len(value) == len(response_mask) and any(response_mask):
                value = tuple(v for v, sampled in zip(value, response_mask, strict=True) if sampled)
            if value and not low <= min(value) <= max(value) <= high:
                value = tuple(clip_rounding(float(v), low, high) for v in value)
            value = float(np.mean(value))
        return (clip_rounding(float(value), low, high) - low) / (high - low)


def _value(outcome: Score) -> float:
    return cast(float, outcome.value) if outcome.status == "ok" else math.nan


def clip_rounding(value: float, low: float, high: float) -> float:
    """`value`, moved to the bound if it is beyond it only by rounding (`RANGE_TOLERANCE`)."""
    if low <= value <= high:
        return value
    slack = RANGE_TOLERANCE * (high - low)
    if low - slack <= value <= high + slack:
        return low if value < low else high
    return value


def into_range(value: float, allowed: tuple[float, float]) -> float:
    """`value`, clipped to a bound if it is beyond it only by rounding.

    Raises ScoreRangeError for a value further out and for NaN; the message has all digits.
    """
    low, high = allowed
    clipped = clip_rounding(value, low, high)
    if not low <= clipped <= high:
        raise ScoreRangeError(f"expected a value in [{all_digits(low)}, {all_digits(high)}], got {all_digits(value)}")
    return clipped


def all_digits(number: float) -> str:
    """The shortest decimal text that reads back as the same float64; whole numbers without `.0`."""
    return repr(float(number)).removesuffix(".0")


@dataclass(slots=True)
class Step:
    """One call of one agent: a prompt, a response, and later its scores."""

    id: str
    trajectory_id: str
    index: int
    """Position in the trajectory, from 0."""
    agent: str
    turn: int
    """Number of earlier steps of this agent in this trajectory."""
    parents: tuple[int, ...]
    """Indices of the steps whose responses this prompt used; each smaller than `index`."""
    prompt: str
    response: str
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[int, ...] = ()
    """1 where the policy sampled the token, 0 where a tool or the environment wrote it."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probability of each response token when it was sampled; 0 where the mask is 0."""
    temperature: float = 1.0
    """Sampling temperature, at which `logprobs` hold. 0: greedy decoding; no token counts as sampled (mask 0)."""
    policy: str = "default"
    policy_version: int = 0
    """Number of updates of the policy before it sampled this response."""
    scores: dict[str, Score] = field(default_factory=dict)
    stratum: str | None = None
    """A label, computed from the prompt alone, that splits groups (`algorithm.strata`)."""
    info: dict[str, Any] = field(default_factory=dict)
    ref_logprobs: tuple[float, ...] = ()
    """Natural log-probability of each response token under the policy's frozen reference, whatever its mask; at the
    temperature of `logprobs` (at 1 if that is 0). Empty if the engine provides none."""


@dataclass(slots=True)
class Trajectory:
    """The record of one rollout. The trajectories of a task share `uid` and form its group."""

    id: str
    uid: str
    task: Task
    steps: list[Step] = field(default_factory=list)
    answer_steps: tuple[int, ...] = ()
    """Indices of the steps that produced the answer; the last step if the workflow named none."""
    answer: str | None = None
    """The workflow's return value."""
    outcome: Score | None = None
    """The global reward; None before scoring, or without an outcome function."""
    status: TrajectoryStatus = "ok"
    info: dict[str, Any] = field(default_factory=dict)


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

    @property
    def n_trajectories(self) -> int:
        """N."""
        return len(self.trajectory_ids)

    @property
    def n_steps(self) -> int:
        """S."""
        return len(self.step_ids)

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
            _check_trajectory(trajectory)
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
            outcome=np.array(
                [clip_rounding(_value(t.outcome), *t.outcome.range) if t.outcome else np.nan for t in trajectories],
                dtype=np.float64,
            ),
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
            scores=self.raw_scores[s],
            stratum=self.stratum_names[stratum] if stratum >= 0 else None,
            info=self.step_info[s],
            ref_logprobs=() if np.isnan(ref_logprobs).any() else tuple(ref_logprobs.tolist()),
        )

    def write_parquet(self, path: Path | str, step_columns: dict[str, NDArray[Any]] | None = None) -> None:
        """Write one row per step, and one per trajectory without steps, with the columns of `table.schema`.

        A batch built from a table is written as that table. `step_columns`: further [S] columns for readers of the
        file, such as an assignment's credit; they are not part of the batch. The file is written in place; for a
        crash-safe write see `ledger`.
        """
        from creditflow.data import table

        table.write(self, path, step_columns)

    @classmethod
    def read_parquet(cls, path: Path | str) -> TrajectoryBatch:
        """Read a batch that `write_parquet` wrote, ignoring further columns.

        Texts and JSON are decoded on access. Files from before the column `ref_logprobs` have none. Raises BatchError
        for a file of another kind or with inconsistent columns.
        """
        from creditflow.data import table

        return table.read(path)


def _check_trajectory(trajectory: Trajectory) -> None:
    if not isinstance(trajectory, Trajectory):
        raise BatchError(f"expected a Trajectory, got {_shown(trajectory)}")
    _check_status(f"trajectory {trajectory.id}", trajectory.status, TRAJECTORY_STATUSES)
    _check_indices(f"trajectory {trajectory.id}: answer_steps", trajectory.answer_steps)
    for index, step in enumerate(trajectory.steps):
        where = f"step {step.id} of trajectory {trajectory.id}"
        if step.index != index:
            raise BatchError(f"{where}: expected index {index}, its place in the trajectory, got {step.index}")
        if step.trajectory_id != trajectory.id:
            raise BatchError(f"{where}: says that it belongs to trajectory {step.trajectory_id}")
        _check_fields(where, step)
        if len(set(step.parents)) != len(step.parents):
            raise BatchError(f"{where}: a parent stands twice in {step.parents}")
        if any(not 0 <= parent < index for parent in step.parents):
            raise BatchError(f"{where}: parents must come before it (0 to {index - 1}), got {step.parents}")
        n_tokens = len(step.response_ids)
        _check_tokens(where, step)
        for name, score in step.scores.items():
            _check_score(f"{where}: scores[{name!r}]", score)
            if isinstance(score.value, tuple) and score.status == "ok" and len(score.value) != n_tokens:
                raise BatchError(f"{where}: score {name} has {len(score.value)} values for {n_tokens} response tokens")
            check_range(f"{where}, score {name}", score)
    if list(trajectory.answer_steps) != sorted(set(trajectory.answer_steps)):
        raise BatchError(f"trajectory {trajectory.id}: answer steps must rise, got {trajectory.answer_steps}")
    if trajectory.outcome is not None:
        _check_outcome(trajectory.id, trajectory.outcome)
    if any(not 0 <= index < len(trajectory.steps) for index in trajectory.answer_steps):
        raise BatchError(
            f"trajectory {trajectory.id}: answer steps {trajectory.answer_steps}, but it has {len(trajectory.steps)}"
        )


def _check_outcome(trajectory_id: str, outcome: Score) -> None:
    _check_score(f"trajectory {trajectory_id}: outcome", outcome)
    if isinstance(outcome.value, tuple):
        raise BatchError(f"trajectory {trajectory_id}: expected one number as outcome, got {outcome.value}")
    check_range(f"trajectory {trajectory_id}, outcome", outcome)


def _check_fields(where: str, step: Step) -> None:
    for name in ("id", "agent", "policy", "prompt", "response"):
        if not isinstance(getattr(step, name), str):
            raise BatchError(f"{where}: {name}: expected a text, got {_shown(getattr(step, name))}")
    _check_indices(f"{where}: parents", step.parents)
    if not isinstance(step.scores, Mapping):
        raise BatchError(f"{where}: scores: expected a dict of Score by function, got {_shown(step.scores)}")


def _check_indices(where: str, indices: object) -> None:
    if isinstance(indices, str) or not isinstance(indices, Iterable):
        raise BatchError(f"{where}: expected a tuple of indices of steps such as (0,), got {_shown(indices)}")
    for one in indices:
        if type(one) is not int and not isinstance(one, Integral):
            raise BatchError(f"{where}: expected indices of steps (whole numbers), got {_shown(one)}")


def _check_score(where: str, score: object) -> None:
    if not isinstance(score, Score):
        raise BatchError(f"{where}: expected a Score, got {_shown(score)}; write Score(value)")
    _check_status(where, score.status, CODE_OF_STATUS)
    if score.status != "ok":
        return
    for one in score.value if isinstance(score.value, tuple) else (score.value,):
        if type(one) is not float and not isinstance(one, Real):
            raise BatchError(f"{where}: expected a number, or a tuple with one per response token, got {_shown(one)}")


def _check_status(where: str, status: str, known: Iterable[str]) -> None:
    if status not in known:
        choice = " or ".join(map(repr, known))
        raise BatchError(f"{where}: status: expected {choice}, got {status!r}{did_you_mean(status, known)}")


def _shown(value: object) -> str:
    """Type and short `repr` of a value."""
    return f"{type(value).__name__} {repr(value)[:60]}"


def _check_tokens(where: str, step: Step) -> None:
    n_tokens = len(step.response_ids)
    if len(step.response_mask) != n_tokens or len(step.logprobs) != n_tokens:
        raise BatchError(
            f"{where}: expected a mask and a log-probability for each of {n_tokens} response tokens, "
            f"got {len(step.response_mask)} and {len(step.logprobs)}"
        )
    if len(step.ref_logprobs) not in (0, n_tokens) or any(map(math.isnan, step.ref_logprobs)):
        raise BatchError(
            f"{where}: expected no reference log-probabilities, or a number for each of {n_tokens} response "
            f"tokens, got {len(step.ref_logprobs)} values, {sum(map(math.isnan, step.ref_logprobs))} of them NaN"
        )


def _ref_logprobs(steps: Sequence[Step]) -> Floats:
    if not any(step.ref_logprobs for step in steps):
        return np.zeros(0)
    return np.concatenate(
        [np.asarray(step.ref_logprobs or (np.nan,) * len(step.response_ids), dtype=np.float64) for step in steps]
    )


def check_range(where: str, score: Score) -> None:
    """Raise ScoreRangeError, its message beginning with `where`, for a score with an invalid range."""
    low, high = score.range
    if score.status == "ok" and not (math.isfinite(high - low) and low < high):
        raise ScoreRangeError(f"{where}: expected a range of finite numbers, low < high, got {score.range}")
