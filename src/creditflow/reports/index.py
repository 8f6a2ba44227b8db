"""A run's trajectories, steps and sums as tables, for fast filters and statistics over tens of millions of steps.

Only the columns for filters and sums are read from the step files; texts are not. The tables are a DuckDB file in the
cache folder, or in memory. The file is derived from the run and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow._utils.files import cache_folder, json_ready
from creditflow.errors import DataError, InputError, did_you_mean, first_line
from creditflow.runs import Ledger
from creditflow.runs.sql import TRAINING_STEP, database, source_of
from creditflow.runs.step_files import expect_readable, options_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

TURNS = 60
"""Turns that statistics keep apart; later turns are counted in the last one."""
PER_E = 32
"""Bins of advantages for each factor of e in size."""
_AT_ONCE, _BYTES_AT_ONCE = 64, 8_000_000
"""Step files read per query and their size, so that memory is bounded and new tables appear early."""
_MEMORY = "1GB"
"""Memory of the tables; beyond it they are on disk."""
STORED_FROM = 50_000_000
"""Bytes of step files from which an index is stored."""
_VERSION = "1"
"""Version of the tables, in a stored index."""
_KEPT_DAYS = 30
"""Days after which an unused index is deleted."""

_SQL = resources.files("creditflow.reports")
_CREDIT = {
    **dict.fromkeys(("scored", "failed", "gate_open", "trained"), "BOOLEAN"),
    **dict.fromkeys(("threshold", "credit", "withheld", "advantage"), "DOUBLE"),
}
"""Columns of a step file with credit, and their SQL types; those of gates exist only for rules with gates."""
NUMBER = f'({TRAINING_STEP.split(" AS ")[0]}::BIGINT << 32) + file_row_number - coalesce("index", 0)'
_BIN = (
    f"CASE WHEN abs(advantage) < 1e-12 THEN 0 ELSE sign(advantage) * (1000 + round(ln(abs(advantage)) * {PER_E})) END"
)
"""SQL expressions of a row's trajectory and of a bin, over step files."""
Signature = tuple[int, int]
"""A file's modification time in ns and its size; after a rollback a file of the same name may differ."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on trajectories; None for no condition. All conditions on steps must hold for the same step."""

    agent: str | None = None
    least_score: float | None = None
    most_score: float | None = None
    gate: str | None = None
    """`open` or `closed`."""
    outcome: str | None = None
    """`right`, `wrong` or `unscored`."""
    training_step: int | None = None

    def clauses(self, between: tuple[int, int] | None = None) -> tuple[str, list[Any]]:
        """An SQL condition on `trajectories`, and its values. `between`: first and last training step to look at."""
        on_trajectory = {"training_step = ?": self.training_step}
        on_step = {
            "agent = ?": self.agent,
            "sub_reward >= ?": self.least_score,
            "sub_reward <= ?": self.most_score,
        }
        conditions = [clause for clause, value in on_trajectory.items() if value is not None]
        step_conditions = [clause for clause, value in on_step.items() if value is not None]
        values = [value for value in (*on_trajectory.values(), *on_step.values()) if value is not None]
        if self.outcome is not None:
            conditions.append(_chosen("outcome", self.outcome, _OUTCOMES))
        if self.gate is not None:
            step_conditions.append(_chosen("gate", self.gate, _GATES))
        if step_conditions:
            if between is None and self.training_step is not None:
                between = (self.training_step, self.training_step)
            if between is not None:  # so that only a part of the table is read
                step_conditions.append(f"number BETWEEN {between[0] << 32} AND {(between[1] + 1 << 32) - 1}")
            conditions.append(f"number IN (SELECT number FROM steps WHERE {' AND '.join(step_conditions)})")
        if between is not None:
            conditions.append(f"number BETWEEN {between[0] << 32} AND {(between[1] + 1 << 32) - 1}")
        return " AND ".join(conditions) or "true", values


_OUTCOMES = {"right": "ended_right", "wrong": "NOT ended_right", "unscored": "ended_right IS NULL"}
_GATES = {"open": "gate_open", "closed": "NOT gate_open"}


def _chosen(name: str, value: str, clauses: Mapping[str, str]) -> str:
    if value not in clauses:
        raise InputError(f"{name}: expected {' or '.join(clauses)}, got {value!r}{did_you_mean(value, clauses)}")
    return clauses[value]


