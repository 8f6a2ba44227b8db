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

from creditflow.credit import Assignment, CreditOptions
from creditflow.credit.estimators.base import CriticTerms
from creditflow.credit.history import History
from creditflow.credit.references import recall_properties, recorded_properties
from creditflow.data import TrajectoryBatch
from creditflow.errors import BatchError, ConfigError, DataError

FORMAT = 3
"""Version of `run.json`, of the names in `metrics.jsonl`, and of the columns of step files.

Version 2 has options and columns of credit that were removed, such as those of the prefix baseline. Version 1 (files
without a number are older still) has other names: `val/plays`, the column `stopped`, and more.
"""
_RENAMED = {"stratum": "stratum_in_force", "group": "group_id"}
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
    from creditflow.data import table

    facts: dict[str, Any] = {"version": FORMAT, "training_step": step}
    columns: dict[str, dict[str, NDArray[Any]]] = {"S": {}, "N": {}, "T": {}}
    if assignment is not None:
        options = {f.name: getattr(assignment.options, f.name) for f in fields(CreditOptions)}
        facts |= {"options": options, "singletons": assignment.singletons}
        if assignment.history != History():
            facts["history"] = assignment.history.to_json()
        if assignment.fitted is not None:
            facts["fitted"] = assignment.fitted
        if named := recorded_properties(assignment.options):
            facts["named_by_file"] = named
        for column in _columns():
            values = getattr(assignment.critic if column.of_critic else assignment, column.field, None)
            # Token columns without a value for each token are left out.
            if values is not None and (column.shape != "T" or len(values) == len(batch.response_ids)):
                columns[column.shape][column.name] = values
    table.write_parquet(
        batch, path, columns["S"], trajectory_columns=columns["N"], token_columns=columns["T"], facts=facts
    )


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
        recall_properties(facts.get("named_by_file", {}))
        options = CreditOptions(**{f.name: recorded[f.name] for f in fields(CreditOptions) if f.name in recorded})
        options.validate()
    except ConfigError as error:
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
    critic = None
    if any(column.of_critic and column.name in columns for column in _columns()):
        critic = CriticTerms(**_fields(path, columns, of_critic=True))
    return Recorded(
        step,
        batch,
        Assignment(
            **_fields(path, columns, of_critic=False),
            critic=critic,
            singletons=int(facts["singletons"]),
            fitted=facts.get("fitted"),
            history=History.from_json(facts["history"]) if "history" in facts else History(),
            history_after=None,
            options=options,
            shadow=None,
            batch=batch,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of a step file beside those of the batch."""

    name: str
    field: str
    """The field of `Assignment` or `CriticTerms` with the same values."""
    of_critic: bool

    @property
    def shape(self) -> str:
        """S, N or T: a value for each step, trajectory or token."""
        return self.field[-1]


@cache
def _columns() -> tuple[_Column, ...]:
    """The columns of an assignment, the critic's last. `advantage` is the step's column, not the tokens'."""
    columns = []
    for owner, prefix in ((Assignment, ""), (CriticTerms, "critic_")):
        for stem, shape in (f.name.rsplit("_", 1) for f in fields(owner) if f.name[-2:] in ("_S", "_N", "_T")):
            ending = "_of_tokens" if shape == "T" else ""
            name = f"{prefix}{_RENAMED.get(stem, stem)}{ending}"
            columns.append(_Column(name, f"{stem}_{shape}", bool(prefix)))
    return tuple(columns)


def _fields(path: Path, columns: Mapping[str, NDArray[Any]], *, of_critic: bool) -> dict[str, Any]:
    """The fields of an assignment, or of its critic, from the columns. Raises DataError if a column is missing."""
    values: dict[str, Any] = {}
    for column in _columns():
        if column.of_critic == of_critic:
            values[column.field] = columns.get(column.name, _ABSENT.get(column.field))
            if values[column.field] is None and column.field in _UNFITTED:
                values[column.field] = np.full(len(columns["credit"]), _UNFITTED[column.field])
            if values[column.field] is None and column.field not in _ABSENT:
                raise DataError(f"{path}: expected a column {column.name}, found none")
    return values


_ABSENT = {"advantage_T": None, "unscaled_T": None, "token_term_T": None, "token_reward_T": np.zeros(0)}
"""Fields whose column may be absent, with the value that this means."""
_UNFITTED = {"fold_S": -1, "score_weight_S": np.nan, "harmless_S": np.nan}
"""Fields without a column in files that are older than they are, with the value of each step. A NaN weight means
`w_r`."""
