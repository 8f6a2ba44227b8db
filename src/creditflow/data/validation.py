"""The checks of a trajectory batch, wherever its columns come from: objects, arrays, or tables.

Messages name the column, the step or the trajectory, the expected and the actual value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from creditflow.data.columns import Columns, column_specs
from creditflow.data.trajectory import (
    CODE_OF_STATUS,
    OK,
    TRAJECTORY_STATUSES,
    Bools,
    Ints,
    Score,
    Step,
    Trajectory,
    outcome_value,
)
from creditflow.errors import BatchError, NotFiniteError, OrderError, ScoreRangeError, ShapeError, did_you_mean

_COLUMN_TOLERANCE = 1e-9
"""Columns hold rescaled, clipped scores; the mean of several may still leave [0, 1] by rounding."""


def first_true(wrong: Bools) -> int:
    """The index of the first true entry."""
    return int(np.argmax(wrong))


# ---- a batch -------------------------------------------------------------------------------------------------------


def validate(batch: Columns) -> None:
    """Raise a BatchError (or a subclass) for the first problem, with its place, the expected and the actual value.

    Checked: types, lengths and indices of the columns, the order of steps, unique ids, edges (sorted by child, same
    trajectory, parent before child, no duplicates), scores (finite and in [0, 1] if ok), weights (finite, at least 0),
    outcomes (finite if ok), spans of versions. Scores per token are checked when credit reads them. A batch is checked
    once: later calls return at once.
    """
    if batch.validated:
        return
    _check_columns(batch)
    _check_indices(batch)
    _check_order(batch)
    _check_ids(batch)
    _check_edges(batch)
    _check_scores(batch)
    _check_outcomes(batch)
    _check_version_spans(batch)
    batch.remember(validated=True)


def _fits(column: object, dtype: np.dtype[Any]) -> bool:
    """Whether it is an array of such entries. Unsigned integers cannot hold -1, and their differences wrap around."""
    kind = column.dtype if isinstance(column, np.ndarray) and column.dtype.isnative else np.dtype(object)
    return kind.kind == dtype.kind and kind not in (np.float16, np.longdouble)


def _check_columns(batch: Columns) -> None:
    """Check the type and the shape of every column."""
    for name in ("group_names", "agent_names", "policy_names", "stratum_names", "score_names"):
        names = getattr(batch, name)
        if not isinstance(names, tuple) or len(set(names)) != len(names):
            raise BatchError(f"column {name}: expected a tuple of distinct names, got {shown(names)}")
    size = {"N": batch.n_trajectories, "S": batch.n_steps, "K": len(batch.score_names), "E": np.size(batch.edge_child)}
    size["O"] = batch.n_steps + 1
    for spec in column_specs():
        column, expected = getattr(batch, spec.name), tuple(size[letter] for letter in spec.per.shape)
        if spec.dtype is not None and not _fits(column, spec.dtype):
            got = column.dtype if isinstance(column, np.ndarray) else type(column).__name__
            raise ShapeError(f"column {spec.name}: expected an array of {spec.dtype}, got {got}")
        shape = None if column is None else column.shape if isinstance(column, np.ndarray) else (len(column),)
        if shape != expected and not (spec.per.optional and shape == (0,)):
            raise ShapeError(f"column {spec.name}: expected shape {expected}, got {shape}")
        if spec.per.bounds:
            _check_offsets(batch, spec.name, column)
            size[spec.per.bounds] = int(column[-1])


def _refuse(wrong: Bools, kind: type[BatchError], why: Callable[[int], str]) -> None:
    """Raise an error of this kind for the first true entry."""
    if wrong.any():
        raise kind(why(first_true(wrong)))


def _check_offsets(batch: Columns, name: str, offsets: Ints) -> None:
    if offsets[0] != 0:
        raise ShapeError(f"column {name}: expected 0 as the first, got {offsets[0]}")
    if (wrong_S := offsets[1:] < offsets[:-1]).any():
        s = first_true(wrong_S)
        got = f"{offsets[s + 1]} after {offsets[s]}"
        raise ShapeError(f"step {batch.step_ids[s]}: expected {name} that do not decrease, got {got}")


def _check_indices(batch: Columns) -> None:
    for spec in column_specs():
        if spec.per.into:
            column, low, high = getattr(batch, spec.name).ravel(), spec.per.low, len(spec.per.names(batch))
            where = f"column {spec.name}, entry"
            if column.size and (column.min() < low or column.max() >= high):
                at = first_true((column < low) | (column >= high))
                raise BatchError(f"{where} {at}: expected an index from {low} to {high - 1}, got {column[at]}")


def _check_order(batch: Columns) -> None:
    trajectory_S = batch.trajectory_of_step
    _refuse(
        np.diff(trajectory_S) < 0,
        OrderError,
        lambda s: f"{_step(batch, s + 1)}: expected steps trajectory by trajectory, got it after {_step(batch, s)}",
    )
    steps_N = np.bincount(trajectory_S, minlength=batch.n_trajectories)
    expected_S = np.arange(batch.n_steps) - (np.cumsum(steps_N) - steps_N)[trajectory_S]
    _refuse(
        batch.index_of_step != expected_S,
        OrderError,
        lambda s: (
            f"{_step(batch, s)}: expected index {expected_S[s]}, its place in the trajectory, "
            f"got {batch.index_of_step[s]}"
        ),
    )


def _check_ids(batch: Columns) -> None:
    for what, ids in (("trajectory", batch.trajectory_ids), ("step", batch.step_ids)):
        if len(set(ids)) != len(ids):
            twice, _ = Counter(ids).most_common(1)[0]
            raise BatchError(f"{what} {twice}: expected unique ids in a batch, got this one twice")


def _check_edges(batch: Columns) -> None:
    child_E, parent_E, trajectory_S = batch.edge_child, batch.edge_parent, batch.trajectory_of_step
    _refuse(
        np.diff(child_E) < 0,
        OrderError,
        lambda e: f"edges: expected edges sorted by child, got {_step(batch, child_E[e + 1])} after a later one",
    )
    for wrong_E, kind, expected in (
        (parent_E >= child_E, OrderError, "parents that came before it"),
        (trajectory_S[child_E] != trajectory_S[parent_E], BatchError, "parents in its own trajectory"),
        (_repeated(child_E, parent_E), BatchError, "each parent once"),
    ):
        if wrong_E.any():
            child, parent = (_step(batch, steps_E[first_true(wrong_E)]) for steps_E in (child_E, parent_E))
            raise kind(f"edges: {child}: expected {expected}, got {parent}")


def _step(batch: Columns, s: int) -> str:
    return f"step {batch.step_ids[s]} of trajectory {batch.trajectory_ids[batch.trajectory_of_step[s]]}"


def _repeated(child_E: Ints, parent_E: Ints) -> Bools:
    """[E] whether the edge repeats an earlier one."""
    many_E = np.flatnonzero(np.bincount(child_E)[child_E] > 1)
    order, repeated_E = many_E[np.lexsort((parent_E[many_E], child_E[many_E]))], np.zeros(len(child_E), dtype=np.bool_)
    repeated_E[order[1:]] = (np.diff(child_E[order]) == 0) & (np.diff(parent_E[order]) == 0)
    return repeated_E


def _check_scores(batch: Columns) -> None:
    with np.errstate(invalid="ignore"):
        within_SK = (batch.scores >= -_COLUMN_TOLERANCE) & (batch.scores <= 1 + _COLUMN_TOLERANCE)
        weighable_SK = np.isfinite(batch.score_weights) & (batch.score_weights >= 0)
    for wrong_SK, values_SK, what in (
        ((batch.score_status == OK) & ~within_SK, batch.scores, "a value from 0 to 1 after rescaling from its range"),
        (~weighable_SK, batch.score_weights, "a finite weight of 0 or more"),
    ):
        if wrong_SK.any():
            s, k = divmod(first_true(wrong_SK.ravel()), wrong_SK.shape[1])
            kind = ScoreRangeError if np.isfinite(values_SK[s, k]) else NotFiniteError
            raise kind(
                f"step {batch.step_ids[s]}, score {batch.score_names[k]}: expected {what}, got {values_SK[s, k]}"
            )


def _check_outcomes(batch: Columns) -> None:
    """Check that an outcome is finite where its scoring was ok, and missing where it failed.

    Of scores that are made on access, only those without a finite outcome are read; the others come from numbers, or
    the table module has checked them as text.
    """
    made = isinstance(batch.outcome_scores, tuple)
    for n in range(batch.n_trajectories) if made else np.flatnonzero(~np.isfinite(batch.outcome)).tolist():
        check_outcome_status(f"trajectory {batch.trajectory_ids[n]}", batch.outcome_scores[n], float(batch.outcome[n]))
    for n, own in enumerate(batch.outcomes_of_agents):
        where = f"trajectory {batch.trajectory_ids[n]}: outcomes"
        _check_named_scores(where, own)
        for agent, score in own.items():
            check_outcome(f"{where}[{agent!r}]", score)
            check_outcome_status(f"{where}[{agent!r}]", score, outcome_value(score))


def check_outcome_status(where: str, score: Score | None, value: float) -> None:
    """Raise BatchError unless the value of an outcome fits the status of its score."""
    status = None if score is None else score.status
    if math.isinf(value) or (math.isnan(value) and status == "ok"):
        raise NotFiniteError(f"{where}: expected a finite outcome where its scoring was ok, got {value}")
    if not math.isnan(value) and status not in ("ok", None):
        raise BatchError(f"{where}: an outcome of {value}, but its scoring has status {status}")


def check_outcome(where: str, score: object) -> None:
    """Raise BatchError, its message beginning with `where`, unless `score` is a Score with one number and a range."""
    check_score(where, score)
    assert isinstance(score, Score)
    if isinstance(score.value, tuple):
        raise BatchError(f"{where}: expected one number as outcome, got {score.value}")
    check_range(where, score)


def _check_version_spans(batch: Columns) -> None:
    """Check that the spans of each step rise from token 0 and its policy version, within the response."""
    for s, spans in enumerate(batch.version_spans):
        pairs = [span if isinstance(span, tuple | list) else () for span in spans]
        starts = [pair[0] for pair in pairs if len(pair) == 2]
        whole = len(starts) == len(pairs) and all(isinstance(number, Integral) for pair in pairs for number in pair)
        first, n_tokens = (0, int(batch.policy_version[s])), batch.token_offsets[s + 1] - batch.token_offsets[s]
        rises = whole and starts == sorted(set(starts)) and starts[-1:] < [n_tokens]
        if pairs and not (rises and tuple(pairs[0]) == first):
            raise BatchError(
                f"{_step(batch, s)}: version_spans: expected (first token, policy version) in rising order from "
                f"{first}, below {n_tokens} tokens, got {tuple(spans)}"
            )


# ---- values that become columns ------------------------------------------------------------------------------------

_NUMBERS = {"i": ("biu", "whole numbers"), "f": ("biuf", "numbers"), "b": ("biuf", "values true or false (1 or 0)")}
"""The kinds of numpy types that a column of a kind accepts, in words."""


def as_column(where: str, values: object, dtype: DTypeLike, *ndims: int, words: str = "") -> NDArray[Any]:
    """Return `values` as an array of `dtype`. Raises ShapeError, its message beginning with `where`, for other values.

    `ndims`: the accepted numbers of dimensions, by default 1. `words`: the expected values, in place of general words.
    """
    target, ndims = np.dtype(dtype), ndims or (1,)
    kinds, general = _NUMBERS[target.kind]
    try:
        raw = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths; a tensor on another device
        raise ShapeError(f"{where}: expected {words or general}, got {shown(values)}: {error}") from error
    if raw.size == 0:
        raw = raw.astype(target).reshape(raw.shape if raw.ndim in ndims else (0,) * ndims[-1])
    if raw.ndim not in ndims:
        expected = f"an array of {' or '.join(map(str, ndims))} dimensions" if ndims[-1] else "one number"
        raise ShapeError(f"{where}: expected {expected}{words and f': {words}'}, got shape {raw.shape}")
    fits = raw.dtype.kind in kinds
    if fits and target.kind == "i" and raw.dtype != target and raw.size:
        limits = np.iinfo(target)
        if not limits.min <= int(raw.min()) <= int(raw.max()) <= limits.max:
            raise ShapeError(f"{where}: expected {general} of {limits.bits} bits, got {raw.min()} to {raw.max()}")
    array = raw.astype(target, copy=False) if fits else raw
    if not fits or (target.kind == "b" and not np.array_equal(array, raw)):
        raise ShapeError(f"{where}: expected {words or general}, got {shown(values)}")
    return array


def as_joined_column(
    parts: Sequence[Any], dtype: DTypeLike, where: Callable[[int], str], ndim: int = 0, words: str = ""
) -> NDArray[Any]:
    """Return `as_column` of the parts: numbers, or lists (`ndim` 1) joined. A message names part i by `where(i)`."""
    try:
        return as_column("a column", [value for part in parts for value in part] if ndim else parts, dtype)
    except ShapeError:
        for i, part in enumerate(parts):
            as_column(where(i), part, dtype, ndim, words=words)
        raise


def shown(value: object) -> str:
    """Type and short `repr` of a value."""
    return (
        f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"{type(value).__name__} {repr(value)[:60]}"
    )


# ---- trajectories --------------------------------------------------------------------------------------------------


INDICES = "indices of steps such as (0,)"
_WORDS = {
    "parents": INDICES,
    "answer_steps": INDICES,
    "version_spans": "(first token, policy version)",
    "steps": "Step",
}
"""Expected values of fields with a list; in the others one value per token."""


def _fields(kind: type, *beginnings: str) -> tuple[str, ...]:
    """The fields of a dataclass whose type, as written, begins with one of these."""
    return tuple(field.name for field in fields(kind) if str(field.type).startswith(beginnings))


_FIELDS = {
    kind: (_fields(kind, "str"), _fields(kind, "tuple[", "list["), _fields(kind, "dict[str, Score"))
    for kind in (Step, Trajectory)
}
"""The fields with texts, with lists and with scores by name."""
_OPTIONAL = ("answer", "stratum")
"""Fields with texts that may be None."""


def check_trajectory(trajectory: Trajectory) -> None:
    """Check the types of a trajectory's objects, which the columns cannot show. Raises BatchError."""
    if not isinstance(trajectory, Trajectory):
        raise BatchError(f"expected a Trajectory, got {shown(trajectory)}")
    where = f"trajectory {trajectory.id}"
    _check_fields(where, trajectory)
    _check_status(where, trajectory.status, TRAJECTORY_STATUSES)
    if trajectory.outcome is not None:
        check_outcome(f"{where}: outcome", trajectory.outcome)
    for index, step in enumerate(trajectory.steps):
        if not isinstance(step, Step):
            raise BatchError(f"{where}: expected a Step at index {index}, got {shown(step)}")
        _check_step(f"step {step.id} of {where}", step, trajectory.id)


