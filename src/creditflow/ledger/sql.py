"""A run as tables for SQL: `steps`, `metrics`, `events`. By DuckDB, which reads only what a query asks for.

Knows names and files; no query.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from creditflow.errors import InputError
from creditflow.ledger.reader import Ledger
from creditflow.ledger.step_files import expect_readable

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def connect(ledger: Ledger) -> DuckDBPyConnection:
    """A connection to a database in memory, with a view of each table of the run; see docs/ledger.md.

    The views are of the files that are there now. It reads files, and neither writes any nor loads extensions. Raises
    InputError where duckdb is not installed, DataError where a step file is damaged or of a later version.
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
            source = f"read_json({_quoted(str(file))}, format = 'newline_delimited', ignore_errors = true)"
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {source}")
    return connection


TRAINING_STEP = "parse_filename(filename, true)::INTEGER AS training_step"


def database() -> DuckDBPyConnection:
    """An empty one, in memory, that loads no extensions. Raises InputError where duckdb is not installed."""
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise InputError("duckdb is not installed: pip install 'creditflow[report]'") from error
    return duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}
    )


def source_of(files: Sequence[Path], more: str = "") -> str:
    """Step files as a table, each row with its `filename`; `more`: options of read_parquet."""
    listed = ", ".join(_quoted(str(file)) for file in files)
    # Without hive_partitioning: a folder named KEY=VALUE would stand in the place of the file's own column.
    return f"read_parquet([{listed}], union_by_name = true, filename = true, hive_partitioning = false{more})"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
