"""Trajectory batches as Arrow tables, for Parquet files and messages between processes.

This module imports pyarrow at the top, so callers import it inside functions.

A table has one row per step, in the batch's order, and one row with a null `step_id` for a trajectory without steps.
The columns of a trajectory repeat in each of its rows. In memory they are dictionary-encoded, so that a task of 100 kB
is stored once rather than for each of thirty steps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from creditflow.data.batch import TrajectoryBatch
from creditflow.data.trajectory import (
    CODE_OF_STATUS,
    NOT_MATCHED,
    OK,
    TIMEOUT,
    TRAJECTORY_STATUSES,
    Bools,
    Floats,
    Ints,
    Score,
    Task,
    Trajectory,
    check_range,
    check_version_spans,
)
from creditflow.errors import BatchError, first_line

T = TypeVar("T")

_TEXT, _INTS, _IDS, _REALS = pa.string(), pa.list_(pa.int64()), pa.list_(pa.int32()), pa.list_(pa.float64())
_OF_TRAJECTORY = pa.schema(
    [
        ("trajectory_id", _TEXT),
        ("uid", _TEXT),
        ("task", _TEXT),  # JSON
        ("answer", _TEXT),
        ("answer_steps", _INTS),
        ("outcome", pa.float64()),
        ("outcome_score", _TEXT),  # JSON
        ("outcomes", _TEXT),  # JSON: agent -> score; null without any
        ("status", _TEXT),
        ("trajectory_info", _TEXT),  # JSON
    ]
)
_OF_STEP = pa.schema(
    [
        ("step_id", _TEXT),
        ("index", pa.int64()),
        ("agent", _TEXT),
        ("turn", pa.int64()),
        ("parents", _INTS),
        ("prompt", _TEXT),
        ("response", _TEXT),
        ("prompt_ids", _IDS),
        ("response_ids", _IDS),
        ("response_mask", pa.list_(pa.int8())),
        ("logprobs", _REALS),
        ("temperature", pa.float64()),
        ("policy", _TEXT),
        ("policy_version", pa.int64()),
        ("version_spans", _INTS),  # first token and version of each span, in one list
        ("branch_of", _TEXT),
        ("scores", _TEXT),  # JSON: name -> score
        ("stratum", _TEXT),
        ("step_info", _TEXT),  # JSON
        ("ref_logprobs", _REALS),
        # The scores again, as the numbers from which credit is computed.
        ("score_names", pa.list_(_TEXT)),
        ("score_values", _REALS),  # rescaled to [0, 1]; null if the scoring failed
        ("score_status", pa.list_(pa.int8())),  # 1 ok, 2 failed, 3 timeout
        ("score_weights", _REALS),
    ]
)
_CAME_LATER = {
    *("ref_logprobs", "score_names", "score_values", "score_status", "score_weights"),
    *("outcomes", "version_spans", "branch_of"),
}
"""Columns that older files do not have."""
FORMAT = 2
"""Version of the columns, in a file's metadata. Older files are converted when they are read, newer ones refused."""


_SCHEMA = pa.schema([*_OF_TRAJECTORY, *_OF_STEP])


def schema() -> pa.Schema:
    """The columns of a table: trajectory columns, then step columns."""
    return _SCHEMA


