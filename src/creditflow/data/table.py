"""Trajectory batches as Arrow tables, for Parquet files and messages between processes.

This module imports pyarrow at the top, so callers import it inside functions.

A table has one row per step, in the batch's order, and one row with a null `step_id` for a trajectory without steps.
The columns of a trajectory repeat in each of its rows. In memory they are dictionary-encoded, so that a task of 100 kB
is stored once rather than for each of thirty steps.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from creditflow.data.assembly import Lists, Places, columns_of_lists, offsets_of
from creditflow.data.batch import TrajectoryBatch
from creditflow.data.columns import ColumnSpec, Made, column_specs
from creditflow.data.trajectory import NOT_MATCHED, OK, Bools, Ints, Score, Task, Trajectory
from creditflow.data.validation import check_outcome_status, first_true, validate
from creditflow.errors import BatchError, first_line

T = TypeVar("T")

_TEXT, _INTS, _REALS = pa.string(), pa.list_(pa.int64()), pa.list_(pa.float64())
_JOINED = {"answer_steps", "parents", "version_spans", "score_names", "score_values", "score_status", "score_weights"}
"""Columns of lists that are not lists of one value per token."""
FORMAT = 2
"""Version of the columns, in a file's metadata. Files of another version are refused."""


def _specs(*shapes: str) -> list[ColumnSpec]:
    """The columns of a batch with these shapes that are columns of a table as well, in `_JOINED` apart."""
    return [spec for spec in column_specs() if spec.per.shape in shapes and spec.per.table not in {"", *_JOINED}]


def _fields(*shapes: str) -> Iterator[tuple[str, pa.DataType]]:
    """Name and type of these columns: text for names and for objects, which are written as JSON."""
    for spec in _specs(*shapes):
        type = _TEXT
        if spec.dtype is not None and not spec.per.into:
            type = pa.int8() if spec.dtype == np.bool_ else pa.from_numpy_dtype(spec.dtype)
        yield spec.per.table, pa.list_(type) if spec.per.shape in ("P", "T") else type


_OF_TRAJECTORY = pa.schema([*_fields("N"), ("answer_steps", _INTS)])
_OF_STEP = pa.schema(
    [
        *_fields("S", "P", "T"),
        ("parents", _INTS),
        ("version_spans", _INTS),  # first token and version of each span, in one list
        # The scores again, as the numbers from which credit is computed.
        ("score_names", pa.list_(_TEXT)),
        ("score_values", _REALS),  # rescaled to [0, 1]; null if the scoring failed
        ("score_status", pa.list_(pa.int8())),  # 1 ok, 2 failed, 3 timeout
        ("score_weights", _REALS),
    ]
)
SCHEMA = pa.schema([*_OF_TRAJECTORY, *_OF_STEP])
"""The columns of a table: trajectory columns, then step columns."""


class Column(Made[T]):
    """Values of an Arrow column, each decoded on access.

    Access raises BatchError for a value that cannot be decoded, so was not written by this module.
    """

    def __init__(self, values: pa.ChunkedArray, decode: Callable[[Any], T] | None = None, name: str = "") -> None:
        super().__init__(len(values), lambda i: decode(values[i].as_py()) if decode else values[i].as_py())
        self._texts, self._name = None if decode else values, name

    def _at(self, i: int) -> T:
        try:
            return super()._at(i)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BatchError(f"column {self._name}, entry {i}: {first_line(error)}") from error

    def __iter__(self) -> Iterator[T]:
        if self._texts is None:
            return super().__iter__()
        return (text for chunk in self._texts.iterchunks() for text in chunk.to_pylist())


# ---- to a table ----------------------------------------------------------------------------------------------------


def table_of(source: TrajectoryBatch | Sequence[Trajectory]) -> pa.Table:
    """The table of a batch or of trajectories; a batch built from a table returns that table.

    Raises BatchError if the trajectories do not form a batch or hold a value that cannot be written: a task or `info`
    that JSON cannot represent, or text that UTF-8 cannot encode.
    """
    batch = source if isinstance(source, TrajectoryBatch) else TrajectoryBatch.from_trajectories(source)
    return batch.table if batch.table is not None else _spread(pa.Table.from_batches([_compact(batch)]))


