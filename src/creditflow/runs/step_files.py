"""`steps/NNNNNN.parquet`: a training step's trajectories, with every term of their advantages.

Maps an assignment to columns and back; computes no credit. docs/reference/ledger.md has the schema, with its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditflow.credit import Advantage, Assignment, Credit, CreditOptions, Fit, Groups, Rewards
from creditflow.credit.history import History
from creditflow.credit.records import CriticTerms
from creditflow.data import TrajectoryBatch
from creditflow.errors import BatchError, ConfigError, DataError

FORMAT = 4
"""Version of `run.json`, of the names in `metrics.jsonl`, and of the columns of step files.

Version 3 has the options of all rules in one list, and gates for rules without gates. Version 2 has options and columns
of credit that were removed, such as those of the prefix baseline. Version 1 (files without a number are older still)
has other names: `val/plays`, the column `stopped`, and more.
"""
_RENAMED = {
    "stratum_S": "stratum_in_force",
    "group_S": "group_id",
    "outcome_S": "outcome_in_force",
    "known_S": "outcome_known",
    "masked_S": "step_masked",
    "total_S": "credit",
}
"""New names for fields with the name of a batch column or of an SQL keyword."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One training step as recorded."""

    step: int
    batch: TrajectoryBatch
    assignment: Assignment | None
    """None if credit was never assigned because too many scores failed."""


def write_step_file(path: Path, step: int, batch: TrajectoryBatch, assignment: Assignment | None) -> None:
    """Write the file of training step `step`; without an assignment, only the trajectories."""
    from creditflow.config.references import recorded_properties, spelled_out
    from creditflow.data import table

    facts: dict[str, Any] = {"version": FORMAT, "training_step": step}
    columns: dict[str, dict[str, NDArray[Any]]] = {"S": {}, "N": {}, "T": {}}
    if assignment is not None:
        facts |= {"options": spelled_out(assignment.options), "singletons": assignment.groups.singletons}
        if assignment.history != History():
            facts["history"] = assignment.history.to_json()
        if assignment.fit is not None:
            facts["fitted"] = assignment.fit.facts
        if named := recorded_properties(assignment.options):
            facts["named_by_file"] = named
        records = _records(assignment)
        for column in _columns():
            record = records[column.record]
            values = None if record is None else getattr(record, column.field)
            # Token columns without a value for each token are left out.
            if values is not None and (column.shape != "T" or len(values) == len(batch.response_ids)):
                columns[column.shape][column.name] = values
    table.write_parquet(batch, path, columns, facts=facts)


def _records(assignment: Assignment) -> dict[type, Any]:
    records = (assignment.rewards, assignment.fit, assignment.credit, assignment.groups, assignment.advantage)
    return dict(zip(_RECORDS, (*records, assignment.advantage.critic), strict=True))


def expect_format(file: Path, version: object) -> None:
    """Raise DataError unless `version` is this one; `file` appears in the message."""
    if version == FORMAT:
        return
    advice = "update creditflow"
    if not isinstance(version, int) or version < FORMAT:
        advice = "read it with the creditflow that wrote it, or train again in a new folder"
    raise DataError(f"{file}: this is a file of version {version}, and creditflow reads version {FORMAT}; {advice}")


def expect_readable(path: Path) -> dict[str, Any]:
    """Return the file's facts. Raises DataError for another version or a file that is not Parquet."""
    from creditflow.data import table

    try:
        facts = table.facts_of(path)
    except BatchError as error:
        raise DataError(str(error)) from error
    expect_format(path, facts.get("version", 0))
    return facts


def options_of(path: Path, facts: Mapping[str, Any]) -> CreditOptions | None:
    """The options in a file's facts; None if credit was never assigned. Raises DataError for unreadable options.

    Loads no file that they name: the recorded properties stand in for its rules.
    """
    recorded = facts.get("options")
    if recorded is None:
        return None
    if not isinstance(recorded, Mapping):
        raise DataError(f"{path}: options: expected a mapping, got {type(recorded).__name__}")
    try:
        if named := facts.get("named_by_file"):
            from creditflow.config.references import recall_properties  # the configuration is slow to import

            recall_properties(named)
        options = CreditOptions(**recorded)
    except (ConfigError, TypeError) as error:
        raise DataError(f"{path}: {error}; import the module that registers what it was made with") from error
    return options


def read_step_file(path: Path) -> Recorded:
    """Read a file of `write_step_file`, with each step's advantage bit for bit.

    `shadow` is not stored, since it can be computed again. Raises DataError for a torn file, another version, and a
    propagation rule that is not registered in this process.
    """
    from creditflow.data import table

    try:
        shapes = {column.name: column.shape for column in _columns()}
        batch, facts, columns = table.read_beside(path, shapes)
    except BatchError as error:
        raise DataError(str(error)) from error
    expect_format(path, facts.get("version", 0))
    step, options = int(facts["training_step"]), options_of(path, facts)
    if options is None:
        return Recorded(step, batch, None)
    made = {kind: _read(path, kind, columns) for kind in _RECORDS if kind is not CriticTerms}
    critic = _read(path, CriticTerms, columns) if "critic_values_of_tokens" in columns else None
    fitted = "fitted" in facts
    assignment = Assignment(
        batch=batch,
        options=options,
        rewards=Rewards(batch=batch, **made[Rewards]),
        fit=Fit(**made[Fit], facts=facts["fitted"]) if fitted else None,
        credit=Credit(**made[Credit]),
        groups=Groups(**made[Groups], singletons=int(facts["singletons"])),
        advantage=Advantage(**made[Advantage], critic=None if critic is None else CriticTerms(**critic)),
        history=History.from_json(facts["history"]) if "history" in facts else History(),
    )
    return Recorded(step, batch, assignment)


_RECORDS: tuple[type, ...] = (Rewards, Fit, Credit, Groups, Advantage, CriticTerms)
"""The records whose fields are columns."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a step file beside those of the batch."""

    name: str
    record: type
    field: str
    is_optional: bool

    @property
    def shape(self) -> str:
        """S, N or T: a value for each step, trajectory or token."""
        return self.field[-1]


@cache
def _columns() -> tuple[_Column, ...]:
    """The columns of an assignment, the critic's last. `advantage` is the step's column, not the tokens'."""
    columns = []
    for record in _RECORDS:
        prefix = "critic_" if record is CriticTerms else ""
        for f in fields(record):
            stem, _, shape = f.name.rpartition("_")
            if shape in ("S", "N", "T") and f.metadata.get("stored", True):
                name = f"{prefix}{_RENAMED.get(f.name, stem)}{'_of_tokens' if shape == 'T' else ''}"
                columns.append(_Column(name, record, f.name, f.default is None or shape == "T"))
    return tuple(columns)


def _read(path: Path, record: type, columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """The fields of a record from the columns. Raises DataError if a column is missing."""
    values: dict[str, Any] = {}
    for column in _columns():
        if column.record is record:
            values[column.field] = columns.get(column.name)
            if values[column.field] is None and not column.is_optional:
                raise DataError(f"{path}: expected a column {column.name}, found none")
    if record is CriticTerms and values["token_reward_T"] is None:
        values["token_reward_T"] = np.zeros(0)
    return values
