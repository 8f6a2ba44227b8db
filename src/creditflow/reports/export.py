"""Export of filtered trajectories as one Parquet file with all columns of the step files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from creditflow.data.table import FORMAT
from creditflow.errors import InputError
from creditflow.reports.index import NUMBER, Filter, Index
from creditflow.reports.search import condition, words_of
from creditflow.runs.sql import TRAINING_STEP, quoted, source_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def export(index: Index, wanted: Filter, text: str, out: Path) -> int:
    """Write the trajectories that `wanted` and the words of `text` select; return their number.

    The file has one row per step, as step files do, with a first column `training_step`; `read_parquet` reads it as a
    batch if no two training steps share an id. Rows are streamed, so memory is bounded. Raises InputError for a query
    without words, and if no trajectory is selected.
    """
    clause, values = wanted.clauses()
    with index.cursor() as cursor:
        cursor.execute(
            f"CREATE OR REPLACE TEMP TABLE chosen AS SELECT number, training_step FROM trajectories WHERE {clause}",
            values,
        )
        if text.strip():
            matches, words = condition(words_of(text))
            if source := _source(index, cursor):
                cursor.execute(
                    f"DELETE FROM chosen WHERE number NOT IN (SELECT {NUMBER} FROM {source} WHERE {matches})", words
                )
        (n,) = cursor.execute("SELECT count(*) FROM chosen").fetchone() or (0,)
        if not n:
            raise InputError("export: no trajectory matches the filter")
        facts = quoted(f'{{"format": {FORMAT}}}')
        cursor.execute(
            f"COPY (SELECT {TRAINING_STEP}, * EXCLUDE (filename, file_row_number) FROM {_source(index, cursor)} "
            f"WHERE {NUMBER} IN (SELECT number FROM chosen)) "
            f"TO {quoted(str(out))} (FORMAT parquet, COMPRESSION zstd, KV_METADATA {{creditflow: {facts}}})"
        )
    return int(n)


_ROWS = ", file_row_number = true"


def _source(index: Index, cursor: DuckDBPyConnection) -> str:
    """The step files of the chosen trajectories as a table; empty without any."""
    rows = cursor.execute("SELECT DISTINCT training_step FROM chosen ORDER BY 1").fetchall()
    files = [index.ledger.file(step) for (step,) in rows]
    return source_of(files, _ROWS) if files else ""
