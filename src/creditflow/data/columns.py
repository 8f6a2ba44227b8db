"""The columns of a batch, with the contents of each and its names in a record and in a table.

Shape suffixes: N trajectories, S steps, E edges, T response tokens, P prompt tokens, K reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from creditflow.data.trajectory import (
    FAILED,
    NOT_MATCHED,
    OK,
    TIMEOUT,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Score,
    Task,
    TokenIds,
)
from creditflow.errors import BatchError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Per:
    """The properties of a column of a batch, in the annotation of its field."""

    shape: str
    """A letter for each dimension, as in the suffixes of names; O for S + 1."""
    record: str = ""
    """The field of `Trajectory` (N) or `Step` (S, P, T) with the same values; empty: none."""
    in_table: str = ""
    """The column of a table, if its name is not `record`."""
    into: str | tuple[Any, ...] = ""
    """The names that the entries index, or the column that holds them."""
    low: int = 0
    """The lowest index; -1 if an entry may have no name."""
    bounds: str = ""
    """The dimension of the columns that the entries divide among the steps."""
    optional: bool = False
    """Whether the column may be empty, which means that no record has a value."""

    @property
    def table(self) -> str:
        """The column of a table with the same values; empty: none."""
        return self.in_table or self.record

    def names(self, batch: Any) -> Sequence[Any]:
        """The names that the entries index; empty if they index none."""
        return getattr(batch, self.into) if isinstance(self.into, str) and self.into else self.into

    def coded(self, name: str, codes: Ints, names: tuple[str, ...]) -> dict[str, Any]:
        """The column `name` and the column of its names. Raises BatchError for an unknown name."""
        if isinstance(self.into, str):
            return {name: codes, self.into: names}
        if unknown := set(names) - set(self.into):
            raise BatchError(f"column {self.table}: expected one of {', '.join(self.into)}, got {unknown.pop()}")
        return {name: np.array([self.into.index(name) for name in names], dtype=np.int64)[codes]}


class Made(Sequence[T]):
    """A column of objects, each made on first access and kept, since it may be mutable. Pickled as a tuple."""

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length, self._make = length, make
        self._made: dict[int, T] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return tuple(map(self._at, range(self._length)[at]))
        return self._at(range(self._length)[at])

    def _at(self, i: int) -> T:
        if i not in self._made:
            self._made[i] = self._make(i)
        return self._made[i]


class _Remembered:
    """Facts about a batch that are no fields, so that a copy with other columns drops them, and so does a pickle."""

    table: Any = None
    """The `pyarrow.Table` with the same data from which the batch was built (`table.batch_of`), if any."""
    validated: bool = False
    """Whether `validate` has passed the columns. Columns must not be written to afterwards."""

    def derived(self, name: str, compute: Callable[[], T]) -> T:
        """The value of `compute`, which depends on the columns alone; computed once under this name."""
        values: dict[str, T] = self.__dict__.setdefault("_derived", {})
        if name not in values:
            values[name] = compute()
        return values[name]

    def remember(self, **facts: Any) -> None:
        """Set `table` or `validated`."""
        self.__dict__.update(facts)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Columns(_Remembered):
    """The columns of N trajectories with S steps; `TrajectoryBatch` adds constructors."""

    # Trajectories
    trajectory_ids: Annotated[Sequence[str], Per("N", "id", "trajectory_id")]
    tasks: Annotated[Sequence[Task], Per("N", "task")]
    group_names: tuple[str, ...]
    group_of_trajectory: Annotated[Ints, Per("N", "uid", into="group_names")]
    """[N] index into `group_names` (the `uid`)."""
    outcome: Annotated[Floats, Per("N", in_table="outcome")]
    """[N] outcome in its original range; NaN if missing or its scoring failed."""
    outcome_scores: Annotated[Sequence[Score | None], Per("N", "outcome", "outcome_score")]
    status_of_trajectory: Annotated[Ints, Per("N", "status", into=TRAJECTORY_STATUSES)]
    """[N] index into TRAJECTORY_STATUSES."""
    answers: Annotated[Sequence[str | None], Per("N", "answer")]
    trajectory_info: Annotated[Sequence[dict[str, Any]], Per("N", "info", "trajectory_info")]

    # Steps
    step_ids: Annotated[Sequence[str], Per("S", "id", "step_id")]
    trajectory_of_step: Annotated[Ints, Per("S", into="trajectory_ids")]
    """[S] index of the trajectory, non-decreasing."""
    index_of_step: Annotated[Ints, Per("S", "index")]
    """[S] position in the trajectory."""
    agent_names: tuple[str, ...]
    agent_of_step: Annotated[Ints, Per("S", "agent", into="agent_names")]
    """[S] index into `agent_names`."""
    turn_of_step: Annotated[Ints, Per("S", "turn")]
    policy_names: tuple[str, ...]
    policy_of_step: Annotated[Ints, Per("S", "policy", into="policy_names")]
    policy_version: Annotated[Ints, Per("S", "policy_version")]
    temperature_of_step: Annotated[Floats, Per("S", "temperature")]
    is_answer: Annotated[Bools, Per("S")]
    """[S] whether the trajectory's answer came from this step."""
    stratum_names: tuple[str, ...]
    stratum_of_step: Annotated[Ints, Per("S", "stratum", into="stratum_names", low=-1)]
    """[S] index into `stratum_names`; -1 for steps without a label."""
    prompts: Annotated[Sequence[str], Per("S", "prompt")]
    responses: Annotated[Sequence[str], Per("S", "response")]
    step_info: Annotated[Sequence[dict[str, Any]], Per("S", "info", "step_info")]

    # Edges, sorted by child
    edge_child: Annotated[Ints, Per("E", into="step_ids")]
    """[E] step index of the child."""
    edge_parent: Annotated[Ints, Per("E", into="step_ids")]
    """[E] step index of the parent: same trajectory, smaller than the child."""

    # Scores
    score_names: tuple[str, ...]
    scores: Annotated[Floats, Per("SK")]
    """[S, K] scores rescaled to [0, 1] (the mean of scores per token); NaN unless the status is ok."""
    score_status: Annotated[Ints, Per("SK", into=(NOT_MATCHED, OK, FAILED, TIMEOUT))]
    """[S, K] NOT_MATCHED, OK, FAILED or TIMEOUT."""
    score_weights: Annotated[Floats, Per("SK")]
    """[S, K] weight of the function; 0 if it did not match the step."""
    raw_scores: Annotated[Sequence[dict[str, Score]], Per("S", "scores")]
    """[S] the original scores by function."""

    # Tokens
    prompt_offsets: Annotated[Ints, Per("O", bounds="P")]
    """[S+1] bounds of each step's prompt tokens in `prompt_ids`."""
    prompt_ids: Annotated[TokenIds, Per("P", "prompt_ids")]
    token_offsets: Annotated[Ints, Per("O", bounds="T")]
    """[S+1] bounds of each step's response tokens in the [T] columns."""
    response_mask: Annotated[Bools, Per("T", "response_mask")]
    response_ids: Annotated[TokenIds, Per("T", "response_ids")]
    logprobs: Annotated[Floats, Per("T", "logprobs")]
    ref_logprobs: Annotated[Floats, Per("T", "ref_logprobs", optional=True)] = field(
        default_factory=lambda: np.zeros(0)
    )
    """[T] reference log-probabilities, NaN for steps without any; empty if no step has any."""

    # Rarely used: empty if no trajectory, or no step, has a value
    outcomes_of_agents: Annotated[Sequence[Mapping[str, Score]], Per("N", "outcomes", optional=True)] = ()
    """[N] `Trajectory.outcomes`."""
    version_spans: Annotated[Sequence[tuple[tuple[int, int], ...]], Per("S", "version_spans", optional=True)] = ()
    """[S] `Step.version_spans`."""

    @property
    def n_trajectories(self) -> int:
        """N."""
        return len(self.trajectory_ids)

    @property
    def n_steps(self) -> int:
        """S."""
        return len(self.step_ids)


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of a batch."""

    name: str
    dtype: np.dtype[Any] | None
    """The type of an array's entries; None for a sequence of objects."""
    per: Per


@cache
def column_specs() -> tuple[ColumnSpec, ...]:
    """The columns of a batch, in the order of its fields."""
    specs = []
    for name, hint in get_type_hints(Columns, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *more = get_args(hint)
            array = get_origin(kind) is np.ndarray
            specs.append(ColumnSpec(name, np.dtype(get_args(get_args(kind)[1])[0]) if array else None, *more))
    return tuple(specs)
