"""`steps/NNNNNN.parquet`: a training step's trajectories, with every term of their advantages.

Maps an assignment to columns and back; computes no credit. docs/reference/ledger.md has the schema, with its version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from creditflow.credit import Assignment, CreditOptions
from creditflow.credit.estimators.base import CriticTerms
from creditflow.credit.references import recall_properties, recorded_properties
from creditflow.data import TrajectoryBatch
from creditflow.errors import BatchError, ConfigError, DataError
from creditflow.runs.format import FORMAT, expect_format

_RENAMED = {"stratum": "stratum_in_force", "group": "group_id"}
"""New names for fields with the name of a batch column or of an SQL keyword."""
_CRITIC = "critic_"
"""Prefix of a critic's columns."""


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
    if assignment is None:
        table.write_parquet(batch, path, facts=facts)
        return
    options = {f.name: getattr(assignment.options, f.name) for f in fields(CreditOptions)}
    facts |= {"options": options, "singletons": assignment.singletons}
    if named := recorded_properties(assignment.options):
        facts["named_by_file"] = named
    names, given, tokens = _columns(), _arrays(assignment), len(batch.response_ids)
    step_columns, trajectory_columns, token_columns = (
        {name: given[name] for name in of_kind if name in given}
        for of_kind in (names.step, names.trajectory, names.token)
    )
    # Token columns without a value for each token are left out.
    table.write_parquet(
        batch,
        path,
        step_columns,
        trajectory_columns=trajectory_columns,
        token_columns={name: values for name, values in token_columns.items() if len(values) == tokens},
        facts=facts,
    )


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
    given = facts.get("options")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise DataError(f"{path}: options: expected a mapping, got {type(given).__name__}")
    try:
        recall_properties(facts.get("named_by_file", {}))
        options = CreditOptions(**{f.name: given[f.name] for f in fields(CreditOptions) if f.name in given})
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

    names = _columns()
    try:
        batch, beside = table.read_beside(
            path, names.step, trajectory_columns=names.trajectory, token_columns=names.token
        )
    except BatchError as error:
        raise DataError(str(error)) from error
    expect_format(path, beside.facts.get("version", 0))
    step, options = int(beside.facts["training_step"]), options_of(path, beside.facts)
    if options is None:
        return Recorded(step, batch, None)
    columns = {**beside.step, **beside.trajectory, **beside.token}
    return Recorded(step, batch, _assignment(path, batch, options, columns, int(beside.facts["singletons"])))


@dataclass(frozen=True, slots=True)
class _ColumnNames:
    step: tuple[str, ...]
    trajectory: tuple[str, ...]
    token: tuple[str, ...]


def _columns() -> _ColumnNames:
    """The names of an assignment's columns, the critic's last."""
    every = [(f.name, "") for f in fields(Assignment)] + [(f.name, _CRITIC) for f in fields(CriticTerms)]

    def of(suffix: str) -> tuple[str, ...]:
        return tuple(_column(name, prefix) for name, prefix in every if name.endswith(suffix))

    return _ColumnNames(of("_S"), of("_N"), of("_T"))


def _column(field: str, prefix: str = "") -> str:
    """The column name of a field. `advantage` is the step's column; token fields end in `_of_tokens`."""
    stem, suffix = field[:-2], field[-2:]
    stem = _RENAMED.get(stem, stem)
    return f"{prefix}{stem}_of_tokens" if suffix == "_T" else f"{prefix}{stem}"


def _arrays(assignment: Assignment) -> dict[str, NDArray[Any]]:
    """The columns that an assignment has, by name."""
    found = {_column(f.name): getattr(assignment, f.name) for f in fields(assignment) if f.name[-2:] in _SUFFIXES}
    if (critic := assignment.critic) is not None:
        found |= {_column(f.name, _CRITIC): getattr(critic, f.name) for f in fields(critic)}
    return {name: values for name, values in found.items() if values is not None}


_SUFFIXES = ("_S", "_N", "_T")


def _assignment(
    path: Path, batch: TrajectoryBatch, options: CreditOptions, columns: Mapping[str, NDArray[Any]], singletons: int
) -> Assignment:
    def values(field: str, prefix: str = "") -> NDArray[Any]:
        name = _column(field, prefix)
        if name not in columns:
            raise DataError(f"{path}: expected a column {name}, found none")
        return columns[name]

    given: dict[str, Any] = {f.name: values(f.name) for f in fields(Assignment) if f.name[-2:] in ("_S", "_N")}
    of_tokens: dict[str, Any] = {
        f.name: columns.get(_column(f.name)) for f in fields(Assignment) if f.name.endswith("_T")
    }
    critic = None
    if _column("first_S", _CRITIC) in columns:
        no_tokens = {"token_reward_T": columns.get(_column("token_reward_T", _CRITIC), np.zeros(0))}
        critic = CriticTerms(
            **{f.name: values(f.name, _CRITIC) for f in fields(CriticTerms) if f.name not in no_tokens}, **no_tokens
        )
    return Assignment(
        **given, **of_tokens, critic=critic, singletons=singletons, options=options, shadow=None, batch=batch
    )
