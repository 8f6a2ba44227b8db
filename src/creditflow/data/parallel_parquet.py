"""Write a Parquet file whose row groups are encoded in several threads.

pyarrow's writer uses one thread. Here it encodes each row group as a file in memory. This module copies their pages
into one file and shifts the offsets in their footers, because pyarrow can join footers, but not shift them. A footer is
a struct of Thrift's compact protocol (github.com/apache/thrift, doc/specs/thrift-compact-protocol.md), with the fields
of github.com/apache/parquet-format, src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_MAX_THREADS = 8
"""The limit on a machine with many cores, whose other processes need them, too."""


def write_row_groups(
    table: pa.Table,
    path: Path | str,
    facts: Mapping[bytes, Any],
    *,
    row_group_size: int,
    use_dictionary: Sequence[str],
    column_encoding: Mapping[str, str],
) -> None:
    """Write a table in row groups of `row_group_size` rows.

    `facts`: the file's metadata, as JSON values by key. `use_dictionary`, `column_encoding`: as for
    `pyarrow.parquet.ParquetWriter`. Raises OSError if the file cannot be written.
    """
    metadata = {key: json.dumps(value) for key, value in facts.items()}
    for i, column in enumerate(table.columns):
        if pa.types.is_dictionary(column.type) and column.num_chunks > 1:
            table = table.set_column(i, table.field(i), column.unify_dictionaries())

    def encode(begin: int) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(
            sink,
            table.schema,
            compression="zstd",  # a third smaller than lz4, for a fifth more time
            use_dictionary=list(use_dictionary),
            dictionary_pagesize_limit=1 << 30,  # keeps a long task in the dictionary, so stored once per row group
            column_encoding=dict(column_encoding),
            write_statistics=False,
            store_schema=False,  # other readers need not know that texts were dictionaries here
        ) as writer:
            group = _without_unused_entries(table.slice(begin, row_group_size))
            writer.write_table(group, row_group_size=row_group_size)
            if begin == 0:
                writer.add_key_value_metadata(metadata)
        return sink.getvalue()

    footer: pq.FileMetaData | None = None
    with Path(path).open("wb") as file:
        file.write(_MAGIC)
        for encoded in _in_threads(encode, range(0, max(1, table.num_rows), row_group_size)):
            pages, group_footer = _split(encoded)
            shifted = _shift_offsets(group_footer, file.tell() - len(_MAGIC))
            file.write(pages)
            metadata_of_group = pq.read_metadata(pa.BufferReader(_footer_file(shifted)))
            if footer is None:
                footer = metadata_of_group
            else:
                footer.append_row_groups(metadata_of_group)
        assert footer is not None
        joined = pa.BufferOutputStream()
        footer.write_metadata_file(joined)
        file.write(joined.getvalue()[len(_MAGIC) :])


def _in_threads(encode: Callable[[int], pa.Buffer], begins: range) -> Iterator[pa.Buffer]:
    """Encode row groups in parallel and yield them in order.

    A slow disk stops the threads, so that few groups are in memory.
    """
    n_threads = min(len(begins), len(os.sched_getaffinity(0)), _MAX_THREADS)
    if n_threads == 1:  # without a pool, which cannot start when the interpreter ends
        yield from map(encode, begins)
        return
    pending: deque[Future[pa.Buffer]] = deque()
    with ThreadPoolExecutor(n_threads, thread_name_prefix="creditflow-parquet") as pool:
        for begin in begins:
            pending.append(pool.submit(encode, begin))
            if len(pending) > n_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _without_unused_entries(group: pa.Table) -> pa.Table:
    """Drop dictionary entries that the rows do not use, because pyarrow would write them all."""
    for i, field in enumerate(group.schema):
        if pa.types.is_dictionary(field.type):
            coded = group.column(i).combine_chunks()
            used = coded.indices.unique().drop_null()
            indices = pc.index_in(coded.indices, used).cast(field.type.index_type)
            coded = pa.DictionaryArray.from_arrays(indices, coded.dictionary.take(used), ordered=field.type.ordered)
            group = group.set_column(i, field, coded)
    return group


def _split(file: pa.Buffer) -> tuple[pa.Buffer, bytes]:
    """The pages and the footer of a file that ends with the footer, its length in four bytes, and the magic number."""
    end = len(file) - 8
    begin = end - int.from_bytes(file[end : end + 4].to_pybytes(), "little")
    return file[len(_MAGIC) : begin], file[begin:end].to_pybytes()


def _footer_file(footer: bytes) -> bytes:
    """A Parquet file without pages."""
    return _MAGIC + footer + len(footer).to_bytes(4, "little") + _MAGIC


# ---- Thrift --------------------------------------------------------------------------------------------------------


class _Kind(IntEnum):
    """The type of a value in Thrift's compact protocol. A boolean field's value is its type: TRUE or FALSE."""

    STOP = 0
    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    SET = 10
    STRUCT = 12


_OFFSETS = {
    (4, 5),  # RowGroup.file_offset
    (4, 1, 2),  # ColumnChunk.file_offset
    (4, 1, 3, 9),  # ColumnMetaData.data_page_offset
    (4, 1, 3, 10),  # ColumnMetaData.index_page_offset
    (4, 1, 3, 11),  # ColumnMetaData.dictionary_page_offset
}
"""Offsets in the file, as paths of field numbers that begin at FileMetaData: row groups are its field 4.