def pack(source: Trajectory | Sequence[Trajectory]) -> bytes:
    """Pack finished, scored trajectories into a message for `read_part` in another process of the same run.

    The message is a checksum, the uncompressed size, and a compressed record batch without its schema. Raises
    BatchError like `table_of`.
    """
    trajectories = [source] if isinstance(source, Trajectory) else list(source)
    message = _compact(TrajectoryBatch.from_trajectories(trajectories)).serialize()
    rest = message.size.to_bytes(_SIZE, "little") + _CODEC.compress(message, asbytes=True)
    return bytes(_checksum(rest) + rest)


_TEXTS = ("prompt", "response", "scores", "step_info")
"""Long texts of steps, nearly half of a batch's bytes. Most rules of credit read none of them."""


def read_part(message: bytes | memoryview, name: str) -> pa.RecordBatch:
    """Read the trajectories in one message.

    Raises BatchError, with the given name, for a damaged message, or one packed by a version of creditflow with another
    schema.
    """
    return pa.ipc.read_record_batch(_opened(memoryview(message), name), SCHEMA)


def join(parts: Sequence[pa.RecordBatch]) -> pa.Table:
    """Join the rows of several messages, in order. Long texts are not copied.

    Raises BatchError if a column of all messages together is too large for Arrow.
    """
    table = pa.Table.from_batches(parts, SCHEMA)
    try:
        # One chunk for each other column, so that the batch can view its tokens without a copy.
        columns = [table.column(name) if name in _TEXTS else _whole(table.column(name)) for name in SCHEMA.names]
    except pa.ArrowInvalid as error:
        raise BatchError(f"{len(parts)} messages are too large for one batch; train on fewer tasks: {error}") from error
    return _spread(pa.table(columns, schema=SCHEMA))


_CODEC = pa.Codec("lz4")
_CHECKSUM, _SIZE = 4, 8
"""Bytes of the checksum and the size at the start of a message."""


def _opened(message: memoryview, name: str) -> pa.Buffer:
    rest = message[_CHECKSUM:]
    if len(rest) < _SIZE or message[:_CHECKSUM] != _checksum(rest):
        raise BatchError(
            f"{name} of packed trajectories: its {len(message)} bytes do not fit their checksum; expected "
            "what the same version of creditflow packed, undamaged"
        )
    return _CODEC.decompress(rest[_SIZE:], int.from_bytes(rest[:_SIZE], "little"))


def _checksum(rest: bytes | memoryview) -> bytes:
    """CRC-32 of the schema and `rest`, so that a message with other columns does not match."""
    return zlib.crc32(rest, _SCHEMA_CHECKSUM).to_bytes(_CHECKSUM, "little")


