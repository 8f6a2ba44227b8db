"""The schema of a batch: what each column holds, and its names in a record and in a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_origin, get_type_hints

import numpy as np

from creditflow.data.trajectory import Bools, Floats, Ints, TokenIds
from creditflow.errors import BatchError


@dataclass(frozen=True, slots=True)
class Per:
    """The properties of a column of a batch, in the annotation of its field."""

    shape: str
    """A letter for each dimension, as in the suffixes of names; O for S + 1."""
    record: str = ""
    """The field of `Trajectory` (N) or `Step` (S, P, T) with the same values; empty: none."""
    in_table: str = ""
    """The column of a table, if its name is not `record`."""
    into: str | tuple[Any, ...] = ""
    """The names that the entries index, or the column that holds them."""
    low: int = 0
    """The lowest index; -1 if an entry may have no name."""
    bounds: str = ""
    """The dimension of the columns that the entries divide among the steps."""
    optional: bool = False
    """Whether the column may be empty, which means that no record has a value."""

    @property
    def table(self) -> str:
        """The column of a table with the same values; empty: none."""
        return self.in_table or self.record

    def names(self, batch: Any) -> Sequence[Any]:
        """The names that the entries index; empty if they index none."""
        return getattr(batch, self.into) if isinstance(self.into, str) and self.into else self.into

    def coded(self, name: str, codes: Ints, names: tuple[str, ...]) -> dict[str, Any]:
        """The column `name` and the column of its names. Raises BatchError for a name that cannot be."""
        if isinstance(self.into, str):
            return {name: codes, self.into: names}
        if unknown := set(names) - set(self.into):
            raise BatchError(f"column {self.table}: expected one of {', '.join(self.into)}, got {unknown.pop()}")
        return {name: np.array([self.into.index(one) for one in names], dtype=np.int64)[codes]}


_TYPES: dict[Any, tuple[np.dtype[Any], str]] = {
    Ints: (np.dtype(np.int64), "signed integers"),
    TokenIds: (np.dtype(np.int32), "signed integers"),
    Floats: (np.dtype(np.float64), "float64 or float32"),
    Bools: (np.dtype(np.bool_), "true or false"),
}


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """One column of a batch."""

    name: str
    dtype: np.dtype[Any] | None
    """The type of an array's entries; None for a sequence of objects."""
    words: str
    """The expected contents of an array."""
    per: Per


@cache
def column_specs() -> tuple[ColumnSpec, ...]:
    """The columns of a batch, in the order of its fields."""
    from creditflow.data.batch import TrajectoryBatch

    hints = get_type_hints(TrajectoryBatch, include_extras=True)
    specs = []
    for name, hint in hints.items():
        if get_origin(hint) is Annotated:
            dtype, words = _TYPES.get(hint.__origin__, (None, ""))
            specs.append(ColumnSpec(name, dtype, words, hint.__metadata__[0]))
    return tuple(specs)