def _check_fields(where: str, record: Step | Trajectory) -> None:
    texts, lists, scores = _FIELDS[Step if isinstance(record, Step) else Trajectory]
    for name in texts:
        if not isinstance(value := getattr(record, name), str) and (value is not None or name not in _OPTIONAL):
            raise BatchError(f"{where}: {name}: expected a text, got {shown(value)}")
    for name in lists:
        if isinstance(value := getattr(record, name), str) or not isinstance(value, Collection):
            words = _WORDS.get(name, "one value per token")
            raise BatchError(f"{where}: {name}: expected a tuple of {words}, got {shown(value)}")
    for name in scores:
        _check_named_scores(f"{where}: {name}", getattr(record, name))


def _check_named_scores(where: str, scores: object) -> None:
    if not isinstance(scores, Mapping):
        raise BatchError(f"{where}: expected a dict of Score by name, got {shown(scores)}")
    for name, score in scores.items():
        if not isinstance(name, str):
            raise BatchError(f"{where}: expected texts as names, got {shown(name)}")
        check_score(f"{where}[{name!r}]", score)


def _check_step(where: str, step: Step, trajectory_id: str) -> None:
    _check_fields(where, step)
    if step.trajectory_id != trajectory_id:
        raise BatchError(f"{where}: expected trajectory_id {trajectory_id}, got {step.trajectory_id}")
    n_tokens = len(step.response_ids)
    for name, score in step.scores.items():
        if isinstance(score.value, tuple) and score.status == "ok" and len(score.value) != n_tokens:
            raise BatchError(f"{where}: score {name} has {len(score.value)} values for {n_tokens} response tokens")
        check_range(f"{where}, score {name}", score)