_SCHEMA_CHECKSUM = zlib.crc32(SCHEMA.serialize())


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
    return pa.record_batch([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _of_trajectories(batch: TrajectoryBatch) -> dict[str, pa.Array]:
    answers = np.flatnonzero(batch.is_answer)
    answers_N = np.bincount(batch.trajectory_of_step[answers], minlength=batch.n_trajectories)
    return {
        **_plain_columns(batch, "N", "trajectory", batch.trajectory_ids),
        "answer_steps": _lists(offsets_of(answers_N), batch.index_of_step[answers], pa.int64()),
    }


def _of_steps(batch: TrajectoryBatch) -> dict[str, pa.Array]:
    order, none_S = np.argsort(batch.edge_child, kind="stable"), np.zeros(batch.n_steps + 1, dtype=np.int64)
    parents_S = np.bincount(batch.edge_child, minlength=batch.n_steps)
    spans = batch.version_spans or [()] * batch.n_steps
    matched_SK = batch.score_status != NOT_MATCHED
    status_X, score_offsets = batch.score_status[matched_SK], offsets_of(matched_SK.sum(axis=1))
    values_X = pa.array(batch.scores[matched_SK], mask=status_X != OK)
    has_ref_T = ~np.isnan(batch.ref_logprobs)
    ref_offsets = offsets_of(has_ref_T)[batch.token_offsets if has_ref_T.size else none_S]
    return {
        **_plain_columns(batch, "S", "step", batch.step_ids),
        "parents": _lists(offsets_of(parents_S), batch.index_of_step[batch.edge_parent[order]], pa.int64()),
        "version_spans": pa.array([[number for span in of_step for number in span] for of_step in spans], _INTS),
        "prompt_ids": _lists(batch.prompt_offsets, batch.prompt_ids, pa.int32()),
        "response_ids": _lists(batch.token_offsets, batch.response_ids, pa.int32()),
        "response_mask": _lists(batch.token_offsets, batch.response_mask.astype(np.int8), pa.int8()),
        "logprobs": _lists(batch.token_offsets, batch.logprobs, pa.float64()),
        "ref_logprobs": _lists(ref_offsets, batch.ref_logprobs[has_ref_T], pa.float64()),
        "score_names": _lists(score_offsets, _names(batch.score_names, np.nonzero(matched_SK)[1]), _TEXT),
        "score_values": _lists(score_offsets, values_X, pa.float64()),
        "score_status": _lists(score_offsets, status_X, pa.int8()),
        "score_weights": _lists(score_offsets, batch.score_weights[matched_SK], pa.float64()),
    }


def _plain_columns(batch: TrajectoryBatch, shape: str, what: str, ids: Sequence[str]) -> dict[str, pa.Array]:
    """The columns of a table with one value for each trajectory or step."""
    columns = {}
    for spec in _specs(shape):
        name, values = spec.per.table, getattr(batch, spec.name)
        if spec.per.into:
            columns[name] = _names(spec.per.names(batch), values)
        elif spec.dtype is not None:
            columns[name] = pa.array(
                values, SCHEMA.field(name).type, mask=np.isnan(values) if name == "outcome" else None
            )
        elif name in _DECODERS:
            texts = (value or None for value in values) if spec.per.optional else values
            default = None if name.endswith("_info") else _record_as_json  # info is read back as it was written
            columns[name] = _json(list(texts) or [None] * len(ids), what, ids, default)
        else:
            columns[name] = _text(values or [None] * len(ids), what, ids)
    return columns


def _record_as_json(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, Task | Score):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _json(values: Sequence[object], what: str, ids: Sequence[str], default: Callable[[Any], Any] | None) -> pa.Array:
    """A column of JSON. `default`: converts values that JSON cannot express."""
    texts = []
    for i, value in enumerate(values):
        try:
            texts.append(None if value is None else _spelled(value, default))
        except (TypeError, ValueError, RecursionError) as error:
            raise BatchError(f"{what} {ids[i]}: expected what can be written as JSON: {first_line(error)}") from error
    return pa.array(texts, type=_TEXT)


def _spelled(value: object, default: Callable[[Any], Any] | None) -> str:
    """A value as JSON that every reader accepts: a lone surrogate becomes U+FFFD."""
    text = json.dumps(value, default=default, ensure_ascii=False)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(values: Sequence[str | None], what: str, ids: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, type=_TEXT)
    except UnicodeEncodeError as error:
        wrong = next(i for i, text in enumerate(values) if text and text != text.encode(errors="replace").decode())
        raise BatchError(f"{what} {ids[wrong]!r}: expected text that UTF-8 can hold: {error.reason}") from error


def _names(names: Sequence[str], codes: Ints) -> pa.Array:
    """The names that codes index; -1: null."""
    return _take(_text(names, "name", names), codes)


def _take(array: pa.Array, at: Ints) -> pa.Array:
    """The entries of `array` at `at`; -1: null."""
    if np.array_equal(at, np.arange(len(array))):
        return array
    return array.take(pa.array(at, mask=at < 0))


def _lists(offsets: Ints, values: NDArray[Any] | pa.Array, type: pa.DataType) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, type))


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
    rows = _known(table)
    first_R, has_step_R = _starts(rows)
    trajectories = rows.select(_OF_TRAJECTORY.names).filter(pa.array(first_R))
    steps = rows.select(_OF_STEP.names)
    if not has_step_R.all():  # column by column: a table is cut at every chunk of its texts first
        steps = pa.table([column.filter(pa.array(has_step_R)) for column in steps.columns], names=_OF_STEP.names)
    trajectory_S = (np.cumsum(first_R) - 1)[has_step_R]
    places = Places(Column(trajectories.column("trajectory_id")), Column(steps.column("step_id")), trajectory_S)
    _refuse_nulls(places, trajectories, steps)
    _refuse_failed_outcomes(places, trajectories)
    lists = {f.name: _lists_of(steps.column(f.name), f.name, places.step) for f in _OF_STEP if pa.types.is_list(f.type)}
    answer_steps = _lists_of(trajectories.column("answer_steps"), "answer_steps", places.trajectory)
    _, score_names = _codes(_whole(steps.column("score_names")).flatten())
    batch = TrajectoryBatch(
        **_read_plain(trajectories, "N"),
        **_read_plain(steps, "S"),
        **columns_of_lists(places, lists, answer_steps, score_names),
        trajectory_of_step=trajectory_S,
        version_spans=_spans_of(places, lists["version_spans"]),
    )
    validate(batch)
    batch.remember(table=rows)
    return batch


