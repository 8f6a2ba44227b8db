"""A run as tables for SQL: `steps`, `metrics`, `events`. By DuckDB, which reads only what a query asks for.

Knows names and files; no query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from creditflow.errors import InputError
from creditflow.ledger.reader import Ledger

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def connect(ledger: Ledger) -> DuckDBPyConnection:
    """A connection to a database in memory, with a view of each table of the run; see docs/ledger.md.

    The views are of the files that are there now. It reads files, and neither writes any nor loads extensions. Raises
    InputError where duckdb is not installed.
    """
    try:
        import duckdb
    except ModuleNotFoundError as error:
        raise InputError("duckdb is not installed: pip install 'creditflow[report]'") from error
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False, "threads": 2}
    )
    files = [str(ledger.file(step)) for step in ledger.steps]
    if files:
        listed = ", ".join(map(_quoted, files))
        number = "parse_filename(filename, true)::INTEGER AS training_step"
        connection.execute(
            f"CREATE VIEW steps AS SELECT {number}, * EXCLUDE (filename) "
            f"FROM read_parquet([{listed}], union_by_name = true, filename = true, hive_partitioning = false)"
        )
    for name in ("metrics", "events"):
        file = ledger.path / f"{name}.jsonl"
        if file.is_file() and file.stat().st_size:
            source = f"read_json({_quoted(str(file))}, format = 'newline_delimited', ignore_errors = true)"
            connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {source}")
    return connection


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
