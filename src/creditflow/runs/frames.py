"""A run's tables as data frames of pandas or Polars, or as Arrow tables.

DuckDB reads the step files; the library of the frames is imported when the first frame is made.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from creditflow.errors import InputError, did_you_mean
from creditflow.runs.reader import Ledger
from creditflow.runs.sql import connect

if TYPE_CHECKING:
    from pyarrow import Table

Library = Literal["pandas", "polars", "arrow"]
"""A library of data frames."""

_LIBRARIES = ("pandas", "polars", "arrow")
_TOKENS = ("prompt_ids", "response_ids", "response_mask", "logprobs", "ref_logprobs")
"""Lists with a value for each token, besides those that end in `_of_tokens`."""
_PLACE = ("training_step", "trajectory_id", "step_id", "index", "agent", "turn")
_CREDIT = (
    *("outcome", "sub_reward", "scored", "failed", "threshold", "gate_open", "harmless"),
    *("own", "received", "shared", "withheld", "credit"),
    *("trained", "baseline", "divisor", "weight", "advantage"),
)


def expect_library(name: str) -> Library:
    """Return the name of an installed library of data frames. Raises InputError for another one."""
    if name not in _LIBRARIES:
        raise InputError(f"frames: expected {', '.join(_LIBRARIES)}, got {name!r}{did_you_mean(name, _LIBRARIES)}")
    if name != "arrow":
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise InputError(
                f"frames: {name} is not installed: pip install 'creditflow[report,{name}]' (frames='arrow' needs none)"
            ) from error
    return name  # type: ignore[return-value]


def as_frame(table: Table, library: Library) -> Any:
    """An Arrow table as a frame of `library`."""
    if library == "pandas":
        return table.to_pandas()
    if library == "polars":
        import polars

        return polars.from_arrow(table)
    return table


def metrics_table(ledger: Ledger) -> Table:
    """One row per training step: `training_step` and each metric of `metrics.jsonl`, null where it was not measured."""
    import pyarrow as pa

    rows = ledger.metrics()
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {"training_step": pa.array([row["step"] for row in rows], pa.int64())}
    columns |= {name: pa.array([_float(row.get(name)) for row in rows], pa.float64()) for name in names}
    return pa.table(columns)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def trajectories_table(ledger: Ledger) -> Table:
    """One row per trajectory, with its outcome and the sums over its steps."""
    connection, columns = _connected(ledger)
    credit = "sum(credit) AS credit" if "credit" in columns else "NULL AS credit"
    withheld = ", sum(abs(withheld)) AS withheld" if "withheld" in columns else ""
    masked = "any_value(masked) AS masked" if "masked" in columns else "NULL AS masked"
    return _table(
        connection,
        f"""
        SELECT training_step, trajectory_id, any_value(uid) AS uid,
               any_value(task ->> '$.data_source') AS data_source,
               any_value(task ->> '$.prompt[-1].content') AS prompt,
               any_value(answer) AS answer, any_value(outcome) AS outcome, any_value(status) AS status, {masked},
               count(step_id) AS steps, {credit}{withheld}
        FROM (SELECT *, row_number() OVER () AS place FROM steps)
        GROUP BY training_step, trajectory_id ORDER BY training_step, min(place)
        """,
    )


def steps_table(ledger: Ledger, *, tokens: bool) -> Table:
    """One row per step: the columns of the step files. `tokens`: with the lists of a value per token."""
    connection, columns = _connected(ledger)
    lists = [name for name in columns if name in _TOKENS or name.endswith("_of_tokens")]
    kept = [name for name in columns if name not in _PLACE and (tokens or name not in lists)]
    return _table(connection, f"SELECT {_listed((*_PLACE, *kept))} FROM steps WHERE step_id IS NOT NULL")


def credit_table(ledger: Ledger) -> Table:
    """One row per step: the terms of its credit and of its advantage. Raises InputError if no credit was assigned."""
    connection, columns = _connected(ledger)
    if "credit" not in columns:
        raise InputError(f"{ledger.path}: expected recorded credit; none was assigned, because too many scores failed")
    chosen = [name for name in _CREDIT if name in columns]
    where = "step_id IS NOT NULL AND credit IS NOT NULL"
    return _table(connection, f"SELECT {_listed((*_PLACE, *chosen))} FROM steps WHERE {where}")


def scores_table(ledger: Ledger) -> Table:
    """One row per score of a step: the reward function, its value in [0, 1] (null after a failure), its status."""
    connection, _ = _connected(ledger)
    return _table(
        connection,
        f"""
        SELECT {_listed(_PLACE)}, function, value,
               CASE code WHEN 1 THEN 'ok' WHEN 2 THEN 'failed' ELSE 'timeout' END AS status, weight
        FROM (SELECT {_listed(_PLACE)}, unnest(score_names) AS function, unnest(score_values) AS value,
                     unnest(score_status) AS code, unnest(score_weights) AS weight FROM steps)
        """,
    )


def _connected(ledger: Ledger) -> tuple[Any, list[str]]:
    """A connection to the run, and the columns of its step files."""
    if not ledger.steps:
        raise InputError(f"{ledger.path}: expected recorded training steps, found none")
    for torn in ledger.torn:
        warnings.warn(f"{torn} is left out: it is incomplete, a crash cut it off", stacklevel=4)
    connection = connect(ledger)
    return connection, [row[0] for row in connection.execute("DESCRIBE steps").fetchall()]


def _table(connection: Any, query: str) -> Table:
    table: Table = connection.sql(query).to_arrow_table()
    return table


def _listed(names: Sequence[str]) -> str:
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)