def _known(table: pa.Table) -> pa.Table:
    """Select a batch's columns and cast them to the schema's types."""
    if missing := sorted(set(SCHEMA.names) - set(table.column_names)):
        raise BatchError(f"expected the columns of a trajectory batch, missing {', '.join(missing)}")
    columns = []
    for field in SCHEMA:
        column = table.column(field.name)
        coded = field.type == _TEXT and pa.types.is_dictionary(column.type)
        try:
            columns.append(column if coded or column.type == field.type else column.cast(field.type))
        except pa.ArrowException as error:
            raise BatchError(f"column {field.name}: expected {field.type}, got {column.type}: {error}") from error
    return pa.table(columns, names=SCHEMA.names)


def _starts(table: pa.Table) -> tuple[Bools, Bools]:
    """(first_R, has_step_R): whether each row begins a trajectory, and whether it is a step."""
    ids = _plain(table.column("trajectory_id"))
    if ids.null_count:
        raise BatchError(f"row {first_true(ids.is_null().to_numpy(False))}: expected a trajectory_id, got none")
    has_step_R, has_index_R = (table.column(name).is_valid().to_numpy() for name in ("step_id", "index"))
    if (odd_R := ~has_step_R & has_index_R).any():
        raise BatchError(
            f"trajectory {ids[first_true(odd_R)]}: expected a step_id for each of its steps, got none for one"
        )
    first_R = ~has_step_R | pc.fill_null(pc.equal(table.column("index"), 0), False).to_numpy()
    first_R[:1] = True
    first_R[1:] |= pc.not_equal(ids[1:], ids[:-1]).to_numpy(False)
    started = ids.filter(pa.array(first_R)).dictionary_encode()
    if len(started.dictionary) < len(started):
        twice = started.dictionary[first_true(np.bincount(started.indices.to_numpy()) > 1)]
        raise BatchError(f"trajectory {twice}: ids must be unique and rows lie together, but it begins twice")
    return first_R, has_step_R


_OPTIONAL = {"answer", "outcome", "outcome_score", "outcomes", "stratum"}
"""Columns that may be null."""


def _refuse_failed_outcomes(places: Places, trajectories: pa.Table) -> None:
    """Raise BatchError if an outcome has a number although its scoring failed.

    A score is decoded only if its text lacks `"status": "ok"` as this module writes it. Inside a JSON string the quotes
    would be escaped, so the match is safe.
    """
    scores, outcome_N = trajectories.column("outcome_score"), trajectories.column("outcome").to_numpy()
    says_ok = pc.match_substring(_plain(scores), '"status": "ok"').fill_null(True).to_numpy(False)
    for n in np.flatnonzero(~np.isnan(outcome_N) & ~says_ok).tolist():
        check_outcome_status(places.trajectory(n), _outcome_of_json(scores[n].as_py()), outcome_N[n])


