"""A run's trajectories, steps and sums as tables, for fast filters and statistics over tens of millions of steps.

Only the columns for filters and sums are read from the step files; texts are not. The tables are a temporary DuckDB
file, since thirty million steps need more memory than a report should take.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from creditflow._utils.files import json_ready
from creditflow._utils.sections import checked
from creditflow.config import PolicyConfig
from creditflow.credit.records import CreditOptions
from creditflow.errors import ConfigError, CreditflowError, DataError, InputError, did_you_mean, first_line
from creditflow.runs import Ledger
from creditflow.runs.sql import TRAINING_STEP, database, source_of
from creditflow.runs.step_files import expect_readable, options_of

TURNS = 60
"""Turns that statistics keep apart; later turns are counted in the last one."""
PER_E = 32
"""Bins of advantages for each factor of e in size."""
_AT_ONCE, _BYTES_AT_ONCE = 64, 8_000_000
"""Step files read per query and their size, so that memory is bounded and new tables appear early."""
_MEMORY = "1GB"
"""Memory of the tables; beyond it they are on disk."""

_SQL = resources.files("creditflow.reports")
_CREDIT = {
    **dict.fromkeys(("scored", "gate_open", "trained"), "BOOLEAN"),
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
    training_step: Annotated[int | None, Field(ge=0, lt=2**31)] = None

    def clauses(self, between: tuple[int, int] | None = None) -> tuple[str, list[Any]]:
        """An SQL condition on `trajectories`, and its values. `between`: first and last training step to look at."""
        if between is None and self.training_step is not None:
            between = (self.training_step, self.training_step)
        part = [] if between is None else [f"number BETWEEN {between[0] << 32} AND {(between[1] + 1 << 32) - 1}"]
        on_step = {"agent = ?": self.agent, "sub_reward >= ?": self.least_score, "sub_reward <= ?": self.most_score}
        conditions = [*part]
        step_conditions = [clause for clause, value in on_step.items() if value is not None]
        values = [value for value in on_step.values() if value is not None]
        if self.outcome is not None:
            conditions.append(_chosen("outcome", self.outcome, _OUTCOMES))
        if self.gate is not None:
            step_conditions.append(_chosen("gate", self.gate, _GATES))
        if step_conditions:  # with `part`, so that only a part of the table is read
            conditions.append(f"number IN (SELECT number FROM steps WHERE {' AND '.join([*part, *step_conditions])})")
        return " AND ".join(conditions) or "true", values


_OUTCOMES = {"right": "ended_right", "wrong": "NOT ended_right", "unscored": "ended_right IS NULL"}
_GATES = {"open": "gate_open", "closed": "NOT gate_open"}


def _chosen(name: str, value: str, clauses: Mapping[str, str]) -> str:
    if value not in clauses:
        raise InputError(f"{name}: expected {' or '.join(clauses)}, got {value!r}{did_you_mean(value, clauses)}")
    return clauses[value]


class Index:
    """The tables and the state of their files. Queries are safe from several threads, also during `refresh`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._aside = tempfile.TemporaryDirectory(prefix="creditflow-index-", ignore_cleanup_errors=True)
        aside = Path(self._aside.name)
        self._connection = database(aside / "index.duckdb", memory=_MEMORY, aside=aside)
        self._connection.execute((_SQL / "tables.sql").read_text())
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
        self.options: dict[int, CreditOptions] = {}
        """The options of each training step with readable credit."""

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
        new = [step for step in reversed(there) if step not in self.taken and step not in self.damaged]
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
        for table in ("trajectories", "sums", "parts", "advantages"):
            self._connection.execute(f"DELETE FROM {table} WHERE training_step IN ({listed})")
        self._connection.execute(f"DELETE FROM steps WHERE (number >> 32) IN ({listed})")
        for kept in (self.taken, self.damaged, self.reasons, self.options):
            for step in steps:
                kept.pop(step, None)

    def _take(self, steps: Mapping[int, Signature]) -> None:
        with self._lock:
            try:
                facts = {step: expect_readable(self.ledger.file(step)) for step in steps}
                self._insert(list(steps))
            except self._errors() as error:
                if self._is_index_error(error):
                    raise CreditflowError(f"the tables of the run cannot be written: {first_line(error)}") from error
                if len(steps) == 1:
                    self.damaged |= steps
                    self.reasons |= {step: _reason(error, self.ledger.file(step)) for step in steps}
                    return
            else:
                for step, stored in facts.items():
                    # The sums need no rule, so a rule that cannot be read does not leave out the file.
                    try:
                        if (options := options_of(self.ledger.file(step), stored)) is not None:
                            self.options[step] = options
                    except DataError as error:
                        self.reasons[step] = _reason(error, self.ledger.file(step))
                self.taken |= steps
                return
        for step, signature in steps.items():  # one of the files is damaged
            self._take({step: signature})

    @staticmethod
    def _errors() -> tuple[type[Exception], ...]:
        import duckdb

        return (duckdb.Error, OSError, DataError)  # a damaged footer raises the plain duckdb.Error

    def _is_index_error(self, error: Exception) -> bool:
        """Whether an error comes from the index's own tables, as on a full disk, and not from a step file."""
        import duckdb

        return isinstance(error, duckdb.TransactionException | duckdb.FatalException) or self._aside.name in str(error)

    def _insert(self, steps: Sequence[int]) -> None:
        source = source_of([self.ledger.file(step) for step in steps], ", file_row_number = true")
        connection = self._connection
        connection.execute("BEGIN")
        try:
            columns = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
            credit = [name if name in columns else f"NULL::{type} AS {name}" for name, type in _CREDIT.items()]
            trained = policies_of(self.ledger)
            # Without a trained policy, the loss includes the steps of all.
            others = [name.replace("'", "''") for name, of in trained.items() if any(trained.values()) and not of]
            parts = {
                "training_step": TRAINING_STEP,
                "number": NUMBER,
                "source": source,
                "sub_reward": "CASE WHEN scored THEN sub_reward END" if "advantage" in columns else "NULL::DOUBLE",
                "credit_columns": ", ".join(credit),
                "untrained": "', '".join(others),
                "last_turn": TURNS - 1,
                "bin": _BIN,
            }
            connection.execute((_SQL / "insert.sql").read_text().format(**parts))
            connection.execute("COMMIT")
        except BaseException:
            with suppress(*self._errors()):  # a failed COMMIT has ended the transaction
                connection.execute("ROLLBACK")
            raise

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query over the tables, as JSON types."""
        with self._connection.cursor() as cursor:
            result = cursor.execute(query, list(values))
            names = [column[0] for column in result.description or ()]
            return [json_ready(dict(zip(names, row, strict=True))) for row in result.fetchall()]

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


ROW = "training_step, trajectory_id, status, outcome, ended_right, n_steps, first_error, prompt"
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


def _reason(error: Exception, file: Path) -> str:
    """The error's first line without the file's name, so that equal reasons of several files are one notice."""
    return first_line(error).removeprefix(f"{file}: ").replace(str(file), file.name)


def policies_of(ledger: Ledger) -> dict[str, bool]:
    """Whether each policy of the run's recipe is trained, by name."""
    config = ledger.run.get("config")
    sections = config.get("policies") if isinstance(config, dict) else None
    return {name: _is_trained(section) for name, section in sections.items()} if isinstance(sections, dict) else {}


def _is_trained(section: object) -> bool:
    try:
        return checked(PolicyConfig, section).trained
    except ConfigError:  # an option of a distribution that is not installed
        return False


def _signature(ledger: Ledger, step: int) -> Signature | None:
    """The file's signature; None if the file no longer exists."""
    try:
        stat = ledger.file(step).stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