class Column(Sequence[T]):
    """Values of an Arrow column, each decoded on access. Equal to a tuple of the same values.

    Access raises BatchError for a value that cannot be decoded, so was not written by this module.
    """

    __slots__ = ("_decode", "_made", "_name", "_values")

    def __init__(self, values: pa.ChunkedArray, decode: Callable[[Any], T] | None = None, name: str = "") -> None:
        self._values, self._decode, self._name = values, decode, name
        self._made: dict[int, T] = {}  # so that each access returns the same mutable object

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[T, ...]: ...
    def __getitem__(self, at: int | slice) -> T | tuple[T, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(f"expected an index below {len(self)}, got {at}")
        return self._at(int(at) % len(self))

    def _at(self, i: int) -> T:
        if self._decode is None:
            value: T = self._values[i].as_py()
            return value
        if i not in self._made:
            try:
                self._made[i] = self._decode(self._values[i].as_py())
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise BatchError(f"column {self._name}, entry {i}: {first_line(error)}") from error
        return self._made[i]

    @property
    def is_empty(self) -> bool:
        """Whether every value is null."""
        return bool(self._values.null_count == len(self._values))

    def __iter__(self) -> Iterator[T]:
        if self._decode is None:
            for chunk in self._values.iterchunks():
                yield from chunk.to_pylist()
        else:
            yield from (self._at(i) for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Column({len(self)} values)"


# ---- to a table ----------------------------------------------------------------------------------------------------


def table_of(given: TrajectoryBatch | Sequence[Trajectory]) -> pa.Table:
    """The table of a batch or of trajectories; a batch built from a table returns that table.

    Raises BatchError if the trajectories do not form a batch or hold a value that cannot be written: a task or `info`
    that JSON cannot represent, or text that UTF-8 cannot encode.
    """
    batch = given if isinstance(given, TrajectoryBatch) else TrajectoryBatch.from_trajectories(given)
    return batch.table if batch.table is not None else _spread(pa.Table.from_batches([_compact(batch)]))


def pack(given: Trajectory | Sequence[Trajectory]) -> bytes:
    """Pack finished, scored trajectories into a message for `unpack` in another process of the same run.

    The message is a checksum, the uncompressed size, and a compressed record batch without its schema. Raises
    BatchError like `table_of`.
    """
    trajectories = [given] if isinstance(given, Trajectory) else list(given)
    message = _compact(TrajectoryBatch.from_trajectories(trajectories)).serialize()
    rest = message.size.to_bytes(_SIZE, "little") + _CODEC.compress(message, asbytes=True)
    return bytes(_checksum(rest) + rest)


def unpack(messages: Iterable[bytes | memoryview]) -> pa.Table:
    """Read the trajectories in `messages` into one table, in order.

    Raises BatchError for a damaged message, or one packed by a version of creditflow with another schema.
    """
    parts, batches, size = [], [], 0
    for place, message in enumerate(messages):
        body = _opened(memoryview(message), place)
        batches.append(pa.ipc.read_record_batch(body, schema()))
        size += body.size
        if size > _AT_ONCE:
            parts.append(pa.Table.from_batches(batches).combine_chunks())
            batches, size = [], 0
    parts.append(pa.Table.from_batches(batches, schema()).combine_chunks())
    table = pa.concat_tables(parts)
    del parts, batches  # free the parts before their columns are joined
    for place, field in enumerate(table.schema):
        if pa.types.is_list(field.type):  # so that the batch can view its tokens without a copy
            table = table.set_column(place, field, table.column(place).combine_chunks())
    return _spread(table)


_CODEC = pa.Codec("lz4")
_CHECKSUM, _SIZE = 4, 8
"""Bytes of the checksum and the size at the start of a message."""
_AT_ONCE = 1 << 23
"""Bytes of messages that are combined into one chunk at a time, while they are still in the processor's cache."""


def _opened(message: memoryview, place: int) -> pa.Buffer:
    rest = message[_CHECKSUM:]
    if len(rest) < _SIZE or message[:_CHECKSUM] != _checksum(rest):
        raise BatchError(
            f"message {place} of packed trajectories: its {len(message)} bytes do not fit their checksum; expected "
            "what the same version of creditflow packed, undamaged"
        )
    return _CODEC.decompress(rest[_SIZE:], int.from_bytes(rest[:_SIZE], "little"))


def _checksum(rest: bytes | memoryview) -> bytes:
    """CRC-32 of the schema and `rest`, so that a message with other columns does not match."""
    return zlib.crc32(rest, _schema_checksum()).to_bytes(_CHECKSUM, "little")


@cache
def _schema_checksum() -> int:
    return zlib.crc32(schema().serialize())


def _compact(batch: TrajectoryBatch) -> pa.RecordBatch:
    """The rows of a batch, with trajectory columns in the first row of each trajectory only."""
    lengths_N = np.bincount(batch.trajectory_of_step, minlength=batch.n_trajectories)
    rows_N = np.maximum(lengths_N, 1)
    trajectory_of_row = np.full(int(rows_N.sum()), -1, dtype=np.int64)
    trajectory_of_row[np.cumsum(rows_N) - rows_N] = np.arange(batch.n_trajectories)
    try:
        columns = {name: _take(values, trajectory_of_row) for name, values in _of_trajectories(batch).items()}
        of_steps = _of_steps(batch)
    except pa.ArrowException as error:
        raise BatchError(f"expected a batch whose columns fit those of a table: {error}") from error
    if batch.n_steps < len(trajectory_of_row):
        step_of_row = np.full(len(trajectory_of_row), -1, dtype=np.int64)
        step_of_row[np.repeat(lengths_N > 0, rows_N)] = np.arange(batch.n_steps)
        of_steps = {name: _take(values, step_of_row) for name, values in of_steps.items()}
    columns |= of_steps
    return pa.record_batch([columns[name] for name in schema().names], schema=schema())


def _of_trajectories(batch: TrajectoryBatch) -> dict[str, pa.Array]:
    ids, answers = batch.trajectory_ids, np.flatnonzero(batch.is_answer)
    ok_N = np.array([score is not None and score.status == "ok" for score in batch.outcome_scores], dtype=np.bool_)
    answers_N = np.bincount(batch.trajectory_of_step[answers], minlength=batch.n_trajectories)
    outcomes = [None if score is None else _fields(score, _OF_SCORE) for score in batch.outcome_scores]
    return {
        "trajectory_id": _text(ids, "trajectory", ids),
        "uid": _names(batch.group_names, batch.group_of_trajectory),
        "task": _json([_fields(task, _OF_TASK) for task in batch.tasks], "trajectory", ids),
        "answer": _text(batch.answers, "trajectory", ids),
        "answer_steps": _lists(_offsets(answers_N), batch.index_of_step[answers], pa.int64()),
        "outcome": pa.array(batch.outcome, pa.float64(), mask=~ok_N),
        "outcome_score": _json(outcomes, "trajectory", ids),
        "outcomes": _json(_outcomes_of_agents(batch), "trajectory", ids),
        "status": _names(TRAJECTORY_STATUSES, batch.status_of_trajectory),
        "trajectory_info": _json(batch.trajectory_info, "trajectory", ids),
    }


def _of_steps(batch: TrajectoryBatch) -> dict[str, pa.Array]:
    ids, order = batch.step_ids, np.argsort(batch.edge_child, kind="stable")
    parents_S = np.bincount(batch.edge_child, minlength=batch.n_steps)
    scores = [{name: _fields(score, _OF_SCORE) for name, score in of_step.items()} for of_step in batch.raw_scores]
    matched_SK = batch.score_status != NOT_MATCHED
    status_X, score_offsets = batch.score_status[matched_SK], _offsets(matched_SK.sum(axis=1))
    values_X = pa.array(batch.scores[matched_SK], mask=status_X != OK)
    has_ref_T = ~np.isnan(batch.ref_logprobs)
    ref_offsets = _offsets(has_ref_T)[batch.token_offsets if has_ref_T.size else np.zeros(batch.n_steps + 1, np.int64)]
    return {
        "step_id": _text(ids, "step", ids),
        "index": pa.array(batch.index_of_step, pa.int64()),
        "agent": _names(batch.agent_names, batch.agent_of_step),
        "turn": pa.array(batch.turn_of_step, pa.int64()),
        "parents": _lists(_offsets(parents_S), batch.index_of_step[batch.edge_parent[order]], pa.int64()),
        "prompt": _text(batch.prompts, "step", ids),
        "response": _text(batch.responses, "step", ids),
        "prompt_ids": _lists(batch.prompt_offsets, batch.prompt_ids, pa.int32()),
        "response_ids": _lists(batch.token_offsets, batch.response_ids, pa.int32()),
        "response_mask": _lists(batch.token_offsets, batch.response_mask.astype(np.int8), pa.int8()),
        "logprobs": _lists(batch.token_offsets, batch.logprobs, pa.float64()),
        "temperature": pa.array(batch.temperature_of_step, pa.float64()),
        "policy": _names(batch.policy_names, batch.policy_of_step),
        "policy_version": pa.array(batch.policy_version, pa.int64()),
        "version_spans": _version_spans(batch),
        "branch_of": _text(batch.branch_of or [None] * batch.n_steps, "step", ids),
        "scores": _json(scores, "step", ids),
        "stratum": _names(batch.stratum_names, batch.stratum_of_step),
        "step_info": _json(batch.step_info, "step", ids),
        "ref_logprobs": _lists(ref_offsets, batch.ref_logprobs[has_ref_T], pa.float64()),
        "score_names": _lists(score_offsets, _names(batch.score_names, np.nonzero(matched_SK)[1]), _TEXT),
        "score_values": _lists(score_offsets, values_X, pa.float64()),
        "score_status": _lists(score_offsets, status_X, pa.int8()),
        "score_weights": _lists(score_offsets, batch.score_weights[matched_SK], pa.float64()),
    }


def _outcomes_of_agents(batch: TrajectoryBatch) -> list[dict[str, Any] | None]:
    return [
        {agent: _fields(score, _OF_SCORE) for agent, score in outcomes.items()} or None
        for outcomes in batch.outcomes_of_agents or [{}] * batch.n_trajectories
    ]


def _version_spans(batch: TrajectoryBatch) -> pa.Array:
    if not batch.version_spans:
        return _lists(np.zeros(batch.n_steps + 1, dtype=np.int64), np.empty(0, dtype=np.int64), pa.int64())
    return pa.array([[number for span in spans for number in span] for spans in batch.version_spans], _INTS)


_OF_TASK, _OF_SCORE = (tuple(field.name for field in fields(noun)) for noun in (Task, Score))


def _fields(value: Task | Score, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _json(values: Sequence[object], what: str, ids: Sequence[str]) -> pa.Array:
    texts = []
    for i, value in enumerate(values):
        try:
            texts.append(None if value is None else _spelled(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise BatchError(f"{what} {ids[i]}: expected what can be written as JSON: {first_line(error)}") from error
    return pa.array(texts, type=_TEXT)


def _spelled(value: object) -> str:
    """A value as JSON that every reader accepts: a lone surrogate becomes U+FFFD."""
    text = json.dumps(value)
    if "\\ud" not in text:
        return text
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(json.loads(whole))


def _text(values: Sequence[str | None], what: str, ids: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, type=_TEXT)
    except UnicodeEncodeError as error:
        wrong = next(i for i, value in enumerate(values) if value is not None and not _is_utf8(value))
        raise BatchError(f"{what} {ids[wrong]!r}: expected text that UTF-8 can hold: {error.reason}") from error


def _is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


def _names(names: Sequence[str], codes: Ints) -> pa.Array:
    """The names that codes index; -1: null."""
    return _take(_text(names, "name", names), codes)


def _take(array: pa.Array, at: Ints) -> pa.Array:
    """The entries of `array` at `at`; -1: null."""
    return array.take(pa.array(at, mask=at < 0))


def _lists(offsets: Ints, values: NDArray[Any] | pa.Array, type: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, type))


def _offsets(counts: NDArray[Any]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _spread(table: pa.Table) -> pa.Table:
    """Copy trajectory columns from the first row of each trajectory to all of its rows, dictionary-encoded."""
    first_R = table.column("trajectory_id").is_valid()
    trajectory_of_row = pa.array(np.cumsum(first_R.to_numpy()) - 1)
    for place, field in enumerate(_OF_TRAJECTORY):
        values = table.column(field.name).filter(first_R).combine_chunks()
        if field.type == _TEXT:
            coded = values.dictionary_encode()
            spread = pa.DictionaryArray.from_arrays(coded.indices.take(trajectory_of_row), coded.dictionary)
        else:
            spread = values.take(trajectory_of_row)
        table = table.set_column(place, field.name, spread)
    return table


# ---- to a batch ----------------------------------------------------------------------------------------------------


def batch_of(table: pa.Table) -> TrajectoryBatch:
    """Build a batch from a table. Text and JSON are decoded on access.

    Token columns may be read-only views of the table. Raises BatchError, naming the step or the trajectory, if columns
    are missing or inconsistent.
    """
    known = _known(table)
    first_R, has_step_R = _starts(known)
    trajectories = known.select(_OF_TRAJECTORY.names).filter(pa.array(first_R))
    steps = _Steps(known, has_step_R, (np.cumsum(first_R) - 1)[has_step_R])
    batch = TrajectoryBatch(
        **_trajectory_columns(trajectories),
        **_step_columns(steps, trajectories),
        **_score_columns(steps),
        **_token_columns(steps),
    )
    batch.remember(known)
    return batch


def _known(table: pa.Table) -> pa.Table:
    """Select a batch's columns and cast them to the schema's types; add the columns that older tables lack."""
    present = set(table.column_names)
    if missing := sorted(set(schema().names) - _CAME_LATER - present):
        raise BatchError(f"expected the columns of a trajectory batch, missing {', '.join(missing)}")
    try:
        later = _from_before(table) if _CAME_LATER - present else {}
    except (ValueError, TypeError, KeyError) as error:  # an invalid status, range or value of a score
        raise BatchError(f"column scores: {first_line(error)}") from error
    columns = []
    for field in schema():
        column = table.column(field.name) if field.name in present else later[field.name]
        coded = field.type == _TEXT and pa.types.is_dictionary(column.type)
        try:
            columns.append(column if coded or column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise BatchError(f"column {field.name}: expected {field.type}, got {column.type}: {error}") from error
    return pa.table(columns, names=schema().names)


def _from_before(table: pa.Table) -> dict[str, pa.Array]:
    """The columns that an older table lacks: the scores' numbers from JSON, and nothing in the others."""
    scores, ids = Column(table.column("scores"), _scores_of_json, "scores"), table.column("step_id")
    masks = table.column("response_mask").to_pylist()

    def column(value: Callable[[str, Score, int], object]) -> list[list[object] | None]:
        return [
            [value(name, score, r) for name, score in scores[r].items()] if ids[r].is_valid else None
            for r in range(table.num_rows)
        ]

    def rescaled(name: str, score: Score, r: int) -> float | None:
        check_range(f"step {ids[r]}, score {name}", score)
        return score.rescaled_over(masks[r] or ()) if score.status == "ok" else None

    later = {
        "ref_logprobs": [[] if id.is_valid else None for id in ids],
        "outcomes": [None] * table.num_rows,
        "version_spans": [[] if id.is_valid else None for id in ids],
        "branch_of": [None] * table.num_rows,
        "score_names": column(lambda name, score, r: name),
        "score_values": column(rescaled),
        "score_status": column(lambda name, score, r: CODE_OF_STATUS[score.status]),
        "score_weights": column(lambda name, score, r: score.weight),
    }
    return {name: pa.array(values, type=schema().field(name).type) for name, values in later.items()}


def _starts(table: pa.Table) -> tuple[Bools, Bools]:
    """(first_R, has_step_R): whether each row begins a trajectory, and whether it is a step."""
    ids = _plain(table.column("trajectory_id"))
    if ids.null_count:
        raise BatchError(f"row {_first(ids.is_null().to_numpy(False))}: expected a trajectory_id, got none")
    has_step_R, has_index_R = (table.column(name).is_valid().to_numpy() for name in ("step_id", "index"))
    if (odd_R := ~has_step_R & has_index_R).any():
        raise BatchError(f"trajectory {ids[_first(odd_R)]}: expected a step_id for each of its steps, got none for one")
    first_R = ~has_step_R | pc.fill_null(pc.equal(table.column("index"), 0), False).to_numpy()
    first_R[:1] = True
    first_R[1:] |= pc.not_equal(ids[1:], ids[:-1]).to_numpy(False)
    started = ids.filter(pa.array(first_R)).dictionary_encode()
    if len(started.dictionary) < len(started):
        twice = started.dictionary[_first(np.bincount(started.indices.to_numpy()) > 1)]
        raise BatchError(f"trajectory {twice}: ids must be unique and rows lie together, but it begins twice")
    return first_R, has_step_R


class _Steps:
    """The rows that are steps, in columns, without the rows of trajectories without steps."""

    def __init__(self, table: pa.Table, has_step_R: Bools, trajectory_S: Ints) -> None:
        self.table, self.has_step_R, self.trajectory_S, self.n = table, has_step_R, trajectory_S, len(trajectory_S)
        self.rows = table  # used for scalar columns; lists are empty in rows without a step, so `lists` reads `table`
        if self.n < len(has_step_R):
            edges = np.flatnonzero(np.diff(has_step_R, prepend=False, append=False)).reshape(-1, 2)
            scalars = table.select([field.name for field in _SCHEMA if not pa.types.is_list(field.type)])
            runs = [scalars.slice(start, stop - start) for start, stop in edges.tolist()]
            self.rows = pa.concat_tables(runs) if runs else scalars.slice(0, 0)

    def column(self, name: str, *, optional: bool = False) -> pa.ChunkedArray:
        column = self.rows.column(name)
        if column.null_count and not optional:
            self.refuse(column.is_null().to_numpy(), lambda s: f"expected a value in column {name}, got none")
        return column

    def integers(self, name: str) -> Ints:
        return np.array(self.column(name).to_numpy(), dtype=np.int64)

    def lists(self, name: str) -> tuple[Ints, pa.Array]:
        """The length of each step's list, and the concatenated values."""
        lists = _whole(self.table.column(name))
        if lists.null_count:
            missing_S = lists.is_null().to_numpy(False)[self.has_step_R]
            self.refuse(missing_S, lambda s: f"expected a value in column {name}, got none")
        lengths_R = np.diff(lists.offsets.to_numpy()).astype(np.int64)
        if lengths_R[~self.has_step_R].any():  # not the case in tables from this module
            lists = lists.filter(pa.array(self.has_step_R))
        start, stop = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
        return lengths_R[self.has_step_R], lists.values.slice(start, stop - start)

    def numbers(self, name: str, *, optional: bool = False) -> tuple[Ints, NDArray[Any]]:
        """`lists` with the values as an array; missing values become NaN if `optional`, or else raise BatchError."""
        lengths_S, values = self.lists(name)
        if not optional:
            self.refuse_nulls(name, lengths_S, values, "numbers")
        return lengths_S, values.to_numpy(zero_copy_only=False)

    def refuse_nulls(self, name: str, lengths_S: Ints, values: pa.Array, what: str) -> None:
        if values.null_count:
            at = _first(values.is_null().to_numpy(False))
            step_S = np.arange(self.n) == np.searchsorted(np.cumsum(lengths_S), at, side="right")
            self.refuse(step_S, lambda s: f"expected {what} in column {name}, got none at one place")

    def refuse(self, wrong_S: Bools, why: Callable[[int], str]) -> None:
        if wrong_S.any():
            s = _first(wrong_S)
            step, trajectory = (self.rows.column(name)[s] for name in ("step_id", "trajectory_id"))
            raise BatchError(f"step {step} of trajectory {trajectory}: {why(s)}")


def _trajectory_columns(trajectories: pa.Table) -> dict[str, Any]:
    for name in ("uid", "task", "status", "trajectory_info", "answer_steps"):
        if trajectories.column(name).null_count:
            wrong = _first(trajectories.column(name).is_null().to_numpy())
            raise BatchError(f"trajectory {trajectories.column('trajectory_id')[wrong]}: expected a {name}, got none")
    group_of_trajectory, group_names = _codes(trajectories.column("uid"))
    status_of_trajectory, statuses = _codes(trajectories.column("status"))
    _expect_outcomes_ok(trajectories)
    if unknown := set(statuses) - set(TRAJECTORY_STATUSES):
        raise BatchError(f"column status: expected one of {', '.join(TRAJECTORY_STATUSES)}, got {unknown.pop()}")
    known = [TRAJECTORY_STATUSES.index(status) for status in statuses if status in TRAJECTORY_STATUSES]
    return {
        "trajectory_ids": Column(trajectories.column("trajectory_id")),
        "tasks": Column(trajectories.column("task"), _task_of_json, "task"),
        "group_names": group_names,
        "group_of_trajectory": group_of_trajectory,
        "outcome": np.array(trajectories.column("outcome").to_numpy(), dtype=np.float64),  # NaN for null
        "outcome_scores": Column(trajectories.column("outcome_score"), _outcome_of_json, "outcome_score"),
        "status_of_trajectory": np.array(known, dtype=np.int64)[status_of_trajectory],
        "answers": Column(trajectories.column("answer")),
        "trajectory_info": Column(trajectories.column("trajectory_info"), json.loads, "trajectory_info"),
        "outcomes_of_agents": _or_empty(Column(trajectories.column("outcomes"), _outcomes_of_json, "outcomes")),
    }


def _step_columns(steps: _Steps, trajectories: pa.Table) -> dict[str, Any]:
    trajectory_S = steps.trajectory_S
    steps_N = np.bincount(trajectory_S, minlength=trajectories.num_rows)
    first_N = np.cumsum(steps_N) - steps_N
    index_S, expected_S = steps.integers("index"), np.arange(steps.n) - first_N[trajectory_S]
    steps.refuse(
        index_S != expected_S,
        lambda s: f"expected index {expected_S[s]}, its place in the trajectory, got {index_S[s]}",
    )
    child_E, parent_E = _edges(steps, index_S)
    agent_of_step, agent_names = _codes(steps.column("agent"))
    policy_of_step, policy_names = _codes(steps.column("policy"))
    stratum_of_step, stratum_names = _codes(steps.column("stratum", optional=True))
    return {
        "step_ids": Column(steps.column("step_id")),
        "trajectory_of_step": trajectory_S,
        "index_of_step": index_S,
        "agent_names": agent_names,
        "agent_of_step": agent_of_step,
        "turn_of_step": steps.integers("turn"),
        "policy_names": policy_names,
        "policy_of_step": policy_of_step,
        "policy_version": steps.integers("policy_version"),
        "temperature_of_step": np.array(steps.column("temperature").to_numpy(), dtype=np.float64),
        "is_answer": _answers(trajectories, first_N, steps_N),
        "stratum_names": stratum_names,
        "stratum_of_step": stratum_of_step,
        "prompts": Column(steps.column("prompt")),
        "responses": Column(steps.column("response")),
        "step_info": Column(steps.column("step_info"), json.loads, "step_info"),
        "version_spans": _read_version_spans(steps),
        "branch_of": _or_empty(Column(steps.column("branch_of", optional=True))),
        "edge_child": child_E,
        "edge_parent": parent_E + first_N[trajectory_S][child_E],
    }


def _or_empty(column: Column[T]) -> Sequence[T]:
    """The column; an empty one if it has no value."""
    return () if column.is_empty else column


def _read_version_spans(steps: _Steps) -> Sequence[tuple[tuple[int, int], ...]]:
    length_S, numbers = steps.numbers("version_spans")
    if not numbers.size:
        return ()
    steps.refuse(length_S % 2 > 0, lambda s: f"version_spans: expected pairs, got {length_S[s]} numbers")
    pairs = np.split(numbers.reshape(-1, 2), np.cumsum(length_S // 2)[:-1])
    spans_S = tuple(tuple((int(start), int(version)) for start, version in of_step) for of_step in pairs)
    version_S, tokens_S = steps.integers("policy_version"), steps.lists("response_ids")[0]
    for s in np.flatnonzero(length_S).tolist():
        where = f"step {steps.rows.column('step_id')[s]} of trajectory {steps.rows.column('trajectory_id')[s]}"
        check_version_spans(where, spans_S[s], int(version_S[s]), int(tokens_S[s]))
    return spans_S


def _edges(steps: _Steps, index_S: Ints) -> tuple[Ints, Ints]:
    """[E] child step of each edge, and its parent's index in the trajectory."""
    parents_S, parent_E = steps.numbers("parents")
    child_E = np.repeat(np.arange(steps.n), parents_S)

    def given(s: int) -> tuple[int, ...]:
        return tuple(parent_E[child_E == s].tolist())

    pair_E = np.sort(child_E * steps.n + parent_E)
    twice_S, outside_S = np.zeros((2, steps.n), dtype=np.bool_)
    outside_S[child_E[(parent_E < 0) | (parent_E >= index_S[child_E])]] = True
    steps.refuse(outside_S, lambda s: f"parents must come before it (0 to {index_S[s] - 1}), got {given(s)}")
    twice_S[pair_E[1:][np.diff(pair_E) == 0] // max(steps.n, 1)] = True
    steps.refuse(twice_S, lambda s: f"a parent stands twice in {given(s)}")
    return child_E, parent_E


def _answers(trajectories: pa.Table, first_N: Ints, steps_N: Ints) -> Bools:
    """[S] whether the trajectory's answer came from this step."""
    given = _whole(trajectories.column("answer_steps"))
    trajectory_A = np.repeat(np.arange(trajectories.num_rows), np.diff(given.offsets.to_numpy()))
    index_A = given.flatten().to_numpy(zero_copy_only=False)
    rises_A = np.ones(len(index_A), dtype=np.bool_)
    rises_A[1:] = (np.diff(index_A) > 0) | (np.diff(trajectory_A) > 0)
    wrong_A = ~(rises_A & (index_A >= 0) & (index_A < steps_N[trajectory_A]))
    if wrong_A.any():
        n = int(trajectory_A[_first(wrong_A)])
        raise BatchError(
            f"trajectory {trajectories.column('trajectory_id')[n]}: answer steps must rise and be of its "
            f"{steps_N[n]}, got {tuple(index_A[trajectory_A == n].tolist())}"
        )
    is_answer = np.zeros(int(steps_N.sum()), dtype=np.bool_)
    is_answer[first_N[trajectory_A] + index_A] = True
    return is_answer


def _expect_outcomes_ok(trajectories: pa.Table) -> None:
    """Raise BatchError if an outcome has a number although its scoring failed.

    Texts that contain `"status": "ok"` as this module writes it are not decoded: quotes inside a JSON string would be
    escaped, so the match is safe.
    """
    scores = trajectories.column("outcome_score")
    says_ok = pc.match_substring(_plain(scores), '"status": "ok"').fill_null(True)
    odd_N = trajectories.column("outcome").is_valid().to_numpy() & ~says_ok.to_numpy(zero_copy_only=False)
    decoded = Column(scores, _outcome_of_json, "outcome_score")
    for n in np.flatnonzero(odd_N).tolist():
        if (score := decoded[n]) is not None and score.status != "ok":
            raise BatchError(
                f"trajectory {trajectories.column('trajectory_id')[n]}: an outcome of "
                f"{trajectories.column('outcome')[n]}, but its scoring has status {score.status}"
            )


def _score_columns(steps: _Steps) -> dict[str, Any]:
    scores_S, names = steps.lists("score_names")
    steps.refuse_nulls("score_names", scores_S, names, "names")
    code_X, score_names = _codes(names)
    given = {}
    for name in ("score_values", "score_status", "score_weights"):
        counts_S, given[name] = steps.numbers(name, optional=name == "score_values")
        _refuse_counts(steps, name, scores_S, counts_S)
    shape = (steps.n, len(score_names))
    scores, weights = np.full(shape, np.nan), np.zeros(shape)
    status = np.full(shape, NOT_MATCHED, dtype=np.int64)
    at_X = (np.repeat(np.arange(steps.n), scores_S), code_X)
    scores[at_X], weights[at_X], status[at_X] = given["score_values"], given["score_weights"], given["score_status"]
    scores[status != OK] = np.nan
    odd_SK = (status < NOT_MATCHED) | (status > TIMEOUT)
    steps.refuse(
        odd_SK.any(axis=1) | ((status != NOT_MATCHED).sum(axis=1) != scores_S),
        lambda s: f"expected {scores_S[s]} scores of different names, each ok, failed or timed out",
    )
    return {
        "score_names": score_names,
        "scores": scores,
        "score_status": status,
        "score_weights": weights,
        "raw_scores": Column(steps.column("scores"), _scores_of_json, "scores"),
    }


def _refuse_counts(steps: _Steps, name: str, expected_S: Ints, got_S: Ints) -> None:
    steps.refuse(got_S != expected_S, lambda s: f"expected {expected_S[s]} values in column {name}, got {got_S[s]}")


def _token_columns(steps: _Steps) -> dict[str, Any]:
    prompt_S, prompt_ids = steps.numbers("prompt_ids")
    tokens_S, response_ids = steps.numbers("response_ids")
    mask_S, mask_T = steps.numbers("response_mask")
    logprobs_S, logprobs_T = steps.numbers("logprobs")
    steps.refuse(
        (mask_S != tokens_S) | (logprobs_S != tokens_S),
        lambda s: (
            f"expected a mask and a log-probability for each of {tokens_S[s]} response tokens, got {mask_S[s]} and "
            f"{logprobs_S[s]}"
        ),
    )
    return {
        "prompt_offsets": _offsets(prompt_S),
        "prompt_ids": prompt_ids,
        "token_offsets": _offsets(tokens_S),
        "response_ids": response_ids,
        "response_mask": mask_T.astype(np.bool_),
        "logprobs": logprobs_T,
        "ref_logprobs": _ref_logprobs(steps, tokens_S),
    }


def _ref_logprobs(steps: _Steps, tokens_S: Ints) -> Floats:
    given_S, given_T = steps.numbers("ref_logprobs")
    nan_S = np.zeros(steps.n, dtype=np.int64)
    if np.isnan(given_T).any():
        nan_S = np.bincount(np.repeat(np.arange(steps.n), given_S)[np.isnan(given_T)], minlength=steps.n)
    steps.refuse(
        ((given_S != 0) & (given_S != tokens_S)) | (nan_S > 0),
        lambda s: (
            f"expected no reference log-probabilities, or a number for each of {tokens_S[s]} response tokens, got "
            f"{given_S[s]} values, {nan_S[s]} of them NaN"
        ),
    )
    if not given_T.size or given_T.size == tokens_S.sum():
        return given_T
    ref_logprobs = np.full(int(tokens_S.sum()), np.nan)
    ref_logprobs[np.repeat(given_S > 0, tokens_S)] = given_T
    return ref_logprobs


def _first(wrong: Bools) -> int:
    return int(np.argmax(wrong))


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, dictionaries decoded to text."""
    return _whole(column.cast(_TEXT) if pa.types.is_dictionary(column.type) else column)


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column


def _codes(column: pa.ChunkedArray | pa.Array) -> tuple[Ints, tuple[str, ...]]:
    """Integer codes in order of first appearance, -1 for null, and the names that they index."""
    coded = _plain(column).dictionary_encode()
    return coded.indices.fill_null(-1).to_numpy().astype(np.int64), tuple(coded.dictionary.to_pylist())


def _task_of_json(text: str) -> Task:
    task = json.loads(text)
    return Task(**{**task, "prompt": tuple(task["prompt"])})


def _outcome_of_json(text: str | None) -> Score | None:
    return None if text is None else _score_of_json(json.loads(text))


def _outcomes_of_json(text: str | None) -> dict[str, Score]:
    return {} if text is None else _scores_of_json(text)


def _scores_of_json(text: str) -> dict[str, Score]:
    return {name: _score_of_json(score) for name, score in json.loads(text).items()}


def _score_of_json(score: dict[str, Any]) -> Score:
    value = score["value"]
    return Score(
        **{**score, "value": tuple(value) if isinstance(value, list) else value, "range": tuple(score["range"])}
    )


# ---- files ---------------------------------------------------------------------------------------------------------


_REPEATED = {
    *(field.name for field in _OF_TRAJECTORY if field.type == _TEXT),
    *("agent", "policy", "stratum", "response_mask", "score_names", "score_status"),
}
"""Columns with few distinct values, written with a dictionary, which for other columns costs more than it saves."""


_SPLIT = ("prompt_ids", "response_ids", "logprobs", "ref_logprobs")
"""Numeric columns with similar high bytes: byte-stream split makes them a fifth smaller and faster to write."""


def write_parquet(
    batch: TrajectoryBatch,
    path: Path | str,
    step_columns: Mapping[str, NDArray[Any]] | None = None,
    *,
    trajectory_columns: Mapping[str, NDArray[Any]] | None = None,
    token_columns: Mapping[str, NDArray[Any]] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write one row per step, and one per trajectory without steps, with the columns of `schema`.

    A batch built from a table is written as that table. `step_columns`, `trajectory_columns`, `token_columns`: further
    [S], [N] and [T] columns for readers of the file, such as an assignment's credit; they are not part of the batch.
    `facts`: metadata of the file as a whole, as JSON values. The file is written in place; `runs` writes crash-safe.
    """
    table, step_columns = table_of(batch), step_columns or {}
    has_step_R = table.column("step_id").is_valid().to_numpy()
    step_of_row = np.where(has_step_R, np.cumsum(has_step_R) - 1, -1)
    trajectory_of_row = np.cumsum(_starts(table)[0]) - 1
    kinds = (
        (step_columns, batch.n_steps, "step", pa.array, step_of_row),
        (trajectory_columns or {}, batch.n_trajectories, "trajectory", pa.array, trajectory_of_row),
        (
            token_columns or {},
            len(batch.response_ids),
            "response token",
            lambda values: _lists(batch.token_offsets, values, pa.float64()),
            step_of_row,
        ),
    )
    for columns, expected, each, array, of_row in kinds:
        for name, values in columns.items():
            if name in table.column_names:
                raise BatchError(f"column {name}: a trajectory batch has one of that name already")
            if len(values) != expected:
                raise BatchError(f"column {name}: expected {expected} values, one per {each}, got {len(values)}")
            table = table.append_column(name, _take(array(values), of_row))
    repeated = {*_REPEATED, *step_columns, *(trajectory_columns or {})}
    split = {*_SPLIT, *(token_columns or {})}
    leaf = {f.name: f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in table.schema}
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",  # a third smaller than lz4, for a fifth more time
        use_dictionary=[leaf[name] for name in leaf if name in repeated],
        dictionary_pagesize_limit=1 << 30,  # keeps a long task in the dictionary, so stored once
        column_encoding={leaf[name]: "BYTE_STREAM_SPLIT" for name in leaf if name in split},
        write_statistics=False,
        store_schema=False,  # other readers need not know that texts were dictionaries here
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_FACTS: json.dumps({"format": FORMAT, **(facts or {})})})


_FACTS = b"creditflow"
"""The key of `facts` in a file's metadata."""


def read_parquet(path: Path | str) -> TrajectoryBatch:
    """Read a batch that `write_parquet` wrote, ignoring further columns.

    Texts and JSON are decoded on access. Raises BatchError for a file of another kind, of a later format, or with
    inconsistent columns.
    """
    return read_beside(path)[0]


@dataclass(frozen=True, slots=True)
class ExtraContents:
    """The further contents of a file beside the batch."""

    facts: dict[str, Any]
    step: dict[str, NDArray[Any]]
    """[S] columns by name; NaN for null."""
    trajectory: dict[str, NDArray[Any]]
    """[N] columns by name."""
    token: dict[str, NDArray[Any]]
    """[T] columns by name."""


def facts_of(path: Path | str) -> dict[str, Any]:
    """Read the `facts` in a file's metadata, without its columns. Raises BatchError for a file of another kind."""
    try:
        with pq.ParquetFile(path) as file:
            return _facts(file)
    except (OSError, ValueError) as error:
        raise BatchError(f"{path}: not a readable Parquet file of steps: {error}") from error


def _facts(file: pq.ParquetFile) -> dict[str, Any]:
    facts = json.loads((file.metadata.metadata or {}).get(_FACTS, b"{}"))
    if not isinstance(facts, dict):
        raise ValueError(f"expected an object under the key {_FACTS.decode()}, got {facts!r}")
    if (version := facts.pop("format", 1)) not in range(1, FORMAT + 1):
        raise ValueError(f"a file of format {version}; this creditflow reads up to {FORMAT}: update creditflow")
    return facts


def read_beside(
    path: Path | str,
    step_columns: Iterable[str] = (),
    *,
    trajectory_columns: Iterable[str] = (),
    token_columns: Iterable[str] = (),
) -> tuple[TrajectoryBatch, ExtraContents]:
    """Read the batch in a file, and the named further columns that the file has.

    Raises BatchError for a file of another kind or with inconsistent columns.
    """
    try:
        repeated = [field.name for field in _OF_TRAJECTORY if field.type == _TEXT]
        with pq.ParquetFile(path, read_dictionary=repeated) as file:  # pq.read_table would import pandas
            present = set(file.schema_arrow.names)
            wanted = (*schema().names, *step_columns, *trajectory_columns, *token_columns)
            table = file.read(columns=[name for name in wanted if name in present])
            facts = _facts(file)
    except KeyError as error:
        raise BatchError(f"{path}: a Parquet file, but not of steps: it has no such columns") from error
    except (OSError, ValueError) as error:
        raise BatchError(f"{path}: not a readable Parquet file of steps: {error}") from error
    try:
        batch = batch_of(table)
        return batch, _beside(table, batch, facts, *map(tuple, (step_columns, trajectory_columns, token_columns)))
    except BatchError as error:
        raise BatchError(f"{path}: {error}") from error


def _beside(
    table: pa.Table,
    batch: TrajectoryBatch,
    facts: dict[str, Any],
    of_steps: tuple[str, ...],
    of_trajectories: tuple[str, ...],
    of_tokens: tuple[str, ...],
) -> ExtraContents:
    first_R, has_step_R = _starts(table)
    present = set(table.column_names)

    def rows(name: str, of_row: Bools) -> pa.Array:
        return _whole(table.column(name).filter(pa.array(of_row)))

    token = {name: rows(name, has_step_R) for name in of_tokens if name in present}
    for name, lists in token.items():
        if lists.null_count or (np.diff(lists.offsets.to_numpy()) != np.diff(batch.token_offsets)).any():
            raise BatchError(f"column {name}: expected a value for each response token of each step")
    return ExtraContents(
        facts,
        {name: rows(name, has_step_R).to_numpy(zero_copy_only=False) for name in of_steps if name in present},
        {name: rows(name, first_R).to_numpy(zero_copy_only=False) for name in of_trajectories if name in present},
        {name: lists.flatten().to_numpy(zero_copy_only=False) for name, lists in token.items()},
    )
