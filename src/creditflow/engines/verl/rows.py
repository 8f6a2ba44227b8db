"""Between verl's rows and a batch's steps: which row is which step, and the columns that credit gives its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from creditflow.credit import Assignment
from creditflow.errors import BatchError
from creditflow.trajectory import Floats, Ints, TrajectoryBatch

_PADDING = -1
_PADDING_TOKENS = 1
"""Response tokens of a row that verl pads a batch with; masked."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows that a batch of plays came with."""

    step_of_key: Mapping[str, int]
    token_offsets: Ints
    """[S+1] of the batch."""

    @classmethod
    def of(cls, keys: Sequence[str], steps: Ints, batch: TrajectoryBatch) -> Rows:
        """`keys` [R] of the rows, and the `steps` [R] of `batch` that they are (`Plays.row_keys`)."""
        return cls(dict(zip(keys, steps.tolist(), strict=True)), batch.token_offsets)

    def choose(self, rows: KVBatchMeta, wanted_S: NDArray[np.bool_]) -> KVBatchMeta:
        """Those of `rows` whose step is in `wanted_S` [S]. Raises BatchError for a row that is no step."""
        steps = self._steps(rows)
        if (unknown := steps == _PADDING).any():
            raise BatchError(f"row {rows.keys[int(np.argmax(unknown))]}: no step of the plays that came with it")
        return select(rows, np.flatnonzero(wanted_S[steps]).tolist())

    def expect_all(self, rows: KVBatchMeta) -> None:
        """Raises BatchError where a step came without its row: it would count as trained."""
        if missing := self.step_of_key.keys() - set(rows.keys):
            raise BatchError(f"{len(missing)} rows of the plays did not come, among them {min(missing)}")

    def put(self, rows: KVBatchMeta, assignment: Assignment) -> KVBatchMeta:
        """Give `rows` (padding among them) their advantages, and returns: what a critic is to learn."""
        advantages_T = assignment.token_advantages(dtype=np.float32)
        returns_T = assignment.returns_T
        columns = {"advantages": self.nested(rows, advantages_T)}
        columns["returns"] = columns["advantages"] if returns_T is None else self.nested(rows, returns_T)
        return write(rows, columns)

    def values(self, rows: KVBatchMeta, values_T: Floats) -> None:
        """Fill the entries of `values_T` [T] that `rows` know: a critic's value at each response token."""
        column = tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=["values"])["values"]
        at_R, real_R, _ = self._token_places(rows)
        values_T[at_R[real_R]] = torch.cat([row.flatten() for row in column.unbind()]).numpy()[real_R]

    def nested(self, rows: KVBatchMeta, column_T: NDArray[Any]) -> torch.Tensor:
        """A [T] column of the batch as a jagged tensor of the rows; 0 in padding."""
        at_R, real_R, offsets = self._token_places(rows)
        values = np.zeros(len(at_R), dtype=np.float32)
        values[real_R] = column_T[at_R[real_R]]
        return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), offsets=torch.from_numpy(offsets))

    def _steps(self, rows: KVBatchMeta) -> Ints:
        return np.array([self.step_of_key.get(key, _PADDING) for key in rows.keys], dtype=np.int64)

    def _token_places(self, rows: KVBatchMeta) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """For each token of the rows its place in the batch's [T] columns, and whether it has one; rows' offsets."""
        steps = self._steps(rows)
        lengths = np.where(steps == _PADDING, _PADDING_TOKENS, np.diff(self.token_offsets)[steps])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = np.repeat(self.token_offsets[steps] - offsets[:-1], lengths) + np.arange(int(offsets[-1]))
        return at, np.repeat(steps != _PADDING, lengths), offsets


def select(rows: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """The rows at `places`."""
    chosen = KVBatchMeta(
        keys=[rows.keys[i] for i in places],
        tags=[None] * len(places),
        partition_id=rows.partition_id,
        fields=rows.fields,
        extra_info=rows.extra_info,
    )
    chosen.tags = [dict(rows.tags[i]) for i in places]  # it would copy them deeply: most of a second for 100,000 rows
    return chosen


def write(rows: KVBatchMeta, columns: Mapping[str, torch.Tensor]) -> KVBatchMeta:
    """Add columns to `rows`; what comes back knows them."""
    fields = TensorDict(dict(columns), batch_size=len(rows))
    return tq.kv_batch_put(keys=rows.keys, partition_id=rows.partition_id, fields=fields)


def joined(parts: Iterable[KVBatchMeta]) -> KVBatchMeta:
    """All rows of `parts`, of one partition."""
    parts = list(parts)
    return KVBatchMeta(
        keys=[key for part in parts for key in part.keys],
        tags=[tag for part in parts for tag in part.tags],
        partition_id=parts[0].partition_id,
        extra_info=parts[0].extra_info,
    )


def throw_away(rows: KVBatchMeta, keep: Iterable[str]) -> None:
    """Take the rows that are not in `keep` out of TransferQueue."""
    kept = set(keep)
    if gone := [key for key in rows.keys if key not in kept]:
        tq.kv_clear(keys=gone, partition_id=rows.partition_id)