def _refuse_nulls(places: Places, trajectories: pa.Table, steps: pa.Table) -> None:
    for table, place in ((trajectories, places.trajectory), (steps, places.step)):
        for name in set(table.column_names) - _OPTIONAL:
            if table.column(name).null_count:
                where = place(first_true(table.column(name).is_null().to_numpy()))
                raise BatchError(f"{where}: expected a value in column {name}, got none")


def _read_plain(table: pa.Table, shape: str) -> dict[str, Any]:
    """The columns of a batch with one entry for each row."""
    columns: dict[str, Any] = {}
    for spec in _specs(shape):
        name, column = spec.per.table, table.column(spec.per.table)
        if spec.per.into:
            columns |= spec.per.coded(spec.name, *_codes(column))
        elif spec.dtype is not None:
            columns[spec.name] = np.array(column.to_numpy(), dtype=spec.dtype)  # NaN for null
        elif spec.per.optional and column.null_count == len(column):
            columns[spec.name] = ()
        else:
            columns[spec.name] = Column(column, _DECODERS.get(name), name)
    return columns


def _lists_of(column: pa.ChunkedArray, name: str, where: Callable[[int], str]) -> Lists:
    """The lists of a column: numbers, or texts as codes. A score without a value is NaN."""
    lists = _whole(column)
    values, lengths = lists.flatten(), np.diff(lists.offsets.to_numpy()).astype(np.int64)
    of_texts = pa.types.is_string(values.type)
    if values.null_count and name != "score_values":
        owner = int(np.searchsorted(np.cumsum(lengths), first_true(values.is_null().to_numpy(False)), side="right"))
        what = "names" if of_texts else "numbers"
        raise BatchError(f"{where(owner)}: expected {what} in column {name}, got none at one place")
    return Lists(lengths, _codes(values)[0] if of_texts else values.to_numpy(zero_copy_only=False))


def _spans_of(places: Places, numbers: Lists) -> Sequence[tuple[tuple[int, int], ...]]:
    if not numbers.values.size:
        return ()
    places.refuse(numbers.lengths % 2 > 0, lambda s: f"version_spans: expected pairs, got {numbers.lengths[s]} numbers")
    pairs = [(start, version) for start, version in numbers.values.reshape(-1, 2).tolist()]
    bounds = (numbers.offsets // 2).tolist()
    return tuple(tuple(pairs[start:stop]) for start, stop in pairwise(bounds))


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


def _scores_of_json(text: str | None) -> dict[str, Score]:
    return {name: _score_of_json(score) for name, score in json.loads(text or "{}").items()}


def _score_of_json(score: dict[str, Any]) -> Score:
    value = score["value"]
    return Score(
        **{**score, "value": tuple(value) if isinstance(value, list) else value, "range": tuple(score["range"])}
    )


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "task": _task_of_json,
    "outcome_score": _outcome_of_json,
    "outcomes": _scores_of_json,
    "scores": _scores_of_json,
    "trajectory_info": json.loads,
    "step_info": json.loads,
}
"""Columns of JSON, with the functions that decode a value."""


# ---- files ---------------------------------------------------------------------------------------------------------


_REPEATED = {
    *(field.name for field in _OF_TRAJECTORY if field.type == _TEXT),
    *("agent", "policy", "stratum", "score_names", "score_status"),
}
"""Columns with few distinct values, written with a dictionary, which for other columns costs more than it saves.

So it does for `response_mask`: without one, a mask of ones takes a tenth of the time, and is still small.
"""


_SPLIT = ("prompt_ids", "response_ids", "logprobs", "ref_logprobs")
"""Numeric columns with similar high bytes: byte-stream split makes them a fifth smaller and faster to write."""