class Index:
    """The tables and the state of their files. Queries are safe from several threads, also during `refresh`."""

    def __init__(self, ledger: Ledger, file: Path | None = None, *, temporary: bool = False) -> None:
        """`file`: a DuckDB file of this index, made if it is missing; None for tables in memory.

        `temporary`: keep the tables in a file that is deleted with the index.
        """
        self.ledger = ledger
        self._aside = tempfile.TemporaryDirectory(prefix="creditflow-index-", ignore_cleanup_errors=True)
        self._connection = self._connected(Path(self._aside.name) / "index.duckdb" if temporary else file)
        self._lock = threading.Lock()
        """Held by the one writer."""
        self.taken: dict[int, Signature] = {}
        """Training steps in the tables, with the signatures of their files."""
        self.damaged: dict[int, Signature] = {}
        """Training steps with an unreadable file: damaged, or of a later version."""
        self.reasons: dict[int, str] = {}
        """The reason for an unreadable file or, in `taken`, for credit that cannot be explained, by training step."""
        self.has_read = threading.Event()
        """Set after the newest training step has been read, and at once for a run without training steps."""
        self.ends = threading.Event()
        """Set to end `refresh` after the files that it is reading."""
        self.rules: dict[int, str] = {}
        """`algorithm.propagation` of each training step with readable credit."""
        for step, modified, size, damaged, rule, reason in self._connection.execute("FROM files").fetchall():
            (self.damaged if damaged else self.taken)[step] = (modified, size)
            self.rules |= {} if rule is None else {step: rule}
            self.reasons |= {} if reason is None else {step: reason}

    def _connected(self, file: Path | None) -> DuckDBPyConnection:
        connection = database(file, memory=_MEMORY, aside=Path(self._aside.name))
        if not connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'made_by'").fetchall():
            connection.execute((_SQL / "tables.sql").read_text())
            connection.execute("INSERT INTO made_by VALUES (?)", [_made_by()])
        return connection

    @classmethod
    def stored(cls, ledger: Ledger) -> Index:
        """The index of a long run in the cache folder; that of a short run in memory, since it is read in seconds.

        The file is temporary while another process holds the stored one, or without such a folder. An index of another
        version, or one that cannot be read, is made again.
        """
        if sum(signature[1] for step in ledger.steps if (signature := _signature(ledger, step))) < STORED_FROM:
            return cls(ledger)
        folder = cache_folder() / "index"
        file = folder / f"{hashlib.sha256(str(ledger.path.resolve()).encode()).hexdigest()[:24]}.duckdb"
        for _ in range(2):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _delete_unused(folder, file)
                index = cls(ledger, file)
            except cls._errors() as error:
                if isinstance(error, OSError) or _is_held(error):
                    break
                _remove(file)
                continue
            if index.ask("SELECT version FROM made_by") == [{"version": _made_by()}]:
                return index
            index.close()
            _remove(file)
        return cls(ledger, temporary=True)

    def close(self) -> None:
        """Close the tables and remove temporary files."""
        with self._lock:
            self._connection.close()
        self._aside.cleanup()

    def refresh(self, ledger: Ledger) -> None:
        """Read the new step files, newest first; forget those that a rollback removed or replaced."""
        there = {step: signature for step in ledger.steps if (signature := _signature(ledger, step)) is not None}
        with self._lock:
            self.ledger = ledger
            self._forget([step for step, old in {**self.taken, **self.damaged}.items() if there.get(step) != old])
        new = [step for step in reversed(ledger.steps) if step in there and step not in {**self.taken, **self.damaged}]
        for steps in _portions(new, there):
            if self.ends.is_set():
                break
            self._take({step: there[step] for step in steps})
            self.has_read.set()
        self.has_read.set()

    def _forget(self, steps: Sequence[int]) -> None:
        if not steps:
            return
        listed = ", ".join(map(str, steps))
        for table in ("files", "trajectories", "sums", "parts", "advantages"):
            self._connection.execute(f"DELETE FROM {table} WHERE training_step IN ({listed})")
        self._connection.execute(f"DELETE FROM steps WHERE (number >> 32) IN ({listed})")
        for kept in (self.taken, self.damaged, self.reasons, self.rules):
            for step in steps:
                kept.pop(step, None)

    def _take(self, steps: Mapping[int, Signature]) -> None:
        with self._lock:
            try:
                facts = {step: expect_readable(self.ledger.file(step)) for step in steps}
                self._insert(list(steps))
            except self._errors() as error:
                if len(steps) == 1:
                    self.damaged |= steps
                    self.reasons |= {step: _reason(error, self.ledger.file(step)) for step in steps}
                    self._record(steps, damaged=True)
                    return
            else:
                for step, stored in facts.items():
                    # The sums need no rule, so a rule that cannot be read does not leave out the file.
                    try:
                        if (options := options_of(self.ledger.file(step), stored)) is not None:
                            self.rules[step] = options.propagation.name
                    except DataError as error:
                        self.reasons[step] = _reason(error, self.ledger.file(step))
                self._record(steps, damaged=False)
                self.taken |= steps
                return
        for step, signature in steps.items():  # one of the files is damaged
            self._take({step: signature})

    def _record(self, steps: Mapping[int, Signature], *, damaged: bool) -> None:
        rows = [(step, *steps[step], damaged, self.rules.get(step), self.reasons.get(step)) for step in steps]
        self._connection.executemany("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)

    @staticmethod
    def _errors() -> tuple[type[Exception], ...]:
        import duckdb

        return (duckdb.Error, OSError, DataError)  # a damaged footer raises the plain duckdb.Error

    def _insert(self, steps: Sequence[int]) -> None:
        source = source_of([self.ledger.file(step) for step in steps], ", file_row_number = true")
        connection = self._connection
        connection.execute("BEGIN")
        try:
            columns = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
            has_credit = "advantage" in columns
            credit = [name if name in columns else f"NULL::{type} AS {name}" for name, type in _CREDIT.items()]
            parts = {
                "training_step": TRAINING_STEP,
                "number": NUMBER,
                "source": source,
                "sub_reward": "CASE WHEN scored THEN sub_reward END" if has_credit else "NULL::DOUBLE",
                "credit_names": ", ".join(_CREDIT),
                "credit_columns": ", ".join(credit),
                "last_turn": TURNS - 1,
                "bin": _BIN,
            }
            connection.execute((_SQL / "insert.sql").read_text().format(**parts))
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query over the tables, as JSON types."""
        with self._connection.cursor() as cursor:
            result = cursor.execute(query, list(values))
            names = [column[0] for column in result.description or ()]
            return [json_ready(dict(zip(names, row, strict=True))) for row in result.fetchall()]

    def cursor(self) -> DuckDBPyConnection:
        """A separate connection to the tables; the caller closes it."""
        return self._connection.cursor()

    def page(self, where: Filter, offset: int, limit: int) -> dict[str, Any]:
        """`{total, trajectories: [...]}`, the newest training step first, in the order of its file."""
        clause, values = where.clauses()
        total = self.ask(f"SELECT count(*) AS n FROM trajectories WHERE {clause}", values)[0]["n"]
        trajectories = self.ask(
            f"""
            WITH page AS (
                SELECT number FROM trajectories WHERE {clause} ORDER BY training_step DESC, number LIMIT ? OFFSET ?
            )
            SELECT {ROW} FROM page JOIN trajectories t USING (number) LEFT JOIN tasks USING (task_key)
            ORDER BY training_step DESC, number
            """,
            [*values, limit, offset],
        )
        return {"total": total, "trajectories": trajectories}

    def tasks(self) -> dict[int, tuple[int, float]]:
        """The trajectories with an outcome of each task, and the share that ended right, by the task's key."""
        rows = self.ask(
            "SELECT task_key, count(*) AS n, avg(ended_right::INT) AS share FROM trajectories "
            "WHERE ended_right IS NOT NULL AND task_key IN (SELECT task_key FROM tasks) GROUP BY task_key"
        )
        return {row["task_key"]: (row["n"], row["share"]) for row in rows}

    def of_task(self, task_key: int, limit: int) -> list[dict[str, Any]]:
        """The newest trajectories of a task, as rows of the list."""
        return self.ask(
            f"SELECT {ROW} FROM trajectories LEFT JOIN tasks USING (task_key) WHERE task_key = ? "
            "ORDER BY training_step DESC, number LIMIT ?",
            [task_key, limit],
        )

    def task_of(self, trajectory_id: str, training_step: int) -> int | None:
        """The key of a trajectory's task; None for an unknown trajectory."""
        rows = self.ask(
            "SELECT task_key FROM trajectories WHERE trajectory_id = ? AND training_step = ?",
            [trajectory_id, training_step],
        )
        return rows[0]["task_key"] if rows else None


ROW = "training_step, trajectory_id, uid, status, outcome, ended_right, n_steps, first_error, prompt"
"""Columns of a row of the list, over `trajectories` and `tasks`."""


def _portions(steps: Sequence[int], there: Mapping[int, Signature]) -> Iterator[list[int]]:
    """Split training steps by number and size of their files; the first is alone, since users see it first."""
    portion: list[int] = []
    size = 0
    for place, step in enumerate(steps):
        portion.append(step)
        size += there[step][1]
        if place == 0 or len(portion) == _AT_ONCE or size >= _BYTES_AT_ONCE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _made_by() -> str:
    import duckdb

    return f"{_VERSION} duckdb {duckdb.__version__}"


def _is_held(error: Exception) -> bool:
    """Whether a database file cannot be opened because it is open: in another process, or in this one."""
    import duckdb

    return isinstance(error, duckdb.ConnectionException) or "Could not set lock on file" in str(error)


def _remove(file: Path) -> None:
    for path in (file, file.with_name(f"{file.name}.wal")):
        path.unlink(missing_ok=True)


def _delete_unused(folder: Path, own: Path) -> None:
    """Delete indexes that were not opened for a month, and mark this one as opened."""
    oldest = time.time() - _KEPT_DAYS * 86_400
    for file in folder.glob("*.duckdb"):
        if file != own and file.stat().st_mtime < oldest:
            _remove(file)
    if own.exists():
        own.touch()


def _reason(error: Exception, file: Path) -> str:
    """The error's first line without the file's name, so that equal reasons of several files are one notice."""
    return first_line(error).removeprefix(f"{file}: ").replace(str(file), file.name)


def _signature(ledger: Ledger, step: int) -> Signature | None:
    """The file's signature; None if the file no longer exists."""
    try:
        stat = ledger.file(step).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