Page indexes and Bloom filters have further ones. They are not written.
"""


def _shift_offsets(footer: bytes, shift: int) -> bytes:
    """Add `shift` to the offsets in a FileMetaData. An offset of 0 means absent and stays 0."""
    return bytes(_OffsetShifter(footer, shift).struct(()))


class _OffsetShifter:
    """A reader of Thrift structs that returns their bytes, with shifted offsets."""

    def __init__(self, footer: bytes, shift: int) -> None:
        self._footer, self._shift, self._position = footer, shift, 0

    def struct(self, path: tuple[int, ...]) -> bytearray:
        """Read the struct at the current position. `path`: the field numbers that lead to it."""
        out, field = bytearray(), 0
        while (head := self._read(1))[0] != _Kind.STOP:
            out += head
            if difference := head[0] >> 4:  # to the field before
                field += difference
            else:
                number, encoded = self._read_varint()
                out += encoded
                field = number >> 1  # zigzag; Parquet's field numbers are positive
            kind = _Kind(head[0] & 15)
            if kind not in (_Kind.TRUE, _Kind.FALSE):
                out += self._value(kind, (*path, field))
        return out + head

    def _value(self, kind: _Kind, path: tuple[int, ...]) -> bytes | bytearray:
        match kind:
            case _Kind.TRUE | _Kind.FALSE | _Kind.BYTE:
                return self._read(1)
            case _Kind.I16 | _Kind.I32 | _Kind.I64:
                number, encoded = self._read_varint()
                # In zigzag coding, a positive number is stored as twice its value.
                return _varint(number + 2 * self._shift) if path in _OFFSETS and number else encoded
            case _Kind.DOUBLE:
                return self._read(8)
            case _Kind.BINARY:
                size, encoded = self._read_varint()
                return encoded + self._read(size)
            case _Kind.LIST | _Kind.SET:
                out = bytearray(self._read(1))
                size, element = out[0] >> 4, _Kind(out[0] & 15)
                if size == 15:
                    size, encoded = self._read_varint()
                    out += encoded
                for _ in range(size):
                    out += self._value(element, path)
                return out
            case _Kind.STRUCT:
                return self.struct(path)
        raise ValueError(f"Parquet footer: expected a value, got Thrift's type {kind}")

    def _read(self, size: int) -> bytes:
        self._position += size
        return self._footer[self._position - size : self._position]

    def _read_varint(self) -> tuple[int, bytes]:
        """Read a number of seven bits per byte, lowest first; returns the number and its bytes."""
        begin = self._position
        while self._footer[self._position] > 127:
            self._position += 1
        self._position += 1
        encoded = self._footer[begin : self._position]
        return sum((byte & 127) << 7 * i for i, byte in enumerate(encoded)), encoded


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