def check_score(where: str, score: object) -> None:
    """Raise BatchError, its message beginning with `where`, unless it is a Score with a known status and numbers."""
    if not isinstance(score, Score):
        raise BatchError(f"{where}: expected a Score, got {shown(score)}; write Score(value)")
    _check_status(where, score.status, CODE_OF_STATUS)
    if not isinstance(score.weight, Real):
        raise BatchError(f"{where}: weight: expected a number, got {shown(score.weight)}")
    for number in score.value if isinstance(score.value, tuple) else (score.value,):
        if score.status == "ok" and type(number) is not float and not isinstance(number, Real):
            raise BatchError(f"{where}: expected a number, or a tuple with one per response token, got {shown(number)}")


def check_range(where: str, score: Score) -> None:
    """Raise ScoreRangeError, its message beginning with `where`, for an ok score with an invalid range."""
    if score.status != "ok":
        return
    bounds = score.range
    numbers = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(isinstance(bound, Real) for bound in bounds)
    if not (numbers and math.isfinite(bounds[1] - bounds[0]) and bounds[0] < bounds[1]):
        raise ScoreRangeError(f"{where}: expected a range of finite numbers, low < high, got {score.range}")


def _check_status(where: str, status: str, statuses: Iterable[str]) -> None:
    if not isinstance(status, str) or status not in statuses:
        choice = " or ".join(map(repr, statuses))
        raise BatchError(f"{where}: status: expected {choice}, got {status!r}{did_you_mean(status, statuses)}")