def write_parquet(
    batch: TrajectoryBatch,
    path: Path | str,
    further: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write one row per step, and one per trajectory without steps, with the columns of `SCHEMA`.

    A batch built from a table is written as that table. `further`: columns by name under "S", "N" and "T", with a value
    for each step, trajectory or response token, such as an assignment's credit; they are not part of the batch.
    `facts`: metadata of the file as a whole, as JSON values. The file is written in place; `runs` writes crash-safe.
    """
    table, further = table_of(batch), {"S": {}, "N": {}, "T": {}, **(further or {})}
    has_step_R = table.column("step_id").is_valid().to_numpy()
    step_of_row = np.where(has_step_R, np.cumsum(has_step_R) - 1, -1)
    trajectory_of_row = np.cumsum(_starts(table)[0]) - 1
    rows = {
        "S": ("step", batch.n_steps, step_of_row),
        "N": ("trajectory", batch.n_trajectories, trajectory_of_row),
        "T": ("response token", len(batch.response_ids), step_of_row),
    }
    for shape, name in [(key, name) for key, columns in further.items() for name in columns]:
        each, expected, of_row = rows[shape]
        values = further[shape][name]
        if name in table.column_names:
            raise BatchError(f"column {name}: a trajectory batch has one of that name already")
        if len(values) != expected:
            raise BatchError(f"column {name}: expected {expected} values, one per {each}, got {len(values)}")
        array = _lists(batch.token_offsets, values, pa.float64()) if shape == "T" else pa.array(values)
        table = table.append_column(name, _take(array, of_row))
    repeated, split = {*_REPEATED, *further["S"], *further["N"]}, {*_SPLIT, *further["T"]}
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
        writer.write_table(table.unify_dictionaries())  # chunks with different ones would be written in full
        writer.add_key_value_metadata({_FACTS: json.dumps({"format": FORMAT, **(facts or {})})})


_FACTS = b"creditflow"
"""The key of `facts` in a file's metadata."""


def read_parquet(path: Path | str) -> TrajectoryBatch:
    """Read a batch that `write_parquet` wrote, ignoring further columns.

    Texts and JSON are decoded on access. Raises BatchError for a file of another kind, of a later format, or with
    inconsistent columns.
    """
    return read_beside(path)[0]


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
    if (version := facts.pop("format", FORMAT)) != FORMAT:
        raise ValueError(f"a file of format {version}; this creditflow reads {FORMAT}: use the one that wrote it")
    return facts


def read_beside(
    path: Path | str, further: Mapping[str, str] | None = None
) -> tuple[TrajectoryBatch, dict[str, Any], dict[str, NDArray[Any]]]:
    """Read the batch in a file, the file's facts, and the columns of `further` that the file has, NaN for null.

    `further`: for each name, S, N or T: a value for each step, trajectory or response token. Raises BatchError for a
    file of another kind or with inconsistent columns.
    """
    names = {**dict.fromkeys(SCHEMA.names, ""), **(further or {})}
    try:
        repeated = [field.name for field in _OF_TRAJECTORY if field.type == _TEXT]
        with pq.ParquetFile(path, read_dictionary=repeated) as file:  # pq.read_table would import pandas
            present = set(file.schema_arrow.names)
            table = file.read(columns=[name for name in names if name in present])
            facts = _facts(file)
    except KeyError as error:
        raise BatchError(f"{path}: a Parquet file, but not of steps: it has no such columns") from error
    except (OSError, ValueError) as error:
        raise BatchError(f"{path}: not a readable Parquet file of steps: {error}") from error
    try:
        batch = batch_of(table)
        first_R, has_step_R = _starts(table)
        columns = {}
        for name in table.column_names:
            if shape := names[name]:
                values = _whole(table.column(name).filter(pa.array(first_R if shape == "N" else has_step_R)))
                columns[name] = (_per_token(name, values, batch) if shape == "T" else values).to_numpy(False)
    except BatchError as error:
        raise BatchError(f"{path}: {error}") from error
    return batch, facts, columns


def _per_token(name: str, lists: pa.Array, batch: TrajectoryBatch) -> pa.Array:
    if lists.null_count or (np.diff(lists.offsets.to_numpy()) != np.diff(batch.token_offsets)).any():
        raise BatchError(f"column {name}: expected a value for each response token of each step")
    return lists.flatten()
