"""A run as the SQL tables steps, metrics and events, in DuckDB.

DuckDB reads only the columns of a query.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from creditflow._utils.install import needs
from creditflow.runs.reader import Ledger
from creditflow.runs.step_files import expect_readable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def connect(ledger: Ledger) -> DuckDBPyConnection:
    """Connect to an in-memory database with a view of each table of the run; see docs/reference/ledger.md.

    The views cover the files that exist at the call. The connection reads files, writes none, and loads no extensions.
    Raises InputError if duckdb is not installed, DataError if a step file is damaged or of a later version.
    """
    connection = database()
    files = [ledger.file(step) for step in ledger.steps]
    for file in files:
        expect_readable(file)
    if files:
        connection.execute(f"CREATE VIEW steps AS SELECT {TRAINING_STEP}, * EXCLUDE (filename) FROM {source_of(files)}")
    for name in ("metrics", "events"):
        file = ledger.path / f"{name}.jsonl"
        if file.is_file() and file.stat().st_size:
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_json({_quoted(file)}, {_LINES})")
    return connection


# Columns and their types are those of all lines, not of a sample; many columns are not one MAP.
_LINES = "format = 'newline_delimited', ignore_errors = true, sample_size = -1, map_inference_threshold = -1"
TRAINING_STEP = "parse_filename(filename, true)::INTEGER AS training_step"


def database(file: Path | None = None, *, memory: str = "", aside: Path | None = None) -> DuckDBPyConnection:
    """A database that loads no extensions: in memory, or a DuckDB file. Raises InputError if duckdb is not installed.

    `memory`: a limit such as `1GB`, by default that of DuckDB. `aside`: the folder for what exceeds it.
    """
    with needs("a query of runs", "report"):
        import duckdb
    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "threads": 2,
    }
    config |= {"memory_limit": memory} if memory else {}
    config |= {"temp_directory": str(aside)} if aside else {}
    return duckdb.connect(":memory:" if file is None else str(file), config=config)


def source_of(files: Sequence[Path], more: str = "") -> str:
    """SQL expression of step files as a table, each row with its `filename`. `more`: options of read_parquet."""
    listed = ", ".join(map(_quoted, files))
    # With hive_partitioning, a folder named KEY=VALUE would replace the file's column KEY.
    return f"read_parquet([{listed}], union_by_name = true, filename = true, hive_partitioning = false{more})"


def _quoted(file: Path) -> str:
    """A file as an SQL literal, with `*`, `?` and `[` escaped, which DuckDB expands."""
    return "'" + glob.escape(str(file)).replace("'", "''") + "'"
