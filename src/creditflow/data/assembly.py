"""The columns of a batch from one list of values for each step, as trajectories and tables hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from creditflow.data.columns import column_specs
from creditflow.data.trajectory import NOT_MATCHED, OK, TIMEOUT, Bools, Floats, Ints
from creditflow.data.validation import as_joined_column, first_true
from creditflow.errors import BatchError


@dataclass(frozen=True, slots=True)
class Lists:
    """One list of numbers for each step, or for each trajectory, joined."""

    lengths: Ints
    values: NDArray[Any]

    @classmethod
    def join(
        cls, lists: Sequence[Sequence[Any]], dtype: DTypeLike, where: Callable[[int], str], words: str = ""
    ) -> Lists:
        """Join the lists of several owners. Raises BatchError for other values; `where(i)` names owner i."""
        values = as_joined_column(lists, dtype, where, 1, words)
        return cls(np.fromiter(map(len, lists), np.int64, len(lists)), values)

    @property
    def offsets(self) -> Ints:
        """The bounds of each list in `values`."""
        return offsets_of(self.lengths)

    def owners(self) -> Ints:
        """The index of the list that each value belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def tuple_of(self, i: int) -> tuple[Any, ...]:
        """List `i`, for messages."""
        return tuple(self.values[self.owners() == i].tolist())


def offsets_of(lengths: NDArray[Any]) -> Ints:
    """The bounds of joined lists of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Places:
    """The steps of each trajectory, to name them in messages."""

    trajectory_ids: Sequence[str]
    step_ids: Sequence[str]
    trajectory_S: Ints

    def trajectory(self, n: int) -> str:
        """Trajectory `n` in words."""
        return f"trajectory {self.trajectory_ids[n]}"

    def step(self, s: int) -> str:
        """Step `s` in words."""
        return f"step {self.step_ids[s]} of {self.trajectory(int(self.trajectory_S[s]))}"

    def field(self, name: str) -> Callable[[int], str]:
        """The function that names field `name` of a step."""
        return lambda s: f"{self.step(s)}: {name}"

    def refuse(self, wrong_S: Bools, why: Callable[[int], str]) -> None:
        """Raise BatchError for the first step in `wrong_S`."""
        if wrong_S.any():
            s = first_true(wrong_S)
            raise BatchError(f"{self.step(s)}: {why(s)}")


def columns_of_records(shape: str, records: Sequence[Any], places: Places) -> dict[str, Any]:
    """The columns of a batch with one entry for each trajectory (shape N) or step (S)."""
    columns: dict[str, Any] = {}
    for spec in column_specs():
        if not spec.per.record or spec.per.shape != shape:
            continue
        values = [getattr(record, spec.per.record) for record in records]
        if spec.per.into:
            columns |= spec.per.coded(spec.name, *codes_of(values))
        elif spec.dtype is not None:
            columns[spec.name] = as_joined_column(values, spec.dtype, places.field(spec.per.record))
        elif spec.per.optional and not any(map(len, values)):
            columns[spec.name] = ()
        else:
            columns[spec.name] = tuple(values)
    return columns


def lists_of_records(steps: Sequence[Any], places: Places) -> dict[str, Lists]:
    """The lists of tokens of the steps."""
    return {
        spec.per.table: Lists.join(
            [getattr(step, spec.per.record) for step in steps], spec.dtype, places.field(spec.per.record)
        )
        for spec in column_specs()
        if spec.dtype is not None and spec.per.record and spec.per.shape in ("P", "T")
    }


def columns_of_lists(
    places: Places, lists: Mapping[str, Lists], answer_steps: Lists, score_names: Sequence[str]
) -> dict[str, Any]:
    """The batch's columns of edges, answers, tokens and scores.

    `lists`: by the names of a table's columns; `score_names` there holds indices into the argument `score_names`.
    Raises BatchError for lists that do not fit together.
    """
    steps_N = np.bincount(places.trajectory_S, minlength=len(places.trajectory_ids))
    first_N = np.cumsum(steps_N) - steps_N
    return {
        "is_answer": _answers(places, answer_steps, first_N, steps_N),
        **_edges(places, lists["parents"], first_N),
        **_tokens(places, lists),
        **_scores(places, lists, score_names),
    }


def _answers(places: Places, answers: Lists, first_N: Ints, steps_N: Ints) -> Bools:
    """[S] whether the trajectory's answer came from this step."""
    trajectory_A, index_A = answers.owners(), answers.values
    rises_A = np.ones(len(index_A), dtype=np.bool_)
    rises_A[1:] = (np.diff(index_A) > 0) | (np.diff(trajectory_A) > 0)
    wrong_A = ~(rises_A & (index_A >= 0) & (index_A < steps_N[trajectory_A]))
    if wrong_A.any():
        n = int(trajectory_A[first_true(wrong_A)])
        raise BatchError(
            f"trajectory {places.trajectory_ids[n]}: answer steps must rise and be of its {steps_N[n]}, got "
            f"{answers.tuple_of(n)}"
        )
    is_answer = np.zeros(len(places.trajectory_S), dtype=np.bool_)
    is_answer[first_N[trajectory_A] + index_A] = True
    return is_answer


