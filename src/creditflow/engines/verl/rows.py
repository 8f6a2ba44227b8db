"""The mapping between verl's rows and a batch's steps, and the columns that credit adds to rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from creditflow.credit import Assignment
from creditflow.data import Bools, Floats, Ints
from creditflow.engines.verl.rollouts import tags_in
from creditflow.errors import BatchError

_PADDING = -1
_PADDING_TOKENS = 1
"""The number of (masked) response tokens in verl's padding rows."""


@dataclass(frozen=True, slots=True, eq=False)
class VerlRows:
    """The verl rows of a batch of trajectories."""

    step_of_key: Mapping[str, int]
    """See `RolloutRecords.steps_of_rows`."""
    token_offsets: Ints
    """[S+1] the batch's token offsets."""

    def steps(self, rows: KVBatchMeta) -> Ints:
        """[R] the step of each row; -1 for padding rows."""
        return np.fromiter(map(self.step_of_key.get, rows.keys, repeat(_PADDING)), np.int64, len(rows))

    def expect_all(self, rows: KVBatchMeta) -> Ints:
        """Check that each row has a step, and each step its row; returns the step [R] of each row.

        Raises BatchError for a row without a step, and for steps without a row.
        """
        step_R = self.steps(rows)
        if (unknown_R := step_R == _PADDING).any():
            key = rows.keys[int(np.argmax(unknown_R))]
            raise BatchError(f"row {key}: no step of the trajectories that came with it")
        # Keys are unique, so equal counts mean that every step has a row. Without it, it would count as trained.
        if len(rows) < len(self.step_of_key):
            missing = self.step_of_key.keys() - set(rows.keys)
            raise BatchError(f"{len(missing)} rows of the trajectories did not come, among them {min(missing)}")
        return step_R

    def put(self, rows: KVBatchMeta, assignment: Assignment) -> KVBatchMeta:
        """Write advantages and returns (a critic's targets) to `rows`, which may include padding rows."""
        advantages = self.nested(rows, assignment.token_advantages(dtype=np.float32))
        returns_T = assignment.returns_T
        returns = advantages if returns_T is None else self.nested(rows, returns_T)
        return write(rows, {"advantages": advantages, "returns": returns})

    def sequences(self, rows: KVBatchMeta) -> int:
        """The number of sequences in the averages of the loss: that of `rows`, padding rows apart."""
        return int((self.steps(rows) != _PADDING).sum())

    def values(self, rows: KVBatchMeta, values_T: Floats) -> None:
        """Copy the critic's values at the response tokens of `rows` into `values_T` [T]."""
        column = tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=["values"])["values"]
        self.fill(rows, column, values_T)

    def fill(self, rows: KVBatchMeta, column: torch.Tensor, column_T: Floats) -> None:
        """Copy a nested `column` of the response tokens of `rows` into `column_T` [T]."""
        values = torch.cat([row.flatten() for row in column.unbind()]).numpy()
        place_T, _ = self._places(rows)
        if len(values) != len(place_T):
            raise BatchError(f"values: expected one for each of {len(place_T)} tokens, got {len(values)}")
        real_T = place_T != _PADDING
        column_T[place_T[real_T]] = values[real_T]

    def nested(self, rows: KVBatchMeta, column_T: NDArray[Any]) -> torch.Tensor:
        """Convert a [T] column of the batch to a jagged tensor of the rows, with 0 in padding rows."""
        if column_T.size != self.token_offsets[-1]:
            raise BatchError(f"expected a value for each of {self.token_offsets[-1]} tokens, got {column_T.size}")
        place_T, offsets = self._places(rows)
        values = np.append(column_T, 0)[place_T].astype(np.float32)  # the last one is that of padding
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets=torch.from_numpy(offsets))

    def _places(self, rows: KVBatchMeta) -> tuple[Ints, Ints]:
        """The place in the batch of each token of the rows, -1 in padding rows; and the offsets [R+1] of the rows."""
        step_R = self.steps(rows)
        padding_R = step_R == _PADDING
        length_R = np.where(padding_R, _PADDING_TOKENS, np.diff(self.token_offsets)[step_R])
        offsets = np.concatenate([[0], np.cumsum(length_R)])
        place_T = np.arange(offsets[-1]) + np.repeat(self.token_offsets[step_R] - offsets[:-1], length_R)
        place_T[np.repeat(padding_R, length_R)] = _PADDING
        return place_T, offsets


def select(rows: KVBatchMeta, wanted_R: Bools) -> KVBatchMeta:
    """Select the rows `wanted_R` [R]. Returns `rows` itself if all are wanted."""
    if wanted_R.all():
        return rows
    places = np.flatnonzero(wanted_R).tolist()
    chosen = _rows([rows.keys[i] for i in places], [dict(rows.tags[i]) for i in places], rows)
    chosen.fields = rows.fields
    return chosen


def _rows(keys: list[str], tags: list[dict[str, Any]], like: KVBatchMeta) -> KVBatchMeta:
    """Rows in the partition of `like`, with its `extra_info`."""
    # The class copies its tags deeply, which would take most of a second for 100,000 rows.
    rows = KVBatchMeta(keys=keys, tags=range(len(keys)), partition_id=like.partition_id, extra_info=like.extra_info)
    rows.tags = tags
    return rows


def write(rows: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Add columns to `rows`; returns the updated rows."""
    fields = TensorDict(dict(columns), batch_size=len(rows))
    return tq.kv_batch_put(keys=rows.keys, partition_id=rows.partition_id, fields=fields)


def concatenate_rows(parts: Iterable[KVBatchMeta]) -> KVBatchMeta:
    """Concatenate the rows of `parts`, which belong to one partition."""
    parts = list(parts)
    keys, tags = [key for part in parts for key in part.keys], [tag for part in parts for tag in part.tags]
    return _rows(keys, tags, parts[0])


def delete_unfinished(records: str) -> None:
    """Prepare a queue that was restored from a checkpoint, before verl runs its unfinished groups again.

    Removes the rows of groups that are no longer in verl's partition `train`, on which the last step was trained; and
    from partition `records` the records of all groups that are not finished. Some of their sessions had ended, and the
    records of the new ones have the same keys.
    """
    tags = tags_in("train")
    status = {key: tag["status"] for key, tag in tags.items() if tag.get("is_prompt", False)}
    if gone := [key for key in tags if key.split("_")[0] not in status]:
        tq.kv_clear(keys=gone, partition_id="train")
    kept = {uid for uid, state in status.items() if state in ("finished", "failure")}
    if gone := [key for key in tags_in(records) if key.split("_")[0] not in kept]:
        tq.kv_clear(keys=gone, partition_id=records)


def delete_rows(rows: KVBatchMeta, keep: Iterable[str]) -> None:
    """Remove the rows from TransferQueue, except those in `keep`."""
    kept = set(keep)
    if gone := [key for key in rows.keys if key not in kept]:
        tq.kv_clear(keys=gone, partition_id=rows.partition_id)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics with a single number."""
    return {key: float(value) for key, value in metrics.items() if isinstance(value, int | float | np.number)}
