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
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_MAGIC = b"PAR1"
_MAX_THREADS = 8
"""The limit on a machine with many cores, whose other processes need them, too."""
_JOINED_BYTES = 4 << 20
"""The maximum size of a column of a row group whose chunks are joined."""


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
            group = _without_unused_entries(_in_few_chunks(table.slice(begin, row_group_size)))
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


def _in_few_chunks(group: pa.Table) -> pa.Table:
    """Join the chunks of columns with little data, because pyarrow's writer is slower with many small chunks.

    Received texts have one chunk per message. Long ones are not copied.
    """
    for i, column in enumerate(group.columns):
        if column.num_chunks > 1 and column.nbytes <= _JOINED_BYTES:
            group = group.set_column(i, group.field(i), column.combine_chunks())
    return group


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


class _Kind:
    """Type codes of Thrift's compact protocol. A boolean field has no other value than its type: TRUE or FALSE."""

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


_INTEGERS = (_Kind.I16, _Kind.I32, _Kind.I64)
_FIXED_SIZES = {_Kind.TRUE: 0, _Kind.FALSE: 0, _Kind.BYTE: 1, _Kind.DOUBLE: 8}
"""The size in bytes of a field's value. In a list, a boolean takes one byte."""

_OFFSET = object()
_OFFSETS: dict[int, Any] = {
    4: {  # FileMetaData.row_groups, a list of RowGroup
        5: _OFFSET,  # file_offset
        1: {  # columns, a list of ColumnChunk
            2: _OFFSET,  # file_offset
            3: {  # meta_data, a ColumnMetaData
                9: _OFFSET,  # data_page_offset
                10: _OFFSET,  # index_page_offset
                11: _OFFSET,  # dictionary_page_offset
            },
        },
    }
}
"""The offsets in FileMetaData: field numbers, nested like its structs.

Page indexes and Bloom filters have further ones. They are not written.
"""


def _shift_offsets(footer: bytes, shift: int) -> bytes:
    """Add `shift` to the offsets in a FileMetaData. An offset of 0 means absent and stays 0."""
    found: list[tuple[int, int, int]] = []
    _find_offsets(footer, 0, _OFFSETS, found)
    out, copied = bytearray(), 0
    for begin, end, offset in found:
        out += footer[copied:begin] + _encode_integer(offset + shift if offset else 0)
        copied = end
    return bytes(out + footer[copied:])


def _find_offsets(data: bytes, at: int, wanted: Mapping[int, Any], found: list[tuple[int, int, int]]) -> int:
    """Read the struct at `at`, append the begin, end and value of each offset to `found`; returns the struct's end.

    `wanted`: the part of `_OFFSETS` for this struct, {} for none.
    """
    field = 0
    while head := data[at]:
        at += 1
        kind = head & 15
        if difference := head >> 4:  # from the previous field's number
            field += difference
        else:
            field, at = _read_integer(data, at)
        wanted_there = wanted.get(field)
        if wanted_there is None:
            at = _skip(data, at, kind)
        elif wanted_there is _OFFSET:
            offset, end = _read_integer(data, at)
            found.append((at, end, offset))
            at = end
        else:
            size = 1  # a struct is read like a list of one
            if kind == _Kind.LIST:
                size, _, at = _read_list_head(data, at)
            for _ in range(size):
                at = _find_offsets(data, at, wanted_there, found)
    return at + 1


def _skip(data: bytes, at: int, kind: int) -> int:
    """The end of the field's value at `at`."""
    if kind in _INTEGERS:
        _, end = _read_varint(data, at)
    elif kind == _Kind.BINARY:
        size, begin = _read_varint(data, at)
        end = begin + size
    elif kind == _Kind.STRUCT:
        end = _find_offsets(data, at, {}, [])
    elif kind in (_Kind.LIST, _Kind.SET):
        size, element, end = _read_list_head(data, at)
        if element in (_Kind.TRUE, _Kind.FALSE):
            end += size
        else:
            for _ in range(size):
                end = _skip(data, end, element)
    elif kind in _FIXED_SIZES:
        end = at + _FIXED_SIZES[kind]
    else:
        raise ValueError(f"Parquet footer: expected a value at byte {at}, got Thrift's type {kind}")
    return end


def _read_list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """The size of the list at `at`, the type of its elements, and where the first begins."""
    size, element = data[at] >> 4, data[at] & 15
    if size < 15:
        return size, element, at + 1
    size, at = _read_varint(data, at + 1)
    return size, element, at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The unsigned integer at `at`, of seven bits per byte, lowest first, and its end."""
    number = shift = 0
    while (byte := data[at]) > 127:
        number |= (byte & 127) << shift
        shift += 7
        at += 1
    return number | byte << shift, at + 1


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    """The signed integer at `at`, in zigzag coding, and its end."""
    number, end = _read_varint(data, at)
    return number >> 1 ^ -(number & 1), end


def _encode_integer(number: int) -> bytes:
    """Encode a non-negative integer in zigzag coding."""
    number, out = number << 1, bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
