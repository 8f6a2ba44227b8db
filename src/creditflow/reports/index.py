"""A run's trajectories and steps as two small in-memory tables, for fast filters and sums over a million steps.

Only the columns for filters and sums are read from the step files; texts are not. The views `trajectories` and `steps`
leave out branches; the tables `all_trajectories` and `all_steps` contain them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from creditflow._utils.files import json_ready
from creditflow.errors import DataError, InputError, did_you_mean, first_line
from creditflow.runs import Ledger
from creditflow.runs.sql import BRANCH_OF, TRAINING_STEP, database, source_of
from creditflow.runs.step_files import expect_readable, options_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_AT_ONCE = 64
"""Step files read per query, so that other threads can query in between."""

_SQL = resources.files("creditflow.reports")
_CREDIT = ("scored", "failed", "gate_open", "threshold", "trained", "credit", "withheld", "advantage")
"""Columns of a step file with credit."""
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
    branches: str | None = None
    """`with` or `without`."""

    def clauses(self) -> tuple[str, list[Any]]:
        """An SQL condition on `trajectories`, and its values."""
        on_trajectory = {"training_step = ?": self.training_step}
        on_step = {
            "agent = ?": self.agent,
            "scored AND sub_reward >= ?": self.least_score,
            "scored AND sub_reward <= ?": self.most_score,
        }
        conditions = [clause for clause, value in on_trajectory.items() if value is not None]
        step_conditions = [clause for clause, value in on_step.items() if value is not None]
        values = [value for value in (*on_trajectory.values(), *on_step.values()) if value is not None]
        if self.outcome is not None:
            conditions.append(_chosen("outcome", self.outcome, _OUTCOMES))
        if self.branches is not None:
            conditions.append(_chosen("branches", self.branches, _BRANCHES))
        if self.gate is not None:
            step_conditions.append(_chosen("gate", self.gate, _GATES))
        if step_conditions:
            steps = f"SELECT (training_step, trajectory_id) FROM steps WHERE {' AND '.join(step_conditions)}"
            conditions.append(f"(training_step, trajectory_id) IN ({steps})")
        return " AND ".join(conditions) or "true", values


_OUTCOMES = {"right": "ended_right", "wrong": "NOT ended_right", "unscored": "ended_right IS NULL"}
_BRANCHES = {"with": "n_branches > 0", "without": "n_branches = 0"}
_GATES = {"open": "gate_open", "closed": "NOT gate_open"}


def _chosen(name: str, value: str, clauses: Mapping[str, str]) -> str:
    if value not in clauses:
        raise InputError(f"{name}: expected {' or '.join(clauses)}, got {value!r}{did_you_mean(value, clauses)}")
    return clauses[value]


class Index:
    """The tables and the state of their files. Queries are safe from several threads."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._connection: DuckDBPyConnection = database()
        self._connection.execute((_SQL / "tables.sql").read_text())
        self._lock = threading.Lock()
        self.taken: dict[int, Signature] = {}
        """Training steps in the tables, with the signatures of their files."""
        self.damaged: dict[int, Signature] = {}
        """Training steps with an unreadable file: damaged, or of a later version."""
        self.reasons: dict[int, str] = {}
        """The reason for an unreadable file or, in `taken`, for credit that cannot be explained, by training step."""
        self.has_read = threading.Event()
        """Set after the newest training step has been read, and at once for a run without training steps."""
        self.rules: dict[int, str] = {}
        """`algorithm.propagation` of each training step with readable credit."""

    def refresh(self, ledger: Ledger) -> None:
        """Read the new step files, newest first; start over if the run was rolled back or a file was replaced."""
        there = {step: signature for step in ledger.steps if (signature := _signature(ledger, step)) is not None}
        with self._lock:
            self.ledger = ledger
            if any(there.get(step) != signature for step, signature in self.taken.items()):
                self._connection.execute("DELETE FROM all_trajectories; DELETE FROM all_steps")
                self.taken.clear()
            self.damaged = {step: signature for step, signature in self.damaged.items() if there.get(step) == signature}
            for kept in (self.reasons, self.rules):
                for step in kept.keys() - self.taken.keys() - self.damaged.keys():
                    del kept[step]
        new = [step for step in reversed(ledger.steps) if step in there and step not in {**self.taken, **self.damaged}]
        starts = [0, *range(1, len(new), _AT_ONCE), len(new)]  # the newest alone: users see it first
        for start, stop in itertools.pairwise(starts):
            if new[start:stop]:
                self._take({step: there[step] for step in new[start:stop]})
                self.has_read.set()
        self.has_read.set()

    def _take(self, steps: Mapping[int, Signature]) -> None:
        with self._lock:
            try:
                self._insert(list(steps))
            except self._errors() as error:
                if len(steps) == 1:
                    self.damaged |= steps
                    self.reasons |= {step: _reason(error, self.ledger.file(step)) for step in steps}
                    return
            else:
                self.taken |= steps
                return
        for step, signature in steps.items():  # one of the files is damaged
            self._take({step: signature})

    @staticmethod
    def _errors() -> tuple[type[Exception], ...]:
        import duckdb

        return (duckdb.Error, OSError, DataError)  # a damaged footer raises the plain duckdb.Error

    def _insert(self, steps: Sequence[int]) -> None:
        files = [self.ledger.file(step) for step in steps]
        facts = [expect_readable(file) for file in files]
        source = source_of(files, ", file_row_number = true")
        connection = self._connection
        connection.execute("BEGIN")
        try:
            columns = [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {source}").fetchall()]
            has_credit = "advantage" in columns
            insert = (
                (_SQL / "insert.sql")
                .read_text()
                .format(
                    training_step=TRAINING_STEP,
                    source=source,
                    branch_of=BRANCH_OF,
                    sub_reward="CASE WHEN scored THEN sub_reward END" if has_credit else "NULL",
                    credit_columns=", ".join(_CREDIT if has_credit else (f"NULL AS {name}" for name in _CREDIT)),
                )
            )
            connection.execute(insert)
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        for step, file, stored in zip(steps, files, facts, strict=True):
            # The sums need no rule, so a rule that cannot be read does not leave out the file.
            try:
                if (options := options_of(file, stored)) is not None:
                    self.rules[step] = options.propagation
            except DataError as error:
                self.reasons[step] = _reason(error, file)

    def ask(self, query: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query over `trajectories` and `steps`, as JSON types."""
        with self._lock:
            cursor = self._connection.execute(query, list(values))
            names = [column[0] for column in cursor.description or ()]
            return [json_ready(dict(zip(names, row, strict=True))) for row in cursor.fetchall()]

    def page(self, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
        """`{total, trajectories: [...]}` of rollouts, the newest training step first, in the order of its file."""
        clause, values = wanted.clauses()
        total = self.ask(f"SELECT count(*) AS n FROM trajectories WHERE {clause}", values)[0]["n"]
        trajectories = self.ask(
            f"SELECT * EXCLUDE (place, task_key) FROM trajectories WHERE {clause} "
            "ORDER BY training_step DESC, place LIMIT ? OFFSET ?",
            [*values, limit, offset],
        )
        return {"total": total, "trajectories": trajectories}


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
