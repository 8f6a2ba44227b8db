"""Tests of Parquet files whose row groups are encoded in several threads."""

from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from creditflow.data.parallel_parquet import _footer_file, _shift_offsets, _split, write_row_groups

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(max_size=9),
            "ids": st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
            "reals": st.lists(st.none() | st.floats(allow_nan=False), max_size=3),
            "task": st.none() | st.sampled_from(("a" * 300, "b", "c")),
        }
    ),
    max_size=40,
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("ids", pa.list_(pa.int32())),
        ("reals", pa.list_(pa.float64())),
        ("task", pa.dictionary(pa.int32(), pa.string())),
    ]
)
OPTIONS: dict[str, Any] = {
    "use_dictionary": ["task"],
    "column_encoding": {"ids.list.element": "BYTE_STREAM_SPLIT"},
}


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


@given(ROWS, st.integers(1, 50), st.integers(1, 50), st.sampled_from((0, 100, 1 << 20)))
@settings(max_examples=40, deadline=None)
def test_row_groups_are_read_as_the_table(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], size: int, chunk: int, joined_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("groups") / "t.parquet"
    table = pa.concat_tables([table_of(rows[begin : begin + chunk]) for begin in range(0, max(1, len(rows)), chunk)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("creditflow.data.parallel_parquet._JOINED_BYTES", joined_bytes)
        write_row_groups(table, path, {b"k": [1]}, row_group_size=size, **OPTIONS)

    with pq.ParquetFile(path) as file:
        assert file.metadata.metadata == {b"k": b"[1]"}
        assert file.metadata.num_rows == len(rows)
        assert file.read().to_pylist() == rows
        groups = [file.read_row_group(n).to_pylist() for n in reversed(range(file.num_row_groups))]
    assert [row for group in reversed(groups) for row in group] == rows
    assert pl.read_parquet(path).to_dicts() == rows
    assert duckdb.sql(f"select * from '{path}'").to_arrow_table().to_pylist() == rows


def test_file_equals_that_of_one_thread(tmp_path: Path) -> None:
    table = table_of([{"text": f"t{n}", "ids": [n] * 9, "reals": [n / 7], "task": "x" * 999} for n in range(5000)])
    fixed = {"compression": "zstd", "write_statistics": False, "store_schema": False}
    pq.write_table(table, tmp_path / "expected.parquet", row_group_size=450, **fixed, **OPTIONS)

    write_row_groups(table, tmp_path / "threads.parquet", {}, row_group_size=450, **OPTIONS)

    expected, threads = (pq.read_metadata(tmp_path / f"{name}.parquet") for name in ("expected", "threads"))
    assert threads.to_dict() == expected.to_dict() | {"serialized_size": threads.serialized_size}
    pages = [pa.py_buffer((tmp_path / f"{name}.parquet").read_bytes()) for name in ("expected", "threads")]
    assert _split(pages[0])[0] == _split(pages[1])[0]


def test_offsets_above_two_gigabytes_are_shifted(tmp_path: Path) -> None:
    write_row_groups(table_of([{"text": "t", "task": "x"}]), tmp_path / "t.parquet", {}, row_group_size=1, **OPTIONS)
    footer = _split(pa.py_buffer((tmp_path / "t.parquet").read_bytes()))[1]

    before, after = (
        pq.read_metadata(pa.BufferReader(_footer_file(_shift_offsets(footer, shift)))).row_group(0)
        for shift in (0, 1 << 40)
    )

    for i in range(before.num_columns):
        old, new = before.column(i).to_dict(), after.column(i).to_dict()
        moved = {name for name in old if old[name] != new[name]}
        assert moved == {name for name in ("data_page_offset", "dictionary_page_offset") if old[name]}
        assert {new[name] - old[name] for name in moved} == {1 << 40}


@pytest.mark.parametrize("index", [pa.int8(), pa.uint32(), pa.int64()])
@pytest.mark.parametrize("ordered", [False, True])
def test_dictionaries_of_any_index_are_written(tmp_path: Path, index: pa.DataType, ordered: bool) -> None:
    texts = pa.array(["b", None, "a", "b", "c"])
    coded = texts.dictionary_encode().cast(pa.dictionary(index, pa.string()))
    coded = pa.DictionaryArray.from_arrays(coded.indices, coded.dictionary, ordered=ordered)
    chunks = pa.chunked_array([coded, coded.slice(2)])

    write_row_groups(
        pa.table({"task": chunks}), tmp_path / "t.parquet", {}, row_group_size=3, use_dictionary=[], column_encoding={}
    )

    assert pq.read_table(tmp_path / "t.parquet").column("task").to_pylist() == chunks.to_pylist()


def test_long_text_is_stored_in_its_own_row_group(tmp_path: Path) -> None:
    rows = [{"text": "", "ids": [], "reals": [], "task": chr(97 + n // 10) * 100_000} for n in range(200)]

    write_row_groups(table_of(rows), tmp_path / "t.parquet", {}, row_group_size=40, **OPTIONS)

    file = pq.read_metadata(tmp_path / "t.parquet")
    assert [file.row_group(n).column(3).total_uncompressed_size // 100_000 for n in range(5)] == [4] * 5


def test_error_in_a_thread_reaches_the_caller(tmp_path: Path) -> None:
    table = table_of([{"ids": [n]} for n in range(9)])
    with pytest.raises(OSError, match="DELTA_BYTE_ARRAY"):
        write_row_groups(
            table,
            tmp_path / "t.parquet",
            {},
            row_group_size=2,
            use_dictionary=[],
            column_encoding={"ids.list.element": "DELTA_BYTE_ARRAY"},
        )