def _edges(places: Places, parents: Lists, first_N: Ints) -> dict[str, Ints]:
    """The edges of steps whose `parents` are places in their own trajectory."""
    child_E, first_S = parents.owners(), first_N[places.trajectory_S]
    index_S = np.arange(len(first_S)) - first_S
    wrong_S = np.zeros(len(first_S), dtype=np.bool_)
    wrong_S[child_E[(parents.values < 0) | (parents.values >= index_S[child_E])]] = True
    places.refuse(wrong_S, lambda s: f"parents must come before it (0 to {index_S[s] - 1}), got {parents.tuple_of(s)}")
    return {"edge_child": child_E, "edge_parent": parents.values + first_S[child_E]}


def _tokens(places: Places, lists: Mapping[str, Lists]) -> dict[str, Any]:
    prompt, response = lists["prompt_ids"], lists["response_ids"]
    mask, logprobs, ref_logprobs = (lists[name] for name in ("response_mask", "logprobs", "ref_logprobs"))
    tokens_S = response.lengths
    places.refuse(
        (mask.lengths != tokens_S) | (logprobs.lengths != tokens_S),
        lambda s: (
            f"expected a mask and a log-probability for each of {tokens_S[s]} response tokens, "
            f"got {mask.lengths[s]} and {logprobs.lengths[s]}"
        ),
    )
    return {
        "prompt_offsets": prompt.offsets,
        "prompt_ids": prompt.values,
        "token_offsets": response.offsets,
        "response_ids": response.values,
        "response_mask": mask.values.astype(np.bool_, copy=False),
        "logprobs": logprobs.values,
        "ref_logprobs": _ref_logprobs(places, ref_logprobs, tokens_S),
    }


def _ref_logprobs(places: Places, logprobs: Lists, tokens_S: Ints) -> Floats:
    """[T] the values, NaN for steps without any; empty if no step has any."""
    nan_S = np.bincount(logprobs.owners()[np.isnan(logprobs.values)], minlength=len(tokens_S))
    places.refuse(
        ((logprobs.lengths != 0) & (logprobs.lengths != tokens_S)) | (nan_S > 0),
        lambda s: (
            f"expected no reference log-probabilities, or a number for each of {tokens_S[s]} response tokens, got "
            f"{logprobs.lengths[s]} values, {nan_S[s]} of them NaN"
        ),
    )
    if logprobs.values.size in (0, tokens_S.sum()):
        return logprobs.values
    ref_logprobs = np.full(int(tokens_S.sum()), np.nan)
    ref_logprobs[np.repeat(logprobs.lengths > 0, tokens_S)] = logprobs.values
    return ref_logprobs


def _scores(places: Places, lists: Mapping[str, Lists], score_names: Sequence[str]) -> dict[str, Any]:
    """The [S, K] columns of scores."""
    code = lists["score_names"]
    values, status, weights = (lists[f"score_{name}"] for name in ("values", "status", "weights"))
    lengths = np.stack([values.lengths, status.lengths, weights.lengths], axis=1)
    places.refuse(
        (lengths != code.lengths[:, None]).any(axis=1),
        lambda s: (
            f"expected {code.lengths[s]} values of score_values, score_status and score_weights, got "
            f"{', '.join(map(str, lengths[s]))}"
        ),
    )
    shape, at_X = (len(code.lengths), len(score_names)), (code.owners(), code.values)
    value_SK, weight_SK = np.full(shape, np.nan), np.zeros(shape)
    status_SK = np.full(shape, NOT_MATCHED, dtype=np.int64)
    value_SK[at_X], weight_SK[at_X], status_SK[at_X] = values.values, weights.values, status.values
    value_SK[status_SK != OK] = np.nan
    places.refuse(
        ((status_SK < NOT_MATCHED) | (status_SK > TIMEOUT)).any(axis=1)
        | ((status_SK != NOT_MATCHED).sum(axis=1) != code.lengths),
        lambda s: f"expected {code.lengths[s]} scores of different names, each ok, failed or timed out",
    )
    return {
        "score_names": tuple(score_names),
        "scores": value_SK,
        "score_status": status_SK,
        "score_weights": weight_SK,
    }


def codes_of(values: Iterable[str | None]) -> tuple[Ints, tuple[str, ...]]:
    """Integer codes in order of first appearance, -1 for None, and the names that they index."""
    names: dict[str, int] = {}
    codes = [-1 if value is None else names.setdefault(value, len(names)) for value in values]
    return np.asarray(codes, dtype=np.int64), tuple(names)
